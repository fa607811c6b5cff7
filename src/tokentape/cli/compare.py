"""`tokentape compare`: two records of ids, every difference located and told what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentape.cli.arguments import ANY_RECORD, there
from tokentape.cli.model_folder import open_tokenizer
from tokentape.cli.source import Source, open_source

if TYPE_CHECKING:
    from tokentape.audit.compare.rows import RowComparison
    from tokentape.audit.id_rows import Columns, IdRow


class ComparisonFormat(StrEnum):
    """How to write the differences."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    SARIF = "sarif"
    GITHUB = "github"


class Severity(StrEnum):
    """What makes the exit code 1."""

    ERROR = "error"
    WARNING = "warning"


_SIDE_HELP = f"{ANY_RECORD} Or a file of ids: .parquet, .jsonl, .json. With #NAME only that row, or that session."


def compare(
    expected: Annotated[str, typer.Argument(metavar="EXPECTED", help=_SIDE_HELP)],
    recorded: Annotated[str, typer.Argument(metavar="RECORDED", help="The same, to be compared with it.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Model folder. Default: that of a record."),
    ] = None,
    ids_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Ids, in somebody else's files. Default: token_ids, input_ids...")
    ] = None,
    mask_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="1 where the assistant's tokens are. Default: loss_mask...")
    ] = None,
    name_column: Annotated[str | None, typer.Option(metavar="NAME", help="What rows are called.")] = None,
    file_format: Annotated[ComparisonFormat, typer.Option("--format", help="What to print.")] = ComparisonFormat.TEXT,
    fail_on: Annotated[Severity, typer.Option(help="The least that makes the exit code 1.")] = Severity.WARNING,
    show: Annotated[int, typer.Option(metavar="N", min=1, help="Differences to print of each row, as text.")] = 20,
) -> None:
    """Compare two records of token ids, row by row.

    Ids are compared, not text. Every difference is located, told what it is (the same text in other ids, dropped
    reasoning, arguments written otherwise...), and an error or a warning. Rows of the same name belong together, or
    the only row of each side. Exits with 1 if something differs.
    """
    from tokentape.audit.compare.rows import compare_rows
    from tokentape.audit.id_rows import Columns

    (location, name), (other_location, other_name) = _address(expected), _address(recorded)
    columns = Columns(ids=ids_column, mask=mask_column, name=name_column)
    failed = False

    def watched(rows: Iterator[RowComparison]) -> Iterator[RowComparison]:
        nonlocal failed
        for row in rows:
            if row.comparison is None:
                failed = True
            else:
                found = row.comparison.errors if fail_on == Severity.ERROR else row.comparison.differences
                failed = failed or bool(found)
            yield row

    with ExitStack() as opened:
        side, other = (opened.enter_context(open_source(one)) for one in (location, other_location))
        _, loaded = open_tokenizer(tokenizer, side, other)
        rows = compare_rows(_rows(side, name, columns), _rows(other, other_name, columns), loaded)
        for line in _printed(watched(rows), file_format, other.name, show):
            typer.echo(line)
    raise typer.Exit(1 if failed else 0)


def _address(side: str) -> tuple[str, str | None]:
    """The location of a side, and the name of the row that it asks for."""
    if "://" in side:
        location, _, name = side.rpartition("#")
        # Ids of sessions have neither character: such a # is in a password or a path.
        if not location or "@" in name or "/" in name:
            location, name = side, ""
    else:
        location, _, name = side.partition("#")
    return there(location), name or None


def _rows(source: Source, name: str | None, columns: Columns) -> Iterator[IdRow]:
    from tokentape.audit.id_rows import session_rows
    from tokentape.errors import InvalidRequest

    if name is None:
        yield from source.rows(columns)
        return
    if source.store is not None:
        session_id, _, leaf = name.rpartition(":") if name.rpartition(":")[2].isdigit() else (name, "", "")
        rows = session_rows(source.store.load_session(session_id))
        found = [row for row in rows if not leaf or row.name == name]
    else:
        found = [row for row in source.rows(columns) if name in (row.name, row.name.rpartition(":")[0])]
    if not found:
        raise InvalidRequest(f"{source.name} has no row {name!r}")
    yield from found


def _printed(rows: Iterator[RowComparison], file_format: ComparisonFormat, recorded: str, show: int) -> Iterator[str]:
    from tokentape.audit.compare.formats import github, junit, sarif
    from tokentape.audit.report import json_text

    match file_format:
        case ComparisonFormat.JSON:
            yield json_text(_differing(rows))
        case ComparisonFormat.JUNIT:
            yield junit(rows).rstrip("\n")
        case ComparisonFormat.SARIF:
            yield json_text(sarif(rows, recorded))
        case ComparisonFormat.GITHUB:
            yield from github(rows, recorded)
        case ComparisonFormat.TEXT:
            yield from _text(rows, show)


def _text(rows: Iterator[RowComparison], show: int) -> Iterator[str]:
    from tokentape.audit.compare.formats import comparison_lines, row_summary
    from tokentape.audit.report import escape_invisible as shown

    total = differing = 0
    for row in rows:
        total += 1
        if row.same:
            continue
        differing += 1
        yield f"{shown(row.name)}: {row_summary(row)}"
        if row.comparison is not None:
            yield from (f"  {line}" for line in comparison_lines(row.comparison, show))
    yield f"{differing} of {total} rows differ"


def _differing(rows: Iterator[RowComparison]) -> dict[str, Any]:
    listed = []
    total = 0
    for row in rows:
        total += 1
        if not row.same:
            listed.append(row)
    return {"rows": total, "differing": len(listed), "comparisons": listed}
