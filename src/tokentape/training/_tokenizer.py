"""Add tokens for training to a model's serving tokenizer, and change nothing else.

These are a padding token, blocks of tokens (control tokens, semantic ids), and rows up to a round number. New tokens
get ids after the highest id, in order, and ids never change later. `prove` checks that old text keeps its ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape._durable import write_durably
from tokentape.chat._tokenizer import Tokenizer
from tokentape.chat._tokenizer_files import read_json
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import TokenIds

_LAYOUT = "training_tokenizer.json"
_GENERATION = "generation_config.json"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A named block of new tokens with consecutive ids."""

    name: str
    first_id: int
    tokens: tuple[str, ...]

    @property
    def ids(self) -> range:
        """The ids of its tokens, in order."""
        return range(self.first_id, self.first_id + len(self.tokens))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The content of `training_tokenizer.json`."""

    multiple_of: int
    blocks: tuple[TokenBlock, ...]


@dataclass(frozen=True)
class TrainingTokenizer:
    """A serving tokenizer with added tokens. Use `TrainingTokenizer.load`.

    >>> training = TrainingTokenizer.load("path/to/model", pad="<|pad|>")              # doctest: +SKIP
    >>> training = training.with_block("item", codebook("item", [256, 256, 256]))      # doctest: +SKIP
    >>> training.block("item").ids                                                     # doctest: +SKIP
    range(151670, 152438)
    """

    tokenizer: Tokenizer
    """The tokenizer with the new tokens, for a renderer for example."""
    source: bytes
    """Its `tokenizer.json`."""
    folder: Path
    """The folder of the serving tokenizer."""
    multiple_of: int
    blocks: tuple[TokenBlock, ...]
    pad_token: str = ""
    pad_id: int = -1

    @classmethod
    def load(
        cls, folder: str | Path, *, pad: str | None = None, multiple_of: int | None = None, pad_is_eos: bool = False
    ) -> TrainingTokenizer:
        """Load the tokenizer of a model folder, or of one that `save` wrote, with its blocks.

        `pad` is the padding token, an old or a new one; by default that of the folder's configuration. It can't be an
        end-of-sequence token, since masks made from padding would not train the end; set `pad_is_eos` if your masks are
        not made from padding. The number of rows is rounded up to a multiple of `multiple_of`, by default the saved
        one, or 64.

        Raises `InvalidRequest` if there is no padding token or it is an end-of-sequence token, and `TokenizerUnusable`
        as `Tokenizer.load` and for unreadable blocks.
        """
        folder = Path(folder)
        tokenizer, saved = Tokenizer.load(folder), folder / _LAYOUT
        layout = _Layout(64, ())
        if saved.is_file():
            try:
                layout = msgspec.json.decode(saved.read_bytes(), type=_Layout)
            except msgspec.MsgspecError as error:
                raise TokenizerUnusable(f"{saved} is damaged ({error}): save the training tokenizer again") from None
        multiple_of = layout.multiple_of if multiple_of is None else multiple_of
        if multiple_of < 1:
            raise InvalidRequest(f"multiple_of must be 1 or more, not {multiple_of}", "multiple_of")
        source = (folder / "tokenizer.json").read_bytes()
        made = cls(tokenizer, source, folder, multiple_of, layout.blocks)
        made._check_blocks()
        return made._with_pad(pad or tokenizer.special_tokens.get("pad_token"), pad_is_eos)

    @cached_property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for ids that are tokens, bool [vocab_size]. Elsewhere, set logits to minus infinity when sampling."""
        ids = token_ids(json.loads(self.source))
        known = np.zeros(-(-(ids[-1] + 1) // self.multiple_of) * self.multiple_of, np.bool_)
        known[ids] = True
        return known

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding: `tokenizer.vocab_size`, rounded up to the multiple."""
        return len(self.known)

    def block(self, name: str) -> TokenBlock:
        """Return the block with a name. Raises `InvalidRequest` if there is none."""
        by_name = {block.name: block for block in self.blocks}
        if name not in by_name:
            raise InvalidRequest(f"there is no block {name!r} of tokens; there are: {', '.join(by_name) or 'none'}")
        return by_name[name]

    def with_block(self, name: str, tokens: Sequence[str], *, special: bool = False) -> TrainingTokenizer:
        """Return the tokenizer with these tokens, or the same one if it already has this block.

        `special` tokens are skipped by decoders that skip special tokens. A token is found wherever text spells it, so
        serving texts should not contain it; `prove` checks that for your texts.

        Raises `InvalidRequest` for a token that exists, contains another control token, or consists of letters, digits
        and white space, like ordinary text; and for a block of this name with other tokens.
        """
        if name in {block.name for block in self.blocks}:
            if self.block(name).tokens == tuple(tokens):
                return self
            raise InvalidRequest(f"there is a block {name!r} with other tokens: give the new ones another name")
        spec, block = json.loads(self.source), TokenBlock(name, self.tokenizer.vocab_size, tuple(tokens))
        _check_new(tokens, spec, self.tokenizer)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        added = [{"id": i, "content": token, **flags} for i, token in zip(block.ids, tokens, strict=True)]
        spec["added_tokens"] = spec.get("added_tokens", []) + added
        source = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
        tokenizer = self.tokenizer.with_files(source, self.tokenizer.config)
        made = replace(self, tokenizer=tokenizer, source=source, blocks=(*self.blocks, block))
        made._check_blocks()
        return made

    def check_ids(self, ids: TokenIds) -> None:
        """Raise `InvalidRequest` if an id is not a token: negative, or a padding row of the embedding."""
        given = np.asarray(ids)
        wrong = np.flatnonzero(~np.isin(given, np.flatnonzero(self.known)))
        if wrong.size:
            raise InvalidRequest(
                f"id {given[wrong[0]]} at position {wrong[0]} is not a token: there are {self.tokenizer.vocab_size}, "
                f"and rows up to {self.vocab_size} are padding. If an engine samples such ids, mask its "
                "logits with `known`"
            )

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer, its chat template, the generation config with this padding token, and the blocks.

        The tokenizer class is `PreTrainedTokenizerFast`, with which `AutoTokenizer` does not change `tokenizer.json`;
        models' own classes may replace parts of it.
        """
        added = {str(token.pop("id")): token for token in json.loads(self.source)["added_tokens"]}
        files = {
            "tokenizer_config.json": {
                **self.tokenizer.config,
                **self.tokenizer.special_tokens,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "added_tokens_decoder": added,
            },
            _LAYOUT: asdict(_Layout(self.multiple_of, self.blocks)),
        }
        if generation := read_json(self.folder / _GENERATION):
            files[_GENERATION] = {**generation, "pad_token_id": self.pad_id}
        folder, template = Path(folder), self.folder / _TEMPLATE
        contents = {name: json.dumps(one, ensure_ascii=False, indent=2).encode() + b"\n" for name, one in files.items()}
        if template.is_file():
            contents[_TEMPLATE] = template.read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {**contents, "tokenizer.json": self.source}.items():
            write_durably(folder / name, content)

    def _with_pad(self, pad: str | None, pad_is_eos: bool) -> TrainingTokenizer:
        if pad is None:
            raise InvalidRequest(
                f"the tokenizer in {self.folder} names no padding token: give one with `pad`, such as '<|pad|>'", "pad"
            )
        made = self.with_block("pad", [pad], special=True) if self.tokenizer.added_token(pad) is None else self
        token = made.tokenizer.added_token(pad)
        if token is None or token.is_space:
            raise InvalidRequest(f"{pad!r} can't be a padding token: it is white space", "pad")
        if token.id in self.tokenizer.eos_ids and not pad_is_eos:
            raise InvalidRequest(
                f"the padding token {pad!r} ends sequences too: masks that are made from padding would leave the end "
                "untrained. Give another `pad`, such as '<|pad|>', or `pad_is_eos=True` if your masks are not made so",
                "pad",
            )
        tokenizer = made.tokenizer.with_files(made.source, {**made.tokenizer.config, "pad_token": pad})
        return replace(made, tokenizer=tokenizer, pad_token=pad, pad_id=token.id)

    def _check_blocks(self) -> None:
        """Raise `TokenizerUnusable` unless every new token has its id."""
        for block in self.blocks:
            for token_id, token in zip(block.ids, block.tokens, strict=True):
                ids = self.tokenizer.encode_plain(token)
                if self.tokenizer.added_token(token) is None or ids != [token_id]:
                    raise TokenizerUnusable(
                        f"token {token!r} of block {block.name!r} should have id {token_id}, the tokenizer gives it "
                        f"{ids}: ids of added tokens must follow each other without gaps"
                    )


def codebook(name: str, sizes: Sequence[int]) -> list[str]:
    """Return the texts of semantic-id tokens, one per entry of each codebook, in order of the codebooks.

    >>> codebook("item", [2, 2])
    ['<|item_0_0|>', '<|item_0_1|>', '<|item_1_0|>', '<|item_1_1|>']
    """
    return [f"<|{name}_{book}_{entry}|>" for book, size in enumerate(sizes) for entry in range(size)]


def token_ids(spec: Mapping[str, Any]) -> list[int]:
    """Return the ids of all tokens of a `tokenizer.json`, sorted."""
    vocab = spec["model"]["vocab"]
    ids = {*vocab.values()} if isinstance(vocab, Mapping) else {*range(len(vocab))}
    return sorted(ids | {token["id"] for token in spec.get("added_tokens", [])})


def _check_new(tokens: Sequence[str], spec: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    if not tokens or len(set(tokens)) < len(tokens):
        raise InvalidRequest("a block of tokens is empty or has a token twice")
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
