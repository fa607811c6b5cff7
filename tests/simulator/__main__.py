"""Run seeds until this many calls were made.

python -m tests.simulator --calls 100000
python -m tests.simulator --seed 17 --trace
python -m tests.simulator --calls 1000000 --state test-output/simulator.json     # goes on where it stopped
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulator.run import play, simulating


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--state", type=Path, help="file that says how far a run came; it goes on from there")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have another order in each process: with it a seed would not replay.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulator", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    logging.disable(logging.CRITICAL)
    reached: Counter[str] = Counter()
    calls, failed, began = 0, 0, time.process_time()
    seed = args.first if args.seed is None else args.seed
    if args.state is not None and args.state.exists():
        before = json.loads(args.state.read_text(encoding="utf-8"))
        seed, calls, failed, reached = before["seed"], before["calls"], before["failed"], Counter(before["reached"])
    with simulating() as renderer:
        while calls < args.calls and (args.seed is None or seed == args.seed):
            outcome = play(seed, renderer, reached)
            calls += outcome.calls
            if args.trace:
                print(*outcome.trace, sep="\n")
            if outcome.faults:
                failed += 1
                print(f"seed {seed}: {outcome.faults[:3]}", flush=True)
                if not args.keep_going:
                    break
            if args.seed is not None:
                print(f"seed {seed}: {outcome.calls} calls, digest {outcome.digest}")
            seed += 1
            if args.state is not None:
                args.state.parent.mkdir(parents=True, exist_ok=True)
                state = {"seed": seed, "calls": calls, "failed": failed, "reached": reached}
                args.state.write_text(json.dumps(state), encoding="utf-8")
            if seed % 50 == 0:
                gc.collect()
    seconds = time.process_time() - began
    print(f"seeds up to {seed}, calls {calls}, failed {failed}, {seconds:.0f} s of CPU; reached {dict(reached)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
