"""The viewer of a gateway over a real socket: responses, access and headers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.records import SETUP, make_turn
from tests.viewer.packed import header, unpack
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import SessionInfo, Trajectory, TurnColumn
from tokentape.viewer._app import create_app as viewer_app
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._routes import MAX_MEASURED, Viewer
from tokentape.viewer._source import StoreSource
from tokentape.viewer._views import FOLDER

ALICE, BOB, OPS = "alice-secret-0123456789", "bob-secret-0123456789", "ops-secret-0123456789"
KEYS = Keys({"alice": ALICE, "bob": BOB}, {"ops": OPS})
USER = {"role": "user", "content": "What is 3 plus 4?"}

API = [
    "/view/api/about",
    "/view/api/overview",
    "/view/api/measures?ids=s",
    "/view/api/run",
    "/view/api/sessions",
    "/view/api/sessions/s",
    "/view/api/sessions/s/leaves/1",
    "/view/api/sessions/s/leaves/1/comparison",
    "/view/api/sessions/s/turns/1/alternatives",
]


@contextmanager
def viewed(renderer: Renderer, store: SqliteStore, keys: Keys | None = None, **more: Any) -> Iterator[httpx2.Client]:
    """Run a gateway. Its session `s`, of alice if there are keys, has turns 0 and 1 after it, and a fork, 2."""
    engine = ScriptedEngine(
        renderer, ["Seven.<|im_end|>", "Twelve, 漢字.<|im_end|>", "No.<|im_end|>", *["Yes.<|im_end|>"] * 5]
    )
    app = create_app(Turns(engine, renderer, store), model_id="m", keys=keys, **more)
    headers = {"authorization": f"Bearer {ALICE}"} if keys else {}
    with running(app) as url, httpx2.Client(base_url=url, headers=headers) as http:
        reply = turn(http, [USER])
        turn(http, [USER, reply, {"role": "user", "content": "and 5?"}])
        turn(http, [{"role": "user", "content": "something else"}])
        yield http


def turn(http: httpx2.Client, messages: list[Any]) -> dict[str, Any]:
    answer = http.post("/sessions/s/v1/chat/completions", json={"messages": messages, "max_tokens": 30})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    with SqliteStore.open(tmp_path_factory.mktemp("open")) as store:
        yield store


@pytest.fixture(scope="module")
def http(renderer: Renderer, store: SqliteStore) -> Iterator[httpx2.Client]:
    """Without keys."""
    with viewed(renderer, store) as http:
        yield http


@pytest.fixture(scope="module")
def keyed(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """With keys; the client's is alice's."""
    with SqliteStore.open(tmp_path_factory.mktemp("keyed")) as store, viewed(renderer, store, KEYS) as http:
        yield http


def recorded(store: SqliteStore, leaf: int) -> Trajectory:
    return next(
        trajectory for trajectory in store.load_session("s", per_token=True).trajectories() if trajectory.leaf == leaf
    )


def test_packed_arrays_match_the_record(http: httpx2.Client, store: SqliteStore, renderer: Renderer) -> None:
    values = np.full(len(store.load_session("s").turns[1].completion_ids), 0.5, np.float32)
    asyncio.run(store.write(TurnColumn("s", 1, "advantage", values, 1.0)))
    answer = http.get("/view/api/sessions/s/leaves/1")
    arrays, metadata, expected = unpack(answer.content), header(answer.content), recorded(store, 1)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert arrays["token_ids"].tobytes() == expected.token_ids.tobytes()
    assert arrays["provenance"].tobytes() == expected.provenance.tobytes()
    assert arrays["logprobs"].tobytes() == expected.logprobs.tobytes()
    assert arrays["loss_mask"].tobytes() == expected.loss_mask.tobytes()
    assert metadata["columns"] == ["advantage"]
    assert arrays["column_0"].tobytes() == expected.columns["advantage"].tobytes()
    ends = arrays["text_ends"].tolist()
    pieces = [arrays["text"][start:end].tobytes() for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert pieces == [renderer.tokenizer.token_bytes(token_id) for token_id in expected.token_ids.tolist()]
    assert [(turn["completion_start"], turn["end"]) for turn in metadata["turns"]] == list(
        zip(expected.completion_starts.tolist(), expected.completion_ends.tolist(), strict=True)
    )
    assert metadata["weight_spans"] == [list(span) for span in expected.weight_spans]
    assert (metadata["verdict"], metadata["tokens"]) == (expected.verdict, len(expected.token_ids))


def test_range_after_a_token_joins_the_range_before_it(http: httpx2.Client) -> None:
    whole, path = unpack(http.get("/view/api/sessions/s/leaves/1").content), "/view/api/sessions/s/leaves/1?from="
    total = len(whole["token_ids"])
    for start in (0, 1, total - 1, total, total + 5):
        some = unpack(http.get(f"{path}{start}").content)
        at = min(start, total)
        assert some["token_ids"].tobytes() == whole["token_ids"][at:].tobytes()
        # Values that may change for tokens that a page already has are always sent in full.
        assert some["loss_mask"].tobytes() == whole["loss_mask"].tobytes()
        offset = int(whole["text_ends"][at - 1]) if at else 0
        assert (some["text_ends"] + offset).tolist() == whole["text_ends"][at:].tolist()
        assert some["text"].tobytes() == whole["text"][offset:].tobytes()


def test_a_session_is_shown_as_a_tree(http: httpx2.Client) -> None:
    tree = http.get("/view/api/sessions/s").json()
    assert [(turn["seq"], turn["parent"], turn["fork"]) for turn in tree["turns"]] == [
        (0, None, None),
        (1, 0, None),
        (2, None, "edited_history"),
    ]
    assert [(leaf["turn"], leaf["path"], leaf["verdict"]) for leaf in tree["leaves"]] == [
        (1, [0, 1], "exact"),
        (2, [2], "forked: edited_history"),
    ]


def test_branches_are_compared_with_each_other(http: httpx2.Client, store: SqliteStore) -> None:
    answer = http.get("/view/api/sessions/s/leaves/1/comparison?with=leaf-2")
    arrays, ours, theirs = unpack(answer.content), recorded(store, 1).token_ids, recorded(store, 2).token_ids
    assert arrays["other_token_ids"].tolist() == theirs.tolist()
    equal = arrays["segments"].reshape(-1, 4)[arrays["differs"] == 0]
    assert len(equal) > 0
    for start, end, other_start, other_end in equal.tolist():
        assert ours[start:end].tolist() == theirs[other_start:other_end].tolist()
    assert http.get("/view/api/sessions/s/leaves/1/comparison?with=leaf-7").status_code == 400


@pytest.mark.parametrize(("side", "leaf"), [("leaf-2-of-s", 2), ("leaf-0-of-s", 1), ("session-s", 2)])
def test_sessions_are_compared_with_each_other(http: httpx2.Client, side: str, leaf: int) -> None:
    body = {"messages": [USER], "max_tokens": 30}
    assert http.post("/sessions/t/v1/chat/completions", json=body).status_code == 200
    answer = http.get("/view/api/sessions/t/leaves/0/comparison", params={"with": side})
    arrays, other = unpack(answer.content), unpack(http.get(f"/view/api/sessions/s/leaves/{leaf}").content)
    for name, array in other.items():
        np.testing.assert_array_equal(arrays[f"other_{name}"], array)
    assert header(answer.content)["other"]["leaf"] == leaf
    # The reply is of two sessions, and an ETag is of one session.
    assert "etag" not in answer.headers
    assert http.get("/view/api/sessions/t/leaves/0/comparison?with=leaf-7-of-s").status_code == 400
    http.delete("/sessions/t")


def test_session_of_another_key_is_not_compared(renderer: Renderer, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {BOB}"}
    body = {"messages": [USER], "max_tokens": 30}
    path = "/view/api/sessions/b/leaves/0/comparison?with=session-"
    with SqliteStore.open(tmp_path) as store, viewed(renderer, store, KEYS) as http:
        assert http.post("/sessions/b/v1/chat/completions", json=body, headers=headers).status_code == 200
        own, foreign, unknown = (http.get(f"{path}{name}", headers=headers) for name in "bst")
    assert [response.status_code for response in (own, foreign, unknown)] == [200, 404, 404]
    assert foreign.json()["error"]["message"].replace("'s'", "'t'") == unknown.json()["error"]["message"]


def test_an_unchanged_session_is_not_sent_again(http: httpx2.Client) -> None:
    for path in API[5:]:
        first = http.get(path)
        again = http.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    http.post("/sessions/s/reward", json={"value": 1.0})
    changed = http.get("/view/api/sessions/s", headers={"if-none-match": first.headers["etag"]})
    assert changed.status_code == 200
    assert [leaf["reward"] for leaf in changed.json()["leaves"]] == [1.0, 1.0]


def test_list_shows_measures_of_the_current_version_only(
    renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with SqliteStore.open(tmp_path_factory.mktemp("grows")) as store, viewed(renderer, store) as http:
        (before,) = http.get("/view/api/sessions").json()["sessions"]
        assert before["measures"] is None
        first = http.get("/view/api/measures?ids=s,nothing").json()["measures"]
        assert list(first) == ["s"]
        (known,) = http.get("/view/api/sessions").json()["sessions"]
        assert known["measures"] == first["s"]
        assert known["measures"]["verdicts"] == ["exact", "forked: edited_history"]
        http.post("/sessions/s/v1/chat/completions", json={"messages": [USER], "max_tokens": 30})
        (grown,) = http.get("/view/api/sessions").json()["sessions"]
        assert grown["measures"] is None
        again = http.get("/view/api/measures?ids=s").json()["measures"]["s"]
        assert again["drift"]["tokens"] > first["s"]["drift"]["tokens"]
        # Sorting and filtering by measures measures first.
        (sorted_by,) = http.get("/view/api/sessions?sort=drift").json()["sessions"]
        assert sorted_by["measures"] == again


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("verdict=exact", 1),
        ("verdict=forked", 1),
        ("verdict=forked:%20edited_history", 1),
        ("verdict=unread", 0),
        ("verdict=exact&role=main", 1),
        ("role=subagent", 0),
        ("drift=none", 1),
        ("drift=any", 0),
        ("verdict=exact&search=nothing", 0),
    ],
)
def test_sessions_are_filtered_by_measures(http: httpx2.Client, query: str, count: int) -> None:
    response = http.get(f"/view/api/sessions?{query}").json()
    assert (response["total"], len(response["sessions"])) == (count, count)
    assert response["measured"] == response["of"]


@pytest.mark.parametrize(
    "query",
    [
        "sessions?sort=size",
        "sessions?order=up",
        "sessions?limit=0",
        "sessions?limit=501",
        "sessions?offset=-1",
        "sessions?reward_min=nan",
        "sessions?reward_max=high",
        "sessions?search=%00",
        "sessions?since=soon",
        "sessions?metadata=task",
        "sessions?weights=%00",
        f"measures?ids={','.join(map(str, range(MAX_MEASURED + 1)))}",
        "sessions/s/leaves/1?from=x",
        "sessions/s/leaves/1/comparison?with=itself",
    ],
)
def test_invalid_queries_are_refused(http: httpx2.Client, query: str) -> None:
    assert http.get(f"/view/api/{query}").status_code == 400


def test_page_files_need_no_key_and_data_needs_a_key(keyed: httpx2.Client) -> None:
    no_key = {"authorization": ""}
    for path in ["/view", *(f"/view/static/{file.name}" for file in FOLDER.iterdir())]:
        assert keyed.get(path, headers=no_key).status_code == 200
    for path in API:
        assert keyed.get(path, headers=no_key).status_code == 401


def test_key_sees_its_sessions_and_an_admin_all_sessions(keyed: httpx2.Client) -> None:
    of_session = KEYS.session_key("alice", "s")
    other_session = KEYS.session_key("alice", "other")
    for key, count, status in (
        (ALICE, 1, 200),
        (BOB, 0, 404),
        (OPS, 1, 200),
        (of_session, 1, 200),
        (other_session, 0, 404),
    ):
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.get("/view/api/sessions", headers=headers).json()["total"] == count
        assert {keyed.get(path, headers=headers).status_code for path in API[5:]} == {status}
        assert bool(keyed.get("/view/api/measures?ids=s", headers=headers).json()["measures"]) == bool(count)
        assert keyed.get("/view/api/run", headers=headers).json()["of"] == count
        by_drift = keyed.get("/view/api/sessions?sort=drift", headers=headers).json()
        assert len(by_drift["sessions"]) == by_drift["measured"] == count


def test_unknown_and_foreign_sessions_look_the_same(keyed: httpx2.Client) -> None:
    headers = {"authorization": f"Bearer {BOB}"}
    for path in API[5:]:
        foreign = keyed.get(path, headers=headers)
        unknown = keyed.get(path.replace("/s", "/t", 2).replace("/tessions", "/sessions"), headers=headers)
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json()["error"]["message"].replace("'s'", "'t'") == unknown.json()["error"]["message"]


def test_metrics_are_for_admins(keyed: httpx2.Client) -> None:
    assert keyed.get("/view/api/overview").status_code == 403
    assert keyed.get("/view/api/about").json()["overview"] is False
    headers = {"authorization": f"Bearer {OPS}"}
    assert keyed.get("/view/api/about", headers=headers).json()["overview"] is True
    values = keyed.get("/view/api/overview", headers=headers).json()
    exposed = keyed.get("/metrics", headers=headers).text
    committed = [sample for sample in values["tokentape_turns_total"] if sample["labels"]["outcome"] == "committed"]
    assert sum(sample["value"] for sample in committed) == 3
    assert 'tokentape_forks_total{cause="edited_history"} 1.0' in exposed
    assert values["tokentape_forks_total"] == [{"labels": {"cause": "edited_history"}, "value": 1.0}]


def test_pages_of_other_hosts_are_refused(http: httpx2.Client) -> None:
    for path in ["/", "/view", *API]:
        assert http.get(path, headers={"host": "evil.example"}).status_code == 403
        assert http.get(path, headers={"origin": "http://evil.example"}).status_code == 403


def test_bare_address_redirects_to_the_page(http: httpx2.Client, keyed: httpx2.Client) -> None:
    for client in (http, keyed):
        answer = client.get("/", headers={"authorization": ""})
        assert (answer.status_code, answer.headers["location"]) == (307, "/view")


def test_every_response_forbids_foreign_scripts(http: httpx2.Client) -> None:
    for path in ["/", "/view", "/view/static/app.js", *API]:
        headers = http.get(path).headers
        policy = dict(
            directive.strip().partition(" ")[::2] for directive in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_data_is_not_cached_by_proxies(http: httpx2.Client) -> None:
    for path in API:
        assert re.fullmatch("no-store|private, no-cache", http.get(path).headers["cache-control"])


def test_only_shipped_files_are_served(http: httpx2.Client) -> None:
    first = http.get("/view/static/app.js")
    assert first.content == (FOLDER / "app.js").read_bytes()
    assert http.get("/view/static/app.js", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    for name in ("nothing.js", "..%2froutes.py", "__init__.py", "%2e%2e"):
        assert http.get(f"/view/static/{name}").status_code == 404


def test_unknown_leaf_error_lists_the_leaves(http: httpx2.Client) -> None:
    for leaf in ("0", "7", "x", "9" * 30):
        answer = http.get(f"/view/api/sessions/s/leaves/{leaf}")
        assert answer.status_code == 404
        assert "its leaves: 1, 2" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "value",
    [2**63 - 1, 1.0, [2**60 + 1], {"a": 2**63 - 1, "b": "é"}, "漢字", True, None],
    ids=lambda value: repr(value),
)
def test_metadata_is_sent_as_filters_spell_it(http: httpx2.Client, value: Any) -> None:
    created = http.post("/sessions", json={"session_id": "kept", "metadata": {"key": value}})
    assert created.status_code == 201
    text = http.get("/view/api/sessions/kept").json()["metadata"]["key"]
    assert text == (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    (found,) = http.get("/view/api/sessions", params={"metadata": f"key={text}"}).json()["sessions"]
    assert found["metadata"] == {"key": text}
    http.delete("/sessions/kept")


NAMES = ("a/b", "a,b", "50%2C", "漢字?#")
"""Names that only records of other programs have."""


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_session_is_found(tmp_path: Path, name: str) -> None:
    with SqliteStore.open(tmp_path / "data") as store:
        turns = [make_turn(each, 0) for each in NAMES]
        asyncio.run(store.write(SETUP, *[SessionInfo(turn.session_id, 1.0) for turn in turns], *turns))
        app = viewer_app(Viewer(StoreSource(store, ""), RecordReader()))
        with running(app) as url, httpx2.Client(base_url=f"{url}/view/api/") as http:
            spelled = quote(name, safe="")
            assert http.get(f"sessions/{spelled}").json()["session_id"] == name
            assert header(http.get(f"sessions/{spelled}/leaves/0").content)["session_id"] == name
            assert list(http.get("measures", params={"ids": spelled}).json()["measures"]) == [name]
