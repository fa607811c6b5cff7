"""What comes back from vLLM, read strictly: `/inference/v1/generate`, `/v1/completions`, `/v1/chat/completions`.

Nothing in a reply is taken on trust, nothing guessed. The routes differ in how they report log-probabilities (by
integer id, or by a name that holds it) and in where the prompt's ids come back.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tokentape.engines.base import Payload, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines.http import safe_name, status_error
from tokentape.engines.replies import ROUNDING, Alternatives, decode
from tokentape.errors import EngineContractError, EngineError
from tokentape.types import FinishReason, TokenIds

DONE = b"[DONE]"

UNNAMED_WEIGHTS = "default"
"""What vLLM calls the weights that nobody has named."""

# What a server with --return-tokens-as-token-ids puts before an id in place of a token's text.
_ID_PREFIX = "token_id:"
_ID_AT = len(_ID_PREFIX)

# vLLM sends -9999.0 for minus infinity: the probability of something that can't have been sampled.
_MINUS_INFINITY = -9999.0


class _Top(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str = ""


class _Entry(msgspec.Struct):
    """`token_id` at the generate route, `token` in chats."""

    logprob: float | None
    token_id: int | None = None
    token: str = ""
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    """The parallel lists of completions, `content` elsewhere."""

    content: list[_Entry] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


_NO_LOGPROBS = _Logprobs()


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Failure(msgspec.Struct):
    code: int = 500


class _Body(msgspec.Struct):
    """A whole reply or one event of a stream, of either route: they have the same fields."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class Reply:
    """One reply as it arrives, checked against the request.

    Args:
        path: the route, for the texts of errors.
        prompt: the prompt's ids as they were sent; None if the server makes them of messages.
        prompt_tokens: how many they are; 0 until the server has told them.
        params: what was asked for.
        vocab_size: ids at or above it are refused.
        names_ids: the ids of a completion are in its `token_ids`, to be compared with those of the log-probabilities.
        returns_prompt: the prompt's ids come back, to be compared.
        own_stops: the server also ends at the model's own end-of-sequence ids, and at tool calls.

    """

    def __init__(
        self,
        path: str,
        prompt: bytes | None,
        prompt_tokens: int,
        params: SamplingParams,
        vocab_size: int,
        *,
        names_ids: bool,
        returns_prompt: bool,
        own_stops: bool = False,
    ) -> None:
        self._path = path
        self._prompt = prompt
        self.prompt_tokens = prompt_tokens
        """How many ids the prompt has."""
        self._own_stops = own_stops
        self._params = params
        self._vocab_size = vocab_size
        self._names_ids = names_ids
        self._returns_prompt = returns_prompt
        self._prompt_seen = False
        self._tokens = 0
        self._last_id: int | None = None
        self._last: SampleDelta | None = None
        self._usage: _Usage | None = None
        self._done = False
        self.offers: set[str] = set()
        """What the server returns beyond ids and log-probabilities: `weight_versions`, `routed_experts`."""

    def take(self, data: bytes) -> SampleDelta | None:
        """Take the next event, or the whole body of a reply that is not streamed.

        Returns the new tokens if there are any and more will follow.
        """
        if self._done:
            raise EngineContractError("the engine's reply goes on after its end")
        if data == DONE:
            self._done = True
            return None
        body = decode(data, _Body, "vLLM")
        if body.error is not None:
            # Once a stream has begun, what would have been a 400 comes as an event of it.
            raise status_error(body.error.code, self._path, data)
        self._usage = body.usage or self._usage
        if not body.choices:
            return None
        if len(body.choices) > 1 or body.choices[0].index != 0 or self._last is not None:
            raise EngineContractError("the engine sampled more than the one completion that was asked for")
        choice = body.choices[0]
        if self._returns_prompt:
            for echoed in (bytes(choice.prompt_token_ids), bytes(body.prompt_token_ids)):
                if echoed not in (b"", b"null"):
                    self._check_prompt(echoed)
        delta = self._delta(choice)
        self._tokens += len(delta.token_ids)
        if self._tokens > self._params.max_tokens:
            raise EngineContractError(
                f"the engine sampled {self._tokens} tokens; expected at most {self._params.max_tokens}"
            )
        self._last_id = delta.token_ids[-1] if delta.token_ids else self._last_id
        if choice.finish_reason is None:
            return delta if delta.token_ids else None
        calls = self._own_stops and choice.finish_reason == "tool_calls"
        reason = _finish_reason("stop" if calls else choice.finish_reason)
        self._last = replace(
            delta,
            finish_reason=reason,
            stop=self._stop(reason, choice.stop_reason),
            weight_spans=self._spans(choice.weight_versions),
            payloads=self._payloads(choice.routed_experts, reason),
        )
        return None

    def last(self) -> SampleDelta:
        """The delta that ended the completion, once the reply is complete and its counts agree."""
        if self._last is None or not self._done:
            raise EngineError(
                f"the engine's reply ended after {self._tokens} tokens without a finish_reason; send the request again"
            )
        if self._returns_prompt and not self._prompt_seen:
            raise EngineContractError("the engine returned no prompt_token_ids; expected those that were sent")
        if self._usage is None:
            raise EngineContractError("the engine reported no usage; expected the counts of prompt and completion")
        counts = (self._usage.prompt_tokens, self._usage.completion_tokens)
        if counts != (self.prompt_tokens, self._tokens):
            raise EngineContractError(
                f"the engine counts {counts[0]} prompt and {counts[1]} completion tokens; "
                f"{self.prompt_tokens} were sent and {self._tokens} came back"
            )
        return self._last

    @property
    def prompt_ids(self) -> TokenIds | None:
        """The prompt's ids, int32 [tokens]; None as long as only the server knows them."""
        if self._prompt is None:
            return None
        try:
            return np.array(msgspec.json.decode(self._prompt, type=list[int]), np.int32)
        except (msgspec.MsgspecError, OverflowError):
            raise EngineContractError("the engine's prompt_token_ids are not a list of token ids") from None

    def _check_prompt(self, echoed: bytes) -> None:
        if self._prompt is None:
            self._prompt, self.prompt_tokens = echoed, echoed.count(b",") + 1
        # The server's JSON has no spaces either, so equal ids are nearly always equal bytes.
        if echoed != self._prompt and msgspec.json.decode(echoed) != msgspec.json.decode(self._prompt):
            raise EngineContractError(
                "the engine sampled from another prompt than the one sent: prompt_token_ids differ"
            )
        self._prompt_seen = True

    def _delta(self, choice: _Choice) -> SampleDelta:
        report = choice.logprobs or _NO_LOGPROBS
        tops: Sequence[list[tuple[int, float]]] = ()
        if report.content:
            ids = tuple(map(_id_of, report.content))
            logprobs = [entry.logprob for entry in report.content]
            if self._params.top_logprobs:
                tops = [[(_id_of(top), top.logprob) for top in entry.top_logprobs] for entry in report.content]
        else:
            ids = _token_ids(report.tokens)
            logprobs = report.token_logprobs
            if self._params.top_logprobs:
                tops = [[(_token_id(name), lp) for name, lp in (row or {}).items()] for row in report.top_logprobs]
        if self._names_ids and tuple(choice.token_ids or ()) != ids:
            raise EngineContractError(
                f"the engine returned {len(choice.token_ids or ())} token_ids and log-probabilities of "
                f"{len(ids)} ids; expected the same ids (return_token_ids needs vLLM 0.10.2 or newer)"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise EngineContractError(
                f"the engine sampled id {outside}; the vocabulary is 0 to {self._vocab_size - 1}. Is "
                "the model folder that of another model? If not, a model that was not trained to avoid rows of the "
                "embedding beyond the tokenizer can sample them"
            )
        return SampleDelta(
            token_ids=ids,
            logprobs=_sampled_logprobs(logprobs, len(ids)),
            top_logprobs=_alternatives(tops, len(ids), self._params.top_logprobs) if self._params.top_logprobs else (),
        )

    def _stop(self, reason: FinishReason, stop: int | str | None) -> int | str | None:
        """What ended the completion, if it is something that was asked for and the ids agree."""
        if reason == "abort":
            return None
        if self._last_id is None:
            raise EngineContractError(f"the engine finished with {reason} before it sampled anything")
        if reason == "length":
            return None
        if stop is None and self._own_stops:
            return self._last_id
        if isinstance(stop, int) and stop in self._params.stop_token_ids and stop == self._last_id:
            return stop
        if isinstance(stop, str) and stop in self._params.stop_strings:
            return stop
        raise EngineContractError(
            "the engine stopped without one of the requested stop ids and strings as its stop_reason"
        )

    def _spans(self, reported: list[_Span] | None) -> tuple[WeightSpan, ...]:
        """The spans of weights, if anybody ever named them."""
        if reported is None:
            return ()
        self.offers.add("weight_versions")
        spans = tuple(WeightSpan(one.version, one.start, one.end) for one in reported if one.end > one.start)
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != self._tokens:
            raise EngineContractError(
                f"the engine's weight_versions do not cover the {self._tokens} tokens that it sampled"
            )
        return () if {span.version for span in spans} == {UNNAMED_WEIGHTS} else spans

    def _payloads(self, encoded: str | None, reason: FinishReason) -> tuple[Payload, ...]:
        if encoded is not None:
            self.offers.add("routed_experts")
        start = self._params.payloads_from
        if start is None:
            return ()
        tokens = self.prompt_tokens + self._tokens - 1 - start
        if encoded is None:
            # The last token has no row, and what was aborted early may have none at all.
            if reason == "abort" or not tokens:
                return ()
            raise EngineContractError("the engine returned no routed_experts; is its model a mixture of experts?")
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


def _finish_reason(name: str) -> FinishReason:
    match name:
        case "stop" | "length" | "abort":
            return name
        case "error":
            raise EngineError("the engine failed while sampling; see its log")
        case _:
            raise EngineContractError(
                f"the engine finished with {safe_name(name) or 'an unknown reason'}; expected stop, length or abort"
            )


def _id_of(entry: _Entry | _Top) -> int:
    return _token_id(entry.token) if entry.token_id is None else entry.token_id


def _token_ids(tokens: Sequence[str]) -> tuple[int, ...]:
    try:
        ids = tuple([int(token[_ID_AT:]) for token in tokens])
    except ValueError:
        ids = ()
    if [f"{_ID_PREFIX}{token_id}" for token_id in ids] == tokens and (not ids or min(ids) >= 0):
        return ids
    return tuple(map(_token_id, tokens))


def _token_id(token: str) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    if digits == token or not digits.isascii() or not digits.isdigit():
        raise EngineContractError(
            "the engine named a token by its text; expected token_id:N (return_tokens_as_token_ids)"
        )
    return int(digits)


def _sampled_logprobs(reported: Sequence[float | None], tokens: int) -> tuple[float, ...]:
    logprobs: list[float] = []
    for logprob in reported:
        if logprob is None or logprob <= _MINUS_INFINITY:
            raise EngineContractError(
                "the engine reported no usable log-probability for a token that it sampled; expected a finite number"
            )
        if logprob > ROUNDING:
            raise logits_error()
        logprobs.append(logprob)
    if len(logprobs) != tokens:
        raise EngineContractError(f"the engine returned {len(logprobs)} log-probabilities for {tokens} ids")
    return tuple(logprobs)


def _alternatives(reported: Sequence[list[tuple[int, float]]], tokens: int, top: int) -> tuple[Alternatives, ...]:
    """Per id the `top` most likely ids with their log-probabilities, best first.

    The server adds the sampled id where it is not among them, and, in a processed mode, ids of probability 0.
    """
    if len(reported) != tokens:
        raise EngineContractError(f"the engine returned {len(reported)} lists of top_logprobs for {tokens} ids")
    rows = []
    for row in reported:
        pairs = sorted((pair for pair in row if pair[1] > _MINUS_INFINITY), key=lambda pair: -pair[1])
        if not pairs:
            raise EngineContractError("the engine returned an empty list of top_logprobs")
        if pairs[0][1] > ROUNDING:
            raise logits_error()
        rows.append(tuple(pairs[:top]))
    return tuple(rows)


def alternatives_to_ask(params: SamplingParams) -> int:
    """How many to ask for where the server puts the sampled id first and cuts the list after that: one more."""
    return params.top_logprobs + 1 if params.top_logprobs else 0


def logits_error() -> EngineContractError:
    """The error for a server that reports something else than log-probabilities."""
    return EngineContractError(
        "the engine reports logits instead of log-probabilities; start it with --logprobs-mode raw_logprobs"
    )
