"""Write the tables and the plot of the experiments' pages from their data.

    python examples/token_paths/report.py runs/token-paths --docs docs/experiments

With runs, data/token-paths.csv is written from them first. The other files of data/ come from sources.py,
benchmarks/prefix_cache.py and benchmarks/tool_calls.py.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, str]

ARM = ("path", "template", "correction", "dropout", "learning_rate")
"""The settings that make an arm."""
PATHS = ("recorded", "retokenized", "rerendered")
BASE = ("drops", "none", "0.0", "0.0005")
"""The other settings of the main comparison."""
MAIN = tuple((path, *BASE) for path in PATHS)
LAST = 5
"""Number of final steps that summarize a run."""
BEGIN, END = "<!-- written by examples/token_paths/report.py: {} -->\n", "<!-- end -->"

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

MEASURES = {
    "right": "sessions with both answers right",
    "sampled": "sampled tokens per session",
    "noncanonical": "sampled tokens that are not canonical",
    "kl": "KL to the starting policy, nats per token",
    "grad_norm": "gradient norm",
}
AS_GIVEN = {
    "other_ids": "sampled tokens given as other ids",
    "other_text": "sampled tokens not given at all",
    "changed_sessions": "sessions with either",
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


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of one value per seed."""
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan)
    half = T_95[n - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Interval(statistics.fmean(values), half)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the exact two-sided p of the mean, over all assignments of signs."""
    seen = abs(math.fsum(differences)) - 1e-12
    flips = itertools.product((1, -1), repeat=len(differences))
    reached = [
        abs(math.fsum(sign * one for sign, one in zip(flip, differences, strict=True))) >= seen for flip in flips
    ]
    return sum(reached) / len(reached)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, in the same order."""
    found, least = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, ps[at] * (len(ps) - rank)))
        found[at] = least
    return found


def read_runs(folder: Path) -> list[dict[str, str]]:
    """Return all lines of complete runs, each with the run's settings."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        settings, *lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        known = {name: str(settings[name]) for name in (*ARM, "seed", "policy", "cpu_seconds")}
        rows += [known | {name: _short(value) for name, value in line.items()} for line in lines]
    return rows


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write one line per step."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs, by arm and seed."""

    rows: Mapping[tuple[str, ...], Mapping[int, Sequence[Row]]]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Runs:
        """Group the rows of a CSV file. Of the main comparison, only seeds with all three runs count."""
        found: dict[tuple[str, ...], dict[int, list[Row]]] = {}
        for row in rows:
            found.setdefault(tuple(row[name] for name in ARM), {}).setdefault(int(row["seed"]), []).append(row)
        complete = set.intersection(*(set(found.get(arm, {})) for arm in MAIN))
        for arm in MAIN:
            found[arm] = {seed: own for seed, own in found.get(arm, {}).items() if seed in complete}
        return cls(found)

    def heldout(self, arm: tuple[str, ...], kind: str = "after", name: str = "right") -> dict[int, float]:
        """Return a number of the held-out tasks per seed."""
        return {
            seed: next(float(row[name]) for row in rows if row["kind"] == kind)
            for seed, rows in sorted(self.rows.get(arm, {}).items())
        }

    def steps(self, arm: tuple[str, ...], name: str) -> dict[int, list[float]]:
        """Return a number of each step, per seed."""
        return {
            seed: [float(row[name]) for row in rows if row["kind"] == "step"]
            for seed, rows in sorted(self.rows.get(arm, {}).items())
        }

    def differences(self, arm: tuple[str, ...], base: tuple[str, ...]) -> list[float]:
        """Return the differences between the held-out results of two arms, paired by seed."""
        own, other = self.heldout(arm), self.heldout(base)
        return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """Return the tables as lines of Markdown."""
    runs = Runs.of(rows)
    yield from _main_tables(runs)
    yield ""
    if len(runs.rows) == len(MAIN):
        yield "No side arm has run yet."
        return
    yield from _side_table(runs)
    yield ""
    yield from _dose_table(runs)


def _main_tables(runs: Runs) -> Iterable[str]:
    seeds = len(runs.heldout(MAIN[0]))
    yield f"| {seeds} seeds | {' | '.join(PATHS)} |"
    yield "|---|---|---|---|"
    yield _row("held-out tasks right, before", (runs.heldout(arm, "before").values() for arm in MAIN))
    yield _row("held-out tasks right, after", (runs.heldout(arm).values() for arm in MAIN))
    for name, meaning in MEASURES.items():
        ends = ([statistics.fmean(v[-LAST:]) for v in runs.steps(arm, name).values()] for arm in MAIN)
        yield _row(f"{meaning}, last {LAST} steps", ends)
    yield ""
    yield "| held-out tasks right, difference from recorded | estimate with 95 % interval | p, sign flips | p, Holm |"
    yield "|---|---|---|---|"
    paired = [runs.differences(arm, MAIN[0]) for arm in MAIN[1:]]
    ps = [sign_flip_p(one) for one in paired]
    for path, one, p, corrected in zip(PATHS[1:], paired, ps, holm(ps), strict=True):
        yield f"| {path} | {_text(interval(one), sign=True)} | {p:.3f} | {corrected:.3f} |"
    yield ""
    yield f"| as given to the trainer, mean of all steps | {' | '.join(PATHS)} |"
    yield "|---|---|---|---|"
    for name, meaning in AS_GIVEN.items():
        total = max if name == "ratio_max" else statistics.fmean
        yield _row(meaning, ([total(v) for v in runs.steps(arm, name).values()] for arm in MAIN))


def _side_table(runs: Runs) -> Iterable[str]:
    yield "| arm | seeds | held-out tasks right, after | difference from recorded, same seeds | ESS, share of tokens |"
    yield "|---|---|---|---|---|"
    for arm in sorted(runs.rows, key=lambda arm: (arm[4], arm[2], arm[1], PATHS.index(arm[0]))):
        path, template, correction, dropout, learning_rate = arm
        if arm in MAIN or dropout != "0.0":
            continue
        base = ("recorded", "drops", "none", "0.0", learning_rate)
        parts = [path]
        parts += [f"template {template} reasoning"] if template != "drops" else []
        parts += [f"`{correction}`"] if correction != "none" else []
        parts += [f"learning rate {learning_rate}"] if learning_rate != BASE[3] else []
        own = runs.heldout(arm)
        apart = "" if arm == base else _text(interval(runs.differences(arm, base)), sign=True)
        ess = interval([statistics.fmean(v) for v in runs.steps(arm, "ess_tokens").values()])
        yield f"| {', '.join(parts)} | {len(own)} | {_text(interval(list(own.values())))} | {apart} | {_text(ess)} |"


def _dose_table(runs: Runs) -> Iterable[str]:
    yield (
        "| BPE dropout | noncanonical, first step | seeds | recorded: before | recorded: after | retokenized: after "
        "| difference |"
    )
    yield "|---|---|---|---|---|---|---|"
    for dropout in sorted({arm[3] for arm in runs.rows}, key=float):
        arms = [(path, "drops", "none", dropout, BASE[3]) for path in PATHS[:2]]
        seeds = sorted(runs.heldout(arms[0]).keys() & runs.heldout(arms[1]).keys())
        if not seeds:
            continue
        dose = interval([v[0] for v in runs.steps(arms[0], "noncanonical").values()])
        before = interval(list(runs.heldout(arms[0], "before").values()))
        after = [interval(list(runs.heldout(arm).values())) for arm in arms]
        apart = interval(runs.differences(arms[1], arms[0]))
        cells = [dropout, _text(dose), str(len(seeds)), _text(before), *map(_text, after), _text(apart, sign=True)]
        yield f"| {' | '.join(cells)} |"


def _row(meaning: str, of_arms: Iterable[Iterable[float]]) -> str:
    return f"| {meaning} | {' | '.join(_text(interval(list(values))) for values in of_arms)} |"


PANELS = (
    ("right", "sessions with both answers right", False),
    ("noncanonical", "tokens that are not canonical", False),
    ("sampled", "sampled tokens per session", False),
    ("kl", "KL to the starting policy, nats per token", False),
    ("ess_tokens", "ESS, share of tokens", True),
    ("grad_norm", "gradient norm before clipping", False),
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
    runs = Runs.of(rows)
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 5.5), layout="constrained")
    for axis, (name, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        for arm in MAIN:
            of_seeds = list(runs.steps(arm, name).values())
            for values in of_seeds:
                axis.plot(range(1, len(values) + 1), values, linewidth=0.6, alpha=0.5, color=COLOURS[arm[0]])
            mean = [statistics.fmean(step) for step in zip(*of_seeds, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, linewidth=2, label=arm[0], color=COLOURS[arm[0]])
        axis.set_title(title)
        axis.set_yscale("log" if logarithmic else "linear")
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(range(0, len(mean) + 1, 4))
        if not logarithmic and name != "sampled":
            axis.set_ylim(0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(MAIN), frameon=False)
    figure.savefig(file, transparent=True, metadata={"Date": None, "Title": "GRPO on three token paths"})
    pyplot.close(figure)
    drawn = file.read_text("utf-8")
    at = drawn.index("<defs>")
    lines = (line.rstrip() for line in (drawn[:at] + _DARK + drawn[at:]).splitlines())
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


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


def source_table(rows: Sequence[Any]) -> Iterable[str]:
    """Return the sources of mismatch, one at a time."""
    yield "| source, alone | what differs | mean, nats | largest | k3 | ESS, tokens | ESS, sequences | `score` says |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in rows:
        numbers = [f"{one[name]:.2g}" for name in ("mean", "max", "k3")]
        shares = [f"{one[name]:.2f}" for name in ("ess_tokens", "ess_sequences")]
        says = " or ".join(one["score"]) or "nothing"
        yield f"| {' | '.join([one['source'], one['what'], *numbers, *shares, says])} |"


def cache_table(rows: Sequence[Any]) -> Iterable[str]:
    """Return what a prefix cache held of each kind of context."""
    yield "| context | replica by | noncanonical | prompt tokens | cached | computed | times exact | as predicted |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in sorted(rows, key=lambda row: row["replicas"] == "random"):
        low, high = one["interval"]
        computed = one["prompt_tokens"] - one["cached_tokens"]
        cells = [one["way"], one["replicas"], f"{one['dose']:.1%}", f"{one['prompt_tokens']:,}"]
        cells += [f"{one['cached_tokens'] / one['prompt_tokens']:.1%}", f"{computed:,}"]
        cells.append("1" if one["way"] == "exact" else f"{one['computed_times_exact']:.2f} [{low:.2f}, {high:.2f}]")
        yield f"| {' | '.join(cells)} | {one['as_predicted']} of {one['turns']} |"


def call_table(rows: Sequence[Any]) -> Iterable[str]:
    """Return the malformed tool calls of each kind of context."""
    yield (
        "| context | tasks | solved | malformed calls | difference from exact | malformed after the first question "
        "| difference from exact |"
    )
    yield "|---|---|---|---|---|---|---|"
    for one in rows:
        cells = [one["way"], str(one["tasks"]), str(one["solved"])]
        for name, of in (("malformed", "calls"), ("later_malformed", "later_calls")):
            cells.append(f"{one[name]} of {one[of]}: {one[name] / max(one[of], 1):.1%}")
            apart, low, high = (100 * value for value in one[f"{name}_difference"])
            cells.append("" if one["way"] == "exact" else f"{apart:+.1f} points [{low:+.1f}, {high:+.1f}]")
        yield f"| {' | '.join(cells)} |"


def blocks(data: Path) -> dict[str, str]:
    """Return what is written into the pages, by name."""
    found = {}
    for name, make in (
        ("mismatch", source_table),
        ("prefix-cache", cache_table),
        ("tool-calls", call_table),
    ):
        file = data / f"{name}.json"
        found[name] = "\n".join([*make(json.loads(file.read_text("utf-8"))), "", _checksum(file)]) + "\n"
    file = data / "token-paths.csv"
    found["token-paths"] = "\n".join([*tables(read_csv(file)), "", _checksum(file)]) + "\n"
    return found


def _checksum(file: Path) -> str:
    return f"SHA-256 of data/{file.name}: `{sha256(file.read_bytes()).hexdigest()}`"


def read_csv(file: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with open(file, encoding="utf-8", newline="") as source:
        return list(csv.DictReader(source))


def main() -> None:
    """Parse the command line and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--docs", type=Path, default=Path("docs/experiments"))
    arguments = parser.parse_args()
    data = arguments.docs / "data"
    if arguments.runs is not None:
        write_csv(read_runs(arguments.runs), data / "token-paths.csv")
    if not (arguments.docs / "token-paths.md").exists():
        print("\n".join(tables(read_csv(data / "token-paths.csv"))))
        return
    plot(read_csv(data / "token-paths.csv"), arguments.docs / "token-paths.svg")
    written = blocks(data)
    for page in sorted(arguments.docs.glob("*.md")):
        text = page.read_text("utf-8")
        for name, block in written.items():
            before, mark, rest = text.partition(BEGIN.format(name))
            text = before + mark + block + END + rest.partition(END)[2] if mark else text
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
