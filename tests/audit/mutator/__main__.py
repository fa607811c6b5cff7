"""Run mutants of the models that are here: a JSON line for each, and a summary. An interrupted run resumes.

python -m tests.audit.mutator --count 500 --out mutants.jsonl
python -m tests.audit.mutator --model tiny --seed 17 --count 1 --keep out      # one case, with its folders
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.audit.mutator import drawing, harmless
from tests.audit.mutator.files import load, names
from tests.audit.mutator.judge import Base, judge_harmless, judge_mutant
from tests.audit.mutator.known import unknown
from tests.audit.mutator.served import KINDS
from tests.audit.mutator.undo import TABLES, areas_between

HARMLESS_EVERY = 8
CLI_EVERY = 40
CHECK_EVERY = 2
FLIPPED_EVERY = 3
SERVED_EVERY = 6
WALL = 20
"""How many seconds of the clock a second of CPU may take on a busy machine."""

_TWO = 0.1


def case(base: Base, seed: int) -> dict[str, Any]:
    """Run the case of a seed: usually one change, sometimes two, sometimes a rewriting that changes nothing.

    The changed folder is audited itself or as a server of it.

    What leaves the tables of a real model alone is drawn anew for, and judged on, its twin with small tables.
    """
    rng = random.Random(f"case:{base.model.name}:{seed}")
    line: dict[str, Any] = {"model": base.model.name, "seed": seed}
    served = KINDS[seed // SERVED_EVERY % len(KINDS)] if seed % SERVED_EVERY == SERVED_EVERY - 1 else None
    if served:
        line["served"] = served
    if seed % HARMLESS_EVERY == HARMLESS_EVERY - 1:
        base = base.twin or base
        name, made = harmless.draw(base.model, rng)
        line["harmless"] = name
        verdict = judge_harmless(base, name, made, served=served)
    else:
        many = 2 if rng.random() < _TWO else 1
        made, changes = drawing.draw(base.model.name, seed, many)
        if base.twin and not TABLES & {*areas_between(base.model, made)}:
            base = base.twin
            made, changes = drawing.draw(base.model.name, seed, many)
        line["changes"] = [change.to_json() for change in changes]
        line["flipped"] = seed % FLIPPED_EVERY == 0
        check = seed % CHECK_EVERY == 0 and not served
        verdict = judge_mutant(base, made, changes, check=check, flipped=line["flipped"], served=served)
    line |= {
        "judged_on": base.model.name,
        "areas": list(verdict.areas),
        "effects": [str(effect) for effect in verdict.effects],
        "skewed": verdict.skewed,
        "findings": verdict.findings,
        "checked": verdict.checked,
        "complaints": verdict.complaints,
    }
    if seed % CLI_EVERY == 0:
        line["complaints"] += _by_command(base, verdict.skewed)
    return line


def _by_command(base: Base, skewed: bool | None) -> list[str]:
    """Whether `tokentape audit` exits with 0 for a clean report, 1 for a skewed one, and not 0 for a refused folder."""
    command = [sys.executable, "-m", "tokentape", "audit", str(base.folder), str(base.last)]
    code = subprocess.run(command, capture_output=True, timeout=300).returncode
    expected = {False: code == 0, True: code == 1, None: code != 0}[skewed]
    return [] if expected else [f"exit code: {code} where skewed is {skewed}"]


def isolated(base: Base, seed: int, seconds: float) -> dict[str, Any]:
    """Run a case in its own process, since a file may make a library panic or loop. `seconds` are of CPU."""
    read, write = os.pipe()
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    with warnings.catch_warnings():  # Python 3.12 warns of threads, of which a child that tokenizes alone needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
            for model in filter(None, (base, base.twin)):
                model.prefix = f"{seed}-"
            line = case(base, seed)
            with os.fdopen(write, "w") as out:
                json.dump(line, out)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    text = _read(read, time.monotonic() + WALL * seconds)
    if text is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if text and status == 0:
        line = json.loads(text)
    else:
        how = "takes too long" if text is None or status == signal.SIGXCPU else f"ends with status {status}"
        line = {"model": base.model.name, "seed": seed, "complaints": [f"case {how}"]}
    line["cpu"] = round(used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime, 2)
    return line


def _read(descriptor: int, until: float) -> str | None:
    """Everything that is written to a pipe; None if it is not closed in time."""
    pieces = []
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            ready, _, _ = select.select([file], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            piece = file.read(65536)
            if not piece:
                return b"".join(pieces).decode()
            pieces.append(piece)


def run(
    models: Sequence[str], seeds: range, out: Path | None, seconds: float, keep: Path | None = None
) -> list[dict[str, Any]]:
    """Run the seeds over the models in turn, but what `out` has already, and return the lines of all."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # children that are forked have none of its threads
    lines = [json.loads(text) for text in out.read_text().splitlines()] if out and out.is_file() else []
    done = {(line["model"], line["seed"]) for line in lines}
    wanted = {name: [seed for n, seed in enumerate(seeds) if n % len(models) == at] for at, name in enumerate(models)}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(out.open("a")) if out else None
        for name in models:
            left = [seed for seed in wanted[name] if (name, seed) not in done]
            if not left:
                continue
            root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
            base = Base(load(name), root)
            base.warm()
            if f"small-{name}" in names():
                base.twin = Base(load(f"small-{name}"), root)
                base.twin.warm()
            for seed in left:
                line = isolated(base, seed, seconds)
                lines.append(line)
                if file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                for complaint in line["complaints"]:
                    print(f"{complaint}\n    python -m tests.audit.mutator --model {name} --seed {seed} --count 1")
                if keep is None:
                    for written in root.glob("*/[0-9]*"):
                        shutil.rmtree(written)
    return lines


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run."""
    mutants = [line for line in lines if "changes" in line]
    differing = [line for line in mutants if line["effects"]]
    complaints = Counter(complaint for line in lines for complaint in line["complaints"])
    return {
        "mutants": len(mutants),
        "harmless": sum("harmless" in line for line in lines),
        "served": sum("served" in line for line in lines),
        "differing": len(differing),
        "refused by the audit": sum(line["skewed"] is None for line in differing),
        "called clean": sum(line["skewed"] is False for line in differing),
        "checked": sum(line["checked"] is not None for line in differing),
        "check passed": sum(line["checked"] is True for line in differing),
        "skewed without a difference found": sum(bool(line["skewed"]) for line in mutants if not line["effects"]),
        "cpu seconds": round(sum(line["cpu"] for line in lines), 1),
        "complaints": dict(complaints.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.audit.mutator", description=__doc__)
    parser.add_argument("--model", action="append", help=f"one of {', '.join(names())}; all by default")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=500, help="how many seeds, shared out over the models")
    parser.add_argument("--out", type=Path, help="JSON lines; seeds that are in it are not run again")
    parser.add_argument("--seconds", type=float, default=300, help="the CPU that a case may take")
    parser.add_argument("--keep", type=Path, help="an empty folder in which the models are left")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    lines = run(options.model or names(), seeds, options.out, options.seconds, options.keep)
    print(json.dumps(summary(lines), indent=2, ensure_ascii=False))
    new = unknown(complaint for line in lines for complaint in line["complaints"])
    print(f"complaints that are not known: {new}" if new else "every complaint is known")
    raise SystemExit(1 if new else 0)


if __name__ == "__main__":
    main()
