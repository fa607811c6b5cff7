"""SGLang over HTTP, through its native route `/generate`.

docs/engines.md describes the route. Four facts explain most of this module:

- Each event of a stream contains all ids so far, or only the new ids, depending on a start option of the server.
- A request can't switch off the model's own end-of-sequence ids without losing `stop_token_ids` too.
- Log-probabilities are computed after temperature, unless an environment variable of the server changes that.
- Closing the connection aborts a call only after two seconds. `/abort_request` aborts it at once.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Self

import msgspec
import numpy as np

from tokentape.engines._base import (
    DISTRIBUTION,
    OVER_SUPPORTS,
    SPECULATED,
    EngineInfo,
    Images,
    SampleDelta,
    SamplingParams,
)
from tokentape.engines._distributions import GREEDY_BELOW, likeliest_alone, truncates
from tokentape.engines._http import HttpClient, Stage, attempt
from tokentape.engines._identity import ServedAs, served_cards
from tokentape.engines._remote import (
    RemoteEngine,
    any_id,
    common_fields,
    data_url,
    one_placeholder_each,
    unique_id,
    version_numbers,
)
from tokentape.engines._replies import decode, whole
from tokentape.engines._server_errors import safe_name
from tokentape.engines._sglang_reply import SglangReply
from tokentape.engines._tokenizing import TokenizeApi
from tokentape.errors import EngineContractError, InvalidRequest
from tokentape.types import TokenIds

# Newer versions accept 64-bit seeds, but the kernels of older versions only 32-bit seeds.
_SEEDS = 1 << 31

# The first versions with a request field, from the released wheels. `cache_salt` was named `extra_key` before.
_RETURN_PROMPT_TOKEN_IDS = (0, 5, 13)
_ROUTED_EXPERTS_START_LEN = (0, 5, 10)
_SESSION_ID = (0, 5, 16)
_CACHE_SALT = (0, 5, 18)


class SglangEngine(RemoteEngine):
    """An engine for SGLang servers. Open it with `open`.

    SGLang's `ignore_eos` switches off both `stop_token_ids` and the model's own end-of-sequence ids. So a completion
    with `stop_token_ids` or a grammar also ends at end-of-sequence ids; others only at stop strings and `max_tokens`.
    """

    tokenize_api = TokenizeApi(decoded="text", decoding={"skip_special_tokens": False})
    own_path = "/get_server_info"  # vLLM in development mode also has `/server_info`
    _lowest_temperature = GREEDY_BELOW
    _abort_path = "/abort_request"

    def __init__(
        self, http: HttpClient, info: EngineInfo, server: _SglangServer, *, verify_prompt: bool = False
    ) -> None:
        super().__init__(http, info)
        self._server = server
        self._verify_prompt = verify_prompt and version_numbers(info.version) >= _RETURN_PROMPT_TOKEN_IDS

    @classmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        info, server = await cls._facts(http, vocab_size)
        engine = cls(http, info, server, verify_prompt=verify_prompt)
        engine.info = replace(info, logprobs_mode=await engine._logprobs_mode())
        return engine

    @classmethod
    async def _facts(cls, http: HttpClient, vocab_size: int) -> tuple[EngineInfo, _SglangServer]:
        """Return the facts about the server. Raises `EngineContractError` if its start options change the samples."""
        card = (await served_cards(http))[0]
        server = decode(await _first(http, "/server_info", "/get_server_info"), _SglangServer, "SGLang")
        started = decode(await _first(http, "/model_info", "/get_model_info"), _SglangModelInfo, "SGLang")
        _refuse_preferred(started.preferred_sampling_params)
        if server.watermark_default_enabled or server.watermark_enforce_all:
            raise EngineContractError(
                "the engine was started with --watermark-default-enabled or --watermark-enforce-all: it samples tokens "
                "with a watermark and reports logprobs without it; start it without these"
            )
        # With images, the server may encode decoded text, so the ids that it used must be compared.
        images = started.has_image_understanding and version_numbers(server.version) >= _RETURN_PROMPT_TOKEN_IDS
        info = EngineInfo(
            name="sglang",
            version=server.version,
            model=card.id,
            vocab_size=vocab_size,
            # The server refuses longer prompts; in a cache smaller than the context, much shorter ones.
            max_context=min(card.context, server.max_req_input_len or card.context),
            logprobs_mode="scaled_logprobs",
            sampling=_supported_params(server),
            capabilities=(OVER_SUPPORTS,) if server.sampling_mask_max_tokens > 0 else (),
            media=frozenset({"image"} if images else ()),
            scoring_paths=("/generate",),
            late_stops=SPECULATED if server.speculative_algorithm else 0,
            early_stops=True,
        )
        return info, server

    @classmethod
    async def served_as(cls, http: HttpClient, *, stage: Stage = "first_token") -> ServedAs:
        """See `RemoteEngine.served_as`. `/model_info` has the path and the type of the model."""
        listed = await super().served_as(http, stage=stage)
        answer = await attempt(http.get("/model_info")) or await attempt(http.get("/get_model_info"))
        if answer is None:
            return listed
        more = decode(answer, _SglangModelInfo, "SGLang")
        names = listed.names | {more.model_path} if more.model_path else listed.names
        return replace(listed, names=names, model_type=more.model_type)

    def close_session(self, session_id: str) -> None:
        """See `KeepsSessions`. The server evicts the caches of open sessions last."""
        if self._server.enable_session_radix_cache:
            self._tell("/close_session", msgspec.json.encode({"session_id": session_id}))

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, media: Images = ()
    ) -> AsyncGenerator[SampleDelta, None]:
        """See `RemoteEngine.sample` and `MediaEngine`. The server gets `request_id` with a random suffix."""
        self._refuse(prompt_ids, params)
        if not (truncates(params) and 0 < params.top_k <= self._server.sampling_mask_max_tokens):
            # The server refuses to report sampling masks without a top_k that limits their size.
            params = replace(params, supports=0)
        elif params.supports and self.info.logprobs_mode != "scaled_logprobs":
            # The alternatives can be converted to the mask's distribution only if they include the temperature.
            params = replace(params, top_logprobs=0)
        rid = unique_id(request_id)
        if media and not self.info.media:
            raise InvalidRequest(
                "this SGLang server does not accept images: its model takes only text, or its version is too old",
                "prompt_ids",
            )
        prompt = msgspec.json.encode(np.asarray(prompt_ids).tolist())
        # The server repeats each image's placeholder itself, so compare the prompt that it returns.
        sent_prompt = msgspec.json.encode(one_placeholder_each(prompt_ids, media).tolist()) if media else prompt
        # SGLang refuses `max_tokens` that exceed the context. Other servers end such calls with `length`.
        room = self.info.max_context - len(prompt_ids)
        limited = replace(likeliest_alone(params), max_tokens=min(params.max_tokens, room))
        body = self._request_body(sent_prompt, limited, stream, rid, media)
        reply = SglangReply(
            params,
            self.info.vocab_size,
            own_stops=_own_stops(params),
            prompt=prompt,
            prompt_tokens=len(prompt_ids),
            call=rid,
            incremental=self._server.incremental_streaming_output,
            returns_prompt=self._verify_prompt or bool(media),
        )
        abort = rid, msgspec.json.encode({"rid": rid, "abort_all": False})
        return self._receive(reply, body, {}, stream=stream, abort=abort)

    def _request_body(self, prompt: bytes, params: SamplingParams, stream: bool, rid: str, media: Images) -> bytes:
        sampling = _sampling_fields(params)
        if params.json_schema is not None:
            sampling["json_schema"] = params.json_schema
        elif params.structural_tag is not None:
            sampling["structural_tag"] = params.structural_tag
        if self._server.enable_deterministic_inference:
            # Without a seed, such a server uses 42 for every call, so equal prompts would get equal completions.
            sampling["sampling_seed"] = secrets.randbelow(_SEEDS) if params.seed is None else params.seed
        body: dict[str, object] = {
            "rid": rid,
            "input_ids": msgspec.Raw(prompt),
            "sampling_params": sampling,
            "stream": stream,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.top_logprobs,
            "return_text_in_logprobs": False,
        }
        if media:
            body["image_data"] = list(map(data_url, media))
        if self._verify_prompt or media:
            body["return_prompt_token_ids"] = True
        if params.supports:
            body["return_sampling_mask"] = True
        if params.payloads_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": params.payloads_from}
        if params.priority:
            body["priority"] = params.priority
        if params.cache_salt is not None:
            body["cache_salt" if version_numbers(self.info.version) >= _CACHE_SALT else "extra_key"] = params.cache_salt
        if params.adapter is not None:
            body["lora_path"] = params.adapter
        if params.session_id is not None:
            body["session_id"] = params.session_id
        return msgspec.json.encode(body)

    async def find_logprobs_mode(self) -> str:
        """See `RemoteEngine.find_logprobs_mode`. This also reads the other facts again, which a restart may change."""
        info, self._server = await self._facts(self.http, self.info.vocab_size)
        self.info = replace(info, logprobs_mode=await self._logprobs_mode())
        return self.info.logprobs_mode

    async def _logprobs_mode(self) -> str:
        """Return the mode, found out with two tokens, sampled at temperatures 1 and 2.

        If log-probabilities include the temperature, the difference between two of them is halved at temperature 2.
        """
        probe = SglangEngine(self.http, any_id(self.info), self._server)
        difference, at_two = [await probe._probe(temperature) for temperature in (1.0, 2.0)]
        return "penalised_logprobs" if difference >= 1e-3 and at_two / difference > 0.75 else "scaled_logprobs"

    async def _probe(self, temperature: float) -> float:
        """Sample a token, and return the difference between the two largest log-probabilities."""
        params = SamplingParams(max_tokens=1, temperature=temperature, top_logprobs=2)
        prompt = np.zeros(1, dtype=np.int32)
        (top,) = (await whole(self.sample(prompt, params, stream=True, request_id="tokentape-probe"))).top_logprobs
        if len(top) != 2:
            raise EngineContractError(f"the engine returned {len(top)} alternatives for a token; expected 2")
        return top[0][1] - top[1][1]


def _own_stops(params: SamplingParams) -> bool:
    """Return whether a completion must end at the model's own end-of-sequence ids: `ignore_eos` switches off more.

    With it the server ignores `stop_token_ids`, and after a complete grammar it samples one token without the grammar.
    """
    return bool(params.stop_token_ids) or params.json_schema is not None or params.structural_tag is not None


def _sampling_fields(params: SamplingParams) -> dict[str, object]:
    """Return every sampling field that has a default in the server."""
    return {
        **common_fields(params),
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": min(params.min_tokens, params.max_tokens),
        "top_k": params.top_k or -1,
        "ignore_eos": not _own_stops(params),
        # The server looks for stop strings in the decoded text. Keep control tokens in that text, and add no spaces.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


class _SglangServer(msgspec.Struct):
    version: str
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    enable_priority_scheduling: bool = False
    enable_lora: bool | None = False
    sampling_mask_max_tokens: int = 0
    max_req_input_len: int | None = None
    skip_tokenizer_init: bool = False
    grammar_backend: str | None = None
    enable_session_radix_cache: bool = False
    incremental_streaming_output: bool | None = None
    speculative_algorithm: str | None = None
    watermark_default_enabled: bool = False
    watermark_enforce_all: bool = False


class _SglangModelInfo(msgspec.Struct):
    model_path: str | None = None
    model_type: str | None = None
    preferred_sampling_params: dict[str, object] | str | None = None
    has_image_understanding: bool = False


async def _first(http: HttpClient, path: str, older: str) -> bytes:
    """Return the body at `path`, or at `older`, the path in older versions."""
    return await attempt(http.get(path)) or await http.get(older)


def _supported_params(server: _SglangServer) -> frozenset[str]:
    version = version_numbers(server.version)
    text = not server.skip_tokenizer_init
    offered = {
        # Seeds are accepted in all modes, but used only in deterministic mode.
        "seed": server.enable_deterministic_inference,
        "stop_strings": text,
        "min_tokens": text,
        "json_schema": text and server.grammar_backend != "none",
        "structural_tag": text and server.grammar_backend == "xgrammar",
        "adapter": bool(server.enable_lora),
        "priority": server.enable_priority_scheduling,
        "cache_salt": True,
        "session_id": version >= _SESSION_ID,
        "supports": server.sampling_mask_max_tokens > 0,
        "payloads_from": server.enable_return_routed_experts and version >= _ROUTED_EXPERTS_START_LEN,
    }
    return DISTRIBUTION.union(offered) - {name for name, supported in offered.items() if not supported}


def _refuse_preferred(preferred: dict[str, object] | str | None) -> None:
    """Raise `EngineContractError` if the server has default sampling parameters that our requests don't override."""
    if isinstance(preferred, str):
        preferred = msgspec.json.decode(preferred, type=dict[str, object])
    names = sorted(
        safe_name(name) for name in (preferred or {}).keys() - _sampling_fields(SamplingParams(max_tokens=1)).keys()
    )
    if names:
        raise EngineContractError(
            f"the engine was started with --preferred-sampling-params for {', '.join(names)}, which would change the "
            "samples; start it without these"
        )
