"""The real parts, assembled: the tiny model, its engine and renderer, a store, turns, a gateway on a socket."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest
import starlette.routing
import typer.testing
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.schema import CreateIndex, CreateTable

import tokentape.demo
from tests.chat.conftest import source  # noqa: F401  # fixture
from tests.data import (  # noqa: F401  # hooks
    pytest_collection_modifyitems,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.forking import pytest_addoption, pytest_runtestloop  # noqa: F401  # hooks
from tests.postgres import Server
from tests.postgres import running as running_postgres
from tests.waiting import PATIENCE
from tokentape.chat import _grammar as grammar
from tokentape.chat import _twin_proof as twin_proof
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._transformers import FinishedSample, TransformersEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store import _archive as archive
from tokentape.store import _schema as schema
from tokentape.store import _sqlite as sqlite_store
from tokentape.store import _verify as verify
from tokentape.types import TokenIds

ServeTiny: TypeAlias = Callable[[Path], AbstractContextManager[tuple[str, SqliteStore]]]


class SharedEngine:
    """An engine that outlives its gateways: the fixture that opened it closes it."""

    def __init__(self, engine: TransformersEngine, finished: list[FinishedSample]) -> None:
        self._engine = engine
        self.finished = finished
        """The engine's log of sampled ids, of every finished call, in order of completion."""

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        return self._engine.sample(prompt_ids, params, stream=stream, request_id=request_id)

    async def check(self) -> None:
        await self._engine.check()

    async def close(self) -> None:
        pass


# Test processes are forked. Otherwise, asking whether there is a GPU would make it unusable after a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Sources are compiled once, not by each process that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Files of tests are in memory if there is room: on a disk, a record takes a third more CPU time, and seconds if the
# disk is busy.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Every client would load all CA certificates again, although local servers use none.
httpx2._transports.default.create_ssl_context = functools.cache(httpx2.create_ssl_context)

# Building the parser of all commands takes longer than running most of them.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Each application compiles the paths of its routes. Each server sets the levels of uvicorn's loggers, and with each all
# loggers forget which levels are on.
starlette.routing.compile_path = functools.cache(starlette.routing.compile_path)
_set_level = logging.Logger.setLevel


def _set_other_level(logger: logging.Logger, level: int | str) -> None:
    if level not in (logger.level, logging.getLevelName(logger.level)):
        _set_level(logger, level)


logging.Logger.setLevel = _set_other_level

# SQLAlchemy compiles each statement anew for each database that is opened: here once for all of SQLite.
_first_engine = create_engine("sqlite://")
_first_engine.connect().close()


def _create_engine(*address: Any, **options: Any) -> Engine:
    engine = create_engine(*address, **options)
    engine.dialect, engine._compiled_cache = _first_engine.dialect, _first_engine._compiled_cache
    return engine


sqlite_store.create_engine = archive.create_engine = _create_engine
_tables: dict[str, list[str]] = {}
"""The SQL that creates the tables and indexes of a record, by the name of the database."""


def _create_all(connection: Connection, **options: Any) -> None:
    if connection.dialect.name not in _tables:
        elements = [CreateTable(table) for table in schema.metadata.sorted_tables]
        elements += [CreateIndex(index) for table in schema.metadata.sorted_tables for index in table.indexes]
        _tables[connection.dialect.name] = [str(element.compile(dialect=connection.dialect)) for element in elements]
    cursor = connection.connection.cursor()
    for statement in _tables[connection.dialect.name]:
        cursor.execute(statement)
    cursor.close()


schema.metadata.create_all = _create_all

# Each `verify` checks that a SQLite file has the tables of a record; the answer depends on their SQL alone.
_schema_faults, _faults_of = verify.schema_faults, dict[object, list[str]]()


def _faults(connection: Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return list(_schema_faults(connection))
    made = map(tuple, connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"))
    key = tuple(made)
    if key not in _faults_of:
        _faults_of[key] = list(_schema_faults(connection))
    return _faults_of[key]


verify.schema_faults = _faults

# A client with the default timeout of five seconds fails on a busy machine, and its test proves nothing.
for _stage in ("connect", "read", "write", "pool"):
    setattr(httpx2._config.DEFAULT_TIMEOUT_CONFIG, _stage, PATIENCE)

# Machines are shared and slow at times: the time of an example proves nothing.
# Generating examples is slow on a busy machine, which is not an error of a test.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Each change is tested with the same examples; `make test-slow` searches for new ones.
settings.register_profile("same", settings.get_profile("search"), derandomize=True, max_examples=6)
settings.load_profile("search")


def _make_examples_the_same() -> None:
    """Take no constants from the sources: the examples would depend on the imported modules."""
    if settings.get_current_profile_name() == "same":
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`, tests of a folder share a process, which loads their tokenizers and models once."""
    from xdist.scheduler import LoadScopeScheduling

    class LoadFolderScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0].rpartition("/")[0]

    return LoadFolderScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """Pytest's fixture, for tests that request it. Its plugin, which is off, captures logs in every stage of a test."""
    with catching_logs(LogCaptureHandler()) as handler:
        request.node.stash[caplog_handler_key] = handler
        fixture = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield fixture
        fixture._finalize()


# Imported and collected objects stay: searching them for garbage is useless.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    _shorten_report(session.config)
    _make_examples_the_same()
    gc.freeze()
    # Each pass is slow with so many imports: a tenth as many passes free the same.
    gc.set_threshold(60_000, 20, 20)
    gc.enable()


def _shorten_report(config: pytest.Config) -> None:
    """Keep workers from reporting starts, and setups and teardowns that passed: half of their messages."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and not config.option.durations:
            plugin.sendevent = functools.partial(_send, plugin.sendevent)


def _send(send: Callable[..., None], name: str, **event: Any) -> None:
    report = event.get("data", {})
    if name != "logstart" and not (report.get("outcome") == "passed" and report["when"] in ("setup", "teardown")):
        send(name, **event)


def _of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Isolate tests, and processes that they start, from the user's cache."""
    os.environ["TOKENTAPE_CACHE"] = str(_of_the_run(tmp_path_factory) / "cache")


@pytest.fixture(scope="module")
def quick_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In `make test`, prove the twin of a new tokenizer with one in twenty texts; other suites use all texts."""
    if settings.get_current_profile_name() != "same":
        yield
        return
    texts = twin_proof.proof_texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENTAPE_CACHE", str(_of_the_run(tmp_path_factory) / "quick-proofs"))
        patch.setattr(twin_proof, "proof_texts", lambda *args: islice(texts(*args), None, None, 20))
        yield


@pytest.fixture(scope="module")
def quick_models(quick_proofs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In `make test`, certify a single continuation of a new model, for tests that are not about bridges."""
    if settings.get_current_profile_name() != "same":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENTAPE_CACHE", str(_of_the_run(tmp_path_factory) / "quick-models"))
        patch.setattr(grammar, "NAMES", grammar.NAMES[:1])
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Return the folder of the packaged tiny model."""
    return Path(tokentape.demo.__file__).parent / "model"


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer.load(model_dir)


@pytest.fixture(scope="session")
def _opened_engine(model_dir: Path) -> Iterator[tuple[TransformersEngine, list[FinishedSample]]]:
    finished: list[FinishedSample] = []
    engine = TransformersEngine.open(model_dir, on_finish=finished.append)
    yield engine, finished
    asyncio.run(engine.close())


@pytest.fixture
def engine(_opened_engine: tuple[TransformersEngine, list[FinishedSample]]) -> SharedEngine:
    """Return the embedded engine with the tiny model: loaded once, with an empty log."""
    opened, finished = _opened_engine
    finished.clear()
    return SharedEngine(opened, finished)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore.open(tmp_path / "data") as store:
        yield store


@pytest.fixture(scope="session")
def serve_tiny(_opened_engine: tuple[TransformersEngine, list[FinishedSample]], renderer: Renderer) -> ServeTiny:
    """Serve the tiny model and record in a directory, for records that several tests read."""

    @contextmanager
    def serve(directory: Path) -> Iterator[tuple[str, SqliteStore]]:
        with ExitStack() as opened:
            store = opened.enter_context(SqliteStore.open(directory))
            turns = Turns(SharedEngine(*_opened_engine), renderer, store)
            yield opened.enter_context(running(create_app(turns, model_id="tiny"))), store

    return serve


@pytest.fixture
def turns(engine: SharedEngine, renderer: Renderer, store: SqliteStore) -> Turns:
    return Turns(engine, renderer, store)


@pytest.fixture
def gateway_url(turns: Turns) -> Iterator[str]:
    """Yield the base URL of a gateway on a real socket."""
    with running(create_app(turns, model_id="tiny")) as url:
        yield url
