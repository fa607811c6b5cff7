"""The client for asyncio: agents and trainers with many sessions in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Self, TypeVar

import httpx2
import numpy.typing as npt

from tokentape.client import _calls as calls
from tokentape.client._calls import Call, Retries
from tokentape.client._results import EngineState, SessionEntry, SessionState
from tokentape.types import Trajectory

T = TypeVar("T")


class AsyncClient:
    """Talk to the gateway at `base_url` from one event loop. As an async context manager it closes its connections.

    For rollouts and weight sync it has the methods of `Client`, with the same arguments, results, errors and retries.
    For snapshots and `score`, use `Client`.

    >>> async with tokentape.AsyncClient("http://127.0.0.1:8800") as client:        # doctest: +SKIP
    ...     session = await client.session(metadata={"task": 7})
    ...     agent = AsyncOpenAI(base_url=session.base_url, api_key="none")
    ...     await run_agent(agent)
    ...     await session.reward(1.0)
    ...     trajectories = await session.trajectories()
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8800",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        self.base_url = str(base_url).rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._max_retries = max_retries
        self._http = httpx2.AsyncClient(**calls.http_options(self.base_url, api_key, timeout, max_retries))

    async def session(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        pin: Mapping[str, Any] | None = None,
        default: Mapping[str, Any] | None = None,
    ) -> AsyncClientSession:
        """Create a session, as `Client.session` does."""
        call = calls.create_session(session_id, metadata=metadata, pin=pin, default=default)
        return AsyncClientSession(self, await self._send(call))

    def existing_session(self, session_id: str) -> AsyncClientSession:
        """Return a session by its id, without a request. Its methods raise `NotFound` if there is no such session."""
        return AsyncClientSession(self, session_id)

    async def sessions(self) -> AsyncIterator[SessionEntry]:
        """Yield every session in order of creation. Pages are fetched as needed."""
        after: int | None = 0
        while after is not None:
            entries, after = await self._send(calls.list_sessions(after))
            for entry in entries:
                yield entry

    async def engine(self) -> EngineState:
        """Return the state of the engine."""
        return await self._send(calls.show_engine())

    async def pause(self, *, abort: bool = False, timeout: float = 60.0) -> bool:  # noqa: ASYNC109 (the gateway waits)
        """Make new calls wait while weights change; see `Client.pause`."""
        return bool((await self._send(calls.pause_engine(abort=abort, timeout=timeout))).idle)

    async def resume(self, weight_version: str | None = None, *, adapter: str | None = None) -> None:
        """Let calls start again; see `Client.resume`."""
        await self._send(calls.resume_engine(weight_version, adapter))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, call: Call[T]) -> T:
        retries = Retries(call, self._max_retries, self._timeout)
        while True:
            try:
                response = await self._http.request(**retries.request())
            except httpx2.RequestError as error:
                if (delay := retries.delay(error)) is None:
                    raise calls.unreachable(self.base_url, error) from None
            else:
                if (delay := retries.delay(response)) is None:
                    return retries.result(response)
            await asyncio.sleep(delay)


class AsyncClientSession:
    """A session on a gateway, returned by `AsyncClient.session` or `AsyncClient.existing_session`."""

    def __init__(self, client: AsyncClient, session_id: str) -> None:
        self._client = client
        self.session_id = session_id
        self.base_url = f"{client.base_url}{calls.session_path(session_id)}/v1"
        """The base URL for an agent's OpenAI client."""

    async def api_key(self) -> str:
        """A key for this session only, like `ClientSession.api_key`."""
        return str((await self.info()).api_key)

    async def reward(self, value: float, *, turn: int | None = None, leaf: int | None = None) -> None:
        """Set a reward; see `ClientSession.reward`."""
        calls.pass_on(await self._client._send(calls.give_reward(self.session_id, value, turn, leaf)))

    async def annotate(
        self, name: str, values: npt.ArrayLike, *, turn: int | None = None, leaf: int | None = None
    ) -> list[int]:
        """Attach a number to each token; see `ClientSession.annotate`. Return the turns that now have values."""
        return await self._client._send(calls.annotate_tokens(self.session_id, name, values, turn, leaf))

    async def info(self) -> SessionState:
        """Return the session's tree: turns, leaves with verdicts, aborted turns, rewards."""
        return await self._client._send(calls.show_session(self.session_id))

    async def trajectories(
        self, verdict: Collection[str] | None = None, *, wait_checks: int = 10, unread: bool = False
    ) -> list[Trajectory]:
        """Return one trajectory per leaf; see `ClientSession.trajectories`."""
        return await self._client._send(calls.read_trajectories(self.session_id, verdict, wait_checks, unread=unread))

    async def media(self, sha256: str) -> bytes:
        """Return what the session recorded under this hash: an image as received, or an image processor's settings."""
        return await self._client._send(calls.read_media(self.session_id, sha256))

    async def delete(self) -> None:
        """Delete the session and its record."""
        await self._client._send(calls.delete_session(self.session_id))

    def __repr__(self) -> str:
        return f"AsyncClientSession({self.session_id!r})"
