"""Print the results of commands."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from tokentape._durable import write_durably
from tokentape.cli.arguments import NOTHING_MEASURED

if TYPE_CHECKING:
    from tokentape.audit._report import Report


def end(failed: bool, measured: int, what: str) -> NoReturn:
    """Exit with 1 if the command failed, `NOTHING_MEASURED` if it measured nothing (no `what`), otherwise 0."""
    if not failed and not measured:
        typer.echo(f"nothing was measured: no {what}", err=True)
    raise typer.Exit(1 if failed else 0 if measured else NOTHING_MEASURED)


def working(what: str) -> Status:
    """Show a status line on stderr during the context."""
    # Records have few reference cycles, and looking for them takes 7 % of an export's time.
    gc.freeze()
    gc.set_threshold(10_000)
    return Console(stderr=True).status(what)


def print_json(value: Any) -> None:
    """Print dataclasses, mappings and sequences as one line of ASCII JSON. NaN becomes null."""
    from tokentape.audit._report import json_text

    typer.echo(json_text(value))


def print_report(report: Report, html: Path | None, value: Any = None, ci: str | None = None) -> None:
    """Print `value` as JSON, else the text `ci`, else the report. Also write the report to the file `html`."""
    if value is not None:
        print_json(value)
    elif ci is not None:
        typer.echo(ci)
    else:
        report.print()
    if html is not None:
        write_durably(html, report.html().encode())
