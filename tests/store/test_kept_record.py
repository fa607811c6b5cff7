"""A record of an earlier version keeps its values: opened, verified, exported and read by clients.

`golden/record-d0a8210.db.gz` was written by commit d0a8210, and `golden/record-d0a8210.json.gz` has the values that
this commit read from it; `kept/make.py` explains how both were made. They stay unchanged: later versions migrate the
database and agree with the JSON, bit for bit.
"""

from __future__ import annotations

import copy
import gzip
import json
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, text
from typer.testing import CliRunner

from tests.gateway.scripted import ScriptedEngine
from tests.store.kept.contents import contents, samples
from tests.store.kept.plain import TYPE, differences
from tokentape._session.files import read_trajectories
from tokentape._session.jsonl import read_jsonl
from tokentape.chat._renderer import Renderer
from tokentape.cli.app import app
from tokentape.client import Client
from tokentape.errors import StoreCorrupt
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, verify
from tokentape.store import _schema as schema
from tokentape.types import Trajectory

GOLDEN = Path(__file__).parent / "golden"
NAME = "record-d0a8210"
FORKS = {"branched", "drift", "edited_history", "new_setup", "other_stop", "sibling", "template_history"}


@cache
def written() -> bytes:
    return gzip.decompress((GOLDEN / f"{NAME}.db.gz").read_bytes())


@cache
def expected() -> dict[str, Any]:
    """Return the values that commit read. Later versions add to verdicts that the logprobs' distribution is unknown."""
    record: dict[str, Any] = json.loads(gzip.decompress((GOLDEN / f"{NAME}.json.gz").read_bytes()))
    paths = [trajectory for parts in record["sessions"].values() for trajectory in parts["trajectories"]] + record[
        "samples"
    ]
    for path in paths:
        path["verdict"] += ", logprobs not known"
    return record


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a copy of the record."""
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "tokentape.db").write_bytes(written())
    return directory


@pytest.fixture
def opened(directory: Path) -> Path:
    """Return a copy that this version has opened to write, and so migrated."""
    SqliteStore.open(directory).close()
    return directory


def in_order(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    by_session: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_session.setdefault(trajectory.session_id, []).append(trajectory)
    return by_session


def expected_trajectories() -> dict[str, list[Any]]:
    return {session_id: parts["trajectories"] for session_id, parts in expected()["sessions"].items()}


def test_kept_record_has_no_findings(opened: Path) -> None:
    report = verify(opened)
    assert differences(expected()["verified"], report) == []
    assert (report.sessions, report.turns, report.findings) == (21, 64, ())


def test_every_part_of_every_session_is_unchanged(opened: Path) -> None:
    actual = contents(opened)
    for part in ("sessions", "listed", "snapshots", "samples"):
        assert differences(expected()[part], actual[part], part) == []


def test_kept_record_reads_the_same_opened_read_only(directory: Path) -> None:
    assert differences(expected()["sessions"], contents(directory)["sessions"]) == []
    assert verify(directory).ok
    assert (directory / "tokentape.db").read_bytes() == written()


def test_later_schema_reads_the_same_values(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_note(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE turns ADD COLUMN note TEXT NOT NULL DEFAULT ''"))

    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, add_note))
    SqliteStore.open(directory).close()
    assert differences(expected()["sessions"], contents(directory)["sessions"]) == []
    assert verify(directory).ok


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "read"), [("t.parquet", read_trajectories), ("t.jsonl", read_jsonl)])
def test_exports_have_the_same_arrays(opened: Path, tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    done = CliRunner().invoke(app, ["export", str(opened), "-o", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    read_back = list(read(tmp_path / name))
    assert differences(expected_trajectories(), in_order(read_back)) == []
    assert differences(expected()["samples"], samples({"all": {"trajectories": read_back}})) == []


def test_clients_get_the_same_arrays(opened: Path, renderer: Renderer, tmp_path: Path) -> None:
    turns = Turns(ScriptedEngine(renderer, []), renderer, SqliteStore.open(opened))
    with running(create_app(turns, model_id="tiny")) as url, Client(url) as client:
        by_session = {
            session.session_id: client.session(session.session_id).trajectories() for session in client.sessions()
        }
        assert differences(expected_trajectories(), by_session) == []
        # Frozen contents are returned unchanged; snapshot 1 is released.
        for snapshot in expected()["snapshots"][1:]:
            path = tmp_path / f"{snapshot['snapshot_id']}.jsonl"
            assert client.snapshot(snapshot["snapshot_id"]).save(path) == snapshot["digest"]
            frozen = in_order(list(read_jsonl(path)))
            of_these = {session_id: expected_trajectories()[session_id] for session_id in frozen}
            assert differences(of_these, frozen) == []


def test_expected_arrays_equal_the_bytes_in_the_database(directory: Path) -> None:
    connection = sqlite3.connect(directory / "tokentape.db")
    checked = 0
    for session_id, parts in expected()["sessions"].items():
        for turn in parts["turns"]:
            for name in ("added_ids", "completion_ids", "logprobs"):
                (blob,) = connection.execute(
                    f"SELECT {name} FROM turns WHERE session_id = ? AND seq = ?", (session_id, turn["seq"])
                ).fetchone()
                values = np.array(turn[name]["values"], turn[name]["dtype"])
                assert (values.tobytes(), turn[name]["dtype"]) == (blob, "<f4" if name == "logprobs" else "<i4")
                checked += 1
    connection.close()
    assert checked == 3 * 64


def test_kept_record_has_every_kind_of_content() -> None:
    sessions = expected()["sessions"].values()
    turns = [turn for parts in sessions for turn in parts["turns"]]
    trajectories = [trajectory for parts in sessions for trajectory in parts["trajectories"]]
    assert {turn["fork"] for turn in turns} == FORKS | {None}
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length", "abort"}
    assert {turn["abort_cause"] for turn in turns} == {None, "client_left", "engine_unavailable", "paused"}
    assert {trajectory["verdict"].split(", ")[0].split(":")[0] for trajectory in trajectories} == {
        "exact",
        "forked",
        "closed",
        "captured",
        "captured with drift",
    }
    assert {code for trajectory in trajectories for code in trajectory["provenance"]["values"]} == {
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    }
    assert {snapshot["state"] for snapshot in expected()["snapshots"]} == {"released", "held"}
    assert {parts["info"]["owner"] for parts in sessions} == {"team", "other", "root"}
    assert {len(turn["reply"].get("tool_calls", ())) for turn in turns} == {0, 1, 2}
    for part in ("rewards", "columns", "payloads", "media", "answers"):
        assert any(parts[part] for parts in sessions)
    # Two are missing: one was deleted, one was dropped after its snapshot was confirmed.
    assert {10, 11}.isdisjoint(session["position"] for session in expected()["listed"])
    assert any(turn["weight_changes"] for turn in turns)
    assert len({setup["fingerprint"] for parts in sessions for setup in parts["setups"].values()}) == 3


def test_most_replies_are_split_unlike_any_tokenizer(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    replies = [turn["completion_ids"]["values"] for turn in expected()["sessions"]["tools"]["turns"]]
    again = [tokenizer.encode_plain(tokenizer.decode(ids)) for ids in replies]
    assert [ids != other for ids, other in zip(replies, again, strict=True)].count(True) == 4


FLIPS = [
    ("turns", "added_ids"),
    ("turns", "added_provenance"),
    ("turns", "completion_ids"),
    ("turns", "logprobs"),
    ("turns", "messages"),
    ("turns", "reply"),
    ("token_columns", "data"),
    ("token_payloads", "data"),
    ("media", "data"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("table", "column"), FLIPS)
def test_flipped_byte_in_the_record_is_detected(opened: Path, table: str, column: str) -> None:
    connection = sqlite3.connect(opened / "tokentape.db")
    rowid, blob = connection.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid DESC LIMIT 1").fetchone()
    flipped = bytes([*blob[:-1], blob[-1] ^ 1])
    connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (flipped, rowid))
    connection.commit()
    connection.close()
    assert not verify(opened).ok
    try:
        sessions = contents(opened)["sessions"]
    except StoreCorrupt:
        return
    assert differences(expected()["sessions"], sessions)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rewards SET value = value + 1e-15 WHERE turn IS NULL",
        "UPDATE sessions SET metadata = '{}' WHERE session_id = 'exact'",
        "UPDATE sessions SET owner = 'other' WHERE session_id = 'exact'",
        "DELETE FROM rewards WHERE position = (SELECT max(position) FROM rewards)",
        "DELETE FROM answers WHERE session_id = 'exact' AND first_turn = 2",
        "DELETE FROM turns WHERE session_id = 'forks' AND seq = 7",
    ],
)
def test_change_outside_the_digests_is_detected(opened: Path, change: str) -> None:
    connection = sqlite3.connect(opened / "tokentape.db")
    assert connection.execute(change).rowcount > 0
    connection.commit()
    connection.close()
    assert differences(expected()["sessions"], contents(opened)["sessions"])


def set_value(array: Any) -> None:
    array["values"][0] += 1


def set_digest(array: Any) -> None:
    array["sha256"] = array["sha256"][::-1]


def set_dtype(array: Any) -> None:
    array["dtype"] = "<i8"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [set_value, set_digest, set_dtype])
@pytest.mark.parametrize("name", ["token_ids", "logprobs", "provenance", "completion_ends", "turn_rewards"])
def test_change_of_an_expected_value_is_detected(opened: Path, name: str, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(expected()["sessions"]["rewarded"])
    array = wrong["trajectories"][0][name]
    change(array)
    session = contents(opened)["sessions"]["rewarded"]
    assert len(differences(wrong, session)) == 1
    assert differences(expected()["sessions"]["rewarded"], session) == []


def test_a_zero_with_another_sign_and_a_missing_field_are_differences() -> None:
    assert differences([0.0], [-0.0])
    assert differences({"x": 1}, {"x": 1.0})
    assert differences({"x": 1}, {"x": 1, "y": 2})
    assert differences([1], [1, 2])
    with pytest.raises(AttributeError):
        differences({TYPE: "Turn", "no_such_field": 1}, 7)
