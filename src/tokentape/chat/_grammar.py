"""Generate the conversations for certificates: roles, calls, reasoning, white space, unicode.

Every text contains a unique word, so that a rendering shows whether a template repeats, moves or drops a text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from tokentape.chat._assistant_format import AssistantFormat
from tokentape.chat._compared_strings import HIGHEST, NOTHING_COMPARED, Compared
from tokentape.types import Message, Setup, Tool

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a toolword.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object"},
            },
            "required": ["place"],
        },
    },
}

PLAIN_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a toolword.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
    },
}
"""A tool for templates that fail on some valid schemas, such as an object without described properties."""

SYSTEM: Message = {"role": "system", "content": "You are a systemword."}
QUESTION: Message = {"role": "user", "content": "What is a questionword?"}
EARLIER: Message = {"role": "user", "content": "And an earlierword?"}
NEXT: Message = {"role": "user", "content": "  then a nextword\n\n"}

DATE = "2024-07-26"


class Conversation(NamedTuple):
    """A conversation in which new messages follow a turn."""

    history: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages."""
        return (*self.history, self.reply, *self.new)


_WORDS = ("toolword", "systemword", "questionword", "earlierword")


def setup(
    fingerprint: str, template_kwargs: Mapping[str, Any], *, tools: tuple[Tool, ...] = (TOOL,), date: str = DATE
) -> Setup:
    """Return a setup for certificates. By default, it has one tool with a parameter of each type."""
    return Setup(tools, template_kwargs, date, fingerprint)


def call(n: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `n`th call to `TOOL`, with an id that every template accepts: nine letters and digits."""
    return _call(f"call0000{n}", "measure", arguments)


def result(n: int, content: str) -> Message:
    """Return the tool's result for `call(n)`."""
    return _result(f"call0000{n}", content, "measure")


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _result(call_id: str, content: str, name: str = "look_up") -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def _turn(content: str | None, calls: Sequence[dict[str, Any]] = (), reasoning: str | None = None) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


_CALL = call(1, {"place": "here"})
_SECOND_CALL = call(2, {"place": "there"})
_EVERY_TYPE = {
    "place": "42",
    "count": -3,
    "ratio": 0.5,
    "exact": True,
    "tags": ["a b", "é日本"],
    "options": {"deep": {"er": [1, None]}, "no": False},
}


def accepted(messages: Sequence[Message], form: AssistantFormat) -> tuple[Message, ...]:
    """Return `messages`, after an earlier exchange if templates with this format refuse a single question."""
    return after_exchange(messages) if form.needs_earlier else tuple(messages)


def after_exchange(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with an earlier exchange after their leading system and developer messages."""
    start = next((n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    return (*messages[:start], EARLIER, _turn("A pastanswer."), *messages[start:])


LATER = after_exchange((QUESTION,))
"""A question after an earlier exchange."""

TURNS: Mapping[str, Message] = {
    "content": _turn("An answerword."),
    "leading newline": _turn("\n\nAn answerword."),
    "white space": _turn("  an answerword\n\nwith  space \n"),
    "unicode": _turn("réponse 日本語 🫠 é́ \u200b end"),
    "code": _turn('```python\nif a < b and "x" in {1: [2]}:\n\tpass\n```'),
    "reasoning": _turn("An answerword.", reasoning="A thoughtword.\nMore."),
    "call": _turn("", [_CALL]),
    "content and call": _turn("An answerword.", [_CALL]),
    "reasoning and call": _turn("", [_CALL], "A thoughtword."),
    "parallel calls": _turn("", [_CALL, _SECOND_CALL]),
    "no arguments": _turn("", [call(1, {})]),
    "typed arguments": _turn("", [call(1, _EVERY_TYPE)]),
    "null argument": _turn("", [call(1, {"place": None, "count": 3})]),
    "null as text": _turn("", [call(1, {"place": "null"})]),
    "multi-line argument": _turn("", [call(1, {"place": 'line one\n\n  "two" \\ <three>\n'})]),
    "quotes in an argument": _turn("", [call(1, {"place": 'say("it\'s", f=\'x\', g="y")'})]),
}

THREE_CALLS = _turn("", [_CALL, _SECOND_CALL, call(3, {"place": "nowhere"})])
"""For templates that count calls: the text between the first two calls may differ from that between the next two."""


def with_names_in_ids(message: Message) -> Message:
    """Return the message with each call's name in its id, for a template that writes the id in place of the name."""
    calls = [
        {**call, "id": f"functions.{call['function']['name']}:{n}"}
        for n, call in enumerate(message.get("tool_calls", ()))
    ]
    return {**message, "tool_calls": calls} if calls else message


_ANSWERS = (TURNS["content"], TURNS["reasoning"], TURNS["white space"], TURNS["leading newline"], _turn(""))
_CALLING = (TURNS["call"], TURNS["content and call"], TURNS["reasoning and call"], _turn(None, [_CALL]))
_CALLING_TWICE = (
    TURNS["parallel calls"],
    _turn("An answerword.", [_CALL, _SECOND_CALL], "A thoughtword."),
    _turn(None, [_CALL, _SECOND_CALL]),
)

_RESULT, _SECOND = result(1, " a resultword\n"), result(2, "another {resultword}")

CONTINUATIONS: Mapping[str, tuple[tuple[Message, ...], tuple[Message, ...]]] = {
    "user": (_ANSWERS, (NEXT,)),
    "tool": (_CALLING, (_RESULT,)),
    "tools": (_CALLING_TWICE, (_RESULT, _SECOND)),
    "tool+user": (_CALLING, (_RESULT, NEXT)),
    "tools+user": (_CALLING_TWICE, (_RESULT, _SECOND, NEXT)),
    "system": (_ANSWERS, ({"role": "system", "content": "A newrulesword."},)),
    "system+user": (_ANSWERS, ({"role": "system", "content": "A newrulesword."}, NEXT)),
    "user+user": (_ANSWERS, (NEXT, {"role": "user", "content": "and a lastword"})),
}
"""Maps each kind of new messages to the turns that they may follow, and the messages."""

NO_TOOLS, NO_SYSTEM = "/no-tools", "/no-system"

NAMES = (
    *CONTINUATIONS,
    *(name + NO_TOOLS for name in CONTINUATIONS if not name.startswith("tool")),
    *(name + NO_TOOLS + NO_SYSTEM for name in CONTINUATIONS if not name.startswith("tool")),
)
"""Names of all continuations that are tried. Templates that move tools or system text into the last user message
append only if a conversation has neither, so conversations without tools and system messages have separate names."""


def continuation_name(new_messages: Sequence[Message], *, tools: bool = True, system: bool = True) -> str:
    """Return the name of the continuation for these new messages.

    It consists of their roles (`tools` for adjacent tool results), then `/no-tools` for a conversation without tools,
    followed by `/no-system` if the conversation also has no system message.

    >>> continuation_name([{"role": "tool"}, {"role": "tool"}, {"role": "user"}])
    'tools+user'
    >>> continuation_name([{"role": "user"}], tools=False, system=False)
    'user/no-tools/no-system'
    """
    names: list[str] = []
    for message in new_messages:
        if message["role"] == "tool" and names and names[-1] in ("tool", "tools"):
            names[-1] = "tools"
        else:
            names.append(message["role"])
    name = "+".join(names)
    if not tools:
        name += NO_TOOLS if system else NO_TOOLS + NO_SYSTEM
    return name


def answers(reply: Message, new_messages: Sequence[Message]) -> bool:
    """Return whether the new messages have as many tool results as the reply has calls, as in `CONTINUATIONS`."""
    answered = [message for message in new_messages if message["role"] == "tool"]
    return len(reply.get("tool_calls") or ()) == len(answered)


def _past_turn(*calls: tuple[str, str], reasoning: str | None = None, name: str = "look_up") -> Message:
    """Return a turn in a history that looks cities up. Each of `calls` is (id, city)."""
    return _turn("", [_call(call_id, name, {"city": city}) for call_id, city in calls], reasoning)


def _past(call_id: str, *others: str) -> tuple[Message, ...]:
    """Return a user message, a call, two calls for each id in `others`, all with their results, and an answer."""
    return (
        {"role": "user", "content": "Look a pastword up."},
        _past_turn((call_id, "Bern"), reasoning="A pastthought."),
        _result(call_id, "Rain over a pastresult."),
        *(
            message
            for n, other in enumerate(others)
            for message in (
                _past_turn((other, f"Oslo {n}"), (other[::-1], f"Lima {n}")),
                _result(other, f"Sun {n}"),
                _result(other[::-1], f"Snow {n}"),
            )
        ),
        _turn("A pastanswer.", reasoning="Another pastthought."),
    )


AFTER_RESULT: tuple[Message, ...] = (
    QUESTION,
    _past_turn(("Wn6gK4tBd", "Rome"), reasoning="A pastthought."),
    _result("Wn6gK4tBd", "Hail"),
)
"""A history that ends with a tool's result."""


# Turns repeat no id, name or text from their histories: a template that looks one up would otherwise write the same
# text with and without the history. The ids have several formats because some templates accept only one.
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    (QUESTION,),
    (SYSTEM, QUESTION),
    (SYSTEM, *LATER),
    (*_past("Xq3vT8nLw"), QUESTION),
    (SYSTEM, *_past("Rk2dY7mPz", "Hc5bJ9sGf"), QUESTION),
    AFTER_RESULT,
    (SYSTEM, *AFTER_RESULT),
)


_OTHER_IDS = tuple((*_past(call_id), QUESTION) for call_id in ("call_7f0e1b9d2c", "functions.look_up:0", "0"))
"""Histories with ids that some templates refuse. Each is tried with only one turn."""


_ENDS_BLANK: Message = {"role": "user", "content": "What is a questionword?\n"}
"""A question that ends with white space. If no control token follows, its white space may merge with the turn's."""


@functools.lru_cache(maxsize=256)
def histories_with(words: str, keys: Sequence[str] = (), rounds: int = 0) -> tuple[tuple[Message, ...], ...]:
    """Return histories with `words`, which a template compares with texts, in messages with each role and in calls.

    The words are either the whole text, or both its beginning and its end. Calls also have arguments with these `keys`.
    With more than 2 `rounds`, a history has the words at its beginning and at its end, after so many exchanges.
    """
    around = f"{words} pastword {words}"
    answer = _turn("A pastanswer.")
    histories = [
        history
        for text in (words, around)
        for history in (
            ({"role": "system", "content": text}, EARLIER, answer, QUESTION),
            ({"role": "user", "content": text}, answer, QUESTION),
            (EARLIER, _turn(text), QUESTION),
            ({"role": "user", "content": text},),
        )
    ]
    question, called = _past("Xq3vT8nLw")[:2]
    name = words if words.isidentifier() else "look_up"
    saying = _turn(
        "", [_call("Xq3vT8nLw", name, {words or "city": around, **dict.fromkeys((*keys, "place"), words)})], words
    )
    answered = (question, saying, _result("Xq3vT8nLw", around, name))
    spoken = (question, {**saying, "content": words}, answered[2], _turn(around), QUESTION)
    exchanges = (EARLIER, answer) * rounds
    long = ((histories[-1][0], answer, *exchanges, *spoken),) if rounds > 2 else ()
    return (*histories, (question, called, _result("Xq3vT8nLw", words)), answered, spoken, *long)


UNUSUAL_TEXTS = ("42", "A LINE\n- 7 of @b, #c at d://e? `f` {É}!!!", "")
"""Texts with a number, capitals, a line break, signs and a letter outside ASCII, of even and odd length, and no text.

A template may ask for these by other means than a comparison with a constant, such as `isdigit`, `int`, `upper`,
`count` or `length % 2`."""


def saying(turn: Message, words: str, keys: Sequence[str] = ()) -> Message:
    """Return the turn with `words` as its content, as its reasoning and in the arguments of its calls."""
    calls = [
        _call(call["id"], call["function"]["name"], {words: words, **dict.fromkeys(keys, words), "place": "here"})
        for call in turn.get("tool_calls", ())
    ]
    return _turn("" if calls else words, calls, words)


SAMPLES: tuple[tuple[Message, ...], ...] = (
    (SYSTEM, QUESTION, TURNS["reasoning"], EARLIER),
    (QUESTION, TURNS["call"], _RESULT),
    (QUESTION,),
)
"""Conversations that are rendered to find the tokens that a template writes."""


@functools.lru_cache(maxsize=8)
def _long_histories(rounds: int, divisor: int) -> tuple[tuple[Message, ...], ...]:
    """Return histories with `rounds` answers, with `rounds` calls, and with `rounds` calls since the last question.

    A template may count any of these. For one that does something every so many turns, there are histories with each of
    `divisor` numbers of answers and of calls.
    """
    histories = []
    for count in range(rounds, rounds + divisor):
        ids = [f"pastid{n:03d}" for n in range(count)]
        answered = [(EARLIER, _turn("A pastanswer.")) for _ in range(count)]
        called = [_past(call_id) for call_id in ids]
        histories += [(*chain.from_iterable(turns), QUESTION) for turns in (answered, called)]
        steps = [(_past_turn((call_id, "Rome")), _result(call_id, "Hail")) for call_id in ids]
        histories.append((QUESTION, *chain.from_iterable(steps)))
    return tuple(histories)


_INSTRUCTED: tuple[tuple[Message, ...], ...] = tuple(
    (*LATER[:-1], {"role": role, "content": "A laterrulesword."}, QUESTION) for role in ("system", "developer")
)
"""Histories with instructions within the conversation, which a template may repeat."""


def _with_arguments(arguments: Mapping[str, Any]) -> tuple[Message, ...]:
    called = _turn("", [_call("Vt5xF1kQe", "look_up", arguments)])
    return (EARLIER, called, _result("Vt5xF1kQe", "Fair"), _turn("A pastanswer."), QUESTION)


_NAMED: tuple[Message, ...] = ({**EARLIER, "name": "Ada"}, _turn("A pastanswer."), {**QUESTION, "name": "Bob"})
"""A history in which users have names."""


def _with_name(name: str) -> tuple[tuple[Message, ...], ...]:
    """Return histories in which a tool, or a user, has this name."""
    used = (EARLIER, _past_turn(("Pw4sD6hKc", "Pisa"), name=name), _result("Pw4sD6hKc", "Fog", name))
    return (
        (*used, _turn("A pastanswer."), QUESTION),
        used,
        ({**EARLIER, "name": name}, _turn("A pastanswer."), QUESTION),
    )


def conversations(name: str, compared: Compared = NOTHING_COMPARED) -> Iterator[Conversation]:
    """Yield the conversations to test a continuation with: usual histories, shortest first, then others.

    The others have unusual ids or last tokens, system messages in the middle, names that the template tests for, or
    more turns than any number that it compares a count with. `_long_histories` covers the modulo operator.
    """
    turns, new = CONTINUATIONS[name.partition("/")[0]]
    for history in sorted(_HISTORIES, key=len):
        if NO_SYSTEM in name and SYSTEM in history:
            continue
        for turn in turns:
            yield Conversation(history, turn, new)
    instructed = () if NO_SYSTEM in name else _INSTRUCTED
    long = _long_histories(max(3, min(compared.number, HIGHEST) + 1), compared.divisor)
    named = [history for name in compared.names for history in _with_name(name)]
    # With six arguments, then with each type of value for the keys that the template reads.
    values = (None, True, 0.5, ["b"], {"k": "v"}, compared.number) if compared.keys else ()
    calls = [
        _with_arguments(dict.fromkeys("abcdef", 1)),
        *(_with_arguments(dict.fromkeys(compared.keys, value)) for value in values),
    ]
    for history in (*_OTHER_IDS, (_ENDS_BLANK,), *instructed, _NAMED, *calls, *named, *long):
        yield Conversation(history, turns[0], new)


def with_calls_unanswered(name: str) -> Iterator[Conversation]:
    """Yield conversations with unanswered calls, unless the continuation has tool results."""
    turns, new = CONTINUATIONS[name.partition("/")[0]]
    if turns is _ANSWERS:
        for history in ((QUESTION,), (SYSTEM, QUESTION)):
            for turn in (*_CALLING, *_CALLING_TWICE):
                yield Conversation(history, turn, new)


def is_clean(turn: Message) -> bool:
    """Return whether a turn has content without white space at its ends, or calls and no content."""
    content = turn.get("content") or ""
    return content == content.strip() and bool(content or turn.get("tool_calls"))


def words_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the marker words that occur in the messages or tools."""
    text = json.dumps(list(messages))
    return [word for word in _WORDS if word in text]


LOSSES: tuple[tuple[str, str, tuple[Message, ...]], ...] = (
    ("system messages", "systemword", (SYSTEM, QUESTION)),
    ("developer messages", "developerword", ({"role": "developer", "content": "A developerword."}, QUESTION)),
    ("tools", "toolword", (QUESTION,)),
    ("tool calls", "here", (QUESTION, TURNS["call"], _RESULT)),
    ("tool results", "resultword", (QUESTION, TURNS["call"], _RESULT)),
    ("content beside a tool call", "answerword", (QUESTION, TURNS["content and call"], _RESULT)),
    ("reasoning beside a tool call", "thoughtword", (QUESTION, TURNS["reasoning and call"], _RESULT)),
    ("reasoning of turns before a user message", "thoughtword", (QUESTION, TURNS["reasoning"], NEXT)),
    ("white space around a user's text", "  then a nextword\n\n", (NEXT,)),
    (
        "white space around an assistant's text",
        "  an answerword\n\nwith  space \n",
        (QUESTION, TURNS["white space"], NEXT),
    ),
    ("the second of two user messages", "nextword", (QUESTION, NEXT)),
)
"""What a template may leave out: (description, a text that is then missing, messages)."""


def conversations_with(text: str) -> Iterator[list[Message]]:
    """Yield conversations that each have `text` in a different caller-controlled field."""
    yield [{"role": "system", "content": text}, QUESTION]
    yield [{"role": "user", "content": text}]
    yield [{"role": "user", "content": [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]}]
    yield [QUESTION, _turn(f"a{text}b"), NEXT]
    yield [QUESTION, _turn("", [call(1, {"place": text})]), result(1, text)]
