"""Plan capacity from one machine to 100,000 sessions, with measured unit costs and a simulation.

    python benchmarks/scale.py                  # the plan of docs/scale.md, with each row simulated
    python benchmarks/scale.py --check          # the simulation against measurements on one machine

The plan is arithmetic: arrivals times unit cost over capacity. It ignores queues. So an event simulation (simpy) checks
each row: sessions wait for the engine and for their tools, replicas serve one call at a time per core, and databases
commit all waiting turns in one flush. Where both disagree, the arithmetic is wrong. Needs `pip install simpy`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import simpy

COSTS = Path(__file__).with_name("unit_costs.json")


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Unit costs, measured by the benchmarks named in `unit_costs.json`."""

    cpu_ms_per_call: float
    """CPU of the gateway per call without history."""
    cpu_ms_per_1k_history: float
    """Additional CPU per thousand tokens of history, mostly for moving bytes."""
    commit_cpu_ms: float
    """CPU of the database per turn in a group commit."""
    flush_ms: float
    """One flush of the database's log, independent of its size."""
    disk_bytes_per_token: float
    ram_bytes_per_token: float
    log_bytes_per_disk_byte: float
    """Bytes of the log per byte of the tables."""
    wire_bytes_per_token: float
    """JSON bytes per context token, to the engine."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of the agents. Times are means of exponential distributions; token counts are fixed."""

    sessions: int
    turns: int = 20
    added_tokens: int = 600
    sampled_tokens: int = 300
    engine_seconds: float = 6.0
    tool_seconds: float = 4.0

    @property
    def calls_per_second(self) -> float:
        """Calls per second if only engine and tools took time."""
        return self.sessions / (self.engine_seconds + self.tool_seconds)

    @property
    def mean_history(self) -> float:
        """Average number of context tokens that a call sends."""
        return (self.added_tokens + self.sampled_tokens) * (self.turns - 1) / 2 + self.added_tokens


@dataclass(frozen=True, slots=True)
class Machines:
    """Available machines."""

    cores: int
    """Cores for gateways, with one worker process each."""
    databases: int


@dataclass(frozen=True, slots=True)
class Use:
    """Resources in use. Rates are per second."""

    calls: float
    gateway_cores: float
    database_busy: float
    """Share of the time that each database spends committing."""
    disk_mb: float
    log_mb: float
    wire_gbit: float
    ram_gb: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """Results of a simulation after its warm-up, in seconds."""

    calls: float
    gateway_busy: float
    database_busy: float
    added_p50: float
    added_p99: float
    """Time that gateway and database add to a call, including queues."""
    group: float
    """Turns per commit."""


def planned_use(work: Workload, machines: Machines, costs: UnitCosts) -> Use:
    """Compute the resources that a workload uses."""
    calls = work.calls_per_second
    tokens = calls * (work.added_tokens + work.sampled_tokens)
    per_call = costs.cpu_ms_per_call + costs.cpu_ms_per_1k_history * work.mean_history / 1000
    disk = tokens * costs.disk_bytes_per_token / 1e6
    # The next group gathers during a flush, so flushes use only the remaining time.
    busy = min(1.0, calls / machines.databases * costs.commit_cpu_ms / 1000)
    return Use(
        calls=calls,
        gateway_cores=calls * per_call / 1000,
        database_busy=busy,
        disk_mb=disk,
        log_mb=disk * costs.log_bytes_per_disk_byte,
        wire_gbit=calls * work.mean_history * costs.wire_bytes_per_token * 8 / 1e9,
        ram_gb=work.sessions * work.mean_history * costs.ram_bytes_per_token / 1e9,
    )


def simulate(work: Workload, machines: Machines, costs: UnitCosts, *, seconds: float, seed: int = 0) -> Simulated:
    """Simulate `work` for `seconds`; the first third is warm-up."""
    env = simpy.Environment()
    rng = np.random.default_rng(seed)
    cores = [simpy.Resource(env) for _ in range(machines.cores)]
    queues: list[list[simpy.Event]] = [[] for _ in range(machines.databases)]
    bells = [env.event() for _ in range(machines.databases)]
    begin = seconds / 3
    added: list[float] = []
    busy = {"gateway": 0.0, "database": 0.0}
    groups: list[int] = []

    def flusher(n: int) -> Generator[Any, Any, None]:
        while True:
            if not queues[n]:
                bells[n] = env.event()
                yield bells[n]
            group, queues[n] = queues[n], []
            took = len(group) * costs.commit_cpu_ms / 1000
            yield env.timeout(took + costs.flush_ms / 1000)
            if env.now > begin:
                busy["database"] += took
                groups.append(len(group))
            for one in group:
                one.succeed()

    def compute(core: simpy.Resource, ms: float) -> Generator[Any, Any, None]:
        with core.request() as turn:
            yield turn
            yield env.timeout(ms / 1000)
        if env.now > begin:
            busy["gateway"] += ms / 1000

    def agent(number: int) -> Generator[Any, Any, None]:
        database = number % machines.databases
        yield env.timeout(rng.exponential(work.engine_seconds + work.tool_seconds))
        turn = int(rng.integers(work.turns))
        while True:
            history = (work.added_tokens + work.sampled_tokens) * turn + work.added_tokens
            ms = costs.cpu_ms_per_call + costs.cpu_ms_per_1k_history * history / 1000
            core = cores[int(rng.integers(machines.cores))]
            start = env.now
            yield from compute(core, ms / 2)
            before_engine = env.now
            if work.engine_seconds:
                yield env.timeout(rng.exponential(work.engine_seconds))
            after_engine = env.now
            yield from compute(core, ms / 2)
            durable = env.event()
            queues[database].append(durable)
            if not bells[database].triggered:
                bells[database].succeed()
            yield durable
            if env.now > begin:
                added.append(before_engine - start + env.now - after_engine)
            if work.tool_seconds:
                yield env.timeout(rng.exponential(work.tool_seconds))
            turn = (turn + 1) % work.turns

    for n in range(machines.databases):
        env.process(flusher(n))
    for number in range(work.sessions):
        env.process(agent(number))
    env.run(until=seconds)
    span = seconds - begin
    p50, p99 = np.percentile(added, [50, 99])
    return Simulated(
        calls=len(added) / span,
        gateway_busy=busy["gateway"] / span / machines.cores,
        database_busy=busy["database"] / span / machines.databases,
        added_p50=float(p50),
        added_p99=float(p99),
        group=float(np.mean(groups)),
    )


PLAN = (
    (Workload(sessions=100), Machines(cores=1, databases=1)),
    (Workload(sessions=1_000), Machines(cores=1, databases=1)),
    (Workload(sessions=10_000), Machines(cores=8, databases=1)),
    (Workload(sessions=100_000), Machines(cores=64, databases=10)),
)


def main() -> None:
    """Print the plan, computed and simulated, or the check, as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the simulation with measured throughput")
    parser.add_argument("--seconds", type=float, default=90.0, help="simulated seconds per row")
    args = parser.parse_args()
    known = json.loads(COSTS.read_text())
    costs = UnitCosts(**known["costs"])
    if args.check:
        for measured in known["measured"]:
            work = Workload(**measured["workload"])
            seen = simulate(work, Machines(**measured["machines"]), replace(costs, **measured["costs"]), seconds=30.0)
            print(json.dumps({"measured": measured, "simulated": asdict(seen)}))
        return
    for work, machines in PLAN:
        use = planned_use(work, machines, costs)
        seen = simulate(work, machines, costs, seconds=args.seconds)
        row = {"sessions": work.sessions, **asdict(machines), "computed": asdict(use), "simulated": asdict(seen)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
