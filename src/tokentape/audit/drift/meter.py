"""Measure how often encoding the text of sampled ids gives other ids, where, and what that would cost.

Reports P(encode(decode(ids)) != ids) over completions and over tokens, with confidence intervals: which stretches drift
(`tokendiff.ARTIFACTS`), how long they are, and how that depends on region, script, turn, temperature and weights. Reads
rows one at a time and keeps sums, so memory does not grow with the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit.drift.regions import REGIONS, SCRIPTS, TokenScripts, token_regions
from tokentape.audit.drift.report import (
    ArtifactCount,
    Cost,
    DriftReport,
    Example,
    Lengths,
    LogprobChange,
    Stratum,
)
from tokentape.audit.id_rows import IdRow, Span
from tokentape.audit.intervals import Key, Rate, Sums, wilson
from tokentape.audit.tokendiff import ARTIFACTS, Comparison, Retokenizer, RoundTrip, check_vocabulary
from tokentape.chat.tokenizer import Tokenizer
from tokentape.types import Logprobs, TokenIds

Forward: TypeAlias = Callable[[TokenIds], Logprobs]
"""Ids to the logprob of each given those before it, NaN for the first. Shape [tokens]."""

BATCH_TOKENS = 2**17
"""So many sampled tokens are encoded in one call."""

EXAMPLES = 3
"""Kept of each artifact."""

VALUES = 40
"""Of each dimension; what comes later is counted under `other`."""

_SEAM = 16
"""Tokens on either side of a seam that are encoded to see whether it holds."""

_LONGEST = 64

ALL: Key = ("all", "all")
"""Under which everything is counted."""


class DriftMeter:
    """Takes rows with `add`; `report` says what was found up to then.

    With `forward` the first `forward_limit` drifted completions go through a model in both spellings.

    Rows may be measured in several places: meters that are `partial` give parts, and one that is not merges them, in
    the order of the rows. It then reports what it would have reported of all the rows.

    >>> meter = DriftMeter(Tokenizer.load("path/to/model"))      # doctest: +SKIP
    >>> for row in iter_rows("runs/serve"):                      # doctest: +SKIP
    ...     meter.add(row)
    >>> meter.report().tokens.share                              # doctest: +SKIP
    0.0031
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        forward: Forward | None = None,
        forward_limit: int = 100,
        partial: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._retokenizer = Retokenizer(tokenizer)
        self._scripts = TokenScripts(tokenizer)
        self._forward = forward
        self._forward_limit = forward_limit
        self._waiting: list[IdRow] = []
        self._waiting_tokens = 0
        self._partial = partial
        self._tally = self._new_tally()

    def add(self, row: IdRow) -> None:
        """Measure a row. Raises `InvalidRequest` if it has ids that are not of this tokenizer."""
        check_vocabulary(row.ids, self.tokenizer, row.name)
        self._waiting.append(row)
        self._waiting_tokens += _size(row)
        if self._waiting_tokens >= BATCH_TOKENS:
            self._flush()

    def report(self) -> DriftReport:
        """What was found so far."""
        self._flush()
        return self._tally.report(self.tokenizer.sha256)

    def part(self) -> DriftTally:
        """What was found since the last part. For a `partial` meter."""
        self._flush()
        part, self._tally = self._tally, self._new_tally()
        return part

    def merge(self, part: DriftTally) -> None:
        """Add what another meter with this tokenizer found in the rows that come next."""
        self._flush()
        self._tally.merge(part)

    def _new_tally(self) -> DriftTally:
        return DriftTally(None if self._partial else Sums())

    def _flush(self) -> None:
        rows, self._waiting, self._waiting_tokens = self._waiting, [], 0
        completions = [(row, span) for row in rows for span in row.spans if span.end > span.start]
        trips = iter(self._retokenizer.round_trips([row.ids[span.start : span.end] for row, span in completions]))
        held = iter(self._seams_held(completions))
        for row in rows:
            counts: Counter[Key] = Counter()
            drifted: Counter[Key] = Counter()
            ends = []
            for span in row.spans:
                if span.end == span.start:
                    continue
                trip = next(trips)
                changes = self._retokenizer.compare(trip) if trip.drifted else None
                self._count(row, span, trip, changes, counts, drifted)
                seam = next(held)
                if seam is not None:
                    self._tally.seams += 1
                    self._tally.changed_seams += not seam
                if changes is not None:
                    ends.append(span.end)
                    self._measure_logprobs(row, span, trip, changes)
            self._tally.add_cost(row, ends)
            self._tally.add_sequence(_size(row), {key: (drifted[key], many) for key, many in counts.items()})

    def _count(
        self,
        row: IdRow,
        span: Span,
        trip: RoundTrip,
        changes: Comparison | None,
        counts: Counter[Key],
        drifted: Counter[Key],
    ) -> None:
        """Add a completion's tokens to `counts`, and those that changed to `drifted`."""
        tally = self._tally
        tally.unknown += trip.head + trip.tail
        labels: list[Key] = [ALL, *((name, tally.value(name, value)) for name, value in span.labels.items())]
        for label in labels:
            tally.completions[label] += 1
            tally.changed_completions[label] += changes is not None
            counts[label] += len(trip.ids)
        regions = token_regions(trip.content, self._retokenizer.pieces(trip.ids))
        of_tokens = (("script", SCRIPTS, self._scripts.of(trip.ids)), ("region", REGIONS, regions))
        for dimension, names, codes in of_tokens:
            for name, many in _by_name(names, codes):
                counts[dimension, name] += many
        if regions is None:
            counts["region", REGIONS[0]] += len(trip.ids)
        if changes is None:
            return
        mask = changes.changed()
        changed = int(mask.sum())
        for label in labels:
            drifted[label] += changed
        for dimension, names, codes in of_tokens:
            for name, many in _by_name(names, None if codes is None else codes[mask]):
                drifted[dimension, name] += many
        if regions is None:
            drifted["region", REGIONS[0]] += changed
        tally.add_changes(row, span, trip, changes, self._retokenizer)

    def _seams_held(self, completions: list[tuple[IdRow, Span]]) -> list[bool | None]:
        """Whether text around the start of a completion has a token boundary there; None where it must."""
        windows: list[tuple[int, TokenIds, int] | None] = []
        for row, span in completions:
            context = row.ids[max(span.start - _SEAM, 0) : span.start]
            controls = [n for n, one in enumerate(context.tolist()) if self.tokenizer.control_by_id(one) is not None]
            context = context[controls[-1] + 1 :] if controls else context
            if not len(context) or self.tokenizer.control_by_id(int(row.ids[span.start])) is not None:
                windows.append(None)
                continue
            window = row.ids[span.start - len(context) : min(span.start + _SEAM, span.end)]
            windows.append((len(b"".join(self._retokenizer.pieces(context))), window, len(context)))
        trips = iter(self._retokenizer.round_trips([window[1] for window in windows if window is not None]))
        found: list[bool | None] = []
        for one in windows:
            if one is None:
                found.append(None)
                continue
            trip = next(trips)
            if trip.head or not trip.drifted:
                found.append(None if trip.head else True)
                continue
            ends = np.cumsum([len(piece) for piece in self._retokenizer.pieces(trip.again)])
            found.append(bool((ends == one[0]).any()))
        return found

    def _measure_logprobs(self, row: IdRow, span: Span, trip: RoundTrip, changes: Comparison) -> None:
        if self._forward is None or trip.head or len(self._tally.logprobs) >= self._forward_limit:
            return
        context = row.ids[: span.start]
        sampled, again = (
            float(np.nansum(self._forward(np.concatenate([context, ids]))[len(context) :].astype(np.float64)))
            for ids in (trip.ids, trip.again)
        )
        self._tally.logprobs.append((sampled - again, int(changes.changed().sum())))


@dataclass(slots=True)
class DriftTally:
    """Sums over what has been seen."""

    sums: Sums | None
    """None in a part: sequences are kept as they are then, to be drawn where parts are merged."""
    sequences: list[tuple[int, dict[Key, tuple[int, int]]]] = field(default_factory=list)
    """Not yet in `sums`: the size of each, and (changed, all) by key."""
    waiting: int = 0
    """Size of these together."""
    completions: Counter[Key] = field(default_factory=Counter)
    changed_completions: Counter[Key] = field(default_factory=Counter)
    rows: int = 0
    unknown: int = 0
    other_text: int = 0
    seams: int = 0
    changed_seams: int = 0
    stretches: Counter[str] = field(default_factory=Counter)
    stretch_tokens: Counter[str] = field(default_factory=Counter)
    shapes: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    resyncs: Counter[int] = field(default_factory=Counter)
    cost: Cost = field(default_factory=lambda: Cost(0, 0, 0, 0, 0))
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    values: dict[str, set[str]] = field(default_factory=dict)

    def value(self, dimension: str, value: str) -> str:
        """The value to count under."""
        known = self.values.setdefault(dimension, set())
        # A part keeps them all: which have a place of their own is known where parts are merged.
        if self.sums is not None and value not in known and len(known) >= VALUES:
            return "other"
        known.add(value)
        return value

    def add_sequence(self, size: int, counts: dict[Key, tuple[int, int]]) -> None:
        """Count a row's tokens."""
        self.sequences.append((size, counts))
        self.waiting += size
        # The bootstrap's draws depend on what is drawn at once, so that is the same in one place and in several.
        if self.waiting >= BATCH_TOKENS:
            self._draw()

    def _draw(self) -> None:
        if self.sums is not None and self.sequences:
            self.sums.add([counts for _, counts in self.sequences])
            self.sequences, self.waiting = [], 0

    def merge(self, part: DriftTally) -> None:
        """Add what was seen next, elsewhere."""
        for size, counts in part.sequences:
            known: dict[Key, tuple[int, int]] = {}
            for key, (changed, many) in counts.items():
                to = self._key(key, part)
                before = known.get(to, (0, 0))
                known[to] = (before[0] + changed, before[1] + many)
            self.add_sequence(size, known)
        for mine, theirs in (
            (self.completions, part.completions),
            (self.changed_completions, part.changed_completions),
        ):
            for key, many in theirs.items():
                mine[self._key(key, part)] += many
        self.rows += part.rows
        self.unknown += part.unknown
        self.other_text += part.other_text
        self.seams += part.seams
        self.changed_seams += part.changed_seams
        self.stretches.update(part.stretches)
        self.stretch_tokens.update(part.stretch_tokens)
        self.shapes.update(part.shapes)
        self.lengths.update(part.lengths)
        self.resyncs.update(part.resyncs)
        both = zip(astuple(self.cost), astuple(part.cost), strict=True)
        self.cost = Cost(*(one + other for one, other in both))
        self.logprobs += part.logprobs
        for name, examples in part.examples.items():
            self.examples[name] = [*self.examples.get(name, ()), *examples][:EXAMPLES]

    def _key(self, key: Key, part: DriftTally) -> Key:
        """What a part's key is counted under here, where other values may have come before its own."""
        dimension, value = key
        return (dimension, self.value(dimension, value)) if dimension in part.values else key

    def add_cost(self, row: IdRow, drifted_ends: list[int]) -> None:
        """Count a row whose completions that end at `drifted_ends` drifted."""
        self.rows += 1
        last = row.spans[-1].end if row.spans else 0
        forks = [end for end in drifted_ends if end < last]
        self.cost = replace(
            self.cost,
            rows=self.cost.rows + 1,
            rows_if_forked=self.cost.rows_if_forked + 1 + len(forks),
            tokens=self.cost.tokens + len(row.ids),
            tokens_if_forked=self.cost.tokens_if_forked + len(row.ids) + sum(forks),
        )

    def add_changes(
        self, row: IdRow, span: Span, trip: RoundTrip, changes: Comparison, retokenizer: Retokenizer
    ) -> None:
        """Count what changed in a completion."""
        self.other_text += not all(one.same_bytes for one in changes.differences)
        for one in changes.differences:
            name = one.change
            sampled = trip.ids[one.expected_start : one.expected_end]
            again = trip.again[one.recorded_start : one.recorded_end]
            self.stretches[name] += 1
            self.stretch_tokens[name] += len(sampled)
            self.shapes[int(np.sign(len(again) - len(sampled)))] += 1
            self.lengths[min(len(sampled), _LONGEST)] += 1
            pieces = retokenizer.pieces(sampled)
            self.resyncs[min(sum(map(len, pieces)), 16 * _LONGEST)] += 1
            kept = self.examples.setdefault(name, [])
            if len(kept) < EXAMPLES:
                kept.append(
                    Example(
                        artifact=name,
                        row=row.name,
                        position=span.start + trip.head + one.expected_start,
                        sampled=tuple(sampled.tolist()),
                        retokenized=tuple(again.tolist()),
                        sampled_pieces=_shown(pieces),
                        retokenized_pieces=_shown(retokenizer.pieces(again)),
                    )
                )

    def report(self, sha256: str) -> DriftReport:
        """All sums as a report."""
        assert self.sums is not None
        self._draw()
        tokens = self.sums.rate(ALL)
        return DriftReport(
            tokenizer_sha256=sha256,
            rows=self.rows,
            completions=self._completions(ALL),
            tokens=tokens,
            seams=Rate(self.changed_seams, self.seams, *wilson(self.changed_seams, self.seams)),
            unknown_tokens=self.unknown,
            other_text=self.other_text,
            artifacts=tuple(
                ArtifactCount(name, ARTIFACTS[name].meaning, many, self.stretch_tokens[name])
                for name, many in self.stretches.most_common()
            ),
            same_count=self.shapes[0],
            more_tokens=self.shapes[1],
            fewer_tokens=self.shapes[-1],
            span_tokens=_lengths(self.lengths),
            resync_bytes=_lengths(self.resyncs),
            strata=tuple(self._strata(self.sums)),
            cost=replace(self.cost, masked_if_realigned=tokens.changed),
            examples=tuple(one for name in self.stretches for one in self.examples[name]),
            logprobs=self._logprobs(),
        )

    def _completions(self, label: Key) -> Rate:
        changed, total = self.changed_completions[label], self.completions[label]
        return Rate(changed, total, *wilson(changed, total))

    def _strata(self, sums: Sums) -> Iterable[Stratum]:
        keys = [key for key in sums.keys() if key != ALL]  # noqa: SIM118 - it is no mapping
        for dimension in dict.fromkeys(name for name, _ in keys):
            for key in sorted((one for one in keys if one[0] == dimension), key=_by_value):
                completions = self._completions(key) if key in self.completions else None
                yield Stratum(*key, sums.rate(key), completions)

    def _logprobs(self) -> LogprobChange | None:
        if not self.logprobs:
            return None
        apart = np.array([one for one, _ in self.logprobs])
        tokens = sum(many for _, many in self.logprobs)
        return LogprobChange(
            completions=len(apart),
            mean=float(apart.mean()),
            mean_absolute=float(np.abs(apart).mean()),
            largest=float(np.abs(apart).max()),
            per_changed_token=float(np.abs(apart).sum() / max(tokens, 1)),
        )


def measure_drift(
    rows: Iterable[IdRow], tokenizer: Tokenizer, *, forward: Forward | None = None, forward_limit: int = 100
) -> DriftReport:
    """Measure the drift of all `rows`. Raises as `DriftMeter.add`."""
    meter = DriftMeter(tokenizer, forward=forward, forward_limit=forward_limit)
    for row in rows:
        meter.add(row)
    return meter.report()


def _size(row: IdRow) -> int:
    """What it counts for in a batch."""
    return sum(span.end - span.start for span in row.spans) + 2 * _SEAM


def _by_name(names: Sequence[str], codes: npt.NDArray[np.uint8] | None) -> list[tuple[str, int]]:
    """How many of the codes are of each name; those that there are none of are left out."""
    if codes is None:
        return []
    many = np.bincount(codes, minlength=len(names))
    return [(names[n], int(many[n])) for n in np.flatnonzero(many).tolist()]


def _shown(pieces: Iterable[bytes]) -> tuple[str, ...]:
    """Pieces for people: what is no UTF-8 as its bytes."""
    return tuple(piece.decode("utf-8", "backslashreplace") for piece in pieces)


def _lengths(counts: Mapping[int, int]) -> Lengths:
    if not counts:
        return Lengths()
    values, many = (np.array(side) for side in zip(*sorted(counts.items()), strict=True))
    upto = np.cumsum(many)
    median, p95 = (int(values[np.searchsorted(upto, share * upto[-1])]) for share in (0.5, 0.95))
    return Lengths(median, p95, int(values[-1]))


def _by_value(label: Key) -> tuple[float, str]:
    """Numbers in order of size, and in front of names."""
    number = label[1].split("-")[0].removesuffix(" on")
    try:
        return float(number), label[1]
    except ValueError:
        return float("inf"), label[1]
