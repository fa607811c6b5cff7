"""Plots for reports, as SVG inside a page: bars with intervals, and lines. Colours are those of `html.page`.

Values stand beside the marks and series differ by dash and shape too, so that no plot needs its colours. Pointing at a
mark tells its exact value, without a script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tokentape.audit.html import shown
from tokentape.errors import InvalidRequest

_WIDTH = 720
_ROW = 26
_LABEL = 220
_VALUE = 110
_COLOURS = 6
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 2", "1 2")


@dataclass(frozen=True, slots=True)
class Bar:
    """One value, with the interval that it lies in if that is known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: int = 0
    """Number of its colour, from 0: bars that belong together have one."""


def bars(values: Sequence[Bar], *, unit: str, highest: float | None = None, caption: str = "") -> Markup:
    """Horizontal bars from zero, one below the other; an interval is a line with ends across the bar's end.

    `highest` is where the axis ends; it fits the values if not given. Values below zero are refused: `InvalidRequest`.
    """
    tops = [max(bar.value, bar.high if bar.high is not None else 0.0) for bar in values]
    if any(not math.isfinite(top) for top in tops) or any(bar.value < 0 for bar in values):
        raise InvalidRequest("bars need finite values that are not below zero")
    ticks = _ticks(0.0, highest if highest is not None else max(tops, default=1.0) or 1.0)
    end = ticks[-1]
    room = _WIDTH - _LABEL - _VALUE
    height = _ROW * len(values) + 34
    parts = []
    for tick in ticks:
        x = _LABEL + room * tick / end
        parts.append(_line(x, 4, x, height - 30, "var(--line)"))
        parts.append(_text(x, height - 16, _number(tick), "middle", "dim"))
    for at, bar in enumerate(values):
        y = 4 + _ROW * at
        length = room * min(bar.value / end, 1.0)
        parts.append(_text(_LABEL - 8, y + 17, _shortened(bar.label, 34), "end"))
        parts.append(
            Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="var(--c{})" fill-opacity=".75">{}</rect>').format(
                _LABEL, y + 5, _short(length), _ROW - 10, bar.group % _COLOURS, _tip(_bar_tip(bar, unit))
            )
        )
        right = length
        if bar.low is not None and bar.high is not None:
            left, right = (room * min(max(edge, 0.0) / end, 1.0) for edge in (bar.low, bar.high))
            middle = y + _ROW / 2
            parts.append(_line(_LABEL + left, middle, _LABEL + right, middle, "var(--ink)"))
            parts += [
                _line(_LABEL + edge, middle - 4, _LABEL + edge, middle + 4, "var(--ink)") for edge in (left, right)
            ]
        parts.append(_text(_LABEL + max(length, right) + 8, y + 17, _number(bar.value), "start"))
    parts.append(_text(_LABEL + room / 2, height - 2, unit, "middle", "dim"))
    return _figure(parts, height, caption, f"bars: {unit}")


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, from_zero: bool = True, caption: str = ""
) -> Markup:
    """One line per name through its (x, y) points, in order of x; the y axis begins at zero if `from_zero`.

    Points that are not finite are left out, and the line is broken there.
    """
    points = [point for line in series.values() for point in line if _finite(point)]
    height, left, bottom, top = 320, 64, 44, 12
    legend = 22 * len(series) if len(series) > 1 else 0
    xs, ys = ([point[axis] for point in points] or [0.0, 1.0] for axis in (0, 1))
    x_low, x_high = min(xs), max(xs)
    y_ticks = _ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    width, tall = _WIDTH - left - 16, height - bottom - top

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + width * across, top + tall * (1 - up)

    parts = []
    for tick in y_ticks:
        _, at = place((x_low, tick))
        parts.append(_line(left, at, left + width, at, "var(--line)"))
        parts.append(_text(left - 8, at + 4, _number(tick), "end", "dim"))
    for tick in [tick for tick in _ticks(x_low, x_high) if x_low <= tick <= x_high]:
        across, _ = place((tick, y_ticks[0]))
        parts.append(_line(across, top + tall, across, top + tall + 4, "var(--dim)"))
        parts.append(_text(across, top + tall + 18, _number(tick), "middle", "dim"))
    for number, (name, line) in enumerate(series.items()):
        colour = f"var(--c{number % _COLOURS})"
        for run in _unbroken(line):
            corners = " ".join("{},{}".format(*map(_short, place(point))) for point in run)
            parts.append(
                Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2" stroke-dasharray="{}"/>').format(
                    corners, colour, _DASHES[number % len(_DASHES)]
                )
            )
            for point in run:
                cx, cy = map(_short, place(point))
                tip = _tip(f"{name}: {_number(point[1])} at {_number(point[0])}")
                parts.append(Markup('<circle cx="{}" cy="{}" r="3" fill="{}">{}</circle>').format(cx, cy, colour, tip))
        if legend:
            at = height + 22 * number + 8
            parts.append(_line(left, at, left + 34, at, colour, _DASHES[number % len(_DASHES)]))
            parts.append(_text(left + 42, at + 4, _shortened(name, 80), "start"))
    parts.append(_text(left + width / 2, height - 6, x, "middle", "dim"))
    parts.append(
        Markup('<text class="dim" text-anchor="middle" transform="translate(14 {}) rotate(-90)">{}</text>').format(
            _short(top + tall / 2), shown(y)
        )
    )
    return _figure(parts, height + legend, caption, f"{y} by {x}")


def _figure(parts: Sequence[Markup], height: float, caption: str, label: str) -> Markup:
    below = Markup("<figcaption>{}</figcaption>").format(shown(caption)) if caption else Markup()
    return Markup(
        '<figure><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{label}">'
        "{body}</svg>{below}</figure>"
    ).format(
        width=_WIDTH, height=_short(height), label=shown(caption or label), body=Markup("\n").join(parts), below=below
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> Markup:
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="{}" stroke-dasharray="{}"/>').format(
        *map(_short, (x1, y1, x2, y2)), colour, dash
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>').format(
        _short(x), _short(y), anchor, style, shown(text)
    )


def _tip(text: str) -> Markup:
    return Markup("<title>{}</title>").format(shown(text))


def _bar_tip(bar: Bar, unit: str) -> str:
    tip = f"{bar.label}: {bar.value:.6g} {unit}"
    return tip if bar.low is None or bar.high is None else f"{tip}, from {bar.low:.6g} to {bar.high:.6g}"


def _unbroken(line: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in line:
        if _finite(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers about five apart that enclose the range."""
    if high - low <= max(abs(low), abs(high), 1e-290) * 1e-9:  # too close for a step between them
        high = low + (abs(low) if abs(low) > 1e-290 else 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * at for at in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
