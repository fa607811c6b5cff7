"""A remote engine that verifies its server's model when it is opened and whenever the model may have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from tokentape.engines._base import (
    CAPTURED,
    UNKNOWN_MODE,
    UNVERIFIED,
    ChatServer,
    EngineInfo,
    KeepsSessions,
    SampleDelta,
    SamplingParams,
    StartedCompletion,
)
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import ServedAs
from tokentape.engines._remote import RemoteEngine
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import TokenIds

_log = logging.getLogger("tokentape.engines")

FIRST_LOOK_SECONDS = 60.0
"""Time limit of the first check. The first requests after a server's start take up to 17 s each (vLLM, SGLang)."""

LOOK_SECONDS = 30.0
"""Time limit of a later check, for which a call waits. If it is exceeded, the model counts as unverified."""

NAMES_SECONDS = 30.0
"""At the end of a call, `/v1/models` is requested again if its last reply is older than this."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of checking the model that a server serves."""

    status: Literal["ok", "unverified", "refused"]
    reason: str = ""
    other_ids: bool = False
    """Whether the model is refused because its tokenizer returns different ids."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of the server at its last check."""

    generation: int
    """`HttpClient.generation`."""
    version: str | None
    """The weight version that the server reported."""
    named: str | None
    """The weight version that a trainer reported to the gateway."""


Look = Callable[[HttpClient, EngineInfo], Awaitable[ModelCheck]]
"""Checks whether a server serves the expected model."""


class GuardedEngine:
    """A `RemoteEngine` that verifies the model on its server. It is an `Engine`; create it with `open`.

    The server is checked again if it may have restarted, reports a new weight version or lists different models,
    always before the last delta of a completion. This also updates `info`. While the server
    serves a different model, calls fail. If the model can't be verified, or with `refuse` False, calls continue and
    `info` has the capability `UNVERIFIED`.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        look: Look,
        *,
        refuse: bool = True,
        weights_now: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self.http = engine.http
        """The connections to the server."""
        self._look = look
        self._refuse = refuse
        self._weights_now = weights_now
        self._last_check = ModelCheck("unverified", "nothing is known yet")
        self.info = marked(engine.info, unverified=True)
        """The facts about the server at its last check, with `UNVERIFIED` if its model is not verified."""
        self._seen = _Seen(0, None, None)
        self._opened = False
        """Whether the first check is done. That check skips the logprobs mode, which the engine has just read."""
        self._served: ServedAs | None = None
        self._named_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, engine: RemoteEngine, look: Look, **options: Any) -> Self:
        """Check the server and return the guarded engine.

        If the server serves a different model, close the engine and raise `InvalidRequest`.
        """
        guarded = cls(engine, look, **options)
        try:
            await guarded._look_again(guarded._seen)
            if guarded._refused:
                raise InvalidRequest(_refusal(guarded._last_check), "model")
        except BaseException:
            await engine.close()
            raise
        return guarded

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, **media: Any
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample like the engine, with `media` if it accepts them. Raises `EngineUnavailable` for a different model."""
        return self._settled(self._engine.sample(prompt_ids, params, stream=stream, request_id=request_id, **media))

    async def begin(self, *call: Any, **options: Any) -> StartedCompletion:
        """Begin a chat with the engine, a `ChatServer`. Raises `EngineUnavailable` for a different model."""
        await self._refuse_other_model()
        begun = await cast(ChatServer, self._engine).begin(*call, **options)
        deltas = self._settled(begun.deltas, begun=True)
        await anext(deltas)  # start the generator: otherwise `aclose` would not run its cleanup, which aborts the call
        return replace(begun, deltas=deltas)

    async def _settled(
        self, sampled: AsyncGenerator[SampleDelta, None], *, begun: bool = False
    ) -> AsyncGenerator[SampleDelta, None]:
        """Yield the deltas, and check the server before the last delta. With `begun`, yield an empty delta first."""
        async with aclosing(sampled) as deltas:
            if begun:
                yield SampleDelta((), ())
            await self._refuse_other_model()
            settling = False
            try:
                async for delta in deltas:
                    if settling := delta.finish_reason is not None:
                        await self._settle(delta)
                    if delta.engine is not None:
                        delta = replace(delta, engine=f"{self.info} {CAPTURED}")
                    elif delta.finish_reason is not None:
                        delta = replace(delta, engine=str(self.info))
                    yield delta
            except EngineContractError:
                if not settling and self.http.generation != self._seen.generation:
                    await self._look_again(self._seen)
                raise

    def interrupt(self, request_id: str) -> bool:
        """End a call early, as the engine does."""
        return self._engine.interrupt(request_id)

    def close_session(self, session_id: str) -> None:
        """Tell the server that a session is over; see `KeepsSessions`."""
        if isinstance(self._engine, KeepsSessions):
            self._engine.close_session(session_id)

    async def _settle(self, last: SampleDelta) -> None:
        """Check the server again if it may have changed since we last checked it. `last` is a completion's final delta.

        Raises `EngineUnavailable` if it serves a different model.
        """
        version = last.weight_spans[-1].version if last.weight_spans else last.weight_version
        now = _Seen(self.http.generation, version or self._seen.version, self._weights_now())
        # The first reported version belongs to the weights that the first check saw.
        before = replace(self._seen, version=self._seen.version or now.version)
        if now != before or await self._serves_others(NAMES_SECONDS):
            await self._look_again(now)
        else:
            self._seen = now
        self._raise_if_refused()

    async def check(self) -> None:
        """Run the engine's `check`. Also raises `EngineUnavailable` if the server now serves a different model."""
        await self._engine.check()
        restarted = self.http.generation != self._seen.generation
        if self._refused or restarted or await self._serves_others(0.0):
            await self._look_again(self._seen)
        self._raise_if_refused()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._engine.close()

    @property
    def _refused(self) -> bool:
        return self._refuse and self._last_check.status == "refused"

    async def _refuse_other_model(self) -> None:
        """Raise `EngineUnavailable` if the server still serves a different model."""
        if self._refused:
            await self._look_again(self._seen)
            self._raise_if_refused()

    def _raise_if_refused(self) -> None:
        if self._refused:
            raise EngineUnavailable(_refusal(self._last_check))

    async def _serves_others(self, seconds: float) -> bool:
        """Return whether the server's model list changed since the last check. Ask at most once per `seconds`."""
        now = asyncio.get_running_loop().time()
        if now - self._named_at < seconds:
            return False
        self._named_at = now
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return await self._engine.served_as(self.http) != self._served
        except (EngineError, TimeoutError):
            return True

    async def _look_again(self, now: _Seen) -> None:
        """Check which model the server serves. Concurrent calls wait for the same check."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._find_out(now))
        await asyncio.shield(self._looking)

    async def _find_out(self, now: _Seen) -> None:
        mode = UNKNOWN_MODE if self._opened else self._engine.info.logprobs_mode
        check = ModelCheck("ok")
        try:
            async with asyncio.timeout(LOOK_SECONDS if self._opened else FIRST_LOOK_SECONDS):
                self._served = await self._engine.served_as(self.http)
                check = await self._look(self.http, self._engine.info)
                if self._opened:
                    mode = await self._engine.find_logprobs_mode()
            self._seen = replace(now, generation=self.http.generation)
            self._named_at = asyncio.get_running_loop().time()
        except (EngineError, InvalidRequest, TimeoutError) as error:
            if self._opened and isinstance(error, EngineContractError):
                raise  # for example a restart with start options that change the samples
            if check.status == "ok":
                check = ModelCheck("unverified", f"the request to the server failed ({type(error).__name__})")
        first, self._opened = not self._opened, True
        if mode != self.info.logprobs_mode:
            old = self.info.logprobs_mode
            _log.warning("the logprobs mode of the %s server changed from %s to %s", self.info.name, old, mode)
        self.info = marked(replace(self._engine.info, logprobs_mode=mode), unverified=check.status != "ok")
        # `open` raises if the first check fails, so don't log that too.
        if check != self._last_check and not (first and self._refuse and check.status == "refused"):
            why = f": {check.reason}" if check.reason else ""
            level = logging.INFO if check.status == "ok" else logging.WARNING
            _log.log(level, "the model of the %s server is %s%s", self.info.name, _WORDS[check.status], why)
        self._last_check = check


_WORDS = {"ok": "verified", "unverified": "unverified", "refused": "probably not the folder's"}


def _refusal(check: ModelCheck) -> str:
    what = "has different token ids than the folder" if check.other_ids else "seems to serve a different model"
    return f"the server {what}: {check.reason}"


def marked(info: EngineInfo, *, unverified: bool) -> EngineInfo:
    """Return `info` with or without the capability `UNVERIFIED`."""
    rest = tuple(capability for capability in info.capabilities if capability != UNVERIFIED)
    return replace(info, capabilities=(*rest, UNVERIFIED) if unverified else rest)
