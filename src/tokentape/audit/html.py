"""A report as one HTML file: no script, no network, light or dark as the reader's system is.

Every function gives a `Markup`, text that is HTML already; whatever else goes in is escaped. A page is put together of
such parts and written whole:

    from tokentape.audit import html, svg

    page = html.page(
        "Drift of run 7",
        html.paragraph("What a trainer would have seen."),
        html.facts({"sessions": 120, "model": "Qwen3-8B"}),
        html.heading("Classes"),
        html.table(["class", "stretches", "share"], [["whitespace", 12, "3.1 %"]], numeric={1, 2}),
        svg.bars([svg.Bar("whitespace", 0.031, low=0.018, high=0.052)], unit="share"),
        html.heading("First difference"),
        html.id_rows({"recorded": [151644, 198, 8948], "trainer": [151644, 271]}, differs=(1, 3)),
        html.code("<|im_start|>\\nsystem"),
    )
    Path("drift.html").write_text(page, encoding="utf-8")

Plots are in `tokentape.audit.svg`. What models and strangers wrote may go into any text: control characters, lone
surrogates and characters that turn the writing direction are shown as escapes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from markupsafe import Markup

from tokentape.version import __version__

Status: TypeAlias = Literal["ok", "warn", "fail"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#59636e;--paper:#fff;--panel:#f4f6f8;--line:#d4dae0;
--c0:#0969b2;--c1:#b35900;--c2:#1a7f5a;--c3:#a0348c;--c4:#6b6f00;--c5:#5b4bc4;
--ok:#1a7f37;--warn:#8a5a00;--fail:#c0202f;--mark:#ffe08a}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaef;--dim:#9aa4ae;--paper:#12161b;--panel:#1c2229;--line:#37404a;
--c0:#58a6ff;--c1:#f0913a;--c2:#4cc38a;--c3:#e07ad0;--c4:#c5c84a;--c5:#a99bff;
--ok:#4cc38a;--warn:#e3b341;--fail:#ff7b72;--mark:#6b5310}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:68rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.5rem 0;max-width:46rem}
.dim,footer{color:var(--dim)}
footer{margin-top:3rem;font-size:.85rem}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);
overflow-wrap:break-word}
th{color:var(--dim);font-weight:600;white-space:nowrap}
th.n,td.n{text-align:right;white-space:nowrap}
pre,code{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--panel);padding:.6rem .8rem;border-radius:4px;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere;margin:.5rem 0}
mark{background:var(--mark);color:inherit;font-weight:600;text-decoration:underline}
.ok{color:var(--ok)}.warn{color:var(--warn)}.fail{color:var(--fail)}
.ok,.warn,.fail{font-weight:600}
figure{margin:.8rem 0}figcaption{color:var(--dim);font-size:.9rem}
svg{max-width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text{fill:var(--ink)}svg .dim{fill:var(--dim)}
@media print{body{max-width:none}}
"""


def page(title: str, *parts: Markup) -> str:
    """The whole file: a title, then the parts in order. Loads nothing, runs nothing."""
    return str(
        Markup(
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            "<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
            "<footer>Made by tokentape {version}.</footer>\n</body>\n</html>\n"
        ).format(title=shown(title), style=Markup(_STYLE), body=Markup("\n").join(parts), version=__version__)
    )


def heading(text: str, level: Literal[2, 3] = 2) -> Markup:
    """The title of a section, or of a part of one."""
    return Markup("<h{level}>{text}</h{level}>").format(level=level, text=shown(text))


def paragraph(*texts: str | Markup) -> Markup:
    """Running text; parts that are `Markup` already stay as they are."""
    return Markup("<p>{}</p>").format(Markup("").join(map(_cell, texts)))


def status(word: Status, text: str = "") -> Markup:
    """A finding's word in its colour, with other text in its place if given."""
    return Markup('<span class="{}">{}</span>').format(word, shown(text or word))


def facts(rows: Mapping[str, Any]) -> Markup:
    """Names and values, one pair a line."""
    lines = (Markup("<tr><th>{}</th><td>{}</td></tr>").format(shown(key), _cell(value)) for key, value in rows.items())
    return Markup('<div class="wide"><table>{}</table></div>').format(Markup("").join(lines))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], numeric: Collection[int] = ()) -> Markup:
    """A table with a head; the columns whose positions are in `numeric` are set to the right."""
    sides = [Markup(' class="n"') if at in numeric else Markup() for at in range(len(columns))]
    head = _row("th", columns, sides)
    body = Markup("\n").join(_row("td", row, sides) for row in rows)
    return Markup(
        '<div class="wide"><table><thead>{}</thead>\n<tbody>{}</tbody></table></div>',
    ).format(head, body)


def code(text: str) -> Markup:
    """Text as it stands, in one width."""
    return Markup("<pre>{}</pre>").format(shown(text))


def id_rows(rows: Mapping[str, Sequence[int]], differs: tuple[int, int] | None = None) -> Markup:
    """Sequences of token ids below each other, by name; those at positions `differs` (start, end) are marked."""
    start, end = differs or (0, 0)
    lines = []
    for name, ids in rows.items():
        parts = [Markup("<mark>{}</mark>" if start <= at < end else "{}").format(one) for at, one in enumerate(ids)]
        lines.append(Markup("<tr><th>{}</th><td><code>[{}]</code></td></tr>").format(shown(name), _comma(parts)))
    return Markup('<div class="wide"><table>{}</table></div>').format(Markup("").join(lines))


def details(summary: str, *parts: Markup) -> Markup:
    """Parts that are folded away until asked for."""
    return Markup("<details><summary>{}</summary>{}</details>").format(shown(summary), Markup("\n").join(parts))


def shown(text: str) -> str:
    r"""Text with what can't be seen, or would steer the page, as escapes: `\x1b`, `\u202e`, `\ud800`.

    New lines and tabs stay, and the joiners that emoji and some scripts need.
    """
    return "".join(char if _visible(char) else _escaped(char) for char in text)


def _visible(char: str) -> bool:
    return char in "\n\t\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(char: str) -> str:
    code_point = ord(char)
    if code_point < 0x100:
        return f"\\x{code_point:02x}"
    return f"\\u{code_point:04x}" if code_point < 0x10000 else f"\\U{code_point:08x}"


def _row(tag: Literal["th", "td"], cells: Sequence[Any], sides: Sequence[Markup]) -> Markup:
    made = (
        Markup("<{tag}{side}>{cell}</{tag}>").format(tag=tag, side=side, cell=_cell(cell))
        for side, cell in zip(sides, cells, strict=True)
    )
    return Markup("<tr>{}</tr>").format(Markup("").join(made))


def _cell(value: Any) -> Markup:
    if isinstance(value, Markup):
        return value
    return Markup.escape(shown(f"{value:g}" if isinstance(value, float) else str(value)))


def _comma(parts: Sequence[Markup]) -> Markup:
    return Markup(", ").join(parts)
