"""Two sequences of ids, expected and recorded: every difference located, and told what it is.

Ids are compared, never text: other ids that decode alike are a difference, wherever they stand, and so are other bytes
that a decoder shows as the same U+FFFD. Both sides are cut into segments at control tokens, and segments are matched by
a longest common subsequence, so that a message too many hides nothing of what comes behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tokentape.audit.compare.edit_script import Block, anchored_blocks
from tokentape.audit.compare.kinds import Region, Stretch, is_reasoning, kind_of_text, kind_of_values
from tokentape.audit.pairing import changed_stretches
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import Codes, Provenance, TokenIds

Severity: TypeAlias = Literal["error", "warning"]

RESOLUTION = 500
"""Where more tokens of a stretch than these differ, it is one difference."""

SEGMENTS = 2000
"""Where more segments than these differ, only what is once in each side is a hold within them."""

_ASSISTANT = frozenset({Provenance.SAMPLED, Provenance.ASSISTANT})
_MILD = frozenset({"ids", "json", "spacing", "cut"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One stretch that is not the same. Positions are of tokens, half-open; a side that has none of it is empty."""

    kind: str
    """One of `compare.kinds.KINDS`."""
    severity: Severity
    """`error`: what was sampled, or what a model reads, is something else. `warning`: outside of what the assistant
    said the same is written otherwise, or the record ends earlier."""
    expected_start: int
    expected_end: int
    recorded_start: int
    recorded_end: int
    expected: tuple[int, ...]
    recorded: tuple[int, ...]
    expected_text: str
    """As the ids spell, control tokens too."""
    recorded_text: str
    source: str | None
    """Where its tokens came from, a name of `Provenance` in small letters; None where nobody told."""
    artifact: str | None = None
    """With kind `ids`, one of `drift.classes.ARTIFACTS`."""

    @property
    def assistant(self) -> bool | None:
        """Whether the assistant said it; None where nobody told."""
        return None if self.source is None else Provenance[self.source.upper()] in _ASSISTANT


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sequences, compared. `not comparison.differences` is: the same ids."""

    expected_tokens: int
    recorded_tokens: int
    differences: tuple[Difference, ...]
    """In order of their places."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """How many differences there are of each kind."""
        return Counter(one.kind for one in self.differences)

    @property
    def errors(self) -> tuple[Difference, ...]:
        """The differences of severity `error`."""
        return tuple(one for one in self.differences if one.severity == "error")


def compare(
    expected: Sequence[int] | TokenIds,
    recorded: Sequence[int] | TokenIds,
    tokenizer: Tokenizer,
    *,
    provenance: Codes | None = None,
    recorded_provenance: Codes | None = None,
) -> Comparison:
    """Find every difference between two sequences of ids.

    `provenance` are `Provenance` codes of `expected`, one per token, `recorded_provenance` of `recorded`. Without them
    nobody knows what the assistant said, and every difference but an early end counts as an error.

    The differences are complete: put in place of what they name, the recorded ids of each make `recorded` out of
    `expected`. Takes time in proportion to the lengths, and to the square of what differs, within `RESOLUTION`
    and `SEGMENTS`.

    >>> compare([1, 2], [1, 3], tokenizer).kinds          # doctest: +SKIP
    Counter({'text': 1})

    Raises `InvalidRequest` if there are other numbers of codes than of ids.
    """
    one, other = _Side(expected, tokenizer, provenance), _Side(recorded, tokenizer, recorded_provenance)
    found = tuple(_differences(one, other, tokenizer))
    return Comparison(len(one.ids), len(other.ids), found)


class _Side:
    """One sequence, with what its ids spell."""

    def __init__(self, ids: Sequence[int] | TokenIds, tokenizer: Tokenizer, provenance: Codes | None) -> None:
        self.ids: TokenIds = np.asarray(ids, np.int32)
        if provenance is not None and len(provenance) != len(self.ids):
            raise InvalidRequest(f"{len(provenance)} provenance codes for {len(self.ids)} ids: expected one per token")
        self.provenance = provenance
        self.listed: list[int] = self.ids.tolist()
        spelled = {token_id: _spelled(tokenizer, token_id) for token_id in set(self.listed)}
        self.pieces = [spelled[token_id][0] for token_id in self.listed]
        self.control = np.array([spelled[token_id][1] for token_id in self.listed], np.bool_)

    def segments(self, start: int, end: int) -> tuple[list[int], list[int | bytes]]:
        """Where each segment begins, with the end of the last, and the control id or the text that it is."""
        bounds = [start]
        keys: list[int | bytes] = []
        at = start
        for stop in [*(start + np.flatnonzero(self.control[start:end])).tolist(), end]:
            if at < stop:
                keys.append(b"".join(self.pieces[at:stop]))
                bounds.append(stop)
            if stop < end:
                keys.append(self.listed[stop])
                bounds.append(stop + 1)
            at = stop + 1
        return bounds, keys

    def region(self, start: int, end: int) -> Region:
        before = start - 1
        opened_by = self.pieces[before].decode("utf-8", "replace") if before >= 0 and self.control[before] else ""
        return Region(b"".join(self.pieces[start:end]), opened_by)

    def text(self, start: int, end: int) -> str:
        return b"".join(self.pieces[start:end]).decode("utf-8", "replace")

    def source(self, start: int, end: int) -> str | None:
        """Where a stretch came from: sampled if any of it was. None if that is not known, or it is empty."""
        if self.provenance is None or start == end:
            return None
        codes = self.provenance[start:end]
        code = Provenance.SAMPLED if (codes == Provenance.SAMPLED).any() else codes[0]
        return Provenance(int(code)).name.lower()

    def source_around(self, at: int) -> str | None:
        """Of a place between two tokens: what both sides of it came from, or else what stands behind it."""
        if self.provenance is None or not len(self.provenance):
            return None
        return self.source(at, at + 1) if at < len(self.ids) else self.source(at - 1, at)


@dataclass(frozen=True, slots=True)
class _Gap:
    """A stretch of each side that is not the other's, in tokens."""

    start: int
    end: int
    other_start: int
    other_end: int


def _spelled(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    """What an id spells, and whether it is a control token. Ids outside of the vocabulary are taken for such."""
    if not 0 <= token_id < tokenizer.vocab_size:
        return f"<no token {token_id}>".encode(), True
    try:
        return tokenizer.token_bytes(token_id), tokenizer.control_by_id(token_id) is not None
    except InvalidRequest:
        return f"<no token {token_id}>".encode(), True


def _differences(one: _Side, other: _Side, tokenizer: Tokenizer) -> Iterator[Difference]:
    whole = _trimmed(one, other)
    if whole is None:
        return
    bounds, keys = one.segments(whole.start, whole.end)
    other_bounds, other_keys = other.segments(whole.other_start, whole.other_end)
    blocks = anchored_blocks(keys, other_keys, SEGMENTS)
    at, other_at = 0, 0
    for start, other_start, length in [*blocks, (len(keys), len(other_keys), 0)]:
        gap = _Gap(bounds[at], bounds[start], other_bounds[other_at], other_bounds[other_start])
        yield from _in_gap(one, other, gap, tokenizer)
        for n in range(length):
            same_text = _Gap(
                bounds[start + n],
                bounds[start + n + 1],
                other_bounds[other_start + n],
                other_bounds[other_start + n + 1],
            )
            yield from _other_ids(one, other, same_text, tokenizer)
        at, other_at = start + length, other_start + length


def _trimmed(one: _Side, other: _Side) -> _Gap | None:
    """What is left without the segments that both begin and end with; None if nothing is."""
    least = min(len(one.ids), len(other.ids))
    unequal = np.flatnonzero(one.ids[:least] != other.ids[:least])
    head = int(unequal[0]) if len(unequal) else least
    if head == len(one.ids) == len(other.ids):
        return None
    controls = np.flatnonzero(one.control[:head])
    start = int(controls[-1]) + 1 if len(controls) else 0
    left = least - start
    unequal = np.flatnonzero(one.ids[::-1][:left] != other.ids[::-1][:left])
    tail = int(unequal[0]) if len(unequal) else left
    controls = np.flatnonzero(one.control[len(one.ids) - tail :])
    last = tail - int(controls[0]) if len(controls) else 0
    return _Gap(start, len(one.ids) - last, start, len(other.ids) - last)


def _in_gap(one: _Side, other: _Side, gap: _Gap, tokenizer: Tokenizer) -> Iterator[Difference]:
    if gap.start == gap.end and gap.other_start == gap.other_end:
        return
    region, other_region = one.region(gap.start, gap.end), other.region(gap.other_start, gap.other_end)
    if region.content == other_region.content:
        yield from _other_ids(one, other, gap, tokenizer)
        return
    blocks = anchored_blocks(one.listed[gap.start : gap.end], other.listed[gap.other_start : gap.other_end], RESOLUTION)
    parts = _parts(one, gap, blocks)
    controls = one.control[gap.start : gap.end].any() or other.control[gap.other_start : gap.other_end].any()
    of_values = None if controls else kind_of_values(region, other_region)
    if of_values is not None:
        first, last = parts[0], parts[-1]
        yield _difference(one, other, _Gap(first.start, last.end, first.other_start, last.other_end), of_values)
        return
    for part in parts:
        if b"".join(one.pieces[part.start : part.end]) == b"".join(other.pieces[part.other_start : part.other_end]):
            yield from _other_ids(one, other, part, tokenizer)
        else:
            yield _difference(one, other, part, _kind(one, other, part, gap, region, other_region))


def _parts(one: _Side, gap: _Gap, blocks: Sequence[Block]) -> list[_Gap]:
    """What the blocks leave over. Two parts with little between them, by what they have, are one, unless it is control.

    Other words share some letters by chance; without this they would fall into pieces.
    """
    found: list[_Gap] = []
    at, other_at = gap.start, gap.other_start
    for start, other_start, length in [*blocks, (gap.end - gap.start, gap.other_end - gap.other_start, 0)]:
        part = _Gap(at, gap.start + start, other_at, gap.other_start + other_start)
        at, other_at = part.end + length, part.other_end + length
        if part.start == part.end and part.other_start == part.other_end:
            continue
        last = found[-1] if found else None
        if last is not None:
            near = min(_size(last), _size(part)) + (_one_sided(last) or _one_sided(part))
            if part.start - last.end < near and not one.control[last.end : part.start].any():
                found[-1] = _Gap(last.start, part.end, last.other_start, part.other_end)
                continue
        found.append(part)
    return found


def _size(part: _Gap) -> int:
    return max(part.end - part.start, part.other_end - part.other_start)


def _one_sided(part: _Gap) -> bool:
    return part.start == part.end or part.other_start == part.other_end


def _kind(one: _Side, other: _Side, part: _Gap, gap: _Gap, region: Region, other_region: Region) -> str:
    if part.other_start == part.other_end == len(other.ids) and part.end == len(one.ids):
        return "cut"
    controls = one.control[part.start : part.end], other.control[part.other_start : part.other_end]
    if controls[0].any() or controls[1].any():
        texts = one.text(part.start, part.end), other.text(part.other_start, part.other_end)
        dropped = any(is_reasoning(text) and not beside.strip() for text, beside in (texts, texts[::-1]))
        return "reasoning" if dropped else "control"
    left = _stretch(one.pieces, gap.start, part.start, part.end)
    right = _stretch(other.pieces, gap.other_start, part.other_start, part.other_end)
    return kind_of_text(region, other_region, left, right)


def _stretch(pieces: Sequence[bytes], origin: int, start: int, end: int) -> Stretch:
    at = sum(map(len, pieces[origin:start]))
    return Stretch(at, at + sum(map(len, pieces[start:end])))


def _other_ids(one: _Side, other: _Side, part: _Gap, tokenizer: Tokenizer) -> Iterator[Difference]:
    """Differences of two stretches that spell the same bytes."""
    ids, other_ids = one.ids[part.start : part.end], other.ids[part.other_start : part.other_end]
    if np.array_equal(ids, other_ids):
        return
    pieces, other_pieces = one.pieces[part.start : part.end], other.pieces[part.other_start : part.other_end]
    for change in changed_stretches(ids, other_ids, pieces, other_pieces, tokenizer)[1]:
        place = _Gap(
            part.start + change.start,
            part.start + change.end,
            part.other_start + change.trainer_start,
            part.other_start + change.trainer_end,
        )
        if change.kind == "control":
            yield _difference(one, other, place, "forged")
        else:
            yield _difference(one, other, place, "ids", change.artifact)


def _difference(one: _Side, other: _Side, part: _Gap, kind: str, artifact: str | None = None) -> Difference:
    source = one.source(part.start, part.end) or other.source(part.other_start, part.other_end)
    source = source or one.source_around(part.start)
    said = source is None or Provenance[source.upper()] in _ASSISTANT
    mild = kind == "cut" and source is None
    return Difference(
        kind=kind,
        severity="warning" if mild or (kind in _MILD and not said) else "error",
        expected_start=part.start,
        expected_end=part.end,
        recorded_start=part.other_start,
        recorded_end=part.other_end,
        expected=tuple(one.listed[part.start : part.end]),
        recorded=tuple(other.listed[part.other_start : part.other_end]),
        expected_text=one.text(part.start, part.end),
        recorded_text=other.text(part.other_start, part.other_end),
        source=source,
        artifact=artifact,
    )
