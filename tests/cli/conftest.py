"""A handmade record, and the command line in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.records import SETUP, make_chain, make_turn
from tokentape.chat._renderer import Renderer
from tokentape.cli import app
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.types import Provenance, Reward, SessionInfo, Turn

Run: TypeAlias = Callable[..., Result]
Record: TypeAlias = Callable[[Sequence[tuple[Provenance, str]]], Path]


@pytest.fixture
def run() -> Run:
    """Runs `tokentape` with these arguments."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Write two sessions: `forked` with branches 0-1 and 0-2, `plain` with a branch of two turns."""
    first, second = make_chain("forked", 2)
    other = make_turn("forked", 2, first, fork="branched")
    records = [
        *(SessionInfo("forked", 1.0, {"task": 1}), SETUP, first, second, other, Reward("forked", None, 0.5, 2.0)),
        *(SessionInfo("plain", 2.0), *make_chain("plain", 2)),
    ]
    with SqliteStore.open(tmp_path / "data") as store:
        asyncio.run(store.write(*records))
    return tmp_path / "data"


@pytest.fixture
def record(tmp_path: Path, renderer: Renderer, model_dir: Path) -> Record:
    """Record a turn of session `s` from texts with their provenance; the last text was sampled."""

    def record(pieces: Sequence[tuple[Provenance, str]]) -> Path:
        encoded = [(code, renderer.tokenizer.encode_plain(text)) for code, text in pieces]
        *added, (_, completion) = encoded
        turn: Turn = make_turn(
            "s",
            0,
            added_ids=np.array([token_id for _, ids in added for token_id in ids], np.int32),
            added_provenance=np.array([code for code, ids in added for _ in ids], np.uint8),
            completion_ids=np.array(completion, np.int32),
            logprobs=np.full(len(completion), -0.5, np.float32),
        )
        directory = tmp_path / "texts"
        with SqliteStore.open(directory) as store:
            asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn))
        served = ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint)
        write_served_model(directory, served)
        return directory

    return record
