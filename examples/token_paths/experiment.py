"""Every run of the experiment, one after the other.

    python examples/token_paths/experiment.py --seeds 3 --out runs/token-paths

Runs that are complete are skipped, so it may be broken off and started again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

RUNS = (("recorded", "recomputed"), ("retokenized", "recomputed"), ("rerendered", "recomputed"))
"""Path and whose old logprobs."""

ABLATION = (("retokenized", "sampler"), ("rerendered", "sampler"))
"""With the recorded ids both are the same up to rounding."""


def main() -> None:
    """Command line."""
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
