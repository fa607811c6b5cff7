"""A report is one self-contained file: it loads nothing, runs nothing, and text in it never becomes a tag."""

from __future__ import annotations

import io
import json
import math
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokentape.audit._report import (
    Bar,
    Bars,
    Block,
    Code,
    Details,
    Facts,
    Heading,
    Paragraph,
    Report,
    Table,
    TokenIds,
    escape_invisible,
    json_text,
    round_numbers,
)
from tokentape.audit._statistics import Rate
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


def everything(text: str) -> Report:
    blocks: list[Block] = [
        Heading(text, note=text),
        Heading(text, 3, style="fail"),
        Paragraph(text, "ok"),
        Facts({text: text}),
        Table([text, "n"], [[text, 1.5]], {1}),
        Code(text),
        TokenIds({text: [1, 2]}, (0, 1)),
        Bars([Bar(text, 1.0, 0.5, 2.0), Bar("b", 0.0)], text),
    ]
    return Report(text, [*blocks, Details(text, blocks)])


@given(st.one_of(st.just(HOSTILE), st.text(st.characters(), min_size=1, max_size=20)))
def test_text_stays_text_on_a_page(text: str) -> None:
    page = Tags(everything(text).html())
    assert page.open == []
    assert page.seen == Tags(everything("x").html()).seen
    assert page.attributes == Tags(everything("x").html()).attributes


@given(st.one_of(st.just(HOSTILE), st.text(st.characters(), min_size=1, max_size=20)))
def test_terminal_escapes_in_text_are_escaped(text: str) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=False, highlight=False)
    everything(text).print(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert {char for char in printed if unicodedata.category(char) in ("Cc", "Cf", "Cs")} <= set("\n\t\u200c\u200d")


def test_a_page_loads_and_runs_nothing() -> None:
    page = everything(HOSTILE).html()
    assert not {"script", "link", "img", "iframe", "object"} & Tags(page).seen
    assert not {"src", "href", "onclick", "onload"} & Tags(page).attributes
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    page.encode("utf-8")


def test_both_writers_show_every_block() -> None:
    report = Report(
        "t",
        [
            Heading("head", note="note"),
            Paragraph("paragraph"),
            Facts([("name", "one"), ("name", "two")]),
            Table(["column"], [["cell"]]),
            Code("code"),
            TokenIds({"ids": [7]}),
            Bars([Bar("bar", 0.25, 0.1, 0.5)], "share"),
        ],
    )
    console = Console(file=io.StringIO(), width=80, highlight=False)
    report.print(console)
    for written in (report.html(), console.file.getvalue()):  # type: ignore[attr-defined]
        for word in [
            "head",
            "note",
            "paragraph",
            "name",
            "one",
            "two",
            "column",
            "cell",
            "code",
            "ids",
            "7",
            "bar",
            "0.25",
            "share",
        ]:
            assert word in written


def test_invisible_characters_are_escaped() -> None:
    assert escape_invisible("a\x1b\u202e\ud800\U000f0000\n\tb") == "a\\x1b\\u202e\\ud800\\U000f0000\n\tb"
    assert escape_invisible("👩\u200d🚀 é") == "👩\u200d🚀 é"


def test_ids_that_differ_are_marked() -> None:
    page = Report("t", [TokenIds({"a": [7, 8, 9]}, (1, 2))]).html()
    assert "[7, <mark>8</mark>, 9]" in page


def test_bars_show_their_values_and_intervals() -> None:
    plot = Report("t", [Bars([Bar("a", 0.25, 0.1, 0.5), Bar("b", 0.0)], "share")]).html()
    assert "<title>a: 0.25 share, from 0.1 to 0.5</title>" in plot
    assert ">0.25</text>" in plot


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bars_of_no_length_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        Bars([Bar("a", value)], "x")


@given(st.floats(1e-6, 1e9))
def test_an_axis_has_a_few_round_numbers_up_to_its_end(highest: float) -> None:
    ticks = round_numbers(highest)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert ticks[-2] < highest <= ticks[-1] * (1 + 1e-6)


def test_json_has_shares_of_rates_and_null_for_nan() -> None:
    rate = Rate(1, 4, 0.1, 0.6, 60)
    assert json.loads(json_text({"rate": rate, 1: (math.nan, "a")})) == {
        "rate": {"changed": 1, "total": 4, "low": 0.1, "high": 0.6, "clusters": 60, "share": 0.25},
        "1": [None, "a"],
    }
