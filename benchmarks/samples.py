"""Measure the path from recorded turns to trajectories, samples and batches, for growing sessions.

    python benchmarks/samples.py [--tokens-per-turn N]

First one linear session with a given number of turns, then a session where every tenth turn was answered twice, then
many sessions. Figures are CPU milliseconds, the best of 5 rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.training._collate import packed, padded, with_column
from tokentape.training._samples import DropRetries, assemble, one_per_turn
from tokentape.types import Provenance, SessionInfo, Turn

VOCABULARY = 151_000


def make_turn(
    random: np.random.Generator, seq: int, parent: int | None, tokens: int, alike: Turn | None = None
) -> Turn:
    """Return a turn with a fifth of its tokens sampled; a turn `alike` answers the same context."""
    sampled = tokens // 5
    added = tokens - sampled
    return Turn(
        session_id="s",
        seq=seq,
        parent=parent,
        setup="setup",
        messages=({"role": "user", "content": str(seq) if alike is None else str(alike.seq)},),
        reply={"role": "assistant", "content": str(seq)},
        added_ids=random.integers(VOCABULARY, size=added, dtype=np.int32) if alike is None else alike.added_ids,
        added_provenance=np.full(added, Provenance.TOOL, np.uint8),
        completion_ids=random.integers(VOCABULARY, size=sampled, dtype=np.int32),
        logprobs=-random.random(sampled, dtype=np.float32),
        finish_reason="stop",
        stop=None,
        fork=None if alike is None else "sibling",
        sampling={},
        engine="e",
        weight_version=str(seq // 50),
        created_at=0.0,
        digest="",
    )


def chain(turns: int, tokens: int, retried: int = 0) -> Session:
    """Return consecutive turns; every `retried`-th was answered twice, and the second answer was continued."""
    random = np.random.default_rng(turns)
    session = Session(SessionInfo("s", 0.0, {"task": 1}))
    parent: int | None = None
    for n in range(turns):
        turn = make_turn(random, len(session.turns), parent, tokens)
        session.add(turn)
        if retried and n % retried == 0:
            session.add(make_turn(random, len(session.turns), parent, tokens, alike=turn))
        parent = len(session.turns) - 1
    return session


def best_of(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the CPU milliseconds of the fastest round."""
    spent = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        spent.append((time.process_time() - started) * 1e3)
    return min(spent)


def measure(turns: int, tokens_per_turn: int, retried: int) -> str:
    session = chain(turns, tokens_per_turn, retried)
    recorded = sum(len(turn.added_ids) + len(turn.completion_ids) for turn in session.turns)
    paths = trajectories(session)
    samples = assemble(paths).samples
    tokens = sum(len(sample.token_ids) for sample in samples)
    costs = [
        best_of(lambda: trajectories(session)),
        best_of(lambda: assemble(paths)),
        best_of(lambda: assemble(paths, select=[DropRetries()])),
        best_of(lambda: assemble(paths, split=one_per_turn), rounds=2),
        best_of(lambda: packed(samples, pad_id=0, vocab_size=VOCABULARY)),
    ]
    cells = " | ".join(f"{cost:,.2f}" for cost in costs)
    return f"| {turns} | {recorded:,} | {len(samples)} | {tokens:,} | {cells} |"


def measure_many(sessions: int) -> str:
    """Return the cost per million tokens for samples of ordinary length, in rows of 32k."""
    path = trajectories(chain(10, 510))[0]
    samples = [with_column(sample, "advantages", 1.0) for _ in range(sessions) for sample in assemble([path]).samples]
    millions = sum(len(sample.token_ids) for sample in samples) / 1e6
    right = best_of(lambda: padded(samples, pad_id=0, vocab_size=VOCABULARY)) / millions
    rows = best_of(lambda: packed(samples, pad_id=0, vocab_size=VOCABULARY, length=32_768)) / millions
    made = best_of(lambda: [assemble([path]) for _ in range(sessions)]) / millions
    costs = f"assemble {made:.1f} ms, padded {right:.1f} ms, packed {rows:.1f} ms"
    return f"per million tokens, {sessions} samples of 5,100 tokens: {costs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-turn", type=int, default=510)
    tokens_per_turn = parser.parse_args().tokens_per_turn
    print(
        "| turns | tokens | samples | tokens of them | trajectories | assemble | drop retries | one per turn | packed |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for turns in (25, 50, 100, 200, 400, 800):
        print(measure(turns, tokens_per_turn, retried=0))
    for turns in (50, 100, 200):
        print(measure(turns, tokens_per_turn, retried=10))
    print(measure_many(400))


if __name__ == "__main__":
    main()
