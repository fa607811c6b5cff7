"""The smallest input that still fails: delta debugging (Zeller and Hildebrandt, 2002) over characters and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokentape.audit.skew.sides.base import SkewChat

_Part = TypeVar("_Part")
_OF_TOOLS = ("type", "function", "name")


def smallest(parts: Sequence[_Part], fails: Callable[[Sequence[_Part]], bool]) -> Sequence[_Part]:
    """A part of a sequence that fails and of which no single element can be left out.

    `fails` must hold for the whole. It is asked O(n log n) times for one culprit, O(n^2) at worst.

    >>> smallest("a long text with an x in it", lambda text: "x" in text)
    'x'
    """
    pieces = 2
    while len(parts) >= 2:
        size = -(-len(parts) // pieces)
        starts = range(0, len(parts), size)
        for start in starts:
            kept = parts[start : start + size]
            if len(kept) < len(parts) and fails(kept):
                parts, pieces = kept, 2
                break
        else:
            for start in starts:
                rest = _without(parts, start, start + size)
                if fails(rest):
                    parts, pieces = rest, max(pieces - 1, 2)
                    break
            else:
                if size == 1:
                    return parts
                pieces = min(2 * pieces, len(parts))
    return parts


def _without(parts: Any, start: int, end: int) -> Any:
    return parts[:start] + parts[end:]


def smallest_text(text: str, differs: Callable[[str], bool]) -> str:
    """The smallest part of a text on which two sides differ: by lines first, then by characters."""
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        text = "".join(smallest(tuple(lines), lambda kept: differs("".join(kept))))
    return str(smallest(text, lambda kept: differs(str(kept))))


def smallest_conversation(conversation: SkewChat, differs: Callable[[SkewChat], bool]) -> SkewChat:
    """The smallest conversation on which two sides differ: fewer tools, messages, fields, and shorter texts."""
    for fewer in ({"generate": False}, {"tools": ()}):
        tried = replace(conversation, **fewer)
        if tried != conversation and differs(tried):
            conversation = tried
    messages = smallest(conversation.messages, lambda kept: differs(replace(conversation, messages=tuple(kept))))
    conversation = replace(conversation, messages=tuple(messages))
    for at in range(len(conversation.messages)):
        conversation = _smaller_message(conversation, at, differs)
    with_fewer = conversation
    # A tool without its name or kind is none: servers would fill in what is missing, which is another difference.
    tools = _smaller_value(
        conversation.tools, lambda tools: differs(replace(with_fewer, tools=tuple(tools))), _OF_TOOLS
    )
    return replace(conversation, tools=tuple(tools))


def _smaller_message(conversation: SkewChat, at: int, differs: Callable[[SkewChat], bool]) -> SkewChat:
    messages = conversation.messages

    def made(message: Mapping[str, Any]) -> SkewChat:
        return replace(conversation, messages=(*messages[:at], message, *messages[at + 1 :]))

    role = messages[at]["role"]
    rest = {key: value for key, value in messages[at].items() if key != "role"}
    smaller = _smaller_mapping(rest, lambda some: differs(made({"role": role, **some})), kept=("content",))
    return made({"role": role, **smaller})


def _smaller_value(value: Any, differs: Callable[[Any], bool], kept: tuple[str, ...] = ()) -> Any:
    """A smaller value of the same shape: strings shorter, lists and mappings with fewer members but those `kept`."""
    if isinstance(value, str):
        if differs(""):
            return ""
        return value if len(value) < 2 else str(smallest(value, lambda kept: differs(str(kept))))
    if isinstance(value, list | tuple):
        if value and differs([]):
            return []
        few = list(value) if len(value) < 2 else list(smallest(list(value), lambda some: differs(list(some))))
        for at in range(len(few)):
            few = _with_smaller_member(few, at, differs, kept)
        return few
    if isinstance(value, Mapping):
        return _smaller_mapping(value, differs, kept)
    return value


def _with_smaller_member(
    members: list[Any], at: int, differs: Callable[[Any], bool], kept: tuple[str, ...]
) -> list[Any]:
    def put(member: Any) -> list[Any]:
        return [*members[:at], member, *members[at + 1 :]]

    return put(_smaller_value(members[at], lambda member: differs(put(member)), kept))


def _smaller_mapping(
    members: Mapping[str, Any], differs: Callable[[Any], bool], kept: tuple[str, ...] = ()
) -> dict[str, Any]:
    found = dict(members)
    for key in members:
        without = {name: value for name, value in found.items() if name != key}
        if key not in kept and differs(without):
            found = without
        elif kept != _OF_TOOLS or key not in kept or not isinstance(found[key], str):
            found = _with_smaller_value(found, key, differs, kept if kept == _OF_TOOLS else ())
    return found


def _with_smaller_value(
    members: dict[str, Any], key: str, differs: Callable[[Any], bool], kept: tuple[str, ...]
) -> dict[str, Any]:
    return {**members, key: _smaller_value(members[key], lambda value: differs({**members, key: value}), kept)}
