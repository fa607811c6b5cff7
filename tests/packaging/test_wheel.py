"""What is built is what should be released."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts.check_wheel import NEEDED, faults

from tokentape._version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built from a copy of the sources."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "hatch_build.py"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    build = (
        "import hatchling.build as backend, sys;"
        "print(backend.build_wheel(sys.argv[1]), backend.build_sdist(sys.argv[1]), file=sys.stderr)"
    )
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=copy, check=True, env={**os.environ})
    return out


def test_wheel_holds_what_it_should_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert list(faults(wheel)) == []
    assert wheel.stat().st_size < 8_000_000


def test_wheel_says_what_it_needs(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = archive.read(name).decode().split("\n\n")[0].splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in metadata if line.startswith("Requires-Dist: ")]
    assert f"Version: {__version__}" in metadata
    assert not [one for one in needed if "==" in one.split(";")[0]]
    assert not [one for one in needed if "extra ==" not in one and one.startswith(("torch", "transformers"))]


def test_the_description_on_an_index_has_no_relative_links(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(name).decode().split("\n\n", 1)[1]
    assert "# Tokentape" in text
    assert "Run with vLLM and Run with SGLang explain" in " ".join(text.split())
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
    assert "<!--" not in text


def test_an_installation_stays_small() -> None:
    """Fresh on Linux with CPython 3.11: 192 MB with the compiled files that pip adds, 137 MB without them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed: dict[str, metadata.Distribution] = {}
    todo = [*map(Requirement, project["dependencies"])]
    while todo:
        one = todo.pop()
        found = metadata.distribution(one.name)
        if found.version not in one.specifier:
            pytest.skip(f"{one} is needed, but {found.version} is installed: run make")
        if needed.setdefault(canonicalize_name(one.name), found) is found:
            wanted = map(Requirement, found.requires or ())
            todo += [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert len(needed) <= 40, sorted(needed)
    ours = sum(path.stat().st_size for path in (ROOT / "src").rglob("*") if "__pycache__" not in path.parts)
    others = sum(file.size or 0 for one in needed.values() for file in one.files or ())
    assert ours + others < 150e6


def test_sdist_has_what_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src/tokentape/py.typed"} <= names


@pytest.mark.parametrize("name", ["tokentape-hook.pth", "sitecustomize.py", "tokentape/native.so", "other/__init__.py"])
def test_a_file_that_does_not_belong_is_told(built: Path, tmp_path: Path, name: str) -> None:
    (wheel,) = built.glob("*.whl")
    before = list(faults(wheel))
    shutil.copy(wheel, tmp_path)
    with ZipFile(tmp_path / wheel.name, "a") as archive:
        archive.writestr(name, "import os")
    (fault,) = [fault for fault in faults(tmp_path / wheel.name) if fault not in before]
    assert fault.startswith(name)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("tokentape/py.typed", "")
    assert len(list(faults(tmp_path / "empty.whl"))) == len(NEEDED) - 1
