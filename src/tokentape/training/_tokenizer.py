"""Add tokens for training to a model's serving tokenizer, and compute initial embeddings for the new tokens.

You can add a padding token and blocks of tokens (control tokens, semantic ids). The number of embedding rows is rounded
up. New tokens get the ids after the highest old id, in order. All other ids stay as they are; `prove` checks that.

Initial embeddings are computed from the model's embeddings, in the same dtype. For a semantic-id token, pass a
description (a title, a category), or use `normal`. Give no two tokens the same row: equal rows diverge slowly.
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
from tokentape.chat._tokenizer_files import read_json, with_configured_tokens
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
        """The ids of `tokens`, in order."""
        return range(self.first_id, self.first_id + len(self.tokens))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The content of `training_tokenizer.json`."""

    multiple_of: int
    blocks: tuple[TokenBlock, ...]


@dataclass(frozen=True)
class TrainingTokenizer:
    """A serving tokenizer with added tokens. Make it with `TrainingTokenizer.load`, then call `with_block`."""

    tokenizer: Tokenizer
    """The tokenizer with the new tokens. You can pass it to a renderer."""
    source: bytes
    """The content of `tokenizer.json` with the added tokens of `tokenizer_config.json` and the new ones."""
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
        """Load the tokenizer from a model folder, or from a folder that `save` wrote, with its blocks.

        `pad` is the padding token. It may be in the vocabulary or new; the default is the folder's `pad_token`. It must
        not be an end-of-sequence token: a mask that is 0 where `id == pad_id` would leave the end of the sequence
        untrained. If you don't build masks from ids, pass `pad_is_eos=True`. The number of embedding rows is rounded up
        to a multiple of `multiple_of`, by default the saved value, or 64. Raises `InvalidRequest` for an unusable `pad`
        or `multiple_of`, and `TokenizerUnusable` if the tokenizer or the saved blocks can't be read.
        """
        folder = Path(folder)
        tokenizer, saved = Tokenizer.load(folder), folder / _LAYOUT
        try:
            layout = msgspec.json.decode(saved.read_bytes(), type=_Layout) if saved.is_file() else _Layout(64, ())
        except msgspec.MsgspecError as error:
            raise TokenizerUnusable(f"{saved} is damaged ({error}): save the training tokenizer again") from None
        if (multiple_of := layout.multiple_of if multiple_of is None else multiple_of) < 1:
            raise InvalidRequest(f"multiple_of must be 1 or more, not {multiple_of}", "multiple_of")
        source = (folder / "tokenizer.json").read_bytes()
        spec = json.loads(source)
        if (configured := with_configured_tokens(spec, tokenizer.config)) is not spec:
            # New tokens follow those that only tokenizer_config.json adds.
            source = _encoded(configured)
        training = cls(tokenizer, source, folder, multiple_of, layout.blocks)
        training._check_blocks()
        return training._with_pad(pad or tokenizer.special_tokens.get("pad_token"), pad_is_eos)

    @cached_property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for ids that have a token, bool [vocab_size]. When sampling, set the other logits to minus infinity."""
        ids = token_ids(json.loads(self.source))
        mask = np.zeros(-(-(ids[-1] + 1) // self.multiple_of) * self.multiple_of, np.bool_)
        mask[ids] = True
        return mask

    @property
    def vocab_size(self) -> int:
        """The number of embedding rows: `tokenizer.vocab_size`, rounded up to a multiple of `multiple_of`."""
        return len(self.known)

    def block(self, name: str) -> TokenBlock:
        """Return the block with this name. Raises `InvalidRequest` if there is none."""
        for block in self.blocks:
            if block.name == name:
                return block
        names = ", ".join(block.name for block in self.blocks) or "none"
        raise InvalidRequest(f"there is no block of tokens named {name!r}; the blocks are: {names}")

    def with_block(self, name: str, tokens: Sequence[str], *, special: bool = False) -> TrainingTokenizer:
        """Return a tokenizer with these tokens added, or `self` if it already has this block.

        Decoding with `skip_special_tokens=True` skips `special` tokens. The tokenizer encodes every occurrence of a new
        token's text as that token, so texts at serving time should not contain it; `prove` checks your texts. Raises
        `InvalidRequest` if a token is already in the vocabulary, contains a control token, or has only
        letters, digits and white space, and if a block with this name has other tokens.
        """
        if name in {block.name for block in self.blocks}:
            if self.block(name).tokens == tuple(tokens):
                return self
            raise InvalidRequest(f"block {name!r} already has other tokens: choose another name for the new block")
        spec, block = json.loads(self.source), TokenBlock(name, self.tokenizer.vocab_size, tuple(tokens))
        _check_new(tokens, spec, self.tokenizer)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        added = [{"id": i, "content": token, **flags} for i, token in zip(block.ids, tokens, strict=True)]
        spec["added_tokens"] = spec.get("added_tokens", []) + added
        source = _encoded(spec)
        tokenizer = self.tokenizer.with_files(source, self.tokenizer.config)
        training = replace(self, tokenizer=tokenizer, source=source, blocks=(*self.blocks, block))
        training._check_blocks()
        return training

    def check_ids(self, ids: TokenIds) -> None:
        """Raise `InvalidRequest` if an id has no token: a negative id, or the id of an unused embedding row."""
        array = np.asarray(ids)
        wrong = np.flatnonzero(~np.isin(array, np.flatnonzero(self.known)))
        if wrong.size:
            raise InvalidRequest(
                f"id {array[wrong[0]]} at position {wrong[0]} has no token: the tokenizer has "
                f"{self.tokenizer.vocab_size} ids, and the embedding rows from there up to {self.vocab_size} are "
                "unused. If an engine samples such ids, mask its logits with `known`"
            )

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer, the chat template, the generation config with the new `pad_token_id`, and the blocks.

        The saved class is `PreTrainedTokenizerFast`, because other classes may change what `AutoTokenizer` loads.
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
                f"the tokenizer in {self.folder} has no padding token: pass one as `pad`, such as '<|pad|>'", "pad"
            )
        training = self.with_block("pad", [pad], special=True) if self.tokenizer.added_token(pad) is None else self
        token = training.tokenizer.added_token(pad)
        if token is None or token.is_space:
            raise InvalidRequest(f"{pad!r} can't be a padding token, because it is white space", "pad")
        if token.id in self.tokenizer.eos_ids and not pad_is_eos:
            problem = f"{pad!r} is also an end-of-sequence token: masks from padding ids would not train the end"
            advice = "Pass another `pad`, such as '<|pad|>', or pad_is_eos=True if your masks don't depend on ids"
            raise InvalidRequest(f"the padding token {problem}. {advice}", "pad")
        tokenizer = training.tokenizer.with_files(training.source, {**training.tokenizer.config, "pad_token": pad})
        return replace(training, tokenizer=tokenizer, pad_token=pad, pad_id=token.id)

    def _check_blocks(self) -> None:
        for block in self.blocks:
            for token_id, token in zip(block.ids, block.tokens, strict=True):
                ids = self.tokenizer.encode_plain(token)
                if self.tokenizer.added_token(token) is None or ids != [token_id]:
                    raise TokenizerUnusable(
                        f"token {token!r} of block {block.name!r} should have id {token_id}, but the tokenizer encodes "
                        f"it as {ids}: the ids of added tokens must be consecutive"
                    )


def codebook(name: str, sizes: Sequence[int]) -> list[str]:
    """Return one semantic-id token per entry of each codebook: `<|name_0_0|>`, `<|name_0_1|>`, and so on."""
    return [f"<|{name}_{book}_{entry}|>" for book, size in enumerate(sizes) for entry in range(size)]


def _encoded(spec: Mapping[str, Any]) -> bytes:
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()


def token_ids(spec: Mapping[str, Any]) -> list[int]:
    """Return the ids of all tokens of a `tokenizer.json`, sorted."""
    vocab = spec["model"]["vocab"]
    ids = {*vocab.values()} if isinstance(vocab, Mapping) else {*range(len(vocab))}
    return sorted(ids | {token["id"] for token in spec.get("added_tokens", [])})


def _check_new(tokens: Sequence[str], spec: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    if not tokens or len(set(tokens)) < len(tokens):
        raise InvalidRequest("a block must have at least one token, and no token twice")
    vocab = spec["model"]["vocab"]
    pieces = vocab if isinstance(vocab, Mapping) else {entry[0] for entry in vocab}
    for token in tokens:
        problem = ""
        if tokenizer.added_token(token) is not None or token in pieces:
            problem = "is already in the vocabulary"
        elif any(control.content in token for control in tokenizer.added_tokens if not control.is_space):
            problem = "contains a control token, so texts with that token would be encoded differently"
        elif all(char.isalnum() or char.isspace() for char in token):
            problem = f"looks like a word, so ordinary text would be encoded differently: use '<|{token}|>' instead"
        if problem:
            raise InvalidRequest(f"token {token!r} {problem}")


Rows: TypeAlias = npt.NDArray[np.floating[Any]]
"""Embeddings, shape [tokens, dimensions]."""


class Pieces(NamedTuple):
    """The old tokens that spell the description of a new token, and the length of each in bytes."""

    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class Auxiliary(NamedTuple):
    """Embeddings from another model for the texts of all new and all old tokens, to measure similarity."""

    new: Rows
    old: Rows


def pieces_of(serving: Tokenizer, texts: Sequence[str]) -> list[Pieces]:
    """Tokenize each new token's text with `serving`, the old tokenizer. Raises `InvalidRequest` if a text is empty."""
    encodings = [serving.encode_after_control(text).ids for text in texts]
    if not all(encodings):
        raise InvalidRequest("the description of a new token is empty: pass the text to compute its embedding from")
    return [Pieces(tuple(ids), tuple(len(serving.token_bytes(i)) for i in ids)) for ids in encodings]


def mean_of_pieces(embeddings: Rows, pieces: Sequence[Pieces]) -> Rows:
    """Return the mean embedding of each new token's pieces, shape [new tokens, dimensions]."""
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
    """Return TokenAdapt embeddings (arXiv 2505.09738), shape [new tokens, dimensions].

    A new token's embedding is `1 - global_weight` times a weighted mean of its pieces, plus `global_weight` times a
    weighted mean of its `neighbours` nearest old tokens. Similarity is the cosine in the auxiliary space. By default,
    that is the space of `embeddings`, and the vector of a text is the mean of its pieces. The score of a piece is the
    mean of its similarity to the whole text and its share of the text's bytes; the score of a neighbor is its
    similarity. A softmax with `temperature` turns scores into weights. For an untied output layer, pass the output
    embeddings and `Auxiliary(mean_of_pieces(inputs, pieces), inputs)`, so that both layers get the same weights. Raises
    `InvalidRequest` if `auxiliary` does not have one row per token.
    """
    auxiliary = auxiliary or Auxiliary(mean_of_pieces(embeddings, pieces), embeddings)
    actual, expected = (len(auxiliary.new), len(auxiliary.old)), (len(pieces), len(embeddings))
    if actual != expected:
        raise InvalidRequest(
            f"auxiliary has {actual[0]} rows for new and {actual[1]} for old tokens: expected {expected[0]} and "
            f"{expected[1]}, one per token"
        )
    old, new, wide = _unit(auxiliary.old), _unit(auxiliary.new), embeddings.astype(np.float64)

    def weighted(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        weights = np.exp((scores - scores.max()) / temperature)
        return np.asarray(weights / weights.sum() @ wide[ids])

    rows = []
    for (ids, lengths), text in zip(pieces, new, strict=True):
        similarity, piece_ids = old @ text, np.array(ids, np.intp)
        share, nearest = np.array(lengths) / max(sum(lengths), 1), np.argsort(-similarity, kind="stable")[:neighbours]
        local = weighted((similarity[piece_ids] + share) / 2, piece_ids)
        rows.append((1 - global_weight) * local + global_weight * weighted(similarity[nearest], nearest))
    return np.reshape(rows, (-1, embeddings.shape[1])).astype(embeddings.dtype)


def normal(embeddings: Rows, count: int, *, seed: int = 0) -> Rows:
    """Draw rows from a normal distribution with each dimension's mean and deviation. Shape [count, dimensions]."""
    wide = embeddings.astype(np.float64)
    drawn = np.random.default_rng(seed).normal(wide.mean(axis=0), wide.std(axis=0), (count, embeddings.shape[1]))
    return drawn.astype(embeddings.dtype)


def enlarged(embeddings: Rows, training: TrainingTokenizer, rows: Mapping[str, Rows]) -> Rows:
    """Return the embeddings with rows for the blocks of `training` added, shape [vocab_size, dimensions].

    `rows` has the new rows by block name. Old rows are copied bit for bit, also those of ids without a token. New rows
    without a token are zero, and so is the padding token's row if neither `rows` nor `embeddings` has it. In a tied
    output layer, a zero row has the logit 0, so mask the logits with `training.known` when sampling. Raises
    `InvalidRequest` if rows are missing, have another shape or belong to an unknown block, and if `embeddings` has more
    rows than `training.vocab_size`.
    """
    old, wide = embeddings.shape
    if old > training.vocab_size:
        raise InvalidRequest(
            f"the model has {old} embedding rows, but the training tokenizer only {training.vocab_size}: load the "
            f"tokenizer with a larger `multiple_of`, so that its `vocab_size` is at least {old}"
        )
    names = [block.name for block in training.blocks]
    if unknown := ", ".join(sorted(rows.keys() - {*names})):
        raise InvalidRequest(f"`rows` has rows for unknown blocks: {unknown}; expected only {', '.join(names)}")
    matrix = np.zeros((training.vocab_size, wide), embeddings.dtype)
    matrix[:old] = embeddings
    for block in training.blocks:
        block_rows, expected = rows.get(block.name), (len(block.tokens), wide)
        if block_rows is not None and block_rows.shape == expected:
            matrix[block.ids] = block_rows
        elif block_rows is not None or block.tokens != (training.pad_token,):
            actual = "none" if block_rows is None else f"shape {block_rows.shape}"
            raise InvalidRequest(f"rows for block {block.name!r} must have shape {expected}, but `rows` has {actual}")
    return matrix


def enlarge_model(
    model: Any, training: TrainingTokenizer, rows: Mapping[str, Rows], output_rows: Mapping[str, Rows] | None = None
) -> None:
    """Resize a `transformers` model in place: set the embeddings of `enlarged`, and `pad_token_id` in its configs.

    `output_rows` are the new rows of an untied output layer, by default `rows`. Raises the errors of `enlarged`.
    """
    import torch

    layers, output = [(model.get_input_embeddings(), rows)], model.get_output_embeddings()
    if output is not None and output.weight.data_ptr() != layers[0][0].weight.data_ptr():
        layers.append((output, rows if output_rows is None else output_rows))
    matrices = [enlarged(layer.weight.detach().float().cpu().numpy(), training, new) for layer, new in layers]
    model.resize_token_embeddings(training.vocab_size, mean_resizing=False)
    with torch.no_grad():
        for layer, values in zip((model.get_input_embeddings(), model.get_output_embeddings()), matrices, strict=False):
            layer.weight.copy_(torch.from_numpy(values))
    for config in filter(None, (model.config.get_text_config(), model.generation_config)):
        config.pad_token_id = training.pad_id


def _unit(rows: Rows) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
