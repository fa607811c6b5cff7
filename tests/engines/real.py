"""Real inference servers started for a module's tests, and the model's forward pass, to compare with."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

import tokentape.demo
from tokentape.engines._base import Engine, SampleDelta, SamplingParams

MODEL = Path(tokentape.demo.__file__).parent / "model"

_T = TypeVar("_T")


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def served(
    command: Callable[[int], Sequence[str]],
    log: Path,
    settings: Mapping[str, str],
    *,
    port: int | None = None,
    within: float = 400,
) -> Iterator[str]:
    """Yield the address of a healthy server, started with the command for a port. None takes a free port."""
    port = port or free_port()
    with log.open("ab") as out:
        process = subprocess.Popen(
            command(port), env={**os.environ, **settings}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + within
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def load_forward() -> Callable[[np.ndarray], np.ndarray]:
    """Return the model's next-token log-probabilities, float64 [tokens, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor(ids[None].astype(np.int64))).logits[0].double()
        return np.asarray(torch.log_softmax(logits, dim=-1).numpy())

    return forward


def use(opening: Callable[[], Awaitable[Engine]], body: Callable[[Any], Awaitable[_T]]) -> _T:
    """Return the result of `body`, run with an open engine."""

    async def main() -> _T:
        engine = await opening()
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def collect(
    engine: Engine, prompt: np.ndarray, params: SamplingParams, *, stream: bool
) -> tuple[np.ndarray, np.ndarray, SampleDelta]:
    """Return ids, log-probabilities and the last delta of a call."""
    deltas = [d async for d in engine.sample(prompt, params, stream=stream, request_id="test")]
    ids = np.array([i for d in deltas for i in d.token_ids], np.int32)
    return ids, np.array([lp for d in deltas for lp in d.logprobs]), deltas[-1]


class Opening:
    """An application that opens its engine in the event loop that serves it."""

    def __init__(self, opening: Callable[[], Awaitable[ASGIApp]]) -> None:
        self._opening = opening
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = await self._opening()
        await self._app(scope, receive, send)
