"""The pages on samples and on the kit: tables are those of schema, kit and known failures, and the example runs.

`python -m tests.docs.test_samples` prints the tables.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.training.test_data_paths import KNOWN
from tokentape.testing._planted import ERRORS
from tokentape.testing.golden import GOLDEN
from tokentape.testing.samples import check_samples, main

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "docs" / "reference" / "samples.md"
PAGE = ROOT / "docs" / "how-to" / "check-trained-samples.md"
SCHEMA = ROOT / "src" / "tokentape" / "training" / "samples.schema.json"


def field_rows() -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    named = {"`column_NAME`": "^column_[a-z][a-z0-9_]*$", "`payload_NAME`": "^payload_"}
    about = {f"`{name}`": about_field for name, about_field in schema["properties"].items()}
    about |= {name: schema["patternProperties"][pattern] for name, pattern in named.items()}
    return [
        f"| {name} | {about_field.get('x-dtype', 'int')} | {about_field.get('x-length', 'sample').removesuffix('s')} | "
        f"{about_field['description']} |"
        for name, about_field in about.items()
    ]


def error_rows() -> list[str]:
    return [f"| {error.name} | `{error.kind}` |" for error in ERRORS]


def failure_rows() -> list[str]:
    """A row per path and finding; values shared by several paths are in one row."""
    goldens: dict[tuple[str, str, str], list[str]] = {}
    for (path, golden), (kinds, cause) in KNOWN.items():
        goldens.setdefault((path, ", ".join(sorted(kinds)), cause), []).append(golden)
    paths: dict[tuple[str, str, str], list[str]] = {}
    for (path, kinds, cause), names in goldens.items():
        named = "all" if len(names) == len(GOLDEN) else "; ".join(sorted(names))
        paths.setdefault((named, kinds, cause), []).append(path)
    return [f"| {'; '.join(names)} | {named} | {kinds} | {cause} |" for (named, kinds, cause), names in paths.items()]


@pytest.mark.parametrize("rows", [field_rows, error_rows, failure_rows])
def test_the_tables_are_those_of_the_code(rows: type) -> None:
    lines = (SAMPLES if rows is field_rows else PAGE).read_text().splitlines()
    start = lines.index(rows()[0])
    assert lines[start : start + len(rows()) + 1] == [*rows(), ""]


def test_the_example_is_checked_by_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(
        r"<!-- executed by [\w/.]+: my_trainer.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    module = ModuleType("my_trainer")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_trainer", module)
    assert main(["my_trainer:rows"]) == 1
    printed = capsys.readouterr().out.splitlines()
    ((_, shown),) = re.findall(
        r"```console\n(\$ python -m tokentape.testing.samples my_trainer:rows)\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert {line for line in shown.splitlines() if line != "..."} <= {*printed}
    assert [name for name, found in check_samples(module.rows).goldens.items() if found] == [
        "sampled at 1.4, recorded at 1"
    ]


def test_every_kind_of_finding_is_named() -> None:
    source = "".join((ROOT / "src" / "tokentape" / "testing" / name).read_text() for name in ("_rows.py", "samples.py"))
    kinds = {*re.findall(r'(?:kind = |else |Finding\()"([a-z0-9 ]+)"', source), *(error.kind for error in ERRORS)}
    assert len(kinds) > 20
    assert [kind for kind in kinds - {"held"} if f"`{kind}`" not in PAGE.read_text()] == []


if __name__ == "__main__":
    for rows in (field_rows, error_rows, failure_rows):
        print("\n".join(rows()), "\n")
