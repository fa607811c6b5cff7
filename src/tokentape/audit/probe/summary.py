"""What a probe found: shares with intervals, classes of phantom edits, examples; as text's data and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tokentape.audit import html, svg
from tokentape.audit.intervals import Rate, wilson
from tokentape.audit.probe.outcomes import KINDS
from tokentape.audit.probe.record import Header
from tokentape.audit.probe.running import Result
from tokentape.audit.tokendiff import ARTIFACTS
from tokentape.chat.tokenizer import Tokenizer

_EXAMPLES = 40


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over all trials."""

    trials: int
    outcomes: Mapping[str, Rate]
    """By kind, of all trials."""
    strict: Rate
    """Phantom edits, byte-strict, of the trials whose sentence came back."""
    normalised: Rate
    """With white space normalised: those of other white space too."""
    classes: Mapping[str, Rate]
    """By artifact, of all phantom edits, white space normalised."""
    noncanonical: Rate
    """Completions, of all, that another encoding of their text does not give again."""
    banned: Mapping[str, Rate]
    """What became of phantom edits once their ids were banned, by kind; empty if none was."""


def summarise(results: Sequence[Result]) -> Summary:
    """Count results. Intervals are Wilson's, 95 %."""
    kinds = Counter(result.outcome.kind for result in results)
    back = len(results) - kinds["other"]
    edits = [result for result in results if result.outcome.kind in ("phantom", "spacing")]
    classes = Counter(str(result.outcome.artifact) for result in edits)
    again = Counter(result.banned.kind for result in results if result.banned is not None)
    return Summary(
        trials=len(results),
        outcomes={kind: _rate(kinds[kind], len(results)) for kind in KINDS},
        strict=_rate(kinds["phantom"], back),
        normalised=_rate(len(edits), back),
        classes={name: _rate(classes[name], len(edits)) for name in ARTIFACTS if classes[name]},
        noncanonical=_rate(sum(not result.outcome.canonical for result in results), len(results)),
        banned={kind: _rate(again[kind], again.total()) for kind in KINDS if again[kind]},
    )


def _rate(changed: int, total: int) -> Rate:
    return Rate(changed, total, *wilson(changed, total))


def page(made: Header, results: Sequence[Result], tokenizer: Tokenizer) -> str:
    """The findings as one HTML file."""
    found = summarise(results)
    parts = [
        html.paragraph(
            "A model is asked to replace one word of a sentence. A phantom edit gives the same word back in other ids: "
            "for the model something changed, in the text nothing did."
        ),
        html.facts({"trials": found.trials, **{key: made[key] for key in ("model", "engine", "temperature")}}),
        html.heading("Outcomes"),
        _bars(found.outcomes),
        html.table(["outcome", "meaning"], [[kind, meaning] for kind, meaning in KINDS.items()]),
        html.heading("Phantom edits, of the sentences that came back"),
        _bars({"byte-strict": found.strict, "white space normalised": found.normalised}),
    ]
    if found.classes:
        parts += [html.heading("Classes of phantom edits"), _bars(found.classes), _meanings(found.classes)]
    if found.banned:
        parts += [
            html.heading("With the phantom edits' ids banned"),
            html.paragraph("Greedy decoding went on with the likeliest other id."),
            _bars(found.banned),
        ]
    parts += _examples(results, tokenizer)
    return html.page(f"Tokenization probe of {made['model']}", *parts)


def _bars(rates: Mapping[str, Rate]) -> Markup:
    bars = [svg.Bar(f"{name} ({one.changed})", one.share, one.low, one.high) for name, one in rates.items()]
    return svg.bars(bars, unit="share", highest=1.0)


def _meanings(classes: Mapping[str, Any]) -> Markup:
    rows = [
        [name, "" if ARTIFACTS[name].phantom is None else ARTIFACTS[name].phantom, ARTIFACTS[name].meaning]
        for name in classes
    ]
    return html.table(["class", "number in arXiv 2601.14658", "meaning"], rows, numeric={1})


def _examples(results: Sequence[Result], tokenizer: Tokenizer) -> list[Markup]:
    shown = [result for result in results if result.outcome.kind in ("phantom", "spacing")][:_EXAMPLES]
    if not shown:
        return []
    parts = [html.heading(f"The first {len(shown)} phantom edits")]
    for result in shown:
        one = result.outcome
        parts += [
            html.heading(f"{result.trial.target}: {one.artifact}", 3),
            html.paragraph(result.trial.text),
            html.table(
                ["", "ids", "tokens"],
                [
                    [name, list(ids), spelled(ids, tokenizer)]
                    for name, ids in (("given", one.source), ("said", one.found))
                ],
            ),
        ]
    return parts


def spelled(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Tokens side by side, what is no character as U+FFFD."""
    return " | ".join(tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids)
