"""Lanes under a line of tokens for a terminal: where tokens begin, which are trained, how likely each was, what drifts.

Shapes, not colours, say it. In the lane of loss each token begins with `|` and goes on with `=` where it is trained and
with `-` where it is not; in that of logprobs a bar is the higher the less likely the token was; below tokens that
tokenizing the text again would change stand `^~~` and the class of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from tokentape.audit.tokendiff import ARTIFACTS, compare, retokenized
from tokentape.chat.tokenizer import Tokenizer
from tokentape.types import Provenance, Trajectory
from tokentape.viewer.texts import whole_characters

_STEPS = "▁▂▃▄▅▆▇█"
"""Steps of -logprob in nats: from less than 1 to 7 and more, which is 1 in 1,100 or less."""


@dataclass(frozen=True, slots=True)
class DriftMark:
    """A stretch of recorded tokens that tokenizing the text again gives otherwise."""

    start: int
    end: int
    name: str
    """One of `tokendiff.CLASSES` or `tokendiff.KINDS`."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """Some columns of a line that belong to the same tokens."""

    text: str
    start: int
    """The first of its tokens, in the trajectory."""
    end: int
    first: bool
    """Its tokens begin with it, not on the line before."""


def drift_of(trajectory: Trajectory, tokenizer: Tokenizer) -> list[DriftMark]:
    """Where decoding and tokenizing again changes ids, in order. Raises `InvalidRequest` for another's ids."""
    again = retokenized(tokenizer, trajectory.token_ids)
    found = compare(trajectory.token_ids, again, tokenizer, provenance=trajectory.provenance).differences
    return [
        DriftMark(
            one.expected_start,
            one.expected_end,
            one.kind if one.artifact is None else ARTIFACTS[one.artifact].kind,
        )
        for one in found
    ]


def lane_lines(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    start: int,
    end: int,
    drifts: Sequence[DriftMark],
    width: int,
    readable: Callable[[str], str],
) -> Iterator[tuple[str, str]]:
    """Yield the lines of tokens `start` to before `end`, each as (name of the lane, text); that of text has no name.

    Lines are at most `width` columns wide. `readable` makes text fit for a terminal, with `↵` and a new line for each.
    """
    for line in _lines(tokenizer, trajectory.token_ids[start:end].tolist(), start, width, readable):
        yield "", "".join(cell.text for cell in line)
        yield "loss", "".join(_token_bar(cell, trained=bool(trajectory.loss_mask[cell.start])) for cell in line)
        if (trajectory.provenance[start:end] == Provenance.SAMPLED).any():
            yield "logprob", "".join(_logprob_bar(cell, trajectory) for cell in line)
        marks = _marks(line, drifts)
        if marks.strip():
            yield "drift", marks


def _lines(
    tokenizer: Tokenizer, ids: Sequence[int], offset: int, width: int, readable: Callable[[str], str]
) -> Iterator[list[_Cell]]:
    line: list[_Cell] = []
    used = 0
    for start, end, text in whole_characters(tokenizer, ids):
        first = True
        pieces = readable(text).split("\n")
        for n, piece in enumerate(pieces):
            for part in _cut(piece, width):
                if used + cell_len(part) > width:
                    yield line
                    line, used = [], 0
                if part or (first and n == len(pieces) - 1):
                    line.append(_Cell(part, offset + start, offset + end, first))
                    used += cell_len(part)
                    first = False
            if n < len(pieces) - 1:
                yield line
                line, used = [], 0
    if line:
        yield line


def _cut(text: str, width: int) -> Iterator[str]:
    """Parts of at most `width` columns; one empty part for no text."""
    part = ""
    for character in text:
        if part and cell_len(part) + cell_len(character) > width:
            yield part
            part = ""
        part += character
    yield part


def _token_bar(cell: _Cell, *, trained: bool) -> str:
    columns = cell_len(cell.text)
    if not columns:
        return ""
    rest = "=" if trained else "-"
    parts = cell.end - cell.start
    # Several tokens in one character: how many they are.
    head = (str(parts) if parts < 10 else "+") if parts > 1 else "|"
    return (head if cell.first else rest) + rest * (columns - 1)


def _logprob_bar(cell: _Cell, trajectory: Trajectory) -> str:
    worst = float(-trajectory.logprobs[cell.start : cell.end].min())
    return _STEPS[max(0, min(7, int(worst)))] * cell_len(cell.text)


def _marks(line: Sequence[_Cell], drifts: Sequence[DriftMark]) -> str:
    """`^~~` below the tokens of each difference, and at the end their classes; empty if the line has none."""
    marks, at = "", 0
    classes: dict[str, None] = {}
    for cell in line:
        columns = cell_len(cell.text)
        # What only the other side has stands where it would begin.
        drift = next((one for one in drifts if one.start < cell.end and cell.start < max(one.end, one.start + 1)), None)
        if drift is not None:
            head = "^" if cell.first and cell.start <= drift.start else "~"
            marks = marks.ljust(at) + (head + "~" * columns)[:columns]
            classes[drift.name] = None
        at += columns
    return f"{marks} {', '.join(classes)}" if classes else ""
