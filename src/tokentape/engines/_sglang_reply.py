"""Read replies from SGLang's `/generate`, with cumulative or incremental streams."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from tokentape.engines._base import Payload, SampleDelta, WeightSpan
from tokentape.engines._distributions import sampled_from
from tokentape.engines._replies import Alternatives, EngineReply, decode, finish_reason_of
from tokentape.engines._server_errors import Failure, failure_error, status_error
from tokentape.errors import EngineContractError, EngineError
from tokentape.types import FinishReason


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    status_code: int | None = None


_Entry = tuple[float | None, int, object]
"""Log-probability, id, and the token's text, which is not requested."""


class _SglangMeta(msgspec.Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    num_retractions: int | None = None
    output_token_logprobs: list[_Entry] = []
    output_top_logprobs: list[list[_Entry] | None] = []
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[float] = []
    weight_version: str | None = None
    weight_versions: list[WeightSpan] = []
    routed_experts: str | None = None


class _SglangBody(msgspec.Struct):
    """A whole reply or one stream event. Both have the same fields."""

    output_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    meta_info: _SglangMeta | None = None
    error: Failure | str | None = None


@dataclass(eq=False, kw_only=True)
class SglangReply(EngineReply):
    """Reads an SGLang reply."""

    path: str = "/generate"
    incremental: bool | None = None
    """Whether each event of a stream has only new ids; None if the server does not report it."""
    _ids: list[int] = field(default_factory=list, init=False)

    def _read(self, data: bytes) -> SampleDelta | None:
        body = decode(data, _SglangBody, "SGLang")
        if body.error is not None:
            raise failure_error(body.error, self.path, data)
        if self._ended is not None or body.output_ids is None or body.meta_info is None:
            raise EngineContractError(
                "the engine sent an event without output_ids or meta_info, or an event after the final one"
            )
        meta, ended = body.meta_info, body.meta_info.finish_reason
        self._check_prompt(body.prompt_token_ids)
        if ended is not None:
            self._require_prompt()
        if ended is not None and ended.type == "abort" and ended.status_code is not None:
            raise status_error(ended.status_code, self.path, b"")
        delta = self._delta(body.output_ids, meta)
        if ended is None:
            return delta
        reason = finish_reason_of(ended.type)
        matched = None if isinstance(ended.matched, list) else ended.matched
        spans = [span for span in meta.weight_versions if span.end > span.start]
        return replace(
            delta,
            finish_reason=reason,
            stop=self.stop(reason, matched),
            weight_spans=self.named_spans(spans) if spans else (),
            payloads=self._payloads(meta, reason),
            cached_tokens=meta.cached_tokens,
        )

    def _delta(self, ids: list[int], meta: _SglangMeta) -> SampleDelta:
        """Return the tokens that are new in this event."""
        entries, tops = meta.output_token_logprobs, meta.output_top_logprobs
        masks, over_masks = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
        supports = self.params.supports > 0
        begin = self._begin(ids, meta)
        end = len(ids)
        if self.incremental is False and meta.finish_reason is None:
            # The server sends these lists while it fills them, so some can be a few tokens ahead of others.
            end = min(end, len(entries), *((len(masks), len(over_masks)) if supports else ()))
        if end < begin:
            raise EngineContractError("the engine's stream has fewer ids than it had already sent; an event was lost")
        reported = [token_id for _, token_id, _ in entries[begin:end]]
        if ids[begin:end] != reported or (meta.finish_reason is not None and len(entries) > end > begin):
            raise EngineContractError(
                f"the engine returned {len(ids) - begin} new ids, and log-probabilities of {len(entries) - begin} ids; "
                "expected the same ids in both"
            )
        top = [
            [(token_id, logprob) for logprob, token_id, _ in row or ()]
            for row in (tops[begin:end] if self.params.top_logprobs else ())
        ]
        logprobs: list[float | None] = [logprob for logprob, _, _ in entries[begin:end]]
        if supports:
            # Log-probabilities over the mask: the distribution that the tokens were sampled from.
            logprobs = list(over_masks[begin:end])
        delta = self.delta(reported, logprobs, top, masks[begin:end])
        if supports and top:
            rows = zip(delta.top_logprobs, masks[begin:end], entries[begin:end], delta.logprobs, strict=True)
            delta = replace(delta, top_logprobs=tuple([_over_mask(*row) for row in rows]))
        if reported and meta.num_retractions and sampled_from(self.params).penalties:
            # After a retraction, the server counts from 0 again the tokens that penalties and min_tokens depend on.
            raise EngineError(
                "the engine retracted this call and then forgot its tokens so far, which penalties and min_tokens "
                'count; send it again, give the server more memory, and pause it with the mode "in_place" or "abort"'
            )
        self._ids += reported
        if meta.finish_reason is not None and (meta.finish_reason.type != "abort" or meta.prompt_tokens is not None):
            self.check_counts(meta.prompt_tokens or 0, self.prompt_tokens, meta.completion_tokens)
        return replace(delta, weight_version=self.named(meta.weight_version))

    def _begin(self, ids: list[int], meta: _SglangMeta) -> int:
        """Return the index of the first new id of this event.

        `completion_tokens` counts all ids so far. If the server does not report whether its streams are incremental,
        they are if this is the number of earlier ids plus the number of this event's ids.
        """
        seen = len(self._ids)
        if not seen:
            return 0
        if self.incremental is None:
            self.incremental = meta.completion_tokens == seen + len(ids)
        if not self.incremental and ids[:seen] == self._ids:
            return seen
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if aborted and ids == self._ids[-1:] and meta.completion_tokens == seen:
            return len(ids)  # the last event of an incremental stream whose call was aborted while waiting
        if not self.incremental:
            raise EngineContractError(
                "the engine's stream is inconsistent: expected all ids so far, or new ids and a count of all ids"
            )
        if meta.completion_tokens != seen + len(ids):
            raise EngineContractError(
                f"the engine counts {meta.completion_tokens} tokens after {seen} and {len(ids)}; an event was lost"
            )
        return 0

    def _payloads(self, meta: _SglangMeta, reason: FinishReason) -> tuple[Payload, ...]:
        start = self.params.payloads_from
        if start is None:
            return ()
        if meta.routed_experts is None:
            if reason == "abort":
                return ()
            raise EngineContractError("the engine returned no routed_experts; serve a mixture-of-experts model")
        try:
            flat = np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), dtype="<i4")
        except (binascii.Error, ValueError):
            raise EngineContractError("the engine's routed_experts are not base64 of 32-bit integers") from None
        tokens = self.prompt_tokens + self.tokens - 1 - start
        if tokens < 1 or not flat.size or flat.size % tokens:
            raise EngineContractError(
                f"the engine returned {flat.size} routed experts; expected the same number for each of {tokens} tokens"
            )
        return (Payload("routed_experts", start, flat.reshape(tokens, -1)),)


def _over_mask(top: Alternatives, mask: list[int], sampled: _Entry, over_mask: float) -> Alternatives:
    """Convert alternatives, reported over the whole vocabulary, to log-probabilities over the mask.

    `sampled` has the sampled id's log-probability over the vocabulary, `over_mask` is its log-probability over the
    mask. The difference is the same for all ids in the mask.
    """
    over_vocabulary, token_id, _ = sampled
    if over_vocabulary is None:
        raise EngineContractError("the engine reported alternatives for a token without its log-probability")
    converted = [(other, logprob + over_mask - over_vocabulary) for other, logprob in top if other in mask]
    return tuple(converted) or ((token_id, over_mask),)
