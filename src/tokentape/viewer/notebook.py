"""Show trajectories and certificates in a notebook, as HTML that loads nothing and runs nothing.

`Trajectory._repr_html_` and `Certificate._repr_html_` call this. A trajectory alone shows ids, since it has no
tokenizer. With a tokenizer it shows text:

    from tokentape.viewer.notebook import shown_with
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

from tokentape.audit.report import html_environment
from tokentape.chat.certificate import Certificate
from tokentape.chat.tokenizer import Tokenizer
from tokentape.types import Provenance, Trajectory
from tokentape.viewer.texts import whole_characters

_HEAD, _TAIL = 1200, 400
"""The number of first and last tokens that are shown of a longer trajectory."""

_HINT = "These are ids: tokentape.viewer.notebook.shown_with(trajectory, tokenizer) shows their text."


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """A trajectory with its tokenizer, to be the last value of a notebook cell."""

    trajectory: Trajectory
    tokenizer: Tokenizer

    def _repr_html_(self) -> str:
        return trajectory_html(self.trajectory, self.tokenizer)


def shown_with(trajectory: Trajectory, tokenizer: Tokenizer) -> ShownTrajectory:
    """Return the trajectory for a notebook to show as text, token by token."""
    return ShownTrajectory(trajectory, tokenizer)


def trajectory_html(trajectory: Trajectory, tokenizer: Tokenizer | None = None) -> str:
    """Return a trajectory's tokens with who wrote them, which are trained, and how likely each was.

    Only the first and last tokens of a long one. Raises `InvalidRequest` for ids that `tokenizer` doesn't have.
    """
    total = len(trajectory.token_ids)
    sampled = int((trajectory.provenance == Provenance.SAMPLED).sum())
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    parts = [(0, total)] if total <= _HEAD + _TAIL else [(0, _HEAD), (total - _TAIL, total)]
    return _template().render(
        title=f"Session {trajectory.session_id}",
        notes=[
            f"branch to turn {trajectory.leaf} · {trajectory.verdict} · {reward} · {total:,} tokens, {sampled:,} "
            f"sampled, {int(trajectory.loss_mask.sum()):,} with loss"
        ],
        parts=[list(_rows(trajectory, tokenizer, start, end)) for start, end in parts],
        left_out=f"⋯ {total - _HEAD - _TAIL:,} tokens ⋯",
        hint=_HINT if tokenizer is None else "",
        tables=[],
    )


def certificate_html(certificate: Certificate) -> str:
    """Return what holds for a chat template, and what does not."""
    facts = {
        "generation prompt": certificate.generation_prompt,
        "stop tokens": ", ".join(certificate.stop_tokens),
        "calls": certificate.call_style or "none",
        "reasoning": "none" if certificate.reasoning is None else " … ".join(certificate.reasoning),
        "callers' text stays text": "yes" if certificate.injection_safe else "NO",
        "depends on the date": "yes" if certificate.date_dependent else "no",
        "silently drops": ", ".join(certificate.dropped) or "nothing that was tried",
        "overridden by": certificate.overrides or "nothing",
    }
    continuations = [(one.name, one.strategy, one.append_only, one.reason) for one in certificate.continuations]
    words = {True: "holds", False: "FAILS", None: "not tried"}
    parsing = [(one.name, words[one.holds], one.detail) for one in certificate.parsing]
    tables = [
        ([], list(facts.items())),
        (["continued by", "strategy", "append-only", "why not"], continuations),
        (["parsing", "", "detail"], parsing),
    ]
    title = f"Certificate {certificate.fingerprint[:12]}"
    return _template().render(title=title, notes=[], parts=[], left_out="", hint="", tables=tables)


@cache
def _template() -> Template:
    return html_environment("tokentape.viewer").get_template("notebook.html.j2")


_Token: TypeAlias = tuple[str, str, str]
"""The classes, title and text of a token."""


def _rows(
    trajectory: Trajectory, tokenizer: Tokenizer | None, start: int, end: int
) -> Iterator[tuple[Provenance, list[_Token]]]:
    """Yield the writer and the tokens of each run within a turn."""
    cuts = {start, end, *(1 + np.flatnonzero(np.diff(trajectory.provenance))).tolist()}
    cuts |= {*trajectory.completion_starts.tolist(), *trajectory.completion_ends.tolist()}
    for first, stop in pairwise(sorted(cut for cut in cuts if start <= cut <= end)):
        yield Provenance(int(trajectory.provenance[first])), list(_tokens(trajectory, tokenizer, first, stop))


def _tokens(trajectory: Trajectory, tokenizer: Tokenizer | None, start: int, end: int) -> Iterator[_Token]:
    ids = trajectory.token_ids[start:end].tolist()
    if tokenizer is None:
        pieces: Iterator[tuple[int, int, str]] = ((n, n + 1, f"{token_id} ") for n, token_id in enumerate(ids))
    else:
        pieces = whole_characters(tokenizer, ids)
    for first, stop, text in pieces:
        i, j = start + first, start + stop
        classes = "tt-t tt-m" if trajectory.loss_mask[i] else "tt-t"
        title = f"id {', '.join(map(str, ids[first:stop]))} · token {i:,}"
        if trajectory.provenance[i] == Provenance.SAMPLED:
            logprob = float(trajectory.logprobs[i:j].min())
            classes += f" tt-l{max(0, min(7, int(-logprob)))}"
            title += f" · logprob {logprob:.4g}"
        # A row ends its own line, so the last new line is only marked.
        last = j == end and text.endswith("\n")
        yield classes, title, text.removesuffix("\n" if last else "").replace("\n", "↵\n") + "↵" * last
