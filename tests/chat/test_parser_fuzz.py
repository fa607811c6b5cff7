"""Completions at random, for every template at hand. `python -m tests.chat.fuzz` runs more of them."""

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
"""Of the call syntaxes that the generator composes, those that `make test` tries."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair.name.startswith("small/")], ids=lambda p: p.name)
def test_nothing_is_lost_and_nothing_fails(pair: Pair) -> None:
    assert run(pair, 0, 24, "1") == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAST)
def test_nothing_is_lost_of_a_composed_call_syntax(name: str) -> None:
    assert {pair.name: run(pair, 0, 24, "1") for pair in syntaxes(name)}.popitem()[1] == {}


@pytest.mark.parametrize(
    ("name", "number"), [("calls=name_newline_json call_label=id", 947), ("calls=semicolons call_label=running", 971)]
)
def test_completions_that_lost_something_do_no_longer(name: str, number: int) -> None:
    assert {pair.name: run(pair, number, 1, "2") for pair in syntaxes(name)}.popitem()[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(pairs()), ids=lambda p: p.name)
def test_nothing_is_lost_of_1000_completions(pair: Pair) -> None:
    assert run(pair, 0, 1000, "2") == {}


@pytest.mark.slow
def test_nothing_is_lost_of_any_composed_call_syntax() -> None:
    assert {pair.name: found for pair in syntaxes() if (found := run(pair, 0, 1000, "2"))} == {}


class Loses(RegionParser):
    """Drops the content."""

    def finish(self) -> tuple[ReplyDelta, Reply]:
        _, reply = super().finish()
        return ReplyDelta(), Reply("", reply.reasoning, reply.tool_calls, reply.reasoning_open)

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        super().feed(ids)
        return ReplyDelta()


class Cuts(RegionParser):
    """Returns what depends on how the stream is cut."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._fed = 0

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        self._fed += 1
        return super().feed(ids)

    def finish(self) -> tuple[ReplyDelta, Reply]:
        rest, reply = super().finish()
        said = f"{reply.content} {self._fed}"
        return ReplyDelta(f"{rest.content} {self._fed}", rest.reasoning, rest.tool_calls), Reply(
            said, reply.reasoning, reply.tool_calls, False
        )


class Fails(RegionParser):
    """Raises at the end."""

    def finish(self) -> tuple[ReplyDelta, Reply]:
        raise IndexError


@pytest.mark.parametrize(
    ("faulty", "complaint"), [(Loses, "lost text: zqabcdez"), (Cuts, "another reply"), (Fails, "IndexError in ")]
)
def test_a_faulty_parser_is_found_out(
    faulty: type[RegionParser], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    setup = renderer.setup(TOOLS)
    ids = renderer.tokenizer.encode_plain("a zqabcdez b <|im_end|>")

    def found() -> list[str]:
        return [one for seed in range(3) for one in complaints(renderer, setup, ids, random.Random(seed))]

    assert found() == []
    monkeypatch.setattr("tokentape.chat._renderer.RegionParser", faulty)
    assert any(one.startswith(complaint) for one in found())


def test_completions_are_the_same_in_each_run() -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    one, two = (Completions(renderer, renderer.setup(TOOLS, date="2026-11-21"), "seed") for _ in range(2))
    assert [one[n] for n in range(16)] == [two[n] for n in range(16)]
