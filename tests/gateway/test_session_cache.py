"""Sessions in memory: which call begins one, and which finds it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tokentape.errors import Conflict
from tokentape.gateway._limits import Limits
from tokentape.gateway._session_cache import OpenSession, SessionCache
from tokentape.store import SqliteStore
from tokentape.store._snapshots import Snapshots


def test_session_dropped_during_a_call_is_not_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One first call still asks for dropped sessions while the session of the other is stored and leaves the memory."""
    store = SqliteStore.open(tmp_path)
    cache = SessionCache(store, Limits())
    lookup_started, go_on = threading.Event(), threading.Event()
    dropped_of = Snapshots.dropped_of

    def slow_once(self: Snapshots, session_id: str) -> str | None:
        owner = dropped_of(self, session_id)
        if not lookup_started.is_set():
            lookup_started.set()
            go_on.wait(60)
        return owner

    monkeypatch.setattr(Snapshots, "dropped_of", slow_once)

    async def both() -> bool:
        first = asyncio.create_task(cache.find_or_begin("s", ""))
        await asyncio.to_thread(lookup_started.wait, 60)
        other = await cache.find_or_begin("s", "")
        await store.write(other.session.info)
        other.stored = True
        cache.drop(other)
        go_on.set()
        return (await first).stored

    assert asyncio.run(both())
    store.close()


def test_session_that_a_first_turn_begins_during_its_creation_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two sessions of one id are in memory, and the turn can't be recorded."""
    store = SqliteStore.open(tmp_path)
    cache = SessionCache(store, Limits())
    find = cache.find

    async def both() -> None:
        async def found_too_early(session_id: str, owner: str | None) -> OpenSession | None:
            missing = await find(session_id, owner)
            monkeypatch.setattr(cache, "find", find)
            begun.append(await cache.find_or_begin("s", ""))
            return missing

        begun: list[OpenSession] = []
        monkeypatch.setattr(cache, "find", found_too_early)
        with pytest.raises(Conflict, match="already exists"):
            await cache.create("s", {}, "")
        assert cache.in_memory("s") is begun[0]

    asyncio.run(both())
    store.close()
