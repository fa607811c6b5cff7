"""Compare a branch with a second branch, with its text tokenized again, or with its messages rendered again."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.audit._drift.rerender import through_messages
from tokentape.audit._tokendiff.comparing import Difference, compare
from tokentape.audit._tokendiff.kinds import ARTIFACTS, KINDS
from tokentape.audit._tokendiff.retokenizing import retokenized
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.store._served_model import ServedModel, served_tokenizer
from tokentape.types import Trajectory
from tokentape.viewer import _views as views
from tokentape.viewer._source import SessionView, ViewerSource
from tokentape.viewer._texts import token_texts
from tokentape.viewer._views import pack

RETOKENIZED = "retokenized"
RERENDERED = "rerendered"
AGAINST = (RETOKENIZED, RERENDERED)
"""What a trajectory is compared with: its text encoded again, or its messages rendered again."""

BRANCH = "leaf-([0-9]{1,18})(?:-of-(.+))?|session-(.+)"
"""A branch to compare with: by its last turn and, if needed, its session; or a session's newest main branch."""

_TO_READERS = {
    "cut": "the other side ends earlier",
    "missing": "text that the other side lacks",
    "extra": "text that only the other side has",
}
"""Kinds whose meaning in `KINDS` assumes an expected and a recorded side."""

_MEANINGS = {
    **{kind: _TO_READERS.get(kind, meaning) for kind, meaning in KINDS.items()},
    **{name: artifact.meaning for name, artifact in ARTIFACTS.items()},
}


@dataclass(frozen=True, slots=True)
class RecordReader:
    """The tokenizer and renderer of a record. Either may be missing."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    """The renderer that made the record."""
    why_none: str = ""
    """Why there is no tokenizer."""


def reader_of(served: ServedModel | None, folder: Path | None = None) -> RecordReader:
    """Return the reader of `folder` or of the model served last, with its renderer only if that made the record."""
    tokenizer = served_tokenizer(served) if folder is None else Tokenizer.load(folder)
    if isinstance(tokenizer, str):
        return RecordReader(why_none=tokenizer)
    if served is not None:
        with suppress(TokenizerUnusable):
            renderer = Renderer.load(folder or served.folder)
            return RecordReader(tokenizer, renderer if renderer.fingerprint == served.fingerprint else None)
    return RecordReader(tokenizer)


def against(source: ViewerSource, reader: RecordReader) -> list[str]:
    """Return the members of `AGAINST` that can be compared with."""
    if reader.tokenizer is None:
        return []
    return list(AGAINST) if source.keeps_messages and reader.renderer is not None else [RETOKENIZED]


def recorded_side(side: str) -> tuple[str | None, int | None] | None:
    """Return the session and leaf in a `BRANCH`, each None if absent; None for `AGAINST`. Raises `InvalidRequest`."""
    if side in AGAINST:
        return None
    match = re.fullmatch(BRANCH, side, re.DOTALL)
    if match is None:
        raise InvalidRequest(
            f"the parameter `with` is {side[:80]!r}; expected {', '.join(AGAINST)}, leaf-TURN, leaf-TURN-of-SESSION or "
            "session-SESSION, with a turn's number and a session's id",
            "with",
        )
    return match[2] or match[3], None if match[1] is None else int(match[1])


def comparison(
    reader: RecordReader, view: SessionView, shown: Trajectory, side: str, other_view: SessionView | None = None
) -> bytes:
    """Compare a trajectory with another sequence of ids, and return the result as packed arrays.

    `side` names the other sequence: one of `AGAINST`, or a `BRANCH` of the session `other_view` (None: of `view`).

    `segments` int32 [4 n] are ranges (start, end, other_start, other_end) that together cover both sequences in order.
    `differs` int32 [n] is 0 for a segment with the same ids in both, else 1 + its index in the header's `differences`,
    which name the class of each difference and explain it. `other_*` are the arrays of the other sequence. A recorded
    branch has all arrays of a trajectory, and the header's `other` is the header of `views.trajectory` for it.

    Raises `InvalidRequest` if there is nothing to compare with, and `TemplateRefused`.
    """
    tokenizer = reader.tokenizer
    if tokenizer is None:
        raise InvalidRequest("comparing needs a tokenizer: " + reader.why_none)
    recorded = recorded_side(side)
    of_session = other_view or view
    branch = recorded and _branch(of_session, recorded[1])
    if side == RERENDERED:
        if view.stored is None or reader.renderer is None:
            raise InvalidRequest(f"{RERENDERED} needs recorded messages and the renderer that made the record", "with")
        path = view.stored.tree().path(shown.leaf)
        other_ids = through_messages(reader.renderer, path, view.stored.setups[path[-1].setup])
    elif branch is not None:
        other_ids = branch.token_ids
    else:
        other_ids = retokenized(tokenizer, shown.token_ids)
    result = compare(shown.token_ids, other_ids, tokenizer, provenance=shown.provenance)
    segments = list(result.segments())
    differ = np.array([difference is not None for _, difference in segments], np.bool_)
    about: dict[str, Any] = {"with": side}
    arrays: dict[str, Any]
    if branch is None:
        texts = token_texts(tokenizer, other_ids.tolist())
        arrays = {"token_ids": other_ids, "text_ends": texts.ends, "text": texts.bytes, "marks": texts.marks}
    else:
        about["other"], arrays = views.trajectory(of_session, branch, tokenizer)
        about["leaves"] = [trajectory.leaf for trajectory in of_session.trajectories]
    return pack(
        {
            **about,
            "changed_tokens": int(result.changed().sum()),
            "changed_trained_tokens": int((result.changed() & shown.loss_mask).sum()),
            "differences": [_described(difference) for difference in result.differences],
        },
        {
            "segments": np.array([place for place, _ in segments], np.int32).reshape(-1),
            "differs": np.where(differ, np.cumsum(differ), 0).astype(np.int32),
            **{f"other_{name}": array for name, array in arrays.items()},
        },
    )


def _branch(view: SessionView, leaf: int | None) -> Trajectory:
    """Return the newest branch that contains a turn, or the newest main branch if `leaf` is None."""
    if leaf is None:
        mains = [trajectory for trajectory in view.trajectories if trajectory.role in ("", "main")]
        branches = mains or [*view.trajectories]
    else:
        branches = [trajectory for trajectory in view.trajectories if leaf in trajectory.turns]
    if not branches:
        which = "branch" if leaf is None else f"branch with turn {leaf}"
        raise InvalidRequest(f"session {view.info.session_id!r} has no {which}", "with")
    return branches[-1]


def _described(difference: Difference) -> dict[str, Any]:
    """Return what the page shows about a difference: for ids, where the boundary moved; for text, its kind."""
    name = difference.artifact or difference.kind
    label = ARTIFACTS[name].kind if difference.artifact is not None else name
    return {"class": label, "name": name, "meaning": _MEANINGS[name]}
