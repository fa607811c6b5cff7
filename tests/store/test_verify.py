from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.records import SETUP, bits, make_chain, make_turn
from tests.searching import examples
from tests.store.conftest import counted
from tokentape.errors import StoreCorrupt, StoreError
from tokentape.store import SqliteStore
from tokentape.store._head import read_head
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.store._verify import VerifyFinding, verify
from tokentape.types import Reward, SessionInfo, TurnColumn, TurnPayload

CHAINS = {"a": make_chain("a", 4), "b": make_chain("b", 3, tokens=2000)}
FORK = make_turn("a", 4, CHAINS["a"][1], fork="history edited")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intact")
    with SqliteStore.open(directory, synchronous="NORMAL") as store:
        for name, chain in CHAINS.items():
            asyncio.run(store.write(SessionInfo(name, 1.0), SETUP, *chain, Reward(name, 1, 0.5, 1.0)))
        asyncio.run(store.write(FORK))
        values, rows = np.arange(4, dtype=np.float32), np.arange(24, dtype=np.uint8).reshape(4, 6)
        asyncio.run(
            store.write(TurnColumn("a", 1, "advantages", values, 1.0), TurnPayload("a", 1, "experts", -1, rows))
        )
        taken = asyncio.run(Snapshots(store).take(Selection(session_ids=("a",)), "", None))
        assert taken.digest is not None
    return directory


@pytest.fixture
def directory(intact: Path, tmp_path: Path) -> Path:
    shutil.copy(intact / "tokentape.db", tmp_path)
    return tmp_path


def execute(directory: Path, *statements: str, parameters: tuple[object, ...] = ()) -> None:
    connection = sqlite3.connect(directory / "tokentape.db", isolation_level=None)
    for statement in statements:
        connection.execute(statement, parameters)
    connection.close()


def where(findings: tuple[VerifyFinding, ...]) -> list[tuple[str | None, int | None]]:
    return [(finding.session_id, finding.turn) for finding in findings]


def test_an_intact_record_has_no_findings_and_is_counted(directory: Path) -> None:
    report = verify(directory)
    assert report.ok
    assert report.findings == ()
    assert (report.sessions, report.turns) == (2, 8)
    assert report.tokens == 5 * 8 + 3 * 4000


def test_empty_record_is_valid(tmp_path: Path) -> None:
    SqliteStore.open(tmp_path).close()
    assert verify(tmp_path).ok


def test_verification_works_beside_a_writer_and_sees_its_log(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, make_turn("s", 0)))
        report = verify(tmp_path)
        assert report.ok
        assert report.turns == 1


def test_a_directory_without_a_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a data directory"):
        verify(tmp_path)


def test_verification_changes_nothing(directory: Path) -> None:
    execute(directory, "UPDATE turns SET engine = 'other'")
    before = (directory / "tokentape.db").read_bytes()
    verify(directory)
    assert (directory / "tokentape.db").read_bytes() == before


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "change",
    [
        "engine = 'other'",
        "weight_version = 'other'",
        "created_at = created_at + 1",
        "finish_reason = 'length'",
        "stop = '8'",
        "stop = 'not json'",
        "fork = 'made up'",
        "sampling = '{}'",
        "sampling = zeroblob(3)",
        "reply = zeroblob(8)",
        "reply = 17",
        "messages = (SELECT reply FROM turns WHERE session_id = 'b' AND seq = 0)",
        "added_ids = zeroblob(16)",
        "added_ids = zeroblob(15)",
        "added_provenance = 'text'",
        "completion_ids = zeroblob(16)",
        "logprobs = zeroblob(16)",
        "logprobs = 1e308",
        "digest = setup",
        "parent = NULL",
        "parent = 0",
        "parent = 'text'",
        "created_at = 'text'",
    ],
)
def test_changed_field_is_named(directory: Path, change: str) -> None:
    execute(directory, f"UPDATE turns SET {change} WHERE session_id = 'a' AND seq = 2")
    findings = verify(directory).findings
    assert ("a", 2) in where(findings)
    assert ("b", 0) not in where(findings)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_json_lacks_is_not_taken_for_null(tmp_path: Path, number: str) -> None:
    with SqliteStore.open(tmp_path, synchronous="NORMAL") as store:
        turn = make_turn("s", 0, messages=({"role": "user", "content": None},))
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn))
    messages = zlib.compress(f'[{{"role":"user","content":{number}}}]'.encode())
    execute(tmp_path, "UPDATE turns SET messages = ?", parameters=(messages,))
    assert where(verify(tmp_path).findings) == [("s", 0)]


def test_many_short_sessions_need_few_statements(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(100)]
    with SqliteStore.open(tmp_path, synchronous="NORMAL") as store:
        chains = [make_chain(name, 2) for name in names]
        for name, chain in zip(names, chains, strict=True):
            asyncio.run(store.write(SessionInfo(name, 1.0), SETUP, *chain, Reward(name, 1, 0.5, 1.0)))
    statements: list[str] = []
    with counted(statements):
        report = verify(tmp_path)
    assert (report.sessions, report.turns, report.findings) == (100, 200, ())
    assert len(statements) < len(names)
    # A damaged session is checked separately, and its turns are counted once.
    execute(tmp_path, "UPDATE turns SET reply = 17 WHERE session_id = 's50' AND seq = 1")
    report = verify(tmp_path)
    assert (report.sessions, report.turns, where(report.findings)) == (100, 199, [("s50", 1)])


def test_a_changed_digest_breaks_the_children_too(directory: Path) -> None:
    execute(directory, "UPDATE turns SET digest = setup WHERE session_id = 'a' AND seq = 1")
    assert where(verify(directory).findings) == [("a", 1), ("a", 2), ("a", 4)]


def test_missing_turn_is_reported_with_its_children(directory: Path) -> None:
    execute(directory, "DELETE FROM turns WHERE session_id = 'a' AND seq = 1")
    problems = {(finding.turn, finding.problem.split(",")[0]) for finding in verify(directory).findings}
    assert (2, "the turn before it is 0") in problems
    assert {turn for turn, problem in problems if problem == "its parent"} == {2, 4}


def test_missing_session_row_is_reported(directory: Path) -> None:
    execute(directory, "DELETE FROM sessions WHERE session_id = 'a'")
    assert ("a", None) in where(verify(directory).findings)


def test_missing_setup_is_reported_for_each_turn(directory: Path) -> None:
    execute(directory, "DELETE FROM setups")
    assert {("a", 0), ("b", 2)} <= set(where(verify(directory).findings))


def test_changed_setup_is_reported(directory: Path) -> None:
    execute(directory, "UPDATE setups SET date = '2026-01-02'")
    assert ("a", 0) in where(verify(directory).findings)


def test_unreadable_session_metadata_and_rewards_are_reported(directory: Path) -> None:
    execute(directory, "UPDATE sessions SET metadata = '[' WHERE session_id = 'a'")
    execute(directory, "UPDATE rewards SET value = 'text' WHERE session_id = 'b'")
    assert where(verify(directory).findings) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "change",
    [
        "token_columns SET data = zeroblob(12)",
        "token_columns SET data = zeroblob(15)",
        "token_columns SET data = x'000000000000c07f0000000000000000'",
        "token_payloads SET data = zeroblob(24)",
        "token_payloads SET packed = '|i1', data = zeroblob(23)",
        "token_payloads SET dtype = '|O'",
        "token_payloads SET shape = '[2,6]'",
        "token_payloads SET start = 5",
        "rewards SET scope = 'session'",
        "rewards SET scope = 'other'",
    ],
)
def test_damage_of_client_and_engine_texts_is_reported(directory: Path, change: str) -> None:
    execute(directory, f"UPDATE {change} WHERE session_id = 'a'")
    assert {session_id for session_id, _ in where(verify(directory).findings)} == {"a"}


@pytest.mark.parametrize("value", ["9e999", "'nan'", "'-inf'"])
def test_infinite_reward_is_reported_and_never_read(directory: Path, value: str) -> None:
    execute(directory, f"UPDATE rewards SET value = {value} WHERE session_id = 'a'")
    assert where(verify(directory).findings) == [("a", None)]
    with SqliteStore.open(directory, read_only=True) as store, pytest.raises(StoreCorrupt, match="a reward"):
        store.load_session("a")


@pytest.mark.parametrize("text", ["[]", '[["task", 7]]', "null"])
@pytest.mark.parametrize("table", ["sessions SET metadata", "events SET body"])
def test_list_in_place_of_an_object_is_reported(directory: Path, table: str, text: str) -> None:
    execute(
        directory,
        "INSERT INTO events (session_id, turn, kind, body, created_at) VALUES ('a', 1, 'unread', '{}', 1.0)",
        f"UPDATE {table} = '{text}' WHERE session_id = 'a'",
    )
    assert where(verify(directory).findings) == [("a", None)]


@pytest.mark.parametrize(("choices", "expected"), [(1, []), (2, [("b", None)]), (0, [("b", None)])])
def test_answer_with_missing_turns_is_reported(directory: Path, choices: int, expected: list[tuple[str, None]]) -> None:
    execute(
        directory,
        "INSERT INTO answers (session_id, first_turn, choices, reply_id, body_digest, created_at)"
        f" VALUES ('b', 2, {choices}, 'reply', x'00', 1.0)",
    )
    assert where(verify(directory).findings) == expected


def test_unreadable_snapshot_is_reported(directory: Path) -> None:
    execute(directory, "UPDATE snapshots SET contents = zeroblob(4)")
    assert where(verify(directory).findings) == [(None, None)]


def test_session_missing_from_a_held_snapshot_is_reported(directory: Path) -> None:
    execute(directory, "UPDATE snapshot_sessions SET turns = 99")
    assert where(verify(directory).findings) == [("a", None)]
    execute(directory, "UPDATE snapshots SET state = 'released'")
    assert verify(directory).ok


def test_dropped_session_that_exists_is_reported(directory: Path) -> None:
    execute(directory, "INSERT INTO tombstones VALUES ('b', '', 1, 1.0)")
    assert where(verify(directory).findings) == [("b", None)]


def test_turn_that_breaks_a_rule_is_reported(directory: Path) -> None:
    columns = "session_id, parent, setup, created_at, finish_reason, stop, fork, engine, weight_version, sampling"
    execute(
        directory,
        f"INSERT INTO turns ({columns}, seq, digest, added_ids, added_provenance, completion_ids, logprobs, messages,"
        f" reply) SELECT {columns}, 3, '', added_ids, added_provenance, x'', logprobs, messages, reply FROM turns"
        " WHERE session_id = 'b' AND seq = 2",
    )
    problems = [finding.problem for finding in verify(directory).findings if finding.turn == 3]
    assert any("no sampled ids" in problem for problem in problems)
    assert any("logprobs" in problem for problem in problems)


def test_flipped_bit_in_a_blob_is_named(directory: Path) -> None:
    path = directory / "tokentape.db"
    data = bytearray(path.read_bytes())
    ids = CHAINS["b"][1].completion_ids.tobytes()[:400]
    assert data.count(ids) == 1
    data[data.index(ids) + 100] ^= 1
    path.write_bytes(data)
    assert where(verify(directory).findings) == [("b", 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "CREATE TRIGGER t AFTER INSERT ON rewards BEGIN UPDATE rewards SET value = 0; END",
            "the trigger t changes what is written to the table rewards",
        ),
        ("DROP INDEX token_columns_of_turn", "the index token_columns_of_turn is missing"),
        (
            "DROP INDEX events_of_turn; CREATE INDEX events_of_turn ON events (turn)",
            "the index events_of_turn is missing or covers different columns",
        ),
        (
            "ALTER TABLE rewards RENAME TO old; CREATE VIEW rewards AS SELECT * FROM old",
            "the table rewards is missing or is not a table",
        ),
        ("ALTER TABLE rewards DROP COLUMN scope", "the column scope of the table rewards is missing"),
        ("CREATE UNIQUE INDEX extra ON media (mime)", "the table media has the unique index extra"),
        (
            "CREATE TABLE new AS SELECT * FROM snapshot_sessions; DROP TABLE snapshot_sessions; "
            "ALTER TABLE new RENAME TO snapshot_sessions",
            "of the table snapshot_sessions have no foreign key",
        ),
        ("DROP TABLE gateways", "the table gateways is missing"),
        ("DROP TABLE media; CREATE TABLE media (sha256 TEXT NOT NULL, mime INT NOT NULL, data BLOB)", "column mime of"),
        (
            "DROP TABLE media; CREATE TABLE media (sha256 TEXT NOT NULL, mime TEXT, data BLOB)",
            "a different primary key",
        ),
    ],
)
def test_different_schema_is_reported(directory: Path, tmp_path: Path, change: str, message: str) -> None:
    verify(directory, head_out=tmp_path / "head.json")
    connection = sqlite3.connect(directory / "tokentape.db")
    connection.executescript(f"PRAGMA legacy_alter_table = ON; {change}")
    connection.close()
    for report in (verify(directory), verify(directory, against=read_head(tmp_path / "head.json"), nothing_added=True)):
        assert message in "\n".join(map(str, report.findings))


@pytest.mark.parametrize("version", [1, 3, 99])
def test_older_or_newer_schema_ends_verification(directory: Path, tmp_path: Path, version: int) -> None:
    verify(directory, head_out=tmp_path / "head.json")
    execute(directory, f"UPDATE meta SET value = {version}")
    with pytest.raises(StoreError, match=f"schema version {version}"):
        verify(directory, against=read_head(tmp_path / "head.json"))


def test_file_that_cannot_be_opened_is_an_error_and_not_a_finding(directory: Path) -> None:
    (directory / "tokentape.db-wal").mkdir()
    with pytest.raises(StoreError, match="can't be opened; expected a file"):
        verify(directory)


def test_an_error_leaves_no_connection_open(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []

    def connect(*given: Any, **options: Any) -> sqlite3.Connection:
        opened.append(real(*given, **options))
        return opened[-1]

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    (directory / "tokentape.db-wal").mkdir()
    with pytest.raises(StoreError):
        verify(directory)
    assert opened
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.total_changes  # noqa: B018


def test_a_finding_reads_as_a_sentence(directory: Path) -> None:
    execute(directory, "UPDATE turns SET engine = 'other' WHERE session_id = 'a' AND seq = 2")
    (finding,) = verify(directory).findings
    assert str(finding) == "session a turn 2: its contents don't match its digest and its parent's"


@pytest.mark.parametrize("kept", [0, 1, 50, 99, 100, 2048, 5000, 20_000])
def test_torn_file_is_reported(directory: Path, kept: int) -> None:
    path = directory / "tokentape.db"
    path.write_bytes(path.read_bytes()[:kept])
    assert not verify(directory).ok


@pytest.mark.parametrize(
    ("where", "byte"), [(b"\4\0\0\0\0", 5), (b"TABLE sessions", 0x80)], ids=["number of the format", "schema"]
)
def test_damaged_header_and_schema_are_reported(directory: Path, where: bytes, byte: int) -> None:
    path = directory / "tokentape.db"
    content = bytearray(path.read_bytes())
    content[content.index(where)] = byte
    path.write_bytes(content)
    assert not verify(directory).ok


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_bytes_leave_turns_intact_or_are_reported(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    content = bytearray((intact / "tokentape.db").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (directory / "tokentape.db").write_bytes(content)
    if verify(directory).ok:
        with SqliteStore.open(directory, read_only=True) as store:
            stored = {session.info.session_id: session.turns for session in store.iter_sessions()}
        assert bits(stored) == bits({"a": [*CHAINS["a"], FORK], "b": CHAINS["b"]})


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (
            lambda data: data[: len(data) // 2],
            r"tokentape\.db has \d+ bytes; expected \d+, as its header says",
        ),
        (lambda data: b"\0" * 100 + data[100:], r"tokentape\.db begins with .*; expected b'SQLite format 3"),
    ],
    ids=["cut", "overwritten"],
)
def test_a_damaged_file_s_findings_say_where(directory: Path, damage: Callable[[bytes], bytes], where: str) -> None:
    path = directory / "tokentape.db"
    path.write_bytes(damage(path.read_bytes()))
    problems = [finding.problem for finding in verify(directory).findings]
    assert any(re.match(where, problem) for problem in problems), problems
    assert any(problem.endswith("; restore it from a backup or an archive") for problem in problems), problems
    assert not any("tokentape verify" in problem for problem in problems), problems


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return a copy of a record with six commits in its log, as after kill -9."""
    with SqliteStore.open(tmp_path / "running") as store:
        for turn in make_chain("s", 6):
            asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn) if turn.seq == 0 else store.write(turn))
        return Path(shutil.copytree(tmp_path / "running", tmp_path / "copy"))


def damage_log(directory: Path, commit: int | None, at: int = 100) -> bytes:
    """Flip a bit in the last frame of a commit of the log, or in the log's header. Return the log."""
    log = directory / "tokentape.db-wal"
    content = bytearray(log.read_bytes())
    page_bytes, salts = int.from_bytes(content[8:12], "big"), content[16:24]
    frames = [content[begin : begin + 24] for begin in range(32, len(content), 24 + page_bytes)]
    commits = [number for number, frame in enumerate(frames) if frame[8:16] == salts and any(frame[4:8])]
    assert len(commits) == 6
    content[20 if commit is None else 32 + commits[commit] * (24 + page_bytes) + at] ^= 4
    log.write_bytes(content)
    return bytes(content)


def test_intact_log_has_no_findings(killed: Path) -> None:
    assert verify(killed).findings == ()


@pytest.mark.parametrize("commit", [None, 0, 4])
def test_damaged_log_is_reported(killed: Path, commit: int | None) -> None:
    damage_log(killed, commit)
    assert any("acknowledged turns are missing" in finding.problem for finding in verify(killed).findings)


def test_last_commit_which_may_not_have_ended_is_no_finding(killed: Path) -> None:
    damage_log(killed, 5)
    report = verify(killed)
    assert (report.turns, report.findings) == (5, ())


def test_remains_of_commits_that_never_ended_are_no_finding(killed: Path) -> None:
    checksum = 16
    for commit in (3, 4, 5):
        damage_log(killed, commit, checksum)
    report = verify(killed)
    assert (report.turns, report.findings) == (3, ())
