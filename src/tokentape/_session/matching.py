"""Decide whether two messages are the same even if their JSON differs.

Harnesses send history back with insignificant changes: reasoning left out, tool arguments re-serialized, `None` for
empty content, a list of text parts for one text, white space stripped around an assistant's content. Such messages are
the same, as are messages whose images have the same bytes. All others differ.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tokentape.chat._media import IMAGE
from tokentape.types import Message


def message_key(message: Message) -> bytes:
    """Return a 32-byte digest that is equal if two messages are the same.

    >>> a = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    >>> message_key(a) == message_key({"role": "assistant", "content": ""})
    True
    """
    content = _text(message.get("content"))
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()
    identity = [
        message.get("role"),
        content,
        [_call(call) for call in message.get("tool_calls") or ()],
        message.get("tool_call_id"),
        message.get("name"),
    ]
    return hashlib.sha256(_canonical(identity)).digest()


def reasoning_of(message: Message) -> str:
    """Return a message's reasoning from any of the three fields that clients use; "" if it has no reasoning."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def history_keys(setup: str, messages: Iterable[Message], start: bytes | None = None) -> list[bytes]:
    """Return, for each message, a digest of the setup and all messages up to and including this one.

    To continue a history, pass its last digest as `start`; `setup` is then ignored because `start` covers it.
    """
    return chained(setup, map(message_key, messages), start)


def chained(setup: str, message_keys: Iterable[bytes], start: bytes | None = None) -> list[bytes]:
    """Compute `history_keys` from the messages' keys."""
    key = hashlib.sha256(setup.encode()).digest() if start is None else start
    keys = []
    for message in message_keys:
        key = hashlib.sha256(key + message).digest()
        keys.append(key)
    return keys


def call_ids(message: Message) -> list[Any]:
    """Return the ids of a message's tool calls."""
    return [call.get("id") for call in message.get("tool_calls") or ()]


def with_name(message: Message, name: Any) -> Message:
    """Return an assistant message with another name, or without one if `name` is None; other messages unchanged."""
    if message.get("role") != "assistant" or message.get("name") == name:
        return message
    plain = {field: value for field, value in message.items() if field != "name"}
    return plain if name is None else {**plain, "name": name}


def renamed_calls(messages: Iterable[Message], names: Callable[[int, Message], Sequence[Any]]) -> list[Message]:
    """Return the messages with new ids for tool calls and for the results that refer to them.

    `names(index, message)` returns the new ids for an assistant message's calls, in order. A result answers a call in
    the last assistant message before it. Results that refer to no call there are left unchanged, as are all calls in a
    message in which two calls share an id.
    """
    renamed: list[Message] = []
    ids: dict[Any, Any] = {}
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            old, new = call_ids(message), names(index, message)
            ids = dict(zip(old, new, strict=True)) if len(set(old)) == len(old) else {}
            if ids:
                calls = [{**call, "id": ids[call.get("id")]} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        renamed.append(message)
    return renamed


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list) or not all(map(_is_part, content)):
        return content
    # Each image is replaced by its hash, and the texts between images are joined.
    runs: list[str | list[str]] = [""]
    for part in content:
        if part.get("type") == IMAGE:
            runs += [[part["sha256"]], ""]
        else:
            runs[-1] += part["text"]
    return runs[0] if len(runs) == 1 else runs


def _is_part(part: Any) -> bool:
    name = "sha256" if isinstance(part, Mapping) and part.get("type") == IMAGE else "text"
    return isinstance(part, Mapping) and isinstance(part.get(name), str)


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            # Some agents send no text for a call without arguments. vLLM reads it as an empty object too.
            return _numbers(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            return arguments
    return _numbers(arguments)


def _numbers(value: Any) -> Any:
    """Convert whole floats in a JSON value to integers, because JavaScript writes 1.0 as 1."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            # Python's json reads and writes NaN and infinities; msgspec would encode them as null.
            return {"number": str(value)}
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


def _canonical(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (ValueError, TypeError, OverflowError):
        # msgspec accepts neither integers beyond 64 bits nor lone surrogates.
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


_encoder = msgspec.json.Encoder(order="deterministic")
