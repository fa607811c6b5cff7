"""Compute the probability of bytes under a token model, summed over all their tokenizations, and the price of drift.

Many token sequences spell the same text, and the probability of the text is the sum of theirs. If a completion only
*begins* with the bytes, the spellings are the cover encodings of the Byte-Token Representation Lemma (arXiv
2410.09303): the last token reaches the end of the bytes or beyond. If it *equals* them, a stop token follows.

The number of spellings grows exponentially with the bytes. The search extends the most probable prefix first. The sum
over the spellings found is a lower bound. Adding the probabilities of all unextended prefixes gives an upper bound.
"""

from __future__ import annotations

import copy
import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

_NEAR = 3.0
"""Prefixes that are at most this many nats less probable than the best one share its batch."""
_BATCH = 16
_DONE = 1e-6


class TokenModel(Protocol):
    """A language model with a fixed context, which comes before all ids passed to it."""

    def next_logprobs(self, prefixes: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """Return the natural-log probability of every id after the context and each prefix, [prefixes, ids]."""
        ...

    def logprobs_of(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the natural-log probability of each id after the context and the ids before it, [ids]."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """A lower and an upper bound on a log-probability."""

    lower: float
    """Natural log of the summed probability of the spellings found; minus infinity if none was found."""
    upper: float
    exact: bool
    """True if every spelling was found; then the bounds are equal."""
    spellings: int
    evaluations: int


@dataclass(frozen=True, slots=True)
class Price:
    """Natural-log probabilities of the same bytes, spelled by different ids."""

    sampled: float
    """The log-probability of the sampled ids."""
    canonical: float | None
    """The log-probability of the encoded text's ids; None if the bytes are not UTF-8 or encoding changes them."""
    text: Bounds
    """Bounds on the log-probability of the bytes, summed over all spellings."""

    @property
    def drift(self) -> float | None:
        """`canonical - sampled` in nats, the error of a trainer that encodes the text again. 0 without drift."""
        return None if self.canonical is None else self.canonical - self.sampled


class Spellings:
    """An index of token ids by the bytes that they spell. Ids without bytes are left out."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._by_bytes: dict[bytes, list[int]] = {}
        for token_id, piece in pieces.items():
            if piece:
                self._by_bytes.setdefault(piece, []).append(token_id)
        self._sorted = sorted(self._by_bytes)
        self._longest = max(map(len, self._by_bytes), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spellings:
        """Index a tokenizer's text tokens. Control tokens are left out, whatever their name."""
        pieces = {}
        for token_id in range(tokenizer.vocab_size):
            if tokenizer.control_by_id(token_id) is None:
                with suppress(InvalidRequest):  # a hole in the vocabulary
                    pieces[token_id] = tokenizer.token_bytes(token_id)
        return cls(pieces)

    def within(self, rest: bytes) -> Iterator[tuple[int, int]]:
        """Yield (id, length in bytes) of each token that is a prefix of `rest`."""
        for length in range(1, min(len(rest), self._longest) + 1):
            for token_id in self._by_bytes.get(rest[:length], ()):
                yield token_id, length

    def covering(self, rest: bytes) -> list[int]:
        """Return the ids of all tokens that begin with `rest`."""
        first = bisect_left(self._sorted, rest)
        last = bisect_left(self._sorted, True, first, key=lambda piece: not piece.startswith(rest))
        return [token_id for piece in self._sorted[first:last] for token_id in self._by_bytes[piece]]


def canonical_only(tokenizer: Tokenizer) -> Callable[[Sequence[int]], bool]:
    """Return a filter that accepts ids that encoding their text returns, ignoring a partial last character."""

    def canonical(ids: Sequence[int]) -> bool:
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        for end in range(len(ids), 0, -1):
            with suppress(UnicodeDecodeError):
                return tokenizer.encode_plain(b"".join(pieces[:end]).decode()) == list(ids[:end])
        return True

    return canonical


def bytes_logprob(
    model: TokenModel,
    text: bytes,
    spellings: Spellings,
    *,
    stop_ids: Iterable[int] = (),
    allowed: Callable[[Sequence[int]], bool] = lambda ids: True,
    max_evaluations: int = 2048,
    tolerance: float = 1e-9,
) -> Bounds:
    """Compute the log-probability of bytes after the model's context. Raises `InvalidRequest` if `text` is empty.

    Args:
        model: see `TokenModel`.
        text: the bytes.
        spellings: the index of the model's tokenizer.
        stop_ids: if given, the completion is `text` followed by one of these ids; else it begins with `text`.
        allowed: a filter for sequences of ids, such as `canonical_only`.
        max_evaluations: the largest number of contexts to compute, one forward pass each.
        tolerance: the search ends when the bounds are this close, in nats.

    """
    if not text:
        raise InvalidRequest("the text is empty; expected at least one byte")
    stops = sorted(stop_ids)
    # Prefixes to extend: minus the log-probability, the number of bytes, the ids.
    open_: list[tuple[float, int, tuple[int, ...]]] = [(-0.0, 0, ())]
    completed, lower, evaluations = 0, -math.inf, 0

    def upper() -> float:
        return float(np.logaddexp.reduce([lower, *(-cost for cost, _, _ in open_)]))

    while open_ and evaluations < max_evaluations:
        # Summing all prefixes is slow, so first check if the best prefix alone keeps the bounds apart.
        if np.logaddexp(lower, -open_[0][0]) - lower <= tolerance and upper() - lower <= tolerance:
            break
        furthest = open_[0][0] + _NEAR
        batch = [heapq.heappop(open_)]
        while open_ and open_[0][0] <= furthest and len(batch) < min(_BATCH, max_evaluations - evaluations):
            batch.append(heapq.heappop(open_))
        evaluations += len(batch)
        for (cost, offset, ids), row in zip(batch, model.next_logprobs([ids for _, _, ids in batch]), strict=True):
            rest = text[offset:]
            if not rest:
                last = stops
                completed += 1
            else:
                covering = () if stops else spellings.covering(rest)
                last = [token_id for token_id in covering if allowed((*ids, token_id))]
                completed += len(last)
            lower = float(np.logaddexp.reduce([lower, *(row[last] - cost)]))
            for token_id, length in spellings.within(rest):
                ends_it = length == len(rest) and not stops  # already in `last`
                if not ends_it and row[token_id] > -math.inf and allowed((*ids, token_id)):
                    heapq.heappush(open_, (cost - float(row[token_id]), offset + length, (*ids, token_id)))
    return Bounds(lower, upper() if open_ else lower, not open_, completed, evaluations)


def price(
    model: TokenModel,
    sampled: Sequence[int],
    tokenizer: Tokenizer,
    spellings: Spellings,
    *,
    stop_ids: Iterable[int] = (),
    max_evaluations: int = 2048,
) -> Price:
    """Compute the log-probability of a completion as sampled ids, as canonical ids, and as bytes.

    If `sampled` ends with one of `stop_ids`, all three include the stop token. Otherwise the log-probability of the
    bytes covers all completions that begin with them, so it is above that of the sampled ids.

    Raises `InvalidRequest` if the ids spell no text or contain a control token, which has no bytes.
    """
    body = list(sampled)
    end = [body.pop()] if body and body[-1] in frozenset(stop_ids) else []
    if any(tokenizer.control_by_id(token_id) is not None for token_id in body):
        raise InvalidRequest("the ids contain a control token: price the texts before and after it separately")
    spelled = b"".join(map(tokenizer.token_bytes, body))
    bounds = bytes_logprob(model, spelled, spellings, stop_ids=end, max_evaluations=max_evaluations, tolerance=_DONE)
    try:
        canonical = tokenizer.encode_plain(spelled.decode())
    except UnicodeDecodeError:
        canonical = []
    same = bool(canonical) and b"".join(map(tokenizer.token_bytes, canonical)) == spelled
    again = float(model.logprobs_of([*canonical, *end]).sum()) if same else None
    return Price(float(model.logprobs_of([*body, *end]).sum()), again, bounds)


class TransformersModel:
    """A `transformers` causal language model with a fixed context. The forward pass over the context runs once.

    >>> model = TransformersModel.load("path/to/model", context_ids)            # doctest: +SKIP
    >>> bytes_logprob(model, b"hello", Spellings.of(tokenizer))                 # doctest: +SKIP
    """

    def __init__(self, model: Any, context_ids: Sequence[int]) -> None:
        """`model` is a `PreTrainedModel` in evaluation mode. Raises `InvalidRequest` for an empty context."""
        import torch

        if not len(context_ids):
            raise InvalidRequest("the context is empty; pass at least the id that texts begin with, such as BOS")
        from tokentape.engines._kv import cache_name

        self._torch, self._model, self._cache_name = torch, model, cache_name(model)
        begun = self._run([list(context_ids)], None)
        self._cache, self._first = begun[self._cache_name], self._logprobs(begun.logits[0, -1])

    @classmethod
    def load(cls, folder: str | Path, context_ids: Sequence[int], *, device: str = "cpu") -> TransformersModel:
        """Load a folder's weights in float32, without downloads. Raises `EngineError` if they can't be loaded."""
        from tokentape.engines._loading import load_model

        return cls(load_model(Path(folder), dtype="float32", device=device), context_ids)

    def next_logprobs(self, prefixes: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """See `TokenModel`. Prefixes of the same length are one batch."""
        rows = np.empty((len(prefixes), len(self._first)))
        for length in {len(prefix) for prefix in prefixes}:
            places = [n for n, prefix in enumerate(prefixes) if len(prefix) == length]
            if not length:
                rows[places] = self._first
                continue
            cache = copy.deepcopy(self._cache)
            cache.batch_repeat_interleave(len(places))
            rows[places] = self._logprobs(self._run([list(prefixes[n]) for n in places], cache).logits[:, -1])
        return rows

    def logprobs_of(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """See `TokenModel`. One forward pass."""
        rows = self._first[None]
        if len(ids) > 1:
            after = self._run([list(ids[:-1])], copy.deepcopy(self._cache)).logits[0]
            rows = np.concatenate([rows, self._logprobs(after)])
        return rows[np.arange(len(ids)), list(ids)]

    def _run(self, rows: list[list[int]], cache: Any) -> Any:
        ids = self._torch.tensor(rows, device=self._model.device)
        with self._torch.inference_mode():
            return self._model(input_ids=ids, use_cache=True, **{self._cache_name: cache})

    def _logprobs(self, logits: Any) -> npt.NDArray[np.float64]:
        return np.asarray(logits.double().log_softmax(-1).cpu(), np.float64)
