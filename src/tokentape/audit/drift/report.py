"""What the drift meter says: frozen, and plain values throughout."""

from __future__ import annotations

from dataclasses import dataclass

from tokentape.audit.drift.rerender import Rerendered
from tokentape.audit.intervals import Rate


@dataclass(frozen=True, slots=True)
class Stratum:
    """The part of the tokens that has one value of a dimension."""

    dimension: str
    """`region`, `script`, `turn`, `temperature`, `weights`, or the name of a column."""
    value: str
    tokens: Rate
    completions: Rate | None
    """None for regions and scripts, which are of tokens."""


@dataclass(frozen=True, slots=True)
class ArtifactCount:
    """Changed stretches of one artifact."""

    name: str
    """One of `tokendiff.ARTIFACTS`."""
    meaning: str
    stretches: int
    tokens: int
    """Sampled tokens in them."""


@dataclass(frozen=True, slots=True)
class Example:
    """A changed stretch."""

    artifact: str
    row: str
    position: int
    """Of its first token, in the row."""
    sampled: tuple[int, ...]
    retokenized: tuple[int, ...]
    sampled_pieces: tuple[str, ...]
    retokenized_pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long changed stretches are: median, 95th percentile, and the largest."""

    median: int = 0
    p95: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a trainer that keeps text and tokenizes again would have made of the rows."""

    rows: int
    """With exact ids: one for each sequence."""
    rows_if_forked: int
    """If it begins a new row wherever a later turn's context is not what was sampled."""
    tokens: int
    tokens_if_forked: int
    """Of all those rows together: what is trained on, context included."""
    masked_if_realigned: int
    """Sampled tokens that it would have to mask if it keeps one row and puts its own ids in place."""


@dataclass(frozen=True, slots=True)
class LogprobChange:
    """What the model says of the same bytes in other ids, in nats: sampled - retokenized, over whole completions."""

    completions: int
    mean: float
    mean_absolute: float
    largest: float
    per_changed_token: float
    """Mean absolute difference over the changed sampled tokens."""


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What the meter found."""

    tokenizer_sha256: str
    rows: int
    completions: Rate
    """P(encode(decode(ids)) != ids), over completions; Wilson's interval."""
    tokens: Rate
    """Sampled tokens that are not there again, as the same id over the same bytes; bootstrap over rows."""
    seams: Rate
    """Completions whose first token would go with the context if both were encoded as one text. Not in `tokens`."""
    unknown_tokens: int
    """Halves of characters at the ends of completions that were cut off there; not in `tokens`."""
    other_text: int
    """Completions whose text itself changed: bytes that are no UTF-8, another normal form."""
    artifacts: tuple[ArtifactCount, ...]
    """Most frequent first."""
    same_count: int
    """Changed stretches that have as many tokens again."""
    more_tokens: int
    """Those that retokenizing makes more tokens of."""
    fewer_tokens: int
    span_tokens: Lengths
    """Of changed stretches, in sampled tokens."""
    resync_bytes: Lengths
    """Of changed stretches: bytes until both sides are at a boundary again."""
    strata: tuple[Stratum, ...]
    cost: Cost
    examples: tuple[Example, ...]
    logprobs: LogprobChange | None = None
    rerendered: Rerendered | None = None
