"""A report is one whole file: nothing is loaded, nothing runs, and nothing that somebody wrote becomes a tag."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from tokentape.audit import html, svg
from tokentape.errors import InvalidRequest

HOSTILE = "</svg></table><script>alert(1)</script>\"'><img src=http://a.example>&amp;\x1b[2J\u202e\ud800"
VOID = {"meta", "line", "rect", "circle", "polyline"}


class Tags(HTMLParser):
    """The tags of a page, and whether each that was opened was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID or tag in ("rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def everything(text: str) -> str:
    return html.page(
        text,
        html.heading(text),
        html.paragraph(text, html.status("fail", text)),
        html.facts({text: text}),
        html.table([text, "n"], [[text, 1]], numeric={1}),
        html.code(text),
        html.id_rows({text: [1, 2]}, differs=(0, 1)),
        html.details(text, html.paragraph(text)),
        svg.bars([svg.Bar(text, 1.0, 0.5, 2.0)], unit=text, caption=text),
        svg.lines({text: [(0, 1), (1, 2)], "b": [(0, 0)]}, x=text, y=text, caption=text),
    )


@given(st.one_of(st.just(HOSTILE), st.text(st.characters(), min_size=1, max_size=20)))
def test_text_stays_text(text: str) -> None:
    page = Tags(everything(text))
    assert page.open == []
    assert page.seen == Tags(everything("x")).seen
    assert page.attributes == Tags(everything("x")).attributes


def test_a_page_loads_and_runs_nothing() -> None:
    page = everything(HOSTILE)
    assert not {"script", "link", "img", "iframe", "object"} & Tags(page).seen
    assert not {"src", "href", "onclick", "onload"} & Tags(page).attributes
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    page.encode("utf-8")


def test_what_can_not_be_seen_is_shown_as_an_escape() -> None:
    assert html.shown("a\x1b\u202e\ud800\U000f0000\n\tb") == "a\\x1b\\u202e\\ud800\\U000f0000\n\tb"
    assert html.shown("👩\u200d🚀 é") == "👩\u200d🚀 é"


def test_markup_is_taken_as_it_is() -> None:
    assert html.paragraph(Markup("<b>x</b>"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"


def test_ids_that_differ_are_marked() -> None:
    row = html.id_rows({"a": [7, 8, 9]}, differs=(1, 2))
    assert "[7, <mark>8</mark>, 9]" in row


def test_bars_say_their_values_and_intervals() -> None:
    plot = svg.bars([svg.Bar("a", 0.25, 0.1, 0.5), svg.Bar("b", 0.0)], unit="share")
    assert "<title>a: 0.25 share, from 0.1 to 0.5</title>" in plot
    assert ">0.25</text>" in plot


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bars_of_no_length_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        svg.bars([svg.Bar("a", value)], unit="x")


@given(st.lists(st.tuples(*[st.one_of(st.floats(-1e9, 1e9), st.just(math.nan))] * 2), max_size=8))
def test_lines_are_drawn_within_the_plot(points: list[tuple[float, float]]) -> None:
    plot = svg.lines({"a": points}, x="x", y="y")
    assert "nan" not in plot.replace("nancy", "")
    shown = sum(math.isfinite(x) and math.isfinite(y) for x, y in points)
    assert plot.count("<circle") == shown


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_an_axis_has_a_few_round_numbers_that_enclose_it(low: float, size: float) -> None:
    ticks = svg._ticks(low, low + size)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-6 * size
    assert ticks[-1] >= low + size * (1 - 1e-6)
