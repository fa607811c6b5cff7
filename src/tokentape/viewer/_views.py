"""Make what pages fetch: lists and trees as JSON, trajectories as arrays, and the page's own static files.

Pages insert prompt text only as text, never as markup.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, NotFound
from tokentape.store._listing import SessionSummary
from tokentape.types import Provenance, SessionInfo, Trajectory
from tokentape.viewer._source import SessionView, TurnNode
from tokentape.viewer._texts import token_texts

MAGIC = b"TTV1"
MEDIA_TYPE = "application/octet-stream"

_ALIGNED = 8
_KINDS = {"u1": "|u1", "i4": "<i4", "f4": "<f4"}


def pack(meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return `meta` and `arrays` (uint8, bool, int32 or float32, one-dimensional) as one reply of little-endian bytes.

        "TTV1", uint32 length of the header, the header (JSON, UTF-8), padding to a multiple of 8, the arrays

    In the header, `arrays` maps each name to its `dtype` (`u1`, `i4`, `f4`), `offset` in bytes from the end of the
    padding, a multiple of 8, and `length` in elements. A browser makes typed arrays over these bytes without parsing.
    """
    layout: dict[str, Any] = {}
    pieces: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        kind = {"b": "u1", "u": "u1", "i": "i4", "f": "f4"}[array.dtype.kind]
        if array.dtype.itemsize not in (1, 4) or (kind == "u1") != (array.dtype.itemsize == 1):
            raise ValueError(f"array {name!r} has type {array.dtype}; expected uint8, bool, int32 or float32")
        data = np.ascontiguousarray(array, _KINDS[kind]).tobytes()
        layout[name] = {"dtype": kind, "offset": offset, "length": array.size}
        pieces += [data, bytes(-len(data) % _ALIGNED)]
        offset += len(data) + -len(data) % _ALIGNED
    header = json.dumps({**meta, "arrays": layout}, allow_nan=False).encode()
    head = MAGIC + len(header).to_bytes(4, "little") + header
    return b"".join([head, bytes(-len(head) % _ALIGNED), *pieces])


PROVENANCE = {int(code): code.name.lower() for code in Provenance}


def as_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        # Metadata may contain half of a surrogate pair, which only an escape can represent.
        return json.dumps(msgspec.to_builtins(value)).encode()


def listed(summary: SessionSummary) -> dict[str, Any]:
    values = asdict(summary)
    return {**values.pop("info"), **values, "metadata": metadata_texts(summary.info)}


def metadata_texts(info: SessionInfo) -> dict[str, str]:
    """Return metadata as filters spell it. Numbers are JSON text, because a browser rounds large ones."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for key, value in info.metadata.items()
    }


def tree(view: SessionView) -> dict[str, Any]:
    """Return a session's turns and leaves, without text and ids."""
    return {
        **asdict(view.info),
        "metadata": metadata_texts(view.info),
        "turns": [asdict(node) for node in view.turns],
        "leaves": [
            {
                "turn": branch.leaf,
                "verdict": branch.verdict,
                "tokens": len(branch.token_ids),
                "sampled_tokens": int((branch.provenance == Provenance.SAMPLED).sum()),
                "trained_tokens": int(branch.loss_mask.sum()),
                "reward": branch.reward,
                "role": branch.role,
                "path": branch.turns,
            }
            for branch in view.trajectories
        ],
        "lineage": [asdict(edge) for edge in view.edges],
    }


def alternatives(view: SessionView, turn: int, tokenizer: Tokenizer | None) -> list[Any] | None:
    """Return the recorded alternatives of each sampled token of a turn, as [id, logprob, text], or None."""

    def text(token_id: int) -> str | None:
        try:
            return None if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
        except InvalidRequest:
            return None

    tops = _recorded_alternatives(view).get(turn)
    return tops and [[[token_id, logprob, text(token_id)] for token_id, logprob in of_token] for of_token in tops]


def _recorded_alternatives(view: SessionView) -> dict[int, Any]:
    answers = () if view.stored is None else view.stored.answers
    recorded = (zip(answer.turns, answer.top_logprobs, strict=True) for answer in answers if answer.top_logprobs)
    return {turn: tops for of_answer in recorded for turn, tops in of_answer if tops}


def trajectory(
    view: SessionView, shown: Trajectory, tokenizer: Tokenizer | None, start: int = 0
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return a trajectory's header and arrays, the arguments of `pack`. Without a tokenizer there is no text.

    Arrays that never change (`token_ids`, `provenance`, `logprobs`, `text`, `text_ends`, `marks`) begin at token
    `start`. The loss mask and the columns are complete: a later branch can change which of these turns are trained, and
    columns can be added.
    """
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": shown.token_ids[start:],
        "provenance": shown.provenance[start:],
        "logprobs": shown.logprobs[start:],
        "loss_mask": shown.loss_mask,
    }
    if tokenizer is not None:
        texts = token_texts(tokenizer, shown.token_ids[start:].tolist())
        arrays |= {"text_ends": texts.ends, "text": texts.bytes, "marks": texts.marks}
    names = sorted(shown.columns)
    arrays |= {f"column_{n}": shown.columns[name].astype(np.float32) for n, name in enumerate(names)}
    about = {
        **{name: getattr(shown, name) for name in ("session_id", "leaf", "verdict", "reward", "weight_spans")},
        "version": view.version,
        "tokens": len(shown.token_ids),
        "start": start,
        "turns": _turns(view, shown),
        "media": [asdict(span) for span in shown.media],
        "columns": names,
        "payloads": sorted(shown.payloads),
        "provenance_names": PROVENANCE,
    }
    return about, arrays


def _turns(view: SessionView, shown: Trajectory) -> list[dict[str, Any]]:
    nodes, recorded_alternatives = {node.seq: node for node in view.turns}, _recorded_alternatives(view)
    children: dict[int | None, list[TurnNode]] = {}
    for node in view.turns:
        children.setdefault(node.parent, []).append(node)
    turns, before = [], 0
    for n, (seq, completion_start, end) in enumerate(shown.completions()):
        node = nodes[seq]
        sampled, recorded = shown.sampled_from[n], shown.logprobs_of[n]
        logprobs = shown.logprobs[completion_start:end]
        # Supervised fine-tuning turns have no logprobs. JSON has no NaN.
        mean_logprob = float(logprobs.mean()) if len(logprobs) else math.nan
        reward = float(shown.turn_rewards[n])
        turns.append(
            {
                **asdict(node),
                "start": before,
                "completion_start": completion_start,
                "end": end,
                "sampled_from": sampled and asdict(sampled),
                "logprobs_of": recorded and asdict(recorded),
                "alternatives": seq in recorded_alternatives,
                "reward": None if math.isnan(reward) else reward,
                "trained": bool(shown.loss_mask[completion_start:end].any()),
                "mean_logprob": mean_logprob if math.isfinite(mean_logprob) else None,
                "left_by": [
                    {"turn": child.seq, "cause": child.fork, "aborted": child.finish_reason == "abort"}
                    for child in children.get(seq, [])
                    if n + 1 == len(shown.turns) or child.seq != shown.turns[n + 1]
                ],
            }
        )
        before = end
    return turns


FOLDER = Path(__file__).parent / "static"

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of all viewer replies. They forbid other origins and inline scripts."""

_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


def static_file(request: Request, name: str) -> Response:
    """Return a static file of the page. Raises `NotFound`."""
    file = _files().get(name)
    if file is None:
        raise NotFound("there is nothing at this path")
    data, etag, media_type = file
    headers = {**SECURITY, "ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    files = {}
    for path in FOLDER.iterdir():
        if path.suffix in _MEDIA_TYPES:
            data = path.read_bytes()
            files[path.name] = data, f'"{hashlib.sha256(data).hexdigest()[:32]}"', _MEDIA_TYPES[path.suffix]
    return files
