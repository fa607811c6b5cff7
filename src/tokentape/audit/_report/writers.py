"""Write reports as HTML and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tokentape._version import __version__
from tokentape.audit._report.blocks import (
    Bars,
    Block,
    Code,
    Details,
    Facts,
    Heading,
    Paragraph,
    Table,
    TokenIds,
    escape_for_terminal,
    escape_invisible,
)

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from rich.console import Console, RenderableType
    from rich.text import Text

_STYLES = {"": "", "ok": "bold green", "warn": "yellow", "fail": "bold red", "dim": "dim"}


@dataclass(frozen=True, slots=True)
class Report:
    """A title and blocks."""

    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """Return one HTML page, light or dark by the system's setting, without scripts and external resources."""
        return _template().render(title=self.title, blocks=self.blocks, version=__version__)

    def print(self, console: Console | None = None) -> None:
        """Print the blocks to a terminal, without the title."""
        from rich.console import Console

        console = console or Console(highlight=False)
        for block in self.blocks:
            for part in _printed(block):
                console.print(part)


@cache
def _template() -> Template:
    environment = html_environment(__name__.rpartition(".")[0])
    environment.tests["of_kind"] = lambda block, kind: type(block).__name__ == kind
    environment.filters["number"] = number
    return environment.get_template("report.html.j2")


def html_environment(package: str) -> Environment:
    """Return an environment for a package's HTML templates that escapes all values, invisible characters included."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return escape_invisible(f"{value:g}" if isinstance(value, float) else str(value))

    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        finalize=printed,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def number(value: float) -> str:
    """Format a number with four significant digits, or as a whole number with commas from 10,000 up."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def terminal_text(value: object, style: str = "") -> Text:
    """Return a value as text that can't steer a terminal. New lines show as ↵."""
    from rich.text import Text

    text = f"{value:g}" if isinstance(value, float) else str(value)
    return Text(escape_for_terminal(text), style=style)


def _printed(block: Block) -> Sequence[RenderableType]:
    from rich.text import Text

    match block:
        case Heading():
            style = f"bold {_STYLES[block.style].removeprefix('bold ')}".strip()
            note = Text("  ") + terminal_text(block.note, "dim") if block.note else Text()
            return ["", terminal_text(block.text, style) + note]
        case Paragraph():
            return [Text(escape_invisible(block.text), style=_STYLES[block.style])]
        case Facts():
            return [_grid(block.pairs)] if block.pairs else []
        case Table():
            return [_table(block)]
        case Code():
            return [terminal_text(block.text)]
        case TokenIds():
            return [_grid([(name, str(list(ids))) for name, ids in block.rows.items()])]
        case Bars():
            rows = [
                [
                    bar.label,
                    number(bar.value),
                    "" if bar.low is None or bar.high is None else f"[{number(bar.low)}, {number(bar.high)}]",
                ]
                for bar in block.bars
            ]
            return [_table(Table(["", block.unit, "95 %" if any(row[2] for row in rows) else ""], rows, {1, 2}))]
        case Details():
            return []


def _grid(pairs: Sequence[tuple[str, object]]) -> RenderableType:
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(terminal_text(name), terminal_text(value))
    return grid


def _table(block: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, name in enumerate(block.columns):
        grid.add_column(terminal_text(name), overflow="fold", justify="right" if n in block.numeric else "left")
    for row in block.rows:
        grid.add_row(*map(terminal_text, row))
    return grid
