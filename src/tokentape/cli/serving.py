"""Serve a configuration, in this process or in several workers with one record."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape._opening import (
    bind_record,
    model_folder,
    model_name,
    open_app,
    open_renderer,
    other_sampling,
    synchronous,
    wait_for_engine,
)
from tokentape.chat._renderer import Renderer
from tokentape.config import ServeConfig
from tokentape.errors import StoreError, TokentapeError
from tokentape.gateway._limits import Drain
from tokentape.gateway._logs import logging_to
from tokentape.gateway._serve import bind
from tokentape.gateway._serve import serve as run_server
from tokentape.gateway._telemetry import COUNTED_TOGETHER
from tokentape.gateway._workers import Supervisor, bind_all
from tokentape.store import Store
from tokentape.store._location import open_record, shown
from tokentape.store._lock import DirectoryLock, InterprocessLock, make_directory
from tokentape.store._sqlite import SqliteStore

_log = logging.getLogger("tokentape.serve")

_LOOK_SECONDS = 1.0


def serve_alone(config: ServeConfig) -> None:
    """Serve in this process until a signal arrives."""
    with logging_to(level=config.log.level, form=config.log.format):
        renderer = _renderer(config)
        with (
            _removed_if_unused(config),
            open_record(config.location, synchronous=synchronous(config)) as store,
        ):
            asyncio.run(bind_record(config, renderer, store))
            asyncio.run(wait_for_engine(config.engine))
            _serve(config, renderer, store, on_ready=lambda url: _announce(config, url))
        _report_stopped(config, store)


def _renderer(config: ServeConfig) -> Renderer:
    """Check the port, the folder and the engine, then load the renderer, which takes up to a minute."""
    bind(config.host, config.port, has_keys=bool(config.all_keys())).close()
    model_folder(config)
    asyncio.run(wait_for_engine(config.engine, once=True))
    return open_renderer(config)


def serve_with_workers(config: ServeConfig) -> None:
    """Serve in `config.workers` processes with one record until a signal arrives. This process only supervises."""
    from prometheus_client.multiprocess import mark_process_dead

    with ExitStack() as stack:
        stack.enter_context(logging_to(level=config.log.level, form=config.log.format))
        renderer = _renderer(config)
        stack.enter_context(_removed_if_unused(config))
        inherited = []
        if config.store is None:
            make_directory(config.data)
            # The workers inherit the lock, so no other gateway opens the directory while one of them is alive.
            lock = DirectoryLock(config.data)
            stack.callback(lock.release)
            inherited.append(lock.fileno())
        with _store(config) as store:
            asyncio.run(bind_record(config, renderer, store))
        url, listeners = bind_all(config.host, config.port, config.workers, has_keys=bool(config.all_keys()))
        for listener in listeners:
            stack.callback(listener.close)
        asyncio.run(wait_for_engine(config.engine))
        counts = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokentape-metrics-"))
        supervisor = Supervisor(
            serve_as_worker,
            config,
            listeners,
            drain_seconds=config.drain_seconds,
            inherited=inherited,
            environment={COUNTED_TOGETHER: counts},
            on_end=lambda pid: mark_process_dead(pid, counts),  # type: ignore[no-untyped-call]
        )
        supervisor.run(lambda: _announce(config, url))


def serve_as_worker(config: ServeConfig, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve as one of several processes, on `listener`."""
    with logging_to(level=config.log.level, form=config.log.format):
        try:
            with _store(config) as store:
                threading.Thread(target=_end_when_broken, args=(store,), daemon=True).start()
                _serve(config, open_renderer(config), store, on_ready=lambda _: ready(), listener=listener)
            _report_stopped(config, store)
        except (TokentapeError, OSError) as error:
            _log.error("worker %d can't serve: %s", os.getpid(), error)
            raise SystemExit(1) from None


def _end_when_broken(store: Store) -> None:
    """End a worker that can no longer record. The worker that replaces it reads the record from the disk."""
    while not store.broken:
        time.sleep(_LOOK_SECONDS)
    _log.error("worker %d stops because it can no longer record; the supervisor starts a new one", os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _store(config: ServeConfig) -> Iterator[Store]:
    """Open the record so that several processes can write to it."""
    if config.store is not None:
        with open_record(config.store, synchronous=synchronous(config)) as store:
            yield store
        return
    with (
        closing(InterprocessLock(config.data)) as writers,
        SqliteStore.open(config.data, synchronous=synchronous(config), writers=writers) as store,
    ):
        yield store


def _serve(
    config: ServeConfig,
    renderer: Renderer,
    store: Store,
    *,
    on_ready: Callable[[str], None],
    listener: socket.socket | None = None,
) -> None:
    keys, drain = config.all_keys(), Drain(config.drain_seconds)
    apps: list[ASGIApp] = []

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        # The app is created in the event loop that serves it, because an engine's connections belong to a loop.
        if not apps:
            apps.append(await open_app(config, renderer, store, drain))
        await apps[0](scope, receive, send)

    def ready(url: str) -> None:
        # Vocabularies and templates stay in memory, and a garbage collection that visits them takes 0.1 s. Calls leave
        # few reference cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        on_ready(url)

    run_server(
        gateway, host=config.host, port=config.port, has_keys=bool(keys), on_ready=ready, drain=drain, listener=listener
    )


def _report_stopped(config: ServeConfig, store: Store) -> None:
    """Log that every answered call is recorded. Raise `StoreError` if the store failed, so that this is not known."""
    if store.broken:
        raise StoreError(
            f"stopped, but the record in {shown(config.location)} failed earlier (see the log); run `tokentape verify`"
        )
    _log.info("stopped; every answered call is recorded in %s", shown(config.location))


@contextmanager
def _removed_if_unused(config: ServeConfig) -> Iterator[None]:
    """Remove the data directory after an error if it was created in the `with` block and has no session."""
    existed = config.store is not None or config.data.exists()
    try:
        yield
    except BaseException:
        unused = False
        if not existed and config.data.exists():
            with suppress(TokentapeError), open_record(config.data, read_only=True) as store:
                unused = not store.sessions(limit=1)
        if unused:
            shutil.rmtree(config.data, ignore_errors=True)
        raise


def _announce(config: ServeConfig, base_url: str) -> None:
    by = "" if config.workers == 1 else f" with {config.workers} workers"
    _log.info(
        "serving %s%s at %s/sessions/NAME/v1 (choose a NAME per run), recording to %s; viewer at %s/view",
        *(model_name(config), by, base_url, shown(config.location), base_url),
    )
    if differs := other_sampling(config):
        _log.info("%s", differs)
