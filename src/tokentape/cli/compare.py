"""`tokentape compare`: find and classify every difference between two records of ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Literal

import typer

from tokentape.audit._id_rows import Columns, IdRow, session_rows
from tokentape.audit._tokendiff.rows import RowComparison, compare_rows, printed
from tokentape.cli import arguments as arg
from tokentape.cli.output import end
from tokentape.cli.source import RecordSource, open_source, open_tokenizer, refuse_columns
from tokentape.errors import InvalidRequest

_SIDE_HELP = f"{arg.ANY_RECORD} Or a file of ids (.parquet, .jsonl, .json). #NAME selects one row or session."


def compare(
    expected: Annotated[str, typer.Argument(metavar="EXPECTED", help=_SIDE_HELP)],
    recorded: Annotated[str, typer.Argument(metavar="RECORDED", help="The record or file to compare with it.")],
    tokenizer: arg.TokenizerFolder = None,
    ids_column: arg.IdsColumn = None,
    mask_column: arg.MaskColumn = None,
    name_column: arg.NameColumn = None,
    file_format: Annotated[
        Literal["text", "json", "junit", "sarif", "github"], arg.option("What to print.", None, "--format")
    ] = "text",
    fail_on: Annotated[
        Literal["error", "warning"], arg.option("The lowest severity that makes the exit code 1.")
    ] = "warning",
    max_delta: Annotated[float, arg.number("Largest difference between logprobs.", "NATS", min=0)] = 1e-3,
    show: Annotated[int, arg.option("Differences to print per row, as text.", "N", min=1)] = 20,
    as_json: arg.AsJson = False,
) -> None:
    """Compare two records of token ids, row by row.

    Compares ids, not text. Each difference is located and classified (the same text in different ids, dropped
    reasoning, reformatted arguments...) as an error or a warning. Masks and logprobs are compared if both sides have
    them. Rows match by name, or if each side has only one row. SESSION matches SESSION:LEAF if it has one leaf.
    Exits with 1 if something differs, 3 if neither side has a row.
    """
    (location, name), (other_location, other_name) = _address(expected), _address(recorded)
    columns = Columns(ids=ids_column, mask=mask_column, name=name_column)
    failed, compared = False, 0

    def watched(rows: Iterator[RowComparison]) -> Iterator[RowComparison]:
        nonlocal failed, compared
        for row in rows:
            comparison = row.comparison
            compared += 1
            failed |= comparison is None or bool(comparison.errors if fail_on == "error" else comparison.differences)
            failed |= bool(row.changed_values)
            yield row

    with ExitStack() as opened:
        side, other = (opened.enter_context(open_source(place)) for place in (location, other_location))
        refuse_columns(columns, side, other)
        _, loaded = open_tokenizer(tokenizer, side, other)
        rows = compare_rows(_rows(side, name, columns), _rows(other, other_name, columns), loaded, max_delta)
        for line in printed(watched(rows), "json" if as_json else file_format, other.name, show, fail_on):
            typer.echo(line)
    end(failed, compared, "row")


def _address(side: str) -> tuple[str, str | None]:
    """Split an argument into a location and the name of a row, if it has one."""
    if "://" in side:
        location, _, name = side.rpartition("#")
        # Session ids contain neither @ nor /: such a # is part of a password or a path.
        if not location or "@" in name or "/" in name:
            location, name = side, ""
    else:
        location, _, name = side.partition("#")
    return arg.there(location), name or None


def _rows(source: RecordSource, name: str | None, columns: Columns) -> Iterator[IdRow]:
    if name is None:
        yield from source.rows(columns)
        return
    if source.store is not None:
        session_id, _, leaf = name.rpartition(":") if name.rpartition(":")[2].isdigit() else (name, "", "")
        rows = session_rows(source.store.load_session(session_id))
        rows_of_name = [row for row in rows if not leaf or row.name == name]
    else:
        rows_of_name = [row for row in source.rows(columns) if name in (row.name, row.name.rpartition(":")[0])]
    if not rows_of_name:
        raise InvalidRequest(f"{source.name} has no row {name!r}; pass the name of a row or session after #")
    yield from rows_of_name
