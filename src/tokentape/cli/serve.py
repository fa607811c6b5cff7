"""`tokentape serve`: run the gateway."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.extras import require
from tokentape.cli.flags import config_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tokentape.chat.renderer import Renderer
    from tokentape.config import ServeConfig
    from tokentape.gateway.draining import Drain
    from tokentape.gateway.keys import Keys
    from tokentape.store import SqliteStore


class EngineName(StrEnum):
    """What samples."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"


class PathName(StrEnum):
    """How the embedded engine runs the model."""

    OWN = "own"
    REGULAR = "regular"
    PAGED = "paged"


class HistoryName(StrEnum):
    """What of earlier turns stays in context."""

    SAMPLED = "sampled"
    TEMPLATE = "template"


class WrongStopName(StrEnum):
    """What becomes of a turn that ended with another stop token than the template writes."""

    KEEP = "keep"
    FORK = "fork"


class Synchronous(StrEnum):
    """How often the record is flushed to the disk."""

    FULL = "full"
    NORMAL = "normal"


class LogLevel(StrEnum):
    """What is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How it is logged."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


# No parameter has a default here: what is not given is looked for in the environment and the file.
def serve(
    ctx: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            exists=True,
            file_okay=False,
            help="Model folder: tokenizer, chat template, weights if embedded. Default: the tiny model shipped.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings in TOML. Flags and TOKENTAPE_* go first. Default: tokentape.toml."),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="transformers: embedded in this process, the default. Others: the server at --engine-url."),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Base URL of the engine's server; several times for several replicas."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where the record is kept. Default: runs/serve.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one. Default: 8800.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Chat template to use instead of the model's own.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of the embedded engine. Default: torch's choice; 1 for the tiny model."),
    ] = None,
    path: Annotated[
        PathName | None,
        typer.Option(
            help="Embedded engine only. own, the default: a loop with a prefix cache. regular: generate on batches. "
            "paged: generate_batch."
        ),
    ] = None,
    capture: Annotated[
        bool | None,
        typer.Option(
            help="Let the vLLM server render, and record what it rendered and where that drifts. Default: no."
        ),
    ] = None,
    history: Annotated[
        HistoryName | None,
        typer.Option(
            help="sampled, the default: earlier turns stay as sampled. template: what the template drops of them, "
            "goes; that forks."
        ),
    ] = None,
    wrong_stop: Annotated[
        WrongStopName | None,
        typer.Option(
            help="After a stop token that the template does not write there. keep, the default: it stands for the end. "
            "fork: a new branch with the template's own."
        ),
    ] = None,
    payloads: Annotated[
        bool | None, typer.Option(help="Record per-token payloads of the engine: routed experts. Default: no.")
    ] = None,
    synchronous: Annotated[
        Synchronous | None,
        typer.Option(help="full, the default: acknowledged turns survive a power cut. normal: a crash of the gateway."),
    ] = None,
    model_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name in replies. Default: the folder's.")
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="What the engine's server wants as API key; better in the environment."),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys of callers, a line name=key for each.")
    ] = None,
    admin_keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys that see every session and the metrics.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host that requests may be for; several times for several, * for any. Default: with keys any, "
            "without them this machine.",
        ),
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(min=0, help="Largest request body. Default: 64 MiB.")] = None,
    max_open_sessions: Annotated[
        int | None, typer.Option(min=0, help="Sessions in memory per API key; 0, the default: any number.")
    ] = None,
    max_turns_per_session: Annotated[int | None, typer.Option(min=0, help="0, the default: any number.")] = None,
    max_calls_per_key: Annotated[
        int | None, typer.Option(min=0, help="Calls under way per API key; 0, the default: any number.")
    ] = None,
    idle_seconds: Annotated[
        float | None, typer.Option(min=0, help="Until an unused session leaves the memory. Default: 3600.")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long calls may go on after SIGTERM. Default: 30.")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Default: info.")] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="auto, the default: text on a terminal, JSON lines elsewhere.")
    ] = None,
    tracing: Annotated[bool | None, typer.Option(help="Open OpenTelemetry spans. Default: no.")] = None,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs; record token-exactly.

    `tokentape config show` with the same arguments prints what is in force, and where it came from.
    """
    # All of the parameters above are read from the context, as `config show` and `doctor` read them too.
    run(config_of(ctx.params).config)


def run(config: ServeConfig) -> None:
    """Serve as `config` says, until a signal."""
    from tokentape.demo import MODEL

    if config.engine.kind == "transformers":
        require("torch", "transformers", extra="hf")

    from tokentape.chat.certificate_cache import load_or_certify
    from tokentape.chat.renderer import Renderer
    from tokentape.engines.image_processor import find_image_processor
    from tokentape.gateway.draining import Drain
    from tokentape.gateway.logs import logging_to
    from tokentape.gateway.serve import serve as run_server
    from tokentape.store import SqliteStore
    from tokentape.store.served_model import ServedModel, write_served_model

    model = config.model or MODEL
    name = config.model_id or model.resolve().name
    keys = config.all_keys()
    log = logging.getLogger("tokentape.serve")

    def tell(base_url: str) -> None:
        log.info("serving %s at %s/v1, recording to %s", name, base_url, config.data)

    images = find_image_processor(model) if config.engine.kind == "transformers" else None
    renderer = Renderer.load(model, config.chat_template, images=images)
    # A template that can't be used is told at once, not after the weights are loaded.
    load_or_certify(renderer, {})
    drain = Drain(config.drain_seconds)
    with (
        SqliteStore.open(config.data, synchronous="FULL" if config.synchronous == "full" else "NORMAL") as store,
        logging_to(level=config.log.level, form=config.log.format),
    ):
        served = ServedModel(str(model.resolve()), renderer.tokenizer.sha256, renderer.fingerprint)
        write_served_model(config.data, served)
        gateway = _Gateway(config, model, name, keys, renderer, store, drain)
        run_server(gateway, host=config.host, port=config.port, has_keys=bool(keys), on_ready=tell, drain=drain)


class _Gateway:
    """The application, made inside the event loop that serves it: an engine's connections belong to their loop."""

    def __init__(
        self,
        config: ServeConfig,
        model: Path,
        name: str,
        keys: Keys,
        renderer: Renderer,
        store: SqliteStore,
        drain: Drain,
    ) -> None:
        self._config = config
        self._model = model
        self._name = name
        self._keys = keys
        self._renderer = renderer
        self._store = store
        self._drain = drain
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
        from tokentape.cli.engine import open_captured, open_configured
        from tokentape.gateway.app import create_app
        from tokentape.gateway.telemetry import Telemetry
        from tokentape.gateway.tracing import OpenTelemetrySpans
        from tokentape.gateway.turns import Turns

        config, vocab_size = self._config, self._renderer.tokenizer.vocab_size
        server = await open_captured(config.engine, vocab_size) if config.engine.capture else None
        turns = Turns(
            server or await open_configured(config.engine, self._model, vocab_size),
            self._renderer,
            self._store,
            history=config.history,
            wrong_stop=config.wrong_stop,
            limits=config.limits,
            telemetry=Telemetry(OpenTelemetrySpans() if config.tracing else None),
            payloads=config.payloads,
            capture=server,
        )
        return create_app(
            turns, model_id=self._name, keys=self._keys, allowed_hosts=config.allowed_hosts, drain=self._drain
        )
