from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from tests.records import (
    SETUP,
    make_chain,
    make_turn,
)
from tests.store.conftest import open_databases
from tests.store.test_verify import damage_log, killed  # noqa: F401 - a fixture
from tokentape.errors import (
    InvalidRequest,
    StoreCorrupt,
    StoreError,
    StoreLocked,
)
from tokentape.store import Record, SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.store._sqlite import CHECKPOINT_BYTES
from tokentape.types import SessionInfo, Turn, TurnPayload


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore.open(tmp_path) as store:
        yield store


def write(store: SqliteStore, *records: Record) -> None:
    asyncio.run(store.write(*records))


def session(session_id: str) -> SessionInfo:
    return SessionInfo(session_id, 1.0)


def test_payloads_use_only_the_space_of_their_turn(store: SqliteStore, tmp_path: Path) -> None:
    turns = make_chain("s", 40, tokens=50)
    write(store, session("s"), SETUP, *turns)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 128, (100, 32, 8), np.int32) for _ in turns]
    write(store, *(TurnPayload("s", turn.seq, "experts", 0, own) for turn, own in zip(turns, rows, strict=True)))
    (trajectory,) = store.load_session("s", per_token=True).trajectories()
    np.testing.assert_array_equal(trajectory.payloads["experts"].rows, np.concatenate(rows))
    store.close()
    assert (tmp_path / "tokentape.db").stat().st_size < 1.3 * sum(own.size for own in rows)


def test_row_uses_little_more_space_than_its_bytes(store: SqliteStore, tmp_path: Path) -> None:
    # Various lengths, because they change the rest of a page.
    sizes = range(100, 500)
    text = np.random.default_rng(0).integers(ord("!"), ord("~"), (len(sizes), 1000), np.uint8)
    turns: list[Turn] = []
    for seq, size in enumerate(sizes):
        message = {"role": "user", "content": text[seq].tobytes().decode()}
        turns.append(make_turn("s", seq, turns[-1] if turns else None, tokens=size, messages=(message,)))
    write(store, session("s"), SETUP, *turns)
    store.close()
    with closing(sqlite3.connect(tmp_path / "tokentape.db")) as connection, connection:
        columns = "added_ids", "completion_ids", "logprobs", "messages", "reply", "sampling", "digest", "setup"
        columns += "sampled_from", "logprobs_of"
        (payload,) = connection.execute(f"SELECT sum(length({') + length('.join(columns)})) FROM turns").fetchone()
    assert (tmp_path / "tokentape.db").stat().st_size < 1.1 * payload


def test_log_stays_small_for_any_amount_of_writes(store: SqliteStore, tmp_path: Path) -> None:
    write(store, session("s"), SETUP)
    turns = make_chain("s", 300, tokens=2000)
    for turn in turns:
        write(store, turn)
    # The commit that reaches the limit is still written, and the limit is an estimate.
    assert CHECKPOINT_BYTES < (tmp_path / "tokentape.db-wal").stat().st_size < 1.5 * CHECKPOINT_BYTES
    assert (tmp_path / "tokentape.db").stat().st_size > 4 * CHECKPOINT_BYTES


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_database_with_a_second_name_is_not_written_to(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    SqliteStore.open(tmp_path / "first").close()
    other = tmp_path / "other"
    other.mkdir()
    link(tmp_path / "first" / "tokentape.db", other / "tokentape.db")
    with pytest.raises(StoreError, match="link"):
        SqliteStore.open(other)
    SqliteStore.open(other, read_only=True).close()


def test_closed_store_is_a_single_file_and_the_lock(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        write(store, session("s"))
    assert {path.name for path in tmp_path.iterdir()} == {"tokentape.db", "tokentape.lock"}


def test_a_second_writer_in_another_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    program = "import sys; from tokentape.store import SqliteStore\n"
    holding = program + "s = SqliteStore.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreLocked, match=rf"\b{holder.pid}\b"):
            SqliteStore.open(tmp_path)
        holder.kill()
    SqliteStore.open(tmp_path).close()


def test_a_second_writer_in_this_process_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    with pytest.raises(StoreLocked):
        SqliteStore.open(tmp_path)
    write(store, session("s"))


def test_reading_a_directory_without_a_database_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a data directory"):
        SqliteStore.open(tmp_path, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_not_a_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tokentape.db").write_bytes(b"not a database" * 1000)
    for read_only in (False, True):
        with pytest.raises(StoreCorrupt):
            SqliteStore.open(tmp_path, read_only=read_only)
    assert (tmp_path / "tokentape.db").read_bytes() == b"not a database" * 1000
    assert not [path for path in open_databases() if path.is_relative_to(tmp_path)]


def test_directory_that_cannot_be_created_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        SqliteStore.open(tmp_path / "file" / "data")


def test_data_directory_is_private_to_its_owner(tmp_path: Path) -> None:
    SqliteStore.open(tmp_path / "new" / "data").close()
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700


def test_loading_a_changed_turn_is_refused(tmp_path: Path) -> None:
    turn = make_turn("s", 0)
    with SqliteStore.open(tmp_path) as store:
        write(store, session("s"), SETUP, turn)
    path = tmp_path / "tokentape.db"
    before = path.read_bytes()
    assert before.count(turn.completion_ids.tobytes()) == 1
    other = turn.completion_ids.copy()
    other[2] += 1
    path.write_bytes(before.replace(turn.completion_ids.tobytes(), other.tobytes()))
    with SqliteStore.open(tmp_path, read_only=True) as store, pytest.raises(StoreCorrupt, match=r"turn 0 .*'s'"):
        store.load_session("s")


def test_synchronous_reaches_the_connection(tmp_path: Path) -> None:
    levels: list[int] = []

    def note(connection: Any, _: object) -> None:
        levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])

    event.listen(Pool, "connect", note)
    try:
        SqliteStore.open(tmp_path).close()
        full = levels[0]
        levels.clear()
        SqliteStore.open(tmp_path, synchronous="NORMAL").close()
        normal = levels[0]
    finally:
        event.remove(Pool, "connect", note)
    assert (full, normal) == (2, 1)


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("name", ["tokentape.db", "tokentape.db-wal", "tokentape.db-shm", "tokentape.lock"])
def test_removed_file_is_detected_before_the_next_acknowledgment(
    store: SqliteStore, tmp_path: Path, name: str, how: str
) -> None:
    write(store, session("before"))
    (tmp_path / name).unlink()
    if how == "replaced":
        (tmp_path / name).touch()
    for lost in ("a", "b"):
        with pytest.raises(StoreError, match=f"{name} was removed or replaced"):
            write(store, session(lost))
    with pytest.raises(StoreError):
        store.check()


def test_removing_the_log_loses_nothing(store: SqliteStore, tmp_path: Path) -> None:
    """Acknowledged turns are in the database once the loss is detected, and survive a later crash."""
    turns = make_chain("s", 3)
    write(store, session("s"), SETUP, *turns)
    (tmp_path / "tokentape.db-wal").unlink()
    with pytest.raises(StoreError, match="removed"):
        write(store, session("next"))
    copy = tmp_path / "as after a kill"
    copy.mkdir()
    shutil.copy(tmp_path / "tokentape.db", copy)
    with SqliteStore.open(copy) as copied:
        assert len(copied.load_session("s").turns) == 3


def test_refused_write_after_a_removed_file_is_not_recorded(store: SqliteStore, tmp_path: Path) -> None:
    write(store, session("before"))
    (tmp_path / "tokentape.lock").unlink()
    with pytest.raises(StoreError, match="removed"):
        write(store, session("refused"))
    assert [summary.info.session_id for summary in store.sessions()] == ["before"]


def test_damaged_log_is_refused_and_kept(killed: Path) -> None:  # noqa: F811
    log = damage_log(killed, 3)
    with pytest.raises(StoreCorrupt, match="acknowledged turns are missing"):
        SqliteStore.open(killed)
    assert (killed / "tokentape.db-wal").read_bytes() == log
    with closing(sqlite3.connect(killed / "tokentape.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with SqliteStore.open(killed) as store:
        assert len(store.load_session("s").turns) == 3


def test_other_users_can_not_read_a_record(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with SqliteStore.open(tmp_path) as store:
            write(store, session("s"))
            write_served_model(tmp_path, ServedModel("/m", "0", "0"))
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Drop root privileges, if running as root."""
    was = os.geteuid()
    os.seteuid(was or 65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_unwritable_directory_is_reported() -> None:
    # Other users can't enter pytest's folders.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        data = Path(folder) / "data"
        with SqliteStore.open(data) as store:
            write(store, session("s"))
        for path in data.iterdir():
            path.chmod(0o444)
        data.chmod(0o555)
        with as_somebody_else():
            for directory, read_only in ((data, True), (data, False), (data / "new", False)):
                with pytest.raises(StoreError, match=r"(is not writable|can't be used as a data directory)"):
                    SqliteStore.open(directory, read_only=read_only)
        data.chmod(0o755)
        with SqliteStore.open(data, read_only=True) as store:
            assert [session.info.session_id for session in store.sessions()] == ["s"]


def test_a_full_disk_is_not_ready(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match="disk is full"):
        store.check()


def test_texts_of_any_length_round_trip_and_short_ones_need_no_large_window(store: SqliteStore, tmp_path: Path) -> None:
    texts = ["x", "y" * 100, *("z" * (size + 4096) for size in (-60, -40, -30, 0, 5000))]
    turns: list[Turn] = []
    for text in texts:
        message = {"role": "user", "content": text}
        turns.append(make_turn("s", len(turns), turns[-1] if turns else None, messages=(message,)))
    write(store, session("s"), SETUP, *turns)
    assert [turn.messages[0]["content"] for turn in store.load_session("s").turns] == texts
    with closing(sqlite3.connect(tmp_path / "tokentape.db")) as connection, connection:
        stored = connection.execute("SELECT messages FROM turns ORDER BY seq").fetchall()
    # The high half of zlib's first byte is the size of the window: 4 for 4 KiB, 7 for 32 KiB.
    windows = [data[0] >> 4 for (data,) in stored]
    assert windows[0] == windows[1] == 4
    assert windows[-1] == 7


def test_damaged_turn_among_sessions_read_together_is_named(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        for name in ("a", "b", "c"):
            asyncio.run(store.write(SessionInfo(name, 1.0), SETUP, *make_chain(name, 3)))
    with closing(sqlite3.connect(tmp_path / "tokentape.db")) as connection, connection:
        connection.execute("UPDATE turns SET reply = x'00' WHERE session_id = 'b' AND seq = 1")
    with SqliteStore.open(tmp_path, read_only=True) as store, pytest.raises(StoreCorrupt, match=r"turn 1 of .*'b'"):
        list(store.iter_sessions(together=True))


def test_folder_in_place_of_the_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokentape.db").mkdir()
    with pytest.raises(StoreError, match=r"tokentape\.db can't be opened; expected a file"):
        SqliteStore.open(tmp_path)


def test_a_misspelled_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="expected FULL or NORMAL"):
        SqliteStore.open(tmp_path, synchronous="ful")  # type: ignore[arg-type]
