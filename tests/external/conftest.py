"""Report missing files before any comparison, and fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.external import ledger, suites
from tests.external.pairs import TEMPLATES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.external)


def _stop(why: str) -> None:
    """End the run with exit status 1."""
    pytest.exit(why, returncode=1)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ledger.COMPARED:
        summary = ", ".join(f"{n} {verdict}" for verdict, n in ledger.COMPARED.most_common())
        terminalreporter.write_line(f"{ledger.COMPARED.total()} comparisons with suites of others: {summary}")


@pytest.fixture(scope="session", autouse=True)
def files() -> None:
    """Fail, and do not skip, if files are missing: a run that compared nothing must not pass."""
    if not TEMPLATES:
        _stop("there are no real tokenizers: TOKENTAPE_TOKENIZERS names their folder")
    changed = suites.changed()
    if changed:
        _stop(f"not the files that the manifest lists, by their SHA-256: {', '.join(changed)}")
    missing = suites.missing()
    if missing:
        _stop(
            f"{len(missing)} of {len(suites.MANIFEST['files'])} files are not in {suites.FOLDER.name}/ "
            f"(TOKENTAPE_EXTERNAL names another folder): {', '.join(missing)}. They are other people's and not "
            "committed here: `python scripts/fetch_external.py` says where they are and copies them from clones.",
        )
