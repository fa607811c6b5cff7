"""`tokentape probe`: count a model's phantom edits, which return the same word in different ids."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from tokentape.audit._probe import running as probing
from tokentape.audit._probe.trials import BUILT_IN, Trial, read_texts, trials
from tokentape.audit._report import json_value
from tokentape.chat import _grammar as grammar
from tokentape.chat._renderer import Renderer
from tokentape.cli import arguments as arg
from tokentape.cli.extras import Device, ModelDtype
from tokentape.cli.output import end, print_report
from tokentape.engines._base import Engine
from tokentape.engines._kinds import KINDS, open_engine
from tokentape.store._location import refuse_output

_ENGINE_HELP = f"{', '.join(KINDS)}: the server at --engine-url. Default: the model in this process."
_TEXTS_HELP = (
    "Sentences to use instead of the built-in ones, one per line: text with the word in [brackets], JSON with text "
    "and target, or plain text, from which words are drawn."
)


def probe(
    path: Annotated[Path, arg.model_folder("Model folder: tokenizer, template, and weights if run in process.")],
    engine: Annotated[str | None, arg.option(_ENGINE_HELP, "KIND")] = None,
    engine_url: Annotated[str | None, arg.option("URL of the server. For a gateway, use --engine vllm.", "URL")] = None,
    api_key: arg.EngineKey = None,
    device: Device = None,
    dtype: ModelDtype = None,
    texts: Annotated[Path | None, arg.existing_file(_TEXTS_HELP)] = None,
    output: Annotated[Path | None, arg.new_file("Results as JSON lines; resumes a file.", "--output", "-o")] = None,
    limit: Annotated[int | None, arg.option("Run at most this many trials.", min=1)] = None,
    repetitions: Annotated[int, arg.option("Samples per task; needs --temperature.", min=1)] = 1,
    temperature: Annotated[float, arg.number("Sampling temperature; 0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[int, arg.option("Seed for sampling and for drawing words.")] = 0,
    max_tokens: Annotated[int, arg.option("Token budget per completion.", min=1)] = 512,
    ban: Annotated[bool, arg.flag("Sample each phantom edit again with its ids banned. Greedy only.", "--ban")] = False,
    kwargs: arg.TemplateKwargs = "{}",
    concurrency: Annotated[int, arg.option("Concurrent calls.", min=1)] = 8,
    html: arg.HtmlFile = None,
    as_json: arg.AsJson = False,
) -> None:
    """Count phantom edits: asked to replace a word, a model returns the same text in different ids.

    Runs the replacement task of arXiv 2601.14658. Exits with 1 if there were phantom edits, 3 if no sentence came back.
    """
    if (engine is None) != (engine_url is None):
        raise typer.BadParameter("--engine needs --engine-url and vice versa; pass both", param_hint="--engine")
    if engine is not None and (device or dtype):
        raise typer.BadParameter("only for a model in this process; leave it out", param_hint="--device, --dtype")
    if repetitions > 1 and not temperature:
        raise typer.BadParameter("greedy samples are all the same; set --temperature", param_hint="--repetitions")
    if ban and temperature:
        raise typer.BadParameter("works only with greedy decoding; leave out --temperature", param_hint="--ban")
    template_kwargs = arg.json_object(kwargs, "--kwargs")

    refuse_output(output, texts)
    refuse_output(html, path, texts, output)
    renderer = Renderer.load(path)
    selected = list(trials(read_texts(texts or BUILT_IN, seed=seed), repetitions=repetitions))[:limit]

    async def run() -> tuple[probing.Header, list[probing.ProbeResult]]:
        if engine is None or engine_url is None:
            from tokentape.engines._transformers import TransformersEngine

            opened: Engine = TransformersEngine.open(path, device=device or "auto", dtype=dtype or "float32")
        else:
            size = renderer.tokenizer.vocab_size
            opened = await open_engine(engine, engine_url, vocab_size=size, api_key=api_key)
        settings = probing.ProbeSettings(max_tokens, temperature, seed, ban, concurrency)
        try:
            return await _run(selected, opened, renderer, template_kwargs, settings, output)
        finally:
            await opened.close()

    header, results = asyncio.run(run())
    summary = probing.summarise(results)
    value = {**header, **json_value(summary)} if as_json else None
    print_report(probing.probe_layout(header, results, renderer.tokenizer), html, value)
    end(bool(summary.normalized.changed), summary.normalized.total, "sentence that came back")


async def _run(
    selected: list[Trial],
    engine: Engine,
    renderer: Renderer,
    template_kwargs: dict[str, Any],
    settings: probing.ProbeSettings,
    output: Path | None,
) -> tuple[probing.Header, list[probing.ProbeResult]]:
    """Return the header, and the results in the order of the trials."""
    setup = grammar.setup(renderer.fingerprint, template_kwargs, tools=(), date=grammar.DATE)
    header = probing.header(engine, renderer, setup, settings)
    place = {trial: index for index, trial in enumerate(selected)}
    file = probing.ProbeFile(output, header) if output is not None else None
    results = [] if file is None else [result for result in file.results if result.trial in place]
    missing = selected if file is None else file.missing(selected)
    with file or nullcontext(), Progress(transient=True, console=Console(stderr=True)) as progress:
        bar = progress.add_task("probing", total=len(selected), completed=len(results))
        async with aclosing(probing.run_trials(missing, engine, renderer, setup, settings)) as running:
            async for result in running:
                results.append(result)
                if file is not None:
                    file.add(result)
                progress.advance(bar)
    return header, sorted(results, key=lambda result: place[result.trial])
