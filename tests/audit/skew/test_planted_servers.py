"""Servers that outsiders planted: they change conversations before they render, keep old answers, hide tokens."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tests.audit.skew.fake_server import serving
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, Rendering, SkewChat
from tokentape.audit._skew.findings import Skew


class Planted(Backend):
    """A healthy side with one thing wrong."""

    def __init__(self, own: Backend) -> None:
        self._own, self.facts, self.is_server = own, own.facts, own.is_server

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return self._own.encode(texts, special=special)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return self._own.decode(sequences)

    def render(self, conversation: SkewChat) -> Rendering:
        return self._own.render(conversation)


def skews(server: Backend, own: Backend | None = None) -> list[Skew]:
    with serving("vllm", server) as url:
        found = audit(own or healthy(TINY), f"vllm:{url}")
    assert not any("not explained" in note for note in found.notes), found.notes
    return [finding for finding in found.findings if finding.severity == "skew"]


def contents(change: Callable[[str], str]) -> Callable[[SkewChat], SkewChat]:
    def changed(message: Any) -> Any:
        return (
            {**message, "content": change(message["content"])} if isinstance(message.get("content"), str) else message
        )

    return lambda chat: replace(chat, messages=tuple(map(changed, chat.messages)))


def joined(chat: SkewChat) -> SkewChat:
    made: list[Any] = []
    for message in chat.messages:
        if made and message["role"] == "user" == made[-1]["role"]:
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return replace(chat, messages=tuple(made))


def once(chat: SkewChat) -> SkewChat:
    unlike = [message for at, message in enumerate(chat.messages) if not at or message != chat.messages[at - 1]]
    return replace(chat, messages=tuple(unlike))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (contents(lambda text: unicodedata.normalize("NFKC", text)), "B renders the content of messages in Unicode"),
        (contents(str.rstrip), "B renders the content of messages without white space at its end"),
        (joined, "B renders messages of one role as one message, joined by '\\n\\n'"),
        (once, "B renders one message for equal messages in a row"),
        (lambda chat: replace(chat, messages=chat.messages[-6:]), "B renders the last 6 messages only"),
        (contents(html.unescape), "B renders the content of messages with HTML entities decoded"),
        (contents(html.escape), "B renders the content of messages with HTML characters as entities"),
    ],
    ids=["NFKC", "white space", "joined", "equal", "last", "HTML decoded", "HTML"],
)
def test_a_server_that_changes_conversations_is_named(change: Callable[[SkewChat], SkewChat], message: str) -> None:
    """They were clean (equal messages), or "the rendering differs" with hundreds of inputs left unexplained."""

    class Changes(Planted):
        def render(self, conversation: SkewChat) -> Rendering:
            return self._own.render(change(conversation))

    found = [finding for finding in skews(Changes(healthy(TINY))) if finding.probe == "render"]
    assert [finding.cause for finding in found if finding.cause.startswith(message)] == [found[0].cause]
    assert len(found) == 1


def everywhere(change: Callable[[Any], Any], value: Any) -> Any:
    value = change(value)
    if isinstance(value, Mapping):
        return {key: everywhere(change, member) for key, member in value.items()}
    return [everywhere(change, member) for member in value] if isinstance(value, list | tuple) else value


def tools(change: Callable[[Any], Any]) -> Callable[[SkewChat], SkewChat]:
    return lambda chat: replace(chat, tools=tuple(everywhere(change, chat.tools)))


def arguments(change: Callable[[Any], Any]) -> Callable[[SkewChat], SkewChat]:
    def changed(one: Any) -> Any:
        return {**one, "arguments": everywhere(change, one["arguments"])} if _has(one, "arguments") else one

    return lambda chat: replace(chat, messages=tuple(everywhere(changed, chat.messages)))


def _has(one: Any, name: str) -> bool:
    return isinstance(one, Mapping) and name in one


def without_definitions(one: Any) -> Any:
    return {key: value for key, value in one.items() if key != "$defs"} if isinstance(one, Mapping) else one


def without_optional(one: Any) -> Any:
    return {"type": "number"} if _has(one, "anyOf") else one


def whole(one: Any) -> Any:
    return int(one) if isinstance(one, float) and one.is_integer() else one


def as_double(one: Any) -> Any:
    return float(one) if isinstance(one, int) and abs(one) > 2**53 else one


def by_call(chat: SkewChat) -> SkewChat:
    runs = groupby(chat.messages, lambda message: message["role"])
    ordered = (sorted(run, key=lambda one: one.get("tool_call_id", "")) for _, run in runs)
    return replace(chat, messages=tuple(chain.from_iterable(ordered)))


def two_calls(chat: SkewChat) -> SkewChat:
    cut = [{**one, "tool_calls": one["tool_calls"][:2]} if _has(one, "tool_calls") else one for one in chat.messages]
    return replace(chat, messages=tuple(cut))


def renamed(one: Any) -> Any:
    named = _has(one, "arguments") and _has(one, "name")
    return {**one, "name": one["name"].replace("-", "_")} if named else one


def stripped(one: Any) -> Any:
    return {**one, "reasoning_content": one["reasoning_content"].strip()} if _has(one, "reasoning_content") else one


def filled(one: Any) -> Any:
    return {**one, "content": one["content"] or "None"} if _has(one, "tool_call_id") else one


def sent(change: Callable[[Any], Any]) -> Callable[[SkewChat], SkewChat]:
    return lambda chat: replace(chat, messages=tuple(everywhere(change, chat.messages)))


TOOLS, CALLS = "tool definitions are written differently", "arguments of tool calls are written differently"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tools(without_definitions), TOOLS),
        (tools(without_optional), TOOLS),
        (arguments(whole), CALLS),
        (arguments(as_double), CALLS),
        (by_call, ""),
        (two_calls, ""),
        (lambda chat: replace(chat, tools=chat.tools[:5]), ""),
        (lambda chat: replace(chat, messages=chat.messages[-20:]), ""),
        (contents(lambda text: text.replace("\u200d", "")), ""),
        (sent(renamed), ""),
        (sent(stripped), ""),
        (sent(filled), ""),
    ],
    ids=[
        "$defs",
        "optional",
        "1.0",
        "large",
        "order",
        "two calls",
        "five tools",
        "twenty messages",
        "joiners",
        "names",
        "reasoning",
        "empty results",
    ],
)
def test_a_server_that_changes_what_agents_send_is_found(change: Callable[[SkewChat], SkewChat], said: str) -> None:
    """Each was clean: no conversation had such schemas, arguments, calls, results, numbers or characters."""

    class Changes(Planted):
        def render(self, conversation: SkewChat) -> Rendering:
            return self._own.render(change(conversation))

    found = [one for one in audit(healthy(TINY), Changes(healthy(TINY))).findings if one.severity == "skew"]
    assert found
    assert all(one.probe == "render" and one.cause.startswith(said) for one in found)


def test_a_side_that_drops_an_invisible_character_is_found() -> None:
    class Drops(Planted):
        def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
            return self._own.encode([text.replace("\u00ad", "") for text in texts], special=special)

    assert [one.example for one in audit(healthy(TINY), Drops(healthy(TINY))).findings] == ["\u00ad"]


def test_a_clean_report_says_how_large_the_conversations_were() -> None:
    report = audit(healthy(TINY), Planted(healthy(TINY)))
    assert not report.skewed
    assert "conversations of more than 26 messages or 11 tools" in report.uncovered


def test_a_server_that_writes_names_of_tools_in_lower_case_is_found() -> None:
    class Lower(Planted):
        def render(self, conversation: SkewChat) -> Rendering:
            tools = tuple(
                {**tool, "function": {**tool["function"], "name": tool["function"]["name"].lower()}}
                for tool in conversation.tools
            )
            return self._own.render(replace(conversation, tools=tools))

    assert skews(Lower(healthy(TINY)))


def test_a_server_that_hides_control_tokens_when_decoding_is_found() -> None:
    class Hides(Planted):
        def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
            hidden = {token.id for token in self.facts.added.values() if token.special}
            return self._own.decode([[i for i in ids if i not in hidden] for ids in sequences])

    assert [finding.kind for finding in skews(Hides(healthy(TINY)))] == ["decoder"]


def test_server_with_stale_answers_is_not_reported_as_truncating() -> None:
    """A cut was named for each of four texts, though all other texts refute it."""

    class Keeps(Planted):
        def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
            kept = vars(self).setdefault("kept", {})
            return [
                kept.setdefault((len(text), text[:8], text[-4:], special), self._own.encode([text], special=special)[0])
                for text in texts
            ]

    with serving("vllm", Keeps(healthy(TINY))) as url:
        found = audit(healthy(TINY), f"vllm:{url}")
    assert found.skewed
    assert "truncation" not in {finding.kind for finding in found.findings}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("text(message.content)", "text(message.content).replace('/no_think', '')"),
        ("'<|im_start|>user\\n'", "'<|im_start|>user' + (' ' + message.name if message.name else '') + '\\n'"),
    ],
    ids=["a string", "a name"],
)
def test_strings_of_the_local_template_are_tried(old: str, new: str) -> None:
    """A server's template is unknown: without texts made from ours, a branch that it lacks was never taken."""
    own = base(TINY)
    assert own.template is not None
    assert old in own.template
    assert skews(healthy(TINY), own.side("A", template=own.template.replace(old, new)))
