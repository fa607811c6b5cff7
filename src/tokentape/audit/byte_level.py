"""How probable a model of tokens finds bytes, whatever tokens they are spelled with; and what drift costs by it.

One text has many spellings in tokens, and a model gives each a probability of its own. The probability of the text is
their sum. For the bytes that a completion *begins* with, the spellings are the cover encodings of the Byte-Token
Representation Lemma (arXiv 2410.09303): token sequences of which all but the last token lie within the bytes, and the
last one reaches their end or beyond. For bytes that the completion *is*, they are the sequences that spell exactly
them, each with the probability that the model stops there.

A model looks at all tokens before, so the spellings share no work but common beginnings, and their number grows
exponentially with the bytes. They are searched from the most probable beginning on. What was found is a lower bound of
the sum; with the probability of every beginning not yet followed it is an upper bound. Where none is left the sum is
exact. A model that was trained on canonical ids has nearly all of its mass there, so the bounds meet early.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

_NEAR = 3.0
"""Beginnings this much less probable than the best, in nats, are looked at together with it."""


class TokenModel(Protocol):
    """A model behind one context."""

    def next_logprobs(self, prefixes: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """Natural-log probability of every id behind the context and each prefix, float64 [prefixes, ids]."""
        ...

    def logprobs_of(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Natural-log probability of each id behind the context and the ids before it, float64 [ids]."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """A log-probability, from below and above."""

    lower: float
    """Natural log of the summed probability of the spellings found; minus infinity if there is none."""
    upper: float
    exact: bool
    """Whether every spelling was found; then the bounds are equal."""
    spellings: int
    """How many were found: beginnings that end the bytes, in one or many ways."""
    evaluations: int
    """How many contexts the model was asked about."""


@dataclass(frozen=True, slots=True)
class Price:
    """What the same bytes cost in different ids, as natural-log probabilities."""

    sampled: float
    """Of the ids as they are."""
    canonical: float | None
    """Of the ids that encoding the bytes gives; None where they are no UTF-8, or do not come back the same."""
    text: Bounds
    """Of the bytes, over all spellings."""

    @property
    def drift(self) -> float | None:
        """What a trainer that re-encodes is off by: `canonical - sampled`, in nats. 0 without drift."""
        return None if self.canonical is None else self.canonical - self.sampled


class Spellings:
    """Which ids spell which bytes. Use `Spellings.of`; ids that spell nothing take part in no spelling."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        by_bytes: dict[bytes, list[int]] = {}
        for token_id, piece in pieces.items():
            if piece:
                by_bytes.setdefault(piece, []).append(token_id)
        self._by_bytes = by_bytes
        self._sorted = sorted(by_bytes)
        self._longest = max(map(len, by_bytes), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spellings:
        """Those of a tokenizer's text tokens. Control tokens spell nothing, whatever their name."""
        pieces = {}
        for token_id in range(tokenizer.vocab_size):
            if tokenizer.control_by_id(token_id) is None:
                try:
                    pieces[token_id] = tokenizer.token_bytes(token_id)
                except InvalidRequest:
                    continue  # a hole in the vocabulary
        return cls(pieces)

    def within(self, rest: bytes) -> Iterator[tuple[int, int]]:
        """(id, length) of each token that spells a beginning of `rest`, all of it included."""
        for length in range(1, min(len(rest), self._longest) + 1):
            for token_id in self._by_bytes.get(rest[:length], ()):
                yield token_id, length

    def covering(self, rest: bytes) -> list[int]:
        """Ids of all tokens that begin with `rest`."""
        found: list[int] = []
        for at in range(bisect_left(self._sorted, rest), len(self._sorted)):
            if not self._sorted[at].startswith(rest):
                break
            found += self._by_bytes[self._sorted[at]]
        return found


def canonical_only(tokenizer: Tokenizer) -> Callable[[Sequence[int]], bool]:
    """A filter for `bytes_logprob`: whether ids are those that encoding their own text gives.

    For models that never sample others; then there are few spellings, however long the bytes. Tokens at the end that
    break off within a character are taken for canonical, since nothing can be encoded to compare them with.
    """

    def canonical(ids: Sequence[int]) -> bool:
        kept = list(ids)
        pieces = [tokenizer.token_bytes(token_id) for token_id in kept]
        while kept:
            try:
                text = b"".join(pieces).decode()
            except UnicodeDecodeError:
                kept.pop()
                pieces.pop()
                continue
            return tokenizer.encode_plain(text) == kept
        return True

    return canonical


def bytes_logprob(
    model: TokenModel,
    text: bytes,
    spellings: Spellings,
    *,
    stop_ids: Iterable[int] = (),
    allowed: Callable[[Sequence[int]], bool] | None = None,
    max_evaluations: int = 2048,
    tolerance: float = 1e-9,
    batch: int = 16,
) -> Bounds:
    """Log-probability of `text` behind the model's context.

    Args:
        model: see `TokenModel`.
        text: the bytes.
        spellings: of the model's tokenizer.
        stop_ids: if given, the completion is `text` and then one of these; else it begins with `text`.
        allowed: which sequences of ids count; all if not given. See `canonical_only`.
        max_evaluations: contexts to ask the model about at most; each costs it a forward pass.
        tolerance: the search ends where the upper bound is no further above the lower one than this, in nats.
        batch: contexts per call of the model.

    Raises:
        InvalidRequest: there are no bytes.

    """
    if not text:
        raise InvalidRequest("there are no bytes to find the probability of")
    stops = np.array(sorted(stop_ids), np.int64)
    # Of beginnings: minus the log-probability, how many bytes they spell, the ids.
    open_: list[tuple[float, int, tuple[int, ...]]] = [(-0.0, 0, ())]
    found, lower, evaluations = 0, -math.inf, 0
    while open_ and evaluations < max_evaluations:
        if _sum(lower, -open_[0][0]) - lower <= tolerance and _upper(lower, open_) - lower <= tolerance:
            break
        most = open_[0][0] + _NEAR
        taken = [heapq.heappop(open_)]
        while open_ and open_[0][0] <= most and len(taken) < min(batch, max_evaluations - evaluations):
            taken.append(heapq.heappop(open_))
        evaluations += len(taken)
        rows = model.next_logprobs([ids for _, _, ids in taken])
        for (cost, offset, ids), row in zip(taken, rows, strict=True):
            rest = text[offset:]
            if not rest:
                lower = _sum(lower, _log_sum(row[stops]) - cost)
                found += 1
                continue
            for token_id, length in spellings.within(rest):
                begun = (*ids, token_id)
                ends = offset + length == len(text)
                if ends and not len(stops):
                    continue  # one of those that cover the rest
                if row[token_id] > -math.inf and (allowed is None or allowed(begun)):
                    heapq.heappush(open_, (cost - float(row[token_id]), offset + length, begun))
            if not len(stops):
                covering = spellings.covering(rest)
                if allowed is not None:
                    covering = [token_id for token_id in covering if allowed((*ids, token_id))]
                lower = _sum(lower, _log_sum(row[covering]) - cost)
                found += len(covering)
    exact = not open_
    return Bounds(lower, lower if exact else _upper(lower, open_), exact, found, evaluations)


def price(
    model: TokenModel,
    sampled: Sequence[int],
    tokenizer: Tokenizer,
    spellings: Spellings,
    *,
    stop_ids: Iterable[int] = (),
    max_evaluations: int = 2048,
    tolerance: float = 1e-6,
) -> Price:
    """What a completion costs in its own ids, in canonical ids, and as bytes.

    `sampled` may end with one of `stop_ids`: then all three are of the completion that ends there. Without, the text's
    is that of all completions that begin with its bytes, and so above the sampled one's.

    Raises `InvalidRequest` if there is no text, or a control token within it, which has no bytes to compare.
    """
    stops = frozenset(stop_ids)
    body = list(sampled)
    end = [body.pop()] if body and body[-1] in stops else []
    if any(tokenizer.control_by_id(token_id) is not None for token_id in body):
        raise InvalidRequest("a control token stands within the ids: price the texts before and behind it")
    spelled = b"".join(map(tokenizer.token_bytes, body))
    canonical = _canonical(spelled, tokenizer)
    return Price(
        sampled=float(model.logprobs_of([*body, *end]).sum()),
        canonical=None if canonical is None else float(model.logprobs_of([*canonical, *end]).sum()),
        text=bytes_logprob(
            model, spelled, spellings, stop_ids=end, max_evaluations=max_evaluations, tolerance=tolerance
        ),
    )


def _canonical(spelled: bytes, tokenizer: Tokenizer) -> list[int] | None:
    try:
        ids = tokenizer.encode_plain(spelled.decode())
    except UnicodeDecodeError:
        return None
    return ids if b"".join(map(tokenizer.token_bytes, ids)) == spelled else None


def _upper(lower: float, open_: Sequence[tuple[float, int, tuple[int, ...]]]) -> float:
    return _sum(lower, _log_sum(np.array([-cost for cost, _, _ in open_])))


def _sum(one: float, other: float) -> float:
    return float(np.logaddexp(one, other))


def _log_sum(values: npt.NDArray[np.float64]) -> float:
    return float(np.logaddexp.reduce(values)) if len(values) else -math.inf
