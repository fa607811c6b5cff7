"""Compare the schema that a database has with the one that its version should have."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, Dialect, Table, UniqueConstraint, inspect
from sqlalchemy.engine.interfaces import ReflectedColumn

from tokentape.store import _schema as schema

_TRIGGERS = {
    "sqlite": "SELECT 'trigger', name, tbl_name FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": (
        "SELECT 'trigger', tgname, relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
        " WHERE NOT tgisinternal AND pg_table_is_visible(tgrelid)"
        " UNION ALL SELECT 'rule', rulename, tablename FROM pg_rules WHERE schemaname = current_schema()"
    ),
}
"""What changes rows while others are written."""


def schema_faults(connection: Connection) -> Iterator[str]:
    """Yield how the tables differ from those of the database's version. Columns may have any order: some were added.

    Tables and columns of others in the same database are left alone, and what does not act on a table of the record.
    """
    inspector, old = inspect(connection), schema.schema_version(connection) == schema.VERSION - 1
    tables = inspector.get_table_names()
    for kind, name, table in connection.exec_driver_sql(_TRIGGERS[connection.dialect.name]):
        if table in schema.metadata.tables:
            yield f"the {kind} {name} changes what is written to the table {table}"
    for table in schema.metadata.sorted_tables:
        if old and table in schema.TABLES_SINCE_4:
            if table.name in tables:
                yield f"the table {table.name} is there, and is not of schema version {schema.VERSION - 1}"
        elif table.name not in tables:
            yield f"the table {table.name} is missing, or is no table"
        else:
            found = {one["name"]: one for one in inspector.get_columns(table.name)}
            yield from _column_faults(table, found, old, connection.dialect)
            if inspector.get_pk_constraint(table.name)["constrained_columns"] != [
                one.name for one in table.primary_key
            ]:
                yield f"the table {table.name} has another primary key"
            unique = {tuple(one["column_names"]) for one in inspector.get_unique_constraints(table.name)}
            for constraint in table.constraints:
                if isinstance(constraint, UniqueConstraint) and tuple(constraint.columns.keys()) not in unique:
                    yield f"{', '.join(constraint.columns.keys())} of the table {table.name} are not unique"
            for check in inspector.get_check_constraints(table.name):
                yield f"the table {table.name} has a constraint that is not Tokentape's: {check['sqltext']}"
            keys = {
                (tuple(one["constrained_columns"]), one["referred_table"])
                for one in inspector.get_foreign_keys(table.name)
            }
            for key in table.foreign_key_constraints:
                if (tuple(key.column_keys), key.referred_table.name) not in keys:
                    yield f"{', '.join(key.column_keys)} of the table {table.name} refer to nothing"
            indexes = {one["name"]: one for one in inspector.get_indexes(table.name)}
            own = {index.name for index in table.indexes}
            for one in indexes.values():
                if one["unique"] and one["name"] not in own and not one.get("duplicates_constraint"):
                    yield f"the table {table.name} has the unique index {one['name']}, which is not Tokentape's"
            for index in table.indexes:
                there = indexes.get(index.name)
                if there is None or there["column_names"] != [one.name for one in index.columns]:
                    yield f"the index {index.name} is missing, or is of other columns"


def _column_faults(table: Table, found: dict[str, ReflectedColumn], old: bool, dialect: Dialect) -> Iterator[str]:
    expected = {one.name: one for one in table.columns if not (old and one in schema.COLUMNS_SINCE_4)}
    for name in sorted(expected.keys() - found.keys()):
        yield f"the column {name} of the table {table.name} is missing"
    for name in sorted(expected.keys() & found.keys()):
        column, own = expected[name], found[name]
        kinds = own["type"].compile(dialect), column.type.compile(dialect)
        if kinds[0] != kinds[1] or own["nullable"] != column.nullable or "computed" in own:
            yield f"the column {name} of the table {table.name} is not what this Tokentape makes"
