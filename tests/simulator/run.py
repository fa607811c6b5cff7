"""One seed: clients act in a world, and their ledger is compared with the record."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random

import pytest

from tests.simulator import engine as engine_module
from tests.simulator.checks import check, columns_of_leaves
from tests.simulator.clients import Agent, Client, Consumer, Judge, Operator, Stranger, Trainer
from tests.simulator.ledger import Ledger
from tests.simulator.loop import running
from tests.simulator.world import Faults, World
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL

LIVES = 400.0
"""Virtual seconds after which every client is long done."""

OTHERS: dict[type[Client], float] = {Stranger: 0.3, Judge: 0.5, Trainer: 0.4, Consumer: 0.4, Operator: 0.15}
"""The probability that a run has such a client."""


@dataclass
class Outcome:
    """What a seed came to."""

    seed: int
    calls: int = 0
    """Requests for a turn that clients sent."""
    faults: list[str] = field(default_factory=list)
    """What was found; empty if all is right."""
    digest: str = ""
    """Of everything that happened, to tell whether a replay is one."""
    trace: list[str] = field(default_factory=list)


def play(seed: int, renderer: Renderer, reached: Counter[str]) -> Outcome:
    """Play a seed to its end, and check it."""
    rng, outcome = Random(seed), Outcome(seed)
    wild = rng.choice([0.0, 0.1, 0.3, 0.6])
    kills = rng.choice([0, 0, 1, 3]) if wild else 0
    # Replies not delivered before a restart are excused, and many restarts would hide missing marks.
    fails = rng.random() * wild * (0.0 if seed % 4 else 0.03)
    leaves = 0.3 if seed % 4 == 1 else 0.0
    kills = 0 if leaves else kills
    faults = Faults(*(rng.random() * wild for _ in range(7)), disk_fails=fails, leaves=leaves, kills=kills)
    directory = Path(tempfile.mkdtemp(prefix="simulated-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with running(rng) as loop:
            world = World(loop, renderer, directory, faults, reached)
            ledger = Ledger(world)
            try:
                loop.run_until_complete(_live(ledger))
            finally:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(1))
        outcome.calls, outcome.faults, outcome.trace = ledger.calls, ledger.faults, world.trace
        outcome.digest = hashlib.sha256("\n".join(world.trace).encode()).hexdigest()[:16]
    finally:
        shutil.rmtree(directory)
    return outcome


async def _live(ledger: Ledger) -> None:
    world, loop, rng = ledger.world, ledger.world.loop, ledger.world.rng
    world.of_clients.add(asyncio.current_task())  # type: ignore[arg-type]
    await world.start()
    clients: list[Client] = [Agent(ledger, f"s{n}") for n in range(rng.randint(1, 5))]
    clients += [kind(ledger, kind.__name__.lower()) for kind, likely in OTHERS.items() if rng.random() < likely]
    kills = sorted(loop.steps + rng.randrange(5, 1200) for _ in range(world.faults.kills))
    restarts: list[asyncio.Task[None]] = []

    def may_kill() -> None:
        due = bool(kills) and loop.steps >= kills[0]
        if world.app is not None and (due or world.broken):
            del kills[: int(due)]
            world.kill()
            restarts.append(loop.create_task(_restart(world)))
            world.of_clients.add(restarts[-1])

    loop.before_step = may_kill
    await asyncio.gather(*(client.run() for client in clients))
    # Until marks are written and calls without clients have ended. The disk may still be full, but fails no more.
    world.faults = _only(world.faults, "disk_full")
    kills.clear()
    await asyncio.sleep(LIVES)
    loop.before_step = lambda: None
    for restart in restarts:
        await restart
    world.faults = _only(world.faults)
    await _look_back(ledger)
    recorded = await world.stop()
    for name, stored in sorted(recorded.items()):
        world.note(f"{name} {[(turn.seq, turn.parent, turn.finish_reason, turn.digest) for turn in stored.turns]}")
    ledger.faults += check(ledger, recorded)
    ledger.faults += [what for name in ledger.valued & recorded.keys() for what in columns_of_leaves(recorded, name)]


async def _look_back(ledger: Ledger) -> None:
    """Read the held snapshots once more, and write values for whole trajectories, when nothing else runs."""
    await Consumer(ledger, "reader").read_again()
    if ledger.received and ledger.world.rng.random() < 0.4:
        ledger.valued.add(ledger.world.rng.choice(ledger.received).session)
        for session in ledger.valued:
            await Judge(ledger, "judge").write_all_values(session)


def _only(faults: Faults, *kept: str) -> Faults:
    """Return the faults without those that are not kept."""
    return Faults(**{field.name: getattr(faults, field.name) if field.name in kept else 0 for field in fields(Faults)})


async def _restart(world: World) -> None:
    await asyncio.sleep(world.loop.delay())
    await world.start()


@contextmanager
def simulating() -> Iterator[Renderer]:
    """Yield the renderer for `play`, with stores that commit in the loop."""
    with pytest.MonkeyPatch.context() as patch:
        engine_module.without_threads(patch)
        yield Renderer.load(MODEL)
