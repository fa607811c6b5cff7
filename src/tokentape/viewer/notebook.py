"""Trajectories and certificates in a notebook: HTML that stands for itself, with nothing in it that runs or loads.

`Trajectory._repr_html_` and `Certificate._repr_html_` come here. A trajectory alone shows ids, for it doesn't say whose
they are; with a tokenizer its text:

    from tokentape.viewer.notebook import shown_with
    shown_with(trajectory, Renderer.load("path/to/model").tokenizer)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from tokentape.audit.html import shown
from tokentape.chat.certificate import Certificate
from tokentape.chat.tokenizer import Tokenizer
from tokentape.types import Provenance, Trajectory
from tokentape.viewer.texts import whole_characters

_HEAD, _TAIL = 1200, 400
"""So many of the first and last tokens are shown of a longer trajectory."""

# Notebooks are light or dark by themselves: ink and lines are made of the colour of the text around.
_STYLE = """<style>
.tokentape{font:13px/1.5 system-ui,sans-serif;text-align:left;max-width:72rem}
.tokentape h4{margin:0 0 .3em;font-size:14px}
.tokentape .tt-dim{opacity:.75}
.tokentape .tt-row{display:grid;grid-template-columns:6.5em minmax(0,1fr);margin:2px 0}
.tokentape .tt-who{padding:4px 8px 0 0;border-right:3px solid var(--tt);text-align:right;font-size:11px;font-weight:600}
.tokentape .tt-toks{padding-left:10px;direction:ltr;font:12.5px/28px ui-monospace,Menlo,Consolas,monospace;
white-space:pre-wrap;overflow-wrap:anywhere}
.tokentape .tt-t{margin-right:1px;padding:3px 0 9px;unicode-bidi:isolate;
background:linear-gradient(var(--tt-loss,transparent) 0 0) 0 0/100% 2px no-repeat,
linear-gradient(#d98c14 0 0) 0 calc(100% - 2px)/100% var(--tt-bar,0px) no-repeat,
linear-gradient(var(--tt) 0 0) 0 100%/100% 2px no-repeat;box-decoration-break:clone}
.tokentape .tt-m{--tt-loss:currentColor}
.tokentape .tt-l0{--tt-bar:1px}.tokentape .tt-l1{--tt-bar:2px}.tokentape .tt-l2{--tt-bar:3px}
.tokentape .tt-l3{--tt-bar:4px}.tokentape .tt-l4{--tt-bar:5px}.tokentape .tt-l5{--tt-bar:6px}
.tokentape .tt-l6{--tt-bar:7px}.tokentape .tt-l7{--tt-bar:8px}
.tokentape .tt-p1{--tt:#159a63}.tokentape .tt-p2{--tt:#8a9099}.tokentape .tt-p3{--tt:#8c52d6}
.tokentape .tt-p4{--tt:#2673d9}.tokentape .tt-p5{--tt:#bd7400}.tokentape .tt-p6{--tt:#5d6b93}
.tokentape .tt-p7{--tt:#cf2d37}.tokentape .tt-p8{--tt:#bf3989}
.tokentape table{border-collapse:collapse;margin:.4em 0 .8em}
.tokentape th,.tokentape td{padding:2px 14px 2px 0;text-align:left;vertical-align:top;background:none;
border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent)}
</style>"""


@dataclass(frozen=True, slots=True)
class ShownTrajectory:
    """A trajectory with the tokenizer of its ids, as the last value of a notebook's cell."""

    trajectory: Trajectory
    tokenizer: Tokenizer

    def _repr_html_(self) -> str:
        return trajectory_html(self.trajectory, self.tokenizer)


def shown_with(trajectory: Trajectory, tokenizer: Tokenizer) -> ShownTrajectory:
    """The trajectory as text, token by token, for a notebook to show."""
    return ShownTrajectory(trajectory, tokenizer)


def trajectory_html(trajectory: Trajectory, tokenizer: Tokenizer | None = None) -> str:
    """A trajectory's tokens with their lanes: who wrote them, which are trained, how likely each was.

    Of a long one the first and last tokens. Raises `InvalidRequest` for ids that `tokenizer` doesn't have.
    """
    total = len(trajectory.token_ids)
    sampled = int((trajectory.provenance == Provenance.SAMPLED).sum())
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    facts = (
        f"branch to turn {trajectory.leaf} · {trajectory.verdict} · {reward} · {total:,} tokens, {sampled:,} sampled, "
        f"{int(trajectory.loss_mask.sum()):,} with loss"
    )
    parts = [_text("h4", f"Session {trajectory.session_id}"), _text("div", facts, "tt-dim")]
    if total > _HEAD + _TAIL:
        parts += [
            *_rows(trajectory, tokenizer, 0, _HEAD),
            _text("div", f"⋯ {total - _HEAD - _TAIL:,} tokens ⋯", "tt-dim"),
            *_rows(trajectory, tokenizer, total - _TAIL, total),
        ]
    else:
        parts += _rows(trajectory, tokenizer, 0, total)
    if tokenizer is None:
        hint = "These are ids: tokentape.viewer.notebook.shown_with(trajectory, tokenizer) shows their text."
        parts.append(_text("div", hint, "tt-dim"))
    return _framed(parts)


def certificate_html(certificate: Certificate) -> str:
    """What holds for a chat template, and what does not."""
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
    return _framed(
        [
            _text("h4", f"Certificate {certificate.fingerprint[:12]}"),
            _table([], list(facts.items())),
            _table(["continued by", "strategy", "append-only", "why not"], continuations),
            _table(["parsing", "", "detail"], parsing),
        ]
    )


def _rows(trajectory: Trajectory, tokenizer: Tokenizer | None, start: int, end: int) -> Iterator[Markup]:
    """A row per run of one writer within a turn."""
    cuts = {start, end, *(1 + np.flatnonzero(np.diff(trajectory.provenance))).tolist()}
    cuts |= {*trajectory.completion_starts.tolist(), *trajectory.completion_ends.tolist()}
    bounds = sorted(cut for cut in cuts if start <= cut <= end)
    for first, stop in pairwise(bounds):
        code = int(trajectory.provenance[first])
        tokens = Markup("").join(_tokens(trajectory, tokenizer, first, stop))
        yield Markup(
            '<div class="tt-row tt-p{}"><div class="tt-who">{}</div><div class="tt-toks">{}</div></div>'
        ).format(code, Provenance(code).name.lower(), tokens)


def _tokens(trajectory: Trajectory, tokenizer: Tokenizer | None, start: int, end: int) -> Iterator[Markup]:
    ids = trajectory.token_ids[start:end].tolist()
    if tokenizer is None:
        pieces: Iterator[tuple[int, int, str]] = ((n, n + 1, f"{token_id} ") for n, token_id in enumerate(ids))
    else:
        pieces = whole_characters(tokenizer, ids)
    for first, stop, text in pieces:
        i, j = start + first, start + stop
        lanes = ["tt-t"]
        told = f"id {', '.join(map(str, ids[first:stop]))} · token {i:,}"
        if trajectory.loss_mask[i]:
            lanes.append("tt-m")
        if trajectory.provenance[i] == Provenance.SAMPLED:
            logprob = float(trajectory.logprobs[i:j].min())
            lanes.append(f"tt-l{max(0, min(7, int(-logprob)))}")
            told += f" · logprob {logprob:.4g}"
        # A new line at the end of a row is made by the row.
        written = shown(text).removesuffix("\n") if j == end else shown(text)
        yield Markup('<span class="{}" title="{}">{}</span>').format(
            " ".join(lanes), told, written.replace("\n", "↵\n") + ("↵" if j == end and text.endswith("\n") else "")
        )


def _text(tag: str, text: str, name: str = "") -> Markup:
    return Markup('<{tag} class="{name}">{text}</{tag}>').format(tag=tag, name=name, text=shown(text))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    def line(tag: str, cells: Sequence[str]) -> Markup:
        return Markup("<tr>{}</tr>").format(Markup("").join(_text(tag, cell) for cell in cells))

    head = [line("th", columns)] if columns else []
    return Markup("<table>{}</table>").format(Markup("").join([*head, *(line("td", row) for row in rows)]))


def _framed(parts: list[Markup]) -> str:
    return str(Markup('{}<div class="tokentape">{}</div>').format(Markup(_STYLE), Markup("").join(parts)))
