"""`tokentape drift`: how often sampled ids are not what encoding their text gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentape.cli.arguments import ANY_RECORD, AsJson, there
from tokentape.cli.model_folder import open_tokenizer
from tokentape.cli.output import print_json
from tokentape.cli.source import Source, open_source

if TYPE_CHECKING:
    from tokentape.audit.drift.meter import DriftMeter
    from tokentape.audit.drift.report import DriftReport
    from tokentape.audit.drift.rerender import RerenderMeter
    from tokentape.audit.id_rows import Columns

ModelFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Model folder. Default: that of the record."),
]


def drift(
    location: Annotated[
        str,
        typer.Argument(
            metavar="STORE_OR_FILE", callback=there, help=f"{ANY_RECORD} Or a file of ids: .parquet, .jsonl, .json."
        ),
    ],
    tokenizer: ModelFolder = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Model folder with weights: what it says of drifted completions in both spellings.",
        ),
    ] = None,
    ids_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Ids, in somebody else's file. Default: token_ids, input_ids...")
    ] = None,
    mask_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="1 where a token was sampled. Default: loss_mask..., or all.")
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(metavar="NAME", help="Ids in front, not sampled.")] = None,
    name_column: Annotated[str | None, typer.Option(metavar="NAME", help="What rows are called.")] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Split the report by it too; may be given several times.")
    ] = None,
    rerender: Annotated[
        int, typer.Option(metavar="N", min=0, help="Render at most this many later turns of a record again.")
    ] = 200,
    completions: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --model: at most this many drifted completions.")
    ] = 100,
    fail_above: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0,
            max=1,
            help="Exit with 1 if a greater share of completions drifted, or there are none.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", dir_okay=False, help="Write the report as a page too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how often sampled ids change when they go through text.

    P(encode(decode(ids)) != ids) over completions and tokens, with 95 % confidence intervals, what kinds of stretches
    change and where, and what that costs a trainer that tokenizes again. Of a record, later turns are also rendered
    again from their messages. Nothing is written to it.
    """
    from tokentape.audit.drift.layout import drift_layout
    from tokentape.audit.drift.meter import DriftMeter
    from tokentape.audit.id_rows import Columns

    columns = Columns(ids_column, mask_column, prompt_column, name_column, tuple(by or ()))
    with open_source(location) as source:
        folder, loaded = open_tokenizer(tokenizer or model, source)
        meter = DriftMeter(loaded, forward=_forward(model), forward_limit=completions)
        again = _rerender_meter(folder, loaded.sha256, rerender) if source.store is not None and rerender else None
        _measure(source, columns, meter, again)
        report = _whole(meter, again)
    if as_json:
        print_json(report)
    else:
        drift_layout(report, source.name).print()
    if page is not None:
        page.write_text(drift_layout(report, source.name).html(), encoding="utf-8")
        typer.echo(f"wrote {page}", err=True)
    if fail_above is None:
        return
    if not report.completions.total:
        typer.echo("no completion was measured", err=True)
        raise typer.Exit(1)
    if report.completions.share > fail_above:
        typer.echo(f"{report.completions.share:.3%} of the completions drifted, limit {fail_above:.3%}", err=True)
        raise typer.Exit(1)


def _measure(source: Source, columns: Columns, meter: DriftMeter, again: RerenderMeter | None) -> None:
    from rich.console import Console

    from tokentape.audit.id_rows import session_rows

    with Console(stderr=True).status("measuring") as status:
        if source.store is None:
            for number, row in enumerate(source.rows(columns), 1):
                meter.add(row)
                if number % 500 == 0:
                    status.update(f"measured {number} rows")
            return
        for number, stored in enumerate(source.store.iter_sessions(), 1):
            for row in session_rows(stored):
                meter.add(row)
            if again is not None:
                again.add(stored)
            status.update(f"measured {number} sessions")


def _whole(meter: DriftMeter, again: RerenderMeter | None) -> DriftReport:
    report = meter.report()
    return report if again is None else replace(report, rerendered=again.report())


def _forward(model: Path | None) -> Any:
    if model is None:
        return None
    from tokentape.cli.extras import require

    require("torch", "transformers", extra="hf")

    from tokentape.training.logprob_check import forward_pass

    return forward_pass(model)


def _rerender_meter(folder: Path, sha256: str, most: int) -> RerenderMeter | None:
    """None if the folder has no chat template, or another tokenizer than is named."""
    from tokentape.audit.drift.rerender import RerenderMeter
    from tokentape.chat.renderer import Renderer
    from tokentape.errors import TokenizerUnusable

    try:
        renderer = Renderer.load(folder)
    except TokenizerUnusable as error:
        typer.echo(f"turns are not rendered again: {error}", err=True)
        return None
    return RerenderMeter(renderer, most) if renderer.tokenizer.sha256 == sha256 else None
