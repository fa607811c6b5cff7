"""Create the parts of a gateway from a configuration: the renderer, the engine, and the application.

`tokentape serve` serves the application on a socket, and Ray Serve in its replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

from starlette.applications import Starlette

from tokentape._hub import find_model, is_hub_name
from tokentape.audit._served import FolderModel, same_template, serves_model
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.config import EngineConfig, ServeConfig
from tokentape.demo import MODEL
from tokentape.engines._base import ChatServer, Engine, EngineInfo, LogprobsMode
from tokentape.engines._guarded import GuardedEngine, ModelCheck
from tokentape.engines._http import HttpClient, WrongAddress, attempt
from tokentape.engines._identity import refuse_gateway
from tokentape.engines._image_processor import find_image_processor
from tokentape.engines._kinds import KINDS, engine_class, open_engine
from tokentape.engines._remote import RemoteEngine
from tokentape.errors import EngineError, EngineTimeout, EngineUnavailable, InvalidRequest, TokentapeError
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Drain
from tokentape.gateway._telemetry import OpenTelemetrySpans, Telemetry
from tokentape.gateway._turns import Turns
from tokentape.store import Store
from tokentape.store._location import note_served_model
from tokentape.store._served_model import ServedModel
from tokentape.training._trainers import log_served

_log = logging.getLogger("tokentape.serve")

_WAIT_LOG_SECONDS = 5.0
_WAIT_TICK_SECONDS = 1.0
_TEMPLATE_SECONDS = 10.0
"""Time limit at startup for a comparison that can only warn."""

_SAMPLING = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
"""The gateway's sampling defaults, and other values with the same meaning."""

Guard: TypeAlias = Callable[[RemoteEngine], Awaitable[GuardedEngine]]
_Opened = TypeVar("_Opened", bound=Engine)


def model_folder(config: ServeConfig) -> Path:
    """Return the model's folder. If no model is named, return the folder of the tiny model for the embedded engine.

    Raises `InvalidRequest` if the model is neither a folder nor in the Hub's cache. If no model is named for a server,
    the message lists what the server serves. Do not call it in an event loop.
    """
    if config.model is not None:
        return find_model(config.model, weights=config.engine.kind == "transformers")
    if config.engine.kind == "transformers":
        return MODEL
    serves = asyncio.run(_served_names(config.engine))
    raise InvalidRequest(
        "no MODEL: also for a server, pass the model's folder or Hub repo id, for tokenizer and chat template: "
        f"tokentape serve MODEL --engine ...; {serves}",
        "model",
    )


async def _served_names(config: EngineConfig) -> str:
    try:
        async with _asking(config, config.urls[0]) as http:
            served = await engine_class(config.kind).served_as(http)
    except EngineError as error:
        return f"the server could not be asked: {error}"
    return f"{config.urls[0]} serves {', '.join(sorted(served.names))}"


async def wait_for_engine(config: EngineConfig, *, once: bool = False) -> None:
    """Wait until a server of `config` answers, or for `wait_seconds`: a server that is loading refuses connections.

    Logs what it waits for, at once and then every few seconds. With `once`, check once and return.

    Raises `EngineError` or `InvalidRequest` if waiting can't help: the host does not exist, or it is not an engine.
    """
    now = asyncio.get_running_loop().time
    logged_at, end = -math.inf, now() + config.wait_seconds
    while (missing := await _missing(config)) and now() < end:
        if now() - logged_at >= _WAIT_LOG_SECONDS:
            logged_at = now()
            _log.info("waiting for the engine, %.0f s at most (--engine-wait): %s", end - now(), missing)
        if once:
            return
        await asyncio.sleep(min(_WAIT_TICK_SECONDS, max(0.0, end - now())))


async def _missing(config: EngineConfig) -> str:
    """Return why no server of `config` answers yet; empty if one answers. Raises if waiting can't help."""
    silent: list[str] = []
    wrong: list[TokentapeError] = []
    for url in config.urls:
        try:
            async with _asking(config, url) as http:
                refuse_gateway(await engine_class(config.kind).served_as(http, stage="connect"))
            return ""
        except (EngineError, InvalidRequest) as error:
            if isinstance(error, EngineUnavailable | EngineTimeout) and not isinstance(error, WrongAddress):
                silent.append(str(error))
            else:
                wrong.append(error)
    if wrong and not silent:
        raise wrong[0]
    return "; ".join(silent)


@asynccontextmanager
async def _asking(config: EngineConfig, url: str) -> AsyncIterator[HttpClient]:
    """Yield an HTTP client for a server. Error messages begin with the server's URL."""
    http = None
    try:
        http = HttpClient(url, api_key=config.api_key, timeouts=config.timeouts)
        yield http
    except TokentapeError as error:
        error.args = (f"{url.rpartition('@')[2]}: {error}", *error.args[1:])
        raise
    finally:
        if http is not None:
            await http.close()


def model_name(config: ServeConfig) -> str:
    """Return the name of the model in replies."""
    if config.model is not None and is_hub_name(config.model):
        return config.model_id or str(config.model)
    return config.model_id or (config.model or MODEL).resolve().name


def folder_model(config: ServeConfig) -> FolderModel:
    """Return what the model folder contains about the model."""
    hub_names = [str(config.model)] if config.model is not None and is_hub_name(config.model) else []
    return FolderModel.read(model_folder(config), *hub_names)


def synchronous(config: ServeConfig) -> Literal["FULL", "NORMAL"]:
    """Return the argument `synchronous` for `open_record`."""
    return "FULL" if config.synchronous == "full" else "NORMAL"


async def bind_record(config: ServeConfig, renderer: Renderer, store: Store) -> None:
    """Store in the record which model is served. Raises `InvalidRequest` if the record has another vocabulary."""
    await store.bind(renderer.tokenizer)
    folder = str(model_folder(config).resolve())
    model = ServedModel(folder, renderer.tokenizer.sha256, renderer.fingerprint)
    await note_served_model(config.location, store, model)


def open_renderer(config: ServeConfig) -> Renderer:
    """Load the model's renderer. Raises `TokenizerUnusable` or `TemplateRefused` if its files can't be used."""
    model = model_folder(config)
    images = find_image_processor(model) if config.engine.kind == "transformers" else None
    _log.info("loading tokenizer and chat template from %s (up to a minute the first time, later a few seconds)", model)
    renderer = Renderer.load(model, config.chat_template, images=images, strict_text=config.strict_text)
    # Refuse a template that can't be used now, not after the weights are loaded.
    load_or_certify(renderer, {})
    # Build the encoder now. It takes half a second, and otherwise the first call would wait for it.
    renderer.tokenizer.encode_marked("")
    return renderer


def other_sampling(config: ServeConfig) -> str:
    """Describe the sampling defaults in generation_config.json that the gateway does not use; empty if none."""
    try:
        generation_config = json.loads((model_folder(config) / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        generation_config = None
    if not isinstance(generation_config, dict) or config.engine.capture:
        return ""
    differing = {
        name: generation_config[name]
        for name, (ours, *same) in _SAMPLING.items()
        if isinstance(generation_config.get(name), int | float) and generation_config[name] not in (ours, *same)
        if name not in config.pin and name not in config.default
    }
    if not differing:
        return ""
    ours = ", ".join(f"{name} {_SAMPLING[name][0]}" for name in differing)
    theirs = ", ".join(f"{name} {value}" for name, value in differing.items())
    options = " ".join(f"--default {name}={value}" for name, value in differing.items())
    return (
        f"calls that don't say otherwise are sampled with {ours}. The model's generation_config.json has {theirs}, "
        f"which vLLM and SGLang use by default; to use these values, add {options}"
    )


async def open_app(config: ServeConfig, renderer: Renderer, store: Store, drain: Drain | None = None) -> Starlette:
    """Create the application, which closes the store at its shutdown.

    Call it in the event loop that will serve it, because an engine's connections belong to their loop. Raises the
    errors of `open_configured`.
    """
    if config.payloads_to is not None:
        store.keep_payloads_at(config.payloads_to)
    opened: list[Turns] = []

    def weights_now() -> str | None:
        return opened[0].gate.weight_version if opened else None

    server = await open_captured(config, renderer, weights_now) if config.engine.capture else None
    turns = Turns(
        server or await open_configured(config, renderer, weights_now=weights_now),
        renderer,
        store,
        history=config.history,
        stop_mismatch=config.stop_mismatch,
        on_abort=config.on_abort,
        pins=config.pins(),
        limits=config.limits,
        telemetry=Telemetry(
            OpenTelemetrySpans() if config.tracing else None,
            drift_share=config.drift_share,
            tokenizer=renderer.tokenizer,
        ),
        payloads=config.payloads,
        supports=config.supports,
        capture=server,
        check_bridges=config.check_bridges,
        enforce_tools=config.enforce_tools,
    )
    opened.append(turns)
    log_served(_log, turns.engine.info.logprobs_mode, turns.engine.info.name)
    return create_app(
        turns, model_id=model_name(config), keys=config.all_keys(), allowed_hosts=config.allowed_hosts, drain=drain
    )


async def open_captured(
    config: ServeConfig, renderer: Renderer, weights_now: Callable[[], str | None] = lambda: None
) -> ChatServer:
    """Connect to the server that renders. Raises the errors of `open_configured`."""
    from tokentape.engines._vllm_chat import VllmChatServer

    (url,) = config.engine.urls
    opener = partial(
        VllmChatServer.open,
        url,
        vocab_size=renderer.tokenizer.vocab_size,
        model=config.engine.model,
        api_key=config.engine.api_key,
        timeouts=config.engine.timeouts,
    )
    server = await _open_when_resumed(opener, config.engine.wait_seconds)
    return await _guard(config, renderer, weights_now)(server)


async def open_configured(
    config: ServeConfig, renderer: Renderer, *, check: bool = True, weights_now: Callable[[], str | None] = lambda: None
) -> Engine:
    """Load the model's weights, or connect to the server or its replicas.

    Unless `check` is off, a server's model is verified when it is opened and whenever it may have changed;
    `weights_now` returns the weight version for servers that do not report it.

    Raises `InvalidRequest` if a server serves another model, and `EngineError` if an engine can't be used.
    """
    engine = config.engine
    if engine.kind == "transformers":
        from tokentape.engines._transformers import TransformersEngine

        model = model_folder(config)
        _log.info("loading the weights from %s", model)
        tiny = model == MODEL
        modes: dict[str, LogprobsMode] = {mode.removesuffix("_logprobs"): mode for mode in get_args(LogprobsMode)}
        mode = modes[engine.logprobs_mode or "processed"]
        return TransformersEngine.open(
            model,
            dtype=engine.dtype or "float32",
            device=engine.device or ("cpu" if tiny else "auto"),
            threads=engine.threads or (1 if tiny else None),
            logprobs_mode=mode,
            adapters=engine.adapters,
        )
    from tokentape.engines._pool import EnginePool

    guard = _guard(config, renderer, weights_now) if check else None
    openers = {_replica_name(url): partial(_open_remote, engine, url, renderer, guard) for url in engine.urls}
    opener = partial(EnginePool.open, openers) if len(openers) > 1 else next(iter(openers.values()))
    return await _open_when_resumed(opener, engine.wait_seconds)


async def _open_when_resumed(opener: Callable[[], Awaitable[_Opened]], seconds: float) -> _Opened:
    """Open an engine. While its server is paused, and refuses the calls that verify it, try again for `seconds`."""
    now, logged = asyncio.get_running_loop().time, False
    end = now() + seconds
    while True:
        try:
            return await opener()
        except EngineUnavailable as error:
            if not error.paused or now() >= end:
                raise
            if not logged:
                logged = True
                _log.info("waiting until the engine is resumed, %.0f s at most (--engine-wait)", seconds)
            await asyncio.sleep(_WAIT_TICK_SECONDS)


def _replica_name(url: str) -> str:
    """Return the URL without its scheme. It includes the path, because one host may serve several replicas."""
    parts = urlsplit(url)
    return parts.netloc + parts.path.rstrip("/")


async def _open_remote(config: EngineConfig, url: str, renderer: Renderer, guard: Guard | None) -> Engine:
    _log.info("comparing the model that %s serves with the model folder", url)
    async with _asking(config, url) as http:
        # A server that accepts connections and does not answer must not keep the gateway from starting.
        refuse_gateway(await engine_class(config.kind).served_as(http, stage="connect"))
        try:
            engine = await open_engine(
                config.kind,
                url,
                vocab_size=renderer.tokenizer.vocab_size,
                model=config.model,
                api_key=config.api_key,
                timeouts=config.timeouts,
                verify_prompt=config.verify_prompts,
            )
        except EngineError as error:
            if "answered 404" in str(error) and (kind := await _looks_like(http, config.kind)):
                error.args = (f"{error}. This looks like a different kind of server; try --engine {kind}",)
            raise
    if guard is None:
        return engine
    guarded = await guard(engine)
    with suppress(TimeoutError):
        async with asyncio.timeout(_TEMPLATE_SECONDS):
            template = await same_template(config.kind, engine.http, engine.info.model, renderer)
            if template.advice:
                _log.warning("%s: %s. %s", url.rpartition("@")[2], template.found, template.advice)
    return guarded


async def _looks_like(http: HttpClient, kind: str) -> str | None:
    """Return another engine kind than `kind` if the server has a path that only that kind has; otherwise None."""
    for other_kind in KINDS:
        path = engine_class(other_kind).own_path
        with suppress(TokentapeError):
            if other_kind != kind and path is not None and await attempt(http.get(path)) is not None:
                return other_kind
    return None


def _guard(config: ServeConfig, renderer: Renderer, weights_now: Callable[[], str | None]) -> Guard:
    """Return the function that verifies an engine's model and wraps the engine in a `GuardedEngine`."""
    engine, folder = config.engine, folder_model(config)

    async def look(http: HttpClient, info: EngineInfo) -> ModelCheck:
        results = await serves_model(engine.kind, http, info, renderer, folder, engine.model)
        failed = [f"{result.found}. {result.advice}" for result in results if result.status == "fail"]
        unknown = [result.found for result in results if result.status == "warn"]
        return ModelCheck(
            "refused" if failed else "unverified" if unknown else "ok",
            " ".join(failed) or "; ".join(unknown),
            any(result.name == "tokenizer" and result.status == "fail" for result in results),
        )

    async def guard(opened: RemoteEngine) -> GuardedEngine:
        refuse = not engine.unverified_model
        return await GuardedEngine.open(opened, look, refuse=refuse, weights_now=weights_now)

    return guard
