from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from tokentape.chat._parse import SafeParser
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply, ReplyDelta, ToolCall
from tokentape.demo import MODEL


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@dataclass
class Faulty:
    """A parser that returns the text as content, until it fails."""

    feeds: list[ReplyDelta | Exception]
    end: Callable[[], tuple[ReplyDelta, Reply]]

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        outcome = self.feeds.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def finish(self) -> tuple[ReplyDelta, Reply]:
        return self.end()


def fails() -> tuple[ReplyDelta, Reply]:
    raise RecursionError("secret text")


def parse(renderer: Renderer, faulty: Faulty, *texts: str) -> tuple[str, Reply]:
    """Return a streaming client's text at the end, and the reply."""
    parser = SafeParser(faulty, renderer.tokenizer, frozenset(renderer.tokenizer.eos_ids), ())
    content = "".join(parser.feed(renderer.tokenizer.encode_plain(text)).content for text in texts)
    rest, reply = parser.finish()
    return content + rest.content, reply


def test_a_parser_that_fails_at_once_leaves_the_text_as_content(renderer: Renderer) -> None:
    streamed, reply = parse(renderer, Faulty([IndexError(), ReplyDelta("never")], fails), "one ", "two<|im_end|>")
    assert reply.content == streamed == "one two"
    assert reply.problem.startswith("IndexError in test_safe_parser.py:")


def test_parser_that_fails_at_the_end_adds_the_missing_text(renderer: Renderer) -> None:
    streamed, reply = parse(renderer, Faulty([ReplyDelta("one "), ReplyDelta()], fails), "one ", "two<|im_end|>")
    assert reply.content == streamed == "one two"
    assert "RecursionError" in reply.problem


def test_reasoning_that_was_streamed_stays(renderer: Renderer) -> None:
    streamed, reply = parse(renderer, Faulty([ReplyDelta(reasoning="hm"), IndexError()], fails), "<think>hm", " so")
    assert reply.reasoning == "hm"
    assert reply.content == streamed == "<think>hm so"


@pytest.mark.parametrize(
    "delta",
    [
        ReplyDelta(5),  # type: ignore[arg-type]
        ReplyDelta(reasoning=["a"]),  # type: ignore[arg-type]
        ReplyDelta("\ud800"),
        ReplyDelta(tool_calls=(ToolCall("f", {"a": 1}, "ok", (0, 1)),)),  # type: ignore[arg-type]
    ],
)
def test_a_reply_that_is_no_text_counts_as_a_failure(renderer: Renderer, delta: ReplyDelta) -> None:
    def end() -> tuple[ReplyDelta, Reply]:
        return delta, Reply(delta.content, delta.reasoning, delta.tool_calls, False)

    streamed, reply = parse(renderer, Faulty([ReplyDelta()], end), "one")
    assert reply.content == streamed == "one"
    assert reply.problem
    assert not reply.tool_calls


def test_the_problem_does_not_quote_the_completion(renderer: Renderer) -> None:
    assert "secret" not in parse(renderer, Faulty([ReplyDelta()], fails), "secret")[1].problem


def test_streamed_text_wins_over_a_different_reply(renderer: Renderer) -> None:
    call = ToolCall("add", "{}", "ok", (0, 1), "id")
    other = Reply("something else", "", (), reasoning_open=False)
    faulty = Faulty([ReplyDelta("one", tool_calls=(call,))], lambda: (ReplyDelta(" two"), other))
    streamed, reply = parse(renderer, faulty, "one two")
    assert reply.content == streamed == "one two"
    assert reply.tool_calls == (call,)
    assert "differs" in reply.problem


def test_a_reply_that_agrees_has_no_problem(renderer: Renderer) -> None:
    agreeing = Reply("one two", "", (), reasoning_open=False)
    faulty = Faulty([ReplyDelta("one")], lambda: (ReplyDelta(" two"), agreeing))
    assert parse(renderer, faulty, "one two")[1] == agreeing
