"""Show a trajectory as lines of text for a terminal: runs of tokens, each with its provenance.

The word before a run is its provenance; the color shows it too. A line break in the text is shown as ↵ and other
control characters as escapes, because the text comes from models and unknown users and must not control the terminal.

Lanes below the text show more, without colors. In the lane `loss` each token begins with `|` and continues with `=` if
it is trained and with `-` if not. In the lane `logprob` a higher bar means a less likely token. In the lane `drift`,
`^~~` and a class mark tokens that retokenizing the text would change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from os.path import commonprefix
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from tokentape._session.matching import message_key
from tokentape._session.tree import Session
from tokentape.audit._report import escape_for_terminal as readable
from tokentape.audit._tokendiff.comparing import Difference, compare
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.audit._tokendiff.retokenizing import retokenized
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Codes, LineageEdge, Message, Provenance, Trajectory, Turn
from tokentape.viewer._texts import whole_characters

_STYLES = {
    Provenance.SAMPLED: "bold green",
    Provenance.TEMPLATE: "dim",
    Provenance.SYSTEM: "magenta",
    Provenance.USER: "cyan",
    Provenance.TOOL: "yellow",
    Provenance.ASSISTANT: "blue",
    Provenance.CLOSE: "bold red",
    Provenance.MEDIA: "bright_magenta",
}
_LANE_STYLES = {"loss": "dim", "logprob": "yellow", "drift": "bold red"}
_LEGEND = """\
loss: | begins a token; = trained, - not (a digit: tokens of one character)
logprob: from ▁ likely (probability above 0.37) to █ unlikely (below 0.001)
drift: ^~~ tokenizing the text again gives other tokens here, and which kind"""
_FIELDS = ("temperature", "truncation", "penalties", "grammar")
_GUTTER = max(len(code.name) for code in Provenance)
_SEPARATOR = " | "
_BEFORE, _QUOTED = 12, 48
"""Characters quoted before the first difference, and in all."""
_STEPS = "▁▂▃▄▅▆▇█"
"""Bars for -logprob in nats, from less than 1 to 7 or more (a probability of 1 in 1,100 or less)."""


def transcript(
    session: Session,
    leaves: Sequence[int],
    trajectory: Trajectory,
    tokenizer: Tokenizer | None,
    *,
    with_ids: bool,
    lanes_width: int | None = None,
) -> Iterator[Text]:
    """Yield a trajectory of `session` line by line, as ids only if there is no tokenizer.

    With `lanes_width` the text is wrapped at this many columns, and lanes are shown below each line.
    """
    lanes = None if lanes_width is None or tokenizer is None else _Lanes(trajectory, tokenizer, lanes_width)
    yield Text(f"session {session.info.session_id}, branch of turns {_joined(trajectory.turns)}", style="bold")
    role = f"role {trajectory.role}; " if trajectory.role else ""
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    sampled = int((trajectory.provenance == Provenance.SAMPLED).sum())
    yield Text(
        f"verdict {trajectory.verdict}; {role}{reward}; {len(trajectory.token_ids)} tokens, {sampled} sampled, "
        f"{int(trajectory.loss_mask.sum())} with loss"
    )
    if other_logprobs := _other_logprobs(trajectory):
        yield Text(other_logprobs)
    if len(leaves) > 1:
        yield Text(f"branches end with turns {_joined(leaves)}: choose one with --leaf")
    if lanes is not None:
        yield from (Text(line, style="dim") for line in _LEGEND.splitlines())
    start = 0
    for seq, completion_start, end in trajectory.completions():
        yield Text()
        trained = bool(trajectory.loss_mask[completion_start:end].all())
        yield Text(_headline(session.turns[seq], trained), style="bold")
        for edge in trajectory.lineage:
            if edge.turn == seq:
                yield Text(_lineage(edge, trajectory.session_id), style="cyan")
        if session.turns[seq].fork == "edited_history" and (edited := _edited_message(session, session.turns[seq])):
            yield Text(readable(f"   {edited}"), style="cyan")
        for run_start, run_end in _runs(trajectory.provenance[start:end], start):
            ids = trajectory.token_ids[run_start:run_end].tolist()
            code = Provenance(trajectory.provenance[run_start])
            label = code.name.lower()
            if lanes is not None:
                yield from lanes.lines(code, run_start, run_end)
            elif tokenizer is not None:
                # Decode the whole run: a character may span several tokens.
                for line in re.findall(r".*\n|.+", readable(tokenizer.decode(ids))):
                    yield _line(label, Text(line.removesuffix("\n"), style=_STYLES[code]))
                    label = ""
            if with_ids:
                yield _line("" if tokenizer is not None and lanes is None else label, Text(" ".join(map(str, ids))))
        start = end


def _other_logprobs(trajectory: Trajectory) -> str:
    """Explain `other logprobs` in the verdict by the first such turn; empty if the verdict does not contain it."""
    turns = zip(trajectory.turns, trajectory.sampled_from, trajectory.logprobs_of, strict=True)
    for turn, sampled, recorded in turns:
        if sampled is not None and recorded is not None and sampled.same_as(recorded) is False:
            parts = [
                f"{name} {getattr(sampled, name)} (logprobs: {getattr(recorded, name)})"
                for name in _FIELDS
                if getattr(sampled, name) != getattr(recorded, name)
            ]
            return f"other logprobs: turn {turn} was sampled with {', '.join(parts)}"
    return ""


def _headline(turn: Turn, trained: bool) -> str:
    parts = [f"turn {turn.seq}"]
    if turn.fork is not None:
        parts.append(f"FORK of {'the start' if turn.parent is None else f'turn {turn.parent}'}: {turn.fork}")
    parts.append(f"{len(turn.added_ids)} added, {len(turn.completion_ids)} sampled")
    called = turn.finish_reason == "stop" and turn.reply.get("tool_calls")
    parts.append(f"ended by {turn.finish_reason}{' (tool_calls for the client)' if called else ''}")
    if turn.weight_version != "unknown":
        parts.append(f"weights {turn.weight_version}")
    if not trained:
        parts.append("no loss: an earlier branch trains it")
    return readable("-- " + " | ".join(parts))


def _lineage(edge: LineageEdge, session_id: str) -> str:
    where = "a turn that is not recorded" if edge.parent is None else f"turn {edge.parent}"
    session = "" if edge.parent_session == session_id else f" of session {edge.parent_session}"
    return readable(f"   {edge.kind} of {where}{session}: {edge.evidence} (confidence {edge.confidence:g})")


def _runs(codes: Codes, offset: int) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of equal codes."""
    changes = np.flatnonzero(np.diff(codes)) + 1
    yield from pairwise((offset + np.array([0, *changes, len(codes)])).tolist())


def _line(label: str, content: Text) -> Text:
    return Text.assemble(f"{label:>{_GUTTER}}{_SEPARATOR}", content)


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _edited_message(session: Session, turn: Turn) -> str | None:
    """Describe the first message of `turn`'s history that differs from the most similar earlier branch.

    Return None if there is no earlier turn.
    """
    incoming = _history(session, turn)[:-1]
    earlier = [past for past in session.turns[: turn.seq] if past.finish_reason != "abort"]
    if not earlier:
        return None
    keys = [message_key(message) for message in incoming]
    continued = {past.parent for past in earlier}
    ends = (past for past in earlier if past.seq not in continued)
    # Of equally similar branches, the newest one.
    index, _, nearest = max((_agreeing(keys, _history(session, end)), end.seq, end) for end in ends)
    recorded = _history(session, nearest)
    here = f"messages end before messages[{index}]"
    if index < len(incoming):
        here = f"messages[{index}] {_shown(incoming, recorded, index)}"
    there = _shown(recorded, incoming, index) if index < len(recorded) else "no such message"
    return f"{here}; the branch of turn {nearest.seq} has {there}"


def _history(session: Session, turn: Turn) -> list[Message]:
    return [message for ancestor in session.path(turn.seq) for message in (*ancestor.messages, ancestor.reply)]


def _agreeing(keys: list[bytes], recorded: list[Message]) -> int:
    """Return the number of messages at the beginning that are equal."""
    pairs = zip_longest(keys, map(message_key, recorded))
    return next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), len(keys))


def _shown(messages: list[Message], other_messages: list[Message], index: int) -> str:
    """Return a message's role, and its text around the first difference from the other message at this index."""
    message = messages[index]
    texts = [_message_text(message), _message_text(other_messages[index]) if index < len(other_messages) else ""]
    if texts[0] == texts[1]:
        texts = [
            json.dumps(whole, ensure_ascii=False, sort_keys=True, default=str)
            for whole in (message, other_messages[index])
        ]
    start = max(0, len(commonprefix(texts)) - _BEFORE)
    end = start + _QUOTED
    quote = f"{'...' if start else ''}{texts[0][start:end]}{'...' if end < len(texts[0]) else ''}"
    return f"({message.get('role')}) {quote!r}"


def _message_text(message: Message) -> str:
    content: Any = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    calls = message.get("tool_calls")
    return text + (json.dumps(calls, ensure_ascii=False, default=str) if calls else "")


@dataclass(frozen=True, slots=True)
class _Cell:
    """Part of a line, whose text belongs to the same tokens."""

    text: str
    start: int
    """Index of its first token in the trajectory."""
    end: int
    first: bool
    """True if its tokens begin here, not on the line before."""


class _Lanes:
    """Build lines of text with lanes below."""

    def __init__(self, trajectory: Trajectory, tokenizer: Tokenizer, width: int) -> None:
        again = retokenized(tokenizer, trajectory.token_ids)
        comparison = compare(trajectory.token_ids, again, tokenizer, provenance=trajectory.provenance)
        self._trajectory, self._tokenizer, self._drifts = trajectory, tokenizer, comparison.differences
        self._width = max(width - _GUTTER - len(_SEPARATOR), 20)

    def lines(self, code: Provenance, start: int, end: int) -> Iterator[Text]:
        label = code.name.lower()
        for line in self._cells(start, end):
            yield _line(label, Text("".join(cell.text for cell in line), style=_STYLES[code]))
            label = ""
            lanes = {"loss": "".join(map(self._loss, line)), "drift": self._marks(line)}
            if code == Provenance.SAMPLED:
                lanes = {"loss": lanes["loss"], "logprob": "".join(map(self._logprob, line)), "drift": lanes["drift"]}
            for name, text in lanes.items():
                if text.strip() or name != "drift":
                    yield _line(name, Text(text, style=_LANE_STYLES[name]))

    def _cells(self, start: int, end: int) -> Iterator[list[_Cell]]:
        line: list[_Cell] = []
        used = 0
        for first, last, text in whole_characters(self._tokenizer, self._trajectory.token_ids[start:end].tolist()):
            begins = True
            *broken, rest = readable(text).split("\n")
            for piece in [*(f"{line}\n" for line in broken), rest]:
                for part in _cut(piece.removesuffix("\n"), self._width):
                    if used + cell_len(part) > self._width:
                        yield line
                        line, used = [], 0
                    if part or (begins and not piece.endswith("\n")):
                        line.append(_Cell(part, start + first, start + last, begins))
                        used += cell_len(part)
                        begins = False
                if piece.endswith("\n"):
                    yield line
                    line, used = [], 0
        if line:
            yield line

    def _loss(self, cell: _Cell) -> str:
        rest = "=" if self._trajectory.loss_mask[cell.start] else "-"
        parts = cell.end - cell.start
        # If a character spans several tokens, show their number.
        head = (str(parts) if parts < 10 else "+") if parts > 1 else "|"
        return ((head if cell.first else rest) + rest * cell_len(cell.text))[: cell_len(cell.text)]

    def _logprob(self, cell: _Cell) -> str:
        worst = float(-self._trajectory.logprobs[cell.start : cell.end].min())
        return _STEPS[max(0, min(7, int(worst)))] * cell_len(cell.text)

    def _marks(self, line: Sequence[_Cell]) -> str:
        """Return `^~~` below the tokens of each difference, and their classes; empty if the line has none."""
        marks, width = "", 0
        classes: dict[str, None] = {}
        for cell in line:
            columns = cell_len(cell.text)
            drift = next((difference for difference in self._drifts if _touches(difference, cell)), None)
            if drift is not None:
                head = "^" if cell.first and cell.start <= drift.expected_start else "~"
                marks = marks.ljust(width) + (head + "~" * columns)[:columns]
                classes[drift.kind if drift.artifact is None else ARTIFACTS[drift.artifact].kind] = None
            width += columns
        return f"{marks} {', '.join(classes)}" if classes else ""


def _touches(drift: Difference, cell: _Cell) -> bool:
    # Tokens that only the retokenized side has are marked where they would begin.
    return drift.expected_start < cell.end and cell.start < max(drift.expected_end, drift.expected_start + 1)


def _cut(text: str, width: int) -> Iterator[str]:
    """Yield parts of at most `width` columns. Yield one empty part for an empty text."""
    part = ""
    for character in text:
        if part and cell_len(part) + cell_len(character) > width:
            yield part
            part = ""
        part += character
    yield part
