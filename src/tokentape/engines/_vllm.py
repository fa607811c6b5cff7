"""vLLM over HTTP, through `/inference/v1/generate` if the server has it, else `/v1/completions`.

docs/engines.md describes both routes. Two facts explain most of this module:

- vLLM ignores unknown fields, so only the reply shows whether a field works.
- Closing the connection aborts a request, unless a proxy keeps the connection open. `/inference/v1/abort_requests`
  aborts it by the server's id, which is derived from our request id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape.engines._base import DISTRIBUTION, EngineInfo, Images, SampleDelta, SamplingParams
from tokentape.engines._distributions import nonnegative_seed
from tokentape.engines._http import HttpClient, attempt, header_value
from tokentape.engines._identity import Card, chosen, served_cards
from tokentape.engines._remote import (
    RemoteEngine,
    any_id,
    common_fields,
    data_url,
    one_placeholder_each,
    unique_id,
    version_numbers,
)
from tokentape.engines._replies import ROUNDING, decode, logits_error, whole
from tokentape.engines._tokenizing import TokenizeApi
from tokentape.engines._vllm_reply import VllmReply, alternatives_to_ask
from tokentape.errors import EngineContractError, EngineError, EngineTimeout, EngineUnavailable, InvalidRequest
from tokentape.types import TokenIds

_log = logging.getLogger("tokentape.engines")

Route: TypeAlias = Literal["generate", "completions"]
"""The two routes that accept token ids."""

_PATHS: dict[Route, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}

WITHOUT_GENERATE = (
    "vLLM runs without --enable-scale-out, so its /v1/completions is used. Ids and logprobs are the same; there are no "
    "routed experts, supports and images, and a pause can't abort a single call."
)

# Prefix of the server's ids for generate requests. An abort with any other id gets status 200 and is ignored.
_SERVER_ID = "generate-tokens-"

# Fields to omit if the server refuses them, with the parameter that is then unsupported.
_OPTIONAL = {
    "return_weight_versions": "",
    "spaces_between_special_tokens": "",
    "include_stop_str_in_output": "stop_strings",
    "routed_experts_prompt_start": "payloads_from",
}

# First version that accepts images together with ids.
_CONTENT_PARTS = (0, 32)
# First version with `structured_outputs`. Older versions ignore it.
_STRUCTURED_OUTPUTS = (0, 11)

_CELL = 8
"""Bytes per id in the table, including the comma: copying a machine word is faster than copying seven bytes."""

_MOST_IDS = 1 << 21
"""Largest vocabulary for which a table is made: its ids fit in a cell, and the table takes 16 MiB."""

_SHORT = 256
"""Prompts of at most this many ids are formatted directly."""


@dataclass(frozen=True, slots=True)
class _VllmServer:
    """Facts about a server that determine how to send requests to it."""

    route: Route
    aborts: bool = False
    """Whether it can abort calls by id."""
    weight_versions: bool = False
    """Whether completions can report weight versions (vLLM 0.33). The generate route always reports them."""
    streams_only: bool = False
    """Whether only streamed replies are complete: the Rust frontend of vLLM 0.33 omits usage from whole replies."""
    without: frozenset[str] = frozenset()
    """Fields of `_OPTIONAL` that the server refuses."""
    models: frozenset[str] = frozenset()
    """The names of the model itself, which the server would also accept in place of an adapter's."""


class VllmEngine(RemoteEngine):
    """An engine for vLLM servers. Open it with `open`.

    It uses the route `generate` if the server has it (`--enable-scale-out`), else `completions`.
    """

    _routes: ClassVar[tuple[Route, ...]] = ("generate", "completions")
    """The routes to try, in this order."""
    tokenize_api = TokenizeApi()
    own_path = "/version"
    _lowest_temperature = 0.01  # vLLM raises lower ones to this
    _abort_path = "/inference/v1/abort_requests"

    def __init__(self, http: HttpClient, info: EngineInfo, server: _VllmServer, *, verify_prompt: bool = False) -> None:
        super().__init__(http, info)
        self._server = server
        self._verify_prompt = verify_prompt

    @classmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        info, models = await cls._facts(http, vocab_size, model)
        server, info = await cls._probe_routes(http, info, verify_prompt=verify_prompt)
        return cls(http, info, replace(server, models=models), verify_prompt=verify_prompt)

    @classmethod
    async def _facts(cls, http: HttpClient, vocab_size: int, model: str | None) -> tuple[EngineInfo, frozenset[str]]:
        """Return the facts about the server that need no sample, and the names of the model itself."""
        cards = await served_cards(http)
        version = decode(await http.get("/version"), _VllmVersion, "vLLM")
        card = chosen(cards, model)
        sampling = DISTRIBUTION | {"min_tokens", "cache_salt", "session_id"}
        if await _has_priorities(http):
            sampling |= {"priority"}
        if version.rust_frontend_version is None and version_numbers(version.version) >= _STRUCTURED_OUTPUTS:
            sampling |= {"json_schema", "structural_tag"}
        if any(other.parent is not None for other in cards):
            sampling |= {"adapter"}
        info = EngineInfo(
            name="vllm",
            version=version.version if version.rust_frontend_version is None else f"{version.version}+rust",
            model=card.id,
            vocab_size=vocab_size,
            max_context=await _context_length(http, card),
            logprobs_mode="raw_logprobs",
            sampling=sampling,
            prompt_penalties=frozenset({"repetition_penalty"}),
            scoring_paths=("/v1/completions", "/inference/v1/generate"),
        )
        return info, frozenset(other.id for other in cards if other.parent is None)

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, media: Images = ()
    ) -> AsyncGenerator[SampleDelta, None]:
        """See `RemoteEngine.sample` and `MediaEngine`. The server gets `request_id` with a random suffix."""
        self._refuse(prompt_ids, params)
        if media and not self.info.media:
            raise InvalidRequest(
                "this vLLM server does not accept images; use vLLM 0.32 or newer, with --enable-scale-out", "prompt_ids"
            )
        return self._begin_call(prompt_ids, params, stream=stream, request_id=request_id, media=media)[1]

    def _begin_call(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        stream: bool,
        request_id: str,
        rows_from: int | None = None,
        media: Images = (),
    ) -> tuple[VllmReply, AsyncGenerator[SampleDelta, None]]:
        """Return a call's reply and deltas. Reading the deltas sends the call and reads the reply.

        `rows_from` is the first token to return payload rows for.
        """
        unique = unique_id(request_id)
        headers = call_headers(unique, params)
        # Returned prompts are compared as bytes, so send them in the same format as the server's JSON.
        returns_prompt = self._verify_prompt or bool(media)
        prompt = prompt_json(prompt_ids, self.info.vocab_size, compact=returns_prompt)
        if rows_from is None:
            # By default, the server would return rows for the whole prompt with each reply.
            rows_from = len(prompt_ids) if params.payloads_from is None else params.payloads_from
        stream = stream or self._server.streams_only
        # The server repeats each image's placeholder itself, so compare the prompt that it returns.
        sent_prompt = prompt_json(one_placeholder_each(prompt_ids, media), self.info.vocab_size) if media else prompt
        body = self._request_body(sent_prompt, params, rows_from, media, stream=stream, request_id=unique)
        reply = VllmReply(
            params,
            self.info.vocab_size,
            path=_PATHS[self._server.route],
            prompt=prompt,
            prompt_tokens=len(prompt_ids),
            call=unique,
            names_ids=self._verify_prompt or self._server.route == "generate",
            returns_prompt=returns_prompt,
        )
        abort = (unique, _abort_body(unique)) if self._server.aborts else None
        return reply, self._receive(reply, body, headers, stream=stream, abort=abort)

    def _request_body(
        self, prompt: bytes, params: SamplingParams, rows_from: int, media: Images, *, stream: bool, request_id: str
    ) -> bytes:
        """Return the request body, which sets every field that has a default in the server."""
        sampling: dict[str, object] = {
            **vllm_fields(params),
            "max_tokens": params.max_tokens,
            # The server's end-of-sequence ids come from generation_config.json, ours from the template.
            "ignore_eos": True,
            # The server looks for stop strings in the decoded text. As in the embedded engine, that text includes
            # control tokens and has no extra spaces. Including the match keeps the server from buffering text.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": params.top_logprobs,
        }
        body: dict[str, object] = {
            "model": self._model_of(params),
            "stream": stream,
            "return_token_ids": self._verify_prompt or bool(media),
        }
        if media:
            body["content_parts"] = [{"type": "image_url", "url": data_url(image)} for image in media]
        if self._server.route == "generate":
            sampling["routed_experts_prompt_start"] = rows_from
            sampling["logprobs"] = alternatives_to_ask(params)
            body |= {
                "request_id": request_id,
                "token_ids": msgspec.Raw(prompt),
                "sampling_params": sampling,
                "output_mode": "tokens",
            }
        else:
            body |= {
                "prompt": msgspec.Raw(prompt),
                "add_special_tokens": False,
                "echo": False,
                "return_tokens_as_token_ids": True,
                **sampling,
            }
            if self._server.weight_versions:
                body["return_weight_versions"] = True
        for name in self._server.without:
            sampling.pop(name, None)
            body.pop(name, None)
        if stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": False}
        body |= scheduling_fields(params)
        return msgspec.json.encode(body)

    def _model_of(self, params: SamplingParams) -> str:
        """Return the server's name of what samples. Raises `InvalidRequest` for an adapter with the model's name."""
        if params.adapter in self._server.models:
            raise InvalidRequest(
                f"{params.adapter!r} is the model, not a LoRA adapter; name an adapter, or none", "adapter"
            )
        return params.adapter or self.info.model

    async def find_logprobs_mode(self) -> str:
        """See `RemoteEngine.find_logprobs_mode`. This samples one token, and also reads the other facts again."""
        info, models = await self._facts(self.http, self.info.vocab_size, self.info.model)
        mode, reply = await VllmEngine(self.http, any_id(info), self._server)._probe(stream=True)
        self._server = replace(self._server, models=models)
        self.info = _described(info, self._server, mode, reply.offers)
        return mode

    async def _probe(self, *, stream: bool) -> tuple[str, VllmReply]:
        """Return the server's `--logprobs-mode`, which it does not report, and the reply that showed it.

        A tiny top_p leaves one token. `raw_logprobs`, taken before truncation, still have alternatives, and
        `processed_logprobs` have none. `top_k=1` works too, but crashes vLLM 0.32 on a CPU with n-gram speculation.
        """
        params = SamplingParams(max_tokens=1, top_p=1e-6, top_logprobs=2)
        prompt = np.zeros(1, dtype=np.int32)
        reply, deltas = self._begin_call(prompt, params, stream=stream, request_id="tokentape-probe", rows_from=0)
        (alternatives,) = (await whole(deltas)).top_logprobs
        if math.fsum(math.exp(logprob) for _, logprob in alternatives) > 1 + ROUNDING:
            raise logits_error()
        return "raw_logprobs" if len(alternatives) > 1 else "processed_logprobs", reply

    @classmethod
    async def _probe_routes(
        cls, http: HttpClient, info: EngineInfo, *, verify_prompt: bool
    ) -> tuple[_VllmServer, EngineInfo]:
        """Sample one token on each route until a route works. Return the facts about the server, and its info."""

        async def probe(server: _VllmServer, *, stream: bool = True) -> tuple[_VllmServer, str, VllmReply]:
            engine = cls(http, any_id(info), server, verify_prompt=verify_prompt)
            try:
                return server, *await engine._probe(stream=stream)
            except InvalidRequest as error:
                if error.param not in _OPTIONAL.keys() - server.without:
                    raise
                return await probe(replace(server, without=server.without | {error.param}), stream=stream)

        if "generate" in cls._routes:
            try:
                server, mode, reply = await probe(_VllmServer("generate"))
            except (EngineUnavailable, EngineTimeout):
                raise
            except (EngineError, InvalidRequest) as error:
                if "completions" not in cls._routes:
                    raise
                # 403 and 404 mean that the server does not have this route.
                if type(error) is EngineError and not error.retry:
                    _log.info("%s", WITHOUT_GENERATE)
                else:
                    _log.warning("vLLM %s is used at %s: %s", info.version, _PATHS["completions"], error)
            else:
                # If this route refuses a field, the other route may support it.
                if "completions" not in cls._routes or not any(_OPTIONAL[name] for name in server.without):
                    try:
                        await probe(server, stream=False)
                    except EngineContractError:
                        server = replace(server, streams_only=True)
                    server = replace(server, aborts=await cls._takes_aborts(http))
                    return server, _described(info, server, mode, reply.offers)
        # Servers without weight versions ignore or refuse the field, so the reply shows whether they are supported.
        server, mode, reply = await probe(_VllmServer("completions", weight_versions=True))
        server = replace(server, weight_versions="weight_versions" in reply.offers)
        return server, _described(info, server, mode, reply.offers)

    @classmethod
    async def _takes_aborts(cls, http: HttpClient) -> bool:
        """Return whether the server has a route for aborts, by calling it with an unused id."""
        try:
            return await attempt(http.post(cls._abort_path, _abort_body("tokentape-probe"), {})) is not None
        except InvalidRequest:
            return False


def _described(info: EngineInfo, server: _VllmServer, mode: str, offers: Collection[str]) -> EngineInfo:
    sampling = info.sampling
    if server.route == "generate" and "routed_experts" in offers:
        sampling |= {"payloads_from"}
    if server.route == "generate" and "sampling_mask" in offers:
        sampling |= {"supports"}
    sampling -= {_OPTIONAL[name] for name in server.without}
    capabilities = (server.route, *sorted(offers))
    images = server.route == "generate" and not info.version.endswith("+rust")
    images = images and version_numbers(info.version) >= _CONTENT_PARTS
    media = frozenset({"image"}) if images else frozenset[str]()
    return replace(info, logprobs_mode=mode, sampling=sampling, capabilities=capabilities, media=media)


class _VllmVersion(msgspec.Struct):
    version: str
    rust_frontend_version: str | None = None


class _Tokenized(msgspec.Struct):
    max_model_len: int


class _Scheduler(msgspec.Struct):
    policy: str = "fcfs"


class _Config(msgspec.Struct):
    scheduler_config: _Scheduler = msgspec.field(default_factory=_Scheduler)


class _ServerInfo(msgspec.Struct):
    vllm_config: _Config = msgspec.field(default_factory=_Config)


async def _context_length(http: HttpClient, card: Card) -> int:
    """Return the context length, from `/v1/models` or else from `/tokenize`."""
    if card.max_model_len is None:
        answer = await attempt(http.post("/tokenize", msgspec.json.encode({"model": card.id, "prompt": "a"}), {}))
        if answer is not None:
            return decode(answer, _Tokenized, "vLLM").max_model_len
    return card.context


async def _has_priorities(http: HttpClient) -> bool:
    """Return whether the scheduler uses priorities. Only servers in development mode report it."""
    answer = await attempt(http.get("/server_info?config_format=json"))
    info = decode(answer, _ServerInfo, "vLLM") if answer is not None else _ServerInfo()
    return info.vllm_config.scheduler_config.policy == "priority"


def _abort_body(call: str) -> bytes:
    return msgspec.json.encode({"request_ids": [f"{_SERVER_ID}{call}"]})


def call_headers(unique: str, params: SamplingParams) -> dict[str, str]:
    if params.session_id is None:
        return {"x-request-id": unique}
    session = header_value(params.session_id, "session_id")
    return {"x-request-id": unique, "x-session-id": session, "x-dynamo-session-id": session}


def vllm_fields(params: SamplingParams) -> dict[str, object]:
    seed = nonnegative_seed(params.seed)
    own: dict[str, object] = {"min_tokens": params.min_tokens, "top_k": params.top_k, "seed": seed}
    if params.json_schema is not None:
        own["structured_outputs"] = {"json": msgspec.Raw(params.json_schema.encode())}
    elif params.structural_tag is not None:
        own["structured_outputs"] = {"structural_tag": params.structural_tag}
    return common_fields(params) | own


def scheduling_fields(params: SamplingParams) -> dict[str, object]:
    """Return the scheduling fields that are set."""
    values = {"priority": params.priority or None, "cache_salt": params.cache_salt}
    return {name: value for name, value in values.items() if value is not None}


def prompt_json(ids: TokenIds, vocab_size: int, *, compact: bool = False) -> bytes:
    """Return a JSON array of the ids, int32 [tokens], all below `vocab_size`.

    Formatting 100,000 integers would take milliseconds on every turn of a long session. So a table stores the text of
    each id, padded with spaces to a fixed width, and a prompt is copied from it. JSON allows the white space.

    With `compact` it has no white space, like the JSON that servers write.

    >>> prompt_json(np.array([3, 40, 999], dtype=np.int32), 1000)
    b'[3,40,999]'
    """
    ids = np.asarray(ids)
    if compact or vocab_size > _MOST_IDS or len(ids) <= _SHORT:
        return msgspec.json.encode(ids.tolist())
    # The first cell is for the opening bracket.
    cells = np.empty(len(ids) + 1, np.uint64)
    _table(vocab_size).take(ids, out=cells[1:], mode="clip")
    data = cells.view(np.uint8)
    data[_CELL - 1], data[-1] = b"[]"
    return data[_CELL - 1 :].tobytes()


@lru_cache(maxsize=4)
def _table(vocab_size: int) -> npt.NDArray[np.uint64]:
    """Return a table with a 64-bit word for each id: its digits, padding and a comma."""
    cells = np.full((vocab_size, _CELL), ord(" "), np.uint8)
    digits = np.arange(vocab_size).astype(f"S{_CELL - 1}").view(np.uint8).reshape(vocab_size, _CELL - 1)
    cells[:, :-1] = np.where(digits == 0, ord(" "), digits)
    cells[:, -1] = ord(",")
    return cells.view(np.uint64).reshape(-1)
