"""Find and classify every difference between two sequences of ids, expected and recorded.

Ids are compared, never text: two ids that decode alike are a difference, and so are bytes that a decoder shows as the
same U+FFFD. Both sequences are cut into segments at special tokens, and segments are aligned by a longest common
subsequence, so one extra message does not hide what follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape._alignment import Segment, aligned
from tokentape.audit._tokendiff import kinds
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import common_prefix
from tokentape.errors import InvalidRequest
from tokentape.types import Codes, Provenance, TokenIds

Severity: TypeAlias = Literal["error", "warning"]

RESOLUTION = 500
"""Tokens between equal segments are aligned exactly if at most this many differ, else by `anchored_blocks`."""

SEGMENTS = 2000
"""Segments are aligned exactly if at most this many differ, else approximately, by `anchored_blocks`."""

_ASSISTANT = frozenset({Provenance.SAMPLED, Provenance.ASSISTANT})
_MILD = frozenset({"ids", "json", "spacing", "cut"})
_SAME_BYTES = frozenset({"ids", "forged"})
_AROUND = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A stretch that differs. Positions are half-open ranges; a side that lacks the tokens has an empty range."""

    kind: str
    """One of `KINDS`."""
    severity: Severity
    """`error` if sampled tokens or the meaning of a prompt changed. `warning` if text that the assistant did not write
    is only spelled differently, or if the recorded ids end early."""
    expected_start: int
    expected_end: int
    recorded_start: int
    recorded_end: int
    expected: tuple[int, ...]
    recorded: tuple[int, ...]
    expected_text: str
    """The decoded ids, including special tokens."""
    recorded_text: str
    source: str | None
    """The tokens' `Provenance`, in lower case; None if unknown."""
    artifact: str | None = None
    """If the kind is `ids`, one of `ARTIFACTS`."""

    @property
    def assistant(self) -> bool | None:
        """True if the assistant wrote the tokens; None if unknown."""
        return None if self.source is None else Provenance[self.source.upper()] in _ASSISTANT

    @property
    def same_bytes(self) -> bool:
        """True if both sequences spell the same bytes here."""
        return self.kind in _SAME_BYTES

    @property
    def change(self) -> str:
        """The name in `ARTIFACTS` for how the token boundary moved, or for how the text differs."""
        if self.artifact is not None:
            return self.artifact
        if self.kind in ("forged", "control"):
            return "control"
        if self.kind == "bytes" or "\ufffd" in self.recorded_text:
            return "partial-utf8"
        return kinds.text_artifact(self.expected_text.encode(), self.recorded_text.encode())


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`. If `differences` is empty, the ids are the same."""

    expected_tokens: int
    recorded_tokens: int
    differences: tuple[Difference, ...]

    @property
    def kinds(self) -> Mapping[str, int]:
        """The number of differences of each kind."""
        return Counter(difference.kind for difference in self.differences)

    @property
    def errors(self) -> tuple[Difference, ...]:
        """The differences of severity `error`."""
        return tuple(difference for difference in self.differences if difference.severity == "error")

    def changed(self) -> npt.NDArray[np.bool_]:
        """Return a mask, shape [expected_tokens], of the expected tokens that are in a difference."""
        mask = np.zeros(self.expected_tokens, np.bool_)
        for difference in self.differences:
            mask[difference.expected_start : difference.expected_end] = True
        return mask

    def segments(self) -> Iterator[tuple[Segment, Difference | None]]:
        """Yield the segments that cover both sequences, in order, each with its difference, or None if equal."""
        end = other_end = 0
        for difference in self.differences:
            if difference.expected_start > end:
                yield Segment(end, difference.expected_start, other_end, difference.recorded_start), None
            start, other_start = difference.expected_start, difference.recorded_start
            end, other_end = difference.expected_end, difference.recorded_end
            yield Segment(start, end, other_start, other_end), difference
        if end < self.expected_tokens:
            yield Segment(end, self.expected_tokens, other_end, self.recorded_tokens), None

    def recorded_positions(self) -> npt.NDArray[np.int64]:
        """Return each expected token's position in the recorded ids, or -1; shape [expected_tokens]."""
        positions = np.full(self.expected_tokens, -1)
        for (start, end, other_start, other_end), difference in self.segments():
            if difference is None:
                positions[start:end] = np.arange(other_start, other_end)
        return positions


def compare(
    expected: Sequence[int] | TokenIds,
    recorded: Sequence[int] | TokenIds,
    tokenizer: Tokenizer,
    *,
    provenance: Codes | None = None,
    recorded_provenance: Codes | None = None,
) -> Comparison:
    """Find every difference between two sequences of ids.

    `provenance` has the `Provenance` code of each expected token, `recorded_provenance` that of each recorded token.
    Without them, every difference except an early end is an error, because the assistant may have sampled any token.

    The differences are complete: replacing each expected range with its recorded ids turns `expected` into
    `recorded`. Time is linear in the lengths and quadratic in what differs, within `RESOLUTION` and `SEGMENTS`.

    >>> compare([1, 2], [1, 3], tokenizer).kinds          # doctest: +SKIP
    Counter({'text': 1})

    Raises `InvalidRequest` unless there is one code per id.
    """
    left, right = _Sequence(expected, tokenizer, provenance), _Sequence(recorded, tokenizer, recorded_provenance)
    return Comparison(len(left.ids), len(right.ids), tuple(_Comparer(left, right).differences()))


class _Sequence:
    def __init__(self, ids: Sequence[int] | TokenIds, tokenizer: Tokenizer, provenance: Codes | None) -> None:
        found = np.asarray(ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise InvalidRequest(f"found {found.dtype.name} of shape {found.shape}; expected a flat list of token ids")
        self.array: TokenIds = found.astype(np.int32)
        if provenance is not None and len(provenance) != len(self.array):
            raise InvalidRequest(f"{len(provenance)} provenance codes for {len(ids)} ids: expected one code per id")
        self.provenance = provenance
        self.ids: list[int] = self.array.tolist()
        spelled = {token_id: _spelled(tokenizer, token_id) for token_id in set(self.ids)}
        self.pieces = [spelled[token_id][0] for token_id in self.ids]
        self.control = np.array([spelled[token_id][1] for token_id in self.ids], np.bool_)

    def segments(self, start: int, end: int) -> tuple[list[int], list[int | bytes]]:
        """Return the bounds of the segments, and for each segment its special token id or its bytes."""
        bounds = [start]
        keys: list[int | bytes] = []
        for stop in [*(start + np.flatnonzero(self.control[start:end])).tolist(), end]:
            if bounds[-1] < stop:
                keys.append(self.content(bounds[-1], stop))
                bounds.append(stop)
            if stop < end:
                keys.append(self.ids[stop])
                bounds.append(stop + 1)
        return bounds, keys

    def content(self, start: int, end: int) -> bytes:
        return b"".join(self.pieces[start:end])

    def text(self, start: int, end: int) -> str:
        return self.content(start, end).decode("utf-8", "replace")

    def region(self, start: int, end: int) -> kinds.Region:
        return kinds.Region(
            self.content(start, end), self.text(start - 1, start) if start and self.control[start - 1] else ""
        )

    def source(self, start: int, end: int) -> str | None:
        """Return `sampled` if any token of a range was sampled, else the provenance of its first token.

        Return None for an empty range, and if these ids have no provenance.
        """
        if self.provenance is None or start == end:
            return None
        codes = self.provenance[start:end]
        code = Provenance.SAMPLED if (codes == Provenance.SAMPLED).any() else codes[0]
        return Provenance(int(code)).name.lower()


def _spelled(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    """Return the bytes of an id, and True if it is a special token. Ids outside of the vocabulary count as special."""
    with suppress(InvalidRequest):
        if 0 <= token_id < tokenizer.vocab_size:
            return tokenizer.token_bytes(token_id), tokenizer.control_by_id(token_id) is not None
    return f"<no token {token_id}>".encode(), True


@dataclass(frozen=True, slots=True)
class _Comparer:
    expected: _Sequence
    recorded: _Sequence

    def differences(self) -> Iterator[Difference]:
        expected, recorded = self.expected, self.recorded
        whole = self._trimmed()
        if self._same_bytes(whole):
            yield from self._id_differences(whole)
            return
        bounds, keys = expected.segments(whole.start, whole.end)
        other_bounds, other_keys = recorded.segments(whole.other_start, whole.other_end)
        for (start, end, other_start, other_end), same in aligned(keys, other_keys, SEGMENTS):
            part = Segment(bounds[start], bounds[end], other_bounds[other_start], other_bounds[other_end])
            yield from self._id_differences(part) if same else self._in_gap(part)

    def _same_bytes(self, part: Segment) -> bool:
        start, end, other_start, other_end = part
        return self.expected.content(start, end) == self.recorded.content(other_start, other_end)

    def _has_control(self, part: Segment) -> bool:
        start, end, other_start, other_end = part
        return bool(self.expected.control[start:end].any() or self.recorded.control[other_start:other_end].any())

    def _trimmed(self) -> Segment:
        """Return the ranges that remain without the equal segments at the start and at the end."""
        expected, recorded = self.expected, self.recorded
        head = common_prefix(expected.array, recorded.array)
        controls = np.flatnonzero(expected.control[:head])
        start = int(controls[-1]) + 1 if len(controls) else 0
        tail = common_prefix(expected.array[start:][::-1], recorded.array[start:][::-1])
        controls = np.flatnonzero(expected.control[len(expected.ids) - tail :])
        last = tail - int(controls[0]) if len(controls) else 0
        return Segment(start, len(expected.ids) - last, start, len(recorded.ids) - last)

    def _id_differences(self, part: Segment) -> Iterator[Difference]:
        """Yield the differences in a stretch of equal bytes, each between token boundaries that both sides share."""
        expected, recorded = self.expected, self.recorded
        n, start, end = part.start, part.start, 0
        m, other_start, other_end = part.other_start, part.other_start, 0
        while n < part.end or m < part.other_end:
            if end == other_end and n < part.end and m < part.other_end and expected.ids[n] == recorded.ids[m]:
                n, m = n + 1, m + 1
                start, other_start = n, m
                continue
            if n < part.end and (end <= other_end or m == part.other_end):
                end += len(expected.pieces[n])
                n += 1
            else:
                other_end += len(recorded.pieces[m])
                m += 1
            if end == other_end:
                yield self._moved(Segment(start, n, other_start, m))
                start, other_start = n, m

    def _moved(self, part: Segment) -> Difference:
        expected, recorded = self.expected, self.recorded
        start, end, other_start, other_end = part
        if self._has_control(part):
            return self._difference(part, "forged")
        first = max(start - _AROUND, 0)
        before = np.flatnonzero(expected.control[first:start])
        after = np.flatnonzero(expected.control[end : end + _AROUND])
        artifact = kinds.boundary_artifact(
            expected.pieces[start:end],
            recorded.pieces[other_start:other_end],
            expected.content(first + int(before[-1]) + 1 if len(before) else first, start),
            expected.content(end, end + (int(after[0]) if len(after) else _AROUND)),
        )
        return self._difference(part, "ids", artifact)

    def _in_gap(self, gap: Segment) -> Iterator[Difference]:
        if self._same_bytes(gap):
            yield from self._id_differences(gap)
            return
        region = self.expected.region(gap.start, gap.end)
        other_region = self.recorded.region(gap.other_start, gap.other_end)
        parts = self._parts(gap)
        if not self._has_control(gap) and (kind := kinds.kind_of_values(region, other_region)):
            whole = Segment(parts[0].start, parts[-1].end, parts[0].other_start, parts[-1].other_end)
            yield self._difference(whole, kind)
            return
        for part in parts:
            if self._same_bytes(part):
                yield from self._id_differences(part)
            else:
                yield self._difference(part, self._kind(part, gap, region, other_region))

    def _parts(self, gap: Segment) -> list[Segment]:
        """Align the tokens of a gap, and return the parts that differ.

        Join two parts if fewer tokens separate them than either part has, and no special token does: different words
        share some tokens by chance.
        """
        parts: list[Segment] = []
        expected, recorded = self.expected.ids[gap.start : gap.end], self.recorded.ids[gap.other_start : gap.other_end]
        for (start, end, other_start, other_end), same in aligned(expected, recorded, RESOLUTION):
            if same:
                continue
            part = Segment(
                gap.start + start, gap.start + end, gap.other_start + other_start, gap.other_start + other_end
            )
            last = parts[-1] if parts else part
            near = min(last.size, part.size) + (last.one_sided or part.one_sided)
            if parts and part.start - last.end < near and not self.expected.control[last.end : part.start].any():
                part = Segment(last.start, part.end, last.other_start, part.other_end)
                parts.pop()
            parts.append(part)
        return parts

    def _kind(self, part: Segment, gap: Segment, region: kinds.Region, other_region: kinds.Region) -> str:
        expected, recorded = self.expected, self.recorded
        start, end, other_start, other_end = part
        if other_start == other_end == len(recorded.ids) and end == len(expected.ids):
            return "cut"
        if self._has_control(part):
            texts = expected.text(start, end), recorded.text(other_start, other_end)
            one_sided = not all(map(str.strip, texts))
            return "reasoning" if one_sided and kinds.REASONING.search("\n".join(texts)) else "control"
        left, right = len(expected.content(gap.start, start)), len(recorded.content(gap.other_start, other_start))
        return kinds.kind_of_text(
            region,
            other_region,
            (left, left + len(expected.content(start, end))),
            (right, right + len(recorded.content(other_start, other_end))),
        )

    def _difference(self, part: Segment, kind: str, artifact: str | None = None) -> Difference:
        start, end, other_start, other_end = part
        expected, recorded = self.expected, self.recorded
        position = min(start, len(expected.ids) - 1)
        here = expected.source(max(position, 0), position + 1)
        source = expected.source(start, end) or recorded.source(other_start, other_end) or here
        by_assistant = source is None or Provenance[source.upper()] in _ASSISTANT
        mild = (kind in _MILD and not by_assistant) or (kind == "cut" and source is None)
        return Difference(
            kind,
            "warning" if mild else "error",
            *part,
            expected=tuple(expected.ids[start:end]),
            recorded=tuple(recorded.ids[other_start:other_end]),
            expected_text=expected.text(start, end),
            recorded_text=recorded.text(other_start, other_end),
            source=source,
            artifact=artifact,
        )
