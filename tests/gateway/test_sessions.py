"""Sessions as resources, over a real socket."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.conftest import SharedEngine
from tokentape._session.chain import seal
from tokentape._session.files import read_trajectories
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._sessions import PARQUET
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

USER = {"role": "user", "content": "What is 3 plus 4?"}


@pytest.fixture
def http(gateway_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway_url) as http:
        yield http


def take_turn(http: httpx2.Client, session_id: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 6, "seed": 1, **more}
    answer = http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def two_branches(http: httpx2.Client) -> None:
    """Session `s`: turn 0, turn 1 after it, and turn 2 with an edited history."""
    reply = take_turn(http, "s", [USER])
    take_turn(http, "s", [USER, reply, {"role": "user", "content": "and 5?"}])
    take_turn(http, "s", [{"role": "user", "content": "something else"}])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/sessions/s/trajectories?verdicts=forked", "there is no parameter 'verdicts'; expected leaf, verdict, "),
        ("/sessions/s/trajectories?verdict=exact&verdict=closed", "verdict is in the URL twice; send it once"),
        ("/snapshots/1/trajectories?verdict=exact", "there is no parameter 'verdict'; expected format"),
        ("/sessions?page=2", "there is no parameter 'page'; expected limit, after"),
    ],
)
def test_query_parameter_that_would_be_ignored_is_refused(http: httpx2.Client, path: str, says: str) -> None:
    take_turn(http, "s", [USER])
    assert http.post("/snapshots").status_code == 201
    answer = http.get(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


def test_created_session_has_a_random_id_of_128_bits(http: httpx2.Client) -> None:
    answers = [http.post("/sessions") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    ids = [answer.json()["session_id"] for answer in answers]
    assert len({*ids}) == 2
    assert all(len(session_id) == 32 for session_id in ids)
    assert http.get(answers[0].headers["location"]).json()["turns"] == []


def test_created_session_keeps_its_id_and_metadata(http: httpx2.Client) -> None:
    body = {"session_id": "run-7:a.b_c", "metadata": {"task": [1, None], "ü": 0.5}}
    made = http.post("/sessions", json=body).json()
    assert {key: made[key] for key in body} == body
    assert http.get("/sessions/run-7:a.b_c").json()["metadata"] == body["metadata"]


def test_second_session_of_the_same_id_is_a_conflict(http: httpx2.Client) -> None:
    assert http.post("/sessions", json={"session_id": "s"}).status_code == 201
    answer = http.post("/sessions", json={"session_id": "s"})
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("session_id", ["", "a/b", "a b", "ü", "x" * 129, "a\n", 7])
def test_invalid_id_is_refused(http: httpx2.Client, session_id: Any) -> None:
    answer = http.post("/sessions", json={"session_id": session_id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize("body", [[], 0, "x", {"metadata": []}, {"more": 1}])
def test_session_with_an_invalid_body_is_refused(http: httpx2.Client, body: Any) -> None:
    assert http.post("/sessions", json=body).status_code == 400


def test_listing_is_paged_and_in_order_of_creation(http: httpx2.Client) -> None:
    for number in range(5):
        http.post("/sessions", json={"session_id": f"s{number}"})
    seen, after = [], 0
    for _ in range(3):
        page = http.get("/sessions", params={"limit": 2, "after": after}).json()
        seen.append([session["session_id"] for session in page["data"]])
        after = page["next_after"]
        assert page["has_more"] == (after is not None)
    assert seen == [["s0", "s1"], ["s2", "s3"], ["s4"]]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=-1", "after=" + "9" * 5000, "limit=²"])
def test_listing_refuses_invalid_pages(http: httpx2.Client, query: str) -> None:
    answer = http.get(f"/sessions?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_listing_has_sessions_of_an_earlier_process(tmp_path: Path, engine: SharedEngine, renderer: Renderer) -> None:
    for _ in range(2):
        turns = Turns(engine, renderer, SqliteStore.open(tmp_path / "kept"))
        with running(create_app(turns, model_id="tiny")) as url, httpx2.Client(base_url=url) as http:
            before = http.get("/sessions").json()["data"]
            take_turn(http, "s", [USER])
    assert [(session["session_id"], session["turns"]) for session in before] == [("s", 1)]


def test_session_shows_its_tree(http: httpx2.Client, store: SqliteStore) -> None:
    two_branches(http)
    shown = http.get("/sessions/s").json()
    recorded = store.load_session("s").turns
    assert [(turn["seq"], turn["parent"], turn["fork"]) for turn in shown["turns"]] == [
        (0, None, None),
        (1, 0, None),
        (2, None, "edited_history"),
    ]
    for turn, kept in zip(shown["turns"], recorded, strict=True):
        assert (turn["added_tokens"], turn["sampled_tokens"]) == (len(kept.added_ids), len(kept.completion_ids))
        assert (turn["finish_reason"], turn["weight_version"]) == (kept.finish_reason, kept.weight_version)
        assert turn["digest"] == kept.digest
    assert [(leaf["turn"], leaf["verdict"].split(":")[0]) for leaf in shown["leaves"]] == [
        (1, trajectories(Session(store.load_session("s").info, recorded))[0].verdict),
        (2, "forked"),
    ]


def test_json_and_parquet_trajectories_equal_the_record(
    http: httpx2.Client, store: SqliteStore, tmp_path: Path
) -> None:
    two_branches(http)
    http.post("/sessions/s/reward", json={"value": 0.25})
    stored = store.load_session("s")
    expected = trajectories(Session(stored.info, stored.turns), stored.rewards)
    as_json = http.get("/sessions/s/trajectories").json()["data"]
    answer = http.get("/sessions/s/trajectories", headers={"accept": PARQUET})
    assert answer.headers["content-type"] == PARQUET
    (tmp_path / "t.parquet").write_bytes(answer.content)
    from_parquet = read_trajectories(tmp_path / "t.parquet")
    assert len(as_json) == len(from_parquet) == len(expected) == 2
    for first, other, kept in zip(as_json, from_parquet, expected, strict=True):
        assert first["token_ids"] == kept.token_ids.tolist()
        np.testing.assert_array_equal(np.array(first["logprobs"], np.float32), kept.logprobs)
        np.testing.assert_array_equal(other.token_ids, kept.token_ids)
        np.testing.assert_array_equal(other.logprobs, kept.logprobs)
        assert first["reward"] == other.reward == kept.reward == 0.25
        assert first["verdict"] == other.verdict == kept.verdict


def test_a_gateway_without_pyarrow_refuses_parquet_only(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    two_branches(http)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused = http.get("/sessions/s/trajectories", headers={"accept": PARQUET})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "pip install 'tokentape[parquet]'" in refused.json()["error"]["message"]
    assert len(http.get("/sessions/s/trajectories").json()["data"]) == 2


def test_single_leaf_can_be_requested(http: httpx2.Client) -> None:
    two_branches(http)
    (trajectory,) = http.get("/sessions/s/trajectories?leaf=2").json()["data"]
    assert (trajectory["leaf"], trajectory["turns"]) == (2, [2])
    assert http.get("/sessions/s/trajectories?leaf=0").status_code == 404


@pytest.mark.parametrize("as_parquet", [False, True])
def test_trajectories_can_be_filtered_by_verdict(http: httpx2.Client, tmp_path: Path, as_parquet: bool) -> None:
    two_branches(http)

    def leaves(verdict: str) -> list[int]:
        headers = {"accept": PARQUET} if as_parquet else {}
        answer = http.get(f"/sessions/s/trajectories?verdict={verdict}", headers=headers)
        if not as_parquet:
            return [trajectory["leaf"] for trajectory in answer.json()["data"]]
        (tmp_path / "t.parquet").write_bytes(answer.content)
        return [trajectory.leaf for trajectory in read_trajectories(tmp_path / "t.parquet")]

    assert leaves("forked") == leaves("forked:edited_history") == [2]
    assert leaves("exact,closed") == [1]
    assert leaves("forked:sibling") == []
    assert leaves("forked, exact, closed") == [1, 2]


@pytest.mark.parametrize("verdict", ["", "good", "exact,", "forked:"])
def test_unknown_verdict_is_refused(http: httpx2.Client, verdict: str) -> None:
    http.post("/sessions", json={"session_id": "s"})
    answer = http.get(f"/sessions/s/trajectories?verdict={verdict}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "verdict")


def test_aborted_turns_are_shown_with_their_cause_and_are_in_no_trajectory(
    http: httpx2.Client, store: SqliteStore, turns: Turns
) -> None:
    two_branches(http)
    first = store.load_session("s").turns[0]
    cut = replace(first, seq=3, parent=0, finish_reason="abort", stop=None, abort_cause="client_left")
    asyncio.run(store.write(seal(cut, first.digest)))
    shown = http.get("/sessions/s").json()
    counts = {"added_tokens": len(first.added_ids), "sampled_tokens": len(first.completion_ids)}
    assert shown["aborted"] == [{"turn": 3, "parent": 0, "cause": "client_left", **counts}]
    assert [leaf["turn"] for leaf in shown["leaves"]] == [1, 2]


def test_deleted_session_is_gone_and_its_id_is_free(http: httpx2.Client) -> None:
    two_branches(http)
    assert http.delete("/sessions/s").status_code == 204
    assert http.get("/sessions/s").status_code == 404
    assert http.get("/sessions").json()["data"] == []
    take_turn(http, "s", [USER])
    assert len(http.get("/sessions/s").json()["turns"]) == 1


@pytest.mark.parametrize("session_id", ["unknown", "..%2f..%2fetc", "%00", "%ff", "a%20b", "x" * 5000])
def test_unknown_session_is_a_404_for_any_id(http: httpx2.Client, session_id: str) -> None:
    path = f"/sessions/{session_id}"
    answers = [
        http.get(path),
        http.get(f"{path}/trajectories"),
        http.post(f"{path}/reward", json={"value": 1}),
        http.post(f"{path}/columns", json={"turn": 0, "columns": {"advantages": [1]}}),
        http.delete(path),
    ]
    assert [answer.status_code for answer in answers] == [404] * 5
    assert {answer.json()["error"]["code"] for answer in answers} == {"not_found"}


@pytest.mark.parametrize("session_id", ["a b", ".", "x" * 200])
def test_turn_with_an_invalid_session_hint_gets_a_new_session(http: httpx2.Client, session_id: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [USER]}, headers={"x-session-id": session_id})
    assert answer.status_code == 200
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-session-id"])
    assert http.post("/sessions", json={}, headers={"x-session-id": session_id}).status_code == 201


@pytest.mark.parametrize("session_id", ["a b", "x" * 129])
def test_turn_with_an_invalid_session_id_is_refused(http: httpx2.Client, session_id: str) -> None:
    answer = http.post(f"/sessions/{session_id}/v1/chat/completions", json={"messages": [USER]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


def test_empty_body_error_says_empty(http: httpx2.Client) -> None:
    answer = http.post("/v1/chat/completions", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is empty; expected JSON")
