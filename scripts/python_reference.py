"""Write the reference pages of the public names from the packages that export them.

    python scripts/python_reference.py

A page per package: what its `__all__` lists, in that order. `tests/docs/test_public_names.py` fails if a page is old.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

PAGES = {
    "python": ("Python", ("tokentape", "tokentape.client"), ("tokentape.types", "tokentape.errors")),
    "chat": ("Render, bridge, parse, certify", ("tokentape.chat",), ()),
    "engines": ("Engines", ("tokentape.engines",), ()),
    "store": ("Records", ("tokentape.store",), ()),
    "gateway": ("Gateway", ("tokentape.gateway",), ()),
    "training": (
        "Training",
        (
            "tokentape.training",
            "tokentape.training.trl",
            "tokentape.training.verl",
            "tokentape.training.slime",
            "tokentape.training.skyrl",
            "tokentape.training.verifiers",
            "tokentape.training.tinker",
            "tokentape.training.agent_lightning",
            "tokentape.training.nemo_rl",
            "tokentape.training.openenv",
        ),
        ("tokentape.training.exports",),
    ),
    "audit": ("Audit", ("tokentape.audit", "tokentape.testing"), ()),
}
"""By page: its title, the packages that list names, and modules that are public as a whole."""


def page(name: str) -> str:
    """Return the text of a page."""
    title, packages, modules = PAGES[name]
    lines = [f"# {title}", "", "<!-- Written by scripts/python_reference.py. -->"]
    shown: set[str] = set()
    for package in packages:
        found = import_module(package)
        summary = (found.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"## `{package}`", "", summary, ""]
        names = [one for one in found.__all__ if not one.startswith("__") and one not in shown]
        shown.update(names)
        lines += [f"::: {package}.{one}" for one in names]
    for module in modules:
        lines += ["", f"## `{module}`", "", f"::: {module}", "    options: {show_root_heading: false}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
