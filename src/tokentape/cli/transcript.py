"""A trajectory as lines of text for a terminal: runs of tokens, each with who wrote it.

The word before a run says its provenance, the colour repeats it. A newline in the text shows as ↵, and every other
control character as an escape: what is shown was written by models and strangers, and must not steer the terminal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.text import Text

from tokentape.chat.tokenizer import Tokenizer
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
_GUTTER = max(len(code.name) for code in Provenance)


def transcript(
    session: Session, leaves: Sequence[int], trajectory: Trajectory, tokenizer: Tokenizer | None, *, with_ids: bool
) -> Iterator[Text]:
    """Yield the lines that show `trajectory`, one of those of `session`; without a tokenizer, ids only."""
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
            yield from _run_lines(Provenance(trajectory.provenance[start + run_start]), run_ids, tokenizer, with_ids)
        start = end


def readable(text: str) -> str:
    """`text` with newlines shown as ↵ and control and format characters as escapes. Emoji and scripts stay whole.

    >>> readable("a\\n\\x1b[2Jb")
    'a↵\\n\\\\x1b[2Jb'
    """
    return "".join(map(_readable, text))


def _readable(char: str) -> str:
    if char == "\n":
        return "↵\n"
    # Joiners are part of how emoji and several scripts are written; other format characters reorder or hide text.
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\u200c\u200d":
        return char.encode("unicode_escape", "surrogatepass").decode("ascii")
    return char


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
    return Text.assemble(f"{label:>{_GUTTER}} | ", content)


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
