"""`tokentape demo`: run agents on a tiny model that ships with the package."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokentape.cli.arguments import AsJson, flag, option
from tokentape.cli.extras import require
from tokentape.cli.output import print_json, working
from tokentape.demo.findings import new_directory, print_report
from tokentape.demo.findings import replay as replayed
from tokentape.errors import TokentapeError


def demo(
    out: Annotated[
        Path | None, option("New directory for the record. Default: a fresh one under runs/demo.", file_okay=False)
    ] = None,
    sessions: Annotated[int, option("Number of concurrent sessions.", min=1, max=1000)] = 16,
    seed: Annotated[int, option("Seed for the tasks and the sampling.")] = 0,
    replay: Annotated[
        bool, flag("Show a recorded run. Needs no torch. Default if torch is not installed.", "--replay")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run agents on a tiny model and show where ids drift.

    Everything runs on this machine with a model that ships with the package. Without torch, a recorded run is shown.
    Exits with 1 if the record is not exact.
    """
    directory = new_directory() if out is None else out
    if not replay:
        try:
            require("torch", "transformers", "openai", extra="demo")
        except TokentapeError as error:
            typer.echo(f"Showing a recorded run, because the demo can't run here: {error}", err=True)
            replay = True
    with working("reading the record") as status:
        if replay:
            report = replayed(directory)
        else:
            from tokentape.demo.run import run_demo

            report = run_demo(directory, sessions, seed, progress=status.update)
    if as_json:
        places = {"directory": str(report.directory), "trajectories_file": str(report.trajectories_file)}
        print_json({**asdict(report), **places, "exact": report.exact})
    else:
        print_report(report)
    raise typer.Exit(0 if report.exact else 1)
