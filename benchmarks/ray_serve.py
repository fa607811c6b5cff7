"""Measure the gateway on Ray Serve: start-up, memory and time per call, compared with `tokentape serve`.

    python -m benchmarks.ray_serve --store postgresql://...  [--calls 300] [--replicas 1 2]

Both record to the database and use the same mock vLLM server, which replies immediately. Each call continues a session
of about 1,000 tokens. The client keeps its connection open. Memory is the private memory of the processes plus their
proportional share of shared memory (PSS).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.conversations import Conversation, Text
from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process, free_port

from tokentape.config import EngineConfig, ServeConfig
from tokentape.demo import MODEL

SESSIONS = 16
TURNS = 8


@dataclass(frozen=True)
class Measured:
    """Results of one way to serve."""

    name: str
    start_seconds: float
    megabytes: float
    milliseconds: float
    p95: float
    first_event: float
    calls_per_second: float


def serve_on_ray(store: str, upstream: str, replicas: int, port: int) -> None:
    """Serve until an interrupt, in the measured process."""
    import ray
    from ray import serve
    from tokentape.ray import gateway_app

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = ServeConfig(model=MODEL, store=store, engine=EngineConfig("vllm", (upstream,)))
    serve.run(gateway_app(config, num_replicas=replicas, ray_actor_options={"num_cpus": 0.1}))
    done = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: done.set())
    done.wait()
    serve.shutdown()
    ray.shutdown()


async def one_by_one(name: str, url: str, texts: Text, calls: int) -> list[float]:
    """Return the milliseconds of each call, in consecutive sessions with `TURNS` turns, without the first session."""
    taken = []
    async with Connection(url) as connection:
        for number in range(-(-calls // TURNS) + 1):
            taken += await session(connection, f"{name}-{number}", texts, number)
    return taken[TURNS:]


async def session(connection: Connection, name: str, texts: Text, seed: int) -> list[float]:
    conversation = Conversation(texts, 1000, seed=seed)
    taken = []
    for _ in range(TURNS):
        body = conversation.body()
        began = time.perf_counter()
        status, answer = await connection.request(f"/sessions/{name}/v1/chat/completions", body)
        taken.append(1e3 * (time.perf_counter() - began))
        if status != 200:
            raise RuntimeError(f"{status} {answer[:500]!r}")
        conversation.answered(json.loads(answer)["choices"][0]["message"])
    return taken


async def first_events(name: str, url: str, texts: Text, calls: int) -> list[float]:
    """Return the milliseconds to the first event of streams."""
    taken = []
    async with Connection(url) as connection:
        for number in range(calls):
            body = Conversation(texts, 1000, seed=number).body(stream=True)
            began = time.perf_counter()
            events = connection.events(f"/sessions/{name}-{number}/v1/chat/completions", body)
            taken.append(1e3 * ((await anext(events))[0] - began))
            async for _ in events:
                pass
    return taken


async def at_once(name: str, url: str, texts: Text) -> float:
    """Return the calls per second of `SESSIONS` concurrent sessions."""

    async def one(number: int) -> None:
        async with Connection(url) as connection:
            await session(connection, f"{name}-{number}", texts, number)

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(SESSIONS)))
    return SESSIONS * TURNS / (time.perf_counter() - began)


def measure(name: str, command: Sequence[str], url: str, folder: Path, texts: Text, calls: int) -> Measured:
    """Start the server, measure it, and stop it."""
    began = time.perf_counter()
    process = Process([sys.executable, *command], folder / f"{name}.log")
    try:
        process.answers(f"{url}/readyz")
        started = time.perf_counter() - began
        taken = asyncio.run(one_by_one(f"{name}-calls", url, texts, calls))
        streamed = asyncio.run(first_events(f"{name}-streams", url, texts, max(calls // 4, 8)))
        per_second = asyncio.run(at_once(f"{name}-load", url, texts))
        megabytes = process.own_bytes() / 1e6
    finally:
        process.stop()
    return Measured(
        name,
        started,
        megabytes,
        statistics.median(taken),
        statistics.quantiles(taken, n=20)[-1],
        statistics.median(streamed),
        per_second,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="PostgreSQL URL; sessions are added to it")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--serve", nargs=3, metavar=("UPSTREAM", "REPLICAS", "PORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        upstream_url, replicas, port = given.serve
        serve_on_ray(given.store, upstream_url, int(replicas), int(port))
        return
    texts = Text(MODEL)
    run = secrets.token_hex(4)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "replies.json").write_text(json.dumps(texts.replies(64)))
        upstream = Process(
            [sys.executable, "-m", "benchmarks.gateway.upstream", str(folder / "replies.json")], folder / "upstream.log"
        )
        address = f"http://127.0.0.1:{upstream.said(r'([0-9]+) ([0-9]+)')[1]}"
        try:
            found = []
            port = str(free_port())
            plain = ["-m", "tokentape", "serve", str(MODEL), "--engine", "vllm", "--engine-url", address]
            plain += ["--store", given.store, "--port", port]
            found.append(measure(f"{run}-plain", plain, f"http://127.0.0.1:{port}", folder, texts, given.calls))
            for replicas in given.replicas:
                port = str(free_port())
                command = ["-m", "benchmarks.ray_serve", "--store", given.store]
                command += ["--serve", address, str(replicas), port]
                url = f"http://127.0.0.1:{port}"
                found.append(measure(f"{run}-ray-{replicas}", command, url, folder, texts, given.calls))
        finally:
            upstream.stop()
    print("                    start s    MB   call ms    p95   first event ms   calls/s, 16 sessions at once")
    for one in found:
        print(
            f"{one.name.partition('-')[2]:<18}{one.start_seconds:>9.1f}{one.megabytes:>6.0f}{one.milliseconds:>10.1f}"
            f"{one.p95:>7.1f}{one.first_event:>17.1f}{one.calls_per_second:>10.0f}"
        )


if __name__ == "__main__":
    main()
