"""A gateway over a tiny vision model. Its tests need Pillow and are skipped without it."""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media.tiny_vision import write_model
from tokentape.chat._renderer import Renderer
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.engines._transformers import TransformersEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

Serve = Callable[[Path], AbstractContextManager[str]]


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_model(folder, model_dir)
    return folder


@pytest.fixture(scope="session")
def processor(vision_dir: Path) -> QwenImageProcessor:
    return QwenImageProcessor.open(vision_dir)


@pytest.fixture(scope="session")
def vision_renderer(vision_dir: Path, processor: QwenImageProcessor) -> Renderer:
    return Renderer.load(vision_dir, images=processor)


@pytest.fixture(scope="session")
def vision_model(vision_dir: Path) -> Any:
    """The model as transformers runs it, for forward passes."""
    from transformers import Qwen2VLForConditionalGeneration

    return Qwen2VLForConditionalGeneration.from_pretrained(vision_dir).eval()


@pytest.fixture
def vision_engine(vision_dir: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(vision_dir, threads=1, logprobs_mode="raw_logprobs")
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def serve(vision_dir: Path, vision_renderer: Renderer) -> Serve:
    """Serve with the record in a folder; its store is closed with the gateway."""

    @contextmanager
    def serving(data: Path) -> Iterator[str]:
        engine = TransformersEngine.open(vision_dir, threads=1, logprobs_mode="raw_logprobs")
        turns = Turns(engine, vision_renderer, SqliteStore.open(data))
        with running(create_app(turns, model_id="vision")) as url:
            yield url

    return serving


def assert_rounding_apart(model: Any, forward: Callable[[Any], Any], ids: Any, logprobs: Any) -> None:
    """Assert that float32 logprobs of `ids` differ from `forward(model)`, [tokens, vocabulary], by rounding alone.

    How far rounding goes is measured: float32 against float64 in the same pass, over the vocabulary. Rows that share a
    batch are added up in another order and round otherwise, by up to as much again.
    """
    exact = forward(copy.deepcopy(model).double()).double().numpy()
    rounding = np.abs(forward(model).double().numpy() - exact).max()
    assert 0 < rounding < 1e-2
    assert np.abs(exact[range(len(ids)), ids] - logprobs).max() <= 2 * rounding


def data_url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def image_url(image: bytes) -> dict[str, Any]:
    """An image as chat completions take it."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}
