"""Records to rows and back: the only module that knows how a field is spelled in a column."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any, TypeAlias

from sqlalchemy import Row, Table

from tokentape.errors import InvalidRequest, InvariantViolation, StoreCorrupt
from tokentape.session.chain import array_bytes, array_from_bytes, canonical_json, setup_digest
from tokentape.store import schema
from tokentape.types import Answer, Reward, SessionInfo, Setup, Turn

Record: TypeAlias = SessionInfo | Setup | Turn | Answer | Reward
"""What a store takes."""

Values: TypeAlias = dict[str, Any]
"""One row of one table, by column name."""


def encode(record: Record) -> tuple[Table, Values]:
    """Return the table that holds `record` and its row there. Later changes to `record` don't reach the row.

    Raises `InvalidRequest` if a field can't be written as JSON or text, and `InvariantViolation` if an array has
    the wrong dtype or a setup's digest is not that of its fields.
    """
    match record:
        case SessionInfo():
            return schema.sessions, {
                "session_id": _text(record.session_id),
                "created_at": _real(record.created_at),
                "metadata": canonical_json(record.metadata),
                "owner": _text(record.owner),
            }
        case Setup():
            return schema.setups, _encode_setup(record)
        case Turn():
            return schema.turns, _encode_turn(record)
        case Answer():
            return schema.answers, _encode_answer(record)
        case Reward():
            return schema.rewards, {
                "session_id": _text(record.session_id),
                "turn": record.turn,
                "value": _real(record.value),
                "created_at": _real(record.created_at),
            }


def decode_session(row: Row[Any]) -> SessionInfo:
    """Return the session of a row of `schema.sessions`. Raises `StoreCorrupt` if it can't be one."""
    try:
        return SessionInfo(row.session_id, float(row.created_at), dict(json.loads(row.metadata)), row.owner)
    except _UNDECODABLE as error:
        raise StoreCorrupt(f"session {row.session_id!r} can't be read ({type(error).__name__})") from error


def decode_setup(row: Row[Any]) -> Setup:
    """Return the setup of a row of `schema.setups`.

    Raises `StoreCorrupt` if it can't be one or is not the one that its digest names.
    """
    try:
        setup = Setup(
            tools=tuple(json.loads(row.tools)),
            template_kwargs=json.loads(row.template_kwargs),
            date=row.date,
            fingerprint=row.fingerprint,
            digest=row.digest,
        )
        digest = setup_digest(setup.tools, setup.template_kwargs, setup.date, setup.fingerprint)
    except _UNDECODABLE as error:
        raise StoreCorrupt(f"setup {row.digest!r} can't be read ({type(error).__name__})") from error
    if digest != setup.digest:
        raise StoreCorrupt(f"setup {setup.digest!r} has the contents of {digest!r}")
    return setup


def decode_turn(row: Row[Any]) -> Turn:
    """Return the turn of a row of `schema.turns`; its id and logprob arrays are read-only views of the blobs.

    Raises `StoreCorrupt` if it can't be one. The digest is not checked: that takes the parent.
    """
    try:
        return Turn(
            session_id=row.session_id,
            seq=row.seq,
            parent=row.parent,
            setup=row.setup,
            messages=tuple(_inflate(row.messages)),
            reply=_inflate(row.reply),
            added_ids=array_from_bytes("added_ids", row.added_ids),
            added_provenance=array_from_bytes("added_provenance", zlib.decompress(row.added_provenance)),
            completion_ids=array_from_bytes("completion_ids", row.completion_ids),
            logprobs=array_from_bytes("logprobs", row.logprobs),
            finish_reason=row.finish_reason,
            stop=json.loads(row.stop),
            fork=row.fork,
            sampling=json.loads(row.sampling),
            engine=row.engine,
            weight_version=row.weight_version,
            created_at=row.created_at,
            digest=row.digest,
            weight_changes=tuple((at, version) for at, version in json.loads(row.weight_changes or "[]")),
            abort_cause=row.abort_cause,
        )
    except _UNDECODABLE as error:
        raise StoreCorrupt(
            f"turn {row.seq} of session {row.session_id!r} can't be read ({type(error).__name__})"
        ) from error


def decode_answer(row: Row[Any]) -> Answer:
    """Return the answer of a row of `schema.answers`. Raises `StoreCorrupt` if it can't be one."""
    try:
        return Answer(
            session_id=row.session_id,
            reply_id=row.reply_id,
            turns=tuple(range(row.first_turn, row.first_turn + row.choices)),
            key=row.key,
            body_digest=row.body_digest.hex(),
            created_at=float(row.created_at),
            top_logprobs=() if row.top_logprobs is None else _tuples(_inflate(row.top_logprobs)),
        )
    except _UNDECODABLE as error:
        raise StoreCorrupt(f"an answer of session {row.session_id!r} can't be read ({type(error).__name__})") from error


def decode_reward(row: Row[Any]) -> Reward:
    """Return the reward of a row of `schema.rewards`. Raises `StoreCorrupt` if it can't be one."""
    try:
        return Reward(row.session_id, row.turn, float(row.value), float(row.created_at))
    except _UNDECODABLE as error:
        raise StoreCorrupt(f"a reward of session {row.session_id!r} can't be read ({type(error).__name__})") from error


_UNDECODABLE = (TypeError, ValueError, RecursionError, zlib.error)


def _encode_setup(setup: Setup) -> Values:
    digest = setup_digest(setup.tools, setup.template_kwargs, setup.date, setup.fingerprint)
    if setup.digest != digest:
        raise InvariantViolation(f"a setup claims digest {setup.digest!r}, its fields have {digest!r}")
    return {
        "digest": digest,
        "tools": canonical_json(setup.tools),
        "template_kwargs": canonical_json(setup.template_kwargs),
        "date": _text(setup.date),
        "fingerprint": _text(setup.fingerprint),
    }


def _encode_turn(turn: Turn) -> Values:
    return {
        "session_id": _text(turn.session_id),
        "seq": turn.seq,
        "parent": turn.parent,
        "setup": turn.setup,
        "digest": turn.digest,
        "created_at": _real(turn.created_at),
        "finish_reason": turn.finish_reason,
        "stop": canonical_json(turn.stop),
        "fork": None if turn.fork is None else _text(turn.fork),
        "engine": _text(turn.engine),
        "weight_version": _text(turn.weight_version),
        "weight_changes": canonical_json(turn.weight_changes) if turn.weight_changes else None,
        "abort_cause": None if turn.abort_cause is None else _text(turn.abort_cause),
        "sampling": canonical_json(turn.sampling),
        "added_ids": array_bytes("added_ids", turn.added_ids),
        "added_provenance": zlib.compress(array_bytes("added_provenance", turn.added_provenance)),
        "completion_ids": array_bytes("completion_ids", turn.completion_ids),
        "logprobs": array_bytes("logprobs", turn.logprobs),
        "messages": _deflate(turn.messages),
        "reply": _deflate(turn.reply),
    }


def _encode_answer(answer: Answer) -> Values:
    if answer.turns != tuple(range(answer.turns[0], answer.turns[0] + len(answer.turns))):
        raise InvariantViolation(f"the choices of a call are recorded one after the other, not as {answer.turns}")
    return {
        "session_id": _text(answer.session_id),
        "reply_id": _text(answer.reply_id),
        "first_turn": answer.turns[0],
        "choices": len(answer.turns),
        "key": None if answer.key is None else _text(answer.key),
        "body_digest": bytes.fromhex(answer.body_digest),
        "created_at": _real(answer.created_at),
        "top_logprobs": _deflate(answer.top_logprobs) if answer.top_logprobs else None,
    }


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _deflate(value: object) -> bytes:
    return zlib.compress(canonical_json(value).encode("ascii"))


def _inflate(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _text(value: str) -> str:
    """Return `value` if a text column of any database takes it: no NUL, no lone surrogate."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest("a name to be recorded holds a NUL character or a lone surrogate")
    return value


def _real(value: float) -> float:
    """Return `value` as a float that every database keeps and that can be reckoned with: no NaN, no infinity."""
    if not math.isfinite(value):
        raise InvalidRequest(f"{value} is not a finite number")
    return float(value)
