"""Record the run that `tokentape demo` replays where torch is not installed.

python scripts/record_demo.py
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import tokentape.demo.run
from tokentape.demo.findings import RECORDED, DemoReport, examine

SESSIONS, SEED = 16, 0


def main() -> None:
    """Run the demo, and keep its database and the digests of what its engine logged."""
    logged: list[str] = []
    seconds: list[float] = []

    def noting(directory: Path, renderer: object, calls: list[str], took: float) -> DemoReport:
        logged.extend(calls)
        seconds.append(took)
        return examine(directory, renderer, calls, took)  # type: ignore[arg-type]

    tokentape.demo.run.examine = noting  # type: ignore[assignment]
    RECORDED.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        report = tokentape.demo.run.run_demo(Path(folder), SESSIONS, SEED)
        assert report.exact
        (RECORDED / "tokentape.db").unlink(missing_ok=True)
        with closing(sqlite3.connect(Path(folder) / "tokentape.db")) as database, database:
            database.execute("VACUUM INTO ?", (str(RECORDED / "tokentape.db"),))
    (RECORDED / "engine.json").write_text(json.dumps({"seconds": seconds[0], "calls": sorted(logged)}) + "\n")


if __name__ == "__main__":
    main()
