"""Write docs/reference/cli.md from the commands themselves.

python scripts/cli_reference.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from tokentape.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"

HEAD = """# Commands

Data goes to stdout, everything else to stderr; `--json` makes it for machines. `tokentape --debug COMMAND` shows
the traceback of a failure.

| exit code | meaning |
|---|---|
| 0 | success, and something was measured |
| 1 | the command found something: a difference, damage, a limit that is exceeded |
| 2 | an error: a wrong command line, or the command could not do its work |
| 3 | nothing to measure: an empty record, no text, no row or token that both sides have |

`audit`, `check`, `check-logprobs`, `compare`, `drift`, `export`, `premium`, `probe`, `score` and `verify` exit with 3,
so that a gate does not take it for a pass.

<!-- written by scripts/cli_reference.py -->
"""


def page() -> str:
    """Return the text of the page."""
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    return HEAD + "".join(_sections(command, "tokentape"))


def _sections(group: TyperGroup, name: str) -> Iterator[str]:
    context = Context(group, info_name=name)
    for sub in sorted(group.list_commands(context)):
        command, whole = group.get_command(context, sub), f"{name} {sub}"
        if isinstance(command, TyperGroup):
            yield from _sections(command, whole)
        else:
            yield _section(command, whole)


def _section(command: Any, name: str) -> str:
    context = Context(command, info_name=name, terminal_width=100, max_content_width=100)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    # The same for all releases of typer that the project takes: they show types and repetitions differently.
    usage = usage.translate({ord(one): None for one in "{}"}).replace("...", "").replace("[[", "[").replace("]]", "]")
    lines = [f"\n## {name}\n", _paragraphs(command.help or ""), f"```console\n$ {usage}\n```\n"]
    rows = [record for one in command.get_params(context) if (record := _row(one, context))]
    if rows:
        lines.append("| | |\n|---|---|\n" + "".join(rows))
    return "\n".join(lines)


def _row(parameter: Any, context: Context) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or record[0] in ("--help", "-h, --help"):
        return None
    name = record[0].replace("<directory>", "<dir>")
    if parameter.param_type_name == "argument":
        name = re.sub(r" <[\w\[\]]+>$", "", name)
    name = re.sub(r"<list\[(\w+)\]>$", lambda kind: f"<{kind[1].lower()}>", name)
    return f"| `{_cell(name)}` | {_cell(record[1])} |\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
