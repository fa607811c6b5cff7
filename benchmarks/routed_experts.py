"""What routed experts cost a gateway: bytes per token in memory and on disk, and memory over many sessions.

Run `python -m benchmarks.routed_experts`. Sessions of 100,000 tokens with 48 layers of 8 experts are recorded one after
the other by one gateway, with the experts in the database and in files (`--payloads-to`). The same sessions without
experts are the named alternative. With `--idle 0` sessions leave the memory when they end.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import psutil

from tokentape.chat import Renderer
from tokentape.demo import MODEL
from tokentape.engines._base import DISTRIBUTION, EngineInfo, Payload, SampleDelta, SamplingParams
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._limits import Limits
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds

LAYERS, TOP_K, EXPERTS = 48, 8, 128


class Engine:
    """Samples ids by chance, and says which of 128 experts each token took."""

    info = EngineInfo(
        "routing",
        "1",
        "none",
        4000,
        1 << 30,
        "raw_logprobs",
        DISTRIBUTION | {"payloads_from"},
        prompt_penalties=frozenset(),
    )

    def __init__(self, completion: int) -> None:
        self._completion, self._rng = completion, np.random.default_rng(0)

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        ids = self._rng.integers(300, 3900, self._completion).tolist()
        payloads: tuple[Payload, ...] = ()
        if (start := params.payloads_from) is not None:
            rows = len(prompt_ids) + len(ids) - 1 - start
            experts = self._rng.integers(0, EXPERTS, (rows, LAYERS, TOP_K), dtype=np.int32)
            payloads = (Payload("routed_experts", start, experts),)
        yield SampleDelta(tuple(ids), (-1.0,) * len(ids), finish_reason="length", payloads=payloads)

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def record(
    store: SqliteStore, renderer: Renderer, sessions: range, tokens: int, *, payloads: bool, idle: float
) -> list[int]:
    """Record sessions, and return the process's resident bytes after each."""
    limits = Limits(idle_seconds=idle)
    turns = Turns(Engine(tokens // 20), renderer, store, payloads=payloads, limits=limits)
    resident = []
    for number in sessions:
        messages: tuple[object, ...] = ()
        for n in range(20):
            messages = (*messages, {"role": "user", "content": f"{number} {n}"})
            request = TurnRequest(f"s{number}", messages, (), {}, SamplingParams(max_tokens=tokens))
            async for event in await turns.begin(request):
                if isinstance(event, TurnDone):
                    messages = (*messages, event.turn.reply)
        resident.append(psutil.Process().memory_info().rss)
    return resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--idle", type=float, default=3600.0, help="seconds after which a session leaves the memory")
    options = parser.parse_args()
    renderer = Renderer.load(MODEL)
    for kind in ("none", "in the database", "in files"):
        folder = Path(tempfile.mkdtemp())
        try:
            store = SqliteStore.open(folder / "record")
            if kind == "in files":
                store.keep_payloads_at(str(folder / "payloads"))
            sessions = range(options.sessions)
            work = record(store, renderer, sessions, options.tokens, payloads=kind != "none", idle=options.idle)
            found = asyncio.run(work)
            store.close()
            disk, files = (
                sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())
                for name in ("record", "payloads")
            )
        finally:
            shutil.rmtree(folder)
        count, tenth = options.sessions * options.tokens, max(options.sessions // 10, 1)
        growth = (found[-1] - found[tenth - 1]) / ((options.sessions - tenth) * options.tokens or 1)
        print(
            f"experts {kind}: {disk / count:.1f} bytes per token in the database, {files / count:.1f} in files; memory "
            f"after {tenth} sessions {found[tenth - 1] >> 20} MiB, after {options.sessions} {found[-1] >> 20} MiB: "
            f"{growth:.1f} bytes more per token"
        )


if __name__ == "__main__":
    main()
