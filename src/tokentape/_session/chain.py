"""Compute the hash chain: each turn's digest covers its parent's digest, so a leaf's digest covers the whole branch.

The encoding is part of the file format and has a version because `verify` recomputes a record's digests. A digest is
the hex SHA-256 of the concatenated fields, each written as its length in bytes (unsigned 64-bit little-endian)
followed by the bytes themselves, so that no two sequences of fields have the same encoding.

    session   "tokentape session 1", the session id as canonical JSON
    setup     "tokentape setup 1", canonical JSON of {tools, template_kwargs, date, fingerprint}
    turn      "tokentape turn 1", the parent's digest as hex (for a root the session's digest), canonical JSON of
              the object of all fields that are neither an array nor the digest itself (the fields that were
              added later, `weight_changes`, `abort_cause`, `sampled_from`, `logprobs_of`, `resumes` and `adapter`,
              only if set), then for `added_ids`, `added_provenance`, `completion_ids` and `logprobs` in this
              order: its name, its dtype ("<i4", "|u1" or "<f4") and its elements, little-endian

Canonical JSON has sorted keys, no spaces, only ASCII (everything else as \\u escapes, lone surrogates included),
the shortest decimal that reads back as the same float, and neither NaN nor infinities. `created_at` is always a
float and has no negative zero: 1.0, never 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, replace
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape._canonical import canonical_json, digest_of, framed, packed_length, quick_json
from tokentape._session.messages import SharedMessages
from tokentape.errors import InvariantViolation
from tokentape.types import TokenDistribution, Turn

_ARRAYS = ("added_ids", "added_provenance", "completion_ids", "logprobs")
_arrays_of = attrgetter(*_ARRAYS)
_DEFAULTS = {
    each.name: ... if each.default is MISSING else each.default
    for each in sorted(fields(Turn), key=attrgetter("name"))
    if each.name not in (*_ARRAYS, "digest")
}
"""The default of each field that is written as JSON, in alphabetical order; `...` if the field is always written."""
_scalars_of = attrgetter(*_DEFAULTS)
_Scalars = msgspec.defstruct(
    "_Scalars", [(name, Any, default) for name, default in _DEFAULTS.items()], omit_defaults=True, gc=False
)
_LITTLE_ENDIAN = {
    "added_ids": "<i4",
    "added_provenance": "|u1",
    "completion_ids": "<i4",
    "logprobs": "<f4",
    "values": "<f4",
}
_DTYPES = {name: np.dtype(code).newbyteorder("=") for name, code in _LITTLE_ENDIAN.items()}
"""The dtype of each array in memory."""
_SWAPPED = sys.byteorder != "little"
_TURN = framed(b"tokentape turn 1")
_HEADS = [framed(name.encode("ascii"), _LITTLE_ENDIAN[name].encode("ascii")) for name in _ARRAYS]


def session_digest(session_id: str) -> str:
    """Return the digest used in place of a parent for a session's root turns."""
    return digest_of(b"tokentape session 1", canonical_json(session_id).encode("ascii"))


def fits_digest(turn: Turn, parent_digest: str | None) -> bool:
    """Return whether `turn.digest` is the digest of `turn`. Raises the errors of `turn_digest`.

    Values read from a database contain neither NaN nor infinities, so a match with a `quick_json` digest is a proof.
    """
    return _digest(turn, parent_digest, quick_json) == turn.digest or turn_digest(turn, parent_digest) == turn.digest


def turn_digest(turn: Turn, parent_digest: str | None) -> str:
    """Return the digest of `turn`, whatever its own `digest` field says.

    `parent_digest` must be None for a root and only for a root. Raises `InvariantViolation` if it isn't, or if an
    array isn't one-dimensional with the dtype that `Turn` requires, and `InvalidRequest` if a field can't be written
    as JSON.
    """
    return _digest(turn, parent_digest, lambda scalars: canonical_json(scalars).encode("ascii"))


def _digest(turn: Turn, parent_digest: str | None, encode: Callable[[Any], bytes]) -> str:
    if (turn.parent is None) != (parent_digest is None):
        raise InvariantViolation(
            f"turn {turn.seq} of session {turn.session_id!r} has parent {turn.parent}, but "
            f"{'no' if parent_digest is None else 'a'} parent digest was passed"
        )
    scalars: Any = _Scalars(*_scalars_of(turn))
    # A database may drop the sign of a zero.
    scalars.created_at = float(turn.created_at) + 0.0
    parent = parent_digest or session_digest(turn.session_id)
    text = _with_messages(scalars, encode)
    # Joined only once, because each join copies all messages.
    parts = [_TURN, framed(parent.encode("ascii")), packed_length(sum(map(len, text))), *text]
    for head, data in zip(_HEADS, map(array_bytes, _ARRAYS, _arrays_of(turn)), strict=True):
        parts += head, packed_length(len(data)), data
    return sha256(b"".join(parts)).hexdigest()


def _with_messages(scalars: Any, encode: Callable[[Any], bytes]) -> tuple[bytes, ...]:
    """Return `encode(scalars)` in parts. Messages that sessions share are encoded only once."""
    messages = scalars.messages
    if not isinstance(messages, SharedMessages):
        return (encode(scalars),)
    named = {name: value for name, default in _DEFAULTS.items() if (value := getattr(scalars, name)) is not default}
    before = encode({name: value for name, value in named.items() if name < "messages"})
    after = encode({name: value for name, value in named.items() if name > "messages"})
    return before[:-1], b',"messages":', messages.canonical(), b",", after[1:]


@lru_cache(maxsize=256)
def distribution_fields(distribution: TokenDistribution) -> dict[str, Any]:
    """Return the fields by name. Don't modify the result: equal distributions share it."""
    return asdict(distribution)


def seal(turn: Turn, parent_digest: str | None) -> Turn:
    """Return `turn` with its `digest`. `parent_digest` is None for a root. Raises the errors of `turn_digest`."""
    return replace(turn, digest=turn_digest(turn, parent_digest))


def array_bytes(name: str, array: npt.NDArray[Any]) -> bytes:
    """Return the little-endian elements of the `Turn` or `TurnColumn` array `name`, as they are hashed and stored.

    Raises `InvariantViolation` if the shape or dtype is not what the class requires: a silent cast could change an id.
    """
    native = _DTYPES[name]
    if array.ndim != 1 or array.dtype != native:
        raise InvariantViolation(
            f"{name} must be a one-dimensional array of {native.name}, not {array.ndim}-dimensional {array.dtype}"
        )
    return (array.byteswap() if _SWAPPED else array).tobytes()


def array_from_bytes(name: str, data: bytes) -> npt.NDArray[Any]:
    """Undo `array_bytes`: return a read-only array over `data`, without a copy.

    Raises ValueError if `data` is not a whole number of elements.
    """
    array = np.frombuffer(data, _DTYPES[name])
    return array.byteswap() if _SWAPPED else array
