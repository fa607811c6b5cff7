"""From a configuration to the parts of a gateway: the renderer, the engine, and the application over both.

What serves the application is not decided here: `tokentape serve` does on a socket, Ray Serve in its replicas.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from starlette.applications import Starlette

from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.renderer import Renderer
from tokentape.config import EngineConfig, ServeConfig
from tokentape.demo import MODEL
from tokentape.engines.base import ChatServer, Engine
from tokentape.engines.image_processor import find_image_processor
from tokentape.gateway.app import create_app
from tokentape.gateway.draining import Drain
from tokentape.gateway.telemetry import Telemetry
from tokentape.gateway.tracing import OpenTelemetrySpans
from tokentape.gateway.turns import Turns
from tokentape.store import Store
from tokentape.store.served_model import ServedModel


def model_folder(config: ServeConfig) -> Path:
    """The model's folder."""
    return config.model or MODEL


def model_name(config: ServeConfig) -> str:
    """The model's name in replies."""
    return config.model_id or model_folder(config).resolve().name


def synchronous(config: ServeConfig) -> Literal["FULL", "NORMAL"]:
    """What `open_store` takes."""
    return "FULL" if config.synchronous == "full" else "NORMAL"


def served_model(config: ServeConfig, renderer: Renderer) -> ServedModel:
    """What a record remembers of the model that it is made with."""
    return ServedModel(str(model_folder(config).resolve()), renderer.tokenizer.sha256, renderer.fingerprint)


def open_renderer(config: ServeConfig) -> Renderer:
    """The model's renderer. Raises `TokenizerUnusable` and `TemplateRefused` as `Renderer.load`."""
    model = model_folder(config)
    images = find_image_processor(model) if config.engine.kind == "transformers" else None
    renderer = Renderer.load(model, config.chat_template, images=images)
    # A template that can't be used is told at once, not after the weights are loaded.
    load_or_certify(renderer, {})
    # What encodes is built with the first text: half a second, for which no call should wait.
    renderer.tokenizer.encode_marked("")
    return renderer


async def open_app(config: ServeConfig, renderer: Renderer, store: Store, drain: Drain | None = None) -> Starlette:
    """The application, which takes the store over, as `create_app` does.

    For the event loop that is to serve it: an engine's connections belong to their loop. Raises as `open_configured`
    and `open_captured`.
    """
    vocab_size = renderer.tokenizer.vocab_size
    server = await open_captured(config.engine, vocab_size) if config.engine.capture else None
    turns = Turns(
        server or await open_configured(config.engine, model_folder(config), vocab_size),
        renderer,
        store,
        history=config.history,
        wrong_stop=config.wrong_stop,
        limits=config.limits,
        telemetry=Telemetry(
            OpenTelemetrySpans() if config.tracing else None,
            drift_share=config.drift_share,
            tokenizer=renderer.tokenizer,
        ),
        payloads=config.payloads,
        capture=server,
    )
    return create_app(
        turns,
        model_id=model_name(config),
        keys=config.all_keys(),
        allowed_hosts=config.allowed_hosts,
        drain=drain,
    )


async def open_captured(config: EngineConfig, vocab_size: int) -> ChatServer:
    """Connect to the server that renders. Raises `EngineError` as `VllmChatServer.open`."""
    from tokentape.engines.vllm_chat import VllmChatServer

    (url,) = config.urls
    return await VllmChatServer.open(url, vocab_size=vocab_size, api_key=config.api_key, timeouts=config.timeouts)


async def open_configured(config: EngineConfig, model: Path, vocab_size: int) -> Engine:
    """Load the weights in the folder `model`, or connect to the server, or to its replicas as one.

    Raises `InvalidRequest` and `EngineError` as `open_engine` and `EnginePool.open`.
    """
    if config.kind == "transformers":
        from tokentape.engines.transformers import TransformersEngine

        threads = config.threads or (1 if model == MODEL else None)
        return TransformersEngine.open(model, threads=threads, path=config.path)
    from tokentape.engines.opening import open_engine
    from tokentape.engines.pool import EnginePool

    openers = {
        urlsplit(url).netloc: partial(
            open_engine,
            config.kind,
            url,
            vocab_size=vocab_size,
            api_key=config.api_key,
            timeouts=config.timeouts,
            verify_prompt=config.verify_prompts,
        )
        for url in config.urls
    }
    if len(openers) == 1:
        (opener,) = openers.values()
        return await opener()
    return await EnginePool.open(openers)
