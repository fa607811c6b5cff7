"""Sampling parameters that callers can't change, on every wire API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.engines._base import SamplingParams
from tokentape.errors import EngineUnavailable, InvalidRequest, UnsupportedParameter
from tokentape.gateway._app import create_app
from tokentape.gateway._pins import NAMES, Pins, header, parameters_set_in
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Turn

REQUESTED = {"temperature": 0.2, "top_p": 0.5}
APIS = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 7}),
    "completions": ("completions", {"prompt": "a", "max_tokens": 7}),
    "responses": ("responses", {"input": "a", "max_output_tokens": 7}),
    "anthropic": ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 7}),
}


class Gateway:
    """A gateway on a socket, its engine and its record."""

    def __init__(self, opened: ExitStack, renderer: Renderer, path: Path, pins: Pins | None) -> None:
        self.engine = ScriptedEngine(renderer, ["b<|im_end|>"] * 9, sampling=ScriptedEngine.EVERYTHING)
        self.store = opened.enter_context(SqliteStore.open(path))
        url = opened.enter_context(
            running(create_app(Turns(self.engine, renderer, self.store, pins=pins), model_id="m"))
        )
        self.http = opened.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE))

    def ask(self, api: str, session: str = "s", **more: Any) -> httpx2.Response:
        path, body = APIS[api]
        answer = self.http.post(f"/sessions/{session}/v1/{path}", json={"model": "m", **body, **more})
        assert answer.status_code == 200, answer.text
        return answer

    def turn(self, session: str = "s") -> Turn:
        return self.store.load_session(session).turns[-1]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_pinned_value_is_sampled_and_the_requested_value_is_reported(
    opened: ExitStack, renderer: Renderer, tmp_path: Path, api: str, stream: bool
) -> None:
    pins = Pins.read({"temperature": 1.0, "max_tokens": 5, "top_k": 3}, {"top_p": 0.9, "seed": 4})
    gateway = Gateway(opened, renderer, tmp_path, pins)
    answer = gateway.ask(api, **REQUESTED, stream=stream)
    (_, sampled) = gateway.engine.requests[-1]
    assert (sampled.temperature, sampled.max_tokens, sampled.top_k) == (1.0, 5, 3)
    assert (sampled.top_p, sampled.seed) == (0.5, 4)
    assert answer.headers["x-tokentape-overridden"] == "temperature=1.0;asked=0.2, max_tokens=5;asked=7"
    recorded = gateway.turn().sampling
    assert (recorded["temperature"], recorded["asked"]) == (1.0, {"temperature": 0.2, "max_tokens": 7})


def test_response_echoes_the_sampled_parameters(opened: ExitStack, renderer: Renderer, tmp_path: Path) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"temperature": 1, "max_tokens": 5}, {"top_p": 0.9}))
    response = gateway.ask("responses", temperature=0.2).json()
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (1.0, 0.9, 5)


@pytest.mark.parametrize("api", APIS)
def test_request_that_matches_the_pins_gets_no_report(
    opened: ExitStack, renderer: Renderer, tmp_path: Path, api: str
) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"temperature": 0.2}, {}))
    answer = gateway.ask(api, **REQUESTED)
    assert "x-tokentape-overridden" not in answer.headers
    assert "asked" not in gateway.turn().sampling


def test_stop_strings_are_pinned_under_each_name(opened: ExitStack, renderer: Renderer, tmp_path: Path) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"stop": "zz"}, {}))
    for api, name in (("chat", "stop"), ("anthropic", "stop_sequences")):
        answer = gateway.ask(api, f"s-{api}", **{name: ["\n\n"]})
        assert gateway.engine.requests[-1][1].stop_strings == ("zz",)
        assert answer.headers["x-tokentape-overridden"] == "stop"
        assert list(gateway.turn(f"s-{api}").sampling["asked"]["stop"]) == ["\n\n"]


def test_retry_gets_the_same_report(opened: ExitStack, renderer: Renderer, tmp_path: Path) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"temperature": 1}, {}))
    path, body = APIS["chat"]
    answers = [
        gateway.http.post(f"/sessions/s/v1/{path}", json={**body, **REQUESTED}, headers={"idempotency-key": "k"})
        for _ in range(2)
    ]
    assert answers[1].headers["x-tokentape-replayed"] == "true"
    assert answers[1].headers["x-tokentape-overridden"] == answers[0].headers["x-tokentape-overridden"]


def test_a_session_has_pins_of_its_own(opened: ExitStack, renderer: Renderer, tmp_path: Path) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"top_k": 3}, {"top_p": 0.9, "min_p": 0.1}))
    created = gateway.http.post(
        "/sessions",
        json={"session_id": "own", "pin": {"temperature": 0.7, "adapter": "a"}, "default": {"min_p": 0.2}},
    )
    assert created.status_code == 201
    gateway.ask("chat", "own", temperature=0.2)
    sampled = gateway.engine.requests[-1][1]
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.7, 3, 0.9, 0.2)
    assert (sampled.adapter, gateway.turn("own").sampling["adapter"]) == ("a", "a")
    gateway.ask("chat", "other", temperature=0.2)
    assert gateway.engine.requests[-1][1].temperature == 0.2
    assert gateway.engine.requests[-1][1].adapter is None
    assert "adapter" not in gateway.turn("other").sampling
    assert gateway.turn("other").adapter is None
    gateway.engine.fail_after, gateway.engine.error = 1, EngineUnavailable("gone")
    path, body = APIS["chat"]
    assert gateway.http.post(f"/sessions/own/v1/{path}", json=body).status_code == 503
    with Client(str(gateway.http.base_url)) as client:
        turns = client.session("own").info().turns
    assert [(turn.finish_reason, turn.adapter) for turn in turns] == [("stop", "a"), ("abort", "a")]
    assert [turn.adapter for turn in gateway.store.load_session("own").turns] == ["a", "a"]
    shown = gateway.http.get("/sessions/own").json()
    assert shown["metadata"]["tokentape_sampling"]["pin"] == {"temperature": 0.7, "adapter": "a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"pin": {"temprature": 1}}, "temprature"),
        ({"pin": {"temperature": 3}}, "temperature"),
        ({"pin": {"temperature": "1"}}, "temperature"),
        ({"default": {"top_p": 0}}, "top_p"),
        ({"pin": {"top_k": 4}}, "this gateway pins top_k to 3"),
        ({"metadata": {"tokentape_sampling": {"pin": 3}}}, "tokentape_sampling"),
    ],
)
def test_a_session_s_pins_are_checked_when_it_is_created(
    opened: ExitStack, renderer: Renderer, tmp_path: Path, body: dict[str, Any], message: str
) -> None:
    gateway = Gateway(opened, renderer, tmp_path, Pins.read({"top_k": 3}, {}))
    answer = gateway.http.post("/sessions", json={"session_id": "s", **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert gateway.http.get("/sessions/s").status_code == 404


def test_parameters_without_engine_support_can_not_be_pinned(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer, [])
    with SqliteStore.open(tmp_path) as store, pytest.raises(UnsupportedParameter, match="min_p"):
        Turns(engine, renderer, store, pins=Pins.read({"min_p": 0.1}, {}))
    Pins.read({"min_p": 0}, {}).check(engine.info)


def test_repetition_penalty_that_would_overflow_the_logits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"repetition_penalty: expected `float` >= 0\.01"):
        Pins.read({"repetition_penalty": 1e-38}, {})


def test_numeric_text_is_read_as_numbers() -> None:
    found = Pins.read({"temperature": "1.5", "top_k": "-1", "stop": "a"}, {"seed": "3"}, strict=False)
    assert found == Pins({"temperature": 1.5, "top_k": 0, "stop": ("a",)}, {"seed": 3})
    for values in ({"temperature": "hot"}, {"max_tokens": "0"}, {"n": "1"}):
        with pytest.raises(InvalidRequest, match=next(iter(values))):
            Pins.read(values, {}, strict=False)


def test_all_spellings_of_parameters_are_recognized() -> None:
    assert parameters_set_in({"max_output_tokens": 3, "stop_sequences": [], "temperature": None, "n": 3}) == {
        "max_tokens",
        "stop",
    }
    assert parameters_set_in(dict.fromkeys(NAMES, 1)) == set(NAMES)


def test_a_header_is_ascii_in_one_line() -> None:
    assert header({"stop": (("\n",), ("ü",)), "seed": (None, 3)}) == "stop, seed=3;asked=null"


def test_requests_are_unchanged_without_pins() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.2)
    assert Pins().applied(sampling, NAMES) == (sampling, {})
