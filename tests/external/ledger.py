"""Compare outcomes with committed files: the counts in results.json, the explained differences in differences.json.

Both are strict. An unlisted difference fails, and so does a listed difference that is gone, and any changed count.
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
"""The `fault` of a difference without an explanation."""


COMPARED: Counter[str] = Counter()
"""The count of each verdict in this run."""


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def counts(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return the count of each verdict, by kind."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.kind][outcome.verdict] += 1
    return {kind: {v: n[v] for v in VERDICTS if n[v]} for kind, n in sorted(counts.items())}


def differing(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the note of each outcome that needs an explanation, by kind and case."""
    return {
        f"{outcome.kind} {outcome.case}": outcome.note
        for outcome in outcomes
        if outcome.verdict in (DIFFERENT, REFUSED)
    }


def explained(suite: str, template: str) -> set[str]:
    """Return the kinds and cases that differences.json explains for a suite on a template."""
    groups = load(DIFFERENCES)
    groups = [group for group in groups if group["right"] != OPEN]
    return {case for group in groups for case in group["cases"].get(f"{suite}: {template}", ())}


def check(suite: str, template: str, outcomes: list[Outcome]) -> None:
    """Fail unless the outcomes equal the committed ones."""
    COMPARED.update(outcome.verdict for outcome in outcomes)
    notes, listed = differing(outcomes), explained(suite, template)
    new = {case: note for case, note in notes.items() if case not in listed}
    assert not new, f"differences that nothing explains: {json.dumps(new, indent=1, ensure_ascii=False)}"
    gone = sorted(listed - set(notes))
    assert not gone, f"listed differences that are gone: {gone}"
    expected: Mapping[str, Any] = load(RESULTS).get(suite, {}).get(template, {})
    assert counts(outcomes) == expected, "not the counts of results.json: run `python -m tests.external.write`"
