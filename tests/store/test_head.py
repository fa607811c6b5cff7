"""Tampering with a record is detected with an exported head, even if every digest is recomputed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import create_engine, select, update

from tests.records import SETUP, make_chain, make_setup, make_turn
from tests.store.conftest import Place
from tests.store.test_kept_record import written
from tokentape._session.chain import seal
from tokentape.errors import InvalidRequest
from tokentape.store import SqliteStore, Store, open_record, read_head, verify
from tokentape.store import _schema as schema
from tokentape.store._archive import SnapshotClient, archive_sessions
from tokentape.store._rows import decode, encode
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.types import Event, Media, Provenance, RecordedReply, Reward, SessionInfo, Turn, TurnColumn, TurnPayload

run = asyncio.run

IMAGE, SETTINGS = (
    Media(hashlib.sha256(data).hexdigest(), mime, data) for data, mime in ((b"png", "image/png"), (b"{}", "text/json"))
)


def with_image(session_id: str) -> Turn:
    part = {"type": "image", "sha256": IMAGE.sha256, "tokens": 2, "settings": SETTINGS.sha256}
    codes = np.array([Provenance.USER, Provenance.MEDIA, Provenance.MEDIA, Provenance.TEMPLATE], np.uint8)
    return make_turn(session_id, 0, messages=({"role": "user", "content": [part]},), added_provenance=codes)


def column(session_id: str, turn: int, name: str, first: float, at: float) -> TurnColumn:
    return TurnColumn(session_id, turn, name, np.arange(first, first + 4, dtype=np.float32), at)


def fill(store: Store) -> None:
    """Write three sessions with everything that a record may have."""
    chain = make_chain("a", 4)
    fork = make_turn("a", 4, chain[1], fork="edited_history")
    run(store.write(SessionInfo("a", 1.0, {"task": "sum", "seed": 1}, "team"), SETUP, *chain, fork))
    rewards = Reward("a", None, 0.5, 1.0), Reward("a", 1, 1.0, 2.0), Reward("a", None, 0.25, 3.0, leaf=4)
    events = Event("a", 1, "bridge_due", {}, 1.0), Event("a", 1, "bridge_checked", {"same": True}, 2.0)
    columns = column("a", 1, "advantages", 0, 1.0), column("a", 2, "advantages", 9, 2.0)
    rows = np.arange(24, dtype=np.int16).reshape(4, 6)
    payloads = TurnPayload("a", 1, "experts", -1, rows), TurnPayload("a", 2, "experts", 0, rows + 300)
    answers = [RecordedReply("a", f"reply-{n}", (n,), None, "ab" * 32, 1.0, ((((5, -0.5),),),)) for n in range(3)]
    run(store.write(*rewards, *events, *columns, *payloads, *answers))
    run(store.write(SessionInfo("b", 2.0), IMAGE, SETTINGS, with_image("b"), Reward("b", 0, -1.0, 1.0)))
    other = make_setup("other")
    run(store.write(SessionInfo("c", 3.0, {"task": "max"}), other, *make_chain("c", 2, setup=other.digest)))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intact")
    with SqliteStore.open(directory, synchronous="NORMAL") as store:
        fill(store)
    assert verify(directory, head_out=directory / "head.json").head is not None
    return directory


@pytest.fixture
def directory(intact: Path, tmp_path: Path) -> Path:
    shutil.copytree(intact, tmp_path / "data")
    return tmp_path / "data"


def execute(directory: Path, *statements: str) -> None:
    """Run SQL with the database's foreign keys disabled."""
    with closing(sqlite3.connect(directory / "tokentape.db", isolation_level=None)) as connection:
        connection.create_function("crc32", 1, zlib.crc32)
        connection.create_function("flipped", 1, lambda data: bytes([*data[:-1], data[-1] ^ 1]))
        connection.create_function("inflated", 1, lambda data: zlib.decompress(data).decode())
        connection.create_function("deflated", 1, lambda data: zlib.compress(data.encode()))
        for statement in statements:
            connection.execute(statement)


def compute_digests_anew(directory: Path) -> None:
    """Recompute checksums, setups and hash chains, as an attacker with this source code does."""
    execute(directory, *(f"UPDATE {table} SET crc32 = crc32(data)" for table in ("token_columns", "token_payloads")))
    engine = create_engine(f"sqlite:///{directory / 'tokentape.db'}")
    with engine.begin() as connection:
        rows = connection.execute(select(schema.setups)).all()
        for row in rows:
            values = row._asdict() | {"digest": ""}
            made = replace(make_setup(), tools=tuple(json.loads(values["tools"])), date=row.date)
            made = replace(made, fingerprint=row.fingerprint, template_kwargs=json.loads(row.template_kwargs))
            if made.digest != row.digest:
                connection.execute(schema.setups.insert().values(encode(made)[1]))
                old = schema.turns.c.setup == row.digest
                connection.execute(update(schema.turns).where(old).values(setup=made.digest))
        digests: dict[tuple[str, int | None], str] = {}
        for row in connection.execute(select(schema.turns).order_by("session_id", "seq")).all():
            turn = decode(schema.turns, row)
            sealed = seal(turn, digests.get((turn.session_id, turn.parent)))
            digests[turn.session_id, turn.seq] = sealed.digest
            own = schema.turns.c.session_id == turn.session_id, schema.turns.c.seq == turn.seq
            connection.execute(update(schema.turns).where(*own).values(digest=sealed.digest))
    engine.dispose()


def findings(directory: Path, **options: bool) -> list[str]:
    return [str(finding) for finding in verify(directory, against=directory / "head.json", **options).findings]


TURN_2 = "WHERE session_id = 'a' AND seq = 2"
REWARDS = "UPDATE rewards SET"
CHANGED, DELETED = "was changed since the head", "was deleted or can't be read since the head"
MOVED, INSERTED = "was moved since the head", "was inserted before others since the head"
TURN_COLUMNS = (
    "parent, setup, created_at, finish_reason, stop, fork, engine, weight_version, sampling, added_ids,"
    " added_provenance, completion_ids, logprobs, messages, reply"
)


def renamed(old: str, new: str) -> list[str]:
    tables = "sessions", "turns", "rewards", "events", "token_columns", "token_payloads", "turn_media", "answers"
    return [f"UPDATE {table} SET session_id = '{new}' WHERE session_id = '{old}'" for table in tables]


TRIAL = {
    "a logprob's byte": (f"UPDATE turns SET logprobs = flipped(logprobs) {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "a sampled id": (f"UPDATE turns SET completion_ids = flipped(completion_ids) {TURN_2}", f"turn 2: turn {CHANGED}"),
    "the reply": (
        f"UPDATE turns SET reply = deflated(replace(inflated(reply), 'answer', 'other')) {TURN_2}",
        f"a turn 2: turn {CHANGED}",
    ),
    "provenance": (
        f"UPDATE turns SET added_provenance = x'{zlib.compress(bytes([Provenance.SYSTEM] * 4)).hex()}' {TURN_2}",
        f"a turn 2: turn {CHANGED}",
    ),
    "the engine": (f"UPDATE turns SET engine = 'other' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "sampling": (f"""UPDATE turns SET sampling = '{{"seed":9}}' {TURN_2}""", f"a turn 2: turn {CHANGED}"),
    "the tools": ("""UPDATE setups SET tools = '[]' WHERE fingerprint = 'other'""", f"c turn 0: turn {CHANGED}"),
    "the last turn deleted": ("DELETE FROM turns WHERE session_id = 'c' AND seq = 1", f"c turn 1: turn {DELETED}"),
    "a session deleted": (
        [f"DELETE FROM {table} WHERE session_id = 'b'" for table in ("rewards", "turn_media", "turns", "sessions")],
        f"session b: the session {DELETED}",
    ),
    "a reward changed": (f"{REWARDS} value = 0.75 WHERE position = 2", f"a turn 1: reward of the turn {CHANGED}"),
    "a reward deleted": ("DELETE FROM rewards WHERE position = 1", f"session a: reward of the session {DELETED}"),
    "metadata changed": (
        "UPDATE sessions SET metadata = replace(metadata, 'sum', 'max') WHERE session_id = 'a'",
        f"session a: metadata 'task' {CHANGED}",
    ),
}

MORE = {
    "values of two rewards swapped": (
        f"{REWARDS} value = 1.5 - value WHERE position IN (1, 2)",
        f"session a: reward of the session {CHANGED}",
    ),
    "rewards in another order": (
        [f"{REWARDS} position = {to} WHERE position = {at}" for at, to in ((1, 99), (2, 1), (99, 2))],
        MOVED,
    ),
    "the last reward deleted": ("DELETE FROM rewards WHERE position = 3", f"a turn 4: reward of the branch {DELETED}"),
    "a reward for another turn": (f"{REWARDS} turn = 2 WHERE position = 2", f"a turn 1: reward of the turn {DELETED}"),
    "a reward of another scope": (
        f"{REWARDS} scope = 'trajectory' WHERE position = 2",
        f"reward of the turn {DELETED}",
    ),
    "a reward inserted": (
        "INSERT INTO rewards VALUES (0, 'a', 3, 9.0, 1.0, 'turn')",
        f"a turn 3: reward of the turn {INSERTED}",
    ),
    "a column's bytes": (
        "UPDATE token_columns SET data = flipped(data) WHERE turn = 1",
        f"a turn 1: column advantages @1.0 {CHANGED}",
    ),
    "the newest column's bytes": (
        "UPDATE token_columns SET data = flipped(data) WHERE turn = 2",
        f"a turn 2: column advantages @2.0 {CHANGED}",
    ),
    "columns swapped": (
        "UPDATE token_columns SET turn = 3 - turn",
        f"a turn 2: column advantages @2.0 {DELETED}",
    ),
    "a column deleted": ("DELETE FROM token_columns WHERE turn = 2", f"a turn 2: column advantages @2.0 {DELETED}"),
    "a payload's bytes": (
        "UPDATE token_payloads SET data = flipped(data) WHERE turn = 2",
        f"a turn 2: payload experts {CHANGED}",
    ),
    "a payload deleted": ("DELETE FROM token_payloads WHERE turn = 1", f"a turn 1: payload experts {DELETED}"),
    "a payload moved by a token": ("UPDATE token_payloads SET start = 1 WHERE turn = 2", f"payload experts {CHANGED}"),
    "a metadata key added": (
        """UPDATE sessions SET metadata = '{"tag":1,"task":"max"}' WHERE session_id = 'c'""",
        f"session c: metadata 'tag' {INSERTED}",
    ),
    "a metadata key deleted": (
        "UPDATE sessions SET metadata = '{}' WHERE session_id = 'c'",
        f"metadata 'task' {DELETED}",
    ),
    "the owner": ("UPDATE sessions SET owner = 'me' WHERE session_id = 'a'", f"session a: owner {CHANGED}"),
    "a session's time": ("UPDATE sessions SET created_at = 9 WHERE session_id = 'a'", f"creation time {CHANGED}"),
    "an image's type": (
        "UPDATE media SET mime = 'x' WHERE mime = 'image/png'",
        f"b turn 0: media {IMAGE.sha256} {CHANGED}",
    ),
    "a turn inserted": (
        [
            "UPDATE turns SET seq = 9, parent = 8 WHERE session_id = 'c' AND seq = 1",
            f"INSERT INTO turns (session_id, seq, digest, {TURN_COLUMNS}) SELECT session_id, 1, '', 0,"
            f" {TURN_COLUMNS.removeprefix('parent, ')} FROM turns WHERE session_id = 'c' AND seq = 0",
            "UPDATE turns SET seq = 2, parent = 1 WHERE session_id = 'c' AND seq = 9",
        ],
        f"c turn 1: turn {CHANGED}",
    ),
    "a session inserted": (
        "INSERT INTO sessions VALUES (0, 'new', 0.5, '{}', '')",
        f"session new: the session {INSERTED}",
    ),
    "sessions in another order": (
        [f"UPDATE sessions SET position = {to} WHERE position = {at}" for at, to in ((1, 99), (2, 1), (99, 2))],
        f"the session {MOVED}",
    ),
    "a session renamed": (renamed("c", "d"), f"session c: the session {DELETED}"),
    "the weight version": (f"UPDATE turns SET weight_version = 'step-2' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "the weights of a span": (f"""UPDATE turns SET weight_changes = '[[2,"step-2"]]' {TURN_2}""", f"turn {CHANGED}"),
    "finish_reason": (f"UPDATE turns SET finish_reason = 'length' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "a fork's cause": ("UPDATE turns SET fork = NULL WHERE seq = 4", f"a turn 4: turn {CHANGED}"),
    "logprobs_of": (f"UPDATE turns SET logprobs_of = '[false,0.5,false,false]' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "sampled_from": (f"UPDATE turns SET sampled_from = NULL {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "an adapter": (f"UPDATE turns SET adapter = 'x@1' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "a resumption": (
        f"""UPDATE turns SET resumes = '[{{"start":1,"cause":"paused","engine":null}}]' {TURN_2}""",
        f"a turn 2: turn {CHANGED}",
    ),
    "the stop token": (f"UPDATE turns SET stop = '8' {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "a turn's parent": (f"UPDATE turns SET parent = 0 {TURN_2}", f"a turn 2: turn {CHANGED}"),
    "the caller's messages": (
        f"UPDATE turns SET messages = deflated(replace(inflated(messages), 'question', 'q')) {TURN_2}",
        f"a turn 2: turn {CHANGED}",
    ),
    "a branch deleted": ("DELETE FROM turns WHERE session_id = 'a' AND seq = 4", f"a turn 4: turn {DELETED}"),
    "a check of a bridge deleted": (
        "DELETE FROM events WHERE kind = 'bridge_checked'",
        f"event bridge_checked {DELETED}",
    ),
    "the outcome of a check": (
        """UPDATE events SET body = '{"same":1}' WHERE body != '{}'""",
        f"bridge_checked {CHANGED}",
    ),
    "an answer deleted": ("DELETE FROM answers WHERE first_turn = 1", f"a turn 1: answer to a retry {DELETED}"),
    "the alternatives of a token": ("UPDATE answers SET top_logprobs = NULL", f"a turn 0: answer to a retry {CHANGED}"),
    "kwargs of the template": (
        """UPDATE setups SET template_kwargs = '{"enable_thinking":false}' WHERE fingerprint = 'other'""",
        f"c turn 0: turn {CHANGED}",
    ),
    "the date that the template saw": (
        "UPDATE setups SET date = '2031-01-01' WHERE fingerprint = 'other'",
        f"c turn 0: turn {CHANGED}",
    ),
    "the tokenizer's fingerprint": (
        "UPDATE setups SET fingerprint = 'another' WHERE fingerprint = 'other'",
        f"c turn 0: turn {CHANGED}",
    ),
    "a number that became true": (
        "UPDATE sessions SET metadata = replace(metadata, '1', 'true') WHERE session_id = 'a'",
        f"session a: metadata 'seed' {CHANGED}",
    ),
    "sessions that exchange their ids": (
        [*renamed("a", "z"), *renamed("c", "a"), *renamed("z", "c")],
        f"session c: metadata 'task' {CHANGED}",
    ),
    "the time of an event": (
        "UPDATE events SET created_at = 5 WHERE kind = 'bridge_checked'",
        f"a turn 1: event bridge_checked {CHANGED}",
    ),
    "an event of another turn": (
        "UPDATE events SET turn = 2 WHERE kind = 'bridge_checked'",
        f"a turn 1: event bridge_checked {DELETED}",
    ),
    "events in another order": (
        [f"UPDATE events SET position = {to} WHERE position = {at}" for at, to in ((1, 99), (2, 1), (99, 2))],
        f"a turn 1: event bridge_due {MOVED}",
    ),
    "a payload of another name": (
        "UPDATE token_payloads SET name = 'routers' WHERE turn = 2",
        f"a turn 2: payload experts {DELETED}",
    ),
    "a payload of another shape": (
        "UPDATE token_payloads SET shape = '[4,3,2]' WHERE turn = 2",
        f"a turn 2: payload experts {CHANGED}",
    ),
    "a column of another name": (
        "UPDATE token_columns SET name = 'adv' WHERE turn = 2",
        f"a turn 2: column advantages @2.0 {DELETED}",
    ),
    "a column that became older": (
        "UPDATE token_columns SET created_at = 0.5 WHERE turn = 2",
        f"a turn 2: column advantages @2.0 {DELETED}",
    ),
    "the time of a reward": (f"{REWARDS} created_at = 4 WHERE position = 2", f"a turn 1: reward of the turn {CHANGED}"),
    "the reward of another branch": (
        f"{REWARDS} turn = 3 WHERE position = 3",
        f"a turn 4: reward of the branch {DELETED}",
    ),
    "a reward of another session": (
        f"{REWARDS} session_id = 'c' WHERE position = 1",
        f"session a: reward of the session {DELETED}",
    ),
    "the request of an answer": (
        "UPDATE answers SET body_digest = flipped(body_digest) WHERE first_turn = 1",
        f"a turn 1: answer to a retry {CHANGED}",
    ),
    "a turn that another session has": (
        [
            "UPDATE turns SET session_id = 'c', seq = 2, parent = 1 WHERE session_id = 'a' AND seq = 4",
            "DELETE FROM rewards WHERE position = 3",
        ],
        f"a turn 4: turn {DELETED}",
    ),
    "the time of a turn": (
        "UPDATE turns SET created_at = 99 WHERE session_id = 'c' AND seq = 1",
        f"c turn 1: turn {CHANGED}",
    ),
}
TAMPERINGS = TRIAL | MORE


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_with_valid_digests_is_detected_with_the_head(directory: Path, name: str) -> None:
    statements, expected = TAMPERINGS[name]
    execute(directory, *([statements] if isinstance(statements, str) else statements))
    compute_digests_anew(directory)
    if name == "a branch deleted":
        execute(directory, "DELETE FROM rewards WHERE turn = 4")
    assert verify(directory).findings == (), "the record alone shows nothing"
    assert any(expected in finding for finding in findings(directory)), findings(directory)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TRIAL)
def test_tampering_without_new_digests_is_also_detected(directory: Path, name: str) -> None:
    statements, _ = TRIAL[name]
    execute(directory, *([statements] if isinstance(statements, str) else statements))
    assert findings(directory)


@pytest.mark.parametrize("tables", [("media",), ("turn_media",), ("media", "turn_media")])
def test_deleted_image_is_detected(directory: Path, tables: tuple[str, ...]) -> None:
    execute(directory, *(f"DELETE FROM {table} WHERE sha256 = '{IMAGE.sha256}'" for table in tables))
    assert f"session b turn 0: media {IMAGE.sha256} {DELETED}" in findings(directory)


ALLOWED = "token_columns SET created_at"
"""A column newer than its head looks like a client's new values."""


@pytest.mark.parametrize("every_row", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_change_of_any_field_and_loss_of_any_row_are_detected(directory: Path, tmp_path: Path, every_row: bool) -> None:
    tables = "sessions", "setups", "turns", "rewards", "token_columns", "token_payloads", "events", "answers"
    with closing(sqlite3.connect(directory / "tokentape.db")) as connection:
        changes = []
        for table in (*tables, "media", "turn_media"):
            columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
            rowids = [rowid for (rowid,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
            for rowid in rowids if every_row else rowids[-1:]:
                changes.append(f"DELETE FROM {table} WHERE rowid = {rowid}")
                for name in columns:
                    changed = f"CASE typeof({name}) WHEN 'blob' THEN flipped({name}) WHEN 'null' THEN 7 WHEN 'text'"
                    changed += f" THEN {name} || 'x' ELSE {name} + 1 END"
                    if name != "position" and rowid in (rowids[0], rowids[-1]):
                        changes.append(f"UPDATE {table} SET {name} = {changed} WHERE rowid = {rowid}")
    made = len(changes)
    if not every_row:
        # Every third statement, and the allowed one.
        changes = [
            statement
            for at, statement in enumerate(changes)
            if at % 3 == 0 or statement.startswith(f"UPDATE {ALLOWED}")
        ]
    head, missed = read_head(directory / "head.json"), []
    for change in changes:
        shutil.copy(directory / "tokentape.db", tmp_path)
        try:
            execute(tmp_path, change)
        except sqlite3.IntegrityError:
            continue  # the database itself refuses a second row with these keys
        if verify(tmp_path, against=head).ok:
            missed.append(change)
            assert not verify(tmp_path, against=head, nothing_added=True).ok
    assert made > (150 if every_row else 80)
    assert [statement.split(" = ")[0] for statement in missed] == [f"UPDATE {ALLOWED}"]


def more(store: Store, snapshots: bool) -> None:
    """Continue recording: every addition of a healthy record after a head."""
    turns = make_chain("a", 4)
    if snapshots:
        run(Snapshots(store).take(Selection(session_ids=("a",)), "", None))
    run(store.write(make_turn("a", 5, turns[3]), Reward("a", None, 0.75, 9.0), Reward("a", 5, 2.0, 9.0)))
    run(store.write(Event("a", 5, "bridge_due", {}, 9.0), column("a", 2, "advantages", 1, 9.0)))
    run(store.write(column("a", 1, "values", 1, 9.0), TurnPayload("a", 5, "experts", 0, np.ones((2, 6), np.int16))))
    run(store.write(RecordedReply("a", "new", (5,), None, "ab" * 32, 9.0), Reward("b", 0, -1.0, 1.0)))
    run(store.write(column("a", 2, "advantages", 2, 10.0)))
    run(store.write(SessionInfo("d", 0.5, {"task": "new"}), IMAGE, SETTINGS, with_image("d")))
    run(store.write(SessionInfo("0", 4.0)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("snapshots", [False, True])
def test_grown_record_passes_and_additions_are_counted(place: Place, tmp_path: Path, snapshots: bool) -> None:
    with place.open() as store:
        fill(store)
        digest = verify(place.location, head_out=tmp_path / "head.json").head
        head = read_head(tmp_path / "head.json")
        assert digest == head.digest
        assert verify(place.location, against=head, nothing_added=True).ok
        more(store, snapshots)
    report = verify(place.location, against=head)
    assert report.findings == ()
    expected = {"sessions": 2, "turns": 1, "rewards": 3, "events": 1, "columns": 2}
    assert report.added == {**expected, "payloads": 1, "answers": 1}
    problems = {str(finding) for finding in verify(place.location, against=head, nothing_added=True).findings}
    assert len(problems) == 9
    assert "session d: the session was added since the head" in problems
    assert "session b: rewards were added since the head: 1" in problems
    assert verify(place.location, head_out=tmp_path / "newer.json").ok
    assert verify(place.location, against=read_head(tmp_path / "newer.json"), nothing_added=True).ok


def test_digest_of_a_record_is_stable(place: Place, tmp_path: Path) -> None:
    with place.open() as store:
        fill(store)
    report = verify(place.location, head_out=tmp_path / "head.json")
    assert report.head == "702afc6a717b4440472131158d10c56aaf949c70fedf9a481740d1b55403822b"


def test_column_values_reset_to_older_ones_are_detected(tmp_path: Path) -> None:
    record = tmp_path / "data"
    with open_record(record) as store:
        fill(store)
        more(store, snapshots=True)
    verify(record, head_out=record / "head.json")
    execute(record, "DELETE FROM token_columns WHERE created_at = 10")
    assert findings(record) == [f"session a turn 2: column advantages @10.0 {DELETED}"]


def test_archive_is_compared_with_the_record_s_head_and_its_head(tmp_path: Path) -> None:
    record, archive = tmp_path / "data", str(tmp_path / "archive")
    with open_record(record) as store:
        fill(store)
        more(store, snapshots=True)
        verify(record, head_out=tmp_path / "record.json")
        archive_sessions(store, SnapshotClient(store), archive, idle_seconds=0, delete=False)
    assert verify(archive, against=read_head(tmp_path / "record.json"), nothing_added=True).findings == ()
    assert verify(archive, head_out=tmp_path / "archive.json").ok
    assert verify(archive, against=read_head(tmp_path / "archive.json"), nothing_added=True).ok


HEAD_BEFORE = "5b1914fa0d5654a52e9a6247a511605153fca2abf1130ef1aaac9716673a4c3d"
"""The digest of the kept record by an earlier version."""


def test_an_old_record_has_the_same_head_after_its_migration(tmp_path: Path) -> None:
    (tmp_path / "tokentape.db").write_bytes(written())
    before = verify(tmp_path, head_out=tmp_path / "before.json")
    assert before.head == HEAD_BEFORE
    SqliteStore.open(tmp_path).close()
    assert verify(tmp_path, head_out=tmp_path / "head.json").head == HEAD_BEFORE


def test_a_record_with_findings_gets_no_head(directory: Path) -> None:
    execute(directory, "UPDATE turns SET engine = 'other'")
    report = verify(directory, head_out=directory / "new.json")
    assert report.head is None
    assert not report.ok
    assert not (directory / "new.json").exists()


def test_first_changed_turn_is_distinguished_from_later_ones(directory: Path) -> None:
    execute(directory, f"UPDATE turns SET engine = 'other' {TURN_2}")
    compute_digests_anew(directory)
    assert findings(directory) == [
        f"session a turn 2: turn {CHANGED}",
        f"session a turn 3: turn {CHANGED}, or only a turn before it",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("[0,", "[1,", 1),
        lambda text: text.replace("tokentape head 1", "tokentape head 2"),
        lambda text: text.replace('"session_id":"a"', '"session_id":"x"'),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"created_at":', '"created_at":1e400,"x":'),
        lambda text: "[]",
        lambda text: "",
        lambda text: "{}",
    ],
)
def test_changed_head_is_refused(directory: Path, change: Callable[[str], str]) -> None:
    path = directory / "head.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidRequest, match=r"head\.json"):
        read_head(path)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Write a private key and its public key, as `openssl genpkey` does."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub.pem"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_signed_head_is_verified_with_its_key(directory: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    signed = tmp_path / "signed.json"
    verify(directory, head_out=signed, sign=private)
    assert verify(directory, against=read_head(signed, public)).ok
    assert read_head(signed).digest == read_head(directory / "head.json").digest


def test_a_head_of_a_changed_record_does_not_have_the_signature(
    directory: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = keys
    signed, forged = tmp_path / "signed.json", tmp_path / "forged.json"
    verify(directory, head_out=signed, sign=private)
    execute(directory, "UPDATE rewards SET value = 1")
    verify(directory, head_out=forged)
    with pytest.raises(InvalidRequest, match="is not signed"):
        read_head(forged, public)
    stolen = {**json.loads(forged.read_text()), "signature": json.loads(signed.read_text())["signature"]}
    for contents in (stolen, {**stolen, "created_at": json.loads(signed.read_text())["created_at"]}):
        forged.write_text(json.dumps(contents))
        assert verify(directory, against=read_head(forged)).ok, "unsigned, it proves nothing"
        with pytest.raises(InvalidRequest, match="was not signed with the key"):
            read_head(forged, public)


def test_a_key_that_can_not_sign_is_refused_before_the_record_is_read(
    directory: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="Ed25519 private key"):
        verify(directory, head_out=tmp_path / "head.json", sign=keys[1])
    assert not (tmp_path / "head.json").exists()
