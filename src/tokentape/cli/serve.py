"""`tokentape serve`: run the gateway."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokentape.cli.extras import require

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tokentape.chat.renderer import Renderer
    from tokentape.chat.splice import History
    from tokentape.engines.base import Engine
    from tokentape.store import SqliteStore


class EngineName(StrEnum):
    """What samples."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class HistoryName(StrEnum):
    """What of earlier turns stays in context."""

    SAMPLED = "sampled"
    TEMPLATE = "template"


class Synchronous(StrEnum):
    """How often the record is flushed to the disk."""

    FULL = "full"
    NORMAL = "normal"


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            exists=True,
            file_okay=False,
            help="Model folder: tokenizer, chat template, weights if embedded. Default: the tiny model shipped.",
        ),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="transformers: embedded in this process. vllm: the server at --engine-url.")
    ] = EngineName.TRANSFORMERS,
    engine_url: Annotated[str | None, typer.Option(metavar="URL", help="Base URL of the vLLM server.")] = None,
    data: Annotated[Path, typer.Option(file_okay=False, help="Where the record is kept.")] = Path("runs/serve"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8800,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Chat template to use instead of the model's own.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of the embedded engine. Default: torch's choice; 1 for the tiny model."),
    ] = None,
    history: Annotated[
        HistoryName,
        typer.Option(
            help="sampled: earlier turns stay as sampled. template: what the template drops of them, goes; that forks."
        ),
    ] = HistoryName.SAMPLED,
    synchronous: Annotated[
        Synchronous, typer.Option(help="full: acknowledged turns survive a power cut. normal: a crash of the gateway.")
    ] = Synchronous.FULL,
    model_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name in replies. Default: the folder's.")
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option(envvar="TOKENTAPE_ENGINE_API_KEY", metavar="KEY", help="What the vLLM server wants as API key."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API; record token-exactly."""
    from tokentape.demo import MODEL

    if model is None:
        model, threads = MODEL, threads or 1
    if (engine is EngineName.VLLM) != (engine_url is not None):
        raise typer.BadParameter("--engine vllm and --engine-url belong together")
    if engine is EngineName.TRANSFORMERS:
        require("torch", "transformers", extra="hf")

    from tokentape.chat.certificate_cache import load_or_certify
    from tokentape.chat.renderer import Renderer
    from tokentape.gateway.serve import serve as run
    from tokentape.store import SqliteStore
    from tokentape.store.served_model import ServedModel, write_served_model

    name = model_id or model.resolve().name
    flushed: Literal["FULL", "NORMAL"] = "FULL" if synchronous is Synchronous.FULL else "NORMAL"

    def tell(base_url: str) -> None:
        typer.echo(f"serving {name} at {base_url}/v1, recording to {data}", err=True)

    renderer = Renderer.load(model, chat_template)
    # A template that can't be used is told at once, not after the weights are loaded.
    load_or_certify(renderer, {})
    with SqliteStore.open(data, synchronous=flushed) as store:
        write_served_model(data, ServedModel(str(model.resolve()), renderer.tokenizer.sha256, renderer.fingerprint))
        gateway = _Gateway(model, engine_url, engine_api_key, renderer, store, name, history.value, threads)
        run(gateway, host=host, port=port, on_ready=tell)


class _Gateway:
    """The application, made inside the event loop that serves it: an engine's connections belong to their loop."""

    def __init__(
        self,
        model: Path,
        engine_url: str | None,
        engine_api_key: str | None,
        renderer: Renderer,
        store: SqliteStore,
        name: str,
        history: History,
        threads: int | None,
    ) -> None:
        self._history: History = history
        self._threads = threads
        self._model = model
        self._engine_url = engine_url
        self._engine_api_key = engine_api_key
        self._renderer = renderer
        self._store = store
        self._name = name
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            from tokentape.errors import TokentapeError

            try:
                self._app = await self._open()
            except TokentapeError as error:
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)

    async def _open(self) -> ASGIApp:
        from tokentape.gateway.app import create_app
        from tokentape.gateway.turns import Turns

        return create_app(
            Turns(await self._engine(), self._renderer, self._store, history=self._history), model_id=self._name
        )

    async def _engine(self) -> Engine:
        if self._engine_url is None:
            from tokentape.engines.transformers import TransformersEngine

            return TransformersEngine.open(self._model, threads=self._threads)
        from tokentape.engines.vllm import VllmEngine

        vocab_size = self._renderer.tokenizer.vocab_size
        return await VllmEngine.open(self._engine_url, vocab_size=vocab_size, api_key=self._engine_api_key)
