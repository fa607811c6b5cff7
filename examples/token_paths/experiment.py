"""Run all runs of the experiment, one after the other.

    python examples/token_paths/experiment.py --seeds 3 --out runs/token-paths

Complete runs are skipped, so you can interrupt and restart it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

RUNS = (("recorded", "recomputed"), ("retokenized", "recomputed"), ("rerendered", "recomputed"))
"""Token path and source of the old logprobs."""

ABLATION = (("retokenized", "sampler"), ("rerendered", "sampler"))
"""With the recorded ids, both sources agree up to rounding."""


def main() -> None:
    """Parse the command line and start the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ablation", action="store_true", help="also take the old logprobs from the sampler")
    parser.add_argument("--out", type=Path, default=Path("runs/token-paths"))
    arguments = parser.parse_args()
    script = Path(__file__).with_name("train.py")
    for seed in range(arguments.seeds):
        for path, old in RUNS + (ABLATION if arguments.ablation else ()):
            command = [sys.executable, script, "--path", path, "--old", old, "--seed", str(seed)]
            subprocess.run([*command, "--out", arguments.out], check=True)


if __name__ == "__main__":
    main()
