"""API keys, session keys (derived keys for one session), session ids, and the headers in which clients send them."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping

from msgspec import Struct

from tokentape.errors import InvalidRequest, Unauthorized

KEY_HEADER = "x-api-key"
"""Header for an API key, an alternative to `Authorization: Bearer KEY`."""

SESSION_HEADER = "X-Session-Id"
IDEMPOTENCY_HEADER = "Idempotency-Key"

_CLIENT_HEADERS = {
    # Claude Code; the class and `context-compacted` only with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1.
    b"x-claude-code-session-id": "session",
    b"x-claude-code-agent-id": "agent",
    b"x-claude-code-parent-agent-id": "parent_agent",
    b"x-claude-code-request-class": "kind",
    b"x-claude-code-context-compacted": "compacted",
    # Codex. The window is `THREAD:NUMBER`, with a new number after each compaction.
    b"session-id": "session",
    b"thread-id": "agent",
    b"x-codex-parent-thread-id": "parent_agent",
    b"x-openai-subagent": "kind",
    b"x-codex-window-id": "window",
    # opencode.
    b"x-session-affinity": "session",
    b"x-parent-session-id": "parent",
    # Dynamo's agents.
    b"x-dynamo-session-id": "session",
    b"x-dynamo-parent-session-id": "parent",
    # The SDKs of OpenAI and Anthropic.
    b"x-stainless-retry-count": "retry",
}
"""Headers in which harnesses and routers identify a call's session, agent or parent, for `_session.lineage`."""

_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_DERIVED = re.compile(r"tts_([0-9a-f]{32})_([A-Za-z0-9-]{0,64})_(.+)")
_SHORTEST = 16
# `.` and `..` are not valid ids, because clients and proxies remove them from paths.
_SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]{1,128}")


class Caller(Struct, frozen=True):
    owner: str
    """Name of the API key; empty in a gateway without keys."""
    admin: bool = False
    """Whether the key may see and delete all sessions."""
    session_id: str | None = None
    """The only session that the caller can access, if it uses a session key."""

    @property
    def sees(self) -> str | None:
        """Owner whose sessions the caller may see; None for all sessions."""
        return None if self.admin else self.owner


class Keys:
    """A gateway's API keys, by name. Without keys every client has full access.

    To rotate a key, set its value to both keys, the new key first, separated by a space. Session keys are derived from
    the first key. `admins` are keys that may see every session. They own sessions like other keys.

    Raises `InvalidRequest` for a name with characters other than letters, digits and hyphens, for a key shorter than
    16 characters, and for a duplicate key or name.
    """

    def __init__(self, keys: Mapping[str, str] | None = None, admins: Mapping[str, str] | None = None) -> None:
        texts = {**(keys or {}), **(admins or {})}
        every = [key for text in texts.values() for key in text.split(" ")]
        if len(texts) < len(keys or {}) + len(admins or {}) or len(set(every)) < len(every):
            raise InvalidRequest("two API keys have the same name or the same value; make both unique", "keys")
        for name, text in texts.items():
            if not _NAME.fullmatch(name):
                raise InvalidRequest(f"invalid API key name {name!r}: use letters, digits and hyphens", "keys")
            if not text.isascii() or not text.isprintable() or min(map(len, text.split(" "))) < _SHORTEST:
                raise InvalidRequest(
                    f"the API key named {name!r} must have at least {_SHORTEST} printable ASCII characters; "
                    "to rotate it, put one space between the new key and the old key",
                    "keys",
                )
        self._keys = {name: [key.encode() for key in text.split(" ")] for name, text in texts.items()}
        self._admins = frozenset(admins or ())

    def __bool__(self) -> bool:
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller identified by the key in `headers`. Raises `Unauthorized` if it is missing or unknown."""
        key = key_in(headers)
        derived = _DERIVED.fullmatch(key)
        if derived is not None:
            mac, name, session_id = derived.groups()
            has_name = name in self._keys if self._keys else not name
            if any(hmac.compare_digest(_mac(secret, session_id), mac) for secret in self._secrets(name)) and has_name:
                return Caller(name, session_id=session_id)
            raise Unauthorized("unknown session key; use the api_key that POST /sessions on this gateway returned")
        if key.startswith("tts_") and not any(key.encode() in keys for keys in self._keys.values()):
            raise Unauthorized("this session key is incomplete; send it exactly as POST /sessions returned it")
        if not self._keys:
            return Caller("", admin=True)
        if not key:
            raise Unauthorized(f"API key missing; send Authorization: Bearer KEY, or {KEY_HEADER}: KEY")
        # Compare all keys, so that the time taken reveals nothing.
        secret = key.encode()
        names = [
            name
            for name, keys in self._keys.items()
            if sum(hmac.compare_digest(secret, known_key) for known_key in keys)
        ]
        if not names:
            raise Unauthorized("unknown API key; use a key of this gateway")
        return Caller(names[0], admin=names[0] in self._admins)

    def session_key(self, owner: str, session_id: str) -> str:
        """Return a session key, which grants access to one session, for agents that accept only an API key.

        >>> Keys().session_key("", "s1")
        'tts_05e3793b3550e80418ab36940b58bc91__s1'
        """
        return f"tts_{_mac(self._secrets(owner)[0], session_id)}_{owner}_{session_id}"

    def _secrets(self, name: str) -> list[bytes]:
        return self._keys.get(name, [b""])


def key_in(headers: Mapping[str, str]) -> str:
    """Return the API key or session key in `headers` (lower-case names); empty if missing."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get(KEY_HEADER, "")


def session_in_key(key: str) -> str | None:
    """Return the session id in a session key, without checking the key. Return None for other keys.

    >>> session_in_key("tts_05e3793b3550e80418ab36940b58bc91__s1")
    's1'
    """
    derived = _DERIVED.fullmatch(key)
    return None if derived is None else derived[3]


def _mac(secret: bytes, session_id: str) -> str:
    return hmac.new(secret, session_id.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:32]


def new_session_id() -> str:
    return secrets.token_hex(16)


def may_be_session_id(text: str) -> bool:
    return _SESSION_ID.fullmatch(text) is not None


def check_session_id(session_id: str) -> None:
    """Raise `InvalidRequest` unless `session_id` is a valid session id."""
    if not may_be_session_id(session_id):
        raise InvalidRequest(
            "invalid session id; use 1 to 128 letters, digits, '.', '_', ':' or '-'; not allowed are '.' and '..'",
            "session_id",
        )


def client_headers(headers: Iterable[tuple[bytes, bytes]], session_id: str) -> dict[str, str]:
    """Return the values of `_CLIENT_HEADERS` in raw headers, by their common name for all harnesses.

    The session's own id and a retry count of 0 are omitted.

    >>> client_headers([(b"x-parent-session-id", b"ses_1"), (b"x-stainless-retry-count", b"0")], "ses_2")
    {'parent': 'ses_1'}
    """
    values = {_CLIENT_HEADERS[name]: value for name, value in headers if name in _CLIENT_HEADERS and value.strip()}
    texts = {name: value.decode("latin-1").replace("\0", "")[:128] for name, value in values.items()}
    plain = {"session": session_id, "retry": "0"}
    return {name: text for name, text in sorted(texts.items()) if text != plain.get(name)}
