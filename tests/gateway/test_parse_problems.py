"""Completions on which a parser fails: committed, returned as content, replayed, counted, and shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_metrics import scrape
from tests.waiting import PATIENCE
from tokentape.chat._overrides import Overrides
from tokentape.chat._parse import ReplyParser
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply, ReplyDelta
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Setup

pytestmark = pytest.mark.usefixtures("quick_models")

TEXT = "<think>\nhm\n</think>\n\nWell, break it.<|im_end|>"
CONTENT = TEXT.removesuffix("<|im_end|>")
PROBLEM = "IndexError in test_parse_problems.py"
KEY = {"idempotency-key": "k"}


class Breaking:
    """Parses like the derived parser until its ids hold `at`, or to the end, and then fails."""

    def __init__(self, derived: ReplyParser, at: int | None) -> None:
        self._derived, self._at = derived, at

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        fed = list(ids)
        if self._at in fed:
            raise IndexError("secret text")
        return self._derived.feed(fed)

    def finish(self) -> tuple[ReplyDelta, Reply]:
        if self._at is None:
            raise IndexError("secret text")
        return self._derived.finish()


class Broken:
    """A gateway with a parser that fails, to be stopped and started again."""

    def __init__(self, renderer: Renderer, directory: Path, where: str) -> None:
        # Behind the reasoning, or at the end.
        at = renderer.tokenizer.encode_plain(" break")[0] if where == "within" else None

        def parser(setup: Setup, stop_strings: Any) -> ReplyParser:
            return Breaking(renderer.derived_parser(setup, stop_strings), at)

        self._renderer = Renderer(renderer.tokenizer, renderer.template, Overrides("breaking", parser=parser))
        self._directory = directory
        self.engine = ScriptedEngine(renderer, [TEXT] * 4, sampling=ScriptedEngine.EVERYTHING)
        self._opened = ExitStack()
        self.start()

    def start(self) -> None:
        self.store = self._opened.enter_context(SqliteStore.open(self._directory))
        turns = Turns(self.engine, self._renderer, self.store, limits=Limits(retry_grace=60.0))
        self.url = self._opened.enter_context(running(create_app(turns, model_id="m")))

    def stop(self) -> None:
        self._opened.close()

    def ask(self, **more: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, **more}
        url = f"{self.url}/sessions/s/v1/chat/completions"
        answer = httpx2.post(url, json=body, headers=KEY, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(params=["within", "at the end"])
def broken(renderer: Renderer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Broken]:
    gateway = Broken(renderer, tmp_path, request.param)
    yield gateway
    gateway.stop()


def streamed(text: str) -> str:
    """Return all text of a stream, of the reasoning and of the content."""
    message = {"reasoning_content": "", "content": ""}
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            for choice in httpx2.Response(200, text=line.removeprefix("data: ")).json()["choices"]:
                for key in message:
                    message[key] += choice["delta"].get(key) or ""
    return message["reasoning_content"] + message["content"]


def test_the_text_is_returned_and_all_ids_are_recorded(broken: Broken) -> None:
    message = broken.ask().json()["choices"][0]["message"]
    (turn,) = broken.store.load_session("s").turns
    assert turn.completion_ids.tolist() == broken._renderer.tokenizer.encode_plain(TEXT)
    assert turn.sampling["parse_problem"].startswith(PROBLEM)
    assert "secret" not in turn.sampling["parse_problem"]
    assert CONTENT in message["content"]


def test_stream_delivers_the_unparsed_text(broken: Broken) -> None:
    assert CONTENT in streamed(broken.ask(stream=True).text)
    assert len(broken.store.load_session("s").turns) == 1


def test_each_choice_is_committed(broken: Broken) -> None:
    choices = broken.ask(n=2).json()["choices"]
    turns = broken.store.load_session("s").turns
    assert [CONTENT in choice["message"]["content"] for choice in choices] == [True, True]
    assert [turn.sampling["parse_problem"].startswith(PROBLEM) for turn in turns] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_repeated_call_gets_the_same_reply(broken: Broken, stream: bool, restart: bool) -> None:
    first = broken.ask(stream=stream)
    if restart:
        broken.stop()
        broken.start()
    again = broken.ask(stream=stream)
    assert again.headers["x-tokentape-replayed"] == "true"
    if stream:
        assert streamed(again.text) == streamed(first.text)
    else:
        assert again.json() == first.json()
    assert len(broken.engine.requests) == 1


def test_session_continues_after_a_parse_problem(broken: Broken) -> None:
    message = broken.ask().json()["choices"][0]["message"]
    more = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "and?"}]
    url = f"{broken.url}/sessions/s/v1/chat/completions"
    assert httpx2.post(url, json={"messages": more}, timeout=PATIENCE).status_code == 200
    turns = broken.store.load_session("s").turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None)]


def test_parse_problem_is_counted_and_shown(broken: Broken) -> None:
    broken.ask(n=2)
    shown = httpx2.get(f"{broken.url}/sessions/s", timeout=PATIENCE).json()
    assert [turn["parse_problem"].startswith(PROBLEM) for turn in shown["turns"]] == [True, True]
    assert scrape(broken.url)["parse_problems_total",] == 2


def test_a_parser_that_does_not_fail_is_not_counted(renderer: Renderer, tmp_path: Path) -> None:
    gateway = Broken(renderer, tmp_path, "within")
    gateway.engine.replies[:] = ["fine<|im_end|>"]
    gateway.ask()
    shown = httpx2.get(f"{gateway.url}/sessions/s", timeout=PATIENCE).json()
    assert [turn["parse_problem"] for turn in shown["turns"]] == [None]
    assert scrape(gateway.url)["parse_problems_total",] == 0
    gateway.stop()
