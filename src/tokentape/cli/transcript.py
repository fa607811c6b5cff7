"""A trajectory as lines of text for a terminal: runs of tokens, each with who wrote it.

The word before a run says its provenance, the colour repeats it. A newline in the text shows as ↵, and every other
control character as an escape: what is shown was written by models and strangers, and must not steer the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.text import Text

from tokentape.audit.report import escape_for_terminal as readable
from tokentape.chat.tokenizer import Tokenizer
from tokentape.cli.lanes import DriftMark, drift_of, lane_lines
from tokentape.session.tree import Session
from tokentape.types import Codes, Provenance, Trajectory, Turn

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
_LANE_STYLES = {"logprob": "yellow", "drift": "bold red"}
_GUTTER = max(len(code.name) for code in Provenance)
_SEPARATOR = " | "


def transcript(
    session: Session,
    leaves: Sequence[int],
    trajectory: Trajectory,
    tokenizer: Tokenizer | None,
    *,
    with_ids: bool,
    lanes_width: int | None = None,
) -> Iterator[Text]:
    """Yield the lines that show `trajectory`, one of those of `session`; without a tokenizer, ids only.

    With `lanes_width` the text is broken into lines of so many columns, each with its lanes below; see `lanes`.
    """
    lanes = None
    if lanes_width is not None and tokenizer is not None:
        lanes = _Lanes(trajectory, tokenizer, drift_of(trajectory, tokenizer), lanes_width)
    yield Text(f"session {session.info.session_id}, branch of turns {_joined(trajectory.turns)}", style="bold")
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    sampled = int((trajectory.provenance == Provenance.SAMPLED).sum())
    yield Text(
        f"verdict {trajectory.verdict}; {reward}; {len(trajectory.token_ids)} tokens, {sampled} sampled, "
        f"{int(trajectory.loss_mask.sum())} with loss"
    )
    if len(leaves) > 1:
        yield Text(f"branches end with turns {_joined(leaves)}: choose one with --leaf")
    start = 0
    for seq, completion_start, end in zip(
        trajectory.turns, trajectory.completion_starts.tolist(), trajectory.completion_ends.tolist(), strict=True
    ):
        turn = session.turns[seq]
        yield Text()
        yield Text(_headline(turn, bool(trajectory.loss_mask[completion_start:end].all())), style="bold")
        for run_start, run_end in _runs(trajectory.provenance[start:end]):
            run_ids = trajectory.token_ids[start + run_start : start + run_end].tolist()
            code = Provenance(trajectory.provenance[start + run_start])
            if lanes is None:
                yield from _run_lines(code, run_ids, tokenizer, with_ids)
            else:
                yield from lanes.lines(code, start + run_start, start + run_end)
                if with_ids:
                    yield from _run_lines(code, run_ids, None, with_ids)
        start = end


@dataclass(frozen=True, slots=True)
class _Lanes:
    """What lines with lanes are made from."""

    trajectory: Trajectory
    tokenizer: Tokenizer
    drifts: list[DriftMark]
    width: int

    def lines(self, code: Provenance, start: int, end: int) -> Iterator[Text]:
        label = code.name.lower()
        columns = max(self.width - _GUTTER - len(_SEPARATOR), 20)
        for lane, text in lane_lines(self.trajectory, self.tokenizer, start, end, self.drifts, columns, readable):
            yield _line(lane or label, Text(text, style=_LANE_STYLES.get(lane, "dim") if lane else _STYLES[code]))
            label = label if lane else ""


def _headline(turn: Turn, trained: bool) -> str:
    parts = [f"turn {turn.seq}"]
    if turn.fork is not None:
        parts.append(f"FORK of {'the start' if turn.parent is None else f'turn {turn.parent}'}: {turn.fork}")
    parts.append(f"{len(turn.added_ids)} added, {len(turn.completion_ids)} sampled")
    parts.append(f"ended by {turn.finish_reason}")
    parts.append(f"weights {turn.weight_version}")
    if not trained:
        parts.append("no loss: an earlier branch trains it")
    return readable("-- " + " | ".join(parts))


def _runs(codes: Codes) -> Iterator[tuple[int, int]]:
    """Half-open ranges of equal codes."""
    changes = np.flatnonzero(np.diff(codes)) + 1
    yield from pairwise([0, *changes.tolist(), len(codes)])


def _run_lines(code: Provenance, ids: Sequence[int], tokenizer: Tokenizer | None, with_ids: bool) -> Iterator[Text]:
    style = _STYLES[code]
    label = code.name.lower()
    if tokenizer is not None:
        # Decoded as a whole: a character may be spread over several tokens.
        for line in re.findall(r".*\n|.+", readable(tokenizer.decode(ids))):
            yield _line(label, Text(line.removesuffix("\n"), style=style))
            label = ""
    if with_ids:
        yield _line(label, Text(" ".join(map(str, ids))))


def _line(label: str, content: Text) -> Text:
    return Text.assemble(f"{label:>{_GUTTER}}{_SEPARATOR}", content)


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
