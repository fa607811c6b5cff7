"""`tokentape verify`: check a record."""

from __future__ import annotations

from dataclasses import asdict

import typer

from tokentape.cli.arguments import AsJson, StoreLocation
from tokentape.cli.output import print_json


def verify(store: StoreLocation, as_json: AsJson = False) -> None:
    """Re-check every hash and every rule of a record.

    Exits with 1 if anything is wrong. Changes nothing, and may run beside a gateway.
    """
    from tokentape.store.verify import verify as check

    report = check(store)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        for finding in report.findings:
            typer.echo(str(finding))
        typer.echo(
            f"sessions {report.sessions}, turns {report.turns}, tokens {report.tokens}: findings {len(report.findings)}"
        )
    raise typer.Exit(0 if report.ok else 1)
