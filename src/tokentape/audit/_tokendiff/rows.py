"""Compare two files or data directories of ids row by row, and write the result as text, as JSON or for CI systems."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._id_rows import IdRow
from tokentape.audit._report import CiCase, CiFinding, ci_report, json_text
from tokentape.audit._report import escape_invisible as shown
from tokentape.audit._tokendiff.comparing import Comparison, Difference, compare
from tokentape.audit._tokendiff.kinds import ARTIFACTS, KINDS
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import Provenance

_Values: TypeAlias = npt.NDArray[Any]

_TEXT = 60
_MOST_IDS = 256
_ABSENT = "absent"
_VALUES = {"mask": "a token carries loss on one side only", "logprobs": "a token's log-probabilities differ"}
_RULES = {**KINDS, **_VALUES, _ABSENT: "a row that is on one side only"}


@dataclass(frozen=True, slots=True)
class ValueChange:
    """How the mask or the logprobs differ over the tokens that both sides have."""

    tokens: int
    """The number of tokens that were compared."""
    differing: int
    first: int
    """Position on the recorded side of the first token that differs; -1 if none does."""
    largest: float
    """Largest absolute difference of tokens that differ; NaN is ignored."""
    unknown: int = 0
    """The number of tokens that were not compared, because both sides have NaN."""


@dataclass(frozen=True, slots=True)
class RowComparison:
    """The comparison of one row."""

    name: str
    line: int
    """The row's line on the recorded side, or on the only side that has it."""
    comparison: Comparison | None
    """None if only one side has the row."""
    only: str | None = None
    """The only side that has the row, `expected` or `recorded`; None if both have it."""
    mask: ValueChange | None = None
    """How the masks of tokens that carry loss differ; None if a side has no mask."""
    logprobs: ValueChange | None = None
    """How logprobs differ, over tokens that neither side's mask excludes; None if a side has no logprobs."""

    @property
    def same(self) -> bool:
        return self.comparison is not None and not self.comparison.differences and not self.changed_values

    @property
    def changed_values(self) -> dict[str, ValueChange]:
        changes = {"mask": self.mask, "logprobs": self.logprobs}
        return {name: change for name, change in changes.items() if change is not None and change.differing}


def compare_rows(
    expected: Iterable[IdRow], recorded: Iterable[IdRow], tokenizer: Tokenizer, max_delta: float = 1e-3
) -> Iterator[RowComparison]:
    """Compare rows that have the same name, in order if a name repeats; compare two single rows whatever their names.

    A row without a partner is compared with the unmatched row whose name begins with its name, if exactly one does.
    Logprobs up to `max_delta` nats apart count as equal. Rows stay in memory until their partners are read, so files
    in the same order need almost no memory.

    Raises `InvalidRequest` if both rows have logprobs, and those of one are not one number per id.
    """
    for expected_row, recorded_row in _pairs(expected, recorded):
        if expected_row is None or recorded_row is None:
            row = expected_row or recorded_row
            assert row is not None
            yield RowComparison(row.name, row.line, None, "expected" if recorded_row is None else "recorded")
            continue
        comparison = Comparison(len(expected_row.ids), len(recorded_row.ids), ())
        if not np.array_equal(expected_row.ids, recorded_row.ids):
            codes = {"provenance": expected_row.provenance, "recorded_provenance": recorded_row.provenance}
            comparison = compare(expected_row.ids, recorded_row.ids, tokenizer, **codes)
        pairs = comparison.recorded_positions()
        ours = np.flatnonzero(pairs >= 0)
        theirs = pairs[ours]
        mask = _changed(expected_row.mask, recorded_row.mask, ours, theirs, 0)
        trained = _trained(expected_row)[ours] & _trained(recorded_row)[theirs]
        for row, other in ((expected_row, recorded_row), (recorded_row, expected_row)):
            # Reading does not refuse them, because other commands don't use logprobs.
            if row.unread_logprobs and (other.unread_logprobs or other.logprobs is not None):
                raise InvalidRequest(row.unread_logprobs)
        logprobs = _changed(expected_row.logprobs, recorded_row.logprobs, ours[trained], theirs[trained], max_delta)
        yield RowComparison(expected_row.name, recorded_row.line, comparison, None, mask, logprobs)


def _trained(row: IdRow) -> npt.NDArray[np.bool_]:
    """Return the row's mask. Without a mask, return True for every token that is not in a column of prompts."""
    if row.mask is not None:
        return row.mask
    return np.ones(len(row.ids), np.bool_) if row.provenance is None else row.provenance == Provenance.SAMPLED


def _changed(
    expected: _Values | None, recorded: _Values | None, ours: _Values, theirs: _Values, most: float
) -> ValueChange | None:
    """Compare values at the positions `ours` and `theirs`. Return None if a side has no values."""
    if expected is None or recorded is None:
        return None
    left, right = expected[ours].astype(np.float64), recorded[theirs].astype(np.float64)
    unknown = np.isnan(left) & np.isnan(right)
    apart = np.zeros(len(left))
    np.subtract(left, right, out=apart, where=left != right)  # equal infinities are not apart
    differ = ~(np.abs(apart) <= most) & ~unknown
    first = int(theirs[differ][0]) if differ.any() else -1
    largest = float(np.nanmax(np.abs(apart[differ]), initial=0.0))
    return ValueChange(int((~unknown).sum()), int(differ.sum()), first, largest, int(unknown.sum()))


def _pairs(expected: Iterable[IdRow], recorded: Iterable[IdRow]) -> Iterator[tuple[IdRow | None, IdRow | None]]:
    waiting: tuple[dict[str, deque[IdRow]], dict[str, deque[IdRow]]] = (defaultdict(deque), defaultdict(deque))
    matched = False
    for pair in zip_longest(expected, recorded):
        for side, row in enumerate(pair):
            if row is None:
                continue
            partners = waiting[1 - side].get(row.name)
            if partners:
                partner = partners.popleft()
                yield (row, partner) if side == 0 else (partner, row)
                matched = True
            else:
                waiting[side][row.name].append(row)
    ours, theirs = ([row for rows in side.values() for row in rows] for side in waiting)
    if not matched and len(ours) == len(theirs) == 1:
        yield ours[0], theirs[0]
        return
    pairs = [*_by_prefix(ours, theirs), *((row, partner) for partner, row in _by_prefix(theirs, ours))]
    yield from pairs
    paired = {id(row) for pair in pairs for row in pair}
    yield from ((row, None) for row in ours if id(row) not in paired)
    yield from ((None, row) for row in theirs if id(row) not in paired)


def _by_prefix(short: Sequence[IdRow], long: Sequence[IdRow]) -> Iterator[tuple[IdRow, IdRow]]:
    """Pair each row with the only row of `long` whose name begins with `NAME:`, else with the row's `NAME`."""
    ordered = sorted(long, key=attrgetter("name"))
    names = [row.name for row in ordered]
    for name, many in Counter(row.name for row in short).items():
        for start in (f"{name}:", name):
            first, last = bisect_left(names, start), bisect_right(names, f"{start}􏿿")
            if last - first == many == 1:
                yield next(row for row in short if row.name == name), ordered[first]
                break


def comparison_lines(comparison: Comparison, most: int = 20) -> Iterator[str]:
    """Yield a line per difference, up to `most`: severity, kind, places, source, both sides, escaped and shortened."""
    for difference in comparison.differences[:most]:
        recorded = _range(difference.recorded_start, difference.recorded_end)
        places = f"{_range(difference.expected_start, difference.expected_end)} | {recorded}"
        source = f" {difference.source}" if difference.source else ""
        yield f"{difference.severity:<8}{difference.kind:<10} at {places}{source}: {_sides(difference)}"
    remaining = len(comparison.differences) - most
    if remaining > 0:
        yield f"and {remaining} more"


def summary(comparison: Comparison) -> str:
    """Return the number of differences, and their kinds.

    >>> summary(Comparison(12, 12, ()))
    'the same 12 ids'
    """
    if not comparison.differences:
        return f"the same {comparison.recorded_tokens} ids"
    kinds = ", ".join(f"{kind} {many}" for kind, many in comparison.kinds.items())
    many = len(comparison.differences)
    return (
        f"{many} difference{'s' if many > 1 else ''}, {len(comparison.errors)} of them errors ({kinds}); expected "
        f"{comparison.expected_tokens} ids, recorded {comparison.recorded_tokens}"
    )


def row_summary(row: RowComparison) -> str:
    if row.comparison is None:
        return f"only the {row.only} side has this row"
    return "; ".join([summary(row.comparison), *_value_lines(row).values()])


def _value_lines(row: RowComparison) -> dict[str, str]:
    lines = {}
    for name, change in row.changed_values.items():
        largest = ""
        if name == "logprobs":
            largest = f", by up to {change.largest:.3g} nats" if change.largest else ", where one side has no number"
        lines[name] = (
            f"{name}: {change.differing} of {change.tokens} tokens differ{largest}, first at token {change.first}"
        )
    return lines


def printed(
    rows: Iterable[RowComparison],
    file_format: str,
    recorded: str,
    most: int,
    fail_on: Literal["error", "warning"] = "warning",
) -> Iterator[str]:
    """Yield a report as lines of text, json, junit, sarif or github. `fail_on`: the lowest severity that fails."""
    if file_format not in ("text", "json"):
        yield ci_report(file_format, "tokentape compare", recorded, _RULES, map(_ci_case, rows), fail_on)
        return
    total, unknown, differing, compared = 0, 0, [], dict.fromkeys(_VALUES, 0)
    for row in rows:
        total += 1
        unknown += row.logprobs.unknown if row.logprobs else 0
        compared = {name: many + (getattr(row, name) is not None) for name, many in compared.items()}
        if row.same:
            continue
        differing.append(row if file_format == "json" else row.name)
        if file_format == "text":
            yield f"{shown(row.name)}: {row_summary(row)}"
            if row.comparison is not None:
                yield from (f"  {line}" for line in comparison_lines(row.comparison, most))
    if file_format == "json":
        report = {"rows": total, "differing": len(differing), "rows_compared": compared, "comparisons": differing}
        report["tokens_without_logprobs"] = unknown
        yield json_text(report)
        return
    yield f"{len(differing)} of {total} rows differ"
    for name, many in compared.items():
        if many < total:
            yield f"not compared: {name} of {total - many} rows, because one side lacks them"
    if unknown:
        yield f"not compared: logprobs of {unknown} tokens, because they are NaN on both sides"


def _ci_case(row: RowComparison) -> CiCase:
    if row.comparison is None:
        findings = [CiFinding(_ABSENT, "error", f"{row.name}: absent", row_summary(row))]
        return CiCase(row.name, findings, row_summary(row), row.line, [])
    values = _value_lines(row)
    # Values first, because CI systems limit the number of annotations.
    findings = [CiFinding(name, "error", f"{row.name}: {name}", line) for name, line in values.items()]
    for difference in row.comparison.differences:
        place = {
            "expected": [difference.expected_start, difference.expected_end],
            "recorded": [difference.recorded_start, difference.recorded_end],
            "expectedIds": list(difference.expected[:_MOST_IDS]),
            "recordedIds": list(difference.recorded[:_MOST_IDS]),
            "source": difference.source,
            "artifact": difference.artifact,
        }
        title = f"{row.name}: {difference.kind} at token {difference.recorded_start}"
        meaning = "" if difference.artifact is None else f", {ARTIFACTS[difference.artifact].meaning}"
        tokens = _range(difference.recorded_start, difference.recorded_end)
        text = f"tokens {tokens}: {KINDS[difference.kind]}{meaning}: {_sides(difference)}"
        findings.append(CiFinding(difference.kind, difference.severity, title, text, place))
    return CiCase(
        row.name, findings, row_summary(row), row.line, [*comparison_lines(row.comparison, 100), *values.values()]
    )


def _range(start: int, end: int) -> str:
    return f"{start}" if end <= start + 1 else f"{start}-{end - 1}"


def _sides(difference: Difference) -> str:
    recorded = _side(difference.recorded_text, difference.recorded)
    return f"{_side(difference.expected_text, difference.expected)} -> {recorded}"


def _side(text: str, ids: Sequence[int]) -> str:
    if not ids:
        return "nothing"
    if len(text) > _TEXT:
        text = f"{text[: _TEXT // 2]} … {text[-_TEXT // 2 :]}"
    few = " ".join(map(str, ids[:8])) + (" …" if len(ids) > 8 else "")
    return f"{shown(json.dumps(text, ensure_ascii=False))} [{few}]"
