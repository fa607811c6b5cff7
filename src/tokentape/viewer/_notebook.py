"""Show a trajectory's text token by token in a notebook, as HTML that loads nothing and runs nothing.

from tokentape.viewer import shown_with
shown_with(trajectory, Renderer.load("path/to/model").tokenizer)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from jinja2 import Template

from tokentape.audit._report import html_environment
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Provenance, Trajectory
from tokentape.viewer._texts import whole_characters

_HEAD, _TAIL = 1200, 400
"""How many tokens of a longer trajectory are shown at its start and its end."""


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """A trajectory with its tokenizer. A notebook displays it as HTML if it is the last value of a cell."""

    trajectory: Trajectory
    tokenizer: Tokenizer

    def _repr_html_(self) -> str:
        trajectory = self.trajectory
        total = len(trajectory.token_ids)
        sampled = int((trajectory.provenance == Provenance.SAMPLED).sum())
        reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
        parts = [(0, total)] if total <= _HEAD + _TAIL else [(0, _HEAD), (total - _TAIL, total)]
        return _template().render(
            title=f"Session {trajectory.session_id}",
            note=f"branch to turn {trajectory.leaf} · {trajectory.verdict} · {reward} · {total:,} tokens, "
            f"{sampled:,} sampled, {int(trajectory.loss_mask.sum()):,} with loss",
            parts=[list(_rows(trajectory, self.tokenizer, start, end)) for start, end in parts],
            left_out=f"⋯ {total - _HEAD - _TAIL:,} tokens ⋯",
        )


def shown_with(trajectory: Trajectory, tokenizer: Tokenizer) -> ShownTrajectory:
    """Return the trajectory for a notebook, which shows who wrote each token, which are trained, and logprobs.

    Of a long trajectory, only the first and last tokens are shown. Showing it raises `InvalidRequest` for ids that
    `tokenizer` lacks.
    """
    return ShownTrajectory(trajectory, tokenizer)


@cache
def _template() -> Template:
    return html_environment("tokentape.viewer").get_template("notebook.html.j2")


_Token: TypeAlias = tuple[str, str, str]
"""A token's CSS classes, title and text."""


def _rows(
    trajectory: Trajectory, tokenizer: Tokenizer, start: int, end: int
) -> Iterator[tuple[Provenance, list[_Token]]]:
    """Yield the writer and the tokens of each run of one writer within a turn."""
    cuts = {start, end, *(1 + np.flatnonzero(np.diff(trajectory.provenance))).tolist()}
    cuts |= {*trajectory.completion_starts.tolist(), *trajectory.completion_ends.tolist()}
    for first, stop in pairwise(sorted(cut for cut in cuts if start <= cut <= end)):
        yield Provenance(int(trajectory.provenance[first])), list(_tokens(trajectory, tokenizer, first, stop))


def _tokens(trajectory: Trajectory, tokenizer: Tokenizer, start: int, end: int) -> Iterator[_Token]:
    ids = trajectory.token_ids[start:end].tolist()
    for first, stop, text in whole_characters(tokenizer, ids):
        i, j = start + first, start + stop
        classes = "tt-t tt-m" if trajectory.loss_mask[i] else "tt-t"
        title = f"id {', '.join(map(str, ids[first:stop]))} · token {i:,}"
        if trajectory.provenance[i] == Provenance.SAMPLED:
            logprob = float(trajectory.logprobs[i:j].min())
            classes += f" tt-l{max(0, min(7, int(-logprob)))}"
            title += f" · logprob {logprob:.4g}"
        # A row already ends its line, so a final newline is only marked.
        last = j == end and text.endswith("\n")
        yield classes, title, text.removesuffix("\n" if last else "").replace("\n", "↵\n") + "↵" * last
