"""Find the message that makes a turn fork with `edited_history`."""

from __future__ import annotations

import json
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

from tokentape._session.matching import message_key
from tokentape._session.tree import Session
from tokentape.types import Message, Turn

_BEFORE, _QUOTED = 12, 48
"""Characters quoted before the first difference, and in all."""


def edited_message(session: Session, turn: Turn) -> str | None:
    """Describe the first message of `turn`'s history that differs from the most similar earlier branch.

    Return None if there is no earlier turn.
    """
    sent = _history(session, turn)[:-1]
    earlier = [one for one in session.turns[: turn.seq] if one.finish_reason != "abort"]
    if not earlier:
        return None
    keys = [message_key(one) for one in sent]
    continued = {one.parent for one in earlier}
    ends = (one for one in earlier if one.seq not in continued)
    # Of equally similar branches, the newest one.
    at, _, nearest = max((_agreeing(keys, _history(session, one)), one.seq, one) for one in ends)
    recorded = _history(session, nearest)
    own = f"messages[{at}] {_shown(sent, recorded, at)}" if at < len(sent) else f"messages end before messages[{at}]"
    there = _shown(recorded, sent, at) if at < len(recorded) else "no such message"
    return f"{own}; the branch of turn {nearest.seq} has {there}"


def _history(session: Session, turn: Turn) -> list[Message]:
    return [message for one in session.path(turn.seq) for message in (*one.messages, one.reply)]


def _agreeing(keys: list[bytes], recorded: list[Message]) -> int:
    """Return the number of first messages that are equal."""
    pairs = zip_longest(keys, map(message_key, recorded))
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(keys))


def _shown(messages: list[Message], others: list[Message], at: int) -> str:
    """Return a message's role, and its text around the first difference from the other message at this index."""
    message = messages[at]
    texts = [_text(message), _text(others[at]) if at < len(others) else ""]
    if texts[0] == texts[1]:
        texts = [json.dumps(one, ensure_ascii=False, sort_keys=True, default=str) for one in (message, others[at])]
    start = max(0, len(commonprefix(texts)) - _BEFORE)
    end = start + _QUOTED
    quote = f"{'...' if start else ''}{texts[0][start:end]}{'...' if end < len(texts[0]) else ''}"
    return f"({message.get('role')}) {quote!r}"


def _text(message: Message) -> str:
    content: Any = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    calls = message.get("tool_calls")
    return text + (json.dumps(calls, ensure_ascii=False, default=str) if calls else "")
