"""vLLM or SGLang through their OpenAI-style `/v1/completions`, for routers that forward only `/v1`.

The table `APIS` lists the differences between the two. `VllmEngine` and `SglangEngine` support and check more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from tokentape.engines._base import DISTRIBUTION, SPECULATED, EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._distributions import likeliest_alone, nonnegative_seed
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import chosen, served_cards
from tokentape.engines._remote import RemoteEngine, any_id, unique_id
from tokentape.engines._replies import whole
from tokentape.engines._server_errors import safe_name
from tokentape.engines._vllm_reply import VllmReply
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds

_COMPLETIONS = "/v1/completions"

_LEFT_OUT = frozenset({"spaces_between_special_tokens"})
"""Fields that only affect text. They are omitted if the server refuses them, as vLLM's Rust frontend does."""

_SAME_NAMES = DISTRIBUTION - {"stop_strings", "top_logprobs"} | {"min_tokens"}


@dataclass(frozen=True, slots=True)
class CompletionsApi:
    """The request and reply format of a kind of server."""

    owned_by: str
    """The `owned_by` in `/v1/models`, which identifies the kind of server."""
    fields: Mapping[str, str]
    """Maps the supported `SamplingParams` fields to request fields."""
    constants: Mapping[str, object]
    """Request fields with a fixed value."""
    named_ids: bool
    """Whether tokens in `logprobs` are named `token_id:N`, so that alternatives have ids too."""
    top_k_off: int
    """The value of `top_k` that switches it off."""
    own_stops: bool
    """Whether the server also ends at the model's own end-of-sequence ids."""
    logprobs_mode: str
    """See `EngineInfo`. The API does not report it."""
    late_stops: int = 0
    """See `EngineInfo`. The API does not report whether the server speculates."""


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
        # SGLang uses seeds only in its deterministic mode, which this API does not report.
        fields={name: name for name in _SAME_NAMES - {"seed"}} | {"stop_strings": "stop"},
        constants={"ignore_eos": False, "skip_special_tokens": False, "no_stop_trim": True, "return_token_ids": True},
        named_ids=False,
        top_k_off=-1,
        own_stops=True,
        logprobs_mode="scaled_logprobs",
        late_stops=SPECULATED,
    ),
)


class OpenAiEngine(RemoteEngine):
    """An engine for servers with an OpenAI-style completions API that accepts and returns token ids.

    Open it with `open`.
    """

    _lowest_temperature = 0.01  # vLLM's
    _health = "/v1/models"

    def __init__(self, http: HttpClient, info: EngineInfo, api: CompletionsApi) -> None:
        super().__init__(http, info)
        self._api = api

    @classmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        card = chosen(await served_cards(http), model)
        api = _api_of(card.owned_by)
        info = EngineInfo(
            name=f"openai:{api.owned_by}",
            version="unknown",
            model=card.id,
            vocab_size=vocab_size,
            max_context=card.context,
            logprobs_mode=api.logprobs_mode,
            sampling=frozenset(api.fields),
            scoring_paths=("/v1/completions",) if api.owned_by == "vllm" else (),
            late_stops=api.late_stops,
            early_stops=api.owned_by == "sglang",
        )
        try:
            await cls(http, any_id(info), api)._probe()
        except InvalidRequest as error:
            if error.param not in _LEFT_OUT & api.constants.keys():
                raise
            api = replace(api, constants={k: v for k, v in api.constants.items() if k not in _LEFT_OUT})
            await cls(http, any_id(info), api)._probe()
        return cls(http, info, api)

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """See `RemoteEngine.sample`. Only closing the connection aborts a call."""
        self._refuse(prompt_ids, params)
        unique = unique_id(request_id)
        budget = min(params.max_tokens, self.info.max_context - len(prompt_ids))
        own = likeliest_alone(params) if self._api.logprobs_mode == "scaled_logprobs" else params
        sent = replace(own, max_tokens=budget, seed=nonnegative_seed(params.seed))
        body: dict[str, object] = {
            "model": self.info.model,
            "prompt": np.asarray(prompt_ids).tolist(),
            "echo": False,
            "n": 1,
            "stream": stream,
            "logprobs": params.top_logprobs,
            **self._api.constants,
            **{wire: getattr(sent, name) for name, wire in self._api.fields.items()},
            "top_k": sent.top_k or self._api.top_k_off,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = VllmReply(
            params,
            self.info.vocab_size,
            path=_COMPLETIONS,
            prompt=None,
            prompt_tokens=len(prompt_ids),
            call=unique,
            own_stops=self._api.own_stops,
            texts=not self._api.named_ids,
        )
        return self._receive(reply, msgspec.json.encode(body), {"x-request-id": unique}, stream=stream)

    async def _probe(self) -> None:
        params = SamplingParams(max_tokens=1)
        # SGLang treats a prompt that consists of id 0 as empty.
        prompt = np.ones(1, dtype=np.int32)
        await whole(self.sample(prompt, params, stream=True, request_id="tokentape-probe"))


def _api_of(owned_by: str) -> CompletionsApi:
    for api in APIS:
        # vLLM's Rust frontend appends its own name.
        if owned_by.startswith(api.owned_by):
            return api
    owners = ", ".join(api.owned_by for api in APIS)
    raise InvalidRequest(
        f"the engine's models have owned_by {safe_name(owned_by) or '(unknown)'}; expected one of {owners}", "engine"
    )
