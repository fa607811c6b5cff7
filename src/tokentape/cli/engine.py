"""The engine that a configuration names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tokentape.config import EngineConfig
from tokentape.demo import MODEL
from tokentape.engines.base import ChatServer, Engine


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
            open_engine, config.kind, url, vocab_size=vocab_size, api_key=config.api_key, timeouts=config.timeouts
        )
        for url in config.urls
    }
    if len(openers) == 1:
        (opener,) = openers.values()
        return await opener()
    return await EnginePool.open(openers)
