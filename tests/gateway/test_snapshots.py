"""Custody over a real socket: freeze, read out, confirm, drop."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conftest import SharedEngine
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_sessions import USER, take_turn, two_branches
from tests.records import bits
from tests.waiting import PATIENCE
from tokentape._session.files import read_trajectories
from tokentape._session.jsonl import trajectory_from_json
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._serve import running
from tokentape.gateway._sessions import PARQUET
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

MINE, OTHER, ADMIN = "key-of-mine-000000", "key-of-other-00000", "key-of-admin-00000"


@pytest.fixture
def http(gateway_url: str) -> Iterator[httpx2.Client]:
    """A gateway with session `s` of two branches and session `t` of one turn."""
    with httpx2.Client(base_url=gateway_url) as http:
        two_branches(http)
        take_turn(http, "t", [USER])
        yield http


def take(http: httpx2.Client, **selection: Any) -> dict[str, Any]:
    answer = http.post("/snapshots", json=selection)
    assert answer.status_code == 201, answer.text
    taken: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/snapshots/{taken['snapshot_id']}"
    return taken


def confirm(http: httpx2.Client, taken: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = http.post(f"/snapshots/{taken['snapshot_id']}/confirm", json={"digest": taken["digest"], **more})
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


def test_a_snapshot_is_shown_and_listed(http: httpx2.Client) -> None:
    taken = take(http)
    assert (taken["state"], taken["trajectories"], taken["schema_version"]) == ("held", 3, 1)
    assert [session["session_id"] for session in taken["sessions"]] == ["s", "t"]
    assert http.get("/snapshots/1").json() == taken
    (listed,) = http.get("/snapshots").json()["data"]
    assert listed == {name: value for name, value in taken.items() if name in listed}
    assert "sessions" not in listed


def test_snapshot_bytes_stay_the_same_while_sessions_grow(http: httpx2.Client, tmp_path: Path) -> None:
    taken = take(http, session_ids=["s"])
    path = "/snapshots/1/trajectories"
    lines, parquet = http.get(path), http.get(path, headers={"accept": PARQUET})
    assert lines.headers["x-tokentape-digest"] == taken["digest"] == hashlib.sha256(lines.content).hexdigest()
    take_turn(http, "s", [{"role": "user", "content": "a third branch"}])
    http.post("/sessions/s/reward", json={"value": 1})
    (sampled,) = (turn["sampled_tokens"] for turn in http.get("/sessions/s").json()["turns"][:1])
    http.post("/sessions/s/columns", json={"turn": 0, "columns": {"a": [1.0] * sampled}})
    assert http.get(path).content == lines.content
    assert http.get(path, headers={"accept": PARQUET}).content == parquet.content
    (tmp_path / "t.parquet").write_bytes(parquet.content)
    from_lines = [trajectory_from_json(json.loads(line)) for line in lines.content.splitlines()]
    assert bits(read_trajectories(tmp_path / "t.parquet")) == bits(from_lines)
    assert len(from_lines) == 2


def test_snapshot_has_columns_in_both_formats(http: httpx2.Client, tmp_path: Path) -> None:
    (turn,) = http.get("/sessions/t").json()["turns"]
    http.post("/sessions/t/columns", json={"turn": 0, "columns": {"a": [0.5] * turn["sampled_tokens"]}})
    taken = take(http)
    assert (taken["columns"], taken["payloads"]) == (["a"], [])
    (tmp_path / "t.parquet").write_bytes(http.get("/snapshots/1/trajectories", headers={"accept": PARQUET}).content)
    assert read_trajectories(tmp_path / "t.parquet")[2].columns["a"][-1] == 0.5


def test_a_session_is_dropped_only_once_its_snapshot_is_confirmed(http: httpx2.Client) -> None:
    taken = take(http)
    refused = http.delete("/sessions/s")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "snapshot 1" in refused.json()["error"]["message"]
    assert http.delete("/snapshots/1?drop_sessions=true").status_code == 409
    assert http.post("/snapshots/1/confirm", json={"digest": "0" * 64}).status_code == 409
    assert len(http.get("/sessions").json()["data"]) == 2
    assert confirm(http, taken)["state"] == "confirmed"
    assert confirm(http, taken)["state"] == "confirmed"
    report = http.delete("/snapshots/1?drop_sessions=true").json()
    assert (report["dropped"], report["kept"], report["state"]) == (["s", "t"], [], "released")
    assert http.get("/sessions").json()["data"] == []
    assert http.get("/sessions/s").status_code == 404
    assert http.get("/snapshots/1/trajectories").status_code == 409


def test_late_write_does_not_restore_a_dropped_session(http: httpx2.Client) -> None:
    confirm(http, take(http), drop_sessions=True)
    answer = http.post("/sessions/s/v1/chat/completions", json={"messages": [USER], "max_tokens": 6})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    assert http.post("/sessions", json={"session_id": "s"}).status_code == 409
    assert http.post("/sessions/s/reward", json={"value": 1}).status_code == 404
    assert http.get("/sessions").json()["data"] == []


def test_sessions_that_grew_are_kept_and_named(http: httpx2.Client) -> None:
    taken = take(http)
    take_turn(http, "t", [USER, {"role": "assistant", "content": "?"}, USER])
    report = confirm(http, taken, drop_sessions=True)
    assert report["dropped"] == ["s"]
    assert report["kept"] == [{"session_id": "t", "reason": "changed since the snapshot"}]
    assert [session["session_id"] for session in take(http, since=1)["sessions"]] == ["t"]
    take_turn(http, "t", [USER])


def test_a_drop_that_has_ended_can_be_repeated(http: httpx2.Client) -> None:
    taken = take(http)
    take_turn(http, "t", [USER, {"role": "assistant", "content": "?"}, USER])
    report = confirm(http, taken, drop_sessions=True)
    assert http.delete("/snapshots/1?drop_sessions=true").json() == report


def test_a_released_snapshot_deletes_nothing(http: httpx2.Client) -> None:
    take(http)
    http.delete("/snapshots/1")
    report = http.delete("/snapshots/1?drop_sessions=true").json()
    reason = "the snapshot was released"
    assert report["kept"] == [{"session_id": session_id, "reason": reason} for session_id in ("s", "t")]
    assert len(http.get("/sessions").json()["data"]) == 2


def test_a_released_snapshot_holds_nothing(http: httpx2.Client) -> None:
    take(http)
    assert http.delete("/snapshots/1").json()["state"] == "released"
    assert http.delete("/sessions/s").status_code == 204
    assert http.post("/snapshots/1/confirm", json={"digest": "0" * 64}).status_code == 409


def test_empty_selection_is_refused(http: httpx2.Client) -> None:
    for body, status in (
        ({"session_ids": ["nobody"]}, 404),
        ({"since": 7}, 404),
        ({"since": 0}, 400),
        ({"idle_seconds": -1}, 400),
        ({"idle_seconds": 1e6}, 400),
        ({"session_ids": []}, 400),
        ({"metadata": {"task": 1}}, 400),
        ({"more": 1}, 400),
    ):
        assert http.post("/snapshots", json=body).status_code == status, body
        assert http.get("/snapshots").json()["data"] == [], body


def test_unknown_snapshot_is_a_404(http: httpx2.Client) -> None:
    take(http)
    for snapshot_id in ("2", "0", "x", "-1", "1.0", "9" * 5000, "%31%32", "²"):
        path = f"/snapshots/{snapshot_id}"
        answers = [
            http.get(path),
            http.get(f"{path}/trajectories"),
            http.delete(path),
            http.delete(f"{path}?drop_sessions=true"),
            http.post(f"{path}/confirm", json={"digest": ""}),
        ]
        assert [answer.status_code for answer in answers] == [404] * 5, snapshot_id


def test_snapshots_belong_to_a_key(engine: SharedEngine, renderer: Renderer, store: SqliteStore) -> None:
    keys = Keys({"mine": MINE, "other": OTHER}, {"admin": ADMIN})
    with running(create_app(Turns(engine, renderer, store), model_id="tiny", keys=keys)) as url:
        mine, other, admin = (
            httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) for key in (MINE, OTHER, ADMIN)
        )
        with mine, other, admin:
            own_key = mine.post("/sessions", json={"session_id": "s"}).json()["api_key"]
            take_turn(mine, "s", [USER])
            take_turn(other, "o", [USER])
            taken = take(mine)
            assert [session["session_id"] for session in taken["sessions"]] == ["s"]
            assert other.post("/snapshots", json={"session_ids": ["s"]}).status_code == 404
            assert other.get("/snapshots/1").status_code == other.get("/snapshots/1/trajectories").status_code == 404
            assert other.delete("/snapshots/1").status_code == 404
            assert other.get("/snapshots").json()["data"] == []
            assert [session["session_id"] for session in take(admin)["sessions"]] == ["s", "o"]
            assert mine.get("/snapshots", headers={"authorization": f"Bearer {own_key}"}).status_code == 403
            assert httpx2.get(f"{url}/snapshots").status_code == 401
            assert mine.post("/snapshots", json={"owner": "other"}).status_code == 403
            assert mine.get(f"/snapshots/{take(admin, owner='mine')['snapshot_id']}").status_code == 200
            # The hold is lifted by its owner, or by force of an admin.
            assert mine.delete("/sessions/s?force=true").status_code == 403
            assert admin.delete("/sessions/s").status_code == 409
            assert admin.delete("/sessions/s?force=true").status_code == 204
            assert mine.get("/snapshots/1").json()["digest"] == taken["digest"]
            assert mine.get("/snapshots/1/trajectories", headers={"accept": PARQUET}).status_code == 409


def test_another_key_s_dropped_session_is_not_found(
    engine: SharedEngine, renderer: Renderer, store: SqliteStore
) -> None:
    keys = Keys({"mine": MINE, "other": OTHER})
    with running(create_app(Turns(engine, renderer, store), model_id="tiny", keys=keys)) as url:
        mine, other = (httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) for key in (MINE, OTHER))
        with mine, other:
            take_turn(mine, "s", [USER])
            confirm(mine, take(mine), drop_sessions=True)
            body = {"messages": [USER], "max_tokens": 6}
            assert other.post("/sessions/s/v1/chat/completions", json=body).status_code == 404
            assert mine.post("/sessions/s/v1/chat/completions", json=body).status_code == 409


def test_session_with_a_running_call_is_kept(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["one<|im_end|>", "two<|im_end|>"])
    app = create_app(Turns(engine, renderer, store), model_id="tiny")
    with running(app) as url, httpx2.Client(base_url=url) as http:
        take_turn(http, "s", [USER])
        taken = take(http)
        engine.stall_after = 1
        body = {"messages": [{"role": "user", "content": "again"}], "stream": True}
        with http.stream("POST", "/sessions/s/v1/chat/completions", json=body):
            assert engine.stalled.wait(PATIENCE)
            report = confirm(http, taken, drop_sessions=True)
    assert report["kept"] == [{"session_id": "s", "reason": "in use"}]


def test_a_snapshot_survives_a_restart(tmp_path: Path, engine: SharedEngine, renderer: Renderer) -> None:
    contents = []
    for restarted in (False, True):
        turns = Turns(engine, renderer, SqliteStore.open(tmp_path / "kept"))
        with running(create_app(turns, model_id="tiny")) as url, httpx2.Client(base_url=url) as http:
            if not restarted:
                take_turn(http, "s", [USER])
                take(http)
            else:
                take_turn(http, "s", [{"role": "user", "content": "something else"}])
                assert http.delete("/sessions/s").status_code == 409
            contents.append(http.get("/snapshots/1/trajectories").content)
    assert contents[0] == contents[1] != b""


def test_failed_download_is_not_treated_as_complete(http: httpx2.Client, store: SqliteStore) -> None:
    take(http)
    asyncio.run(store.delete_session("t", force=True))
    with pytest.raises(httpx2.RemoteProtocolError):
        http.get("/snapshots/1/trajectories")
