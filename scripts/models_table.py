"""Write docs/models.md: the certificate results of every template in a folder.

    python scripts/models_table.py [FOLDER]

FOLDER has a subfolder per tokenizer, with `tokenizer.json` and `templates/*.jinja`. The default is
$TOKENTAPE_TOKENIZERS, else ../shared/tokenizers. A template without a tokenizer in its folder is tested with
the tokenizer of qwen3.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate, Continuation
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
MADE_WITH = "Made with "
"""Prefix of the line that lists library versions."""

EXTERNAL = ROOT / "tests" / "external"

_VERDICTS = ("equal", "equal tail", "forked", "refused by both", "refused by us", "different", "not compared")
_EXTERNAL = """\
`make test-external` runs this version on the test suites of other projects; `tests/external/README.md`
says what they are and where to get them. *Render* compares a prompt's ids with transformers' rendering.
*Bridge* compares context, completion and bridge with the ids of the longer conversation. *Parse* compares a
message with the result of parsing its rendering. *Equal tail*: the template renders earlier turns
differently, and its rendering ends with the ids that Tokentape appends. *Forked*: the template renders
earlier turns differently, and Tokentape starts a new branch. *Refused*: Tokentape or the template does not
accept the conversation. *Not compared*: there is no reference, in most cases because the template does not
render the turn, or because a model's template or a class of the other project is not available. Every
template replays one in 120 conversations of BFCL and tau-bench.
"""

_STAND_IN = "qwen3"
_SYMBOLS = {"local": "L", "contextual": "C", "fork": "F", "refused": "–"}
_APPENDS = {"yes": "+", "clean text": "~", "no": ""}

_INTRODUCTION = """# Models

This page lists every chat template that Tokentape was tested with, and the results of its certificate. Tokentape has no
code for any single model: `tokentape certify` finds these results by rendering test conversations with the template
(see [architecture](architecture.md)). For any other model, run `tokentape certify PATH`.

`python scripts/models_table.py` generates this page, and a test checks that it is up to date.
"""

_LEGEND = """Each cell says how Tokentape continues a sampled turn with new messages:

| | |
|---|---|
| L | **local**: the ids to append depend only on the new messages, and so does the cost of computing them |
| C | **contextual**: the ids to append depend on the history too, but nothing before them changes |
| F | **fork**: the template moves or repeats earlier messages, so the request starts a new branch |
| – | **refused**: the template does not accept these messages; such a request gets status 422 |
| + | the template itself is append-only for these messages |
| ~ | as `+`, except after turns that are empty or have whitespace at their ends |

Bridges are append-only everywhere. Without `+`, the template renders earlier turns differently once the conversation
continues (most often it drops their reasoning). A context that is built from bridges keeps the sampled tokens.

*Reasoning* is the opening delimiter of reasoning, with ▸ if the generation prompt contains it. *Parsed* counts
the kinds of assistant turns that Tokentape parses back from the template's rendering, of those that the
template renders in full. *Date*: the template prints the date. *Safe*: control tokens that callers spell stay
text. \\* tested with the tokenizer of {stand_in}, because its own was not available.
"""


def certificates(root: Path) -> dict[str, Certificate]:
    """Return the certificate of every template below `root`, by its path without `templates` and the suffix."""
    tokenizers: dict[Path, Tokenizer] = {}
    found = {}
    for path in sorted(root.glob("*/templates/*.jinja")):
        family = path.parents[1]
        own = (family / "tokenizer.json").is_file()
        folder = family if own else root / _STAND_IN
        if folder not in tokenizers:
            tokenizers[folder] = Tokenizer.load(folder)
        renderer = Renderer(tokenizers[folder], ChatTemplate(path.read_text(encoding="utf-8")))
        name = f"{family.name}/{path.stem}"
        found[name if own else name + r" \*"] = load_or_certify(renderer, {})
    return found


def page(found: Mapping[str, Certificate]) -> str:
    """Return the text of docs/models.md."""
    versions = next(iter(found.values())).versions
    made_with = MADE_WITH + ", ".join(f"{name} {versions[name]}" for name in sorted(versions)) + "."
    parts = [
        _INTRODUCTION,
        "## In numbers\n",
        *_totals(found),
        "\n## Each template\n",
        _LEGEND.format(stand_in=_STAND_IN),
        *_templates(found),
        "\n### What templates silently drop\n",
        "The template drops these, not Tokentape. The letters refer to the last column above:\n",
        *_table(["", "dropped"], [[letter, what] for what, letter in _letters().items()]),
        "\n### Without tools or system text\n",
        "Some templates move tools or system text to the last user message. Without such text they need no fork:\n",
        *_without(found),
        *_external(),
        f"\n{made_with}",
    ]
    return "\n".join(parts) + "\n"


def _totals(found: Mapping[str, Certificate]) -> Iterator[str]:
    checks = Counter(check.holds for one in found.values() for check in one.parsing)
    safe = sum(one.injection_safe for one in found.values())
    yield f"{len(found)} templates; none has code of its own."
    yield (
        f"{checks[True]} of {checks[True] + checks[False]} assistant turns that they write are parsed back; {safe} of "
        f"{len(found)} keep control tokens apart from callers' text.\n"
    )
    rows = []
    for name in grammar.NAMES:
        several = [_continuation(one, name) for one in found.values()]
        strategies = Counter(one.strategy for one in several)
        certified = len(several) - strategies["refused"]
        appending = sum(one.append_only == "yes" for one in several)
        counts = [strategies[strategy] for strategy in ("local", "contextual", "fork", "refused")]
        rows.append([f"`{name}`", *map(str, [certified, *counts, appending])])
    yield from _table(
        ["new messages", "certified", "local", "contextual", "fork", "refused", "template append-only"], rows
    )


def _templates(found: Mapping[str, Certificate]) -> Iterator[str]:
    names = list(grammar.CONTINUATIONS)
    rows = []
    for template, one in found.items():
        cells = [_cell(_continuation(one, name)) for name in names]
        dropped = "".join(letter for what, letter in _letters().items() if what in one.dropped)
        rows.append(
            [
                template,
                one.call_style or "",
                _reasoning(one),
                *cells,
                _parsed(one),
                "yes" if one.date_dependent else "",
                "yes" if one.injection_safe else "NO",
                dropped,
            ]
        )
    yield from _table(["template", "calls", "reasoning", *names, "parsed", "date", "safe", "dropped"], rows)


def _without(found: Mapping[str, Certificate]) -> Iterator[str]:
    rows = []
    for template, one in found.items():
        for name in grammar.CONTINUATIONS:
            several = [_continuation(one, name + lacking) for lacking in _LACKING if name + lacking in grammar.NAMES]
            cells = [_cell(continuation) for continuation in several]
            if len({continuation.strategy for continuation in several}) > 1:
                rows.append([template, f"`{name}`", *cells])
    yield from _table(["template", "new messages", "with tools", "no tools", "no system text either"], rows)


_LACKING = ("", grammar.NO_TOOLS, grammar.NO_TOOLS + grammar.NO_SYSTEM)


def _continuation(certificate: Certificate, name: str) -> Continuation:
    found = certificate.continuation(name)
    assert found is not None
    return found


def _cell(found: Continuation) -> str:
    return _SYMBOLS[found.strategy] + ("" if found.strategy == "refused" else _APPENDS[found.append_only])


def _reasoning(certificate: Certificate) -> str:
    if certificate.reasoning is None:
        return ""
    return f"`{certificate.reasoning[0].strip()}`" + ("▸" if certificate.reasoning_opened_by_prompt else "")


def _parsed(certificate: Certificate) -> str:
    made = [check for check in certificate.parsing if check.holds is not None]
    failed = [check.name for check in made if not check.holds]
    return f"{len(made) - len(failed)} of {len(made)}" + "".join(f", not {name}" for name in failed)


def _letters() -> dict[str, str]:
    return {what: chr(ord("a") + n) for n, (what, _, _) in enumerate(grammar.LOSSES)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"


def _external() -> Iterator[str]:
    """Yield the section on other projects' suites, from the counts and differences that `make test-external` checks."""
    results = json.loads((EXTERNAL / "results.json").read_bytes())
    groups = json.loads((EXTERNAL / "differences.json").read_bytes())
    rows = []
    for suite, templates in results.items():
        for kind in sorted({kind for kinds in templates.values() for kind in kinds}):
            totals = Counter[str]()
            for kinds in templates.values():
                totals.update(kinds.get(kind, {}))
            rows.append([suite, kind, str(totals.total()), *(str(totals[verdict]) for verdict in _VERDICTS)])
    yield "\n## Test suites of other projects\n"
    yield _EXTERNAL
    yield from _table(["suite", "compared", "cases", *_VERDICTS], rows)
    yield "\nThe table explains every difference, and every conversation that only Tokentape refuses:\n"
    explained = [
        [group["right"], str(sum(map(len, group["cases"].values()))), ", ".join(group["kinds"]), group["why"]]
        for group in sorted(groups, key=lambda group: str(group["right"]))
    ]
    yield from _table(["who is right", "cases", "compared", "why"], explained)


def main() -> None:
    """Write the page."""
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TOKENTAPE_TOKENIZERS")
    root = Path(given) if given else ROOT.parent / "shared" / "tokenizers"
    found = certificates(root)
    if not found:
        sys.exit(f"no tokenizers in {root}: name a folder that has them")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
