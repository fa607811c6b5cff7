"""The gateway as a Ray Serve deployment: stateless replicas that share one PostgreSQL record."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from tokentape._opening import bind_record, open_app, open_renderer, synchronous
from tokentape._settings import env_name
from tokentape.config import ServeConfig, resolve, settings
from tokentape.errors import InvalidRequest, StoreError
from tokentape.gateway._logs import logging_to
from tokentape.ray._data import require_ray
from tokentape.store._location import open_record

if TYPE_CHECKING:
    from ray.serve import Application


def gateway_app(config: ServeConfig, **options: Any) -> Application:
    """Return the gateway as an application for `ray.serve.run`.

    `options` are options of a Serve deployment: `num_replicas`, `autoscaling_config`, `ray_actor_options`...

    Raises `InvalidRequest` unless the record is a PostgreSQL database, which the replicas share. Also raises the errors
    of `ServeConfig.all_keys`, and `TokentapeError` if Ray is not installed.
    """
    if config.store is None:
        expected = "set store to postgresql://user@host/database"
        raise InvalidRequest(f"replicas share one PostgreSQL record, and none is set; {expected}", "store")
    if config.workers != 1:
        reason = f"workers is {config.workers}; on Ray Serve leave it out and set num_replicas instead"
        raise InvalidRequest(reason, "workers")
    # Raise errors here rather than when replicas start.
    config.all_keys()
    require_ray()
    from ray import serve

    defaults = {
        "name": "Tokentape",
        # Serve's default of 5 is meant for models; a gateway's calls mostly wait.
        "max_ongoing_requests": 1000,
        # Engine and record are closed after the time in which calls can end.
        "graceful_shutdown_timeout_s": config.drain_seconds + 15.0,
        "request_router_config": {"request_router_class": "tokentape.ray._affinity.SessionRouter"},
    }
    return serve.deployment(serve.ingress()(GatewayReplica)).options(**defaults | options).bind(config)


def app(args: Mapping[str, Any]) -> Application:
    """Build the application for `serve run tokentape.ray:app` and Serve config files.

    `args` are settings by name, as in `tokentape.toml`: `model`, `engine.kind`, `store`...; `config` is the path of
    such a file. Other settings come from the environment and the file, as with `tokentape serve`. Raises
    `InvalidRequest` like `resolve` and `gateway_app`, and for an unknown setting.
    """
    values, file = dict(args), args.get("config")
    values.pop("config", None)
    if unknown := [name for name in values if name not in settings()]:
        raise InvalidRequest(f"unknown settings: {', '.join(unknown)}; use the names in tokentape.toml", "args")
    # `serve run` passes strings, a config file any YAML value. Convert both to environment variables.
    variables = {env_name(name): _text(value) for name, value in values.items()}
    return gateway_app(resolve({}, {**os.environ, **variables}, None if file is None else Path(file)).config)


class GatewayReplica:
    """A gateway that is opened in the event loop that serves it."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc] # Serve awaits it
        self._held = ExitStack()
        self._held.enter_context(logging_to(level=config.log.level, form=config.log.format))
        renderer = await asyncio.to_thread(open_renderer, config)
        self._store = await asyncio.to_thread(open_record, config.location, synchronous=synchronous(config))
        try:
            await bind_record(config, renderer, self._store)
            # Serve removes a replica from its list and waits for the running calls.
            self._app = await open_app(config, renderer, self._store)
        except BaseException:
            self._store.close()
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application. Serve runs its lifespan, which closes the engine and the store."""
        return self._app

    def check_health(self) -> None:
        """Raise `StoreError` if nothing can be recorded any more, so that Serve replaces the replica."""
        if not self._store.healthy:
            raise StoreError("the store is closed or failed; restart this replica (its log has the cause)")

    def __del__(self) -> None:
        self._held.close()


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
