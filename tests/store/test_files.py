"""Payloads in files outside of the record: written before the turn is acknowledged, read back, verified and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.records import SETUP, bits, make_chain
from tests.store.conftest import Place, Places
from tokentape._supports import pack
from tokentape.errors import InvalidRequest, StoreCorrupt, StoreError
from tokentape.store import Store, StoredSession, verify
from tokentape.store import _files as files
from tokentape.store._archive import SnapshotClient, archive_sessions
from tokentape.types import SessionInfo, TurnPayload

run = asyncio.run
TURNS = make_chain("s", 3)
SUPPORTS = np.array([pack([1, 5], 9), b"", pack([7], 9)], object)
PAYLOADS = (
    TurnPayload("s", 0, "experts", 0, np.arange(48, dtype=np.int32).reshape(8, 6)),
    TurnPayload("s", 1, "experts", -1, np.arange(30, dtype=np.int32).reshape(5, 6) + 300),
    TurnPayload("s", 2, "supports", 0, SUPPORTS),
)


@pytest.fixture(params=["folder", "file", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    urls = {"folder": str(tmp_path / "payloads"), "file": (tmp_path / "payloads").as_uri(), "memory": "memory://run"}
    yield urls[request.param]
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/", recursive=True)


def written(target: str) -> list[bytes]:
    """Return the contents of the files at an address."""
    system, path = fsspec.core.url_to_fs(target)
    return [system.cat_file(name) for name in (system.find(path) if system.exists(path) else [])]


def recorded(store: Store, target: str | None) -> StoredSession:
    if target is not None:
        store.keep_payloads_at(target)
    run(store.write(SessionInfo("s", 1.0), SETUP, *TURNS, *PAYLOADS))
    return store.load_session("s", per_token=True)


@pytest.mark.sampled(2)
def test_payloads_in_files_read_like_those_in_the_record(places: Places, target: str, tmp_path: Path) -> None:
    with places.new().open() as store:
        inside = recorded(store, None)
    place = places.new()
    with place.open() as store:
        outside = recorded(store, target)
    assert bits(outside.payloads) == bits(inside.payloads) == bits(PAYLOADS)
    # One byte per expert, or two, and a length per support.
    assert sorted(map(len, written(target))) == sorted([48, 2 * 30, sum(1 + len(support) for support in SUPPORTS)])
    assert verify(place.location).ok
    # Opening the record later does not need the address, and an archive needs no files.
    with place.open() as store:
        assert bits(store.load_session("s", per_token=True).payloads) == bits(PAYLOADS)
        done = archive_sessions(store, SnapshotClient(store), str(tmp_path / "archive"), idle_seconds=0, delete=True)
        assert (done.sessions, done.deleted) == (1, ["s"])
    assert written(target) == []
    assert verify(tmp_path / "archive").ok


def test_payload_write_failure_leaves_nothing_of_its_turn(
    store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep_payloads_at(target)
    run(store.write(SessionInfo("s", 1.0), SETUP, TURNS[0]))

    def full(*_: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_file", full)
        with pytest.raises(StoreError, match="nothing was recorded: no room"):
            run(store.write(TURNS[1], PAYLOADS[1]))
    assert len(store.load_session("s").turns) == 1
    run(store.write(TURNS[1], PAYLOADS[1]))
    assert bits(store.load_session("s", per_token=True).payloads) == bits(PAYLOADS[1:2])


def test_files_are_written_before_the_rows(store: Store, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep_payloads_at(target)
    there: list[int] = []
    transact = Store.transact

    async def look(self: Store, *arguments: Any) -> None:
        there.append(len(written(target)))
        await transact(self, *arguments)

    monkeypatch.setattr(Store, "transact", look)
    run(store.write(SessionInfo("s", 1.0), SETUP, *TURNS, *PAYLOADS))
    assert there == [3]


@pytest.mark.parametrize(("damage", "message"), [("missing", "is missing"), ("changed", "its hash is different")])
def test_missing_or_changed_payload_is_named(place: Place, tmp_path: Path, damage: str, message: str) -> None:
    target = tmp_path / "payloads"
    with place.open() as store:
        recorded(store, str(target))
    (file,) = target.glob("*-1-experts-*")
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1, *content[1:]]))
    (finding,) = verify(place.location).findings
    assert finding.session_id == "s"
    assert str(file) in finding.problem
    assert message in finding.problem
    with place.open() as store, pytest.raises(StoreCorrupt, match=message):
        store.load_session("s", per_token=True)


@pytest.mark.sampled(2)
def test_deleted_session_leaves_no_file_and_others_keep_theirs(place: Place, target: str) -> None:
    with place.open() as store:
        recorded(store, target)
        other = replace(PAYLOADS[0], session_id="t")
        run(store.write(SessionInfo("t", 2.0), *make_chain("t", 1), other))
        run(store.delete_session("s"))
        assert len(written(target)) == 1
        assert bits(store.load_session("t", per_token=True).payloads) == bits([other])
    assert verify(place.location).ok


def test_a_session_whose_files_cannot_be_removed_stays_and_can_be_deleted_again(
    store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(store, target)

    def refused(*_: Any) -> None:
        raise PermissionError("no access")

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.dirfs.DirFileSystem.rm_file", refused)
        with pytest.raises(StoreError, match="so the session was not deleted: no access"):
            run(store.delete_session("s"))
    assert len(store.load_session("s", per_token=True).payloads) == 3
    run(store.delete_session("s"))
    assert written(target) == []


def test_only_files_of_the_session_are_removed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x")
    with pytest.raises(StoreCorrupt, match="was not deleted"):
        files.remove_payloads("s", [str(other)])
    assert other.exists()


@pytest.mark.parametrize(
    ("location", "message"),
    [("sftp://me:secret@host/run", "has a password"), ("nosuch://bucket/run", "can't be reached")],
)
def test_an_address_that_cannot_be_used_is_refused(store: Store, location: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        store.keep_payloads_at(location)
    assert "secret" not in str(refused.value)
