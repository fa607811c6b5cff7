"""Summarize the runs in one CSV file, a table and a plot.

    python examples/token_paths/report.py runs/token-paths --docs docs/experiments

Writes data/token-paths.csv and token-paths.svg into the folder, and prints the tables as Markdown. Without the runs,
`--csv` reads an existing CSV file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Row: TypeAlias = Mapping[str, str]

ARMS = (
    ("recorded", "recomputed"),
    ("retokenized", "recomputed"),
    ("rerendered", "recomputed"),
    ("retokenized", "sampler"),
    ("rerendered", "sampler"),
)
LAST = 5
"""Number of final steps that summarize a run."""

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

MEASURES = {
    "right": "sessions with both answers right",
    "reward": "reward",
    "sampled": "sampled tokens per session",
    "spelt_otherwise": "sampled tokens that retokenizing would change",
    "entropy": "entropy where the trainer trains, nats",
    "kl": "KL to the first policy, nats per token",
    "grad_norm": "gradient norm",
}
AS_GIVEN = {
    "other_ids": "sampled tokens given as other ids",
    "other_text": "sampled tokens not given at all",
    "ratio_mean": "importance ratio, mean",
    "ratio_max": "importance ratio, largest",
    "ess_tokens": "ESS, share of tokens",
    "ess_sequences": "ESS, share of sequences",
    "k3": "k3, clamped at 10",
    "sequences_masked": "sequences with ratio above 3",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds with its 95 % t interval, which is NaN for one seed."""

    mean: float
    half: float
    seeds: int


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of one value per seed."""
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan, 0)
    half = T_95[n - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Interval(statistics.fmean(values), half, n)


def read_runs(folder: Path) -> list[dict[str, str]]:
    """Return all lines of complete runs, with path, old logprobs and seed from the file names."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        path, old, seed = file.stem.split("-")
        for line in file.read_text("utf-8").splitlines():
            rows.append({"path": path, "old": old, "seed": seed, **{k: _short(v) for k, v in json.loads(line).items()}})
    return rows


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Return one row per line of a run."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def curves(rows: Iterable[Row], arm: tuple[str, str], name: str) -> dict[int, list[float]]:
    """Return the values of a measure at each step, per seed."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["path"], row["old"]) == arm and row["kind"] == "step":
            found.setdefault(int(row["seed"]), []).append(float(row[name]))
    return found


def at_end(rows: Iterable[Row], arm: tuple[str, str], name: str) -> dict[int, float]:
    """Return the mean over the last steps, per seed."""
    return {seed: statistics.fmean(values[-LAST:]) for seed, values in curves(rows, arm, name).items()}


def examined(rows: Iterable[Row], arm: tuple[str, str], kind: str) -> list[float]:
    """Return the share of held-out sessions with both answers correct, per seed. Before training all arms are equal."""
    of_arm = ARMS[0] if kind == "before" else arm
    return [float(row["right"]) for row in rows if (row["path"], row["old"]) == of_arm and row["kind"] == kind]


def differences(rows: Sequence[Row], arm: tuple[str, str], name: str) -> Interval | None:
    """Return the difference of an arm from `recorded` at the end, paired by seed (same tasks and sampling seeds)."""
    own, base = at_end(rows, arm, name), at_end(rows, ARMS[0], name)
    paired = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    return interval(paired) if paired else None


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """Return the tables as lines of Markdown."""
    arms = [arm for arm in ARMS if curves(rows, arm, "right")]
    names = [_name(arm) for arm in arms]
    yield f"| at the end | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(arms)}"
    yield f"| seeds | {' | '.join(str(len(curves(rows, arm, 'right'))) for arm in arms)} |"
    for name, meaning in MEASURES.items():
        found = (interval(list(at_end(rows, arm, name).values())) for arm in arms)
        yield f"| {meaning} | {' | '.join(_text(one) for one in found)} |"
    for kind, when in (("before", "before training"), ("after", "after")):
        found = (interval(examined(rows, arm, kind)) for arm in arms)
        yield f"| held-out sessions with both answers right, {when} | {' | '.join(_text(one) for one in found)} |"
    yield ""
    yield f"| arm - recorded | {' | '.join(names[1:])} |"
    yield f"|---|{'---|' * (len(arms) - 1)}"
    for name, meaning in MEASURES.items():
        compared = (differences(rows, arm, name) for arm in arms[1:])
        yield f"| {meaning} | {' | '.join('' if one is None else _text(one, sign=True) for one in compared)} |"
    yield ""
    yield f"| as given to the trainer, all steps | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(arms)}"
    for name, meaning in AS_GIVEN.items():
        # For the largest ratio, take the maximum over steps as well.
        total = max if name == "ratio_max" else statistics.fmean
        found = (interval([total(values) for values in curves(rows, arm, name).values()]) for arm in arms)
        yield f"| {meaning} | {' | '.join(_text(one) for one in found)} |"


PANELS = (
    ("reward", "reward", False),
    ("right", "sessions with both answers right", False),
    ("spelt_otherwise", "tokens that retokenizing would change", False),
    ("entropy", "entropy on what is trained, nats", False),
    ("kl", "KL to the first policy, nats per token", False),
    ("ratio_max", "largest importance ratio", True),
    ("ess_tokens", "ESS, share of tokens", True),
    ("k3", "k3 trainer to sampler, clamped", True),
    ("grad_norm", "gradient norm before clipping", True),
)
COLOURS = {"recorded": "#2f7fd1", "retokenized": "#d9801f", "rerendered": "#b3509c"}
INK, PAPER_INK = "#24292f", "#d0d7de"
_DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    f' [style*="fill: {INK}"] {{ fill: {PAPER_INK} !important }}'
    f' [style*="stroke: {INK}"] {{ stroke: {PAPER_INK} !important }} }}</style>'
)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Plot seeds as thin lines and their mean as a thick line; transparent, in colors for light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.hashsalt": "token-paths", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
        | {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
        | {"axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlesize": 9}
    )
    figure, axes = pyplot.subplots(3, 3, figsize=(11, 8), layout="constrained")
    arms = [arm for arm in ARMS if curves(rows, arm, "right")]
    for axis, (name, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for arm in arms:
            of_seeds = list(curves(rows, arm, name).values())
            style = {"color": COLOURS[arm[0]], "linestyle": "-" if arm[1] == "recomputed" else ":"}
            for values in of_seeds:
                axis.plot(range(1, len(values) + 1), values, linewidth=0.6, alpha=0.5, **style)
            mean = [statistics.fmean(step) for step in zip(*of_seeds, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, linewidth=2, label=_name(arm), **style)
        axis.set_title(title)
        axis.set_yscale("log" if logarithmic else "linear")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(range(0, len(mean) + 1, 5))
        if name == "right":
            axis.set_ylim(0, 1.02)
        elif not logarithmic and name != "reward":
            axis.set_ylim(0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(arms), frameon=False)
    figure.savefig(file, transparent=True, metadata={"Date": None, "Title": "GRPO on three token paths"})
    pyplot.close(figure)
    drawn = file.read_text("utf-8")
    at = drawn.index("<defs>")
    lines = (line.rstrip() for line in (drawn[:at] + _DARK + drawn[at:]).splitlines())
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _name(arm: tuple[str, str]) -> str:
    return arm[0] if arm[1] == "recomputed" else f"{arm[0]}, sampler's logprobs"


def _text(one: Interval, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    half = "" if math.isnan(one.half) else f" ± {_number(one.half)}"
    return f"{_number(one.mean, plus)}{half}"


def _number(value: float, sign: str = "") -> str:
    return (
        f"{value:{sign}.0f}" if abs(value) >= 100 else f"{value:{sign}.2g}" if abs(value) < 1 else f"{value:{sign}.1f}"
    )


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Parse the command line and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs/experiments"))
    arguments = parser.parse_args()
    if arguments.runs is not None:
        rows = read_runs(arguments.runs)
        write_csv(rows, arguments.docs / "data" / "token-paths.csv")
    with open(arguments.csv or arguments.docs / "data" / "token-paths.csv", encoding="utf-8", newline="") as source:
        read: list[Row] = list(csv.DictReader(source))
    plot(read, arguments.docs / "token-paths.svg")
    for line in tables(read):
        print(line)


if __name__ == "__main__":
    main()
