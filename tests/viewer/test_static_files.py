"""What the page is made of: nothing from elsewhere, no markup out of text."""

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
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_or_code_out_of_text(path: Path) -> None:
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
def test_the_key_never_gets_into_an_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"searchParams\.set\([^)]*key", text, re.IGNORECASE)
    assert "localStorage.setItem(KEY" not in text


def test_the_page_has_no_script_or_style_of_its_own() -> None:
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
