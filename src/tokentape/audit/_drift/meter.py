"""Measure how often encoding the text of sampled ids gives different ids, where, and what that would cost.

Regions, such as reasoning or code, are found by widely used delimiters, not by a model's template, so that files
without a template can be measured too. Text without delimiters is prose. A token's script is that of its first letter.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape._batches import batched
from tokentape.audit._drift import report as reports
from tokentape.audit._id_rows import IdRow, Span
from tokentape.audit._statistics import Shares
from tokentape.audit._tokendiff.comparing import Comparison
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.audit._tokendiff.retokenizing import Retokenizer, RoundTrip, check_vocabulary
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Logprobs, TokenIds

Forward: TypeAlias = Callable[[TokenIds], Logprobs]
"""Returns the logprob of each id given the ids before it, NaN for the first. Shape [tokens]."""

BATCH_TOKENS = 2**17

EXAMPLES = 3

VALUES = 40
"""The maximum number of values per dimension. Further values are counted as `other`."""

_SEAM = 16
"""The number of tokens to encode on each side of a seam, the boundary between context and completion."""

_LONGEST = 64

Key: TypeAlias = tuple[str, str]
"""A dimension and its value."""

ALL: Key = ("all", "all")

_OTHER = "other"
_SEAMS = ("seams", *ALL)


@dataclass(slots=True)
class RowDrift:
    """The counts of one row."""

    session: str
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Sampled tokens by key; completions by `completions` and key; completions that begin within a text as `_SEAMS`."""
    changed: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """How many of the counted tokens or completions changed."""
    sums: Counter[str] = field(default_factory=Counter)
    """Numbers of rows, ids, unknown tokens, completions whose text changed, forks, and ids in the forked rows."""
    stretches: list[tuple[str, int, int, int, reports.Example | None]] = field(default_factory=list)
    """Per stretch: artifact, numbers of sampled tokens, retokenized tokens and bytes, and an example or None."""
    logprobs: list[tuple[float, int]] = field(default_factory=list)
    """Per drifted completion: logprob sampled - retokenized in nats, and the number of changed tokens."""

    def count(self, key: tuple[str, ...], many: int, changed: int) -> None:
        self.counts[key] += many
        self.changed[key] += changed


class RowMeter:
    """Measures rows. With `forward`, also computes the logprobs of the first `forward_limit` drifted completions."""

    def __init__(self, tokenizer: Tokenizer, *, forward: Forward | None = None, forward_limit: int = 100) -> None:
        self.tokenizer = tokenizer
        self._retokenizer = Retokenizer(tokenizer)
        self._scripts = TokenScripts(tokenizer)
        self._forward, self._forwards_left = forward, forward_limit

    def measure(self, rows: Iterable[IdRow]) -> Iterator[RowDrift]:
        """Yield the counts of each row. Raises `InvalidRequest` for ids that are not in the tokenizer's vocabulary."""
        for batch in batched(rows, BATCH_TOKENS, _tokens_to_encode):
            for row in batch:
                check_vocabulary(row.ids, self.tokenizer, row.name)
            yield from self._batch(batch)

    def _batch(self, rows: Sequence[IdRow]) -> Iterator[RowDrift]:
        completions = [(row, span) for row in rows for span in row.spans if span.end > span.start]
        trips = iter(self._retokenizer.round_trips([row.ids[span.start : span.end] for row, span in completions]))
        seams = iter(self._seams_held(completions))
        for row in rows:
            row_drift = RowDrift(row.session or row.name, sums=Counter(rows=1, tokens=len(row.ids)))
            for span in (span for span in row.spans if span.end > span.start):
                trip, seam = next(trips), next(seams)
                changes = self._retokenizer.compare(trip) if trip.drifted else None
                self._count(row_drift, span, trip, changes)
                if seam is not None:
                    row_drift.count(_SEAMS, 1, not seam)
                if changes is not None:
                    self._add_changes(row_drift, row, span, trip, changes)
                    if span.end < row.spans[-1].end:
                        row_drift.sums.update({"forks": 1, "fork tokens": span.end})
            yield row_drift

    def _count(self, row_drift: RowDrift, span: Span, trip: RoundTrip, changes: Comparison | None) -> None:
        row_drift.sums["unknown"] += trip.head + trip.tail
        mask = np.zeros(len(trip.ids), np.bool_) if changes is None else changes.changed()
        for key in (ALL, *span.labels.items()):
            row_drift.count(("completions", *key), 1, changes is not None)
            row_drift.count(key, len(mask), int(mask.sum()))
        regions = token_regions(trip.content, self._retokenizer.pieces(trip.ids))
        if regions is None:
            row_drift.count(("region", REGIONS[0]), len(mask), int(mask.sum()))
        for dimension, names, codes in (
            ("script", SCRIPTS, self._scripts.of(trip.ids)),
            ("region", REGIONS, regions if regions is not None else np.zeros(0, np.uint8)),
        ):
            many, changed = np.bincount(codes), np.bincount(codes[mask[: len(codes)]], minlength=len(names))
            for code in np.flatnonzero(many).tolist():
                row_drift.count((dimension, names[code]), int(many[code]), int(changed[code]))

    def _add_changes(self, row_drift: RowDrift, row: IdRow, span: Span, trip: RoundTrip, changes: Comparison) -> None:
        row_drift.sums["other text"] += not all(difference.same_bytes for difference in changes.differences)
        for difference in changes.differences:
            sampled = trip.ids[difference.expected_start : difference.expected_end]
            again = trip.again[difference.recorded_start : difference.recorded_end]
            pieces = self._retokenizer.pieces(sampled)
            example = None
            if sum(name == difference.change for name, *_ in row_drift.stretches) < EXAMPLES:
                example = reports.Example(
                    artifact=difference.change,
                    row=row.name,
                    position=span.start + trip.head + difference.expected_start,
                    sampled=tuple(sampled.tolist()),
                    retokenized=tuple(again.tolist()),
                    sampled_pieces=_shown(pieces),
                    retokenized_pieces=_shown(self._retokenizer.pieces(again)),
                )
            row_drift.stretches.append((difference.change, len(sampled), len(again), sum(map(len, pieces)), example))
        if self._forward is not None and not trip.head and self._forwards_left > 0:
            self._forwards_left -= 1
            context = row.ids[: span.start]
            sums = [
                float(np.nansum(self._forward(np.concatenate([context, ids]))[len(context) :].astype(np.float64)))
                for ids in (trip.ids, trip.again)
            ]
            row_drift.logprobs.append((sums[0] - sums[1], int(changes.changed().sum())))

    def _seams_held(self, completions: list[tuple[IdRow, Span]]) -> list[bool | None]:
        """Return for each completion if encoding again keeps the boundary before it; None if that was not tested."""
        windows: dict[int, tuple[TokenIds, int]] = {}
        for n, (row, span) in enumerate(completions):
            start = max(span.start - _SEAM, 0)
            around = row.ids[start : span.start + 1].tolist()
            start += 1 + max((i for i, token in enumerate(around) if self.tokenizer.control_by_id(token)), default=-1)
            if start < span.start:
                window = row.ids[start : min(span.start + _SEAM, span.end)]
                windows[n] = window, len(b"".join(self._retokenizer.pieces(row.ids[start : span.start])))
        keeps: list[bool | None] = [None] * len(completions)
        trips = self._retokenizer.round_trips([window for window, _ in windows.values()])
        for (n, (_, length)), trip in zip(windows.items(), trips, strict=True):
            if not trip.head:
                ends = np.cumsum([len(piece) for piece in self._retokenizer.pieces(trip.again)])
                keeps[n] = not trip.drifted or bool((ends == length).any())
        return keeps


class DriftTally:
    """Adds up the counts of rows for a report."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._values: dict[str, set[str]] = {}
        self._counts: Counter[str] = Counter()
        self._stretches: Counter[str] = Counter()
        self._stretch_tokens: Counter[str] = Counter()
        self._shapes: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()
        self._resyncs: Counter[int] = Counter()
        self._logprobs: list[tuple[float, int]] = []
        self._examples: dict[str, list[reports.Example]] = {}

    def add(self, row: RowDrift) -> None:
        self._shares.add(row.session, [(self._key(key), row.changed[key], many) for key, many in row.counts.items()])
        self._counts.update(row.sums)
        for name, sampled, again, size, example in row.stretches:
            self._stretches[name] += 1
            self._stretch_tokens[name] += sampled
            self._shapes[int(np.sign(again - sampled))] += 1
            self._lengths[min(sampled, _LONGEST)] += 1
            self._resyncs[min(size, 16 * _LONGEST)] += 1
            examples = self._examples.setdefault(name, [])
            if example is not None and len(examples) < EXAMPLES:
                examples.append(example)
        self._logprobs += row.logprobs

    def report(self, tokenizer_sha256: str) -> reports.DriftReport:
        counts, tokens = self._counts, self._shares.rate(ALL)
        rows, ids = counts["rows"], counts["tokens"]
        return reports.DriftReport(
            tokenizer_sha256=tokenizer_sha256,
            rows=rows,
            completions=self._shares.rate(("completions", *ALL)),
            tokens=tokens,
            seams=self._shares.rate(_SEAMS),
            unknown_tokens=counts["unknown"],
            other_text=counts["other text"],
            artifacts=tuple(
                reports.ArtifactCount(name, ARTIFACTS[name].meaning, many, self._stretch_tokens[name])
                for name, many in self._stretches.most_common()
            ),
            same_count=self._shapes[0],
            more_tokens=self._shapes[1],
            fewer_tokens=self._shapes[-1],
            span_tokens=_lengths(self._lengths),
            resync_bytes=_lengths(self._resyncs),
            strata=tuple(self._strata()),
            cost=reports.Cost(rows, rows + counts["forks"], ids, ids + counts["fork tokens"], tokens.changed),
            examples=tuple(example for name in self._stretches for example in self._examples[name]),
            logprobs=self._logprob_change(),
        )

    def _key(self, key: tuple[str, ...]) -> tuple[str, ...]:
        """Return the key, with `_OTHER` as its value if the dimension already has `VALUES` values."""
        *before, dimension, value = key
        values = self._values.setdefault(dimension, set())
        if value not in values and len(values) >= VALUES:
            return (*before, dimension, _OTHER)
        values.add(value)
        return key

    def _strata(self) -> Iterator[reports.Stratum]:
        keys = set(self._shares.keys())
        for dimension, values in self._values.items():
            for key in sorted(((dimension, value) for value in {*values, _OTHER}), key=_by_value):
                if key in keys and key != ALL:
                    whole = ("completions", *key)
                    completions = self._shares.rate(whole) if whole in keys else None
                    yield reports.Stratum(*key, self._shares.rate(key), completions)

    def _logprob_change(self) -> reports.LogprobChange | None:
        if not self._logprobs:
            return None
        apart, tokens = np.array(self._logprobs).T
        size = np.abs(apart)
        per_token = float(size.sum() / max(tokens.sum(), 1))
        return reports.LogprobChange(len(apart), float(apart.mean()), float(size.mean()), float(size.max()), per_token)


def measure_drift(
    rows: Iterable[IdRow], tokenizer: Tokenizer, *, forward: Forward | None = None, forward_limit: int = 100
) -> reports.DriftReport:
    """Measure the drift of all `rows`.

    With `forward`, also compute the logprobs of up to `forward_limit` drifted completions, sampled and retokenized.
    Raises `InvalidRequest` for ids that are not in the tokenizer's vocabulary.

    >>> measure_drift(iter_rows("runs/serve"), Tokenizer.load("path/to/model")).tokens.share      # doctest: +SKIP
    0.0031
    """
    tally = DriftTally()
    for row in RowMeter(tokenizer, forward=forward, forward_limit=forward_limit).measure(rows):
        tally.add(row)
    return tally.report(tokenizer.sha256)


def _tokens_to_encode(row: IdRow) -> int:
    return sum(span.end - span.start for span in row.spans) + 2 * _SEAM


def _shown(pieces: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(piece.decode("utf-8", "backslashreplace") for piece in pieces)


def _lengths(counts: Mapping[int, int]) -> reports.Lengths:
    if not counts:
        return reports.Lengths()
    values, many = (np.array(side) for side in zip(*sorted(counts.items()), strict=True))
    upto = np.cumsum(many)
    median, p95 = (int(values[np.searchsorted(upto, share * upto[-1])]) for share in (0.5, 0.95))
    return reports.Lengths(median, p95, int(values[-1]))


def _by_value(key: Key) -> tuple[float, str]:
    number = key[1].split("-")[0].removesuffix(" on")
    return (float(number) if number.replace(".", "", 1).isdecimal() else float("inf")), key[1]


REGIONS = ("prose", "reasoning", "tool call", "code")

SCRIPTS: tuple[str, ...] = (
    "bytes", "space", "digit", "punctuation", "latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai",
    "cjk", "hiragana", "katakana", "hangul", "other letter", "control",
)  # fmt: skip

"""`bytes`: incomplete characters. `punctuation`: everything but letters, digits and spaces, including emoji."""

_PROSE, _REASONING, _CALL, _CODE = range(4)

_DELIMITER = re.compile(
    rb"(?P<think><think(?:ing)?>|\[THINK\]|<\|channel\|>analysis<\|message\|>)"
    rb"|(?P<unthink></think(?:ing)?>|\[/THINK\])"
    rb"|(?P<call><\|?tool_calls?(?:_begin|_section_begin)?\|?>|\[TOOL_CALLS\]|<\|python_tag\|>|<function="
    rb"|<\|channel\|>commentary to=)"
    rb"|(?P<uncall></tool_calls?>|<\|tool_calls?_(?:section_)?end\|>|</function>)"
    rb"|(?P<part><\|end\|>|<\|channel\|>final)"
    rb"|(?P<fence>```)"
)

_FIRST = re.compile(rb"[<`\[]")


def token_regions(content: bytes, pieces: Sequence[bytes]) -> npt.NDArray[np.uint8] | None:
    """Return each token's index in `REGIONS`, or None if all tokens are prose. The prompt may open the reasoning."""
    edges, kinds = [0], [_CALL if content.startswith((b'{"name"', b'[{"name"')) else _PROSE]
    for first in _FIRST.finditer(content):
        # Searching the whole text with `_DELIMITER` would take longer than encoding it.
        match = _DELIMITER.match(content, first.start())
        if match is None:
            continue
        now = kinds[-1]
        match match.lastgroup:
            case "think":
                offset, kind = match.start(), _REASONING
            case "unthink":
                if now == _PROSE and len(edges) == 1:
                    kinds[0] = _REASONING
                offset, kind = match.end(), _PROSE
            case "call":
                offset, kind = match.start(), _CALL
            case "uncall" | "part":
                offset, kind = match.end(), _PROSE
            case _ if now in (_PROSE, _CODE):
                offset, kind = (match.start(), _CODE) if now == _PROSE else (match.end(), _PROSE)
            case _:
                continue
        edges.append(offset)
        kinds.append(kind)
    if kinds == [_PROSE]:
        return None
    sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
    starts = np.cumsum(sizes) - sizes
    return np.array(kinds, np.uint8)[np.searchsorted(edges, starts, "right") - 1]


class TokenScripts:
    """Finds the script of tokens, each when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of = np.full(tokenizer.vocab_size, 255, np.uint8)

    def of(self, ids: TokenIds) -> npt.NDArray[np.uint8]:
        codes = self._of[ids]
        if (codes == 255).any():
            for token_id in np.unique(ids[codes == 255]).tolist():
                control = self._tokenizer.control_by_id(token_id) is not None
                name = "control" if control else _script(self._tokenizer.token_bytes(token_id))
                self._of[token_id] = SCRIPTS.index(name)
            codes = self._of[ids]
        return codes


def _script(piece: bytes) -> str:
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return "bytes"
    for char in text:
        if char.isalpha():
            name = unicodedata.name(char, "").split(" ")[0].lower()
            return name if name in SCRIPTS else "other letter"
    if any(char.isdigit() for char in text):
        return "digit"
    return "space" if not text.strip() else "punctuation"
