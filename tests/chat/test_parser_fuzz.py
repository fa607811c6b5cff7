"""Random completions, for every available template. `python -m tests.chat.fuzz` runs more of them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.chat.conftest import load_renderer
from tests.chat.fuzz.__main__ import run
from tests.chat.fuzz.completions import TOOLS, Completions
from tests.chat.fuzz.judge import complaints
from tests.chat.fuzz.templates import Pair, pairs, syntaxes
from tokentape.chat._regions import RegionParser
from tokentape.chat._reply import Reply, ReplyDelta

FAST = (
    "calls=semicolons",
    "calls=pipe_json",
    "calls=typed_tags",
    "calls=python",
    "calls=tagged_parameters values=json",
)
"""The composed call syntaxes of the generator that `make test` uses."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair.name.startswith("small/")], ids=lambda p: p.name)
def test_random_completions_lose_no_text_and_raise_no_error(pair: Pair) -> None:
    assert run(pair, 0, 24, "1") == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAST)
def test_completions_of_a_composed_call_syntax_lose_no_text(name: str) -> None:
    assert {pair.name: run(pair, 0, 24, "1") for pair in syntaxes(name)}.popitem()[1] == {}


@pytest.mark.parametrize(
    ("name", "number"), [("calls=name_newline_json call_label=id", 947), ("calls=semicolons call_label=running", 971)]
)
def test_completions_that_once_lost_text_no_longer_do(name: str, number: int) -> None:
    assert {pair.name: run(pair, number, 1, "2") for pair in syntaxes(name)}.popitem()[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(pairs()), ids=lambda p: p.name)
def test_1000_completions_lose_no_text(pair: Pair) -> None:
    assert run(pair, 0, 1000, "2") == {}


@pytest.mark.slow
def test_completions_of_any_composed_call_syntax_lose_no_text() -> None:
    assert {pair.name: problems for pair in syntaxes() if (problems := run(pair, 0, 1000, "2"))} == {}


class Loses(RegionParser):
    """Drops the content."""

    def finish(self) -> tuple[ReplyDelta, Reply]:
        _, reply = super().finish()
        return ReplyDelta(), Reply("", reply.reasoning, reply.tool_calls, reply.reasoning_open)

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        super().feed(ids)
        return ReplyDelta()


class Cuts(RegionParser):
    """Returns text that depends on the chunking of the stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._fed = 0

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        self._fed += 1
        return super().feed(ids)

    def finish(self) -> tuple[ReplyDelta, Reply]:
        rest, reply = super().finish()
        content = f"{reply.content} {self._fed}"
        return ReplyDelta(f"{rest.content} {self._fed}", rest.reasoning, rest.tool_calls), Reply(
            content, reply.reasoning, reply.tool_calls, False
        )


class Fails(RegionParser):
    """Raises at the end."""

    def finish(self) -> tuple[ReplyDelta, Reply]:
        raise IndexError


@pytest.mark.parametrize(
    ("faulty", "complaint"), [(Loses, "lost text: zqabcdez"), (Cuts, "another reply"), (Fails, "IndexError in ")]
)
def test_faulty_parser_is_detected(faulty: type[RegionParser], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    setup = renderer.setup(TOOLS)
    ids = renderer.tokenizer.encode_plain("a zqabcdez b <|im_end|>")

    def current_complaints() -> list[str]:
        return [
            complaint_text
            for seed in range(3)
            for complaint_text in complaints(renderer, setup, ids, random.Random(seed))
        ]

    assert current_complaints() == []
    monkeypatch.setattr("tokentape.chat._renderer.RegionParser", faulty)
    assert any(text.startswith(complaint) for text in current_complaints())


def test_completions_are_the_same_in_each_run() -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    first, second = (Completions(renderer, renderer.setup(TOOLS, date="2026-11-21"), "seed") for _ in range(2))
    assert [first[n] for n in range(16)] == [second[n] for n in range(16)]
