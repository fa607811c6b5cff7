"""Rewards and columns, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import numpy as np
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_sessions import USER, take_turn, two_branches
from tokentape._session.jsonl import trajectory_from_json
from tokentape.chat._renderer import Renderer
from tokentape.errors import StoreError
from tokentape.gateway import _sessions as feedback
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._openapi import BINARY
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Trajectory

COLUMNS = "/sessions/s/columns"


@pytest.fixture
def http(gateway_url: str) -> Iterator[httpx2.Client]:
    """A gateway with session `s`: turn 0, turn 1 after it, and turn 2 with an edited history."""
    with httpx2.Client(base_url=gateway_url) as http:
        two_branches(http)
        yield http


def trajectories(http: httpx2.Client) -> list[Trajectory]:
    return [trajectory_from_json(item) for item in http.get("/sessions/s/trajectories").json()["data"]]


def sizes(http: httpx2.Client, turn: int) -> tuple[int, int]:
    shown = http.get("/sessions/s").json()["turns"][turn]
    return shown["added_tokens"], shown["sampled_tokens"]


@pytest.mark.parametrize("path", ["reward", "columns"])
def test_the_key_is_checked_before_the_body_is_read(renderer: Renderer, store: SqliteStore, path: str) -> None:
    keys = Keys({"team": "team-secret-0123456789"})
    app = create_app(Turns(ScriptedEngine(renderer, []), renderer, store), model_id="m", keys=keys)
    with running(app) as url:
        assert httpx2.post(f"{url}/sessions/s/{path}", content=b"{").status_code == 401


# Rewards


def test_rewards_of_session_path_and_turn(http: httpx2.Client) -> None:
    assert http.post("/sessions/s/reward", json={"value": 1}).status_code == 201
    assert http.post("/sessions/s/reward", json={"value": -0.5, "leaf": 2}).status_code == 201
    assert http.post("/sessions/s/reward", json={"value": 0.25, "turn": 0}).status_code == 201
    shown = http.get("/sessions/s").json()
    assert [(reward["turn"], reward["leaf"], reward["value"]) for reward in shown["rewards"]] == [
        (None, None, 1.0),
        (None, 2, -0.5),
        (0, None, 0.25),
    ]
    assert [(leaf["turn"], leaf["reward"]) for leaf in shown["leaves"]] == [(1, 1.0), (2, -0.5)]
    first, second = trajectories(http)
    np.testing.assert_array_equal(first.turn_rewards, [0.25, np.nan])
    np.testing.assert_array_equal(second.turn_rewards, [np.nan])


def test_rewards_and_columns_of_a_session_in_memory_do_not_load_it(
    http: httpx2.Client, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [0.5] * sizes(http, 0)[1]
    loaded: list[str] = []

    def refuse(session_id: str, **_: object) -> None:
        loaded.append(session_id)
        raise StoreError("not to be loaded")

    monkeypatch.setattr(store, "load_session", refuse)
    assert http.post("/sessions/s/reward", json={"value": 1, "leaf": 2}).status_code == 201
    assert http.post(COLUMNS, json={"turn": 0, "columns": {"advantages": values}}).status_code == 201
    assert loaded == []


def test_reward_that_is_not_a_number_is_refused(http: httpx2.Client) -> None:
    for body in [
        b"",
        b"{}",
        b'{"value": "1"}',
        b'{"value": true}',
        b'{"value": 1e999}',
        b'{"value": NaN}',
        b'{"value": 1, "turn": -1}',
        b'{"value": 1, "turn": 1, "leaf": 1}',
        b'{"value": ' + b"9" * 400 + b"}",
    ]:
        assert http.post("/sessions/s/reward", content=body).status_code == 400


def test_reward_for_an_unknown_turn_or_leaf_is_a_404(http: httpx2.Client) -> None:
    for at in [{"turn": 3}, {"leaf": 3}, {"leaf": 0}]:
        assert http.post("/sessions/s/reward", json={"value": 1, **at}).status_code == 404
        assert http.get("/sessions/s").json()["rewards"] == []


# Columns


def test_values_for_the_sampled_tokens_of_a_turn(http: httpx2.Client) -> None:
    _, sampled = sizes(http, 1)
    values = [number / 2 for number in range(sampled)]
    answer = http.post(COLUMNS, json={"turn": 1, "columns": {"advantages": values, "weights": [1.0] * sampled}})
    assert (answer.status_code, answer.json()) == (201, {"columns": ["advantages", "weights"], "turns": [1]})
    first, second = trajectories(http)
    start, end = first.completion_starts[1], first.completion_ends[1]
    assert first.columns["advantages"][start:end].tolist() == values
    assert np.isnan(first.columns["advantages"]).sum() == first.loss_mask.sum() - sampled
    assert not second.columns
    assert http.get("/sessions/s").json()["columns"] == ["advantages", "weights"]


def test_values_for_all_tokens_of_a_turn_in_a_binary_body(http: httpx2.Client) -> None:
    added, sampled = sizes(http, 0)
    values = np.arange(added + sampled, dtype="<f4")
    answer = http.post(f"{COLUMNS}?name=values&turn=0", content=values.tobytes(), headers={"content-type": BINARY})
    assert answer.status_code == 201, answer.text
    assert trajectories(http)[0].columns["values"][: added + sampled].tolist() == values.tolist()


def test_values_for_a_path_go_to_the_turns_that_it_trains(http: httpx2.Client, store: SqliteStore) -> None:
    take_turn(http, "s", [USER, store.load_session("s").turns[0].reply, {"role": "user", "content": "and 6?"}])
    before = trajectories(http)
    assert [trajectory.turns for trajectory in before] == [(0, 1), (2,), (0, 3)]
    for path in before:
        values = np.full(len(path.token_ids), 10 + path.leaf, "<f4")
        answer = http.post(
            f"{COLUMNS}?name=values&leaf={path.leaf}", content=values.tobytes(), headers={"content-type": BINARY}
        )
        assert answer.json()["turns"] == [turn for turn in path.turns if turn in _trained(before, path.leaf)]
    for trajectory in trajectories(http):
        assert set(trajectory.columns["values"][trajectory.loss_mask].tolist()) == {10 + trajectory.leaf}


def _trained(all_of_them: list[Trajectory], leaf: int) -> set[int]:
    earlier = {turn for trajectory in all_of_them if trajectory.leaf < leaf for turn in trajectory.turns}
    return {turn for trajectory in all_of_them if trajectory.leaf == leaf for turn in trajectory.turns} - earlier


def test_latest_values_replace_earlier_ones(http: httpx2.Client, store: SqliteStore) -> None:
    _, sampled = sizes(http, 2)
    for value in (1, 2):
        http.post(COLUMNS, json={"turn": 2, "columns": {"a": [value] * sampled}})
    assert trajectories(http)[1].columns["a"][-1] == 2
    assert len(store.load_session("s", per_token=True).columns) == 1


def test_values_of_the_wrong_length_are_refused(http: httpx2.Client) -> None:
    for body, status in [
        ({"turn": 2, "columns": {"a": [1.0]}}, 400),
        ({"leaf": 2, "columns": {"a": [1.0]}}, 400),
        ({"turn": 2, "columns": {}}, 400),
        ({"columns": {"a": [1.0]}}, 400),
        ({"turn": 2, "leaf": 2, "columns": {"a": [1.0]}}, 400),
        ({"turn": 2, "columns": {"A": [1.0] * 6}}, 400),
        ({"turn": 2, "columns": {"a.b": [1.0] * 6}}, 400),
        ({"turn": 2, "columns": {"a" * 65: [1.0] * 6}}, 400),
        ({"turn": 2, "columns": {"": [1.0] * 6}}, 400),
        ({"turn": 2, "columns": {"a": [1e300] * 6}}, 400),
        ({"turn": 2, "columns": {"a": ["1"] * 6}}, 400),
        ({"turn": 2, "columns": {"a": [None] * 6}}, 400),
        ({"turn": 9, "columns": {"a": [1.0]}}, 404),
        ({"leaf": 0, "columns": {"a": [1.0]}}, 404),
    ]:
        assert http.post(COLUMNS, json=body).status_code == status
        assert http.get("/sessions/s").json()["columns"] == []


def test_invalid_binary_values_are_refused(http: httpx2.Client) -> None:
    for query, content in [
        ("name=a&turn=2", b"\0" * 5),
        ("name=a&turn=2", b"\0\0\xc0\x7f" * 6),
        ("turn=2", b"\0" * 24),
        ("name=a", b"\0" * 24),
        ("name=a&turn=-1", b"\0" * 24),
    ]:
        answer = http.post(f"{COLUMNS}?{query}", content=content, headers={"content-type": BINARY})
        assert answer.status_code == 400, answer.text


def test_number_of_column_names_is_limited(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "MAX_COLUMNS", 2)
    _, sampled = sizes(http, 2)
    for name, status in (("a", 201), ("b", 201), ("c", 429), ("a", 201)):
        answer = http.post(COLUMNS, json={"turn": 2, "columns": {name: [1.0] * sampled}})
        assert answer.status_code == status
