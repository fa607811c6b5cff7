"""`tokentape probe`: whether a model that is to replace a word gives the same word back in other ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.arguments import AsJson, json_object, refuse_no_folder
from tokentape.cli.output import print_json

if TYPE_CHECKING:
    from tokentape.engines.base import Engine

_ENGINE_HELP = "vllm, sglang, llamacpp or openai: the server at --engine-url. Default: the model in this process."
_TEXTS_HELP = (
    "Sentences in place of the built-in ones, one a line: the word in [brackets], or JSON with text and target, or "
    "plain, from which words are drawn."
)


def probe(
    path: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model folder: tokenizer and template, and weights unless served.")
    ],
    engine: Annotated[str | None, typer.Option(metavar="KIND", help=_ENGINE_HELP)] = None,
    engine_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server. A gateway is a server of kind vllm.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TOKENTAPE_ENGINE_API_KEY", help="What the server wants as API key.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=_TEXTS_HELP)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", dir_okay=False, help="JSONL of results; goes on with one there."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run at most this many trials.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Samples of each task; needs a temperature.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling, and of the words drawn.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Per completion.")] = 512,
    ban: Annotated[
        bool, typer.Option("--ban", help="Sample each phantom edit again with its ids banned. Greedy only.")
    ] = False,
    kwargs: Annotated[
        str, typer.Option("--kwargs", metavar="JSON", help="Template kwargs, such as '{\"enable_thinking\": false}'.")
    ] = "{}",
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at a time.")] = 8,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a report as one HTML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count phantom edits: a word that a model was to replace comes back as the same text in other ids.

    The replacement task of arXiv 2601.14658. Exits with 1 if there were phantom edits.
    """
    refuse_no_folder(path, "MODEL")
    if (engine is None) != (engine_url is None):
        raise typer.BadParameter("--engine and --engine-url go together", param_hint="--engine")
    if repetitions > 1 and not temperature:
        raise typer.BadParameter("greedy samples are all the same: set --temperature", param_hint="--repetitions")
    if ban and temperature:
        raise typer.BadParameter("ids are banned in greedy decoding only", param_hint="--ban")
    template_kwargs = json_object(kwargs, "--kwargs")

    import asyncio
    from contextlib import aclosing, nullcontext

    from rich.console import Console
    from rich.progress import Progress

    from tokentape.audit.lock.goldens import DATE
    from tokentape.audit.probe.running import ProbeFile, Settings, header, run_trials
    from tokentape.audit.probe.summary import probe_layout, summarise
    from tokentape.audit.probe.trials import BUILT_IN, read_texts, trials
    from tokentape.audit.report import json_value
    from tokentape.chat import grammar
    from tokentape.chat.renderer import Renderer

    renderer = Renderer.load(path)
    setup = grammar.setup(renderer.fingerprint, template_kwargs, tools=(), date=DATE)
    settings = Settings(max_tokens, temperature, seed, ban, concurrency)
    sentences = read_texts(texts or BUILT_IN, seed=seed)
    asked = list(trials(sentences, repetitions=repetitions))[:limit]
    place = {trial: at for at, trial in enumerate(asked)}

    async def run() -> int:
        opened = await _open(engine, engine_url, path, renderer.tokenizer.vocab_size, api_key)
        try:
            made = header(opened, renderer, setup, settings)
            keeping = ProbeFile(output, made) if output is not None else None
            with keeping or nullcontext():
                missing = keeping.missing(asked) if keeping is not None else asked
                results = [r for r in keeping.results if r.trial in place] if keeping is not None else []
                with Progress(transient=True, console=Console(stderr=True)) as progress:
                    bar = progress.add_task("probing", total=len(asked), completed=len(results))
                    async with aclosing(run_trials(missing, opened, renderer, setup, settings)) as running:
                        async for result in running:
                            results.append(result)
                            if keeping is not None:
                                keeping.add(result)
                            progress.advance(bar)
        finally:
            await opened.close()
        results.sort(key=lambda result: place[result.trial])
        found = summarise(results)
        layout = probe_layout(made, results, renderer.tokenizer)
        if as_json:
            print_json({**made, **json_value(found)})
        else:
            layout.print()
        if html is not None:
            html.write_text(layout.html(), encoding="utf-8")
        return found.normalised.changed

    raise typer.Exit(1 if asyncio.run(run()) else 0)


async def _open(kind: str | None, url: str | None, model: Path, vocab_size: int, api_key: str | None) -> Engine:
    if kind is None or url is None:
        from tokentape.engines.transformers import TransformersEngine

        return TransformersEngine.open(model)
    from tokentape.engines.opening import open_engine

    return await open_engine(kind, url, vocab_size=vocab_size, api_key=api_key)
