"""Compare messages and texts, ignoring differences without meaning."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

from tests.generator.conversations import Message


def checks_of(reply: Message) -> list[str]:
    """The certificate's checks that a reply like this one falls under."""
    content = reply.get("content") or ""
    calls = reply.get("tool_calls") or ()
    checks = ["content"] if content else []
    if content != content.strip():
        checks.append("white space")
    if not content.isascii():
        checks.append("unicode")
    if calls:
        checks += ["call", "typed arguments", "multi-line argument"]
        values = [value for call in calls for value in loaded(call["function"]["arguments"]).values()]
        checks += ["null as text"] if "null" in values else []
        checks += ["parallel calls"] if len(calls) > 1 else []
        checks += ["content and call"] if content else []
    if reply.get("reasoning_content"):
        checks.append("reasoning and call" if calls else "reasoning")
    return checks


def composed(text: str | None) -> str:
    """Text without outer white space, in the one form of Unicode that tokenizers may bring all text to."""
    return unicodedata.normalize("NFC", text or "").strip()


def squeezed(text: str | None) -> str:
    """Text without white space, where `tokenizers` itself does not give back the white space that was encoded."""
    return "".join(composed(text).split())


def loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def reply_differs(wanted: Message, found: Message, normal: Callable[[str | None], str]) -> str:
    """What of a message did not come back, but for what `normal` takes for the same; empty if all did."""
    for key in ("content", "reasoning_content"):
        if normal(wanted.get(key)) != normal(found.get(key)):
            return f"{key} came back as {found.get(key)!r} for {wanted.get(key)!r}"

    def plain(message: Message) -> list[tuple[str, Any]]:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return [(f["name"], loaded(f["arguments"])) for f in calls]

    if normal(repr(plain(wanted))) != normal(repr(plain(found))):
        return f"calls came back as {plain(found)!r} for {plain(wanted)!r}"
    return ""
