"""Examples and documentation import public names only, and the reference has all of these."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

FACES = {
    *("tokentape", "tokentape.chat", "tokentape.engines", "tokentape.store", "tokentape.gateway", "tokentape.training"),
    *("tokentape.training.trl", "tokentape.audit", "tokentape.testing", "tokentape.client", "tokentape.ray"),
    *(
        "tokentape.viewer",
        "tokentape.testing.samples",
        "tokentape.training.verl",
        "tokentape.training.slime",
        "tokentape.training.skyrl",
        "tokentape.training.verifiers",
        "tokentape.training.tinker",
        "tokentape.training.agent_lightning",
        "tokentape.training.nemo_rl",
        "tokentape.training.openenv",
    ),
}
"""Packages that list their public names in `__all__`."""

WHOLE = {
    *("tokentape.errors", "tokentape.types", "tokentape.config", "tokentape.training.exports"),
    "tokentape.testing.golden",
}
"""Modules that are public by name."""


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tokentape":
            for alias in node.names:
                yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tokentape."):
                    yield alias.name, ""


def is_public(module: str, name: str) -> bool:
    """Return whether users may rely on this name; the demo is there to be read."""
    if module in WHOLE or module.startswith("tokentape.demo"):
        return True
    return module in FACES and name in import_module(module).__all__


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted((REPOSITORY / "examples").rglob("*.py")):
        if not path.is_relative_to(REPOSITORY / "examples" / "token_paths"):
            yield str(path.relative_to(REPOSITORY)), path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
            yield str(path.relative_to(REPOSITORY)), block


@pytest.mark.parametrize("path", sorted({path for path, _ in sources()}))
def test_only_public_names_are_imported(path: str) -> None:
    found = [imported for source_path, source in sources() if source_path == path for imported in imports(source)]
    assert [f"{module}.{name}" for module, name in found if not is_public(module, name)] == []


def test_every_other_module_is_private_by_name() -> None:
    folder = REPOSITORY / "src" / "tokentape"
    modules = {".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in folder.rglob("*.py")}
    modules = {module.removesuffix(".__init__") for module in modules}
    public = {module for module in modules if not re.search(r"\._", module)}
    programs = {module for module in public if re.match(r"tokentape\.(cli|demo|__main__)\b", module)}
    assert public - programs == FACES | WHOLE


def test_a_private_name_is_found() -> None:
    assert list(imports("from tokentape.chat._renderer import Renderer")) == [("tokentape.chat._renderer", "Renderer")]
    assert not is_public("tokentape.chat._renderer", "Renderer")
    assert is_public("tokentape", "Renderer")
    assert not is_public("tokentape", "nothing")


def test_the_reference_lists_the_public_names() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "python_reference.py"))
    for name in script["PAGES"]:
        written = (REPOSITORY / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
        assert written == script["page"](name), f"run `python scripts/python_reference.py`: {name}.md is old"
