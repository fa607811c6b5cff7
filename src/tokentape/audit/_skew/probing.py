"""Explain inputs that differ: find each cause and the smallest input that shows it, by delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokentape.audit._skew.backends import Backend, BackendFacts, SkewChat
from tokentape.audit._skew.findings import Skew, SkewResult
from tokentape.chat._byte_level import BYTE_OF

_WHERE = 5
"""The maximum number of groups, conversations or files that a finding lists."""


_Input = TypeVar("_Input")

Examine = Callable[[_Input], tuple[str, Skew, Callable[[list[_Input]], Sequence[bool]]]]
"""Finds why an input differs. Returns the cause's key, a finding, and a function that returns for each of its inputs
if the same cause explains it."""


def explain(
    differing: Sequence[tuple[str, _Input]], most: int, examine: Examine[_Input], progress: Callable[[str], None]
) -> tuple[list[Skew], int]:
    """Return a finding per cause, and the number of inputs left: examine one, drop those with its cause, repeat.

    Each input comes with the name of its group, conversation or file.
    """
    remaining = list(differing)
    groups: dict[str, tuple[Skew, list[str]]] = {}
    for _ in range(most):
        if not remaining:
            break
        (name, first), *remaining = remaining
        progress(f"explaining differences, {len(remaining)} left")
        key, finding, explains = examine(first)
        where = groups.setdefault(key, (finding, []))[1]
        explained = list(zip(remaining, explains([item for _, item in remaining]), strict=True))
        where += [name, *(label for (label, _), is_explained in explained if is_explained)]
        remaining = [pair for pair, is_explained in explained if not is_explained]
    return [
        replace(finding, count=len(where), where=tuple(dict.fromkeys(where))[:_WHERE])
        for finding, where in groups.values()
    ], len(remaining)


def as_text(token: str, facts: BackendFacts) -> str:
    """Return a token's text. Vocabularies write bytes and spaces as different characters."""
    if token in facts.added or facts.spec is None:
        return token
    if "ByteLevel" in str(facts.spec.get("decoder")) and all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token).decode("utf-8", "backslashreplace")
    return token.replace("\u2581", " ")


def token_strings(backend: Backend, ids: Sequence[int]) -> list[str]:
    """Return the token string of each id; [] if one is unknown."""
    tokens = [backend.token(token_id) for token_id in ids]
    return [token for token in tokens if token is not None] if None not in tokens else []


def result(backend: Backend, ids: Sequence[int], text: str | None = None) -> SkewResult:
    """Return a backend's result, with the token strings of its ids if all are known."""
    spelled = tuple(as_text(token, backend.facts) for token in token_strings(backend, ids))
    return SkewResult(tuple(ids), spelled, text)


_PIECES = 200

_Part = TypeVar("_Part")
_OF_MESSAGES = {"role": False, "content": True}
_OF_TOOLS = {"type": False, "name": False, "function": True}
"""Fields that are never removed; True if their values may be shortened. Servers fill in a tool's missing name or type,
which would be a new difference."""


def smallest(parts: Sequence[_Part], fails: Callable[[Sequence[_Part]], bool]) -> Sequence[_Part]:
    """Return a part of a sequence that fails, but no longer fails if any single element is removed.

    `fails` must return True for `parts`. It is called O(n log n) times if one element is at fault, at worst O(n^2).

    >>> smallest("a long text with an x in it", lambda text: "x" in text)
    'x'
    """
    pieces = 2
    while len(parts) >= 2:
        size = -(-len(parts) // pieces)
        starts = range(0, len(parts), size)
        chunks = (parts[start : start + size] for start in starts)
        # Sequences that can be sliced can be joined.
        rests: Any = (parts[:start] + parts[start + size :] for start in starts)  # type: ignore[operator]
        if (chunk := next((part for part in chunks if len(part) < len(parts) and fails(part)), None)) is not None:
            parts, pieces = chunk, 2
        elif (rest := next((part for part in rests if fails(part)), None)) is not None:
            parts, pieces = rest, max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(2 * pieces, len(parts))
    return parts


def smallest_text(text: str, differs: Callable[[str], bool]) -> str:
    """Shrink a text while it still differs: remove lines first, then characters."""
    lines = tuple(text.splitlines(keepends=True))
    if len(lines) > 1:
        text = "".join(smallest(lines, lambda remaining: differs("".join(remaining))))
    return _smallest_string(text, differs)


def _smallest_string(text: str, differs: Callable[[str], bool]) -> str:
    """Shrink a string while it still differs, by `_PIECES` pieces at first, and by characters once it is short."""
    while True:
        size = len(text) // _PIECES or 1
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        shorter = "".join(smallest(pieces, lambda remaining: differs("".join(remaining))))
        if size == 1 or len(shorter) == len(text):
            return shorter
        text = shorter


def smallest_conversation(conversation: SkewChat, differs: Callable[[SkewChat], bool]) -> SkewChat:
    """Shrink a conversation while it still differs: fewer tools, messages and fields, shorter texts."""
    for fewer in ({"generate": False}, {"tools": ()}):
        tried = replace(conversation, **fewer)
        if tried != conversation and differs(tried):
            conversation = tried

    def put(messages: Sequence[Any], tools: Sequence[Any]) -> SkewChat:
        return replace(conversation, messages=tuple(messages), tools=tuple(tools))

    messages = _smaller(conversation.messages, lambda some: differs(put(some, conversation.tools)), _OF_MESSAGES)
    return put(messages, _smaller(conversation.tools, lambda some: differs(put(messages, some)), _OF_TOOLS))


def _smaller(value: Any, differs: Callable[[Any], bool], fields: Mapping[str, bool]) -> Any:
    """Shrink a JSON value while it still differs. `fields`, see `_OF_MESSAGES`, are never removed."""
    if isinstance(value, Mapping):
        smaller = dict(value)
        for key in value:
            without = {name: member for name, member in smaller.items() if name != key}
            if key not in fields and differs(without):
                smaller = without
            elif fields.get(key, True) or not isinstance(smaller[key], str):
                smaller = _smaller_member(smaller, key, differs, fields)
        return smaller
    if not value or not isinstance(value, str | list | tuple):
        return value
    empty: Any = "" if isinstance(value, str) else []
    if differs(empty):
        return empty
    if isinstance(value, str):
        return _smallest_string(value, differs)
    members = list(smallest(list(value), differs))
    for index in range(len(members)):
        members = _smaller_member(members, index, differs, fields)
    return members


def _smaller_member(members: Any, key: Any, differs: Callable[[Any], bool], fields: Mapping[str, bool]) -> Any:
    def put(member: Any) -> Any:
        changed = members.copy()
        changed[key] = member
        return changed

    return put(_smaller(members[key], lambda member: differs(put(member)), fields))
