"""`tokentape drift`: measure how often decoding and encoding sampled ids changes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._drift.report import drift_layout
from tokentape.audit._drift.rerender import RerenderMeter
from tokentape.audit._id_rows import Columns, IdRow, session_rows
from tokentape.chat._renderer import Renderer
from tokentape.cli import arguments as arg
from tokentape.cli.extras import open_forward
from tokentape.cli.output import end, print_report, working
from tokentape.cli.source import RecordSource, open_source, open_tokenizer, refuse_columns
from tokentape.errors import TokenizerUnusable
from tokentape.store._location import refuse_output


def drift(
    location: Annotated[str, arg.record_or_file("a file of ids (.parquet, .jsonl, .json).")],
    tokenizer: arg.TokenizerFolder = None,
    model: Annotated[
        Path | None,
        arg.existing_folder(
            "Model folder with weights, to compute logprobs of drifted completions with both sets of ids.", "FOLDER"
        ),
    ] = None,
    ids_column: arg.IdsColumn = None,
    mask_column: arg.MaskColumn = None,
    prompt_column: Annotated[str | None, arg.option("Column with the ids before the sampled ones.", "NAME")] = None,
    name_column: arg.NameColumn = None,
    by: Annotated[
        list[str] | None, arg.option("Also split the report by this column; may be repeated.", "COLUMN")
    ] = None,
    rerender: Annotated[
        int, arg.option("Largest number of later turns of a record to render again.", "N", min=0)
    ] = 200,
    completions: Annotated[
        int, arg.option("With --model: largest number of drifted completions to compute.", "N", min=1)
    ] = 100,
    fail_above: Annotated[
        float | None, arg.number("Exit with 1 if a larger share of completions drifted.", "RATE", min=0, max=1)
    ] = None,
    html: arg.HtmlFile = None,
    as_json: arg.AsJson = False,
) -> None:
    """Measure how often sampled ids change when they are decoded and encoded again.

    Reports P(encode(decode(ids)) != ids) over completions and tokens, with 95 % confidence intervals, which kinds of
    text change and where, and the cost to a trainer that retokenizes. Later turns of a record are also rendered again
    from their messages. The record is not changed. Exits with 3 if there are no completions.
    """
    refuse_output(html, location, tokenizer, model)
    columns = Columns(ids_column, mask_column, prompt_column, name_column, tuple(by or ()))
    with open_source(location) as source:
        refuse_columns(columns, source)
        folder, loaded = open_tokenizer(tokenizer or model, source)
        again = _rerender_meter(folder, loaded.sha256, rerender) if source.store is not None and rerender else None
        forward = None if model is None else open_forward(model)
        report = measure_drift(_rows(source, columns, again), loaded, forward=forward, forward_limit=completions)
        report = report if again is None else replace(report, rerendered=again.report())
    print_report(drift_layout(report, source.name), html, report if as_json else None)
    if html is not None:
        typer.echo(f"wrote {html}", err=True)
    share = report.completions.share
    failed = fail_above is not None and share > fail_above
    if failed:
        typer.echo(f"{share:.3%} of the completions drifted, limit {fail_above:.3%}", err=True)
    end(failed, report.completions.total, "completion")


def _rows(source: RecordSource, columns: Columns, again: RerenderMeter | None) -> Iterator[IdRow]:
    """Yield the rows of a source, and render its sessions again."""
    with working("measuring") as status:
        for number, row in enumerate(source.rows(columns) if source.store is None else (), 1):
            yield row
            if number % 500 == 0:
                status.update(f"measured {number} rows")
        for number, stored in enumerate(() if source.store is None else source.store.iter_sessions(), 1):
            yield from session_rows(stored)
            if again is not None:
                again.add(stored)
            status.update(f"measured {number} sessions")


def _rerender_meter(folder: Path, sha256: str, most: int) -> RerenderMeter | None:
    """Return the meter, or None if the folder has no chat template or a different tokenizer."""
    try:
        renderer = Renderer.load(folder)
    except TokenizerUnusable as error:
        typer.echo(f"turns are not rendered again: {error}", err=True)
        return None
    return RerenderMeter(renderer, most) if renderer.tokenizer.sha256 == sha256 else None
