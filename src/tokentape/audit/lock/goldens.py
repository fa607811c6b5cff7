"""The inputs whose ids a lockfile keeps: texts that tokenizers are known to disagree on, and conversations.

Each text stands for a way in which two loaders of one tokenizer have differed: boundaries within words of mixed case,
digits, white space, normal forms, scripts, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokentape.chat import grammar
from tokentape.chat.renderer import Renderer
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Tool

DATE = "2024-07-26"
"""What templates that print the date are shown."""

TEXTS: Mapping[str, str] = {
    "english": "Hello, world! How's it going? I'LL say it's John's, don't you'd think?",
    "mixed case": "eBay sells 5 mL at pH 7, iPhone, McDonald, getHTTPResponse, HTTPServer",
    "numbers": "2023 1234567890 12,345.67 0x1F 3.14e-10 007 v1.2.3 2026-11-21T09:30",
    "leading space": " a leading space",
    "leading spaces": "   three spaces, then  two",
    "white space": "a\tb\n\n\nc  \n \t d\r\ne \u00a0f\u2003g\u3000h   ",
    "trailing newlines": "the end\n\n",
    "code": "def f(x):\n    if x != y and x >= {'a': [1, 2.5e-3, None]}:\n\treturn -x  # ok ?",
    "json": '{"a": [true, null, -1.5e3], "b": {"c": "\\u00e9\\n"}}',
    "markup": '<div class="x">a &amp; b</div> http://a.example/b?c=1&d=%20 C:\\dir\\x',
    "punctuation": "... --- !!! ?! ($5) [x] 'y' “z” «q» a/b a_b @c #d ~e |f| x != y ,don 't",
    "latin accents": "naïve café Zürich Łódź Đorđe Ståle señor",
    "combining characters": "e\u0301 n\u0303 \u1112\u1161\u11ab\u1100\u1173\u11af \u0061\u0328\u0301",
    "compatibility characters": "\ufb01nd ｆｕｌｌ ① ² ㎏ ™ Å",
    "invisible characters": "a\u200bb\u200dc\ufeffd\u00ade\u2060f",
    "cyrillic and greek": "Привет, мир! Съешь ещё. Καλημέρα κόσμε",
    "chinese and japanese": "中文字符，標點。日本語のカタカナとひらがな",
    "korean": "안녕하세요 세계 한글",
    "arabic and hebrew": "مرحبا بالعالم ١٢٣ שלום עולם",
    "indic and thai": "हिन्दी भाषा தமிழ் বাংলা ภาษาไทย",
    "emoji": "🙂🇪🇺👩\u200d🚀👍🏽 ❤️ 🏴\u200d☠️",
    "long words": "antidisestablishmentarianism unbelievable repaid HIV rights Dormer February",
    "repetition": "aaaaaaaaaaaaaaaa        ================ \n\n\n\n\n\n ハハハハ",
    "mathematics": "∑ᵢ xᵢ² ≤ √n ∀ε>0 ∃δ: α→β ∈ ℝ³",
}
"""Texts by name, none of which spells a control token of a known model."""

_MOST_CONTROLS = 8


@dataclass(frozen=True, slots=True)
class LockGolden:
    """One input and the ids it has. `messages` is empty for a text."""

    name: str
    text: str = ""
    special: bool = False
    """Whether the tokenizer puts around the text what it does: a beginning-of-sequence token for example."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    ids: tuple[int, ...] | None = None
    """None for a conversation that the template refuses."""


def goldens_of(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> tuple[LockGolden, ...]:
    """Every input with the ids it has under this tokenizer and template."""
    tokenizer = renderer.tokenizer
    texts = [replace(one, ids=tuple(text_ids(tokenizer, one))) for one in _texts(tokenizer)]
    return (*texts, *(_frozen(renderer, template_kwargs, one) for one in _conversations()))


def text_ids(tokenizer: Tokenizer, golden: LockGolden) -> list[int]:
    """The ids of a golden text."""
    return tokenizer.encode_plain(golden.text, add_special_tokens=golden.special)


def chat_ids(renderer: Renderer, template_kwargs: Mapping[str, Any], golden: LockGolden) -> list[int] | None:
    """The ids of a golden conversation with the generation prompt; None if the template refuses it."""
    setup = grammar.setup(renderer.fingerprint, template_kwargs, tools=golden.tools, date=DATE)
    try:
        ids: list[int] = renderer.render(golden.messages, setup).ids.tolist()
    except TemplateRefused:
        return None
    return ids


def _texts(tokenizer: Tokenizer) -> Iterator[LockGolden]:
    for name, text in TEXTS.items():
        yield LockGolden(name, text)
    yield LockGolden("with special tokens", "Hello, world!", special=True)
    chosen = dict.fromkeys(
        (*tokenizer.special_tokens.values(), *(control.content for control in tokenizer.controls)),
    )
    for content in list(chosen)[:_MOST_CONTROLS]:
        yield LockGolden(f"control token {content}", f"a {content} b{content}\n{content}")


def _conversations() -> Iterator[LockGolden]:
    turns, question = grammar.TURNS, grammar.QUESTION
    one, two = grammar.result(1, " a resultword\n"), grammar.result(2, "another {resultword}")
    yield _chat("question", question)
    yield _chat("system and question", grammar.SYSTEM, question)
    yield _chat("second question", grammar.SYSTEM, grammar.EARLIER, turns["content"], grammar.NEXT)
    yield _chat("unicode and white space", grammar.NEXT, turns["unicode"], question, turns["white space"], question)
    yield _chat("reasoning", question, turns["reasoning"], grammar.NEXT)
    yield _chat("two user messages", question, grammar.NEXT)
    yield _chat("tools", grammar.SYSTEM, question, tools=True)
    yield _chat("call and result", question, turns["reasoning and call"], one, tools=True)
    yield _chat("parallel calls", question, turns["parallel calls"], one, two, tools=True)
    yield _chat("typed arguments", question, turns["typed arguments"], one, grammar.NEXT, tools=True)
    yield _chat("multi-line argument", question, turns["multi-line argument"], one, tools=True)


def _chat(name: str, *messages: Message, tools: bool = False) -> LockGolden:
    return LockGolden(f"conversation: {name}", messages=messages, tools=(grammar.TOOL,) if tools else ())


def _frozen(renderer: Renderer, template_kwargs: Mapping[str, Any], golden: LockGolden) -> LockGolden:
    """With its ids, its arguments as text where the template takes them only so."""
    ids = chat_ids(renderer, template_kwargs, golden)
    if ids is None:
        written = replace(golden, messages=tuple(map(with_text_arguments, golden.messages)))
        ids = chat_ids(renderer, template_kwargs, written)
        golden = golden if ids is None else written
    return replace(golden, ids=None if ids is None else tuple(ids))


def with_text_arguments(message: Message) -> Message:
    """The message with its calls' arguments as JSON text: some templates take them only so."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
