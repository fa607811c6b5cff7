"""Measure gateways: the cost of a call, the calls per second, and the space of their records.

    TOKENTAPE_BENCH_RLLM=/path/to/python TOKENTAPE_BENCH_VERIFIERS=... TOKENTAPE_BENCH_LITELLM=... \\
        TOKENTAPE_BENCH_AGENT_LIGHTNING=... python -m benchmarks.gateway --minutes 30 --docs

Every target runs as its users run it, in one process (LiteLLM: one worker), with the same mock vLLM server on loopback.
Peers have their own environments: `pip install verifiers`, `pip install 'litellm[proxy]'`, `pip install
rllm-model-gateway` (for its cumulative mode from the repository, with renderers 0.1.7), and for Agent Lightning, with
Python 3.12, `pip install git+https://github.com/microsoft/agent-lightning@v1.0.0`. A peer without an environment is
left out, and the report says so. Compare CPU times: other work on the machine affects them least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from benchmarks.gateway import measuring
from benchmarks.gateway.conversations import Text
from benchmarks.gateway.http import Connection
from benchmarks.gateway.measuring import Calls, Running
from benchmarks.gateway.processes import Process
from benchmarks.gateway.report import write_docs, written
from benchmarks.gateway.targets import TARGETS, Site, Target

SIZES = (1_000, 10_000, 100_000)
CLIENTS = (32, 256, 1024)
SHARES = {"calls": 0.4, "streams": 0.1, "openings": 0.05, "clients": 0.15, "rollout": 0.1, "footprint": 0.2}
"""Approximate shares of the minutes; each part measures everything at least once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("TOKENTAPE_TOKENIZERS", "../shared/tokenizers")) / "qwen3"
    parser.add_argument("--model", type=Path, default=default, help="folder of Qwen3's tokenizer and template")
    parser.add_argument("--minutes", type=float, default=30.0, help="approximate duration of the measurements")
    parser.add_argument("--quick", action="store_true", help="run everything once with small sizes (a few minutes)")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="only targets named with this word")
    parser.add_argument("--parts", default=",".join(SHARES), help="of: " + ", ".join(SHARES))
    parser.add_argument("--out", type=Path, default=Path("gateway.json"), help="file for the figures")
    parser.add_argument("--docs", action="store_true", help="write table and plot to docs/benchmarks.md")
    parser.add_argument("--report", type=Path, metavar="JSON", help="report on these figures without measuring")
    args = parser.parse_args()
    if args.report is not None:
        found = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        if not (args.model / "tokenizer.json").is_file():
            parser.error(f"{args.model} has no tokenizer.json; name a folder with --model")
        chosen = [one for one in TARGETS if not args.only or any(word in one.name for word in args.only)]
        with tempfile.TemporaryDirectory(prefix="tokentape-benchmark-") as folder:
            found = uvloop.run(Benchmark(args, chosen, Path(folder)).run())
        print(f"figures in {args.out}", file=sys.stderr)
    print(written(found))
    if args.docs:
        write_docs(found)


class Benchmark:
    """One run of the benchmark."""

    def __init__(self, args: argparse.Namespace, targets: list[Target], folder: Path) -> None:
        self._quick: bool = args.quick
        self._seconds = 60.0 * (0.0 if args.quick else args.minutes)
        self._parts = args.parts.split(",")
        self._folder = folder
        self._out: Path = args.out
        self._model = args.model.resolve()
        self._text = Text(self._model)
        self._failures: dict[str, str] = {}
        self._missing = {one.name: why for one in targets if (why := one.missing()) is not None}
        self._targets = [one for one in targets if one.name not in self._missing]
        self._sizes = SIZES[:2] if args.quick else SIZES

    async def run(self) -> dict[str, Any]:
        """Run all measurements."""
        replies = self._folder / "replies.json"
        replies.write_text(json.dumps(self._text.replies(64)), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.gateway.upstream", str(replies)]
        upstream = Process(command, self._folder / "upstream.log")
        try:
            ports = upstream.said(r"(\d+) (\d+)\n")
            self._urls = [f"http://127.0.0.1:{ports[number]}" for number in (1, 2)]
            return await self._measured()
        finally:
            upstream.stop()

    async def _measured(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "command": f"python -m benchmarks.gateway {shlex.join(sys.argv[1:])}",
            "machine": machine(),
            "python": platform.python_version(),
            "missing": self._missing,
            "targets": {one.name: {"kind": one.kind, "version": one.version()} for one in self._targets},
        }
        parts: list[tuple[str, Any]] = [
            ("calls", self._calls),
            ("streams", self._streams),
            ("openings", self._openings),
            ("clients", self._clients),
            ("rollout", self._rollout),
        ]
        running: list[Running] = []
        try:
            for target in self._targets:
                try:
                    running.append(self._start(target, "all"))
                except RuntimeError as error:
                    self._failures[target.name] = str(error)
            for one in running:
                if one.process is not None:
                    found["targets"][one.target.name]["start_seconds"] = one.started
            for name, part in parts:
                if name in self._parts:
                    print(f"{datetime.now(UTC):%H:%M:%S} {name}", file=sys.stderr)
                    measured = [one for one in running if name == "clients" or one.target.kind != "several"]
                    found[name] = await part(measured, self._seconds * SHARES[name])
                    self._keep(found)
        finally:
            for one in running:
                if one.process is not None:
                    one.process.stop()
        if "footprint" in self._parts:
            print(f"{datetime.now(UTC):%H:%M:%S} footprint", file=sys.stderr)
            found["footprint"] = await self._footprints()
        self._keep(found)
        return found

    def _keep(self, found: dict[str, Any]) -> None:
        """Write the results so far, so that an interrupted run keeps them."""
        found["failures"] = self._failures
        self._out.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def _start(self, target: Target, use: str) -> Running:
        folder = self._folder / use / "".join(filter(str.isalnum, target.name))
        folder.mkdir(parents=True)
        site = Site(self._urls[0], self._urls[1], folder, self._model)
        began = time.perf_counter()
        url, process = target.start(site)
        return Running(target, site, url, process, time.perf_counter() - began)

    async def _calls(self, targets: list[Running], seconds: float) -> dict[str, Any]:
        calls = {(one.target.name, size): Calls() for one in targets for size in self._sizes}

        async def measure(one: Running, size: int, number: int) -> None:
            into = calls[one.target.name, size]
            turns = 5 if size == SIZES[-1] else 10
            await measuring.one_session(one, self._text, size, turns, into, seed=number)

        await measuring.in_turn(
            targets, self._sizes, measure, seconds=seconds, least=2 if self._quick else 5, failures=self._failures
        )
        return {f"{name}|{size}": summary(one) for (name, size), one in calls.items() if one.seconds}

    async def _streams(self, targets: list[Running], seconds: float) -> dict[str, Any]:
        targets = [one for one in targets if one.target.streams]
        calls = {one.target.name: Calls() for one in targets}
        whole = {one.target.name: Calls() for one in targets}

        async def measure(one: Running, stream: bool, number: int) -> None:
            into = (calls if stream else whole)[one.target.name]
            await measuring.one_session(one, self._text, SIZES[0], 8, into, seed=number, stream=stream)

        await self._interval(0.002)
        await measuring.in_turn(targets, (True, False), measure, seconds=seconds, least=2, failures=self._failures)
        await self._interval(0.0)
        found = {}
        for name, one in calls.items():
            if one.first_seconds and whole[name].cpu_ms:
                more = statistics.median(one.cpu_ms) - statistics.median(whole[name].cpu_ms)
                chunks = one.chunks / len(one.seconds)
                found[name] = {
                    "first_ms": 1000 * statistics.median(one.first_seconds),
                    "cpu_ms": statistics.median(one.cpu_ms),
                    "chunks": chunks,
                    "cpu_us_per_chunk": 1000 * more / max(chunks, 1),
                }
        return found

    async def _openings(self, targets: list[Running], seconds: float) -> dict[str, Any]:
        """Measure first calls: of a group's first session, of one with equal messages, of one with another question."""
        found: dict[str, list[tuple[float, float]]] = {}

        async def measure(one: Running, size: int, number: int) -> None:
            seed = 1000 + number
            for kind, question in (("first", ""), ("equal", ""), ("question", "And what is wrong with it?")):
                measured = await measuring.opening(one, self._text, size, seed=seed, question=question)
                found.setdefault(f"{one.target.name}|{kind}", []).append(measured)

        exact = [one for one in targets if one.target.kind == "exact"]
        size = self._sizes[-1]
        await measuring.in_turn(exact, (size,), measure, seconds=seconds, least=5, failures=self._failures)
        return {
            key: {"tokens": size, "ms": statistics.median(ms), "cpu_ms": statistics.median(cpu)}
            for key, (ms, cpu) in ((key, zip(*several, strict=True)) for key, several in found.items())
        }

    async def _clients(self, targets: list[Running], seconds: float) -> dict[str, Any]:
        found: dict[str, list[tuple[float, float]]] = {}
        own = [one for one in targets if one.process is not None]

        async def measure(one: Running, clients: int, number: int) -> None:
            calls = 64 if self._quick else 1024
            turns = max(calls // clients, 1)
            measured = await measuring.at_once(one, self._text, clients, SIZES[0], turns)
            found.setdefault(f"{one.target.name}|{clients}", []).append(measured)

        await measuring.in_turn(own, CLIENTS, measure, seconds=seconds, least=1, failures=self._failures)
        return {
            key: {
                "calls_per_second": statistics.median(rate for rate, _ in several),
                "cpu_ms": statistics.median(cpu for _, cpu in several),
            }
            for key, several in found.items()
        }

    async def _rollout(self, targets: list[Running], seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def measure(one: Running, turns: int, number: int) -> None:
            found[one.target.name] = await measuring.rollout(one, self._text, turns, 1000)

        exact = [one for one in targets if one.target.kind in ("exact", "capture")]
        turns = 30 if self._quick else 200
        await measuring.in_turn(exact, (turns,), measure, seconds=0, least=1, failures=self._failures)
        return found

    async def _footprints(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for target in self._targets:
            if target.kind not in ("exact", "capture") or target.name in self._failures:
                continue
            running = self._start(target, "footprint")
            assert running.process is not None
            try:
                sessions = 30 if self._quick else 200
                found[target.name] = await measuring.footprint(running, self._text, sessions, 20)
            except measuring.Failed as error:
                self._failures[target.name] = str(error)
            finally:
                running.process.stop()
        return found

    async def _interval(self, seconds: float) -> None:
        for url in self._urls:
            async with Connection(url) as connection:
                await connection.request("/interval", str(seconds).encode())


def summary(calls: Calls) -> dict[str, float]:
    """Return the statistics of consecutive calls, in milliseconds."""
    ordered = sorted(calls.seconds)
    return {
        "calls": len(ordered),
        "p50_ms": 1000 * statistics.median(ordered),
        "p99_ms": 1000 * ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        "cpu_ms": statistics.median(calls.cpu_ms),
        "cpu_ms_range": [min(calls.cpu_ms), max(calls.cpu_ms)],
        "first_call_ms": 1000 * statistics.median(calls.opening_seconds),
    }


def machine() -> str:
    """Return a description of the machine."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} CPUs, {platform.system()}"


if __name__ == "__main__":
    main()
