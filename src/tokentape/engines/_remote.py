"""Base class of the engines that talk to a server over HTTP."""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import ClassVar, Self, TypeAlias

import numpy as np

from tokentape.engines._base import EngineInfo, Images, PromptMedia, SampleDelta, SamplingParams, Timeouts
from tokentape.engines._checks import refuse_call
from tokentape.engines._http import HttpClient, Stage, header_value
from tokentape.engines._identity import ServedAs, listed_as
from tokentape.engines._replies import OWN_CALLS, EngineReply
from tokentape.engines._scoring import Scores, refuse_unscorable, server_scores
from tokentape.engines._server_errors import hopeless
from tokentape.engines._tokenizing import TokenizeApi
from tokentape.errors import EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import TokenIds

Abort: TypeAlias = tuple[str, bytes]
"""The id of a call, from `unique_id`, and the body of the request that aborts it."""


class RemoteEngine(ABC):
    """Base class of engines that send and receive exact token ids over HTTP. Open one with `open`.

        engine = await VllmEngine.open("http://127.0.0.1:8000", vocab_size=len(tokenizer))

    Some servers always stop at the model's own end-of-sequence ids, even if `SamplingParams` does not list them. The
    reply then has finish_reason `stop` and that id as its `stop`.
    """

    tokenize_api: ClassVar[TokenizeApi | None] = None
    """How the server tokenizes texts and messages; None if it does not."""
    own_path: ClassVar[str | None] = None
    """A path that the other kinds of servers do not have; None if there is none."""
    _lowest_temperature: ClassVar[float] = 0.0
    """Temperatures between 0 and this one are refused, because the server would sample at another."""
    _health: ClassVar[str] = "/health"
    _abort_path: ClassVar[str] = ""
    """Path that ends a call with its last tokens and the finish_reason `abort`. If the server has no such path, pass no
    `abort` to `_receive`. If the server drops aborted calls without a last event, let `interrupt` return False."""

    def __init__(self, http: HttpClient, info: EngineInfo) -> None:
        self.http = http
        """The connections to the server."""
        self.info = info
        """The facts about the server, read when the engine was opened."""
        self._background: set[asyncio.Task[None]] = set()
        self._calls: dict[str, bytes] = {}
        """For each running call that the server can abort, by its id from `unique_id`, the body for `_abort_path`."""

    @classmethod
    async def open(
        cls,
        base_url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        verify_prompt: bool = False,
    ) -> Self:
        """Connect to the server, read its facts, and sample a token or two to check the format of its replies.

        Args:
            base_url: `http://host:port`.
            vocab_size: greater or equal ids are never sent and never accepted. Use the tokenizer's size. The embedding
                may have more rows, and ids of such padding rows make some servers fail or crash.
            model: the name of a model that the server lists; None for the first model.
            api_key: sent as a bearer token.
            timeouts: see `Timeouts`.
            verify_prompt: make vLLM and SGLang (from 0.5.13) return the prompt ids, and compare them with the ids
                sent. This makes replies larger; on SGLang it makes every stream event larger. The number of prompt
                ids is always compared.

        Raises:
            InvalidRequest: the URL is invalid, or the server does not serve the model.
            EngineUnavailable: the server can't be reached.
            EngineContractError: it is a different kind of server, does not return ids and log-probabilities, or has
                start options that make its samples unusable.
            EngineError: the server failed. May be any subclass that `sample` raises.

        """
        http = HttpClient(base_url, api_key=api_key, timeouts=timeouts)
        try:
            return await cls._connect(http, vocab_size, model, verify_prompt=verify_prompt)
        except BaseException:
            await http.close()
            raise

    @classmethod
    @abstractmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        """Read the server's facts and return the engine; see `open`."""

    @abstractmethod
    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `Engine`.

        A completion that fills the context ends with finish_reason `length`. The last delta, with the finish_reason, is
        yielded only after the whole reply has been checked.

        Raises:
            InvalidRequest: the prompt is empty, too long or has an unknown id, or a parameter is out of range. The
                server's range may be smaller than ours.
            UnsupportedParameter: a parameter is set that the server ignores or defines differently.
            EngineContractError: the reply lacks ids, log-probabilities or counts, or they do not agree.
            EngineUnavailable: the server can't be reached, or accepts no requests now.
            EngineTimeout: the server sent nothing for too long, for example because it is paused.
            EngineError: the server failed, or the connection broke.

        """

    @classmethod
    async def served_as(cls, http: HttpClient, *, stage: Stage = "first_token") -> ServedAs:
        """Return the facts that the server reports about its model, within the timeout of `stage`.

        Override it if they are not at `/v1/models`, or not only there. Raises `EngineError` or a subclass.
        """
        return await listed_as(http, stage=stage)

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]`, each id given all ids before it, with one request; see `Scorer.score`.

        Of the servers, only vLLM and SGLang can score. Also raises `EngineUnavailable` and `EngineTimeout`.
        """
        # vLLM samples at least one token.
        refuse_unscorable(ids, start, self.info, room=1)
        scores = await server_scores(self.http, self.info, ids, start, top)
        if scores is None:
            raise hopeless(f"{self.info.name} can't score ids: use vLLM, SGLang or transformers")
        return scores

    async def find_logprobs_mode(self) -> str:
        """Return the current `EngineInfo.logprobs_mode`, and update `info`. Raises the errors of `open`."""
        return self.info.logprobs_mode

    def interrupt(self, request_id: str) -> bool:
        """Make the server end a call with `abort`. Return False if the call is not running or can't be aborted."""
        aborts = [body for call, body in self._calls.items() if call.rpartition("-")[0] == request_id]
        for body in aborts:
            self._tell(self._abort_path, body)
        return bool(aborts)

    async def check(self) -> None:
        """Raise `EngineUnavailable` unless the server reports within `Timeouts.connect` that it is healthy."""
        try:
            await self.http.get(self._health, stage="connect")
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineUnavailable(f"the engine is not healthy: {error}") from None

    async def close(self) -> None:
        """Close all connections, which aborts running calls. It can be called again."""
        await asyncio.gather(*self._background)
        await self.http.close()

    def _refuse(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Raise `InvalidRequest` or `UnsupportedParameter` for a call that must not be sent."""
        refuse_call(prompt_ids, params, self.info)
        if 0 < params.temperature < self._lowest_temperature:
            raise InvalidRequest(
                f"temperature {params.temperature} is too low for {self.info.name}; use at least "
                f"{self._lowest_temperature:g}, or 0 for greedy sampling",
                "temperature",
            )
        if (params.payloads_from or 0) > len(prompt_ids):
            raise InvalidRequest(
                f"payloads_from must be at most {len(prompt_ids)}, the prompt's length", "payloads_from"
            )

    async def _receive(
        self, reply: EngineReply, body: bytes, headers: Mapping[str, str], *, stream: bool, abort: Abort | None = None
    ) -> AsyncGenerator[SampleDelta, None]:
        """Send a call and yield its tokens. If the caller closes the generator early, abort the call.

        A stream consists of server-sent events and ends with `[DONE]`. For a different format, override this method.
        """
        running = True
        if abort is not None:
            self._calls[abort[0]] = abort[1]
        try:
            if stream:
                async with aclosing(self.http.arrivals(reply.path, body, headers)) as arrivals:
                    async for arrival in arrivals:
                        for delta in reply.feed_all(arrival):
                            yield delta
            else:
                reply.feed(await self.http.post(reply.path, body, headers))
                reply.done = True
            running = False
            yield reply.last()
        except (EngineUnavailable, InvalidRequest):
            running = False
            raise
        finally:
            if abort is not None:
                self._calls.pop(abort[0], None)
                if running:
                    # Closing the connection aborts the call even if this request fails.
                    self._tell(self._abort_path, abort[1])

    def _tell(self, path: str, body: bytes) -> None:
        """Send a request in the background, and ignore errors. Only `close` waits for it."""

        async def send() -> None:
            with suppress(EngineError, InvalidRequest, TimeoutError):
                async with asyncio.timeout(self.http.timeouts.connect):
                    await self.http.post(path, body, {})

        task = asyncio.get_running_loop().create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def unique_id(request_id: str) -> str:
    """Return `request_id` with a random suffix: an abort ends all calls with the same id, or with it as a prefix."""
    return f"{header_value(request_id, 'request_id')}-{OWN_CALLS}{secrets.token_hex(16)}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return up to three numbers of a version; (1,), newer than all old versions, if it has none."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3]) or (1,)


def any_id(info: EngineInfo) -> EngineInfo:
    """Return `info` without a vocabulary limit, for probes: a model may sample an id of embedding padding."""
    return replace(info, vocab_size=1 << 31)


def one_placeholder_each(prompt_ids: TokenIds, media: Images) -> TokenIds:
    """Return the prompt with one placeholder id per image, which servers repeat themselves."""
    keep = np.ones(len(prompt_ids), np.bool_)
    for image in media:
        keep[image.start + 1 : image.start + image.length] = False
    return prompt_ids[keep]


def data_url(image: PromptMedia) -> str:
    """Return a data URL for an image. Servers read the format from the bytes, not from the URL."""
    return f"data:image/png;base64,{b64encode(image.data).decode()}"


def common_fields(params: SamplingParams) -> dict[str, object]:
    """Return the request fields with the same name in vLLM and SGLang."""
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop": params.stop_strings,
        "stop_token_ids": params.stop_token_ids,
    }
