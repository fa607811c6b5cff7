"""`tokentape check-logprobs`: compare recorded logprobs with a trainer's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._mismatch import Attribution
from tokentape.audit._report import CiCase, CiFinding, ci_report
from tokentape.audit._report import escape_for_terminal as readable
from tokentape.audit._statistics import Numbers
from tokentape.audit._tokendiff.retokenizing import TokenDrift as Drift
from tokentape.chat._renderer import Renderer
from tokentape.cli import arguments as arg
from tokentape.cli.extras import Device, open_forward
from tokentape.cli.output import end, print_json, working
from tokentape.cli.source import open_source, open_tokenizer
from tokentape.engines._base import Dtype
from tokentape.store._served_model import served_tokenizer
from tokentape.training._logprob_check import NOTHING_COMPARED, LogprobLimits, LogprobReport, Outlier, read_rows
from tokentape.training._logprob_check import check_logprobs as check
from tokentape.training._rerendering import IfRerendered, check_rerendered


def check_logprobs(
    location: Annotated[str, arg.record_or_file("a file that export wrote (.parquet, .jsonl).")],
    model: Annotated[
        Path | None,
        arg.existing_folder(
            "Model folder, for tokenizer and forward pass. Default without --batch: the one that the record names."
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        arg.existing_file("A trainer's file: session_id, leaf, token_ids, trainer_logprobs, in Parquet or .jsonl."),
    ] = None,
    adapter: arg.Adapter = None,
    device: Device = None,
    dtype: Annotated[Dtype, arg.option("Precision of the forward pass.")] = "float32",
    max_mean: Annotated[float, arg.number("Largest mean difference on the same ids.", "NATS")] = 0.02,
    max_delta: Annotated[float | None, arg.number("Largest difference of one token on the same ids.", "NATS")] = None,
    max_k3: Annotated[float, arg.number("Largest clamped k3 on the same ids.", "NATS")] = 0.01,
    max_drift: Annotated[
        float, arg.number("Largest share of trained tokens with different ids, or with different text.", "SHARE")
    ] = 0.0,
    max_missing: Annotated[
        int, arg.option("Largest number of rows missing in the record or --batch, or cut in --batch.", "N", min=0)
    ] = 0,
    outliers: Annotated[int, arg.option("How many tokens to list.", "N", min=0)] = 10,
    rerender: Annotated[
        bool, arg.flag("Also report what rendering the messages again would change.", "--rerender")
    ] = False,
    file_format: arg.CiFormat = "text",
    as_json: arg.AsJson = False,
) -> None:
    """Compare recorded logprobs with a trainer's.

    The trainer is a model folder, a file with its ids or logprobs, or both: if the file has no logprobs, the model
    computes them. Exits with 1 if a limit is exceeded, and prints the channel: rows (missing on one side, or cut),
    numeric (same ids, different logprobs), id drift (same text, different ids) or text drift (different text). Exits
    with 3 if no logprob was compared and no limit is exceeded. Changes by retokenizing or --rerender are reported but
    are not failures. --rerender needs a record, because exported files have no messages.
    """
    with open_source(location) as source:
        if rerender and source.store is None:
            raise typer.BadParameter(f"--rerender needs a record; {source.name} is a file, which has no messages")
        if model is None and batch is None:
            if source.served_model() is None:
                raise typer.BadParameter(
                    f"there is nothing to compare with, because {source.name} does not name the model that was "
                    "served; pass --model, --batch, or both"
                )
            model, _ = open_tokenizer(None, source, option="--model")
            typer.echo(f"model: {model}, the one that {source.name} was last recorded with", err=True)
        if adapter is not None and model is None:
            raise typer.BadParameter("--adapter needs its base model; pass --model FOLDER", param_hint="--model")
        name, weights = adapter or (None, None)
        rows = None if batch is None else read_rows(batch)
        needs_model = rows is None or rerender or any(row.logprobs is None for row in rows.values())
        forward = None if model is None or not needs_model else open_forward(model, dtype, weights, device)
        loaded_tokenizer = (
            served_tokenizer(source.served_model())
            if model is None
            else open_tokenizer(model, source, option="--model")[1]
        )
        tokenizer = None if isinstance(loaded_tokenizer, str) else loaded_tokenizer
        with working("comparing"):
            report = check(
                source.trajectories(),
                rows=rows,
                forward=forward,
                tokenizer=tokenizer,
                outliers=outliers,
                precision="float32" if dtype == "float32" else "bfloat16",
                adapter=name,
            )
        again = None
        if rerender and source.store is not None:
            folder, _ = open_tokenizer(model, source, option="--model")
            again = check_rerendered(source.store.iter_sessions(), Renderer.load(folder), forward)
    failures = report.failures(LogprobLimits(max_mean, max_delta, max_k3, max_drift, max_missing))
    if as_json:
        by_channel = {channel: [what for failed, what in failures if failed == channel] for channel, _ in failures}
        value = {"ok": not failures, "failures": by_channel, **asdict(report)}
        print_json(value if again is None else {**value, "if_rerendered": again})
    elif file_format != "text":
        channel_findings = [CiFinding(channel, "error", channel, what) for channel, what in failures]
        case = CiCase(
            "logprobs", channel_findings, details=[*(f"{c}: {what}" for c, what in failures), *_lines(report)]
        )
        typer.echo(ci_report(file_format, "tokentape check-logprobs", location, _RULES, [case]))
    else:
        for line in (*_lines(report), *(() if again is None else _rerendered_lines(again))):
            typer.echo(line)
        for channel, what in failures:
            typer.echo(f"{channel}: {what}", err=True)
        if not failures:
            typer.echo("within the limits")
    # Rows and ids are compared even where no logprob can be. An empty record measures nothing.
    trajectories = report.sequences + report.without_trainer
    wrong = bool(trajectories) and any(what != NOTHING_COMPARED for _, what in failures)
    end(wrong, report.compared, "token that both sides have")


_RULES = {
    "rows": "rows that only one side has, or that are cut",
    "numeric": "the same ids, other numbers",
    "id drift": "the same text, other ids",
    "text drift": "other text",
}


def _lines(report: LogprobReport) -> Iterator[str]:
    cut = f", cut {report.cut}, by {report.cut_tokens} trained tokens" if report.cut else ""
    sides = f"without a trainer's row {report.without_trainer}, unknown {report.unknown}"
    yield f"sequences {report.sequences}, {sides}{cut}"
    yield f"numeric     {numbers_line(report.numeric)}"
    yield f"id drift    {_drift_line(report.id_drift)}"
    yield f"text drift  {_drift_line(report.text_drift)}"
    if report.after_drift.tokens:
        yield f"after it    {numbers_line(report.after_drift)}"
    if report.if_retokenized is not None:
        yield f"retokenizing would change {_drift_line(report.if_retokenized)}"
    if report.outliers:
        yield "furthest apart:"
        yield from map(_outlier, report.outliers)
    yield from cause_lines(report.not_comparable, report.causes)


def cause_lines(not_comparable: Mapping[str, int], causes: Sequence[Attribution]) -> Iterator[str]:
    """Yield lines about tokens that were not compared, and about the causes of differences."""
    for why, tokens in sorted(not_comparable.items()):
        yield f"not comparable: {tokens} tokens: {why}"
    for cause in causes:
        where = f"weights {cause.weight_version}, recorded as {cause.expected}: {cause.apart} of {cause.tokens} tokens"
        yield f"cause: {' or '.join(cause.causes)} ({where}): {cause.detail}"


def _rerendered_lines(again: IfRerendered) -> Iterator[str]:
    yield f"rendering again, of {again.sequences} conversations, {again.refused} more refused:"
    for name, changed in (("id drift", again.id_drift), ("text drift", again.text_drift)):
        drift = Drift(again.sequences, changed.sequences, again.tokens, changed.tokens, changed.kinds)
        yield f"  {name:<10}  {_drift_line(drift)}"
    for name, numbers in (
        ("numeric", again.numeric),
        ("after id drift", again.after_id_drift),
        ("after text drift", again.after_text_drift),
    ):
        if numbers.tokens:
            yield f"  {name}: {numbers_line(numbers)}"


def numbers_line(numbers: Numbers) -> str:
    """Return numbers in one line."""
    return (
        f"tokens {numbers.tokens}, mean {numbers.mean:.2g}, max {numbers.max:.2g}, k3 {numbers.k3:.2g}, "
        f"ESS {numbers.ess_tokens:.1%} of tokens, {numbers.ess_sequences:.1%} of sequences"
    )


def _drift_line(drift: Drift) -> str:
    classes = "".join(f", {kind} {count}" for kind, count in sorted(drift.classes.items()))
    return (
        f"{drift.changed_tokens} of {drift.tokens} tokens, {drift.changed_sequences} of {drift.sequences} "
        f"sequences{classes}"
    )


def _outlier(outlier: Outlier) -> str:
    text = "" if outlier.text is None else f" {readable(json.dumps(outlier.text, ensure_ascii=False))}"
    drift = "" if outlier.drift_class is None else f" after {outlier.drift_class}"
    where = f"{readable(outlier.session_id)} leaf {outlier.leaf} turn {outlier.turn} position {outlier.position}"
    return (
        f"  {where} id {outlier.token_id}{text}: "
        f"recorded {outlier.recorded:.4f}, trainer {outlier.trainer:.4f} ({outlier.channel}{drift})"
    )
