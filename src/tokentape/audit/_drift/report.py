"""The report of the drift meter, and its layout for a terminal or a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tokentape.audit._drift.rerender import Rerendered
from tokentape.audit._report import Bars, Block, Facts, Heading, Paragraph, Report, Table, rate_bar
from tokentape.audit._statistics import Rate


@dataclass(frozen=True, slots=True)
class Stratum:
    """The drift of tokens and completions that share one value of a dimension."""

    dimension: str
    """`region`, `script`, `turn`, `temperature`, `weights`, or the name of a column."""
    value: str
    tokens: Rate
    completions: Rate | None
    """None for regions and scripts, which vary within a completion."""


@dataclass(frozen=True, slots=True)
class ArtifactCount:
    """The number of changed stretches of one artifact, and of the sampled tokens in them."""

    name: str
    meaning: str
    stretches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Example:
    """A changed stretch of a row."""

    artifact: str
    row: str
    position: int
    sampled: tuple[int, ...]
    retokenized: tuple[int, ...]
    sampled_pieces: tuple[str, ...]
    retokenized_pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of changed stretches: median, 95th percentile and the largest."""

    median: int = 0
    p95: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost for a trainer that keeps text and tokenizes it again, if it forks rows or realigns ids."""

    rows: int
    """The number of rows with exact ids: one per sequence."""
    rows_if_forked: int
    """The number of rows if every drifted completion that a turn follows starts a new row."""
    tokens: int
    tokens_if_forked: int
    """The number of tokens in all rows, including the contexts that forked rows repeat."""
    masked_if_realigned: int
    """The number of sampled tokens to mask if the trainer keeps one row, with its own ids."""


@dataclass(frozen=True, slots=True)
class LogprobChange:
    """The log-probability of the sampled ids minus that of the retokenized ids, in nats per completion."""

    completions: int
    mean: float
    mean_absolute: float
    largest: float
    per_changed_token: float
    """Mean absolute difference over the changed sampled tokens."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The result of the drift meter."""

    tokenizer_sha256: str
    rows: int
    completions: Rate
    """P(encode(decode(ids)) != ids), over completions."""
    tokens: Rate
    """Sampled tokens for which encoding does not return the same id for the same bytes."""
    seams: Rate
    """Completions whose first token would merge with the context if both were encoded as one text. Not in `tokens`."""
    unknown_tokens: int
    """Tokens with incomplete characters where completions were cut off. Not in `tokens`."""
    other_text: int
    """Completions whose text changes too: bytes that are not UTF-8, or a different normal form."""
    artifacts: tuple[ArtifactCount, ...]
    """Most frequent first."""
    same_count: int
    more_tokens: int
    fewer_tokens: int
    span_tokens: Lengths
    resync_bytes: Lengths
    """Distances in bytes until both sides have a token boundary again."""
    strata: tuple[Stratum, ...]
    cost: Cost
    examples: tuple[Example, ...]
    logprobs: LogprobChange | None = None
    rerendered: Rerendered | None = None


def drift_layout(report: DriftReport, source: str) -> Report:
    return Report(f"Drift of {source}", list(_blocks(report)))


def _blocks(report: DriftReport) -> Iterator[Block]:
    yield Paragraph(
        "How often decoding and encoding sampled ids gives different ids. Brackets are 95 % intervals over sessions, "
        "because turns of one session are not independent."
    )
    if report.completions.low is not None:
        yield Paragraph(
            "If a few long sessions hold most of the turns and drift more than the others, the intervals are too "
            "narrow: in simulations they then contained the true share in 87 to 90 % of the runs, not in 95 %."
        )
    facts = {
        "rows": f"{report.rows:,}",
        "completions that drifted": _rate(report.completions),
        "sampled tokens that changed": _rate(report.tokens),
        "completions that begin within a token": _rate(report.seams) if report.seams.total else "",
        "unknown tokens, at cut ends": f"{report.unknown_tokens:,}",
        "completions with other text": f"{report.other_text:,}",
        "tokenizer.json": report.tokenizer_sha256[:16],
    }
    yield Facts({name: value for name, value in facts.items() if value})
    if report.artifacts:
        yield Heading("What changed")
        total = sum(artifact.stretches for artifact in report.artifacts)
        rows = [
            [row.name, f"{row.stretches:,}", f"{row.stretches / total:.1%}", f"{row.tokens:,}", row.meaning]
            for row in report.artifacts
        ]
        yield Table(["artifact", "stretches", "share", "sampled tokens", ""], rows, {1, 2, 3})
        span, resync = report.span_tokens, report.resync_bytes
        yield Facts(
            {
                "stretches with as many, more, fewer tokens": (
                    f"{report.same_count:,}, {report.more_tokens:,}, {report.fewer_tokens:,}"
                ),
                "sampled tokens of a stretch": f"median {span.median}, p95 {span.p95}",
                "bytes until both have a boundary": f"median {resync.median}, p95 {resync.p95}",
            }
        )
    # Without drift, every line of a breakdown would be the same zero.
    strata = report.strata if report.completions.changed else ()
    for n, dimension in enumerate(dict.fromkeys(stratum.dimension for stratum in strata)):
        yield Heading(f"By {dimension}")
        rates = [(stratum.value, stratum.tokens) for stratum in strata if stratum.dimension == dimension]
        yield Bars([rate_bar(name, rate, n, 100) for name, rate in rates], "% of the tokens changed")
    yield from _cost(report)
    if report.rerendered is not None:
        yield from _rerendered(report.rerendered)
    if report.examples:
        yield Heading("Examples")
        for example in report.examples:
            yield Facts(
                {
                    example.artifact: f"{_pieces(example.sampled_pieces)} -> {_pieces(example.retokenized_pieces)}",
                    "ids": f"{list(example.sampled)} -> {list(example.retokenized)}",
                    "place": f"{example.row}, token {example.position}",
                }
            )


def _cost(report: DriftReport) -> Iterator[Block]:
    cost = report.cost
    yield Heading("What tokenizing again would have cost")
    yield Table(
        ["", "exact ids", "tokenized again"],
        [
            ["rows, if it forks", f"{cost.rows:,}", f"{cost.rows_if_forked:,}"],
            ["tokens trained on, if it forks", f"{cost.tokens:,}", f"{cost.tokens_if_forked:,}"],
            ["sampled tokens masked, if it realigns", "0", f"{cost.masked_if_realigned:,}"],
        ],
        {1, 2},
    )
    logprobs = report.logprobs
    if logprobs is not None:
        yield Paragraph(
            f"Log-probability of the same text, sampled - retokenized: {logprobs.mean:+.3f} nats per completion, "
            f"absolute {logprobs.mean_absolute:.3f}, largest {logprobs.largest:.3f}, over {logprobs.completions} "
            "completions."
        )


def _rerendered(again: Rerendered) -> Iterator[Block]:
    yield Heading("Rendered again from messages")
    yield Facts(
        {
            "later turns with a different context": _rate(again.turns),
            "sampled tokens changed in them": f"{again.changed_sampled_tokens:,} of {again.sampled_tokens:,}",
            "branches whose first context already differs": f"{again.changed_roots:,}",
            "turns that the template refuses": f"{again.refused:,}",
        }
    )
    rows = [[kind, f"{many:,}", f"{again.first_kinds.get(kind, 0):,}"] for kind, many in again.kinds.items()]
    if rows:
        yield Table(["kind of difference", "turns", "first difference"], rows, {1, 2})


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3%}, {rate.changed:,} of {rate.total:,} {rate.interval}"


def _pieces(pieces: tuple[str, ...]) -> str:
    return " ".join(json.dumps(piece, ensure_ascii=False) for piece in pieces)
