"""Ids of sessions: what may be one, and new ones."""

from __future__ import annotations

import re
import secrets

from tokentape.errors import InvalidRequest

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_session_id() -> str:
    """A random id of 128 bits, in hex."""
    return secrets.token_hex(16)


def may_be_session_id(text: str) -> bool:
    """Whether this may be the id of a session."""
    return _SESSION_ID.fullmatch(text) is not None


def check_session_id(session_id: str) -> None:
    """Raise `InvalidRequest` unless this may be the id of a session."""
    if not may_be_session_id(session_id):
        raise InvalidRequest("a session id has 1 to 128 letters, digits and the characters . _ : -", "session_id")
