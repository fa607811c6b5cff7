"""What comes back from SGLang's `/generate`, read strictly: two kinds of streams, spans of weights, routed experts."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

import msgspec
import numpy as np

from tokentape.engines.base import Payload, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines.http import safe_name, status_error
from tokentape.engines.replies import Completion, alternatives, decode
from tokentape.errors import EngineContractError, EngineError, InvalidRequest, TooLarge
from tokentape.types import FinishReason

GENERATE = "/generate"
DONE = b"[DONE]"


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


# Log-probability, id, and the token's text, which is not asked for.
_Entry = tuple[float | None, int, object]


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_Entry] = []
    output_top_logprobs: list[list[_Entry] | None] = []
    weight_version: str | None = None
    weight_versions: list[_Span] = []
    routed_experts: str | None = None


class _Failure(msgspec.Struct):
    code: int | str | None = None


class _Body(msgspec.Struct):
    """A whole reply or one event of a stream: they have the same fields."""

    output_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    meta_info: _Meta | None = None
    error: _Failure | str | None = None


class Reply:
    """One reply as it arrives, checked against the request."""

    def __init__(
        self, prompt: bytes, prompt_tokens: int, params: SamplingParams, vocab_size: int, *, verify_prompt: bool
    ) -> None:
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._verify_prompt = verify_prompt
        self._completion = Completion(params, vocab_size, own_stops=bool(params.stop_token_ids))
        self._ids: list[int] = []
        self._cumulative: bool | None = None
        self._last: SampleDelta | None = None
        self._done = False

    def take(self, data: bytes) -> SampleDelta | None:
        """Take the next event, or the whole body of a reply that is not streamed.

        Returns the new tokens if there are any and more will follow.
        """
        if self._done:
            raise EngineContractError("the engine's reply goes on after its end")
        if data == DONE:
            self._done = True
            return None
        body = decode(data, _Body, "SGLang")
        if body.error is not None:
            raise _failure(body.error, data)
        if self._last is not None or body.output_ids is None or body.meta_info is None:
            raise EngineContractError("the engine sent an event without output_ids and meta_info, or after the last")
        meta = body.meta_info
        self._check_prompt(bytes(body.prompt_token_ids), meta)
        ended = meta.finish_reason
        if ended is not None and ended.type == "abort" and ended.status_code is not None:
            raise status_error(ended.status_code, GENERATE, b"")
        delta = self._delta(body.output_ids, meta)
        if ended is None:
            return delta if delta.token_ids else None
        reason = _finish_reason(ended.type)
        matched = None if isinstance(ended.matched, list) else ended.matched
        self._last = replace(
            delta,
            finish_reason=reason,
            stop=self._completion.stop(reason, matched),
            weight_spans=self._spans(meta),
            payloads=self._payloads(meta, reason),
        )
        return None

    def last(self) -> SampleDelta:
        """The delta that ended the completion, once the reply is complete."""
        if self._last is None or not self._done:
            raise EngineError(
                f"the engine's reply ended after {self._completion.tokens} tokens without a finish_reason; send the "
                "request again"
            )
        return self._last

    def _check_prompt(self, echoed: bytes, meta: _Meta) -> None:
        if self._verify_prompt and meta.finish_reason is not None and echoed in (b"", b"null"):
            raise EngineContractError("the engine returned no prompt_token_ids; expected those that were sent")
        if echoed not in (b"", b"null", self._prompt) and msgspec.json.decode(echoed) != msgspec.json.decode(
            self._prompt
        ):
            raise EngineContractError(
                "the engine sampled from another prompt than the one sent: prompt_token_ids differ"
            )

    def _delta(self, ids: list[int], meta: _Meta) -> SampleDelta:
        """The tokens of this event that were not in an earlier one."""
        entries, tops = meta.output_token_logprobs, meta.output_top_logprobs
        begin = self._begin(ids, meta)
        end = len(ids)
        if self._cumulative and meta.finish_reason is None:
            # The server writes these lists while it fills them: one may be ahead of the other by a few tokens.
            end = min(end, len(entries))
        if end < begin:
            raise EngineContractError("the engine's stream took back a token that it had sent")
        reported = [token_id for _, token_id, _ in entries[begin:end]]
        if ids[begin:end] != reported or (meta.finish_reason is not None and len(entries) > end > begin):
            raise EngineContractError(
                f"the engine returned {len(ids) - begin} new ids and log-probabilities of {len(entries) - begin} "
                "ids; expected the same ids"
            )
        top = [
            alternatives([(token_id, logprob) for logprob, token_id, _ in row or ()], self._params.top_logprobs)
            for row in (tops[begin:end] if self._params.top_logprobs else ())
        ]
        delta = self._completion.delta(reported, [logprob for logprob, _, _ in entries[begin:end]], top)
        self._ids += reported
        if meta.finish_reason is not None and (meta.finish_reason.type != "abort" or meta.prompt_tokens is not None):
            self._completion.check_counts(meta.prompt_tokens or 0, self._prompt_tokens, meta.completion_tokens)
        return replace(delta, weight_version=meta.weight_version)

    def _begin(self, ids: list[int], meta: _Meta) -> int:
        """Where in this event's ids the new ones begin.

        The server's count of all tokens so far tells the two kinds of stream apart: with ids seen before, it is
        theirs and this event's together only if the event holds new ones alone.
        """
        seen = len(self._ids)
        if not seen:
            return 0
        if self._cumulative is None:
            self._cumulative = meta.completion_tokens != seen + len(ids)
        if self._cumulative:
            if ids[:seen] != self._ids:
                if self._repeats_last(ids, meta):
                    return len(ids)
                raise EngineContractError(
                    "the engine's stream neither repeats the ids that it sent nor counts them with the new ones"
                )
            return seen
        if self._repeats_last(ids, meta):
            return len(ids)
        if meta.completion_tokens != seen + len(ids):
            raise EngineContractError(
                f"the engine counts {meta.completion_tokens} tokens after {seen} and {len(ids)}; an event was lost"
            )
        return 0

    def _repeats_last(self, ids: list[int], meta: _Meta) -> bool:
        """Whether this is how an incremental stream ends when the call is aborted while it waits to go on."""
        finish = meta.finish_reason
        aborted = finish is not None and finish.type == "abort"
        return aborted and ids == self._ids[-1:] and meta.completion_tokens == len(self._ids)

    def _spans(self, meta: _Meta) -> tuple[WeightSpan, ...]:
        spans = tuple(
            WeightSpan(one.version, one.start, one.end) for one in meta.weight_versions if one.end > one.start
        )
        edges = [0, *(span.end for span in spans)]
        if spans and ([span.start for span in spans] != edges[:-1] or edges[-1] != self._completion.tokens):
            raise EngineContractError(
                f"the engine's weight_versions do not cover the {self._completion.tokens} tokens that it sampled"
            )
        return spans

    def _payloads(self, meta: _Meta, reason: FinishReason) -> tuple[Payload, ...]:
        start = self._params.payloads_from
        if start is None:
            return ()
        if meta.routed_experts is None:
            if reason == "abort":
                return ()
            raise EngineContractError("the engine returned no routed_experts; was it started for a dense model?")
        try:
            flat = np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), dtype="<i4")
        except (binascii.Error, ValueError):
            raise EngineContractError("the engine's routed_experts are not base64 of 32-bit integers") from None
        tokens = self._prompt_tokens + self._completion.tokens - 1 - start
        if tokens < 1 or not flat.size or flat.size % tokens:
            raise EngineContractError(
                f"the engine returned {flat.size} routed experts; expected the same number for each of {tokens} tokens"
            )
        return (Payload("routed_experts", start, flat.reshape(tokens, -1)),)


def _failure(error: _Failure | str, body: bytes) -> EngineError | InvalidRequest | TooLarge:
    """The error that came within a stream, after a 200."""
    code = error.code if isinstance(error, _Failure) else 400
    return status_error(code if isinstance(code, int) else 500, GENERATE, body)


def _finish_reason(name: str) -> FinishReason:
    match name:
        case "stop" | "length" | "abort":
            return name
        case _:
            raise EngineContractError(
                f"the engine finished with {safe_name(name) or 'an unknown reason'}; expected stop, length or abort"
            )
