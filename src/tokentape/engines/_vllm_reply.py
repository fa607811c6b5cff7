"""Read replies from vLLM's three routes, and from `/v1/completions` of compatible servers.

The routes identify the tokens of log-probabilities differently, as integers or as `token_id:N`, and return the prompt
ids in different places.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from tokentape.engines._base import Payload, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._replies import EngineReply, decode, finish_reason_of
from tokentape.engines._server_errors import UNREADABLE, Failure, failure_error
from tokentape.errors import EngineContractError
from tokentape.types import FinishReason, TokenIds

_ID_PREFIX = "token_id:"
"""With `return_tokens_as_token_ids`, tokens are reported as this prefix and their id instead of their text."""

_MOST_DIGITS = 20
"""Maximum number of digits in a token id. int() raises for thousands of digits."""

_NAMES = re.compile(rf"{_ID_PREFIX}[0-9]{{1,{_MOST_DIGITS}}}(\n{_ID_PREFIX}[0-9]{{1,{_MOST_DIGITS}}})*")
"""Matches id names joined with line breaks."""

_VLLM_LOWEST = -9999.0
"""vLLM sends this number for minus infinity. No sampled token can have it."""


class _Top(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str = ""


class _Entry(msgspec.Struct):
    """A token's log-probability. The generate route sends `token_id`, chats send `token`."""

    logprob: float | None
    token_id: int | None = None
    token: str = ""
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    """Log-probabilities: parallel lists in completions, `content` on the other routes."""

    content: list[_Entry] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


_NO_LOGPROBS = _Logprobs()


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    """SGLang's name for `stop_reason`."""
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None
    """Sent by vLLM with --enable-prompt-tokens-details."""


class _VllmBody(msgspec.Struct):
    """A whole reply or one stream event. Both have the same fields, on all routes."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Failure | str | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


@dataclass(eq=False, kw_only=True)
class VllmReply(EngineReply):
    """Reads a vLLM reply. With `own_stops`, the server also ends at tool calls."""

    names_ids: bool = True
    """Whether the reply also has the sampled ids in `token_ids`, to compare with the ids in the log-probabilities."""
    texts: bool = False
    """Whether log-probabilities identify tokens by text. Then only `token_ids` has the ids."""
    offers: set[str] = field(default_factory=set, init=False)
    """The optional fields in the reply: `weight_versions`, `routed_experts`, `sampling_mask`."""
    _usage: _Usage | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.texts:
            self.lowest = _VLLM_LOWEST

    def last(self) -> SampleDelta:
        """Return the delta that ended the completion. Check that the reply is complete and that its counts agree."""
        sampled = self._usage is None or self._usage.completion_tokens or self.tokens
        if self.done and self._ended is None and not sampled:
            # vLLM's completions leave out the event that ends a call if it was aborted before its first token.
            return SampleDelta((), (), "abort")
        ended = super().last()
        self._require_prompt()
        if self._usage is None:
            raise EngineContractError("the engine reported no usage; expected prompt and completion token counts")
        self.check_counts(self._usage.prompt_tokens, self.prompt_tokens, self._usage.completion_tokens)
        details = self._usage.prompt_tokens_details
        return ended if details is None else replace(ended, cached_tokens=details.cached_tokens)

    @property
    def prompt_ids(self) -> TokenIds | None:
        """The prompt's ids, int32 [tokens]; None until the server has sent them."""
        if self.prompt is None:
            return None
        try:
            return np.array(msgspec.json.decode(self.prompt, type=list[int]), np.int32)
        except (*UNREADABLE, OverflowError):
            raise EngineContractError("the engine's prompt_token_ids are not a list of token ids") from None

    def _read(self, data: bytes) -> SampleDelta | None:
        body = decode(data, _VllmBody, "vLLM")
        if body.error is not None:
            # After a stream has begun, errors are sent as events instead of statuses.
            raise failure_error(body.error, self.path, data)
        self._usage = body.usage or self._usage
        if not body.choices:
            return None
        if len(body.choices) > 1 or body.choices[0].index != 0 or self._ended is not None:
            raise EngineContractError("the engine sampled more than the one completion that was requested")
        choice = body.choices[0]
        if self.returns_prompt:
            self._check_prompt(choice.prompt_token_ids)
            self._check_prompt(body.prompt_token_ids)
        delta = self._delta(choice)
        if choice.finish_reason is None:
            return delta
        ends_with_calls = self.own_stops and choice.finish_reason == "tool_calls"
        reason = finish_reason_of("stop" if ends_with_calls else choice.finish_reason)
        matched = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
        if matched is None and self.own_stops:
            matched = self.last_id
        return replace(
            delta,
            finish_reason=reason,
            stop=self.stop(reason, matched),
            weight_spans=self._spans(choice.weight_versions),
            payloads=self._payloads(choice.routed_experts, reason),
        )

    def _delta(self, choice: _Choice) -> SampleDelta:
        report = choice.logprobs or _NO_LOGPROBS
        named = choice.token_ids or []
        ids: Sequence[int]
        tops: Sequence[Sequence[tuple[int, float | None]]] = ()
        if self.texts:
            if report.token_logprobs and not named:
                raise EngineContractError("the engine returned no token_ids, which were requested; update the server")
            return self.delta(named, report.token_logprobs)
        if report.content:
            ids = [_id_of(entry) for entry in report.content]
            logprobs = [entry.logprob for entry in report.content]
            if self.params.top_logprobs:
                tops = [[(_id_of(top), top.logprob) for top in entry.top_logprobs] for entry in report.content]
        else:
            ids, logprobs = _token_ids(report.tokens), report.token_logprobs
            if self.params.top_logprobs:
                rows = report.top_logprobs or ()
                tops = [[(_token_id(name), logprob) for name, logprob in (row or {}).items()] for row in rows]
        if self.names_ids and named != ids:
            raise EngineContractError(
                f"the reply's token_ids ({len(named)}) and the ids of its log-probabilities ({len(ids)}) are not the "
                "same; a vLLM older than 0.10.2 returns no token_ids: update it"
            )
        for token_id, top in zip(ids, tops, strict=False):
            if top and all(other != token_id for other, _ in top):
                raise EngineContractError(
                    f"the engine sampled id {token_id}, which is not among the {len(top)} alternatives that it reports "
                    "for this token; vLLM always includes it"
                )
        if choice.sampling_mask is not None:
            self.offers.add("sampling_mask")
        return self.delta(ids, logprobs, tops, choice.sampling_mask or ())

    def _spans(self, reported: list[WeightSpan] | None) -> tuple[WeightSpan, ...]:
        if reported is None:
            return ()
        self.offers.add("weight_versions")
        return self.named_spans(reported)

    def _payloads(self, encoded: str | None, reason: FinishReason) -> tuple[Payload, ...]:
        if encoded is not None:
            self.offers.add("routed_experts")
        start = self.params.payloads_from
        if start is None:
            return ()
        tokens = self.prompt_tokens + self.tokens - 1 - start
        if encoded is None:
            # The last token has no row. An early abort may leave no row at all.
            if reason == "abort" or not tokens:
                return ()
            raise EngineContractError("the engine returned no routed_experts; serve a mixture-of-experts model")
        try:
            rows = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        except (binascii.Error, ValueError, EOFError):
            raise EngineContractError("the engine's routed_experts are not base64 of an .npy file") from None
        if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.shape[0] != tokens or rows.dtype.kind not in "iu":
            shape = rows.shape if isinstance(rows, np.ndarray) else "no array"
            raise EngineContractError(
                f"the engine's routed_experts are {shape}; expected integers, [{tokens}, layers, experts per token]"
            )
        return (Payload("routed_experts", start, rows),)


def _id_of(entry: _Entry | _Top) -> int:
    return _token_id(entry.token) if entry.token_id is None else entry.token_id


def _token_ids(names: Sequence[str]) -> list[int]:
    text = "\n".join(names)
    if _NAMES.fullmatch(text):
        ids = list(map(int, text.replace(_ID_PREFIX, "").split("\n")))
        if len(ids) == len(names):
            return ids
    return list(map(_token_id, names))


def _token_id(token: str) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    if digits == token or not digits.isascii() or not digits.isdigit() or len(digits) > _MOST_DIGITS:
        raise EngineContractError(
            "the engine reported a token as text; expected token_id:N (return_tokens_as_token_ids)"
        )
    return int(digits)


def alternatives_to_ask(params: SamplingParams) -> int:
    """Return how many alternatives to request from vLLM's routes that count the sampled id as the first: one more."""
    return params.top_logprobs + 1 if params.top_logprobs else 0
