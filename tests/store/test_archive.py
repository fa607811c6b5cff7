"""Old sessions taken out of a record: written, read back, deleted, and read again from the archive."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
import pytest

from tests.postgres import Server
from tests.records import SETUP, bits, make_chain, make_turn
from tests.store.conftest import Place, open_databases
from tests.vocabularies import changed_tokenizer
from tokentape._session.jsonl import json_line
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import Conflict, InvalidRequest, StoreCorrupt, StoreError
from tokentape.store import Store, open_record, verify
from tokentape.store import _archive as archive
from tokentape.store._archive import Archived, SnapshotClient, archive_sessions
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.types import RecordedReply, Reward, SessionInfo, TurnColumn, TurnPayload

run = asyncio.run
CHAIN = make_chain("a", 3)
NEW = 4e9
"""A time in the future."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "data")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with filled(place) as store:
        yield store


@contextmanager
def filled(place: Place) -> Iterator[Store]:
    """Sessions `a`, with everything that a session can have, and `b`, which are old; and `new`."""
    with place.open() as store:
        run(store.write(SessionInfo("a", 1.0, {"run": 1}, "me"), SETUP, *CHAIN))
        answer = RecordedReply("a", "reply", (0,), "k", "ab" * 32, 1.0, ((((5, -0.5), (6, -1.5)),),))
        column = TurnColumn("a", 1, "advantages", np.arange(4, dtype=np.float32), 1.0)
        payload = TurnPayload("a", 2, "experts", 0, np.arange(12, dtype=np.int16).reshape(2, 6))
        run(store.write(answer, Reward("a", None, 0.5, 1.0), Reward("a", 1, 1.5, 1.0), column, payload))
        run(store.write(SessionInfo("b", 2.0), make_turn("b", 0), make_turn("b", 1)))
        run(store.write(SessionInfo("new", NEW), make_turn("new", 0, created_at=NEW)))
        yield store


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


@pytest.fixture
def memory() -> Iterator[str]:
    """Storage that is no file system."""
    yield "memory://runs/archive"
    fsspec.filesystem("memory").rm("/runs", recursive=True)


def archived(store: Store, target: str, *, delete: bool = False) -> Archived:
    return archive_sessions(store, SnapshotClient(store), target, idle_seconds=86400, delete=delete)


def names(store: Store) -> list[str]:
    return [session.info.session_id for session in store.sessions()]


def lines(store: Store, *session_ids: str) -> list[bytes]:
    sessions = (store.load_session(session_id, per_token=True) for session_id in session_ids)
    return [json_line(trajectory) for stored in sessions for trajectory in stored.trajectories()]


def test_archiving_leaves_no_database_open(store: Store, target: str) -> None:
    before = open_databases()
    gc.disable()
    try:
        archived(store, target)
        assert verify(target).ok
        assert open_databases() == before
    finally:
        gc.enable()


def check_archived_and_read(store: Store, target: str) -> None:
    before = {name: bits(store.load_session(name, per_token=True)) for name in "ab"}
    done = archived(store, target, delete=True)
    assert (done.sessions, done.deleted, done.kept) == (2, ["a", "b"], ())
    assert names(store) == ["new"]
    with open_record(target, read_only=True) as read:
        assert names(read) == ["a", "b"]
        assert {name: bits(read.load_session(name, per_token=True)) for name in "ab"} == before
        assert read.extra_names().columns == ("advantages",)
    report = verify(target)
    assert (report.ok, report.sessions, report.turns) == (True, 2, 5)


def test_an_archive_reads_like_the_record_bit_for_bit(store: Store, target: str) -> None:
    check_archived_and_read(store, target)


def test_an_archive_on_object_storage_reads_like_the_record(store: Store, memory: str) -> None:
    check_archived_and_read(store, memory)


def test_an_archive_of_a_database_reads_like_the_record(postgres: Server, target: str) -> None:
    url = postgres.new_place()
    with filled(Place(url)) as store:
        check_archived_and_read(store, target)
    postgres.drop(url)


def test_archived_and_deleted_session_stays_deleted(store: Store, target: str, place: Place) -> None:
    archived(store, target, delete=True)
    with pytest.raises(Conflict, match="use a new session id"):
        run(store.write(SessionInfo("a", 5.0)))
    assert verify(place.location).ok


def test_without_delete_everything_stays_and_only_changes_are_rewritten(store: Store, target: str) -> None:
    assert archived(store, target).sessions == 2
    assert names(store) == ["a", "b", "new"]
    assert archived(store, target) == Archived()
    run(store.write(Reward("b", 0, 2.0, 3.0)))
    assert archived(store, target).sessions == 1
    with open_record(target, read_only=True) as read:
        assert sorted(names(read)) == ["a", "b"]
        assert lines(read, "a", "b") == lines(store, "a", "b")
    assert archived(store, target, delete=True).deleted == ["a", "b"]
    with open_record(target, read_only=True) as read:
        assert sorted(names(read)) == ["a", "b"]


def test_records_after_the_snapshot_are_kept(store: Store, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = SnapshotClient.take

    def take_and_go_on(self: SnapshotClient, selection: Selection, owner: str) -> int:
        taken = take(self, selection, owner)
        run(store.write(make_turn("a", 3, CHAIN[2])))
        return taken

    monkeypatch.setattr(SnapshotClient, "take", take_and_go_on)
    done = archived(store, target, delete=True)
    assert (done.deleted, done.kept) == (["b"], (("a", "changed since the snapshot"),))
    assert len(store.load_session("a").turns) == 4
    with open_record(target, read_only=True) as read:
        assert len(read.load_session("a").turns) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", range(12))
def test_interrupted_archive_resumes(store: Store, target: str, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The process dies at a later file write, or before the deletion."""
    write, writes = archive.write_file, iter(range(at))
    before = lines(store, "a", "b")

    class Killed(BaseException):
        pass

    def write_until(folder: Any, name: str, source: IO[bytes]) -> None:
        if next(writes, None) is None:
            raise Killed
        write(folder, name, source)

    def drop_not(self: SnapshotClient, snapshot_id: int, digest: str) -> tuple[list[str], dict[str, str]]:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(archive, "write_file", write_until)
        patched.setattr(SnapshotClient, "drop", drop_not)
        with pytest.raises(Killed):
            archived(store, target, delete=True)
    assert names(store) == ["a", "b", "new"]
    done = archived(store, target, delete=True)
    assert done.deleted == ["a", "b"]
    assert names(store) == ["new"]
    with open_record(target, read_only=True) as read:
        assert lines(read, "a", "b") == before
    assert verify(target).ok


def test_archive_interrupted_in_the_snapshot_holds_nothing_forever(
    store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Snapshots, snapshot_id: int) -> object:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "_read", die)
        with pytest.raises(SystemExit):
            archived(store, target, delete=True)
    assert archived(store, target, delete=True).deleted == ["a", "b"]


def test_archive_killed_in_its_first_write_resumes(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    target.mkdir()
    (target / "tokentape-archive.json.1f2e3d4c.part").write_bytes(b"{")
    assert archived(store, str(target), delete=True).deleted == ["a", "b"]
    assert [file.name for file in target.glob("*.part")] == []


def test_unfinished_work_of_another_archive_is_left_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: SnapshotClient, snapshot_id: int, digest: str) -> None:
        raise SystemExit

    first, other = str(tmp_path / "one"), str(tmp_path / "other")
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotClient, "drop", die)
        with pytest.raises(SystemExit):
            archived(store, first, delete=True)
    assert [name for name, _ in archived(store, other, delete=True).kept] == ["a", "b"]
    assert archived(store, first, delete=True).deleted == ["a", "b"]


def test_files_are_flushed_before_the_snapshot_is_confirmed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "some" / "archive"
    flushed: set[tuple[int, int]] = set()
    fsync = os.fsync

    def note(handle: int) -> None:
        fsync(handle)
        flushed.add((os.fstat(handle).st_dev, os.fstat(handle).st_ino))

    drop = SnapshotClient.drop

    def check(self: SnapshotClient, snapshot_id: int, digest: str) -> tuple[list[str], dict[str, str]]:
        there = [tmp_path, target.parent, target, *target.rglob("*")]
        assert target / "tokentape-archive.json" in there
        assert [path for path in there if (path.stat().st_dev, path.stat().st_ino) not in flushed] == []
        return drop(self, snapshot_id, digest)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(SnapshotClient, "drop", check)
    assert archived(store, str(target), delete=True).deleted == ["a", "b"]


def test_sessions_that_can_not_be_read_back_are_not_deleted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = archive.write_file

    def spoil(folder: Any, name: str, source: IO[bytes]) -> None:
        write(folder, name, BytesIO(source.read()[:-1] + b"?") if name == "turns.parquet" else source)

    with monkeypatch.context() as patched:
        patched.setattr(archive, "write_file", spoil)
        with pytest.raises(StoreCorrupt, match=r"turns\.parquet is not the file that was written"):
            archived(store, str(tmp_path / "archive"), delete=True)
    assert names(store) == ["a", "b", "new"]


def test_later_damage_of_a_file_is_detected(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (damaged,) = target.glob("*/rewards.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (finding,) = verify(target).findings
    assert "rewards.parquet" in str(finding)
    with pytest.raises(StoreCorrupt):
        open_record(target, read_only=True)


def test_stray_file_is_ignored(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (target / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    assert verify(target).ok
    with open_record(target, read_only=True) as read:
        assert names(read) == ["a", "b"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", ["{}", "[]", "1", '{"schema_version": 4, "sessions": 1, "files": {}}'])
def test_manifest_of_another_archive_is_detected(store: Store, tmp_path: Path, content: str) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (manifest,) = target.glob("*/manifest.json")
    manifest.write_text(content)
    (finding,) = verify(target).findings
    assert "manifest.json is damaged" in str(finding)
    with pytest.raises(StoreCorrupt, match=r"manifest\.json is damaged"):
        open_record(target, read_only=True)


def test_session_without_rows_is_detected(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (manifest,) = target.glob("*/manifest.json")
    contents = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**contents, "sessions": [*contents["sessions"], "ghost"]}))
    (finding,) = verify(target).findings
    assert "'ghost'" in str(finding)


def test_unfinished_run_is_not_read(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (manifest,) = target.glob("*/manifest.json")
    manifest.unlink()
    with open_record(target, read_only=True) as read:
        assert names(read) == []


def test_a_run_without_its_manifest_is_a_finding(store: Store, tmp_path: Path) -> None:
    """Regression: its sessions were neither checked nor exported, and there was no finding."""
    target = tmp_path / "archive"
    archived(store, str(target))
    (manifest,) = target.glob("*/manifest.json")
    assert verify(target).findings == ()
    manifest.unlink()
    (finding,) = verify(target).findings
    assert f"the run {manifest.parent.name} has no manifest.json" in str(finding)
    shutil.rmtree(manifest.parent)
    assert verify(target).findings == ()


def test_archives_of_two_stores_can_be_combined(store: Store, tmp_path: Path) -> None:
    target = str(tmp_path / "archive")
    archived(store, target, delete=True)
    with open_record(tmp_path / "other") as other:
        run(other.write(SessionInfo("c", 1.0), SETUP, make_turn("c", 0)))
        assert archived(other, target, delete=True).deleted == ["c"]
    with open_record(target, read_only=True) as read:
        assert sorted(names(read)) == ["a", "b", "c"]


def test_an_archive_with_another_records_session_of_the_same_id_is_refused(store: Store, tmp_path: Path) -> None:
    """Regression: both were deleted from their records, and the archive showed one of them."""
    target = str(tmp_path / "archive")
    archived(store, target, delete=True)
    before = sorted(Path(target).rglob("*"))
    with open_record(tmp_path / "other") as other:
        run(other.write(SessionInfo("b", 1.0), SETUP, make_turn("b", 0), SessionInfo("c", 1.0)))
        with pytest.raises(InvalidRequest, match=r"1 sessions with ids .* not archived from it, such as 'b'"):
            archived(other, target, delete=True)
        assert names(other) == ["b", "c"]
        assert [snapshot.state for snapshot in Snapshots(other).all(None)] == ["released"]
    assert sorted(Path(target).rglob("*")) == before


def test_an_archive_with_ids_of_another_vocabulary_is_refused(store: Store, tmp_path: Path, model_dir: Path) -> None:
    target = str(tmp_path / "archive")
    run(store.bind(Tokenizer.load(model_dir)))
    archived(store, target)
    before = sorted(Path(target).rglob("*"))
    with open_record(tmp_path / "other") as other:
        run(other.bind(changed_tokenizer(model_dir)))
        run(other.write(SessionInfo("c", 1.0), SETUP, make_turn("c", 0)))
        with pytest.raises(InvalidRequest, match=r"has sessions of another tokenizer .* use another place"):
            archived(other, target, delete=True)
        assert names(other) == ["c"]
    assert sorted(Path(target).rglob("*")) == before
    assert archived(store, target, delete=True).deleted == ["a", "b"]


def test_folder_with_other_files_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday/photo").write_text("")
    with pytest.raises(InvalidRequest, match="neither an archive"):
        archived(store, str(tmp_path / "holiday"))
    with pytest.raises(InvalidRequest, match="can't be reached"):
        archived(store, "nosuch://bucket")


def test_an_archive_of_a_later_version_is_refused(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    (part,) = target.glob("*/manifest.json")
    part.write_text(json.dumps({**json.loads(part.read_text()), "schema_version": 99}))
    with pytest.raises(StoreCorrupt, match="later release"):
        open_record(target, read_only=True)


def test_archive_is_read_only(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    archived(store, str(target))
    with pytest.raises(InvalidRequest, match="read-only"):
        open_record(target)
    with open_record(target, read_only=True) as read, pytest.raises(StoreError, match="read-only"):
        run(read.write(SessionInfo("c", 1.0)))


def test_a_session_without_turns_is_archived_too(store: Store, target: str) -> None:
    run(store.write(SessionInfo("empty", 3.0)))
    assert archived(store, target, delete=True).deleted == ["a", "b", "empty"]
    with open_record(target, read_only=True) as read:
        assert sorted(names(read)) == ["a", "b", "empty"]


def test_sessions_with_rows_that_differ_when_read_back_are_not_deleted(
    store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = archive._load

    def lose_a_session(directory: Path, runs: Any) -> None:
        load(directory, [(folder, manifest, {"a"}) for folder, manifest, _ in runs])

    with monkeypatch.context() as patched:
        patched.setattr(archive, "_load", lose_a_session)
        with pytest.raises(StoreCorrupt, match="nothing was deleted"):
            archived(store, target, delete=True)
    assert names(store) == ["a", "b", "new"]
