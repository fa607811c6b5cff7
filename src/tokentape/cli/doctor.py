"""`tokentape doctor`: whether this machine is fit to run a gateway with these settings."""

from __future__ import annotations

import typer

from tokentape.cli.arguments import AsJson
from tokentape.cli.flags import config_of_serve
from tokentape.cli.output import print_json


def doctor(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Check what `tokentape serve` needs, before it needs it.

    Takes the arguments of `tokentape serve`. Every check is ok, warn or fail, with what to do. May run beside a
    gateway. Exits with 1 if one fails.
    """
    from rich.console import Console

    from tokentape.cli.examination import examine

    config = config_of_serve(ctx).config
    findings = []
    with Console(stderr=True).status("looking") as status:
        for finding in examine(config, status.update):
            findings.append(finding)
            if not as_json:
                typer.echo(f"{finding.status:<4}  {finding.name}: {finding.found}")
                if finding.advice:
                    typer.echo(f"      {finding.advice}")
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": findings})
    raise typer.Exit(1 if failed else 0)
