"""Convert records to rows and back. Only this module knows how fields are encoded in columns."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, fields
from functools import cache, lru_cache, partial
from itertools import repeat
from operator import itemgetter
from sys import intern
from typing import Any, TypeAlias

import msgspec
import numpy as np
from sqlalchemy import Row, Table, Text

from tokentape._canonical import canonical_json, json_in_order, quick_json_in_order
from tokentape._session.chain import array_bytes, array_from_bytes
from tokentape._session.messages import SharedMessages
from tokentape._session.payloads import ROW_DTYPES, narrowest, rows_as_bytes, rows_from_bytes
from tokentape.errors import InvalidRequest, InvariantViolation, StoreCorrupt
from tokentape.store import _schema as schema
from tokentape.store._files import EXTERNAL, ExternalPayload, read_payload
from tokentape.types import (
    Event,
    Media,
    Message,
    RecordedReply,
    Resume,
    Reward,
    SessionInfo,
    Setup,
    TokenDistribution,
    Turn,
    TurnColumn,
    TurnPayload,
)

Record: TypeAlias = SessionInfo | Setup | Media | Turn | RecordedReply | Reward | Event | TurnColumn | TurnPayload
"""Any record that can be written to a store."""

Values: TypeAlias = dict[str, Any]
"""A table row, by column name."""

_LEVEL = 4
"""The compression level for JSON. zlib's default, 6, takes 10 % more time for 1,400 characters and 2.7 times the time
for 400,000; its output is 0.5 % and 5 % smaller."""

_SHORT = 4096
"""The maximum number of bytes that are compressed with a 4 KiB window, which fits all of them."""


def encode(record: Record) -> tuple[Table, Values]:
    """Return the table and the row for `record`. Later changes to `record` don't change the row.

    Raises `InvalidRequest` if a field can't be written as JSON or text, and `InvariantViolation` if an array has
    the wrong dtype.
    """
    table = _TABLES[type(record)]
    values: Values = {}
    match record:
        case Media() if hashlib.sha256(record.data).hexdigest() != record.sha256:
            raise InvariantViolation(f"media have the hash {record.sha256!r}, which does not match their bytes")
        case RecordedReply():
            first, choices = record.turns[0], len(record.turns)
            if record.turns != tuple(range(first, first + choices)):
                raise InvariantViolation(f"the turns of a call must have consecutive numbers, not {record.turns}")
            values = {"first_turn": first, "choices": choices}
        case Reward():
            if record.turn is not None and record.leaf is not None:
                raise InvariantViolation("a reward can't have both a turn and a leaf; set at most one of them")
            scope = "turn" if record.turn is not None else "session" if record.leaf is None else "trajectory"
            values = {"turn": record.leaf if record.turn is None else record.turn, "scope": scope}
        case TurnColumn():
            data = array_bytes("values", record.values)
            values = {"data": data, "crc32": zlib.crc32(data)}
        case TurnPayload():
            if isinstance(record, ExternalPayload):
                packed, data, crc32 = EXTERNAL + record.packed, record.address.encode(), record.crc32
            else:
                packed, data = rows_as_bytes(narrowest(record.rows))
                crc32 = zlib.crc32(data)
            kind = {"dtype": record.rows.dtype.newbyteorder("<").str, "shape": canonical_json(record.rows.shape)}
            values = {**kind, "packed": packed, "data": data, "crc32": crc32}
    for name, write in COLUMNS[table]:
        if name not in values:
            values[name] = getattr(record, name) if write is None else write(getattr(record, name))
    return table, values


def decode(table: Table, row: Row[Any]) -> Any:
    """Return a row's record. The row must begin with the table's columns in order. Arrays may be read-only views of it.

    Raises `StoreCorrupt` if the row is invalid, or if a setup or media don't match their digest. A turn's digest is not
    checked because that requires its parent.
    """
    name, record = _DECODERS[table]
    try:
        return record(row)
    except (TypeError, ValueError, RecursionError, zlib.error) as error:
        raise StoreCorrupt(f"{name.format(row)} can't be read ({type(error).__name__})") from error


def decode_all(table: Table, rows: Sequence[Row[Any]]) -> list[Any]:
    """Return the rows' records, like `decode`. Turns are decoded column by column, which takes less time."""
    if table is schema.turns:
        with suppress(Exception):  # `decode` says which row is invalid
            _, values_of, readers = _reading(Turn, ())
            columns: list[Iterable[Any]] = [*values_of([*zip(*rows, strict=True)])]
            for place, read in readers:
                columns[place] = map(read, columns[place])
            turns = [*map(Turn.__new__, repeat(Turn, len(rows)))]
            for set_field, values in zip(_SET_FIELDS, columns, strict=True):
                deque(map(set_field, turns, values), maxlen=0)
            return turns
    return [decode(table, row) for row in rows]


_SET_FIELDS = [getattr(Turn, field.name).__set__ for field in fields(Turn)]
"""Sets a field of many turns at once. The constructor of a frozen class takes longer than decoding JSON."""


def _record(kind: Any, row: Row[Any], **more: Any) -> Any:
    """Return a record with the row's columns as fields, and `more` for fields without a column."""
    names, values_of, readers = _reading(kind, tuple(more))
    values = [*values_of(row)]
    for place, read in readers:
        values[place] = read(values[place])
    return kind(**dict(zip(names, values, strict=True)), **more) if more else kind(*values)


def _setup(row: Row[Any]) -> Setup:
    setup: Setup = _record(Setup, row)
    if setup.digest != row.digest:
        raise StoreCorrupt(f"setup {row.digest!r} has the contents of {setup.digest!r}")
    return setup


def _media(row: Row[Any]) -> Media:
    if not isinstance(row.data, bytes) or hashlib.sha256(row.data).hexdigest() != row.sha256:
        raise StoreCorrupt(f"the bytes of media {row.sha256!r} have a different hash")
    return Media(row.sha256, row.mime, row.data)


def _answer(row: Row[Any]) -> Any:
    return _record(RecordedReply, row, turns=tuple(range(row.first_turn, row.first_turn + row.choices)))


def _reward(row: Row[Any]) -> Any:
    if row.scope not in ("session", "turn", "trajectory") or (row.scope == "session") != (row.turn is None):
        raise ValueError("the reward's scope does not match its turn")
    turn, leaf = (None, row.turn) if row.scope == "trajectory" else (row.turn, None)
    return _record(Reward, row, turn=turn, leaf=leaf)


def _column(row: Row[Any]) -> Any:
    values = array_from_bytes("values", _unspoiled(row.data, row.crc32))
    if not np.isfinite(values).all():
        raise ValueError("a value is not a finite number")
    return _record(TurnColumn, row, values=values)


def _payload(row: Row[Any]) -> Any:
    kind = str(row.packed)
    data = read_payload(bytes(row.data).decode()) if kind.startswith(EXTERNAL) else row.data
    packed = rows_from_bytes(kind.removeprefix(EXTERNAL), _parsed(row.shape), _unspoiled(data, row.crc32))
    if row.dtype not in ROW_DTYPES:
        raise ValueError("the rows' dtype is not supported")
    rows = packed.astype(np.dtype(row.dtype).newbyteorder("="), copy=False)
    return _record(TurnPayload, row, rows=rows)


_KINDS: tuple[tuple[type[Any], Table, str, Callable[[Row[Any]], Any]], ...] = (
    (SessionInfo, schema.sessions, "session {0.session_id!r}", partial(_record, SessionInfo)),
    (Setup, schema.setups, "setup {0.digest!r}", _setup),
    (Media, schema.media, "media {0.sha256!r}", _media),
    (Turn, schema.turns, "turn {0.seq} of session {0.session_id!r}", partial(_record, Turn)),
    (RecordedReply, schema.answers, "an answer of session {0.session_id!r}", _answer),
    (Reward, schema.rewards, "a reward of session {0.session_id!r}", _reward),
    (Event, schema.events, "an event of session {0.session_id!r}", partial(_record, Event)),
    (TurnColumn, schema.token_columns, "a column of session {0.session_id!r}", _column),
    (TurnPayload, schema.token_payloads, "a payload of session {0.session_id!r}", _payload),
)
_TABLES = {kind: table for kind, table, _, _ in _KINDS} | {ExternalPayload: schema.token_payloads}
_DECODERS = {table: (name, read) for _, table, name, read in _KINDS}


@lru_cache(maxsize=256)
def _distribution(text: str | None) -> TokenDistribution | None:
    return None if text is None else TokenDistribution(*_parsed(text))


@lru_cache(maxsize=256)
def _distribution_text(distribution: TokenDistribution | None) -> str | None:
    return None if distribution is None else canonical_json(astuple(distribution))


def _unspoiled(data: bytes, crc32: int) -> bytes:
    if zlib.crc32(data) != crc32:
        raise ValueError("the bytes do not match their CRC")
    return data


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _compressed(data: bytes, level: int) -> bytes:
    """Compress `data`. For a few bytes, zlib's defaults take longer to allocate 256 KiB than to compress."""
    if len(data) > _SHORT:
        return zlib.compress(data, level)
    short = zlib.compressobj(level, zlib.DEFLATED, 12, 5)
    return short.compress(data) + short.flush()


_compressed_codes = lru_cache(maxsize=4)(partial(_compressed, level=zlib.Z_DEFAULT_COMPRESSION))
"""Compresses provenance codes. Sessions in a group begin with equal codes."""


def _deflate(value: object) -> bytes:
    return _compressed(json_in_order(value).encode("ascii"), _LEVEL)


def _deflate_messages(messages: tuple[Message, ...]) -> bytes:
    if not isinstance(messages, SharedMessages):
        return _deflate(messages)
    if messages.compressed is None:
        messages.compressed = _deflate_opening(messages)
    return messages.compressed


def _deflate_opening(messages: SharedMessages) -> bytes:
    """Compress the first messages of a session. Sessions may differ only in the last one; see `_compressed_so_far`."""
    text = quick_json_in_order(messages)
    begins = len(text) + 1 - len(quick_json_in_order(messages[-1:]))
    if begins < _LONG:
        return _compressed(text, _LEVEL)
    data, compressor = _compressed_so_far(text[:begins])
    rest = compressor.copy()
    return b"".join((data, rest.compress(text[begins:]), rest.flush()))


_LONG = 1 << 16


@lru_cache(maxsize=1)
def _compressed_so_far(text: bytes) -> tuple[bytes, zlib._Compress]:
    """Return the compressed bytes of a text that more text follows, and the compressor to copy and continue with.

    The state takes about 0.3 MB, so it is kept for one text.
    """
    compressor = zlib.compressobj(_LEVEL)
    return compressor.compress(text), compressor


def _inflate(data: bytes) -> Any:
    return _parsed(zlib.decompress(data, bufsize=_SHORT))


def _parsed(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for NaN and infinities, which are never written."""
    try:
        return _QUICK.decode(text)
    except msgspec.DecodeError:  # msgspec does not accept lone surrogates
        return _JSON.decode(text if isinstance(text, str) else text.decode("ascii"))


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a JSON number")
    return value


_parsed_once = lru_cache(maxsize=512)(_parsed)
_QUICK = msgspec.json.Decoder()
_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _plain(value: Any) -> Any:
    """Return `value`. Raises `InvalidRequest` for text with a NUL or lone surrogate, which databases don't store."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("a name to be recorded contains a lone surrogate; remove it") from None
        if "\0" in value:
            raise InvalidRequest("a name to be recorded contains a NUL character; remove it")
    return value


def _real(value: float) -> float:
    """Return `value` as a float. Raises `InvalidRequest` for NaN and infinities, which some databases don't store."""
    if not math.isfinite(value):
        raise InvalidRequest(f"{value} is not a finite number")
    return float(value)


def _finite_float(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError("a number is not finite")
    return number


def _object(text: str) -> dict[str, Any]:
    value = _parsed(text)
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _array(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return partial(array_bytes, name), partial(array_from_bytes, name)


_CODECS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "created_at": (_real, _finite_float),
    "value": (_real, _finite_float),
    "metadata": (canonical_json, _object),
    "body": (canonical_json, _object),
    "body_digest": (bytes.fromhex, bytes.hex),
    "tools": (json_in_order, lambda text: tuple(_parsed(text))),
    "template_kwargs": (json_in_order, _parsed),
    # Equal setups, engines and versions become one object because gateways keep many turns in memory.
    "setup": (_plain, intern),
    "engine": (_plain, intern),
    "weight_version": (_plain, intern),
    "stop": (canonical_json, _parsed_once),
    "sampling": (canonical_json, _parsed_once),
    "sampled_from": (_distribution_text, _distribution),
    "logprobs_of": (_distribution_text, _distribution),
    "weight_changes": (
        lambda changes: canonical_json(changes) if changes else None,
        lambda text: tuple((offset, version) for offset, version in _parsed(text)) if text else (),
    ),
    "resumes": (
        lambda resumes: canonical_json([asdict(resume) for resume in resumes]) if resumes else None,
        lambda text: tuple(Resume(**values) for values in _parsed(text)) if text else (),
    ),
    "added_ids": _array("added_ids"),
    "added_provenance": (
        lambda codes: _compressed_codes(array_bytes("added_provenance", codes)),
        lambda data: array_from_bytes("added_provenance", zlib.decompress(data)),
    ),
    "completion_ids": _array("completion_ids"),
    "logprobs": _array("logprobs"),
    "messages": (_deflate_messages, lambda data: tuple(_inflate(data))),
    "reply": (_deflate, _inflate),
    "top_logprobs": (
        lambda tops: _deflate(tops) if tops else None,
        lambda data: () if data is None else _tuples(_inflate(data)),
    ),
}
"""(encoder, decoder) for each column's values. Values in other columns are stored unchanged."""

_WRITE = {name: write for name, (write, _) in _CODECS.items()}
_READ = {name: read for name, (_, read) in _CODECS.items()}
COLUMNS = {
    table: [
        (column.name, _WRITE.get(column.name, _plain if isinstance(column.type, Text) else None))
        for column in table.columns
        if column.name != "position"
    ]
    for table in _DECODERS
}
"""For each table, the names of the columns that a writer fills, with their encoders; None for numbers and bytes."""


@cache
def _reading(
    kind: type[Any], more: tuple[str, ...]
) -> tuple[tuple[str, ...], Callable[[Sequence[Any]], tuple[Any, ...]], list[tuple[int, Callable[[Any], Any]]]]:
    """Return a kind's column names, a function that gets their values from a row, and their decoders by index."""
    names = tuple(field.name for field in fields(kind) if field.name not in more)
    # Get values by index because getting 20 by name takes 7 us.
    places = [_TABLES[kind].c.keys().index(name) for name in names]
    return names, itemgetter(*places), [(place, _READ[name]) for place, name in enumerate(names) if name in _READ]
