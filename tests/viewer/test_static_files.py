"""The files of the page: nothing from other hosts, no markup from text."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tokentape.viewer._views import FOLDER

SCRIPTS = sorted(FOLDER.glob("*.js"))
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_page_loads_nothing_from_other_hosts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_do_not_turn_text_into_markup_or_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
        "srcdoc",
    ):
        assert word not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_key_is_never_part_of_an_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"searchParams\.set\([^)]*key", text, re.IGNORECASE)
    assert "localStorage.setItem(KEY" not in text


def test_page_has_no_inline_script_or_style() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert "<style" not in page
    assert not re.search(r"\son\w+=|\sstyle=", page)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_import_only_each_other(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^import .*? from \"(.*?)\";$", text, re.MULTILINE):
        assert (FOLDER / name).is_file()


@pytest.mark.sampled(6)
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to check the scripts with")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    subprocess.run(["node", "--check", str(path)], check=True)
