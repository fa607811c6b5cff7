"""Write and compare heads: digests of a whole record, kept outside it, that reveal later changes and deletions.

A head is a JSON file. The encoding is part of its format: `digest_of` writes each field after its length, JSON is
canonical, and hashes are hex SHA-256.

    item      of a turn, its digest in the hash chain; of media, "tokentape media 1", hash and MIME type; of any other
              record, "tokentape item 1", the name of its class, JSON of the fields that differ from their default, and
              for each array its name, dtype, shape and little-endian elements; a session has an item per key of its
              metadata, one for its creation time and one for its owner, each with the JSON of the value
    session   "tokentape session head 1", JSON of its id and of [turn, label, digest] of each item, by part
    record    "tokentape record head 1" and the digest of each session, in order of creation

A signature is an Ed25519 signature over the JSON of [format, digest of the record, creation time]. Signing needs
`cryptography` (extra `sign`), which is imported on use.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from tokentape._alignment import anchors
from tokentape._canonical import canonical_json, digest_of
from tokentape._session.payloads import rows_as_bytes
from tokentape.errors import InvalidRequest
from tokentape.types import Event, RecordedReply, Reward, SessionInfo, Turn, TurnColumn, TurnPayload

FORMAT = "tokentape head 1"

PARTS = {
    "session": "",
    "turns": "turn",
    "rewards": "reward",
    "events": "event",
    "columns": "column",
    "payloads": "payload",
    "media": "media",
    "answers": "answer to a retry",
}
"""The kinds of items in each part of a session."""

HeadRecord: TypeAlias = Turn | Reward | Event | TurnColumn | TurnPayload | RecordedReply


class HeadItem(NamedTuple):
    """The digest and label of one record of a session."""

    turn: int | None
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class SessionHead:
    """A session's items, by part, in the order in which they were recorded."""

    session_id: str
    parts: dict[str, list[HeadItem]] = field(default_factory=dict)

    def add(self, record: SessionInfo | HeadRecord) -> None:
        if isinstance(record, SessionInfo):
            # These never change. Metadata keys come first, so that an added key does not look like a later record.
            facts = {f"metadata {key!r}": value for key, value in sorted(record.metadata.items())}
            facts |= {"creation time": record.created_at + 0.0, "owner": record.owner}
            self.parts["session"] = [HeadItem(None, name, _digest(SessionInfo, value)) for name, value in facts.items()]
            return
        part, turn, label = _place(record)
        if not isinstance(label, str) or not isinstance(turn, int | None):
            raise ValueError("the row is damaged: its label or turn number has the wrong type")
        digest = record.digest if isinstance(record, Turn) else _item_digest(record)
        self.parts.setdefault(part, []).append(HeadItem(turn, label, digest))

    def add_media(self, turn: int, sha256: str, mime: str) -> None:
        digest = digest_of(b"tokentape media 1", sha256.encode(), mime.encode())
        self.parts.setdefault("media", []).append(HeadItem(turn, sha256, digest))

    @property
    def digest(self) -> str:
        return digest_of(b"tokentape session head 1", canonical_json([self.session_id, self.parts]).encode())


@dataclass(frozen=True, slots=True)
class Head:
    """A head read from a file."""

    digest: str
    """The record's digest."""
    created_at: float
    """Unix seconds."""
    sessions: Mapping[str, SessionHead]
    """The sessions by id, in order of creation."""


class HeadWriter:
    """Writes a head, session by session."""

    def __init__(self, file: IO[bytes], key: Path | None = None) -> None:
        """Begin a head. Pass `key`, a PEM file with an Ed25519 private key, to sign it."""
        self._file = file
        self._key = None if key is None else _ed25519(key, "private")
        self._digests: list[bytes] = []
        file.write(b'{"format":%s,"sessions":[' % json.dumps(FORMAT).encode())

    def add(self, session: SessionHead) -> None:
        line = canonical_json({"session_id": session.session_id, **session.parts})
        self._file.write(b",\n" * bool(self._digests) + line.encode())
        self._digests.append(session.digest.encode())

    def finish(self) -> str:
        digest, created_at = _record_digest(self._digests), time.time()
        rest: dict[str, Any] = {"created_at": created_at, "digest": digest}
        if self._key is not None:
            rest["signature"] = self._key.sign(_message(digest, created_at)).hex()
        self._file.write(b"],\n" + canonical_json(rest).encode()[1:] + b"\n")
        return digest


def read_head(path: Path, public_key: Path | None = None) -> Head:
    """Read a head from a file. With `public_key`, a PEM file with an Ed25519 public key, check the signature.

    Raises `InvalidRequest` if the file is not a head, is damaged, or lacks a valid signature.
    """
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise InvalidRequest(f"{path} has format {document['format']}, expected {FORMAT}", "against")
        sessions = {}
        for parts in document["sessions"]:
            session_id = parts.pop("session_id")
            items = {part: [HeadItem(*item) for item in items] for part, items in parts.items()}
            sessions[session_id] = SessionHead(session_id, items)
        digest, created_at, signature = document["digest"], float(document["created_at"]), document.get("signature")
        if not 0 <= created_at < 1e11:
            raise ValueError("no time")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidRequest(f"{path} is not a head; `tokentape verify --head-out` writes them", "against") from None
    if _record_digest([session.digest.encode() for session in sessions.values()]) != digest:
        raise InvalidRequest(f"{path} was damaged or changed: its contents do not match its digest {digest}", "against")
    if public_key is not None:
        _check_signature(public_key, path, digest, created_at, signature)
    return Head(digest, created_at, sessions)


class HeadComparison:
    """Compares a record with an earlier head, session by session, and collects changes and additions."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sessions: list[str] = []
        self.added: Counter[str] = Counter()
        """The number of new sessions, and of new items in existing sessions, by part."""
        self.problems: list[tuple[str, str, int | None]] = []
        """(text, session id, turn) for each change."""
        self.additions: list[tuple[str, str, int | None]] = []
        """(text, session id, turn) for each new session and each part of a session with additions."""

    def add(self, now: SessionHead) -> None:
        """Compare a session with the head. Call it for all sessions in order of creation."""
        self._sessions.append(now.session_id)
        before = self._head.sessions.get(now.session_id)
        if before is None:
            return
        for part in {**PARTS, **before.parts}:
            self._compare(now.session_id, part, before.parts.get(part, []), now.parts.get(part, []))

    def finish(self, *, ordered: bool) -> None:
        """Compare the list of sessions and, with `ordered`, their order."""
        before, now = self._head.sessions, self._sessions
        if not ordered:
            present = set(now)
            now = [
                *(session_id for session_id in before if session_id in present),
                *(session_id for session_id in now if session_id not in before),
            ]
        changes, added = _changes(*([HeadItem(None, session_id, "") for session_id in ids] for ids in (before, now)))
        self.added["sessions"] = len(added)
        self.additions += [("the session was added since the head", item.label, None) for item in added]
        self.problems += [(f"the session {verb} since the head", item.label, None) for verb, item in changes]

    def _compare(self, session_id: str, part: str, before: list[HeadItem], now: list[HeadItem]) -> None:
        changes, added = _changes(before, now)
        if added:
            self.added[part] += len(added)
            self.additions.append((f"{part} were added since the head: {len(added)}", session_id, None))
        if changes and part == "columns":
            replaced = _replaced(before, now)
            changes = [(verb, item) for verb, item in changes if verb != DELETED or item not in replaced]
        chain_broken = False
        for verb, item in changes:
            problem = f"{PARTS.get(part, part)} {item.label} {verb} since the head".replace("  ", " ").strip()
            if part == "turns" and verb == CHANGED:
                problem += ", or only a turn before it" if chain_broken else ""
                chain_broken = True
            self.problems.append((problem, session_id, item.turn))


CHANGED, DELETED = "was changed", "was deleted or can't be read"
MOVED, INSERTED = "was moved", "was inserted before others"


def _changes(before: list[HeadItem], now: list[HeadItem]) -> tuple[list[tuple[str, HeadItem]], list[HeadItem]]:
    """Return the changes to a head's items, as (text, item), and the items that were added after them."""
    if now[: len(before)] == before:
        return [], now[len(before) :]
    old, new_order = _numbered(before), _numbered(now)
    earlier, places = set(old), {entry: place for place, entry in enumerate(new_order)}
    staying = {place for _, place in anchors(old, new_order)}
    # Key new items by the last unmoved item before them and by turn and label, which a change of contents keeps.
    new: dict[tuple[int, tuple[int | None, str]], list[HeadItem]] = {}
    gap = -1
    for entry, place in places.items():
        if place in staying:
            gap = place
        elif entry not in earlier:
            new.setdefault((gap, entry[0][:2]), []).append(entry[0])
    changes: list[tuple[str, HeadItem]] = []
    gap = -1
    for entry in old:
        item = entry[0]
        if places.get(entry) in staying:
            gap = places[entry]
        elif entry in places:
            changes.append((MOVED, item))
        elif same := new.get((gap, item[:2])):
            same.pop(0)
            changes.append((CHANGED, item))
        else:
            changes.append((DELETED, item))
    last = max(staying, default=-1)
    changes += [(INSERTED, item) for (place, _), items in new.items() if place < last for item in items]
    return changes, [item for (place, _), items in new.items() if place >= last for item in items]


def _numbered(items: list[HeadItem]) -> list[tuple[HeadItem, int]]:
    counts: Counter[HeadItem] = Counter()
    numbered = []
    for item in items:
        numbered.append((item, counts[item]))
        counts[item] += 1
    return numbered


def _replaced(before: list[HeadItem], now: list[HeadItem]) -> set[HeadItem]:
    """Return the columns in a head that now have newer values, because a client's new values replace old values."""
    old, present = set(before), set(now)
    newest: dict[tuple[int | None, str], float] = {}
    replaced = set()
    for item in reversed([*before, *(item for item in now if item not in old)]):
        name, _, created_at = item.label.rpartition(" @")
        later = newest.get((item.turn, name))
        if later is not None and later > float(created_at):
            replaced.add(item)
        elif item in present:
            newest[item.turn, name] = float(created_at)
    return replaced


def _place(record: HeadRecord) -> tuple[str, int | None, str]:
    match record:
        case Turn():
            return "turns", record.seq, ""
        case Reward():
            scope = "turn" if record.turn is not None else "session" if record.leaf is None else "branch"
            return "rewards", record.leaf if record.turn is None else record.turn, f"of the {scope}"
        case Event():
            return "events", record.turn, record.kind
        case TurnColumn():
            return "columns", record.turn, f"{record.name} @{record.created_at!r}"
        case TurnPayload():
            return "payloads", record.turn, record.name
        case RecordedReply():
            return "answers", record.turns[0], ""


def _item_digest(record: Any) -> str:
    plain: dict[str, Any] = {}
    arrays: list[bytes] = []
    for attribute in fields(record):
        value = getattr(record, attribute.name)
        default = attribute.default if attribute.default_factory is MISSING else attribute.default_factory()
        if isinstance(value, np.ndarray):
            dtype, data = rows_as_bytes(value)
            arrays += attribute.name.encode(), dtype.encode(), canonical_json(value.shape).encode(), data
        elif value != default:
            # A database may lose the sign of a zero.
            plain[attribute.name] = value + 0.0 if isinstance(value, float) else value
    return _digest(type(record), plain, *arrays)


def _digest(kind: type, plain: object, *arrays: bytes) -> str:
    # The name is fixed because digests must stay valid if a class is renamed.
    name = "Answer" if kind is RecordedReply else kind.__name__
    return digest_of(b"tokentape item 1", name.encode(), canonical_json(plain).encode(), *arrays)


def _record_digest(sessions: Sequence[bytes]) -> str:
    return digest_of(b"tokentape record head 1", *sessions)


def _message(digest: str, created_at: float) -> bytes:
    return canonical_json([FORMAT, digest, created_at]).encode()


def _check_signature(key: Path, path: Path, digest: str, created_at: float, signature: Any) -> None:
    if signature is None:
        raise InvalidRequest(f"{path} is not signed", "against")
    public = _ed25519(key, "public")
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(bytes.fromhex(str(signature)), _message(digest, created_at))
    except (InvalidSignature, ValueError):
        raise InvalidRequest(f"{path} was changed, or was not signed with the key for {key}", "against") from None


def _ed25519(path: Path, kind: str) -> Any:
    """Read a "private" or "public" key (`kind`) from a PEM file. Raises `InvalidRequest` if it contains no such key."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise InvalidRequest("signatures need cryptography: pip install 'tokentape[sign]'") from None
    data = path.read_bytes()
    key: object = None
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        private = kind == "private"
        key = serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise InvalidRequest(f"{path} is not a PEM file with an unencrypted Ed25519 {kind} key")
    return key
