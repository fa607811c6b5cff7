"""Reduce findings to their causes, and compare them with those that are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.generator.options import Case, only

ANY_BASE = "base=demo"
"""The template that a mutation is shown on which does its harm to any."""
KNOWN = Path(__file__).parent / "known_failures.json"


@dataclass(frozen=True)
class Cause:
    """A class of findings: what kind they are, and the fewest options that bring one about."""

    kind: str
    cause: tuple[str, ...]
    seed: int
    index: int
    example: str

    def explains(self, kind: str, cause: Sequence[str]) -> bool:
        """Whether a finding of this kind, in a case made of these options, belongs to this class."""
        return kind == self.kind and set(self.cause) - {ANY_BASE} <= set(cause)

    @property
    def command(self) -> str:
        """What shows the reduced case."""
        chosen = "".join(f" --only '{cause}'" for cause in self.cause) or " --only ''"
        return f"python -m tests.generator --case {self.seed}:{self.index}{chosen}"


def reduce(case: Case, kind: str, kinds_of: Callable[[Case], set[str]]) -> list[str]:
    """The fewest of the case's causes with which a finding of this kind stays, by leaving out one after the other."""
    causes = case.cause
    halves = (causes[: len(causes) // 2], causes[len(causes) // 2 :])
    for half in halves:
        if len(causes) > 4 and kind in kinds_of(only(case, half)):
            causes = half
            break
    for cause in list(causes):
        fewer = [option for option in causes if option != cause]
        if kind in kinds_of(only(case, fewer)):
            causes = fewer
    based = [option for option in causes if option.startswith("base=")]
    if len(based) == 1 and any(option.startswith("mutation=") for option in causes):
        simplest = [ANY_BASE if option in based else option for option in causes]
        causes = simplest if kind in kinds_of(only(case, simplest)) else causes
    return causes


def known_causes(path: Path = KNOWN) -> list[Cause]:
    """The classes that are expected today."""
    if not path.is_file():
        return []
    return [
        Cause(entry["kind"], tuple(entry["cause"]), entry["seed"], entry["index"], entry["example"])
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def unexplained(results: Iterable[Mapping[str, Any]], causes: Sequence[Cause]) -> list[tuple[Mapping[str, Any], str]]:
    """Pairs of a result and a kind that none of the causes explains."""
    return [
        (result, kind)
        for result in results
        for kind in sorted({finding["kind"] for finding in result["findings"]})
        if not any(cause.explains(kind, result["cause"]) for cause in causes)
    ]


def write_known(causes: Sequence[Cause], path: Path = KNOWN) -> None:
    """Write the classes as JSON, one after the other in a fixed order."""
    rows = [asdict(cause) for cause in sorted(causes, key=lambda c: (c.kind, c.cause))]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
