"""Serve an open engine from this process, for trainers and the demo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tokentape.chat._renderer import Renderer
from tokentape.engines._base import Engine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model


@contextmanager
def serving(
    engine: Engine,
    model_dir: Path | str,
    *,
    directory: Path | str | None = None,
    renderer: Renderer | None = None,
    model_id: str = "policy",
) -> Iterator[str]:
    """Serve an engine to agents on this machine during the `with` block, and yield the base URL.

    >>> engine = FunctionEngine(sample, vocab_size=151669, max_context=32768)         # doctest: +SKIP
    >>> with serving(engine, "path/to/model") as base_url:                            # doctest: +SKIP
    ...     session = Client(base_url).session()

    `model_dir` contains the engine's tokenizer and chat template. Pass its `renderer` if it is already loaded. Sessions
    are recorded in `directory`, or by default in a temporary directory, which is deleted at the end. The engine is
    closed at the end.

    Raises `TokenizerUnusable` for a folder that can't be served, `StoreError` for a record that can't be written, and
    `InvalidRequest` for a record of another tokenizer.
    """
    with serving_record(engine, model_dir, directory, renderer or Renderer.load(model_dir), model_id) as (url, _):
        yield url


@contextmanager
def serving_record(
    engine: Engine, model_dir: Path | str, directory: Path | str | None, renderer: Renderer, model_id: str = "policy"
) -> Iterator[tuple[str, SqliteStore]]:
    """Serve like `serving`. Yield the base URL, and the store for reading."""
    with ExitStack() as stack:
        record = Path(directory) if directory is not None else Path(stack.enter_context(TemporaryDirectory()))
        store = SqliteStore.open(record)
        app = create_app(Turns(engine, renderer, store), model_id=model_id)
        url = stack.enter_context(running(app))
        folder = str(Path(model_dir).resolve())
        write_served_model(record, ServedModel(folder, renderer.tokenizer.sha256, renderer.fingerprint))
        yield url, store
