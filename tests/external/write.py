"""Write results.json, and sort new differences into differences.json by their notes.

    python -m tests.external.write [SUITE...]

A difference that matches no group's `said` gets a new group, which the tests do not accept until an explanation of who
is right is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tests.external import ledger, test_renderers, test_replays, test_sessions
from tests.external.replay import Outcome


def runs(suite_names: list[str]) -> Iterator[tuple[str, str, list[Outcome]]]:
    """Yield suite, template and outcomes of all comparisons of the named suites; all suites if empty."""
    for suite, template in test_replays.CASES:
        if not suite_names or suite in suite_names:
            yield suite, template, test_replays.outcomes(suite, template)
    for suite, compare in (test_renderers.SUITES | test_sessions.SUITES).items():
        if not suite_names or suite in suite_names:
            yield suite, "", list(compare())


def record(suite: str, template: str, outcomes: list[Outcome], results: Any, listed: list[Any]) -> list[Any]:
    """Update the contents of the two files with outcomes. Return the differences, without empty groups."""
    results.setdefault(suite, {})[template] = ledger.counts(outcomes)
    key = f"{suite}: {template}"
    for group in listed:
        group["cases"].pop(key, None)
    for case, note in ledger.differing(outcomes).items():
        kind = case.split(" ")[0]
        group = next((g for g in listed if kind in g["kinds"] and _fits(g, suite, template, note)), None)
        if group is None:
            group = {"right": ledger.OPEN, "why": ledger.OPEN, "kinds": [kind], "said": [note], "cases": {}}
            listed.append(group)
        group["cases"].setdefault(key, []).append(case)
    return [group for group in listed if group["cases"]]


def _fits(group: Any, suite: str, template: str, note: str) -> bool:
    if template not in group.get("templates", [template]) or suite not in group.get("suites", [suite]):
        return False
    return any(text in note for text in group["said"])


def main() -> None:
    """Run all suites, or the named ones."""
    results, listed = ledger.load(ledger.RESULTS), ledger.load(ledger.DIFFERENCES)
    for suite, template, outcomes in runs(sys.argv[1:]):
        listed = record(suite, template, outcomes, results, listed)
        print(suite, template, results[suite][template], flush=True)
    ledger.RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    ledger.DIFFERENCES.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
