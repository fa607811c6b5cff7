"""The drift report as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from tokentape.audit import html, svg
from tokentape.audit.drift.report import DriftReport, Stratum
from tokentape.audit.intervals import Rate


def drift_page(report: DriftReport, source: str) -> str:
    """The whole file. `source` names what was measured."""
    return html.page(f"Drift of {source}", *_parts(report))


def _parts(report: DriftReport) -> Iterator[Markup]:
    yield html.paragraph(
        "How often sampled ids are not what decoding and encoding them gives. Intervals are of 95 %: Wilson's over "
        "completions, for tokens a bootstrap over rows."
    )
    seams = (
        {"completions that begin within a token of the joined text": _rate(report.seams)} if report.seams.total else {}
    )
    yield html.facts(
        {
            "rows": f"{report.rows:,}",
            "completions that drifted": _rate(report.completions),
            "sampled tokens that changed": _rate(report.tokens),
            **seams,
            "halves of characters at cut ends (unknown)": f"{report.unknown_tokens:,}",
            "completions that came back with other text": f"{report.other_text:,}",
            "tokenizer.json": report.tokenizer_sha256[:16],
        }
    )
    if report.artifacts:
        yield html.heading("What changed")
        total = sum(one.stretches for one in report.artifacts)
        yield html.table(
            ["artifact", "stretches", "share", "sampled tokens", ""],
            [
                [one.name, f"{one.stretches:,}", f"{one.stretches / total:.1%}", f"{one.tokens:,}", one.meaning]
                for one in report.artifacts
            ],
            numeric={1, 2, 3},
        )
    for n, dimension in enumerate(dict.fromkeys(one.dimension for one in report.strata)):
        yield html.heading(f"By {dimension}")
        strata = [one for one in report.strata if one.dimension == dimension]
        yield svg.bars(
            [_bar(one, n) for one in strata],
            unit="% of the tokens changed",
        )
    yield html.heading("What tokenizing again would have cost")
    cost = report.cost
    yield html.table(
        ["", "exact ids", "tokenized again"],
        [
            ["rows, if it forks", f"{cost.rows:,}", f"{cost.rows_if_forked:,}"],
            ["tokens trained on, if it forks", f"{cost.tokens:,}", f"{cost.tokens_if_forked:,}"],
            ["sampled tokens masked, if it realigns", "0", f"{cost.masked_if_realigned:,}"],
        ],
        numeric={1, 2},
    )
    if report.logprobs is not None:
        yield html.paragraph(
            f"Log-probability of the same text, sampled - retokenized: {report.logprobs.mean:+.3f} nats per "
            f"completion, absolute {report.logprobs.mean_absolute:.3f}, over {report.logprobs.completions} completions."
        )
    again = report.rerendered
    if again is not None:
        yield html.heading("Rendered again from messages")
        yield html.facts(
            {
                "later turns with another context": _rate(again.turns),
                "sampled tokens changed in them": f"{again.changed_sampled_tokens:,} of {again.sampled_tokens:,}",
                "branches that begin otherwise already": f"{again.unlike_roots:,}",
                "turns that the template refuses": f"{again.refused:,}",
            }
        )
        yield html.table(
            ["kind of difference", "turns", "first difference"],
            [[kind, f"{many:,}", f"{again.first_kinds.get(kind, 0):,}"] for kind, many in again.kinds.items()],
            numeric={1, 2},
        )
    if report.examples:
        yield html.heading("Examples")
        yield html.table(
            ["artifact", "sampled", "retokenized", "row", "position"],
            [
                [one.artifact, _pieces(one.sampled_pieces), _pieces(one.retokenized_pieces), one.row, one.position]
                for one in report.examples
            ],
            numeric={4},
        )


def _bar(stratum: Stratum, colour: int) -> svg.Bar:
    rate = stratum.tokens
    return svg.Bar(stratum.value, 100 * rate.share, 100 * rate.low, 100 * rate.high, colour)


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3%} [{rate.low:.3%}, {rate.high:.3%}], {rate.changed:,} of {rate.total:,}"


def _pieces(pieces: tuple[str, ...]) -> str:
    return " ".join(f"‹{piece}›" for piece in pieces).replace("\n", "↵").replace("\t", "⇥")
