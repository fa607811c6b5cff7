"""Compare outcomes with what is committed: the counts in results.json, the explained differences in differences.json.

Both are strict. A difference that is not listed fails, and so does a listed one that is gone, and any count that moved.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.external.replay import DIFFERENT, REFUSED, VERDICTS, Outcome

RESULTS = Path(__file__).parent / "results.json"
DIFFERENCES = Path(__file__).parent / "differences.json"


OPEN = "NOT EXPLAINED"
"""Whose fault a difference is that nobody has looked at."""


COMPARED: Counter[str] = Counter()
"""How often each verdict was found in this run."""


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def counts(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return how often each verdict was found, by kind."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in outcomes:
        found[one.kind][one.verdict] += 1
    return {kind: {v: n[v] for v in VERDICTS if n[v]} for kind, n in sorted(found.items())}


def differing(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the note of each outcome that needs an explanation, by kind and case."""
    return {f"{one.kind} {one.case}": one.note for one in outcomes if one.verdict in (DIFFERENT, REFUSED)}


def explained(suite: str, template: str) -> set[str]:
    """Return the kinds and cases that differences.json explains for a suite on a template."""
    groups = load(DIFFERENCES)
    groups = [group for group in groups if group["right"] != OPEN]
    return {case for group in groups for case in group["cases"].get(f"{suite}: {template}", ())}


def check(suite: str, template: str, outcomes: list[Outcome]) -> None:
    """Fail unless the outcomes are those that are committed."""
    COMPARED.update(one.verdict for one in outcomes)
    found, listed = differing(outcomes), explained(suite, template)
    new = {case: note for case, note in found.items() if case not in listed}
    assert not new, f"differences that nothing explains: {json.dumps(new, indent=1, ensure_ascii=False)}"
    gone = sorted(listed - set(found))
    assert not gone, f"listed differences that are gone: {gone}"
    expected: Mapping[str, Any] = load(RESULTS).get(suite, {}).get(template, {})
    assert counts(outcomes) == expected, "not the counts of results.json: run `python -m tests.external.write`"
