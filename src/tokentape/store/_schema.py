"""Define the record's tables, and migrate older versions.

A turn's row contains only its added and sampled ids, never its context. Arrays are blobs of little-endian elements;
free-form fields are canonical JSON. Columns that compress well are deflated (RFC 1950): the provenance, which has a few
long runs, and a turn's messages and reply, which would take a third of the database.
All SQL here works in SQLite and PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    select,
)
from sqlalchemy.schema import CreateColumn
from sqlalchemy.types import TypeEngine

from tokentape.errors import StoreCorrupt, StoreError

metadata = MetaData()

_Position = BigInteger().with_variant(Integer, "sqlite")
"""64-bit integers. In SQLite, INTEGER has 64 bits, and only INTEGER columns autoincrement."""


def _required(kind: type[TypeEngine[Any]] | TypeEngine[Any], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


def _numbered(name: str, *rest: Column[Any] | ForeignKeyConstraint | Index) -> Table:
    """Return a table whose column `position` has the order of arrival, in numbers that are never reused."""
    position = Column("position", _Position, primary_key=True, autoincrement=True)
    return Table(name, metadata, position, *rest, sqlite_autoincrement=True)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
"""Facts about the whole record: `schema_version`, the vocabulary of its ids, the model that its gateways serve, and
adapter versions."""

sessions = _numbered(
    "sessions",
    Column("session_id", Text, nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("owner", Text, nullable=False, server_default=""),
)
"""Sessions. Their position is a safe cursor for listings: clocks jump."""

setups = Table(
    "setups",
    metadata,
    Column("digest", Text, primary_key=True),
    *_required(Text, "tools", "template_kwargs", "date", "fingerprint"),
)
"""Setups by digest. They are never deleted, so that gateways need not write them again."""

turns = Table(
    "turns",
    metadata,
    Column("session_id", ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("parent", Integer),
    Column("setup", ForeignKey("setups.digest"), nullable=False),
    Column("digest", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    *_required(Text, "finish_reason", "stop"),
    Column("fork", Text),
    *_required(Text, "engine", "weight_version", "sampling"),
    *_required(LargeBinary, "added_ids", "added_provenance", "completion_ids", "logprobs", "messages", "reply"),
    *(Column(name, Text) for name in ("weight_changes", "abort_cause", "sampled_from", "logprobs_of")),
    *(Column(name, Text) for name in ("resumes", "adapter")),
    ForeignKeyConstraint(["session_id", "parent"], ["turns.session_id", "turns.seq"]),
)
"""The primary key is the fence: if two writers write the same turn, one of them fails."""

answers = Table(
    "answers",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("first_turn", Integer, primary_key=True),
    Column("choices", Integer, nullable=False),
    Column("reply_id", Text, nullable=False),
    Column("key", Text),
    Column("body_digest", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("top_logprobs", LargeBinary),
    ForeignKeyConstraint(["session_id", "first_turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
    # For retries without a session at a gateway that has not seen the call.
    Index("answers_by_body", "body_digest", "created_at"),
)
"""Answers, written in the transaction of their turns, so that a retry after a restart finds them."""

rewards = _numbered(
    "rewards",
    Column("session_id", ForeignKey("sessions.session_id", ondelete="CASCADE"), nullable=False, index=True),
    Column("turn", Integer),
    *_required(Double, "value", "created_at"),
    # "session", "turn", or "trajectory" (the path that ends with `turn`).
    Column("scope", Text, nullable=False, server_default="session"),
    ForeignKeyConstraint(["session_id", "turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
)
"""Rewards. A turn's last reward counts."""

token_columns = _numbered(
    "token_columns",
    Column("session_id", Text, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("crc32", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    ForeignKeyConstraint(["session_id", "turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
    Index("token_columns_of_turn", "session_id", "turn", "name"),
)
"""Columns. The last values for a name and turn count. Older values are kept while a snapshot has them."""

events = _numbered(
    "events",
    Column("session_id", ForeignKey("sessions.session_id", ondelete="CASCADE"), nullable=False),
    Column("turn", Integer),
    *_required(Text, "kind", "body"),
    Column("created_at", Double, nullable=False),
    ForeignKeyConstraint(["session_id", "turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
    Index("events_of_turn", "session_id", "turn", "kind"),
)
"""Facts about sessions and turns that were found after they were recorded. Rows are only appended."""

token_payloads = Table(
    "token_payloads",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("start", Integer, nullable=False),
    *_required(Text, "dtype", "shape"),
    # The encoding of `data`: the dtype of its elements (the narrowest integer type that fits them if `dtype` is an
    # integer type). Later releases may add encodings, for example for rows of unequal length.
    Column("packed", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("crc32", BigInteger, nullable=False),
    ForeignKeyConstraint(["session_id", "turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
)
"""Payloads, written in the transaction of their turn. Packing int32 expert ids takes a quarter of the bytes and no
extra time."""

media = Table(
    "media",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("mime", Text, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
"""Images as received, and image processor settings. Each is stored once, as long as a turn refers to it."""

turn_media = Table(
    "turn_media",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("turn", Integer, primary_key=True),
    Column("sha256", ForeignKey("media.sha256"), primary_key=True, index=True),
    ForeignKeyConstraint(["session_id", "turn"], ["turns.session_id", "turns.seq"], ondelete="CASCADE"),
)
"""The media to which each turn's messages refer, written with the turn."""

snapshots = Table(
    "snapshots",
    metadata,
    Column("snapshot_id", _Position, primary_key=True, autoincrement=True),
    Column("owner", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    # The snapshot that this one is based on: sessions that have not changed since are left out.
    Column("since", ForeignKey("snapshots.snapshot_id")),
    # held, confirmed or released.
    Column("state", Text, nullable=False),
    # Null until the whole contents have been read once.
    Column("digest", Text),
    Column("contents", LargeBinary),
    sqlite_autoincrement=True,
)
"""Snapshots. They are never deleted, so that an id always means the same contents."""

snapshot_sessions = Table(
    "snapshot_sessions",
    metadata,
    Column("snapshot_id", ForeignKey("snapshots.snapshot_id"), primary_key=True),
    # The session's position. A later session with the same id has a different position.
    Column("position", _Position, primary_key=True),
    Column("session_id", Text, nullable=False, index=True),
    # The snapshot contains this number of turns, and the rewards, columns and events up to these positions.
    Column("turns", Integer, nullable=False),
    *_required(_Position, "last_reward", "last_column"),
    Column("last_event", _Position, nullable=False, server_default="0"),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("snapshot_id", ForeignKey("snapshots.snapshot_id"), nullable=False),
    Column("dropped_at", Double, nullable=False),
)
"""Sessions that were dropped after a snapshot that contains them was confirmed. Their ids are never reused."""

gate_changes = _numbered(
    "gate_changes",
    Column("closed", Integer, nullable=False),
    # 1 if calls in flight are to be aborted.
    Column("abort", Integer, nullable=False),
    # The name of the new weights; null if it was not passed.
    Column("weight_version", Text),
    Column("created_at", Double, nullable=False),
)
"""Pauses and resumes of sampling; the last one counts. Gateways that share a record pause together."""

gateways = Table(
    "gateways",
    metadata,
    Column("gateway_id", Text, primary_key=True),
    # The heartbeat, which grows while the gateway runs.
    Column("beat", _Position, nullable=False),
    # The newest gate change that the gateway has applied, and the number of its calls in flight.
    Column("heard", _Position, nullable=False),
    Column("under_way", Integer, nullable=False),
)
"""The gateways that share the record. A dead gateway's row stays until a different gateway notices."""

Migration: TypeAlias = Callable[[Connection], None]


def _to_4(connection: Connection) -> None:
    """Add events, the distributions of logprobs, resumes and adapters."""
    events.create(connection)
    names = ("sampled_from", "logprobs_of", "resumes", "adapter")
    for column in (snapshot_sessions.c.last_event, *(turns.c[name] for name in names)):
        definition = CreateColumn(column).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {definition}")


OLDEST = 3
"""The first schema version that is migrated. Only development versions wrote earlier ones."""

MIGRATIONS: tuple[Migration, ...] = (_to_4,)
"""`MIGRATIONS[i]` migrates schema version `OLDEST` + i to the next one. Only append to it."""

VERSION = OLDEST + len(MIGRATIONS)
"""The schema version of this release."""


def prepare(connection: Connection) -> None:
    """Create the tables in an empty database, or migrate an older database to the current version.

    If this raises, the caller must roll back its transaction. Raises `StoreError` if the database's version is unknown,
    and `StoreCorrupt` if the database is not Tokentape's.
    """
    version, current = _known_version(connection)
    if version is None:
        metadata.create_all(connection)
        connection.execute(meta.insert().values(key="schema_version", value=str(current)))
        return
    for migration in MIGRATIONS[version - OLDEST :]:
        migration(connection)
    if version < current:
        connection.execute(meta.update().where(meta.c.key == "schema_version").values(value=str(current)))


def check(connection: Connection) -> None:
    """Raise `StoreError` if the database can't be read without migration, `StoreCorrupt` if it is not Tokentape's."""
    version, current = _known_version(connection)
    if version is None:
        raise StoreCorrupt("the database is empty; expected a Tokentape database")
    if version < current:
        raise StoreError(
            f"the database has schema version {version}, but this Tokentape needs {current}; "
            "run `tokentape serve` on the database once to migrate it"
        )


def _known_version(connection: Connection) -> tuple[int | None, int]:
    """Return the database's version (None if it is empty) and the current version. Raises the errors of `prepare`."""
    current = OLDEST + len(MIGRATIONS)
    tables = connection.dialect.get_table_names(connection)
    if not tables:
        return None, current
    if meta.name not in tables:
        raise StoreCorrupt("the database has tables, but no Tokentape tables; use a different database")
    value = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
    if not (isinstance(value, str) and value.isascii() and value.isdigit() and int(value) > 0):
        raise StoreCorrupt("the database has no valid schema version")
    version = int(value)
    if not OLDEST <= version <= current:
        knows = f"knows {current}" if version > current else f"knows {OLDEST} to {current}"
        advice = "use the release that wrote it" + (", or a later one" if version > current else "")
        raise StoreError(f"the database has schema version {version}, but this Tokentape {knows}; {advice}")
    return version, current
