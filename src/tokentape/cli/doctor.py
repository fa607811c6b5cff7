"""`tokentape doctor`: check that this machine can run a gateway with these settings."""

from __future__ import annotations

from typing import Annotated

import typer

from tokentape.cli.arguments import AsJson, option
from tokentape.cli.examination import examine
from tokentape.cli.output import print_json, working
from tokentape.cli.serve import config_of_serve
from tokentape.training._trainers import TRAINERS


def doctor(
    ctx: typer.Context,
    trainer: Annotated[
        str | None,
        option(
            "Also check that a trainer can use the log-probabilities that are recorded: agent-lightning, miles, "
            "nemo-rl, prime-rl, skyrl, slime, tinker, trl, verifiers or verl.",
            "NAME",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what `tokentape serve` needs, before it needs it.

    Takes the arguments of `tokentape serve` too, for example: tokentape doctor Qwen/Qwen3-8B --engine vllm
    --engine-url http://127.0.0.1:8000 --data runs/serve. Every check is ok, warn or fail, with what to do. May run
    beside a gateway. Exits with 1 if one fails.
    """
    if trainer is not None and trainer.lower() not in TRAINERS:
        raise typer.BadParameter(
            f"unknown trainer {trainer!r}; choose from {', '.join(sorted(TRAINERS))}", param_hint="--trainer"
        )
    config = config_of_serve(ctx).config
    findings = []
    with working("looking") as status:
        for finding in examine(config, status.update, trainer and trainer.lower()):
            findings.append(finding)
            if not as_json:
                typer.echo(f"{finding.status:<4}  {finding.name}: {finding.found}")
                if finding.advice:
                    typer.echo(f"      {finding.advice}")
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": findings})
    raise typer.Exit(1 if failed else 0)
