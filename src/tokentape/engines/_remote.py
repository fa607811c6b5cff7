"""What the engines over HTTP share: opening, calls and aborts, health checks, scoring, the end."""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import ClassVar, Self

from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams, Timeouts
from tokentape.engines._checks import refuse_call
from tokentape.engines._http import HttpClient, header_value
from tokentape.engines._replies import DONE, EngineReply
from tokentape.engines._scoring import Scores, refuse_unscorable, server_scores
from tokentape.engines._status_errors import hopeless
from tokentape.errors import EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import TokenIds


class RemoteEngine(ABC):
    """An `Engine` that sends and receives exact token ids over HTTP. Open it with `open`.

        engine = await VllmEngine.open("http://127.0.0.1:8000", vocab_size=len(tokenizer))

    Some servers always stop at the model's own end-of-sequence ids, even if `SamplingParams` does not list them. Such
    an end is reported as a `stop` at that id.
    """

    _health: ClassVar[str] = "/health"
    _abort_path: ClassVar[str] = ""

    def __init__(self, http: HttpClient, info: EngineInfo) -> None:
        self._http = http
        self._info = info
        self._background: set[asyncio.Task[None]] = set()
        self._calls: set[str] = set()
        """Calls that the server can be asked to end, by its ids: see `_unique`."""

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
        """Find out what the server is, with a token or two sampled to see what its replies hold.

        Args:
            base_url: `http://host:port`.
            vocab_size: ids at or above it are never sent and never accepted. The tokenizer's, not the number of rows
                of the embedding: servers take and sample ids in the padding between the two, or die of them.
            model: one of the names that the server lists; the first if None.
            api_key: sent as a bearer token.
            timeouts: see `Timeouts`.
            verify_prompt: have vLLM and SGLang (0.5.13) return the prompt's ids with each reply and compare them;
                replies grow with the prompt, on SGLang each event of a stream. Counts are always compared.

        Raises:
            InvalidRequest: the address can't be used, or the server has no such model.
            EngineUnavailable: the server can't be reached.
            EngineContractError: it is another kind of server, does not return ids and log-probabilities, or was
                started in a way that a request can't undo.
            EngineError: or one of its kinds, as for `sample`.

        """
        http = HttpClient(base_url, api_key=api_key, timeouts=timeouts)
        try:
            return await cls._explore(http, vocab_size, model, verify_prompt=verify_prompt)
        except BaseException:
            await http.close()
            raise

    @classmethod
    @abstractmethod
    async def _explore(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        """Find out what the server is; see `open`."""

    @property
    def http(self) -> HttpClient:
        """The connections to the server."""
        return self._http

    @property
    def info(self) -> EngineInfo:
        """What the server said when it was opened."""
        return self._info

    @abstractmethod
    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `Engine`.

        A completion that meets the end of the context ends with `length`. The delta with the finish_reason comes only
        when the whole reply has been checked.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown id; a parameter is out of range, here or
                by the server's own limits.
            UnsupportedParameter: this server would ignore a parameter that was set, or means something else by it.
            EngineContractError: the reply lacks ids, log-probabilities or counts, or they disagree.
            EngineUnavailable: the server can't be reached or takes no requests.
            EngineTimeout: it was silent for too long, as a paused server is.
            EngineError: it failed, or the connection broke.

        """

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]`, each given all before it; see `Scorer`. One call, of the whole of `ids`.

        Raises:
            InvalidRequest: see `Scorer.score`.
            EngineError: this server does not score prompts: only vLLM and SGLang do.
            EngineUnavailable: the server can't be reached or takes no requests.
            EngineTimeout: it gave no answer in time.

        """
        # vLLM samples at least one token.
        refuse_unscorable(ids, start, self._info, room=1)
        found = await server_scores(self._http, self._info, ids, start, top)
        if found is None:
            raise hopeless(f"{self._info.name} does not score ids: use vLLM, SGLang or transformers")
        return found

    async def find_logprobs_mode(self) -> str:
        """Return what `EngineInfo.logprobs_mode` is now: a server that was restarted may have another one.

        Raises as `sample`.
        """
        return self._info.logprobs_mode

    def interrupt(self, request_id: str) -> bool:
        """Have the server end a call with `abort` and all that it has sampled; False if it can't be asked to."""
        found = [call for call in self._calls if call.rpartition("-")[0] == request_id]
        for call in found:
            self._in_background(self._abort(call))
        return bool(found)

    async def check(self) -> None:
        """Return if the server says within `Timeouts.connect` that it is healthy, else raise `EngineUnavailable`."""
        try:
            await self._http.get(self._health, stage="connect")
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineUnavailable(f"the engine is not healthy: {error}") from None

    async def close(self) -> None:
        """Close all connections, which aborts what runs on them. May be called again."""
        await asyncio.gather(*self._background)
        await self._http.close()

    def _refuse(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Raise for what no server is asked."""
        refuse_call(prompt_ids, params, self._info)
        if (params.payloads_from or 0) > len(prompt_ids):
            raise InvalidRequest(f"payloads_from must be at most {len(prompt_ids)}, the prompt's end", "payloads_from")

    async def _receive(
        self,
        reply: EngineReply,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        stream: bool,
        abort_id: str | None = None,
    ) -> AsyncGenerator[SampleDelta, None]:
        """Send a call and yield its tokens. If it is left, the server is asked to abort `abort_id`."""
        runs = True
        if abort_id is not None:
            self._calls.add(abort_id)
        try:
            if stream:
                async with aclosing(self._http.arrivals(path, body, headers)) as arrivals:
                    async for arrival in arrivals:
                        for delta in reply.feed_all(arrival):
                            yield delta
            else:
                reply.feed(await self._http.post(path, body, headers))
                reply.feed(DONE)
            runs = False
            yield reply.last()
        except (EngineUnavailable, InvalidRequest):
            runs = False
            raise
        finally:
            if abort_id is not None:
                self._calls.discard(abort_id)
                if runs:
                    self._in_background(self._abort(abort_id))

    async def _abort(self, call: str) -> None:
        # Where the connection is closed already, that aborts the call too.
        with suppress(EngineError, InvalidRequest, TimeoutError):
            async with asyncio.timeout(self._http.timeouts.connect):
                await self._http.post(self._abort_path, self._abort_body(call), {})

    @staticmethod
    def _abort_body(call: str) -> bytes:
        """Return the body that has the server end a call. For engines that have an `_abort_path`."""
        raise NotImplementedError

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do something that no call waits for; `close` does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def unique_id(request_id: str) -> str:
    """Return `request_id` with a random ending: servers abort every call of an id, or of ids that begin with it."""
    return f"{header_value(request_id, 'request_id')}-{secrets.token_hex(16)}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers; a development version without any counts as new."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3]) or (1,)


def any_id(info: EngineInfo) -> EngineInfo:
    """Return `info` for a probe: what a model says to one meaningless token may lie outside the vocabulary."""
    return replace(info, vocab_size=1 << 31)


def common_fields(params: SamplingParams) -> dict[str, object]:
    """Return the request fields that have the same name in the APIs of vLLM and SGLang."""
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
