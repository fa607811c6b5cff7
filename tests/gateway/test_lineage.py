"""Headers of harnesses through the gateway: recorded with turns, and edges between sessions of a record."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tokentape._session.arrow import ExtraNames
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import client_headers
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._reads import ExportCounts, exported
from tokentape.training import assemble


def ask(url: str, text: str, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": text}]}
    httpx2.post(f"{url}/v1/chat/completions", json=body, headers=named).raise_for_status()


@pytest.fixture
def engine(renderer: Renderer) -> ScriptedEngine:
    return ScriptedEngine(renderer, ["hi<|im_end|>"] * 8)


def test_child_session_has_a_role_and_an_edge_to_its_parent(
    renderer: Renderer, store: SqliteStore, engine: ScriptedEngine
) -> None:
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url, Client(url) as client:
        ask(url, "Count the files.", X_Session_Id="ses_a", X_Session_Affinity="ses_a")
        ask(url, "Count them.", X_Session_Id="ses_b", X_Session_Affinity="ses_b", X_Parent_Session_Id="ses_a")
        child = client.session("ses_b")
        (edge,) = child.info().lineage
        found = client.session("ses_a").trajectories() + child.trajectories()
        assert store.load_session("ses_b").turns[0].sampling["client"] == {"parent": "ses_a"}
    assert (edge.kind, edge.turn, edge.parent_session, edge.parent) == ("subagent", 0, "ses_a", 0)
    assert [trajectory.role for trajectory in found] == ["main", "subagent"]
    assert [sample.session_id for sample in assemble(found, roles=["main"]).samples] == ["ses_a"]
    assert [trajectory.lineage for trajectory in found] == [(), (edge,)]


def test_an_export_loads_the_parent_of_many_sessions_once(
    renderer: Renderer, store: SqliteStore, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        ask(url, "Count the files.", X_Session_Id="ses_a", X_Session_Affinity="ses_a")
        for child in ("ses_b", "ses_c", "ses_d"):
            ask(url, "Count them.", X_Session_Id=child, X_Session_Affinity=child, X_Parent_Session_Id="ses_a")
        children = [store.load_session(session_id) for session_id in ("ses_b", "ses_c", "ses_d")]
        load = Mock(side_effect=store.load_session)
        monkeypatch.setattr(store, "load_session", load)
        found = list(exported(children, ExtraNames(), None, ExportCounts(), store=store))
        assert [child.role for child in found] == ["subagent"] * 3
        assert load.mock_calls == [call("ses_a")]


def test_redundant_headers_are_omitted_and_long_ones_cut() -> None:
    headers = [
        (b"x-session-affinity", b"s"),
        (b"x-stainless-retry-count", b"0"),
        (b"thread-id", b"t" * 999),
        (b"a", b"b"),
    ]
    assert client_headers(headers, "s") == {"agent": "t" * 128}
