"""Use several replicas as one engine. A session stays on the replica that has its prefix cached until that fails."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Self

from tokentape.engines._base import (
    UNVERIFIED,
    Engine,
    EngineInfo,
    Interruptible,
    KeepsSessions,
    SampleDelta,
    SamplingParams,
)
from tokentape.engines._guarded import marked
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    TokentapeError,
)
from tokentape.types import TokenIds

_log = logging.getLogger("tokentape.engines")

Opener = Callable[[], Awaitable[Engine]]
"""Opens a replica."""


@dataclass(slots=True)
class _Serving:
    """A replica's open engine."""

    engine: Engine
    calls: int = 0
    """Number of running calls."""
    failed: bool = False
    """Whether the engine gets no new calls, and is closed after its last running call."""


@dataclass(slots=True)
class _Replica:
    name: str
    open: Opener
    serving: _Serving | None = None
    """None while the replica is down."""
    down_since: float = 0.0
    """When it went down, in seconds of the monotonic clock."""


class EnginePool:
    """An `Engine` that distributes calls among replicas with the same weights. Open it with `open`.

    A session's calls go to one replica, chosen by rendezvous hashing of the session id, so that its prefix is cached
    there. If a replica fails or comes back, only its own sessions move. If a replica can't be reached or refuses a call
    before its first token, the call is sent to the next replica; other failures raise, and the replica is checked. A
    failed replica gets no calls until it can be opened again, which is tried every `recheck_seconds`.
    """

    def __init__(self, replicas: list[_Replica], info: EngineInfo, recheck_seconds: float) -> None:
        self._replicas = replicas
        self._info = info
        self._recheck_seconds = recheck_seconds
        self._rechecking: list[asyncio.Task[None]] = []
        self._calls: dict[str, Engine] = {}
        """The replica of each running call, by request id."""

    @classmethod
    async def open(cls, openers: Mapping[str, Opener], *, recheck_seconds: float = 5.0) -> Self:
        """Open all replicas, by name. One open replica is enough to start; the others are tried again later.

        Raises:
            InvalidRequest: there are no replicas, a replica serves the wrong model, or two replicas have different
                models, vocabularies or logprobs modes.
            EngineError: no replica can be opened. The first replica's error is raised, or that of one that is paused.

        """
        replicas = [_Replica(name, opener) for name, opener in openers.items()]
        if not replicas:
            raise InvalidRequest("an engine needs at least one replica", "engine_url")
        results = await asyncio.gather(*(replica.open() for replica in replicas), return_exceptions=True)
        opened: dict[str, Engine] = {}
        failures: list[BaseException] = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, BaseException):
                failures.append(result)
                replica.down_since = time.monotonic()
                _log.warning("engine replica %s is not available (%s): %s", replica.name, type(result).__name__, result)
            else:
                opened[replica.name] = result
                replica.serving = _Serving(result)
        engines = list(opened.values())
        try:
            wrong = [failure for failure in failures if isinstance(failure, InvalidRequest)]
            if wrong or not opened:
                raise next(iter(wrong or filter(_is_paused, failures)), failures[0])
            for name, engine in opened.items():
                _refuse_different(name, engine.info, engines[0].info)
        except BaseException:
            for engine in engines:
                await engine.close()
            raise
        infos = [engine.info for engine in engines]
        info = replace(
            infos[0],
            sampling=frozenset.intersection(*(info.sampling for info in infos)) | {"session_id"},
            max_context=min(info.max_context for info in infos),
            media=frozenset.intersection(*(info.media for info in infos)),
        )
        return cls(replicas, info, recheck_seconds)

    @property
    def info(self) -> EngineInfo:
        """The facts that apply to all replicas. How they stop and count changes with the replicas that take calls."""
        infos = [engine.info for engine in self._engines()] or [self._info]
        info = replace(
            self._info,
            late_stops=max(info.late_stops for info in infos),
            early_stops=any(info.early_stops for info in infos),
            prompt_penalties=frozenset.intersection(*(info.prompt_penalties for info in infos)),
        )
        return marked(info, unverified=any(UNVERIFIED in info.capabilities for info in infos))

    @property
    def available(self) -> Mapping[str, bool]:
        """Whether each replica accepts calls, by name."""
        return {replica.name: replica.serving is not None for replica in self._replicas}

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, **media: Any
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample on the replica for `params.session_id`, or without one on the least busy; see `MediaEngine`."""
        self._start_rechecking()
        failure: EngineError | InvalidRequest | None = None
        for replica in self._ranked(params.session_id):
            serving = replica.serving
            if serving is None:
                continue
            engine = self._calls[request_id] = serving.engine
            own = params if "session_id" in engine.info.sampling else replace(params, session_id=None)
            begun = False
            serving.calls += 1
            try:
                call = engine.sample(prompt_ids, own, stream=stream, request_id=request_id, **media)
                async with aclosing(call) as deltas:
                    async for delta in deltas:
                        begun = True
                        yield replace(delta, engine=str(engine.info))
                return
            except (EngineUnavailable, EngineTimeout) as error:
                if not _is_paused(error):
                    _mark_down(replica, serving, error)
                if begun:
                    raise
                if not _is_paused(failure):  # otherwise the caller can wait
                    failure = error
            except InvalidRequest as error:
                if begun:
                    raise
                failure = error
            except EngineError as error:
                await self._check(replica, serving)
                if begun or error.retry or isinstance(error, EngineContractError):
                    raise
                failure = error  # for example, this replica does not have the adapter
            finally:
                serving.calls -= 1
                self._calls.pop(request_id, None)
                await _close_if_unused(serving)
        raise failure or EngineUnavailable("no replica of the engine is available; send the request again later")

    def interrupt(self, request_id: str) -> bool:
        """Make the call's replica end the call with `abort`. Return False if the replica can't."""
        engine: object = self._calls.get(request_id)
        return isinstance(engine, Interruptible) and engine.interrupt(request_id)

    async def check_call(self, request_id: str) -> str:
        """Return the engine of a running call. Raises `EngineUnavailable` if that replica can't take a request now."""
        engine = self._calls[request_id]
        await engine.check()
        return str(engine.info)

    def close_session(self, session_id: str) -> None:
        """Tell all replicas that a session is over, because the session may have moved; see `KeepsSessions`."""
        for engine in self._engines():
            if isinstance(engine, KeepsSessions):
                engine.close_session(session_id)

    def _engines(self) -> list[Engine]:
        return [replica.serving.engine for replica in self._replicas if replica.serving is not None]

    async def check(self) -> None:
        """Raise `EngineUnavailable` unless a replica can take a request now."""
        self._start_rechecking()
        for replica in self._replicas:
            if replica.serving is not None and await self._check(replica, replica.serving):
                return
        raise EngineUnavailable("no replica of the engine is available; try again later")

    async def _check(self, replica: _Replica, serving: _Serving) -> bool:
        """Return whether the replica can take a request now. If not, it gets no more calls."""
        try:
            await serving.engine.check()
        except EngineError as error:
            _mark_down(replica, serving, error)
            await _close_if_unused(serving)
            return False
        return True

    async def close(self) -> None:
        """Close every replica."""
        for task in self._rechecking:
            task.cancel()
        if self._rechecking:
            await asyncio.wait(self._rechecking)
        for replica in self._replicas:
            if replica.serving is not None:
                serving, replica.serving = replica.serving, None
                await serving.engine.close()

    def _ranked(self, session_id: str | None) -> list[_Replica]:
        """Return the replicas in the order in which to try them for a session."""
        if session_id is None:
            return sorted(self._replicas, key=lambda replica: replica.serving.calls if replica.serving else 0)

        def weight(replica: _Replica) -> bytes:
            return hashlib.blake2b(f"{replica.name}\0{session_id}".encode(), digest_size=8).digest()

        return sorted(self._replicas, key=weight, reverse=True)

    def _start_rechecking(self) -> None:
        if not self._rechecking:
            # One task per replica, because opening a replica that does not answer takes as long as its timeouts.
            self._rechecking = [asyncio.create_task(self._recheck(replica)) for replica in self._replicas]

    async def _recheck(self, replica: _Replica) -> None:
        while True:
            await asyncio.sleep(self._recheck_seconds)
            if replica.serving is None:
                await self._try_again(replica)

    async def _try_again(self, replica: _Replica) -> None:
        try:
            engine = await replica.open()
            try:
                await engine.check()
                _refuse_different(replica.name, engine.info, self._info)
            except BaseException:
                await engine.close()
                raise
        except TokentapeError as error:
            if isinstance(error, InvalidRequest | EngineContractError):
                _log.error("engine replica %s: %s", replica.name, error)
        else:
            replica.serving = _Serving(engine)
            _log.warning("engine replica %s is back after %.0f s", replica.name, time.monotonic() - replica.down_since)


def _is_paused(error: BaseException | None) -> bool:
    return isinstance(error, EngineUnavailable) and error.paused


def _mark_down(replica: _Replica, serving: _Serving, error: TokentapeError) -> None:
    if replica.serving is serving:
        _log.warning("engine replica %s failed (%s); no calls until it answers again", replica.name, error.code)
        replica.serving = None
        replica.down_since = time.monotonic()
        serving.failed = True


async def _close_if_unused(serving: _Serving) -> None:
    if serving.failed and not serving.calls:
        # The caller may be cancelled, and nothing else would close it.
        await asyncio.shield(serving.engine.close())


def _refuse_different(name: str, info: EngineInfo, expected: EngineInfo) -> None:
    for field in ("name", "model", "vocab_size", "logprobs_mode"):
        value, expected_value = getattr(info, field), getattr(expected, field)
        if value != expected_value:
            raise InvalidRequest(
                f"engine replica {name} has {field} {value!r}, the others have {expected_value!r}; "
                "start all replicas with the same model and settings",
                "engine_url",
            )
