"""vLLM or SGLang through a router that passes on nothing but `/v1`: their OpenAI-style `/v1/completions`.

What the two call the same things is in the table `APIS`. Their own engines can do and check more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from tokentape.engines._base import DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._http import HttpClient, header_value
from tokentape.engines._identity import chosen, served_cards
from tokentape.engines._remote import RemoteEngine, any_id
from tokentape.engines._replies import whole
from tokentape.engines._status_errors import safe_name
from tokentape.engines._vllm_reply import VllmReply
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds

_COMPLETIONS = "/v1/completions"

_LEFT_OUT = frozenset({"spaces_between_special_tokens"})
"""Fields that matter to the text only: left out where a server refuses them, as vLLM's Rust frontend does."""

_SAME_NAMES = DISTRIBUTION - {"stop_strings", "top_logprobs"} | {"min_tokens"}


@dataclass(frozen=True, slots=True)
class CompletionsApi:
    """How one kind of server says things in requests and replies."""

    owned_by: str
    """The owner that `/v1/models` reports, by which a server is recognized."""
    fields: Mapping[str, str]
    """Request field for each `SamplingParams` field that is honored."""
    constants: Mapping[str, object]
    """Request fields that are always the same."""
    named_ids: bool
    """The names in `logprobs` are `token_id:N`, so that alternatives have ids too."""
    top_k_off: int
    """The `top_k` that truncates nothing."""
    own_stops: bool
    """It also ends at the model's own end-of-sequence ids."""
    logprobs_mode: str
    """See `EngineInfo`; it can't be asked for here."""


APIS = (
    CompletionsApi(
        owned_by="vllm",
        fields={name: name for name in _SAME_NAMES} | {"stop_strings": "stop", "top_logprobs": "logprobs"},
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
        top_k_off=0,
        own_stops=False,
        logprobs_mode="raw_logprobs",
    ),
    CompletionsApi(
        owned_by="sglang",
        # Seeds are used in its deterministic mode only, which can't be seen from here.
        fields={name: name for name in _SAME_NAMES - {"seed"}} | {"stop_strings": "stop"},
        constants={"ignore_eos": False, "skip_special_tokens": False, "no_stop_trim": True, "return_token_ids": True},
        named_ids=False,
        top_k_off=-1,
        own_stops=True,
        logprobs_mode="scaled_logprobs",
    ),
)


class OpenAiEngine(RemoteEngine):
    """A server with an OpenAI-style completions API that takes and returns token ids. Open it with `open`."""

    _health = "/v1/models"

    def __init__(self, http: HttpClient, info: EngineInfo, api: CompletionsApi) -> None:
        super().__init__(http, info)
        self._api = api

    @classmethod
    async def _explore(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        card = chosen(await served_cards(http), model)
        row = _known(card.owned_by)
        info = EngineInfo(
            name=f"openai:{row.owned_by}",
            version="unknown",
            model=card.id,
            vocab_size=vocab_size,
            max_context=card.context,
            logprobs_mode=row.logprobs_mode,
            sampling=frozenset(row.fields),
        )
        try:
            await cls(http, any_id(info), row)._probe()
        except InvalidRequest as error:
            if error.param not in _LEFT_OUT & row.constants.keys():
                raise
            row = replace(row, constants={k: v for k, v in row.constants.items() if k not in _LEFT_OUT})
            await cls(http, any_id(info), row)._probe()
        return cls(http, info, row)

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """See `RemoteEngine.sample`. Closing the connection is the only way to abort."""
        self._refuse(prompt_ids, params)
        headers = {"x-request-id": header_value(request_id, "request_id")}
        budget = min(params.max_tokens, self._info.max_context - len(prompt_ids))
        body = self._request_body(prompt_ids, replace(params, max_tokens=budget), stream=stream)
        reply = VllmReply(
            _COMPLETIONS,
            None,
            len(prompt_ids),
            params,
            self._info.vocab_size,
            names_ids=True,
            returns_prompt=False,
            own_stops=self._api.own_stops,
            texts=not self._api.named_ids,
        )
        return self._receive(reply, _COMPLETIONS, body, headers, stream=stream)

    async def _probe(self) -> None:
        """Sample one token."""
        params = SamplingParams(max_tokens=1)
        # SGLang takes a prompt of nothing but id 0 for an empty one.
        prompt = np.ones(1, dtype=np.int32)
        await whole(self.sample(prompt, params, stream=True, request_id="tokentape-probe"))

    def _request_body(self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool) -> bytes:
        row = self._api
        body: dict[str, object] = {
            "model": self._info.model,
            "prompt": np.asarray(prompt_ids).tolist(),
            "echo": False,
            "n": 1,
            "stream": stream,
            "logprobs": params.top_logprobs,
            **row.constants,
            **{wire: getattr(params, name) for name, wire in row.fields.items()},
            "top_k": params.top_k or row.top_k_off,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)


def _known(owned_by: str) -> CompletionsApi:
    for row in APIS:
        # vLLM's Rust frontend adds its own name.
        if owned_by.startswith(row.owned_by):
            return row
    known = ", ".join(row.owned_by for row in APIS)
    raise InvalidRequest(
        f"the engine's models are owned by {safe_name(owned_by) or 'an unknown server'}; known are {known}", "engine"
    )
