"""vLLM over HTTP: token ids in and out through `/v1/completions`.

The wire facts are in docs/engines.md. Three of them shape this module:

- vLLM ignores fields that it does not know, so nothing asked for counts as given until the reply shows it.
- Its `finish_reason` and `stop_reason` are only trusted where they agree with the ids.
- Closing the connection is how a request is aborted; there is nothing else to call.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from typing import TypeVar

import msgspec
import numpy as np

from tokentape.engines.base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines.checks import refuse_params, refuse_prompt
from tokentape.engines.http import HttpClient, Timeouts, header_value, safe_name, status_error
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import FinishReason, TokenIds

_COMPLETIONS = "/v1/completions"
_DONE = b"[DONE]"
_ID_PREFIX = "token_id:"

# vLLM sends -9999.0 for minus infinity: the probability of something that can't have been sampled.
_MINUS_INFINITY = -9999.0

# A log-probability may exceed 0 by rounding only; a server that reports logits exceeds it by far.
_ROUNDING = 1e-3

_ANY_ID = 1 << 31

_LOWEST_TEMPERATURE = 0.01

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class VllmEngine:
    """A vLLM server, sampled from through exact token ids. Open it with `open`.

    Sampling ends only as `SamplingParams` says: the server's own end-of-sequence ids are not applied unless they
    are among the `stop_token_ids`.
    """

    def __init__(self, http: HttpClient, info: EngineInfo, *, verify_prompt: bool = True) -> None:
        self._http = http
        self._info = info
        self._verify_prompt = verify_prompt

    @classmethod
    async def open(
        cls,
        base_url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        verify_prompt: bool = True,
    ) -> VllmEngine:
        """Find out what the server is and samples, with one token sampled to see what its replies hold.

            engine = await VllmEngine.open("http://127.0.0.1:8000", vocab_size=len(tokenizer))

        Args:
            base_url: `http://host:port`.
            vocab_size: ids at or above it are never sent and never accepted. The tokenizer's, not the number of
                rows of the embedding: a server takes and samples ids in the padding between the two.
            model: one of the names that the server lists; the first if None.
            api_key: what the server was given as `--api-key`.
            timeouts: see `Timeouts`.
            verify_prompt: have the server return the prompt's ids with each reply and compare them. Without it
                a reply does not grow with the prompt.

        Raises:
            InvalidRequest: the address can't be used, or the server has no such model.
            EngineUnavailable: the server can't be reached.
            EngineContractError: it is not vLLM, or does not return ids and log-probabilities.
            EngineError: or one of its kinds, as for `sample`.

        """
        http = HttpClient(base_url, api_key=api_key, timeouts=timeouts)
        try:
            version = _decode(await http.get("/version"), _Version).version
            card = _chosen(_decode(await http.get("/v1/models"), _Models).data, model)
            info = EngineInfo(
                name="vllm",
                version=version,
                model=card.id,
                vocab_size=vocab_size,
                max_context=card.max_model_len,
                logprobs_mode="raw_logprobs",
                sampling=frozenset(field.name for field in fields(SamplingParams)),
            )
            # What a model says to one meaningless token may lie outside the tokenizer's vocabulary.
            probe = cls(http, replace(info, vocab_size=_ANY_ID), verify_prompt=verify_prompt)
            mode = await probe._find_logprobs_mode()
        except BaseException:
            await http.close()
            raise
        return cls(http, replace(info, logprobs_mode=mode), verify_prompt=verify_prompt)

    @property
    def info(self) -> EngineInfo:
        """What the server said when it was opened."""
        return self._info

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `Engine`.

        A completion that meets the end of the context ends with `length`, as at `max_tokens`. The delta with the
        finish_reason comes only when the whole reply has been checked. `request_id` is sent as `X-Request-Id`.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown id; a parameter is out of range,
                here or by the server's own limits.
            EngineContractError: the reply lacks ids, log-probabilities or counts, or they disagree.
            EngineUnavailable: the server can't be reached or takes no requests.
            EngineTimeout: it was silent for too long, as a paused server is.
            EngineError: it failed, or the connection broke.

        """
        refuse_prompt(prompt_ids, self._info)
        refuse_params(params)
        if 0 < params.temperature < _LOWEST_TEMPERATURE:
            raise InvalidRequest(
                f"vLLM would sample at temperature {_LOWEST_TEMPERATURE} instead; use 0 for greedy sampling",
                "temperature",
            )
        headers = {"x-request-id": header_value(request_id, "request_id")}
        prompt = msgspec.json.encode(np.asarray(prompt_ids).tolist())
        body = self._request_body(prompt, params, stream=stream)
        reply = _Reply(prompt, len(prompt_ids), params, self._info.vocab_size, verify_prompt=self._verify_prompt)
        if stream:
            async with aclosing(self._http.events(_COMPLETIONS, body, headers)) as events:
                async for data in events:
                    if delta := reply.take(data):
                        yield delta
        else:
            reply.take(await self._http.post(_COMPLETIONS, body, headers))
            reply.take(_DONE)
        yield reply.last()

    async def check(self) -> None:
        """Return if `/health` answers within `Timeouts.connect`, else raise `EngineUnavailable`."""
        try:
            await self._http.get("/health", stage="connect")
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineUnavailable(f"the engine is not healthy: {error}") from None

    async def close(self) -> None:
        """Close all connections, which aborts what runs on them. May be called again."""
        await self._http.close()

    def _request_body(self, prompt: bytes, params: SamplingParams, *, stream: bool) -> bytes:
        """The body of one call: every field that a server-side default could otherwise fill in."""
        body: dict[str, object] = {
            "model": self._info.model,
            "prompt": msgspec.Raw(prompt),
            "add_special_tokens": False,
            "echo": False,
            "n": 1,
            "stream": stream,
            "max_tokens": params.max_tokens,
            "min_tokens": 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "seed": params.seed,
            # The server's end-of-sequence ids come from its generation_config.json; ours come from the template.
            "ignore_eos": True,
            "stop_token_ids": params.stop_token_ids,
            "stop": params.stop_strings,
            # Stop strings are looked for in the decoded text. Text with the control tokens in it and without
            # extra spaces is what the in-process engine looks in. Including the match keeps text unbuffered.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": params.top_logprobs,
            "return_tokens_as_token_ids": True,
            "return_token_ids": self._verify_prompt,
        }
        if stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": False}
        return msgspec.json.encode(body)

    async def _find_logprobs_mode(self) -> str:
        """What `--logprobs-mode` the server has, which it does not tell: after top_k = 1 one token remains.

        Reported before (`raw_logprobs`) there are alternatives with a probability, after it there are none.
        """
        params = SamplingParams(max_tokens=1, top_k=1, top_logprobs=2)
        prompt = np.zeros(1, dtype=np.int32)
        async with aclosing(self.sample(prompt, params, stream=True, request_id="tokentape-probe")) as deltas:
            (alternatives,) = [top async for delta in deltas for top in delta.top_logprobs]
        if math.fsum(math.exp(logprob) for _, logprob in alternatives) > 1 + _ROUNDING:
            raise _logits_error()
        return "raw_logprobs" if len(alternatives) > 1 else "processed_logprobs"


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Failure(msgspec.Struct):
    code: int = 500


class _Body(msgspec.Struct):
    """A whole reply or one event of a stream: they have the same fields."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


def _decode(body: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError as error:
        raise EngineContractError(f"the engine's reply is not of the form that vLLM's has: {error}") from None


def _chosen(models: list[_Model], name: str | None) -> _Model:
    """The model of that name; the first if None, which is the base model where adapters are listed too."""
    if not models:
        raise EngineContractError("the engine lists no model at /v1/models; expected at least one")
    if name is None:
        return models[0]
    for model in models:
        if model.id == name:
            return model
    served = ", ".join(model.id for model in models)
    raise InvalidRequest(f"the engine does not serve that model; it serves {served}", "model")


class _Reply:
    """One reply as it arrives, checked against the request. Nothing in it is taken on trust, nothing guessed."""

    def __init__(
        self, prompt: bytes, prompt_tokens: int, params: SamplingParams, vocab_size: int, *, verify_prompt: bool
    ) -> None:
        self._prompt = prompt
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._vocab_size = vocab_size
        self._verify_prompt = verify_prompt
        self._prompt_seen = False
        self._tokens = 0
        self._last_id: int | None = None
        self._last: SampleDelta | None = None
        self._usage: _Usage | None = None
        self._done = False

    def take(self, data: bytes) -> SampleDelta | None:
        """Take the next event, or the whole body of a reply that is not streamed.

        Returns the new tokens if there are any and more will follow.
        """
        if self._done:
            raise EngineContractError("the engine's reply goes on after its end")
        if data == _DONE:
            self._done = True
            return None
        body = _decode(data, _Body)
        if body.error is not None:
            # Once a stream has begun, what would have been a 400 comes as an event of it.
            raise status_error(body.error.code, _COMPLETIONS, data)
        self._usage = body.usage or self._usage
        if not body.choices:
            return None
        if len(body.choices) > 1 or body.choices[0].index != 0 or self._last is not None:
            raise EngineContractError("the engine sampled more than the one completion that was asked for")
        choice = body.choices[0]
        self._check_prompt(bytes(choice.prompt_token_ids))
        delta = self._delta(choice)
        self._tokens += len(delta.token_ids)
        if self._tokens > self._params.max_tokens:
            raise EngineContractError(
                f"the engine sampled {self._tokens} tokens; expected at most {self._params.max_tokens}"
            )
        self._last_id = delta.token_ids[-1] if delta.token_ids else self._last_id
        if choice.finish_reason is None:
            return delta if delta.token_ids else None
        reason = _finish_reason(choice.finish_reason)
        self._last = replace(delta, finish_reason=reason, stop=self._stop(reason, choice.stop_reason))
        return None

    def last(self) -> SampleDelta:
        """The delta that ended the completion, once the reply is complete and its counts agree."""
        if self._last is None or not self._done:
            raise EngineError(
                f"the engine's reply ended after {self._tokens} tokens without a finish_reason; send the request again"
            )
        if self._verify_prompt and not self._prompt_seen:
            raise EngineContractError("the engine returned no prompt_token_ids; expected those that were sent")
        if self._usage is None:
            raise EngineContractError("the engine reported no usage; expected the counts of prompt and completion")
        counts = (self._usage.prompt_tokens, self._usage.completion_tokens)
        if counts != (self._prompt_tokens, self._tokens):
            raise EngineContractError(
                f"the engine counts {counts[0]} prompt and {counts[1]} completion tokens; "
                f"{self._prompt_tokens} were sent and {self._tokens} came back"
            )
        return self._last

    def _check_prompt(self, echoed: bytes) -> None:
        if not self._verify_prompt or echoed in (b"", b"null"):
            return
        # The server's JSON has no spaces either, so equal ids are nearly always equal bytes.
        if echoed != self._prompt and msgspec.json.decode(echoed) != msgspec.json.decode(self._prompt):
            raise EngineContractError(
                "the engine sampled from another prompt than the one sent: prompt_token_ids differ"
            )
        self._prompt_seen = True

    def _delta(self, choice: _Choice) -> SampleDelta:
        report = choice.logprobs or _Logprobs([], [])
        reported = tuple(map(_token_id, report.tokens))
        if self._verify_prompt and tuple(choice.token_ids or ()) != reported:
            raise EngineContractError(
                f"the engine returned {len(choice.token_ids or ())} token_ids and log-probabilities of "
                f"{len(reported)} ids; expected the same ids (return_token_ids needs vLLM 0.10.2 or newer)"
            )
        for token_id in reported:
            if not 0 <= token_id < self._vocab_size:
                raise EngineContractError(
                    f"the engine sampled id {token_id}; the vocabulary is 0 to {self._vocab_size - 1}. Rows of the "
                    "embedding beyond the tokenizer can be sampled by a model that was not trained to avoid them"
                )
        return SampleDelta(
            token_ids=reported,
            logprobs=_sampled_logprobs(report, len(reported)),
            top_logprobs=_alternatives(report, len(reported), self._params.top_logprobs),
        )

    def _stop(self, reason: FinishReason, stop: int | str | None) -> int | str | None:
        """What ended the completion, if it is something that was asked for and the ids agree."""
        if reason == "abort":
            return None
        if self._last_id is None:
            raise EngineContractError(f"the engine finished with {reason} before it sampled anything")
        if reason == "length":
            return None
        if isinstance(stop, int) and stop in self._params.stop_token_ids and stop == self._last_id:
            return stop
        if isinstance(stop, str) and stop in self._params.stop_strings:
            return stop
        raise EngineContractError(
            "the engine stopped without one of the requested stop ids and strings as its stop_reason"
        )


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


def _token_id(token: str) -> int:
    digits = token.removeprefix(_ID_PREFIX)
    if digits == token or not digits.isascii() or not digits.isdigit():
        raise EngineContractError(
            "the engine named a token by its text; expected token_id:N (return_tokens_as_token_ids)"
        )
    return int(digits)


def _sampled_logprobs(report: _Logprobs, tokens: int) -> tuple[float, ...]:
    logprobs: list[float] = []
    for logprob in report.token_logprobs:
        if logprob is None or logprob <= _MINUS_INFINITY:
            raise EngineContractError(
                "the engine reported no usable log-probability for a token that it sampled; expected a finite number"
            )
        if logprob > _ROUNDING:
            raise _logits_error()
        logprobs.append(logprob)
    if len(logprobs) != tokens:
        raise EngineContractError(f"the engine returned {len(logprobs)} log-probabilities for {tokens} ids")
    return tuple(logprobs)


def _alternatives(report: _Logprobs, tokens: int, top: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Per id the `top` most likely ids with their log-probabilities, best first.

    The server adds the sampled id where it is not among them, and, in a processed mode, ids of probability 0.
    """
    if not top:
        return ()
    if len(report.top_logprobs) != tokens:
        raise EngineContractError(
            f"the engine returned {len(report.top_logprobs)} lists of top_logprobs for {tokens} ids"
        )
    rows = []
    for reported in report.top_logprobs:
        pairs = [
            (_token_id(token), logprob) for token, logprob in (reported or {}).items() if logprob > _MINUS_INFINITY
        ]
        pairs.sort(key=lambda pair: -pair[1])
        if not pairs:
            raise EngineContractError("the engine returned an empty list of top_logprobs")
        if pairs[0][1] > _ROUNDING:
            raise _logits_error()
        rows.append(tuple(pairs[:top]))
    return tuple(rows)


def _logits_error() -> EngineContractError:
    return EngineContractError(
        "the engine reports logits instead of log-probabilities; start it with --logprobs-mode raw_logprobs"
    )
