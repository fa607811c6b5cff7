"""Generate conversations: a history, a reply, and the messages that follow it, with text that is hard to handle.

Every text ends with a word of its own, so that it can be found again in whatever a template makes of it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from tests.generator.vocabularies import HTML

Message = dict[str, Any]

_STRUCTURE = {
    *("role", "content", "user", "assistant", "system", "tool", "function", "name", "arguments", "parameters", "type"),
    *("tool_calls", "tool_call_id", "reasoning_content", "text", "image", "id", "string", "description", "properties"),
}
_PIECES = (
    "plain words",
    "two  spaces and   three",
    "tab\tand\nline",
    "    indented\n        code",
    "héé 日本語 🫠",
    "e\u0301 nfd",
    '{"a": [1, null]}',
    "if a < b: pass",
    "1. one\n2. two\n\n",
    "{{ braces }} {% block %}",
    "quote ' and \" here",
    "x=1, y=2",
)


_VALUES: Mapping[str, tuple[Any, ...]] = {
    "integer": (3, -1, 0),
    "number": (0.5, -2, 1e3),
    "boolean": (True, False),
    "null": (None,),
    "array": (["a", "b"], [], [1, None]),
    "object": ({"deep": {"er": [1, None]}}, {}),
    "string": ("word", "null", "7", "True", "a, b"),
    "['string', 'null']": (None, "word"),
}
"""Values by the type that the schema gives the parameter."""


@dataclass(frozen=True)
class Conversation:
    """One conversation of a case. The oracle's and the product's inputs are made from the same messages."""

    number: int
    tools: tuple[Message, ...]
    history: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]
    forged: tuple[str, ...]
    """Control tokens that callers' texts spell."""
    constant: str
    """A string of the template's that some text repeats; empty if none does."""

    @property
    def reply_words(self) -> list[str]:
        return words_in(self.reply)


_WORD = re.compile(r"zq[a-z]{6}")


def words_in(value: Any) -> list[str]:
    """The telling words in a message or in messages."""
    return list(dict.fromkeys(_WORD.findall(repr(value))))


def constants_of(source: str) -> list[str]:
    """Strings that a template compares with something, or looks for in something, else all of its strings."""
    tokens = [(kind, text) for _, kind, text in Environment().lex(source) if kind != "whitespace"]
    every, compared = [], []
    for n, (kind, raw) in enumerate(tokens):
        text = raw[1:-1]
        if kind != "string" or "\\" in text or len(text) < 2 or not text.strip() or text in _STRUCTURE or "%" in text:
            continue
        every.append(text)
        before = [word for _, word in tokens[max(n - 2, 0) : n]]
        after = tokens[n + 1][1] if n + 1 < len(tokens) else ""
        called = before[-1:] == ["("] and before[:1] in (["startswith"], ["endswith"], ["split"], ["find"])
        if before[-1:] in (["in"], ["=="], ["!="]) or after in ("in", "not") or called:
            compared.append(text)
    return list(dict.fromkeys(compared or every))


class ConversationMaker:
    """Makes the conversations of one case."""

    def __init__(
        self,
        rng: random.Random,
        constants: Sequence[str],
        controls: Sequence[str],
        *,
        arguments_as_text: bool,
        typed: bool,
    ) -> None:
        """`typed`: calls are written so that null differs from the word, independent of the schema."""
        self.rng = rng
        self.constants = [text for text in constants if not any(control in text for control in controls)]
        self.controls = list(controls)
        self.arguments_as_text, self.typed = arguments_as_text, typed
        self.seen: set[str] = set()
        self.calls = 0
        self.constant, self.constant_role = "", ""
        self.forged: list[str] = []
        self.forging = False

    def conversation(self, number: int) -> Conversation:
        rng = self.rng
        # The number of random draws does not depend on the template, so that a reduced case keeps its conversations.
        chance, which, role = rng.random(), rng.random(), rng.random()
        if self.constants and chance < 0.5:
            self.constant = self.constants[int(which * len(self.constants))]
            self.constant_role = (*("system",) * 3, *("user",) * 4, "tool", "assistant", "assistant")[int(role * 10)]
        self.forging = bool(self.controls) and number % 5 == 4
        drawn = [self.tool() for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        # Of two tools with one name it can't be known which a call means; providers refuse them.
        tools = tuple({tool["function"]["name"]: tool for tool in drawn}.values())
        history: list[Message] = []
        if rng.random() < 0.55:
            history.append({"role": "system", "content": self.text("system")})
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            history += self.round(tools)
        history.append(self.user())
        called = tools and rng.random() < 0.55
        if called and rng.random() < 0.35:
            # The turn comes after a result already.
            first = self.calling(tools)
            history += [first, *self.results(first)]
        reply = self.calling(tools) if called else self.answer()
        return Conversation(
            number, tools, tuple(history), reply, tuple(self.new(reply)), tuple(self.forged), self.constant
        )

    # -- messages ----------------------------------------------------------------------------------------------------

    def round(self, tools: Sequence[Message]) -> list[Message]:
        messages = [self.user()]
        if tools and self.rng.random() < 0.5:
            for _ in range(self.rng.choice((1, 1, 2))):
                turn = self.calling(tools)
                messages += [turn, *self.results(turn)]
        return [*messages, self.answer()]

    def new(self, reply: Message) -> list[Message]:
        rng = self.rng
        if reply.get("tool_calls"):
            messages = [] if rng.random() < 0.05 else self.results(reply)
            return [*messages, self.user()] if not messages or rng.random() < 0.15 else messages
        how = rng.choices(("user", "user+user", "system", "system+user"), (80, 8, 4, 8))[0]
        return [
            self.user() if role == "user" else {"role": "system", "content": self.text("system")}
            for role in how.split("+")
        ]

    def user(self) -> Message:
        if self.rng.random() < 0.1:
            return {
                "role": "user",
                "content": [
                    {"type": "text", "text": self.text("user", end=False)},
                    {"type": "text", "text": self.text("user")},
                ],
            }
        return {"role": "user", "content": self.text("user")}

    def answer(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text("assistant")}
        if self.rng.random() < 0.4:
            message["reasoning_content"] = self.text("assistant").strip()
        return message

    def calling(self, tools: Sequence[Message]) -> Message:
        rng = self.rng
        message: Message = {"role": "assistant"}
        how = rng.choice(("empty", "none", "missing", "text", "empty"))
        if how != "missing":
            message["content"] = {"empty": "", "none": None, "text": self.text("assistant").strip()}[how]
        if rng.random() < 0.3:
            message["reasoning_content"] = self.text("assistant").strip()
        message["tool_calls"] = [self.call(rng.choice(tools)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        return message

    def call(self, tool: Message) -> Message:
        rng = self.rng
        self.calls += 1
        name = tool["function"]["name"]
        shape = rng.choice(("openai", "short", "kimi", "long"))
        call_id = {
            "openai": "call_" + "".join(rng.choices("abcdefABCDEF0123456789", k=24)),
            "short": "".join(rng.choices("abcdefghijkXYZ0123456789", k=9)),
            "kimi": f"functions.{name}:{self.calls - 1}",
            "long": "chatcmpl-tool-" + "".join(rng.choices("0123456789abcdef", k=32)),
        }[shape]
        properties = tool["function"]["parameters"]["properties"]
        arguments: dict[str, Any] = {}
        for key in ("arg0", "arg1")[: rng.choice((0, 0, 1, 2))]:
            value = rng.choice(_VALUES[str(properties[key]["type"])])
            null = rng.random() < 0.25 and self.typed
            arguments[key] = None if null else value
        arguments["place"] = self.text("argument", plain=rng.random() < 0.7).strip()
        arguments_field = _json(arguments) if self.arguments_as_text else arguments
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_field}}

    def results(self, turn: Message) -> list[Message]:
        results = []
        for call in turn["tool_calls"]:
            message: Message = {"role": "tool", "tool_call_id": call["id"], "content": self.text("tool")}
            if self.rng.random() < 0.5:
                message["name"] = call["function"]["name"]
            results.append(message)
        if len(results) > 1 and self.rng.random() < 0.15:
            results.reverse()
        return results

    def tool(self) -> Message:
        types: list[Any] = ["integer", "number", "boolean", "null", "array", "object", "string", ["string", "null"]]
        properties: Message = {f"arg{n}": {"type": self.rng.choice(types)} for n in range(2)}
        properties["place"] = {"type": "string", "description": self.text("tool", plain=True)}
        name = self.rng.choice(("get", "find", "make")) + "_" + self.rng.choice(("weather", "file", "route"))
        parameters = {"type": "object", "properties": properties, "required": ["place"]}
        return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}

    # -- text --------------------------------------------------------------------------------------------------------

    def word(self) -> str:
        while True:
            word = "zq" + "".join(self.rng.choices("abcdefghijklmnoprstuvw", k=6))
            if word not in self.seen:
                self.seen.add(word)
                return word

    def text(self, role: str, *, plain: bool = False, end: bool = True) -> str:
        rng = self.rng
        if plain or rng.random() < 0.35:
            return f"say {self.word()}"
        pieces = [rng.choice(_PIECES) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.1:
            pieces.append(f"{HTML[0]}x{HTML[1]}")
        if role == self.constant_role and self.constant:
            pieces.insert(len(self.seen) % (len(pieces) + 1), self.constant)
        chance, which = rng.random(), rng.random()
        if self.forging and chance < 0.5:
            token = self.controls[int(which * len(self.controls))]
            self.forged.append(token)
            pieces.append(f"x{token}y")
        before = rng.choices(("", " ", "\n", "\n\n", "  \n"), (70, 8, 10, 6, 6))[0]
        after = rng.choices(("", " ", "\n", "\n\n", " \n "), (70, 8, 10, 6, 6))[0] if end else " "
        return before + " ".join(pieces) + " " + self.word() + after


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def conversations(
    rng_of: Callable[[str], random.Random],
    source: str,
    controls: Sequence[str],
    numbers: Iterable[int],
    *,
    arguments_as_text: bool = False,
    typed: bool = False,
) -> list[Conversation]:
    """The conversations of these numbers of a case; `rng_of` gives a generator of random numbers for a purpose."""
    constants = constants_of(source)
    return [
        ConversationMaker(
            rng_of(f"conversation {n}"), constants, controls, arguments_as_text=arguments_as_text, typed=typed
        ).conversation(n)
        for n in numbers
    ]
