"""The golden inputs of a lockfile: texts on which loaders of the same tokenizer have differed, and conversations.

The texts test mixed case within words, digits, white space, normal forms, scripts and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokentape.audit._skew.backends.base import with_text_arguments
from tokentape.chat import _grammar as grammar
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Tool

TEXTS: Mapping[str, str] = json.loads(Path(__file__).with_name("goldens.json").read_text(encoding="utf-8"))
"""Texts by name. None of them spells a control token of a known model."""

_MOST_CONTROLS = 8


@dataclass(frozen=True, slots=True)
class LockGolden:
    """An input and its ids. `messages` is empty for a text."""

    name: str
    text: str = ""
    special: bool = False
    """True if the tokenizer adds special tokens to the text, such as BOS."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    ids: tuple[int, ...] | None = None
    """None for a conversation that the template refuses."""

    def written(self) -> dict[str, Any]:
        """Return the input as a lockfile stores it."""
        ids = None if self.ids is None else list(self.ids)
        if self.messages:
            tools = {"tools": list(self.tools)} if self.tools else {}
            return {"name": self.name, "messages": list(self.messages), **tools, "ids": ids}
        special = {"special": True} if self.special else {}
        return {"name": self.name, "text": self.text, **special, "ids": ids}


def goldens_of(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> tuple[LockGolden, ...]:
    """Return all golden inputs with their ids under a tokenizer and template."""
    frozen = []
    for golden in (*_texts(renderer.tokenizer), *_conversations()):
        # Some templates take the arguments of calls only as text.
        for tried in (golden, replace(golden, messages=tuple(map(with_text_arguments, golden.messages)))):
            ids = golden_ids(renderer, template_kwargs, tried)
            if ids is not None:
                golden = replace(tried, ids=ids)
                break
        frozen.append(golden)
    return tuple(frozen)


def golden_ids(renderer: Renderer, template_kwargs: Mapping[str, Any], golden: LockGolden) -> tuple[int, ...] | None:
    """Return the ids of a text, or of a conversation with its generation prompt; None if the template refuses it."""
    if not golden.messages:
        return tuple(renderer.tokenizer.encode_plain(golden.text, add_special_tokens=golden.special))
    setup = grammar.setup(renderer.fingerprint, template_kwargs, tools=golden.tools, date=grammar.DATE)
    try:
        return tuple(renderer.render(golden.messages, setup).ids.tolist())
    except TemplateRefused:
        return None


def _texts(tokenizer: Tokenizer) -> Iterator[LockGolden]:
    for name, text in TEXTS.items():
        yield LockGolden(name, text)
    yield LockGolden("with special tokens", "Hello, world!", special=True)
    chosen = dict.fromkeys((*tokenizer.special_tokens.values(), *(control.content for control in tokenizer.controls)))
    for content in list(chosen)[:_MOST_CONTROLS]:
        yield LockGolden(f"control token {content}", f"a {content} b{content}\n{content}")


def _conversations() -> Iterator[LockGolden]:
    turns, system, question, then = grammar.TURNS, grammar.SYSTEM, grammar.QUESTION, grammar.NEXT
    one, two = grammar.result(1, " a resultword\n"), grammar.result(2, "another {resultword}")
    plain: dict[str, tuple[Message, ...]] = {
        "question": (question,),
        "system and question": (system, question),
        "second question": (system, grammar.EARLIER, turns["content"], then),
        "unicode and white space": (then, turns["unicode"], question, turns["white space"], question),
        "reasoning": (question, turns["reasoning"], then),
        "two user messages": (question, then),
    }
    calling: dict[str, tuple[Message, ...]] = {
        "tools": (system, question),
        "call and result": (question, turns["reasoning and call"], one),
        "parallel calls": (question, turns["parallel calls"], one, two),
        "typed arguments": (question, turns["typed arguments"], one, then),
        "multi-line argument": (question, turns["multi-line argument"], one),
    }
    for tools, conversations in (((), plain), ((grammar.TOOL,), calling)):
        for name, messages in conversations.items():
            yield LockGolden(f"conversation: {name}", messages=messages, tools=tools)
