"""Run the experiment, or go on with it.

    python examples/token_paths/experiment.py --out runs/token-paths              # what the plan names, 93 runs
    python examples/token_paths/experiment.py --out runs/reduced --reduced        # 2 seeds of the main comparison

Runs stand in the order of the plan, and complete ones are skipped: interrupt it and start it again as you like.
`--first-seed` uses other seeds than ours. `--minutes` starts no run after so many minutes of CPU.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from run import Settings, run

MAIN_SEEDS, SIDE_SEEDS = 10, 3
DOSES = (0.001, 0.005, 0.02, 0.05, 0.06)
"""BPE dropout of further starting policies. The report gives the share of noncanonical tokens that they sample."""


def planned(first_seed: int, main_seeds: int, side_seeds: int) -> Iterator[Settings]:
    """Return all runs in their order: the main comparison seed by seed, then each side arm."""
    for seed in range(first_seed, first_seed + main_seeds):
        for path in ("recorded", "retokenized", "rerendered"):
            yield Settings(path, seed)
    seeds = range(first_seed, first_seed + side_seeds)
    for seed in seeds:
        yield Settings("rerendered", seed, template="keeps")
    for correction in ("token_truncate", "sequence_mask"):
        for seed in seeds:
            for path in ("retokenized", "rerendered"):
                yield Settings(path, seed, correction=correction)
    for dropout in DOSES:
        for seed in seeds:
            for path in ("recorded", "retokenized"):
                yield Settings(path, seed, dropout=dropout)
    for factor in (0.5, 2.0):
        for seed in seeds:
            for path in ("recorded", "retokenized", "rerendered"):
                base = Settings(path, seed)
                yield replace(base, learning_rate=base.learning_rate * factor)


def main() -> None:
    """Parse the command line and run what is not complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/token-paths"))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--reduced", action="store_true", help="2 seeds of the main comparison")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    arguments.out.mkdir(parents=True, exist_ok=True)
    main_seeds, side_seeds = (2, 0) if arguments.reduced else (MAIN_SEEDS, SIDE_SEEDS)
    for settings in planned(arguments.first_seed, main_seeds, side_seeds):
        file = arguments.out / f"{settings.name}.jsonl"
        if not file.exists() and time.process_time() < arguments.minutes * 60:
            started = time.process_time()
            run(settings, arguments.out / "policies", file)
            print(f"{settings.name}: {time.process_time() - started:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
