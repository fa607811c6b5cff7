"""Build a report from blocks, and write it for a terminal (rich), as one HTML file (Jinja2) or as JSON.

Much of the content comes from models and unknown users. Both writers escape all text: HTML's special characters, and
control characters, lone surrogates and characters that change the writing direction.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from xml.etree import ElementTree

from tokentape._version import __version__
from tokentape.audit._statistics import Rate
from tokentape.errors import InvalidRequest

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from rich.console import Console, RenderableType
    from rich.text import Text

_KEPT = "\n\t\u200c\u200d"
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a section (level 2) or of a part of one (level 3)."""

    text: str
    level: Literal[2, 3] = 2
    note: str = ""
    """Text after the title, in a weaker style."""
    style: Literal["", "ok", "warn", "fail"] = ""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text."""

    text: str
    style: Literal["", "ok", "warn", "fail", "dim"] = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one pair per line. Two rows may have the same name."""

    rows: Mapping[str, object] | Sequence[tuple[str, object]]

    @property
    def pairs(self) -> Sequence[tuple[str, object]]:
        return list(self.rows.items()) if isinstance(self.rows, Mapping) else self.rows


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a head. The columns at the positions `numeric` are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    numeric: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Code:
    """Text in a fixed width."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Named sequences of token ids, one below the other. The positions `differs` (start, end) are highlighted."""

    rows: Mapping[str, Sequence[int]]
    differs: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a page shows collapsed. They are not printed to a terminal."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value of a plot, with its interval if known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars from zero, without negative values. The axis ends at `highest`, or fits the values."""

    bars: Sequence[Bar]
    unit: str
    highest: float | None = None
    ticks: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        tops = [max(bar.value, bar.high or 0.0) for bar in self.bars]
        if not all(map(math.isfinite, tops)) or any(bar.value < 0 for bar in self.bars):
            raise InvalidRequest("bar values must be finite and at least 0")
        highest = self.highest if self.highest is not None else max(tops, default=0.0)
        object.__setattr__(self, "ticks", round_numbers(highest or 1.0))


Block: TypeAlias = Heading | Paragraph | Facts | Table | Code | TokenIds | Details | Bars


def rate_bar(label: str, rate: Rate, group: int = 0, unit: int = 1) -> Bar:
    low, high = (None if end is None else unit * end for end in (rate.low, rate.high))
    return Bar(label, unit * rate.share, low, high, group)


def round_numbers(highest: float) -> list[float]:
    """Return round numbers for an axis: about five equal steps from zero to at least `highest`."""
    rough = highest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def escape_invisible(text: str) -> str:
    r"""Return text with invisible characters as escapes (`\x1b`), except new lines, tabs and zero-width joiners."""
    hidden = (char not in _KEPT and unicodedata.category(char) in _INVISIBLE for char in text)
    pairs = zip(text, hidden, strict=True)
    return "".join(char.encode("unicode_escape").decode() if is_hidden else char for char, is_hidden in pairs)


def escape_for_terminal(text: str) -> str:
    r"""Return text that can't steer a terminal: `escape_invisible`, with tabs as `\t` and new lines marked by ↵.

    >>> escape_for_terminal("a\n\x1b[2Jb")
    'a↵\n\\x1b[2Jb'
    """
    return escape_invisible(text).replace("\t", "\\t").replace("\n", "↵\n")


def json_value(value: Any) -> Any:
    """Return dataclasses (a `Rate` with its share), mappings and sequences as JSON values, NaN and infinity as null."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {attribute.name: json_value(getattr(value, attribute.name)) for attribute in fields(value)}
        return {**values, "share": value.share} if isinstance(value, Rate) else values
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    return json.dumps(json_value(value))


_STYLES = {"": "", "ok": "bold green", "warn": "yellow", "fail": "bold red", "dim": "dim"}


@dataclass(frozen=True, slots=True)
class Report:
    """A title and blocks."""

    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """Return one HTML page, light or dark by the system's setting, without scripts or external resources."""
        return _template().render(title=self.title, blocks=self.blocks, version=__version__)

    def print(self, console: Console | None = None) -> None:
        from rich.console import Console

        console = console or Console(highlight=False)
        for block in self.blocks:
            for part in _printed(block):
                console.print(part)


@cache
def _template() -> Template:
    environment = html_environment("tokentape.audit")
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
            ends = [[number(end) for end in (bar.low, bar.high) if end is not None] for bar in block.bars]
            intervals = [f"[{', '.join(pair)}]" if len(pair) == 2 else "" for pair in ends]
            pairs = zip(block.bars, intervals, strict=True)
            rows = [[bar.label, number(bar.value), interval] for bar, interval in pairs]
            return [_table(Table(["", block.unit, "95 %" if any(intervals) else ""], rows, {1, 2}))]
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


_MOST_ANNOTATIONS = 10


@dataclass(frozen=True, slots=True)
class CiFinding:
    rule: str
    level: Literal["error", "warning"]
    title: str
    text: str
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CiCase:
    """One check with its findings."""

    name: str
    findings: Sequence[CiFinding] = ()
    summary: str = ""
    line: int = 1
    details: Sequence[str] | None = None
    """Lines for JUnit; if None, the texts of the findings."""
    skipped: str = ""


def ci_report(
    kind: str,
    tool: str,
    uri: str,
    rules: Mapping[str, str],
    cases: Iterable[CiCase],
    fail_on: Literal["error", "warning"] = "error",
) -> str:
    """Return cases about the file `uri` as junit (`fail_on`: lowest failing level), sarif (with `rules`) or github."""
    match kind:
        case "junit":
            return _junit(tool, cases, fail_on)
        case "sarif":
            return json.dumps(_sarif(tool, uri, rules, cases))
    return "\n".join(_github(uri, cases))


def _junit(tool: str, cases: Iterable[CiCase], fail_on: str) -> str:
    """Return JUnit XML with a failed, skipped or passed test case for each case, with its findings."""
    suite = ElementTree.Element("testsuite", name=tool)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for case in cases:
        counts["tests"] += 1
        element = ElementTree.SubElement(
            suite, "testcase", classname=tool.replace(" ", "."), name=escape_invisible(case.name)
        )
        if case.skipped:
            counts["skipped"] += 1
            ElementTree.SubElement(element, "skipped", message=escape_invisible(case.skipped))
        if not case.findings:
            continue
        lines = [escape_invisible(line) for line in case.details or [finding.text for finding in case.findings]]
        many = len(case.findings)
        summary = escape_invisible(case.summary or f"{many} finding{'s' if many > 1 else ''}")
        if any(finding.level in ("error", fail_on) for finding in case.findings):
            counts["failures"] += 1
            ElementTree.SubElement(element, "failure", message=summary, type="tokens").text = "\n".join(lines)
        else:
            ElementTree.SubElement(element, "system-out").text = "\n".join([summary, *lines])
    suite.attrib.update({name: str(value) for name, value in counts.items()})
    ElementTree.indent(suite)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suite, encoding="unicode")}'


def _sarif(tool: str, uri: str, rules: Mapping[str, str], cases: Iterable[CiCase]) -> dict[str, Any]:
    driver = {
        "name": tool,
        "semanticVersion": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": meaning}} for rule, meaning in rules.items()],
    }
    results = [_sarif_result(case, finding, uri, list(rules)) for case in cases for finding in case.findings]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _sarif_result(case: CiCase, finding: CiFinding, uri: str, rules: Sequence[str]) -> dict[str, Any]:
    place = json.dumps([case.name, finding.rule, finding.properties or finding.text], default=str)
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": finding.level,
        "message": {"text": escape_invisible(f"{case.name}: {finding.text}")},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": case.line}},
                "logicalLocations": [{"name": case.name, "kind": "element"}],
            }
        ],
        "partialFingerprints": {"tokens/v1": hashlib.sha256(place.encode()).hexdigest()},
        "properties": {key: value for key, value in finding.properties.items() if value is not None},
    }


def _github(path: str, cases: Iterable[CiCase]) -> Iterator[str]:
    for case in cases:
        for finding in case.findings[:_MOST_ANNOTATIONS]:
            place = f"file={_property(path)},line={case.line},title={_property(finding.title)}"
            yield f"::{finding.level} {place}::{_escaped(escape_invisible(finding.text))}"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(escape_invisible(value)).replace(":", "%3A").replace(",", "%2C")
