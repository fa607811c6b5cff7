"""Known complaints: one case for each, built from its changes, with the seed that drew it.

    python -m tests.audit.mutator.known mutants.jsonl      # adds what a run found and is not listed yet

A case that is mended passes, which fails its test: move it from `known.json` to `mended.json` then.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.audit.mutator.files import TINY

LIST = Path(__file__).parent / "known.json"


def known() -> dict[str, dict[str, Any]]:
    """Return the cases by complaint: `model`, `seed`, and `changes` or the name of a `harmless` rewriting."""
    return json.loads(LIST.read_text(encoding="utf-8")) if LIST.is_file() else {}


def mended() -> dict[str, dict[str, Any]]:
    """Return the cases that the audit must not complain about."""
    return json.loads(LIST.with_name("mended.json").read_text(encoding="utf-8"))


def unknown(complaints: Iterable[str]) -> list[str]:
    """Return complaints that are not known: one of several areas is known if it is known of one of them alone."""
    cases = known()
    return sorted(complaint for complaint in set(complaints) if not any(alone in cases for alone in _alone(complaint)))


def _alone(complaint: str) -> list[str]:
    areas = next((word for word in re.split("[ :]+", complaint) if "+" in word), None)
    return [complaint, *(complaint.replace(areas, area) for area in areas.split("+"))] if areas else [complaint]


def merged(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the known cases with those of some lines added, one of few changes for each complaint."""
    found = known()
    for line in sorted(lines, key=lambda line: (len(line.get("changes", ())), line["model"] != TINY)):
        for complaint in line["complaints"]:
            if any(alone in found for alone in _alone(complaint)):
                continue
            case = {
                key: line[key] for key in ("model", "seed", "changes", "flipped", "served", "harmless") if key in line
            }
            case["model"] = line.get("judged_on", line["model"])
            found.setdefault(complaint, case)
    return dict(sorted(found.items()))


def main() -> None:
    lines = [json.loads(text) for name in sys.argv[1:] for text in Path(name).read_text(encoding="utf-8").splitlines()]
    cases = merged(lines)
    rows = [f"  {json.dumps(what)}: {json.dumps(case, ensure_ascii=False)}" for what, case in cases.items()]
    LIST.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{len(cases)} complaints are known")


if __name__ == "__main__":
    main()
