"""What the engines over HTTP share in reading a reply: its tokens and its end, checked against the request.

Nothing in a reply is taken on trust and nothing in it is guessed. What does not agree is an `EngineContractError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import TypeAlias, TypeVar

import msgspec

from tokentape.engines.base import SampleDelta, SamplingParams
from tokentape.errors import EngineContractError, TokentapeError
from tokentape.types import FinishReason

ROUNDING = 1e-3
"""A log-probability may exceed 0 by rounding only; a server that reports logits exceeds it by far."""

LOWEST = -1e30
"""At or below it a server means minus infinity: JSON has none, so they send the lowest number they know."""

Alternatives: TypeAlias = tuple[tuple[int, float], ...]
"""(id, log-probability) pairs of one position, best first."""

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


@cache
def _decoder(shape: type[_Shape]) -> msgspec.json.Decoder[_Shape]:
    return msgspec.json.Decoder(shape)


def decode(body: bytes, shape: type[_Shape], server: str) -> _Shape:
    """`body` as `shape`.

    Raises:
        EngineContractError: it is not JSON of that form. The text names the field, never its value.

    """
    try:
        found: _Shape = _decoder(shape).decode(body)
        return found
    except msgspec.MsgspecError as error:
        raise EngineContractError(f"the engine's reply is not of the form that {server}'s has: {error}") from None


def joined(deltas: Sequence[SampleDelta]) -> SampleDelta:
    """One delta of several that follow each other, at least one; all but the tokens is as the last one says."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        top_logprobs=tuple(chain.from_iterable(delta.top_logprobs for delta in deltas)),
    )


def taken(take: Callable[[bytes], SampleDelta | None], arrival: Sequence[bytes]) -> Iterator[SampleDelta]:
    """What the events of one arrival tell, each given to `take`: one delta, or one for each version of the weights.

    Raises as `take` does, behind what was sampled before: that counts.
    """
    deltas: list[SampleDelta] = []
    try:
        for data in arrival:
            delta = take(data)
            if delta is None:
                continue
            if deltas and delta.weight_version != deltas[-1].weight_version:
                yield joined(deltas)
                deltas = []
            deltas.append(delta)
    except TokentapeError:
        if deltas:
            yield joined(deltas)
        raise
    if deltas:
        yield joined(deltas)


def alternatives(reported: Sequence[tuple[int, float | None]], top: int) -> Alternatives:
    """The `top` most likely of the (id, log-probability) pairs that a server reports for a position."""
    pairs = [(token_id, logprob) for token_id, logprob in reported if logprob is not None and logprob > LOWEST]
    pairs.sort(key=lambda pair: -pair[1])
    if not pairs:
        raise EngineContractError("the engine returned an empty list of alternatives for a token")
    if pairs[0][1] > ROUNDING:
        raise logits_error()
    return tuple(pairs[:top])


def logits_error() -> EngineContractError:
    """The error for a number above 0 where a log-probability was expected."""
    return EngineContractError("the engine reports logits instead of log-probabilities; expected numbers up to 0")


class Completion:
    """The tokens of one call as they arrive.

    Args:
        params: what was asked for.
        vocab_size: ids at or above it are refused.
        own_stops: the server also ends at the model's own end-of-sequence ids and can't be told not to.

    """

    def __init__(self, params: SamplingParams, vocab_size: int, *, own_stops: bool = False) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._own_stops = own_stops
        self.tokens = 0
        self._last_id: int | None = None

    def delta(
        self, ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Alternatives] = ()
    ) -> SampleDelta:
        """The next tokens, each with its log-probability and, if asked for, alternatives."""
        if len(logprobs) != len(ids):
            raise EngineContractError(f"the engine returned {len(logprobs)} log-probabilities for {len(ids)} ids")
        if self._params.top_logprobs and len(top) != len(ids):
            raise EngineContractError(f"the engine returned {len(top)} lists of alternatives for {len(ids)} ids")
        self.check_ids(ids)
        self.tokens += len(ids)
        if self.tokens > self._params.max_tokens:
            raise EngineContractError(
                f"the engine sampled {self.tokens} tokens; expected at most {self._params.max_tokens}"
            )
        self._last_id = ids[-1] if ids else self._last_id
        usable = tuple(map(_usable, logprobs))
        return SampleDelta(tuple(ids), usable, top_logprobs=tuple(top) if self._params.top_logprobs else ())

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise unless all are in the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise EngineContractError(
                    f"the engine sampled id {token_id}; the vocabulary is 0 to {self._vocab_size - 1}. Is "
                    "the model folder that of another model? If not, a model that was not trained to avoid rows of the "
                    "embedding beyond the tokenizer can sample them"
                )

    def stop(self, reason: FinishReason, matched: int | str | None) -> int | str | None:
        """What ended the completion, if it is something that was asked for and the ids agree."""
        if reason == "abort":
            return None
        if self._last_id is None:
            raise EngineContractError(f"the engine finished with {reason} before it sampled anything")
        if reason == "length":
            return None
        if isinstance(matched, int) and matched == self._last_id:
            if self._own_stops or matched in self._params.stop_token_ids:
                return matched
        elif isinstance(matched, str) and matched in self._params.stop_strings:
            return matched
        raise EngineContractError(
            "the engine stopped, but not at one of the stop ids and strings asked for, or not with that id last"
        )

    def check_counts(self, prompt_tokens: int, sent: int, completion_tokens: int) -> None:
        """Raise unless the server's counts are those of what was sent and came back."""
        if (prompt_tokens, completion_tokens) != (sent, self.tokens):
            raise EngineContractError(
                f"the engine counts {prompt_tokens} prompt and {completion_tokens} completion tokens; "
                f"{sent} were sent and {self.tokens} came back"
            )


def _usable(logprob: float | None) -> float:
    if logprob is None or not math.isfinite(logprob) or logprob <= LOWEST:
        raise EngineContractError(
            "the engine reported no usable log-probability for a token that it sampled; expected a finite number"
        )
    if logprob > ROUNDING:
        raise logits_error()
    return logprob
