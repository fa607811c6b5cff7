"""`tokentape score`: compute an engine's logprobs of the recorded ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tokentape.audit._scoring import ScoreReport, open_and_score, recorded_sessions
from tokentape.cli.arguments import Adapter, AsJson, EngineKey, existing_folder, flag, option, record
from tokentape.cli.check_logprobs import cause_lines, numbers_line
from tokentape.cli.extras import Device, ModelDtype, require
from tokentape.cli.output import end, print_json, working
from tokentape.cli.source import RecordSource, open_tokenizer
from tokentape.client import Client
from tokentape.errors import InvalidRequest
from tokentape.store._location import open_existing
from tokentape.store._served_model import described, engines_of, stored_vocabulary

_HALF = {"bfloat16", "float16"}


def score(
    location: Annotated[
        str,
        typer.Argument(
            metavar="RECORD",
            callback=record,
            help="A data directory that no gateway has open, postgresql://user@host/database, or the http:// URL of a "
            "running gateway.",
        ),
    ],
    engine: Annotated[
        Literal["transformers", "vllm", "sglang"],
        option("transformers: loads the weights in this process. vllm, sglang: the server at --engine-url."),
    ] = "transformers",
    engine_url: Annotated[str | None, option("Base URL of the engine's server.", "URL")] = None,
    model: Annotated[
        Path | None,
        existing_folder(
            "Model folder: tokenizer, and weights for --engine transformers. Default: the one that the record names."
        ),
    ] = None,
    engine_model: Annotated[
        str | None, option("Name of the model on the server. Default: the first that it lists.", "NAME")
    ] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: ModelDtype = None,
    column: Annotated[str | None, option("Column. Default: sampler_logprobs or teacher_logprobs.", "NAME")] = None,
    teacher: Annotated[
        bool, flag("The engine runs a different model than the one that sampled; don't compare.", "--teacher")
    ] = False,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        option(
            "Precision to judge differences by: the lower one of this engine and the engine that sampled. Default: "
            "bfloat16 with a server, or if the embedded engine sampled or scores in bfloat16 or float16; otherwise "
            "float32. Of a gateway's record, only this engine is known."
        ),
    ] = None,
    again: Annotated[bool, flag("Also score turns that already have the column.", "--again")] = False,
    concurrency: Annotated[int, option("Sessions that a server scores concurrently.", "N", min=1)] = 8,
    api_key: EngineKey = None,
    gateway_key: Annotated[str | None, option("API key for the gateway.", envvar="TOKENTAPE_API_KEY")] = None,
    as_json: AsJson = False,
) -> None:
    """Score the recorded ids with an engine, and store the scores as a column.

    The scores are the model's own logprobs: at temperature 1, before penalties and truncation. Turns that already have
    the column are skipped, so an interrupted run can be continued. Without --teacher, the recorded logprobs are
    compared with scores under the same distribution; if that is not possible, the reason is printed. Exits with 1 if
    the difference is larger than rounding explains, and names the cause if it is known: ids, temperature, truncation,
    zeros, rounding, a shift by one token, isolated tokens, scale, kernels or weights. Exits with 3 if nothing was
    compared, or if there was nothing to score with --teacher.
    """
    if (engine == "transformers") == (engine_url is not None):
        raise typer.BadParameter(
            "pass --engine-url with --engine vllm or sglang, and only with these", param_hint="--engine-url"
        )
    embedded = engine == "transformers"
    if not embedded and (device or dtype):
        raise typer.BadParameter("only for --engine transformers; leave it out", param_hint="--device, --dtype")
    full = embedded and dtype in (None, "float32")
    judged = None if teacher else precision or ("float32" if full else "bfloat16")
    options: dict[str, Any] = {
        "column": column or ("teacher_logprobs" if teacher else "sampler_logprobs"),
        "precision": judged,
        "again": again,
        # One at a time, so that branches of a session share their common prefix.
        "concurrency": 1 if embedded else concurrency,
        "engine_model": engine_model,
        "adapter": adapter,
        "options": {"device": device or "auto", "dtype": dtype or "float32"} if embedded else {"api_key": api_key},
    }
    if embedded:
        require("torch", "transformers", extra="hf")
    if location.startswith(("http://", "https://")):
        if model is None:
            raise typer.BadParameter(
                "pass the model folder, because a gateway does not report it", param_hint="--model"
            )
        with Client(location, api_key=gateway_key, max_retries=0) as client:
            # Fail at once if there is no gateway.
            next(client.sessions(), None)
        with Client(location, api_key=gateway_key) as client:
            report = client.score(engine, engine_url, model=model, **options)
    else:
        report = _of_store(location, engine, engine_url, model, may_lower=precision is None, **options)
    if as_json:
        # Without a comparison the result is unknown.
        ok = not report.causes if report.numeric.tokens else None
        print_json({"ok": ok, **asdict(report)})
    else:
        for line in _lines(report):
            typer.echo(line)
    if judged is None:
        end(False, report.turns + report.had_it, "turn to score")
    end(bool(report.causes), report.numeric.tokens, "recorded logprob that can be compared with a score")


def _of_store(
    location: str, engine: str, url: str | None, model: Path | None, *, again: bool, may_lower: bool, **options: Any
) -> ScoreReport:
    with open_existing(location) as store:
        source = RecordSource(location, store)
        served = source.served_model()
        folder, tokenizer = open_tokenizer(model, source, option="--model")
        with store.reading() as connection:
            vocabulary = stored_vocabulary(connection)
            engines = engines_of(connection)
        # Ids are scored, not text, so other merges, or the same file written again by a trainer, change nothing.
        same = served is None or served.tokenizer_sha256 == tokenizer.sha256
        if not (same if vocabulary is None else vocabulary == described(tokenizer)):
            reason = f"the tokenizer in {folder} has another vocabulary than {source.name} was recorded with"
            raise InvalidRequest(f"{reason}; pass the folder of the record's model with --model", "model")
        typer.echo(f"model: {folder}", err=True)
        if may_lower and options["precision"] == "float32" and any(_HALF & {*name.split()} for name in engines):
            options["precision"] = "bfloat16"
            typer.echo("precision: bfloat16, because turns were sampled in bfloat16 or float16", err=True)
        sessions = recorded_sessions(store, options["column"], again=again)
        with working("scoring"):
            return asyncio.run(
                open_and_score(sessions, lambda columns: store.write(*columns), engine, folder, url, **options)
            )


def _lines(report: ScoreReport) -> Iterator[str]:
    yield f"{report.tokens} tokens of {report.turns} turns in {report.sessions} sessions scored as {report.column}"
    yield f"by {report.engine} ({report.model}), at temperature 1, before penalties and truncation"
    if report.had_it:
        yield f"{report.had_it} turns already had the column"
    for why, turns in sorted(report.not_scored.items()):
        yield f"not scored: {turns} turns: {why}"
    if report.numeric.tokens:
        yield f"recorded against scored: {numbers_line(report.numeric)}"
    else:
        yield "not compared: no recorded logprob was checked in this run"
    yield from cause_lines(report.not_comparable, report.causes)
