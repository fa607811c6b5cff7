"""A record that an earlier version wrote says what it said: opened, verified, exported and read by clients.

`golden/record-d0a8210.db.gz` was written by commit d0a8210, and `golden/record-d0a8210.json.gz` is what that commit
read from it; `kept/make.py` says how both were made. They stay as they are: versions to come migrate the one and agree
with the other, bit for bit.
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
    """What that commit read; since then it is said that it does not tell what its logprobs are of."""
    found: dict[str, Any] = json.loads(gzip.decompress((GOLDEN / f"{NAME}.json.gz").read_bytes()))
    paths = [one for parts in found["sessions"].values() for one in parts["trajectories"]] + found["samples"]
    for one in paths:
        one["verdict"] += ", logprobs not known"
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the record."""
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "tokentape.db").write_bytes(written())
    return directory


@pytest.fixture
def opened(directory: Path) -> Path:
    """A copy that this version has opened to write, and so made its own."""
    SqliteStore.open(directory).close()
    return directory


def in_order(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        found.setdefault(one.session_id, []).append(one)
    return found


def expected_trajectories() -> dict[str, list[Any]]:
    return {session_id: parts["trajectories"] for session_id, parts in expected()["sessions"].items()}


def test_nothing_is_found_wrong_with_it(opened: Path) -> None:
    report = verify(opened)
    assert differences(expected()["verified"], report) == []
    assert (report.sessions, report.turns, report.findings) == (21, 64, ())


def test_every_part_of_every_session_is_what_it_was(opened: Path) -> None:
    found = contents(opened)
    for part in ("sessions", "listed", "snapshots", "samples"):
        assert differences(expected()[part], found[part], part) == []


def test_it_reads_the_same_without_being_opened_to_write(directory: Path) -> None:
    assert differences(expected()["sessions"], contents(directory)["sessions"]) == []
    assert verify(directory).ok
    assert (directory / "tokentape.db").read_bytes() == written()


def test_a_later_schema_reads_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = list(read(tmp_path / name))
    assert differences(expected_trajectories(), in_order(found)) == []
    assert differences(expected()["samples"], samples({"all": {"trajectories": found}})) == []


def test_clients_get_the_same_arrays(opened: Path, renderer: Renderer, tmp_path: Path) -> None:
    turns = Turns(ScriptedEngine(renderer, []), renderer, SqliteStore.open(opened))
    with running(create_app(turns, model_id="tiny")) as url, Client(url) as client:
        found = {one.session_id: client.session(one.session_id).trajectories() for one in client.sessions()}
        assert differences(expected_trajectories(), found) == []
        # What was frozen is told as it was then; snapshot 1 is released.
        for snapshot in expected()["snapshots"][1:]:
            path = tmp_path / f"{snapshot['snapshot_id']}.jsonl"
            assert client.snapshot(snapshot["snapshot_id"]).save(path) == snapshot["digest"]
            frozen = in_order(list(read_jsonl(path)))
            of_these = {session_id: expected_trajectories()[session_id] for session_id in frozen}
            assert differences(of_these, frozen) == []


def test_the_arrays_expected_are_the_bytes_in_the_database(directory: Path) -> None:
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


def test_it_has_all_that_a_record_may_have() -> None:
    sessions = expected()["sessions"].values()
    turns = [turn for parts in sessions for turn in parts["turns"]]
    trajectories = [one for parts in sessions for one in parts["trajectories"]]
    assert {turn["fork"] for turn in turns} == FORKS | {None}
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length", "abort"}
    assert {turn["abort_cause"] for turn in turns} == {None, "client_left", "engine_unavailable", "paused"}
    assert {one["verdict"].split(", ")[0].split(":")[0] for one in trajectories} == {
        "exact",
        "forked",
        "closed",
        "captured",
        "captured with drift",
    }
    assert {code for one in trajectories for code in one["provenance"]["values"]} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert {snapshot["state"] for snapshot in expected()["snapshots"]} == {"released", "held"}
    assert {parts["info"]["owner"] for parts in sessions} == {"team", "other", "root"}
    assert {len(turn["reply"].get("tool_calls", ())) for turn in turns} == {0, 1, 2}
    for part in ("rewards", "columns", "payloads", "media", "answers"):
        assert any(parts[part] for parts in sessions)
    # Two are gone: one was deleted, one was dropped after its snapshot was confirmed.
    assert {10, 11}.isdisjoint(one["position"] for one in expected()["listed"])
    assert any(turn["weight_changes"] for turn in turns)
    assert len({setup["fingerprint"] for parts in sessions for setup in parts["setups"].values()}) == 3


def test_most_replies_are_split_as_no_tokenizer_splits_them(renderer: Renderer) -> None:
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
def test_a_flipped_byte_in_the_record_is_found(opened: Path, table: str, column: str) -> None:
    connection = sqlite3.connect(opened / "tokentape.db")
    rowid, blob = connection.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid DESC LIMIT 1").fetchone()
    flipped = bytes([*blob[:-1], blob[-1] ^ 1])
    connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (flipped, rowid))
    connection.commit()
    connection.close()
    assert not verify(opened).ok
    try:
        found = contents(opened)["sessions"]
    except StoreCorrupt:
        return
    assert differences(expected()["sessions"], found)


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
def test_a_change_that_no_digest_covers_is_found(opened: Path, change: str) -> None:
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
def test_a_change_to_what_is_expected_is_found(opened: Path, name: str, change: Callable[[Any], None]) -> None:
    wrong = copy.deepcopy(expected()["sessions"]["rewarded"])
    array = wrong["trajectories"][0][name]
    change(array)
    found = contents(opened)["sessions"]["rewarded"]
    assert len(differences(wrong, found)) == 1
    assert differences(expected()["sessions"]["rewarded"], found) == []


def test_a_zero_with_another_sign_and_a_missing_field_are_differences() -> None:
    assert differences([0.0], [-0.0])
    assert differences({"x": 1}, {"x": 1.0})
    assert differences({"x": 1}, {"x": 1, "y": 2})
    assert differences([1], [1, 2])
    with pytest.raises(AttributeError):
        differences({TYPE: "Turn", "no_such_field": 1}, 7)
