"""`tokentape drift`: how often sampled ids are not what encoding their text gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentape.cli.arguments import ANY_RECORD, AsJson, there
from tokentape.cli.model_folder import open_tokenizer
from tokentape.cli.source import Source, open_source

if TYPE_CHECKING:
    from tokentape.audit.drift.meter import DriftMeter
    from tokentape.audit.drift.report import DriftReport
    from tokentape.audit.drift.rerender import RerenderMeter
    from tokentape.audit.id_rows import Columns
    from tokentape.audit.intervals import Rate

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
        typer.echo(json.dumps(plain(report)))
    else:
        for line in _lines(report):
            typer.echo(line)
    if page is not None:
        from tokentape.audit.drift.page import drift_page

        page.write_text(drift_page(report, source.name), encoding="utf-8")
        typer.echo(f"wrote {page}", err=True)
    if fail_above is None:
        return
    if not report.completions.total:
        typer.echo("no completion was measured", err=True)
        raise typer.Exit(1)
    if report.completions.share > fail_above:
        typer.echo(f"{report.completions.share:.3%} of the completions drifted, limit {fail_above:.3%}", err=True)
        raise typer.Exit(1)


def plain(value: Any) -> Any:
    """A report as JSON values; a rate has its share besides."""
    from tokentape.audit.intervals import Rate

    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        return {**found, "share": value.share} if isinstance(value, Rate) else found
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    # JSON has no NaN and no infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def _lines(report: DriftReport) -> Iterator[str]:
    yield f"rows          {report.rows:,}; in brackets, 95 % confidence intervals"
    yield f"completions   {_rate(report.completions)} drifted"
    yield f"tokens        {_rate(report.tokens)} changed"
    if report.seams.total:
        yield f"seams         {_rate(report.seams)} of completions begin within a token of the joined text"
    if report.unknown_tokens:
        yield f"unknown       {report.unknown_tokens:,} tokens are halves of characters, cut off at an end"
    if report.other_text:
        yield f"other text    {report.other_text:,} completions came back with other text"
    if report.artifacts:
        yield ""
        yield "changed stretches"
        total = sum(one.stretches for one in report.artifacts)
        for one in report.artifacts:
            yield f"  {one.name:<24}{one.stretches:>9,}  {one.stretches / total:>6.1%}  {one.meaning}"
        yield f"  {_shapes(report)}"
    # Of nothing there is nothing to break down: every line would be the same zero.
    strata = report.strata if report.completions.changed else ()
    for dimension in dict.fromkeys(stratum.dimension for stratum in strata):
        yield ""
        yield f"by {dimension}"
        for stratum in strata:
            if stratum.dimension == dimension:
                yield f"  {_shown(stratum.value):<24}{_rate(stratum.tokens)}"
    yield ""
    yield from _cost(report)
    if report.examples:
        yield ""
        yield "for example"
        for name in dict.fromkeys(one.artifact for one in report.examples):
            example = next(one for one in report.examples if one.artifact == name)
            sampled, again = (_pieces(side) for side in (example.sampled_pieces, example.retokenized_pieces))
            yield f"  {name:<24}{sampled} -> {again}"
            yield f"  {'':<24}ids {list(example.sampled)} -> {list(example.retokenized)}"
            yield f"  {'':<24}{_shown(example.row)}, token {example.position}"


def _cost(report: DriftReport) -> Iterator[str]:
    cost = report.cost
    yield "what tokenizing again would have cost"
    if cost.rows_if_forked == cost.rows:
        yield "  no context of a later turn changes by this alone"
    else:
        yield (
            f"  rows {cost.rows:,} -> {cost.rows_if_forked:,}, tokens trained on {cost.tokens:,} -> "
            f"{cost.tokens_if_forked:,}, if it forks"
        )
    yield f"  sampled tokens masked {cost.masked_if_realigned:,}, if it realigns"
    if report.logprobs is not None:
        logprobs = report.logprobs
        yield (
            f"  logprob of the same text, sampled - retokenized: {logprobs.mean:+.3f} nats per completion, "
            f"absolute {logprobs.mean_absolute:.3f}, largest {logprobs.largest:.3f}; completions {logprobs.completions}"
        )
    again = report.rerendered
    if again is not None:
        yield ""
        yield f"rendered again {_rate(again.turns)} of later turns have another context"
        yield f"  sampled tokens in them {again.sampled_tokens:,}, of these changed {again.changed_sampled_tokens:,}"
        for kind, turns in again.kinds.items():
            yield f"  {kind:<24}{turns:>9,} turns, first difference of {again.first_kinds.get(kind, 0):,}"
        if again.unlike_roots:
            yield f"  {again.unlike_roots:,} branches begin otherwise already; that is not counted above"
        if again.refused:
            yield f"  the template refuses {again.refused:,} turns"


def _rate(rate: Rate) -> str:
    return f"{rate.share:>8.3%}  [{rate.low:.3%}, {rate.high:.3%}]  {rate.changed:,} of {rate.total:,}"


def _shapes(report: DriftReport) -> str:
    same, more, fewer = report.same_count, report.more_tokens, report.fewer_tokens
    span, bytes_ = report.span_tokens, report.resync_bytes
    return (
        f"as many tokens again {same:,}, more {more:,}, fewer {fewer:,}; sampled tokens median {span.median}, "
        f"p95 {span.p95}; bytes until in step again median {bytes_.median}, p95 {bytes_.p95}"
    )


def _pieces(pieces: tuple[str, ...]) -> str:
    return " ".join(_shown(json.dumps(piece, ensure_ascii=False)) for piece in pieces)


def _shown(text: str) -> str:
    from tokentape.cli.readable import readable

    return readable(text)
