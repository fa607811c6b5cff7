"""The blocks of a report, and functions that escape text and write JSON."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from tokentape.audit._statistics import Rate
from tokentape.errors import InvalidRequest

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
    """Sequences of token ids below each other, by name. The positions `differs` (start, end) are marked."""

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
    """The index of the bar's color."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars from zero. The axis ends at `highest`, or fits the values.

    Raises `InvalidRequest` for values that are not finite or below zero.
    """

    bars: Sequence[Bar]
    unit: str
    highest: float | None = None
    ticks: Sequence[float] = field(init=False)
    """Round numbers from zero to the end of the axis."""

    def __post_init__(self) -> None:
        """Check the values and choose the axis."""
        tops = [max(bar.value, bar.high or 0.0) for bar in self.bars]
        if not all(map(math.isfinite, tops)) or any(bar.value < 0 for bar in self.bars):
            raise InvalidRequest("bars need finite values that are not below zero")
        highest = self.highest if self.highest is not None else max(tops, default=0.0)
        object.__setattr__(self, "ticks", round_numbers(highest or 1.0))


Block: TypeAlias = Heading | Paragraph | Facts | Table | Code | TokenIds | Details | Bars


def rate_bar(label: str, rate: Rate, group: int = 0, unit: int = 1) -> Bar:
    """Return the bar of a share, with its interval if there is one."""
    low, high = (None if end is None else unit * end for end in (rate.low, rate.high))
    return Bar(label, unit * rate.share, low, high, group)


def round_numbers(highest: float) -> list[float]:
    """Return round numbers for an axis: about five equal steps from zero to at least `highest`."""
    rough = highest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def escape_invisible(text: str) -> str:
    r"""Return text with invisible characters as escapes: `\x1b`, `\u202e`, `\ud800`.

    New lines, tabs and the joiners that emoji and some scripts need are kept.
    """
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
    """Return dataclasses, mappings and sequences as JSON values. A `Rate` also gets its share.

    NaN and infinity become null, since JSON has neither.
    """
    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: json_value(getattr(value, one.name)) for one in fields(value)}
        return {**found, "share": value.share} if isinstance(value, Rate) else found
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    """Return `json_value` as one line of ASCII text."""
    return json.dumps(json_value(value))
