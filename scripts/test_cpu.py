"""Compare the CPU seconds of `make test` for two commits, over all its processes.

    python scripts/test_cpu.py BEFORE [AFTER]

Both are checked out side by side and run at the same time with two processes each, so that other work on the machine
slows both equally. `AFTER` is HEAD by default. The Python that runs this script runs the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Run:
    """Test suite of one commit, in its own checkout."""

    commit: str
    folder: Path
    seconds: float = 0.0
    """User and system time of the finished child processes."""
    summary: str = ""

    def command(self) -> list[str]:
        """Return the command of its Makefile, for the environment that runs this script."""
        bin_folder = Path(sys.executable).parent
        options = ["-n", f"BIN={bin_folder}", f"VENV={bin_folder.parent}", "test"]
        recipe = subprocess.run(["make", *options], cwd=self.folder, check=True, capture_output=True, text=True).stdout
        (command,) = (line for line in recipe.replace("\\\n", " ").splitlines() if "/pytest" in line)
        return ["sh", "-c", re.sub(r"-n auto --maxprocesses \d+", "-n 2", re.sub(r"--forks \d+", "--forks 2", command))]

    def environment(self) -> dict[str, str]:
        """Return an environment in which its own sources come before the installed ones."""
        # Without cached bytecode, a suite that starts many processes would be charged for compiling in each.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, "PYTHONPATH": str(self.folder / "src")}

    def warm(self) -> None:
        """Compile its files once, so that compiling is not measured."""
        collect = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
        subprocess.run(collect, cwd=self.folder, env=self.environment(), stdout=subprocess.DEVNULL, check=True)

    def measure(self) -> None:
        """Run its test suite and store the CPU seconds."""
        with (self.folder.parent / f"{self.folder.name}.log").open("w+") as log:
            process = subprocess.Popen(
                self.command(), cwd=self.folder, env=self.environment(), stdout=log, stderr=subprocess.STDOUT
            )
            _, process.returncode, used = os.wait4(process.pid, 0)
            self.seconds = used.ru_utime + used.ru_stime
            log.seek(0)
            self.summary = "\n".join(
                line for line in log if line.startswith(("FAILED", "ERROR")) or re.search(r"=+ .* in [\d.]+s", line)
            )


def main() -> None:
    """Print the seconds of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        beside = Path(name)
        if (REPOSITORY.parent / "shared").exists():
            (beside / "shared").symlink_to(REPOSITORY.parent / "shared")
        runs = [Run(arguments.before, beside / "before"), Run(arguments.after, beside / "after")]
        try:
            for run in runs:
                add = ["git", "worktree", "add", "--quiet", "--detach", str(run.folder), run.commit]
                subprocess.run(add, cwd=REPOSITORY, check=True)
                run.warm()
            threads = [threading.Thread(target=run.measure) for run in runs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for run in runs:
                remove = ["git", "worktree", "remove", "--force", str(run.folder)]
                subprocess.run(remove, cwd=REPOSITORY, check=False)
    for run in runs:
        print(f"{run.commit}: {run.seconds:.0f} s of CPU\n{run.summary}")
    print(f"after / before: {runs[1].seconds / runs[0].seconds:.2f}")


if __name__ == "__main__":
    main()
