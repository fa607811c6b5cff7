"""Every console block in the documentation is run by a test or has a reason; its commands exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tokentape.cli.app import app

PROJECT = Path(__file__).parents[2]
# The page of commands is generated from them.
PAGES = [
    page
    for page in (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")))
    if page != PROJECT / "docs/reference/cli.md"
]
RUN = re.compile(r"<!-- (?:executed|read) by (tests/[\w/]+\.py)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the line above each console block, and the block."""
    for found in re.finditer(r"^(?P<above>.*)\n *```console\n(?P<block>.*?)```", text, re.DOTALL | re.MULTILINE):
        yield found["above"].splitlines()[-1].strip() if found["above"] else "", found["block"]


def unmarked(text: str) -> list[str]:
    """The first lines of the blocks that have neither an existing test nor a reason why they are not run."""
    return [
        block.splitlines()[0]
        for above, block in blocks(text)
        if not NOT_RUN.fullmatch(above) and not ((by := RUN.match(above)) and (PROJECT / by[1]).is_file())
    ]


@cache
def commands() -> dict[str, Any]:
    """Our commands by name."""
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


@cache
def options(name: str, command: Any) -> set[str]:
    with command.make_context(name, [], resilient_parsing=True) as context:
        return {option for param in command.get_params(context) for option in (*param.opts, *param.secondary_opts)}


def unknown(text: str) -> list[str]:
    """The commands and options of ours that there are not."""
    found = []
    for _, block in blocks(text):
        for line in re.findall(r"^ *\$ (?:\S*/)?tokentape (.*)", block.replace("\\\n", " "), re.MULTILINE):
            name, *words = [word for word in shlex.split(line, comments=True) if word != "--debug"]
            command = commands().get(name)
            if command is not None and hasattr(command, "commands"):
                command = command.commands.get(words[0]) if words else None
            if command is None:
                found.append(line)
                continue
            known = options(name, command)
            if name in ("doctor", "config"):
                known = known | options("serve", commands()["serve"])
            found += [f"{name} {word}" for word in words if word.startswith("-") and word.split("=")[0] not in known]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    assert unmarked(page.read_text(encoding="utf-8")) == []


def test_every_documented_command_and_option_exists() -> None:
    assert {page.name: wrong for page in PAGES if (wrong := unknown(page.read_text(encoding="utf-8")))} == {}


def test_wrong_examples_are_found() -> None:
    text = "Words\n\n```console\n$ tokentape verfy runs/serve\n$ tokentape serve --engine-ulr URL\n```\n"
    assert unmarked(text) == ["$ tokentape verfy runs/serve"]
    assert unmarked("<!-- executed by tests/nowhere.py: a -->" + text[6:])
    assert unmarked("<!-- not run: needs a GPU -->" + text[7:]) == []
    assert unknown(text) == ["verfy runs/serve", "serve --engine-ulr"]
