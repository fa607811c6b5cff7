"""Any server with an OpenAI-style `/v1/completions` that takes token ids and returns them.

What such servers call the same things is in the table `DIALECTS`, a row for each. vLLM and SGLang have engines of
their own, which can do and check more; the rows are for servers that stand behind a router which passes on nothing
but `/v1`. For another server, pass a row.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from tokentape.engines.base import DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams, Timeouts
from tokentape.engines.http import HttpClient, header_value, safe_name, status_error
from tokentape.engines.identity import chosen, served_cards
from tokentape.engines.remote import RemoteEngine
from tokentape.engines.replies import Completion, alternatives, decode, taken
from tokentape.errors import EngineContractError, EngineError, InvalidRequest
from tokentape.types import FinishReason, TokenIds

_COMPLETIONS = "/v1/completions"
_DONE = b"[DONE]"
_ID_PREFIX = "token_id:"
_ANY_ID = 1 << 31

_LEFT_OUT = frozenset({"spaces_between_special_tokens"})
"""Fields that matter to the text only: left out where a server refuses them, as vLLM's Rust frontend does."""

_PLAIN = {name: name for name in DISTRIBUTION - {"stop_strings", "top_logprobs"}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server says things in requests and replies."""

    owned_by: str
    """What `/v1/models` says of its models; it tells the kinds apart."""
    fields: Mapping[str, str]
    """Request field for each `SamplingParams` field that is honoured."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Request fields that are always the same."""
    ids: str = "token_ids"
    """Field of a choice with the sampled ids."""
    named_ids: bool = False
    """The names in `logprobs` are `token_id:N`, so that alternatives have ids too."""
    matched: str = "stop_reason"
    """Field of a choice with the stop id or stop string."""
    least_logprobs: int = 0
    """The `logprobs` with which the sampled token's own is reported."""
    top_k_off: int = 0
    """The `top_k` that truncates nothing."""
    streams: bool = True
    """Its streams hold the new ids in each event."""
    own_stops: bool = False
    """It also ends at the model's own end-of-sequence ids."""
    logprobs_mode: str = "raw_logprobs"
    """See `EngineInfo`; it can't be asked for here."""


DIALECTS = (
    Dialect(
        owned_by="vllm",
        fields=_PLAIN | {"stop_strings": "stop", "min_tokens": "min_tokens", "top_logprobs": "logprobs"},
        constants={
            "add_special_tokens": False,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
        named_ids=True,
    ),
    Dialect(
        owned_by="sglang",
        # Seeds are used in its deterministic mode only, which can't be seen from here.
        fields={k: v for k, v in _PLAIN.items() if k != "seed"} | {"stop_strings": "stop", "min_tokens": "min_tokens"},
        constants={"ignore_eos": False, "skip_special_tokens": False, "no_stop_trim": True, "return_token_ids": True},
        matched="matched_stop",
        top_k_off=-1,
        own_stops=True,
        logprobs_mode="scaled_logprobs",
    ),
    Dialect(
        owned_by="tensorrt_llm",
        fields=_PLAIN | {"min_tokens": "min_tokens"},
        # It returns ids only where it does not decode them, so it can't look for stop strings.
        constants={"add_special_tokens": False, "ignore_eos": True, "detokenize": False},
        least_logprobs=1,
        streams=False,
    ),
)
"""The kinds that are known. The last row was written from the schema alone; see docs/engines.md."""


class OpenAiEngine(RemoteEngine):
    """A server with an OpenAI-style completions API, sampled from through exact token ids. Open it with `open`."""

    _health = "/v1/models"

    def __init__(self, http: HttpClient, info: EngineInfo, dialect: Dialect) -> None:
        super().__init__(http, info)
        self._dialect = dialect

    @classmethod
    async def open(
        cls,
        base_url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        max_context: int | None = None,
        dialect: Dialect | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
    ) -> OpenAiEngine:
        """Find out what kind of server it is, with one token sampled to see whether its replies hold ids.

            engine = await OpenAiEngine.open("http://127.0.0.1:8000/v1", vocab_size=len(tokenizer))

        Args:
            base_url: `http://host:port`, with a path where the API is mounted below one.
            vocab_size: ids at or above it are never sent and never accepted.
            model: one of the names that the server lists; the first if None.
            max_context: prompt and completion together, in tokens, for servers that do not list it.
            dialect: a row for a server that is not in `DIALECTS`.
            api_key: sent as a bearer token.
            timeouts: see `Timeouts`.

        Raises:
            InvalidRequest: the address can't be used, the server has no such model, or its kind or its context
                must be given.
            EngineUnavailable: the server can't be reached.
            EngineContractError: it returns no ids, or no log-probabilities of them.
            EngineError: or one of its kinds, as for `sample`.

        """
        http = HttpClient(base_url, api_key=api_key, timeouts=timeouts)
        try:
            card = chosen(await served_cards(http), model)
            row = dialect or _known(card.owned_by)
            context = max_context or card.max_model_len
            if context is None:
                raise InvalidRequest("the engine does not say how long its context is; give max_context", "max_context")
            info = EngineInfo(
                name=f"openai:{row.owned_by}",
                version="unknown",
                model=card.id,
                vocab_size=vocab_size,
                max_context=context,
                logprobs_mode=row.logprobs_mode,
                sampling=frozenset(row.fields),
            )
            # What a model says to one meaningless token may lie outside the tokenizer's vocabulary.
            any_id = replace(info, vocab_size=_ANY_ID)
            try:
                await cls(http, any_id, row)._probe()
            except InvalidRequest as error:
                if error.param not in _LEFT_OUT & row.constants.keys():
                    raise
                row = replace(row, constants={k: v for k, v in row.constants.items() if k not in _LEFT_OUT})
                await cls(http, any_id, row)._probe()
        except BaseException:
            await http.close()
            raise
        return cls(http, info, row)

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `Engine`.

        `request_id` is sent as `X-Request-Id`. Closing the connection is the only way to abort.

        Raises as `RemoteEngine.sample`.
        """
        self._refuse(prompt_ids, params)
        headers = {"x-request-id": header_value(request_id, "request_id")}
        stream = stream and self._dialect.streams
        budget = min(params.max_tokens, self._info.max_context - len(prompt_ids))
        body = self._request_body(prompt_ids, replace(params, max_tokens=budget), stream=stream)
        reply = _Reply(len(prompt_ids), params, self._info.vocab_size, self._dialect)
        if stream:
            async with aclosing(self._http.arrivals(_COMPLETIONS, body, headers)) as arrivals:
                async for arrival in arrivals:
                    for delta in taken(reply.take, arrival):
                        yield delta
        else:
            reply.take(await self._http.post(_COMPLETIONS, body, headers))
            reply.take(_DONE)
        yield reply.last()

    async def _probe(self) -> None:
        """Sample one token."""
        params = SamplingParams(max_tokens=1)
        # SGLang takes a prompt of nothing but id 0 for an empty one.
        prompt = np.ones(1, dtype=np.int32)
        async with aclosing(self.sample(prompt, params, stream=True, request_id="tokentape-probe")) as deltas:
            async for _ in deltas:
                pass

    def _request_body(self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool) -> bytes:
        body: dict[str, object] = {
            "model": self._info.model,
            "prompt": np.asarray(prompt_ids).tolist(),
            "echo": False,
            "n": 1,
            "stream": stream,
            **self._dialect.constants,
        }
        for name, wire in self._dialect.fields.items():
            body[wire] = getattr(params, name)
        if "top_k" in self._dialect.fields:
            body[self._dialect.fields["top_k"]] = params.top_k or self._dialect.top_k_off
        body["logprobs"] = max(params.top_logprobs, self._dialect.least_logprobs)
        if stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Failure(msgspec.Struct):
    code: int | str | None = None


class _Body(msgspec.Struct):
    """A whole reply or one event of a stream. Choices differ between dialects."""

    choices: list[dict[str, Any]] = []
    usage: _Usage | None = None
    error: _Failure | str | None = None


def _known(owned_by: str) -> Dialect:
    for row in DIALECTS:
        # vLLM's Rust frontend adds its own name.
        if owned_by.startswith(row.owned_by):
            return row
    known = ", ".join(row.owned_by for row in DIALECTS)
    raise InvalidRequest(
        f"the engine's models are owned by {safe_name(owned_by) or 'nobody'}; known are {known}; describe it with a "
        "Dialect",
        "dialect",
    )


class _Reply:
    """One reply as it arrives, checked against the request."""

    def __init__(self, prompt_tokens: int, params: SamplingParams, vocab_size: int, dialect: Dialect) -> None:
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._dialect = dialect
        self._completion = Completion(params, vocab_size, own_stops=dialect.own_stops)
        self._usage: _Usage | None = None
        self._last: SampleDelta | None = None
        self._done = False

    def take(self, data: bytes) -> SampleDelta | None:
        """Take the next event, or the whole body; return its tokens if there are any and more will follow."""
        if self._done:
            raise EngineContractError("the engine's reply goes on after its end")
        if data == _DONE:
            self._done = True
            return None
        body = decode(data, _Body, "an OpenAI-compatible server")
        if body.error is not None:
            code = body.error.code if isinstance(body.error, _Failure) else 400
            raise status_error(code if isinstance(code, int) else 500, _COMPLETIONS, data)
        self._usage = body.usage or self._usage
        if not body.choices:
            return None
        if len(body.choices) > 1 or self._last is not None:
            raise EngineContractError("the engine sampled more than the one completion that was asked for")
        (choice,) = body.choices
        delta = self._delta(choice)
        reason = choice.get("finish_reason")
        if reason is None:
            return delta if delta.token_ids else None
        ended = _finish_reason(reason)
        stop = self._completion.stop(ended, self._matched(choice, delta))
        self._last = replace(delta, finish_reason=ended, stop=stop)
        return None

    def last(self) -> SampleDelta:
        """The delta that ended the completion, once the reply is complete and its counts agree."""
        if self._last is None or not self._done:
            raise EngineError(
                f"the engine's reply ended after {self._completion.tokens} tokens without a finish_reason; send the "
                "request again"
            )
        if self._usage is None:
            raise EngineContractError("the engine reported no usage; expected the counts of prompt and completion")
        self._completion.check_counts(self._usage.prompt_tokens, self._prompt_tokens, self._usage.completion_tokens)
        return self._last

    def _delta(self, choice: dict[str, Any]) -> SampleDelta:
        try:
            ids = msgspec.convert(choice.get(self._dialect.ids) or [], list[int])
            report = msgspec.convert(choice.get("logprobs") or {}, _Logprobs)
        except msgspec.ValidationError as error:
            raise EngineContractError(f"the engine's ids or log-probabilities are of another form: {error}") from None
        if self._dialect.named_ids and ids != [_token_id(name) for name in report.tokens]:
            raise EngineContractError(
                f"the engine returned {len(ids)} ids and log-probabilities of {len(report.tokens)}; expected the same"
            )
        if not ids and report.token_logprobs:
            raise EngineContractError(f"the engine returned no {self._dialect.ids}; expected the sampled ids")
        top = [
            alternatives(
                [(_token_id(name), logprob) for name, logprob in (row or {}).items()], self._params.top_logprobs
            )
            for row in (report.top_logprobs or ())
            if self._params.top_logprobs
        ]
        return self._completion.delta(ids, report.token_logprobs, top)

    def _matched(self, choice: dict[str, Any], delta: SampleDelta) -> int | str | None:
        """What the server says it stopped at; the last id where it says nothing, as some do of a stop id."""
        matched = choice.get(self._dialect.matched)
        if isinstance(matched, int | str):
            return matched
        return delta.token_ids[-1] if delta.token_ids else None


def _token_id(name: str) -> int:
    digits = name.removeprefix(_ID_PREFIX)
    if digits == name or not digits.isascii() or not digits.isdigit():
        raise EngineContractError("the engine named a token by its text; expected token_id:N")
    return int(digits)


def _finish_reason(name: object) -> FinishReason:
    match name:
        case "stop" | "length" | "abort":
            return name
        case _:
            raise EngineContractError(
                f"the engine finished with {safe_name(name) or 'an unknown reason'}; expected stop, length or abort"
            )
