"""Check the invariants of turns, columns and payloads, before writing and in `verify`, and the tables' schema."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sqlalchemy import Connection, Dialect, Inspector, Table, UniqueConstraint, inspect

from tokentape._session.chain import fits_digest
from tokentape._session.media import media_spans
from tokentape._session.payloads import ROW_DTYPES
from tokentape.errors import TokentapeError
from tokentape.store import _schema as schema
from tokentape.types import Provenance, Turn, TurnColumn, TurnPayload

_MAY_BE_ADDED = bytes(code for code in Provenance if code is not Provenance.SAMPLED)
"""The provenance codes of added tokens."""


def turn_faults(turn: Turn) -> Iterator[str]:
    """Yield a sentence for each invariant that `turn` violates, except those that involve other turns."""
    if turn.added_provenance.size != turn.added_ids.size:
        yield f"{turn.added_ids.size} added ids, but {turn.added_provenance.size} provenance codes"
    if turn.logprobs.size != turn.completion_ids.size:
        yield f"{turn.completion_ids.size} sampled ids, but {turn.logprobs.size} logprobs"
    if turn.parent is None and not turn.added_ids.size:
        yield "a root turn has no prompt"
    if not turn.completion_ids.size and turn.finish_reason != "abort":
        yield f"no sampled ids, but finish_reason is {turn.finish_reason!r}, not 'abort'"
    if turn.added_provenance.tobytes().translate(None, _MAY_BE_ADDED):
        yield "an added token is marked as sampled or has an unknown provenance code"
    try:
        media_spans(turn.messages, turn.added_provenance)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its images don't fit its ids ({error})"


def per_token_faults(record: TurnColumn | TurnPayload, added: int, sampled: int, *, is_root: bool) -> Iterator[str]:
    """Yield a sentence for each invariant that a column or payload violates, given its turn's numbers of ids."""
    if isinstance(record, TurnColumn):
        if record.values.size not in (sampled, added + sampled):
            yield (
                f"column {record.name!r} has {record.values.size} values; "
                f"send {sampled}, one per sampled id, or {added + sampled}, one per added and sampled id"
            )
        if not np.isfinite(record.values).all():
            yield f"column {record.name!r} has values that are not finite numbers"
        return
    name, rows = f"payload {record.name!r}", record.rows
    if rows.ndim < 1 or not len(rows):
        yield f"{name} has no rows"
        return
    if rows.dtype.newbyteorder("<").str not in ROW_DTYPES:
        yield f"{name} has the dtype {rows.dtype}, which is not supported"
    elif rows.dtype == object and not all(isinstance(row, bytes) for row in rows):
        yield f"{name} has rows of unequal length that are not bytes"
    first, last, end = 0 if is_root else -1, added + sampled, record.start + len(rows)
    if record.start < first or end > last:
        yield f"{name} has rows for tokens {record.start} to {end}; the turn's tokens are {first} to {last}"


def chained(turn: Turn, parent_digest: str | None) -> bool:
    """Return whether the digest of `turn` matches its fields and its parent's digest (None for a root)."""
    try:
        return fits_digest(turn, parent_digest)
    except (TokentapeError, TypeError, ValueError):
        # A damaged row may contain values of types that have no digest.
        return False


_TRIGGERS = {
    "sqlite": "SELECT 'trigger', name, tbl_name FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": (
        "SELECT 'trigger', tgname, relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
        " WHERE NOT tgisinternal AND pg_table_is_visible(tgrelid)"
        " UNION ALL SELECT 'rule', rulename, tablename FROM pg_rules WHERE schemaname = current_schema()"
    ),
}
"""Queries for the objects that can change rows when others are written."""


def schema_faults(connection: Connection) -> Iterator[str]:
    """Yield how the tables differ from this release's schema. Columns may have any order.

    Unrelated tables and columns in the same database are ignored, as are objects that don't act on the record's tables.
    """
    inspector = inspect(connection)
    tables = inspector.get_table_names()
    for kind, name, table in connection.exec_driver_sql(_TRIGGERS[connection.dialect.name]):
        if table in schema.metadata.tables:
            yield f"the {kind} {name} changes what is written to the table {table}"
    for table in schema.metadata.sorted_tables:
        if table.name in tables:
            yield from _table_faults(table, inspector, connection.dialect)
        else:
            yield f"the table {table.name} is missing or is not a table"


def _table_faults(table: Table, inspector: Inspector, dialect: Dialect) -> Iterator[str]:
    named = f"of the table {table.name}"
    existing = {column["name"]: column for column in inspector.get_columns(table.name)}
    for column in sorted(table.columns, key=lambda column: column.name):
        there = existing.get(column.name)
        if there is None:
            yield f"the column {column.name} {named} is missing"
        elif (
            there["type"].compile(dialect) != column.type.compile(dialect)
            or there["nullable"] != column.nullable
            or "computed" in there
        ):
            yield f"the column {column.name} {named} differs from this Tokentape's schema"
    if inspector.get_pk_constraint(table.name)["constrained_columns"] != table.primary_key.columns.keys():
        yield f"the table {table.name} has a different primary key"
    unique = {tuple(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table.name)}
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint) and tuple(constraint.columns.keys()) not in unique:
            yield f"{', '.join(constraint.columns.keys())} {named} are not unique"
    for check in inspector.get_check_constraints(table.name):
        yield f"the table {table.name} has a constraint that is not Tokentape's: {check['sqltext']}"
    keys = {(*key["constrained_columns"], key["referred_table"]) for key in inspector.get_foreign_keys(table.name)}
    for key in table.foreign_key_constraints:
        if (*key.column_keys, key.referred_table.name) not in keys:
            yield f"{', '.join(key.column_keys)} {named} have no foreign key"
    own = {index.name: index.columns.keys() for index in table.indexes}
    indexes = {index["name"]: index for index in inspector.get_indexes(table.name)}
    for name, index in indexes.items():
        if index["unique"] and name not in own and not index.get("duplicates_constraint"):
            yield f"the table {table.name} has the unique index {name}, which is not Tokentape's"
    for name, columns in own.items():
        if name not in indexes or indexes[name]["column_names"] != columns:
            yield f"the index {name} is missing or covers different columns"
