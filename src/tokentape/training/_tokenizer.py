"""Add tokens for training to a model's serving tokenizer, and change nothing else; give the tokens first embeddings.

These are a padding token, blocks of tokens (control tokens, semantic ids), and rows up to a round number. New tokens
get ids after the highest id, in order, and ids never change later. `prove` checks that old text keeps its ids.

Embeddings are made from the model's own, in their dtype. A semantic-id token has no text: describe each by one (a
title, a category), or use `normal`, because equal rows diverge slowly in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape._durable import write_durably
from tokentape.chat._tokenizer import Tokenizer
from tokentape.chat._tokenizer_files import read_json
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import TokenIds

_LAYOUT, _GENERATION, _TEMPLATE = "training_tokenizer.json", "generation_config.json", "chat_template.jinja"


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
    """A serving tokenizer with added tokens. Use `TrainingTokenizer.load`, then `with_block`."""

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
        end-of-sequence token, since masks made from padding would not train the end; set `pad_is_eos` if yours are not.
        The number of rows is rounded up to a multiple of `multiple_of`, by default the saved one, or 64. Raises
        `InvalidRequest` for an unusable padding token, and `TokenizerUnusable` as `Tokenizer.load` and for unreadable
        blocks.
        """
        folder = Path(folder)
        tokenizer, saved = Tokenizer.load(folder), folder / _LAYOUT
        try:
            layout = msgspec.json.decode(saved.read_bytes(), type=_Layout) if saved.is_file() else _Layout(64, ())
        except msgspec.MsgspecError as error:
            raise TokenizerUnusable(f"{saved} is damaged ({error}): save the training tokenizer again") from None
        if (multiple_of := layout.multiple_of if multiple_of is None else multiple_of) < 1:
            raise InvalidRequest(f"multiple_of must be 1 or more, not {multiple_of}", "multiple_of")
        training = cls(tokenizer, (folder / "tokenizer.json").read_bytes(), folder, multiple_of, layout.blocks)
        training._check_blocks()
        return training._with_pad(pad or tokenizer.special_tokens.get("pad_token"), pad_is_eos)

    @cached_property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for ids that are tokens, bool [vocab_size]. Elsewhere, set logits to minus infinity when sampling."""
        ids = token_ids(json.loads(self.source))
        mask = np.zeros(-(-(ids[-1] + 1) // self.multiple_of) * self.multiple_of, np.bool_)
        mask[ids] = True
        return mask

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding: `tokenizer.vocab_size`, rounded up to the multiple."""
        return len(self.known)

    def block(self, name: str) -> TokenBlock:
        """Return the block with a name. Raises `InvalidRequest` if there is none."""
        for block in self.blocks:
            if block.name == name:
                return block
        names = ", ".join(block.name for block in self.blocks) or "none"
        raise InvalidRequest(f"there is no block {name!r} of tokens; there are: {names}")

    def with_block(self, name: str, tokens: Sequence[str], *, special: bool = False) -> TrainingTokenizer:
        """Return the tokenizer with these tokens, or the same one if it already has this block.

        `special` tokens are skipped by decoders that skip special tokens. A token is found wherever text spells it, so
        serving texts should not contain it; `prove` checks that for your texts. Raises `InvalidRequest` for a token
        that exists, contains another control token, or is spelled like ordinary text, and for a block of this name with
        other tokens.
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
        training = replace(self, tokenizer=tokenizer, source=source, blocks=(*self.blocks, block))
        training._check_blocks()
        return training

    def check_ids(self, ids: TokenIds) -> None:
        """Raise `InvalidRequest` if an id is not a token: negative, or a padding row of the embedding."""
        array = np.asarray(ids)
        wrong = np.flatnonzero(~np.isin(array, np.flatnonzero(self.known)))
        if wrong.size:
            raise InvalidRequest(
                f"id {array[wrong[0]]} at position {wrong[0]} is not a token: there are {self.tokenizer.vocab_size}, "
                f"and rows up to {self.vocab_size} are padding. If an engine samples such ids, mask its logits with "
                "`known`"
            )

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer, its chat template, the generation config with this padding token, and the blocks.

        With the class `PreTrainedTokenizerFast`, `AutoTokenizer` does not change `tokenizer.json`; models' own may.
        """
        added = {str(token.pop("id")): token for token in json.loads(self.source)["added_tokens"]}
        own = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
        files: dict[str, Any] = {
            "tokenizer_config.json": {**self.tokenizer.config, **self.tokenizer.special_tokens, **own},
            _LAYOUT: asdict(_Layout(self.multiple_of, self.blocks)),
        }
        if generation := read_json(self.folder / _GENERATION):
            files[_GENERATION] = {**generation, "pad_token_id": self.pad_id}
        contents = {
            name: json.dumps(file, ensure_ascii=False, indent=2).encode() + b"\n" for name, file in files.items()
        }
        if (template := self.folder / _TEMPLATE).is_file():
            contents[_TEMPLATE] = template.read_bytes()
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in {**contents, "tokenizer.json": self.source}.items():
            write_durably(Path(folder, name), content)

    def _with_pad(self, pad: str | None, pad_is_eos: bool) -> TrainingTokenizer:
        if pad is None:
            raise InvalidRequest(
                f"the tokenizer in {self.folder} names no padding token: give one with `pad`, such as '<|pad|>'", "pad"
            )
        training = self.with_block("pad", [pad], special=True) if self.tokenizer.added_token(pad) is None else self
        token = training.tokenizer.added_token(pad)
        if token is None or token.is_space:
            raise InvalidRequest(f"{pad!r} can't be a padding token: it is white space", "pad")
        if token.id in self.tokenizer.eos_ids and not pad_is_eos:
            advice = "Give another `pad`, such as '<|pad|>', or `pad_is_eos=True` if your masks are not made so"
            problem = f"{pad!r} ends sequences too: masks that are made from padding would leave the end untrained"
            raise InvalidRequest(f"the padding token {problem}. {advice}", "pad")
        tokenizer = training.tokenizer.with_files(training.source, {**training.tokenizer.config, "pad_token": pad})
        return replace(training, tokenizer=tokenizer, pad_token=pad, pad_id=token.id)

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
    """Return the texts of semantic-id tokens, `<|item_0_0|>`, `<|item_0_1|>`..., one per entry of each codebook."""
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
        problem = ""
        if tokenizer.added_token(token) is not None or token in pieces:
            problem = "is in the vocabulary already"
        elif any(control.content in token for control in tokenizer.added_tokens if not control.is_space):
            problem = "holds another control token: texts with that one would change"
        elif all(char.isalnum() or char.isspace() for char in token):
            problem = f"is spelled as words are, so ordinary text would change: write it '<|{token}|>'"
        if problem:
            raise InvalidRequest(f"token {token!r} {problem}")


Rows: TypeAlias = npt.NDArray[np.floating[Any]]
"""Embeddings, shape [tokens, dimensions]."""


class Pieces(NamedTuple):
    """The old tokens of a new token's text, and their lengths in bytes."""

    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class Auxiliary(NamedTuple):
    """Embeddings of the texts of all new and all old tokens by another model, to measure similarity."""

    new: Rows
    old: Rows


def pieces_of(serving: Tokenizer, texts: Sequence[str]) -> list[Pieces]:
    """Return the tokens of each text in `serving`, the tokenizer without the new tokens. No text may be empty."""
    encodings = [serving.encode_after_control(text).ids for text in texts]
    if not all(encodings):
        raise InvalidRequest("a new token is described by an empty text: give one to make its first embedding from")
    return [Pieces(tuple(ids), tuple(len(serving.token_bytes(i)) for i in ids)) for ids in encodings]


def mean_of_pieces(embeddings: Rows, pieces: Sequence[Pieces]) -> Rows:
    """Return the mean of each token's pieces, shape [pieces, dimensions]."""
    return np.stack([embeddings[list(ids)].mean(0, np.float64) for ids, _ in pieces]).astype(embeddings.dtype)


def token_adapt(
    embeddings: Rows,
    pieces: Sequence[Pieces],
    auxiliary: Auxiliary | None = None,
    *,
    neighbours: int = 5,
    global_weight: float = 0.3,
    temperature: float = 0.3,
) -> Rows:
    """Mix a weighted mean of the pieces with one of the nearest neighbors (arXiv 2505.09738).

    Similarity is the cosine in the auxiliary space; by default that is the space of `embeddings`, with a text at the
    mean of its pieces. The score of a piece is the mean of its similarity to the whole text and its share of the text's
    length; the score of a neighbor is its similarity. A softmax with `temperature` turns scores into weights. For
    untied output embeddings, pass these and `Auxiliary(mean_of_pieces(inputs, pieces), inputs)`, so that both get the
    same weights. Shape [pieces, dimensions]. Raises `InvalidRequest` if the auxiliary space has other numbers of rows.
    """
    auxiliary = auxiliary or Auxiliary(mean_of_pieces(embeddings, pieces), embeddings)
    actual, expected = (len(auxiliary.new), len(auxiliary.old)), (len(pieces), len(embeddings))
    if actual != expected:
        raise InvalidRequest(
            f"the auxiliary space has {actual[0]} new and {actual[1]} old rows: expected {expected[0]} and "
            f"{expected[1]}, one for each token"
        )
    old, new, wide = _unit(auxiliary.old), _unit(auxiliary.new), embeddings.astype(np.float64)

    def weighted(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        weights = np.exp((scores - scores.max()) / temperature)
        return np.asarray(weights / weights.sum() @ wide[ids])

    rows = []
    for (ids, lengths), text in zip(pieces, new, strict=True):
        likeness, own = old @ text, np.array(ids, np.intp)
        share, nearest = np.array(lengths) / max(sum(lengths), 1), np.argsort(-likeness, kind="stable")[:neighbours]
        local, near = weighted((likeness[own] + share) / 2, own), weighted(likeness[nearest], nearest)
        rows.append((1 - global_weight) * local + global_weight * near)
    return np.reshape(rows, (-1, embeddings.shape[1])).astype(embeddings.dtype)


def normal(embeddings: Rows, count: int, *, seed: int = 0) -> Rows:
    """Draw from a normal distribution with each dimension's mean and deviation, shape [count, dimensions]."""
    wide = embeddings.astype(np.float64)
    drawn = np.random.default_rng(seed).normal(wide.mean(axis=0), wide.std(axis=0), (count, embeddings.shape[1]))
    return drawn.astype(embeddings.dtype)


def enlarged(embeddings: Rows, training: TrainingTokenizer, rows: Mapping[str, Rows]) -> Rows:
    """Return the embeddings with rows for every block of `training`, by name, shape [vocab_size, dimensions].

    Old rows are copied bit for bit. Rows of ids that are not tokens are zero, and so is the row of the padding token if
    it is not in `rows`. A zero row of a tied output layer has a logit of 0, so mask by `training.known` when sampling.
    Raises `InvalidRequest` for rows that are missing, of another shape, or of no block, and for too many old rows.
    """
    old, wide = embeddings.shape
    if old > training.vocab_size:
        raise InvalidRequest(
            f"the model has {old} rows, more than the {training.vocab_size} of the tokenizer: load it with a "
            "`multiple_of` that reaches them"
        )
    if unknown := rows.keys() - {block.name for block in training.blocks}:
        raise InvalidRequest(f"there is no block named {', '.join(sorted(unknown))}")
    matrix = np.zeros((training.vocab_size, wide), embeddings.dtype)
    matrix[:old] = embeddings
    for block in training.blocks:
        block_rows, expected = rows.get(block.name), (len(block.tokens), wide)
        if block_rows is not None and block_rows.shape == expected:
            matrix[block.ids] = block_rows
        elif block_rows is not None or block.tokens != (training.pad_token,):
            actual = "none" if block_rows is None else f"an array of shape {block_rows.shape}"
            raise InvalidRequest(f"rows for block {block.name!r}: expected shape {expected}, found {actual}")
    return matrix


def enlarge_model(
    model: Any, training: TrainingTokenizer, rows: Mapping[str, Rows], output_rows: Mapping[str, Rows] | None = None
) -> None:
    """Add the rows of `enlarged` and the padding token to a `transformers` model in place. A tied output layer follows.

    `output_rows` are for an untied output layer, by default `rows`. Needs torch.
    """
    import torch

    layers, output = [(model.get_input_embeddings(), rows)], model.get_output_embeddings()
    if output is not None and output.weight.data_ptr() != layers[0][0].weight.data_ptr():
        layers.append((output, rows if output_rows is None else output_rows))
    matrices = [enlarged(layer.weight.detach().float().cpu().numpy(), training, some) for layer, some in layers]
    model.resize_token_embeddings(training.vocab_size, mean_resizing=False)
    with torch.no_grad():
        for layer, values in zip((model.get_input_embeddings(), model.get_output_embeddings()), matrices, strict=False):
            layer.weight.copy_(torch.from_numpy(values))
    for config in filter(None, (model.config.get_text_config(), model.generation_config)):
        config.pad_token_id = training.pad_id


def _unit(rows: Rows) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
