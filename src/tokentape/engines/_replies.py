"""Read replies from remote engines, and check their tokens and finish reason against the request.

A value that does not agree with the request raises `EngineContractError`. No value is guessed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from tokentape._supports import kept_ids, pack
from tokentape.engines._base import PER_TOKEN, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._server_errors import UNREADABLE, safe_name
from tokentape.errors import (
    EngineContractError,
    EngineError,
    TokentapeError,
)
from tokentape.types import FinishReason

OWN_CALLS = "0d5b2c9e71a84f36"
"""A random constant in the id of every call, by which the ids of calls are found in replies."""

DONE = b"[DONE]"
"""The last event of a stream."""

UNNAMED_WEIGHTS = "default"
"""The weight version that vLLM and SGLang report if none was set."""

ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much because of rounding. Logits exceed it by far."""

_MOST_PROBABILITY = 1.05
"""The probabilities of alternatives may sum to this much: bfloat16 rounds a log-probability of -3 by up to 0.008."""

LOWEST = -1e30
"""Lower or equal numbers mean minus infinity, which JSON lacks: servers send their lowest number instead."""

Alternatives: TypeAlias = tuple[tuple[int, float], ...]
"""(id, log-probability) pairs for one position, best first."""

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


@cache
def _decoder(shape: type[_Shape]) -> msgspec.json.Decoder[_Shape]:
    return msgspec.json.Decoder(shape)


def decode(body: bytes, shape: type[_Shape], server: str) -> _Shape:
    """Decode the JSON `body` as `shape`. Raises `EngineContractError` that names the wrong field but not its value."""
    try:
        reply: _Shape = _decoder(shape).decode(body)
        return reply
    except UNREADABLE as error:
        # The text of a UnicodeDecodeError quotes the reply.
        reason = str(error) if isinstance(error, msgspec.MsgspecError) else "not JSON in UTF-8, or nested too deeply"
        raise EngineContractError(f"the engine's reply is not in {server}'s format: {reason}") from None


def joined(deltas: Sequence[SampleDelta]) -> SampleDelta:
    """Join one or more consecutive deltas. Fields other than `PER_TOKEN` come from the last delta."""
    if len(deltas) == 1:
        return deltas[0]
    entries: dict[str, Any] = {
        name: tuple(chain.from_iterable(getattr(delta, name) for delta in deltas)) for name in PER_TOKEN
    }
    return replace(deltas[-1], **entries)


async def whole(deltas: AsyncGenerator[SampleDelta, None]) -> SampleDelta:
    """Join all deltas of a completion."""
    async with aclosing(deltas):
        return joined([delta async for delta in deltas])


def alternatives(
    reported: Sequence[tuple[int, float | None]], top: int, vocab_size: int, lowest: float = LOWEST
) -> Alternatives:
    """Return the `top` most likely of the (id, log-probability) pairs that a server reports for a position.

    Ids outside the vocabulary are left out: they are padding rows of the embedding and have no text.
    """
    pairs = [(token_id, logprob) for token_id, logprob in reported if logprob is not None and logprob > lowest]
    pairs.sort(key=lambda pair: -pair[1])
    if not pairs:
        raise EngineContractError("the engine returned an empty list of alternatives for a token")
    if pairs[0][1] > ROUNDING:
        raise logits_error()
    total = sum(map(math.exp, dict(pairs).values()))
    if total > _MOST_PROBABILITY:
        raise EngineContractError(
            f"the engine reports alternatives for a token whose probabilities sum to {total:.2f}; expected at most 1. "
            "If these are logits, start vLLM with --logprobs-mode raw_logprobs"
        )
    return tuple([pair for pair in pairs if pair[0] < vocab_size][:top])


def _check_agreement(token_id: int, logprob: float, reported: Sequence[tuple[int, float | None]]) -> None:
    """Raise `EngineContractError` if a sampled id has another log-probability among all reported alternatives."""
    among = dict(reported).get(token_id)
    if among is not None and abs(among - logprob) > ROUNDING:
        raise EngineContractError(
            f"the engine reports log-probability {logprob:.4f} for sampled id {token_id}, and {among:.4f} for it among "
            "the alternatives; expected the same number"
        )


def logits_error() -> EngineContractError:
    """Return the error to raise for a log-probability above 0."""
    return EngineContractError(
        "the engine reports logits instead of log-probabilities; expected numbers of at most 0 (start vLLM with "
        "--logprobs-mode raw_logprobs)"
    )


def finish_reason_of(name: object) -> FinishReason:
    """Check and return a server's `finish_reason`. Raises `EngineError` for `error` and for unknown names."""
    match name:
        case "stop" | "length" | "abort":
            return name
        case "error":
            raise EngineError("the engine failed while sampling; see its log")
    raise EngineContractError(
        f"the engine finished with {safe_name(name) or 'an unknown reason'}; expected stop, length or abort"
    )


@dataclass(eq=False)
class ReceivedTokens:
    """Checks the tokens of one call as they arrive."""

    params: SamplingParams
    """The parameters of the request."""
    vocab_size: int
    """Greater or equal ids are refused."""
    own_stops: bool = field(default=False, kw_only=True)
    """Whether the server always ends at the model's own end-of-sequence ids too."""
    lowest: float = field(default=LOWEST, kw_only=True)
    """Lower or equal log-probabilities mean minus infinity."""
    tokens: int = field(default=0, init=False)
    last_id: int | None = field(default=None, init=False)

    def delta(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Sequence[tuple[int, float | None]]] = (),
        masks: Sequence[Sequence[int]] = (),
    ) -> SampleDelta:
        """Check the next tokens and return them as a delta.

        `logprobs` has an entry for each id. If requested, so have `top`, with (id, log-probability) alternatives, and
        `masks`, with the ids that truncation kept.
        """
        usable = self._usable(logprobs)
        if len(logprobs) != len(ids):
            raise EngineContractError(f"the engine returned {len(logprobs)} log-probabilities for {len(ids)} ids")
        most = self.params.top_logprobs
        if most and len(top) != len(ids):
            raise EngineContractError(f"the engine returned {len(top)} lists of alternatives for {len(ids)} ids")
        self.check_ids(ids)
        self._check_not_stopped(ids)
        self.tokens += len(ids)
        if self.tokens > self.params.max_tokens:
            raise EngineContractError(
                f"the engine sampled {self.tokens} tokens; expected at most {self.params.max_tokens}"
            )
        self.last_id = ids[-1] if ids else self.last_id
        best = tuple([alternatives(row, most, self.vocab_size, self.lowest) for row in top]) if most else ()
        # With supports, SGLang reports alternatives over the whole vocabulary.
        for row in zip(ids, usable, top if best and not self.params.supports else (), strict=False):
            _check_agreement(*row)
        return SampleDelta(
            tuple(ids),
            usable,
            top_logprobs=best,
            supports=self._supports(ids, masks) if self.params.supports else (),
        )

    def _check_not_stopped(self, ids: Sequence[int]) -> None:
        """Raise `EngineContractError` if one of `ids` follows a requested stop id."""
        if stops := {self.last_id, *ids[:-1]}.intersection(self.params.stop_token_ids) if ids else ():
            raise EngineContractError(
                f"the engine continued after id {stops.pop()}, which is a stop id of the request; use a server that "
                "supports `stop_token_ids`"
            )

    def _supports(self, ids: Sequence[int], masks: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
        if len(masks) != len(ids):
            raise EngineContractError(f"the engine returned {len(masks)} sampling masks for {len(ids)} ids")
        for token_id, mask in zip(ids, masks, strict=True):
            self._check_support(token_id, mask)
        return tuple([pack(mask, self.params.supports) for mask in masks])

    def check_supports(self, ids: Sequence[int], supports: Sequence[bytes]) -> tuple[bytes, ...]:
        """Check and return packed `supports`: none, or one for each id, which must contain the id."""
        if supports and len(supports) != len(ids):
            raise EngineContractError(f"the engine returned {len(supports)} supports for {len(ids)} ids")
        for token_id, support in zip(ids, supports, strict=False):
            try:
                mask = kept_ids(support)
            except ValueError as error:
                raise EngineContractError(f"the engine returned a support that can't be read: {error}") from None
            if mask is not None:
                self._check_support(token_id, mask.tolist())
        return tuple(supports)

    def _check_support(self, token_id: int, mask: Sequence[int]) -> None:
        if token_id not in mask:
            raise EngineContractError(
                f"the engine sampled id {token_id}, which is not among the {len(mask)} ids of its sampling mask"
            )
        self.check_ids(mask)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `EngineContractError` unless all ids are in the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise EngineContractError(
                f"the engine sampled id {outside}; the vocabulary has ids 0 to {self.vocab_size - 1}. Check that the "
                "model folder belongs to this model. If it does, the model sampled a padding row of its embedding, "
                "which it was not trained to avoid"
            )

    def stop(self, reason: FinishReason, matched: int | str | None) -> int | str | None:
        """Return the stop id or stop string that ended the completion; None for reasons other than `stop`.

        Raises `EngineContractError` if the stop was not requested or differs from the last id, or if the reason is
        `length` although the last id is a requested stop. At `max_tokens`, some servers check the length first.
        """
        if reason == "abort":
            return None
        if self.last_id is None:
            raise EngineContractError(f"the engine returned no token with a logprob, and finished with {reason}")
        if reason == "length":
            most = self.params.max_tokens
            if self.last_id in self.params.stop_token_ids and self.tokens < most:
                raise EngineContractError(
                    f"the engine finished with length at token {self.tokens} of at most {most}, which is stop id "
                    f"{self.last_id} of the request; expected stop. Use a server that supports `stop_token_ids`"
                )
            return None
        if isinstance(matched, int) and matched == self.last_id:
            if self.own_stops or matched in self.params.stop_token_ids:
                return matched
        elif isinstance(matched, str) and matched in self.params.stop_strings:
            return matched
        raise EngineContractError(
            "the engine stopped without a requested stop: expected a stop id as the last token, or a stop string"
        )

    def spans(self, reported: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
        """Return the non-empty spans. Raises `EngineContractError` unless they cover the completion."""
        spans = tuple(span for span in reported if span.end > span.start)
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != self.tokens:
            raise EngineContractError(
                f"the engine's weight_versions do not cover the {self.tokens} tokens that it sampled"
            )
        return spans

    def named(self, version: str | None) -> str | None:
        """Return the version that a server reports, or None if it is unnamed or the call has an adapter.

        Servers report the model's version, not the adapter's.
        """
        return None if version == UNNAMED_WEIGHTS or self.params.adapter is not None else version

    def named_spans(self, reported: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
        """Check and return the spans that a server reports; none if no version is `named`."""
        spans = self.spans(reported)
        return spans if any(self.named(span.version) for span in spans) else ()

    def check_counts(self, prompt_tokens: int, sent_tokens: int, completion_tokens: int) -> None:
        """Raise unless the server's counts agree with the number of ids sent and the number received."""
        if (prompt_tokens, completion_tokens) != (sent_tokens, self.tokens):
            raise EngineContractError(
                f"the engine counts {prompt_tokens} prompt and {completion_tokens} completion tokens; "
                f"{sent_tokens} were sent and {self.tokens} came back"
            )

    def _usable(self, logprobs: Sequence[float | None]) -> tuple[float, ...]:
        values = cast("tuple[float, ...]", tuple(logprobs) if None not in logprobs else ())
        # The sum is finite only if every value is.
        finite = math.isfinite(sum(values)) or all(map(math.isfinite, values))
        if len(values) != len(logprobs) or not finite or min(values, default=0.0) <= self.lowest:
            raise EngineContractError(
                "the engine reported no usable log-probability for a token that it sampled; expected a finite number"
            )
        if max(values, default=0.0) > ROUNDING:
            raise logits_error()
        return values


@dataclass(eq=False, kw_only=True)
class EngineReply(ReceivedTokens, ABC):
    """Reads one reply as it arrives, and checks it against the request."""

    path: str
    """The path that replies."""
    prompt: bytes | None
    """The prompt ids as sent, in JSON; None if the server renders messages and has not sent them yet."""
    prompt_tokens: int
    """Number of prompt ids; 0 until the server has reported it."""
    call: str = ""
    """The call's id from `unique_id`, if the server gets one."""
    returns_prompt: bool = False
    """Whether the reply must have the prompt ids, to compare with the ids sent."""
    _prompt_seen: bool = field(default=False, init=False)
    _ended: SampleDelta | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    """Whether the whole reply has been read: a stream up to its last event."""

    def feed(self, data: bytes) -> SampleDelta | None:
        """Read the next event, or the whole body of a reply that is not streamed.

        Return its tokens; None if it has no tokens or ends the completion (see `last`).
        """
        if self.done:
            raise EngineContractError("the engine's reply continues after its end")
        # Servers and proxies may replace our ids, but only a reply to another call has the id of another call.
        if self.call and OWN_CALLS.encode() in data and self.call.encode() not in data:
            raise EngineContractError(
                "the engine's reply has the id of another call; expected the id of this call, or none of ours: a proxy "
                "or server between the gateway and the engine mixes up replies"
            )
        if data == DONE:
            self.done = True
            return None
        delta = self._read(data)
        if delta is not None and delta.finish_reason is not None:
            self._ended = delta
            return None
        return delta if delta is not None and delta.token_ids else None

    def feed_all(self, arrival: Sequence[bytes]) -> Iterator[SampleDelta]:
        """Yield the tokens of events that arrived together, as one delta per weight version.

        If an event is an error, the tokens before it are yielded before the error is raised.
        """
        deltas: list[SampleDelta] = []
        try:
            for data in arrival:
                delta = self.feed(data)
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

    def last(self) -> SampleDelta:
        """Return the delta that ended the completion. Raises `EngineError` if the reply is incomplete."""
        if self._ended is None or not self.done:
            missing = "a finish_reason" if self._ended is None else "the event [DONE]"
            raise EngineError(
                f"the engine's reply ended after {self.tokens} tokens without {missing}; send the request again"
            )
        return self._ended

    @abstractmethod
    def _read(self, data: bytes) -> SampleDelta | None:
        """Return the tokens of an event, with a `finish_reason` if it is the last event.

        If the server's streams do not end with `[DONE]`, set `done` at the last event.
        """

    def _check_prompt(self, echoed: msgspec.Raw) -> None:
        """Compare the prompt ids in the reply, if present, with the ids sent."""
        ids = bytes(echoed)
        if ids in (b"", b"null"):
            return
        if self.prompt is None:
            self.prompt, self.prompt_tokens = ids, ids.count(b",") + 1
        # The server's JSON has no spaces either, so equal ids are nearly always equal bytes.
        same = ids == self.prompt
        with suppress(*UNREADABLE):
            same = same or msgspec.json.decode(ids) == msgspec.json.decode(self.prompt)
        if not same:
            raise EngineContractError(
                "the engine sampled from a different prompt: its prompt_token_ids differ from the ids sent"
            )
        self._prompt_seen = True

    def _require_prompt(self) -> None:
        if self.returns_prompt and not self._prompt_seen:
            raise EngineContractError(
                "the engine returned no prompt_token_ids, which --verify-prompts and images need; update the server"
            )
