"""A model's serving tokenizer with what training needs on top, and nothing else changed.

Added are a padding token, blocks of further tokens (control tokens, semantic ids), and rows up to a round number. Text
that names none of the new tokens keeps its ids: normalizer, pre-tokenizer, vocabulary, merges and decoder are taken
over as they stand in `tokenizer.json`. `proof` shows that it is so.

Ids are stable. New tokens stand behind the highest id there is, in the order in which they were added; adding a block
again gives the same ids, and further blocks move no earlier one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import TokenIds

_LAYOUT = "training_tokenizer.json"
_GENERATION = "generation_config.json"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Block:
    """New tokens with neighbouring ids, under a name."""

    name: str
    first_id: int
    tokens: tuple[str, ...]

    @property
    def ids(self) -> range:
        """Of its tokens, in their order."""
        return range(self.first_id, self.first_id + len(self.tokens))


@dataclass(frozen=True, slots=True)
class TrainingTokenizer:
    """A serving tokenizer and what was added to it. Use `TrainingTokenizer.load`.

    >>> training = TrainingTokenizer.load("path/to/model", pad="<|pad|>")              # doctest: +SKIP
    >>> training = training.with_block("item", codebook("item", [256, 256, 256]))      # doctest: +SKIP
    >>> training.block("item").ids                                                     # doctest: +SKIP
    range(151670, 152438)
    """

    tokenizer: Tokenizer
    """Everything of it works with the new tokens as with the old ones: the renderer, for example."""
    source: bytes
    """Its `tokenizer.json`."""
    folder: Path
    """Where the serving tokenizer is from."""
    serving_sha256: str
    """Of the serving tokenizer's `tokenizer.json`."""
    pad_token: str
    pad_id: int
    blocks: tuple[Block, ...]
    multiple_of: int
    known: npt.NDArray[np.bool_]
    """Which ids are tokens, bool [vocab_size]. Where it is False, set logits to minus infinity when sampling."""

    @classmethod
    def load(
        cls, folder: str | Path, *, pad: str | None = None, multiple_of: int | None = None, pad_is_eos: bool = False
    ) -> TrainingTokenizer:
        """Load the tokenizer of a model folder, or of one that `save` wrote, with its blocks.

        `pad` is the padding token: one that there is, or a new one; by default the one that the folder's configuration
        names. It is never an end-of-sequence token, for masks made from padding would leave ends untrained, unless you
        say with `pad_is_eos` that yours are not made so. `multiple_of` is what the number of rows is rounded up to: by
        default what was saved, or 64.

        Raises `InvalidRequest` if there is no padding token, or it is an end-of-sequence token, and
        `TokenizerUnusable` as `Tokenizer.load`.
        """
        folder = Path(folder)
        tokenizer = Tokenizer.load(folder)
        source = (folder / "tokenizer.json").read_bytes()
        layout = _read_json(folder / _LAYOUT) or {"serving_sha256": tokenizer.sha256, "multiple_of": 64, "blocks": []}
        multiple_of = layout["multiple_of"] if multiple_of is None else multiple_of
        if multiple_of < 1:
            raise InvalidRequest(f"rows rounded up to a multiple of {multiple_of}: expected 1 or more", "multiple_of")
        loaded = cls(
            tokenizer=tokenizer,
            source=source,
            folder=folder,
            serving_sha256=layout["serving_sha256"],
            pad_token="",
            pad_id=-1,
            blocks=tuple(Block(one["name"], one["first_id"], tuple(one["tokens"])) for one in layout["blocks"]),
            multiple_of=multiple_of,
            known=_known(json.loads(source), multiple_of),
        )
        loaded._check_blocks()
        return loaded._with_pad(pad or tokenizer.special_tokens.get("pad_token"), pad_is_eos)

    @property
    def vocab_size(self) -> int:
        """Rows of an embedding for it: `tokenizer.vocab_size`, rounded up to the multiple."""
        return len(self.known)

    def block(self, name: str) -> Block:
        """The block of that name. Raises `InvalidRequest` if there is none."""
        for block in self.blocks:
            if block.name == name:
                return block
        names = ", ".join(block.name for block in self.blocks) or "none"
        raise InvalidRequest(f"there is no block {name!r} of tokens; there are: {names}")

    def with_block(self, name: str, tokens: Sequence[str], *, special: bool = False) -> TrainingTokenizer:
        """The tokenizer with these tokens added, or the same if it has that block already.

        `special` tokens are left out by decoders that skip special tokens. A token is found in text wherever it is
        spelled, so no serving text should spell it: `proof.prove` over your texts says so.

        Raises `InvalidRequest` for a token that exists, that holds another control token, or that text spells by
        accident (without any character but letters, digits and white space), and for a block of that name with other
        tokens.
        """
        for block in self.blocks:
            if block.name == name:
                if block.tokens == tuple(tokens):
                    return self
                raise InvalidRequest(f"there is a block {name!r} with other tokens: give the new ones another name")
        spec = json.loads(self.source)
        first = self.tokenizer.vocab_size
        _check_new(tokens, spec, self.tokenizer)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        spec["added_tokens"] = [
            *spec.get("added_tokens", []),
            *({"id": first + n, "content": token, **flags} for n, token in enumerate(tokens)),
        ]
        source = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
        made = replace(
            self,
            tokenizer=self.tokenizer.with_files(source, self.tokenizer.config),
            source=source,
            known=_known(spec, self.multiple_of),
            blocks=(*self.blocks, Block(name, first, tuple(tokens))),
        )
        made._check_blocks()
        return made

    def check_ids(self, ids: TokenIds) -> None:
        """Raise `InvalidRequest` if any of `ids` is no token: negative, or a row of the embedding without one."""
        given = np.asarray(ids)
        outside = (given < 0) | (given >= self.vocab_size)
        outside[~outside] = ~self.known[given[~outside]]
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise InvalidRequest(
                f"id {given[at]} at position {at} is no token: there are {self.tokenizer.vocab_size}, and rows up to "
                f"{self.vocab_size} are padding. An engine that samples such ids needs its logits masked by `known`"
            )

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, and the layout of the blocks.

        Chat template and generation config come along, the latter with this padding token. The class is written as
        `PreTrainedTokenizerFast`, for which `AutoTokenizer` takes `tokenizer.json` as it stands; the classes of models
        may put other parts in its place.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        spec = json.loads(self.source)
        tokens = {
            **{key: text for key, text in self.tokenizer.special_tokens.items() if key.split("_")[0] in _MAPPED},
            "pad_token": self.pad_token,
        }
        config = {
            **self.tokenizer.config,
            **tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in spec["added_tokens"]
            },
        }
        layout = {
            "serving_sha256": self.serving_sha256,
            "multiple_of": self.multiple_of,
            "vocab_size": self.vocab_size,
            "pad_id": self.pad_id,
            "blocks": [asdict(block) for block in self.blocks],
        }
        if (self.folder / _TEMPLATE).is_file() and self.folder.resolve() != folder.resolve():
            shutil.copyfile(self.folder / _TEMPLATE, folder / _TEMPLATE)
        if (self.folder / _GENERATION).is_file():
            generation = {**_read_json(self.folder / _GENERATION), "pad_token_id": self.pad_id}
            _write(folder / _GENERATION, _json_bytes(generation))
        _write(folder / "tokenizer_config.json", _json_bytes(config))
        _write(folder / "special_tokens_map.json", _json_bytes(tokens))
        _write(folder / _LAYOUT, _json_bytes(layout))
        _write(folder / "tokenizer.json", self.source)

    def _with_pad(self, pad: str | None, pad_is_eos: bool) -> TrainingTokenizer:
        if pad is None:
            raise InvalidRequest(
                f"the tokenizer in {self.folder} names no padding token: give one with `pad`, such as '<|pad|>'", "pad"
            )
        made = self
        if self.tokenizer.added_token(pad) is None:
            made = self.with_block("pad", [pad], special=True)
        token = made.tokenizer.added_token(pad)
        if token is None or token.is_space:
            raise InvalidRequest(f"{pad!r} can't be a padding token: it is white space", "pad")
        if token.id in self.tokenizer.eos_ids and not pad_is_eos:
            raise InvalidRequest(
                f"the padding token {pad!r} ends sequences too: masks that are made from padding would leave the end "
                "untrained. Give another `pad`, such as '<|pad|>', or `pad_is_eos=True` if your masks are not made so",
                "pad",
            )
        config = {**made.tokenizer.config, "pad_token": pad}
        tokenizer = made.tokenizer.with_files(made.source, config)
        return replace(made, tokenizer=tokenizer, pad_token=pad, pad_id=token.id)

    def _check_blocks(self) -> None:
        """Raise unless every new token has the id that it was given."""
        for block in self.blocks:
            for token_id, token in zip(block.ids, block.tokens, strict=True):
                found = self.tokenizer.added_token(token)
                ids = self.tokenizer.encode_plain(token)
                if found is None or found.id != token_id or ids != [token_id]:
                    raise TokenizerUnusable(
                        f"token {token!r} of block {block.name!r} should have id {token_id}, the tokenizer gives it "
                        f"{ids}: ids of added tokens must follow each other without gaps"
                    )


def codebook(name: str, sizes: Sequence[int]) -> list[str]:
    """Spellings of semantic-id tokens: for each codebook as many as it has entries, first codebook first.

    >>> codebook("item", [2, 2])
    ['<|item_0_0|>', '<|item_0_1|>', '<|item_1_0|>', '<|item_1_1|>']
    """
    return [f"<|{name}_{book}_{entry}|>" for book, size in enumerate(sizes) for entry in range(size)]


_MAPPED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Of the special tokens those that a special_tokens_map.json has."""


def _known(spec: Mapping[str, Any], multiple_of: int) -> npt.NDArray[np.bool_]:
    vocab = spec["model"]["vocab"]
    ids = [*vocab.values()] if isinstance(vocab, Mapping) else [*range(len(vocab))]
    ids += [token["id"] for token in spec.get("added_tokens", [])]
    known = np.zeros(-(-(max(ids) + 1) // multiple_of) * multiple_of, np.bool_)
    known[ids] = True
    return known


def _check_new(tokens: Sequence[str], spec: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    if not tokens or len(set(tokens)) < len(tokens):
        raise InvalidRequest("a block of tokens is empty, or has one twice")
    vocab = spec["model"]["vocab"]
    pieces = vocab if isinstance(vocab, Mapping) else {entry[0] for entry in vocab}
    for token in tokens:
        if tokenizer.added_token(token) is not None or token in pieces:
            raise InvalidRequest(f"token {token!r} is in the vocabulary already")
        if any(known.content in token for known in tokenizer.added_tokens if not known.is_space):
            raise InvalidRequest(f"token {token!r} holds another control token: texts with that one would change")
        if all(char.isalnum() or char.isspace() for char in token):
            raise InvalidRequest(
                f"token {token!r} is spelled as words are, so ordinary text would change: write it '<|{token}|>'"
            )


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)
