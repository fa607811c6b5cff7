"""Write the figures as tables and a plot, and both into docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
PLOT = "benchmarks-gateway.svg"
BEGIN, END = "<!-- gateway benchmark: begin -->", "<!-- gateway benchmark: end -->"


def written(found: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = [
        _head(found),
        _calls(found),
        _openings(found),
        _clients(found),
        _streams(found),
        _footprint(found),
        _rollout(found),
    ]
    return "\n\n".join(part for part in parts if part)


def write_docs(found: dict[str, Any]) -> None:
    """Write tables and plot between the markers in docs/benchmarks.md. Needs matplotlib."""
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    plot(found, DOCS.with_name(PLOT))
    image = f"![CPU time of a call by the length of the history, and of a long rollout]({PLOT})"
    DOCS.write_text(f"{before}{BEGIN}\n{written(found)}\n\n{image}\n{END}{after}", encoding="utf-8")


def plot(found: dict[str, Any], path: Path) -> None:
    """Plot the CPU time of a call against the length of its history, and of each turn of a long rollout."""
    import matplotlib

    matplotlib.use("svg")
    # Make the file reproducible.
    matplotlib.rcParams["svg.hashsalt"] = "tokentape"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name in _names(found):
        sizes = sorted(int(key.partition("|")[2]) for key in found.get("calls", {}) if key.partition("|")[0] == name)
        if found["targets"][name]["kind"] != "floor" and sizes:
            left.plot(sizes, [found["calls"][f"{name}|{size}"]["cpu_ms"] for size in sizes], marker="o", label=name)
    for name, rows in found.get("rollout", {}).items():
        right.plot([row["turn"] for row in rows], [row["cpu_ms"] for row in rows], label=name)
    left.set(xscale="log", yscale="log", xlabel="tokens of history", ylabel="CPU ms per call")
    right.set(yscale="log", xlabel="turn of a rollout, 1,000 tokens each", ylabel="CPU ms per call")
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.25)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _head(found: dict[str, Any]) -> str:
    versions = [f"{name} {one['version']}".strip() for name, one in found["targets"].items() if one["version"]]
    lines = [
        f"`{found['command']}`, {found['date']}; {found['machine']}; Python {found['python']}.",
        f"Measured: {'; '.join(versions)}.",
    ]
    lines += [f"Left out: {name} ({why})." for name, why in found["missing"].items()]
    lines += [f"Failed: {name} ({why})." for name, why in found.get("failures", {}).items()]
    return "\n".join(lines)


def _calls(found: dict[str, Any]) -> str:
    calls = found.get("calls", {})
    sizes = sorted({int(key.partition("|")[2]) for key in calls})
    if not sizes:
        return ""
    floor = next((name for name, one in found["targets"].items() if one["kind"] == "floor"), None)

    def row(name: str) -> list[str]:
        of = [calls.get(f"{name}|{size}") for size in sizes]
        direct = [calls.get(f"{floor}|{size}") for size in sizes]
        cpu = " / ".join("-" if one is None else f"{one['cpu_ms']:.1f}" for one in of)
        spread = " / ".join("-" if one is None else "{:.1f} to {:.1f}".format(*one["cpu_ms_range"]) for one in of)
        added = [
            " / ".join(
                "-" if one is None or base is None else f"{one[key] - base['p50_ms']:.1f}"
                for one, base in zip(of, direct, strict=True)
            )
            for key in ("p50_ms", "p99_ms")
        ]
        first = " / ".join("-" if one is None else f"{one['first_call_ms']:.0f}" for one in of)
        started = found["targets"][name].get("start_seconds")
        start = "" if started is None else f"{started:.1f}"
        if name == floor:
            p50 = " / ".join("-" if one is None else f"{one['p50_ms']:.1f}" for one in of)
            return [name, "", "", f"({p50})", "", first, start]
        return [name, cpu, spread, *added, first, start]

    tokens = " / ".join(f"{size // 1000}k" for size in sizes)
    head = [
        "",
        f"CPU ms per call at {tokens}",
        "lowest to highest session",
        "added p50 ms",
        "added p99 ms",
        "first call ms",
        "start-up s",
    ]
    return _table(head, [row(name) for name in _names(found) if any(f"{name}|{size}" in calls for size in sizes)])


def _openings(found: dict[str, Any]) -> str:
    measured = found.get("openings", {})
    if not measured:
        return ""
    kinds = ("first", "equal", "question")

    def row(name: str) -> list[str]:
        of = [measured[f"{name}|{kind}"] for kind in kinds]
        return [name, *(f"{one['ms']:.0f} ({one['cpu_ms']:.0f})" for one in of)]

    tokens = next(iter(measured.values()))["tokens"] // 1000
    head = [f"first call at {tokens}k: ms (CPU ms)", "first of a group", "equal messages", "another question"]
    return _table(head, [row(name) for name in _names(found) if f"{name}|first" in measured])


def _clients(found: dict[str, Any]) -> str:
    measured = found.get("clients", {})
    counts = sorted({int(key.partition("|")[2]) for key in measured})

    def row(name: str) -> list[str]:
        of = [measured.get(f"{name}|{count}") for count in counts]
        return [name, *("-" if one is None else f"{one['calls_per_second']:.0f} ({one['cpu_ms']:.1f})" for one in of)]

    names = [name for name in _names(found) if any(key.startswith(f"{name}|") for key in measured)]
    head = ["", *(f"calls/s with {count} clients (CPU ms per call)" for count in counts)]
    return _table(head, map(row, names)) if counts else ""


def _streams(found: dict[str, Any]) -> str:
    return _simple(
        found,
        "streams",
        {
            "first event ms": lambda one: f"{one['first_ms']:.1f}",
            "CPU ms per stream": lambda one: f"{one['cpu_ms']:.1f}",
            "CPU µs per chunk": lambda one: f"{one['cpu_us_per_chunk']:.0f}",
        },
    )


def _footprint(found: dict[str, Any]) -> str:
    def disk(one: dict[str, Any]) -> str:
        return f"{one['disk_bytes_per_token']:.1f}" if one["disk_bytes_per_token"] > 0.05 else "none"

    return _simple(
        found,
        "footprint",
        {
            "sessions of 20 turns": lambda one: f"{one['sessions']}",
            "unique tokens": lambda one: f"{one['unique_tokens'] / 1e6:.2f} M",
            "memory, bytes per unique token": lambda one: f"{one['memory_bytes_per_token']:.1f}",
            "disk, bytes per unique token (MB per million)": disk,
        },
    )


def _rollout(found: dict[str, Any]) -> str:
    rows = found.get("rollout", {})
    if not rows:
        return ""
    last = min(len(one) for one in rows.values())
    picked = sorted({0, last // 4, last // 2, last - 1})
    head = ["CPU ms per call around turn", *(str(next(iter(rows.values()))[at]["turn"]) for at in picked)]
    return _table(head, ([name, *(f"{one[at]['cpu_ms']:.1f}" for at in picked)] for name, one in rows.items()))


def _simple(found: dict[str, Any], part: str, columns: dict[str, Callable[[dict[str, Any]], str]]) -> str:
    measured = found.get(part, {})
    rows = ([name, *(cell(measured[name]) for cell in columns.values())] for name in _names(found) if name in measured)
    return _table(["", *columns], rows) if measured else ""


def _names(found: dict[str, Any]) -> list[str]:
    return list(found["targets"])


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
