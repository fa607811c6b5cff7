"""Make initial embeddings for new tokens from a model's embeddings.

`mean_of_pieces`, `token_adapt` (arXiv 2505.09738) and `normal` return the rows of new tokens, as numpy arrays in the
dtype of the given embeddings; `enlarge_model` adds them after the old rows. A semantic-id token has no text: describe
each by a text (a title, a category), or use `normal`, because equal rows diverge slowly in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.training._tokenizer import TrainingTokenizer

Rows: TypeAlias = npt.NDArray[np.floating[Any]]
"""Embeddings, shape [tokens, dimensions]."""


class Pieces(NamedTuple):
    """The old tokens of a new token's text, and their lengths in bytes."""

    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class Auxiliary(NamedTuple):
    """Embeddings of the texts of all new and all old tokens by another embedding model, to measure similarity."""

    new: Rows
    old: Rows


def pieces_of(serving: Tokenizer, texts: Sequence[str]) -> list[Pieces]:
    """Return the tokens of each text in `serving`, the tokenizer without the new tokens.

    Raises `InvalidRequest` for an empty text.
    """
    found = [serving.encode_after_control(text).ids for text in texts]
    if not all(found):
        raise InvalidRequest("a new token is described by an empty text: give one to make its first embedding from")
    return [Pieces(tuple(ids), tuple(len(serving.token_bytes(i)) for i in ids)) for ids in found]


def mean_of_pieces(embeddings: Rows, pieces: Sequence[Pieces]) -> Rows:
    """Return the mean of each token's pieces, shape [pieces, dimensions]."""
    rows = [embeddings[list(one.ids)].mean(axis=0, dtype=np.float64) for one in pieces]
    return np.stack(rows).astype(embeddings.dtype)


def token_adapt(
    embeddings: Rows,
    pieces: Sequence[Pieces],
    auxiliary: Auxiliary | None = None,
    *,
    neighbours: int = 5,
    global_weight: float = 0.3,
    temperature: float = 0.3,
) -> Rows:
    """Mix a weighted mean of the pieces (local estimate) with one of the nearest neighbors (global estimate).

    Similarity is the cosine in the auxiliary space; by default that is the space of `embeddings`, with a text at the
    mean of its pieces. The score of a piece is the mean of its similarity to the whole text and its share of the text's
    length; the score of a neighbor is its similarity. A softmax with `temperature` turns scores into weights. For
    untied output embeddings, pass these and `Auxiliary(mean_of_pieces(inputs, pieces), inputs)`, so that both get the
    same weights.

    Shape [pieces, dimensions]. Raises `InvalidRequest` if the auxiliary space has other numbers of rows.
    """
    auxiliary = auxiliary or Auxiliary(mean_of_pieces(embeddings, pieces), embeddings)
    if (len(auxiliary.new), len(auxiliary.old)) != (len(pieces), len(embeddings)):
        raise InvalidRequest(
            f"the auxiliary space has {len(auxiliary.new)} new and {len(auxiliary.old)} old rows: expected "
            f"{len(pieces)} and {len(embeddings)}, one for each token"
        )
    old, new, wide = _unit(auxiliary.old), _unit(auxiliary.new), embeddings.astype(np.float64)

    def weighted(scores: npt.NDArray[np.float64], ids: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        weights = np.exp((scores - scores.max()) / temperature)
        return np.asarray(weights / weights.sum() @ wide[ids])

    rows = np.empty((len(pieces), embeddings.shape[1]))
    for n, (ids, lengths) in enumerate(pieces):
        likeness, own = old @ new[n], np.array(ids, np.intp)
        share = np.array(lengths) / max(sum(lengths), 1)
        nearest = np.argsort(-likeness, kind="stable")[:neighbours]
        local, near = weighted((likeness[own] + share) / 2, own), weighted(likeness[nearest], nearest)
        rows[n] = (1 - global_weight) * local + global_weight * near
    return rows.astype(embeddings.dtype)


def normal(embeddings: Rows, count: int, *, seed: int = 0) -> Rows:
    """Draw from a normal distribution with each dimension's mean and deviation, shape [count, dimensions]."""
    wide = embeddings.astype(np.float64)
    drawn = np.random.default_rng(seed).normal(wide.mean(axis=0), wide.std(axis=0), (count, embeddings.shape[1]))
    return drawn.astype(embeddings.dtype)


def enlarged(embeddings: Rows, training: TrainingTokenizer, rows: Mapping[str, Rows]) -> Rows:
    """Return the embeddings with rows for every block of `training`, by name, shape [vocab_size, dimensions].

    Old rows are copied bit for bit. Rows of ids that are not tokens are zero, and so is the row of the padding token if
    it is not in `rows`. A zero row of a tied output layer has a logit of 0, so mask by `training.known` when sampling.

    Raises `InvalidRequest` for a block without rows, for rows of another shape, and for more old rows than the new
    vocabulary has.
    """
    if len(embeddings) > training.vocab_size:
        raise InvalidRequest(
            f"the model has {len(embeddings)} rows, more than the {training.vocab_size} of the tokenizer: load it "
            "with a `multiple_of` that reaches them"
        )
    if unknown := rows.keys() - {block.name for block in training.blocks}:
        raise InvalidRequest(f"there is no block named {', '.join(sorted(unknown))}")
    made = np.zeros((training.vocab_size, embeddings.shape[1]), embeddings.dtype)
    made[: len(embeddings)] = embeddings
    for block in training.blocks:
        given, expected = rows.get(block.name), (len(block.tokens), embeddings.shape[1])
        if given is None and block.tokens == (training.pad_token,):
            continue
        if given is None or given.shape != expected:
            found = "none" if given is None else f"an array of shape {given.shape}"
            raise InvalidRequest(f"rows for block {block.name!r}: expected shape {expected}, found {found}")
        made[block.ids] = given
    return made


def enlarge_model(
    model: Any, training: TrainingTokenizer, rows: Mapping[str, Rows], output_rows: Mapping[str, Rows] | None = None
) -> None:
    """Add the rows of `enlarged` and the padding token to a `transformers` model, in place. Needs torch.

    `output_rows` are for an untied output layer, by default `rows`. A tied layer follows the input layer.
    """
    import torch

    layers = [(model.get_input_embeddings(), rows)]
    output = model.get_output_embeddings()
    if output is not None and output.weight.data_ptr() != layers[0][0].weight.data_ptr():
        layers.append((output, rows if output_rows is None else output_rows))
    made = [enlarged(layer.weight.detach().float().cpu().numpy(), training, some) for layer, some in layers]
    model.resize_token_embeddings(training.vocab_size, mean_resizing=False)
    with torch.no_grad():
        for layer, values in zip((model.get_input_embeddings(), model.get_output_embeddings()), made, strict=False):
            layer.weight.copy_(torch.from_numpy(values))
    for config in filter(None, (model.config.get_text_config(), model.generation_config)):
        config.pad_token_id = training.pad_id


def _unit(rows: Rows) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
