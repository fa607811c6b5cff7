"""Records to write, by hand and by Hypothesis, and a comparison that sees every bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokentape._session.chain import seal
from tokentape.types import Provenance, Resume, SessionInfo, Setup, TokenDistribution, Turn, TurnColumn, TurnPayload

# Media codes need messages with images.
ADDED_CODES = [code for code in Provenance if code not in (Provenance.SAMPLED, Provenance.MEDIA)]


def make_setup(fingerprint: str = "fingerprint", **template_kwargs: Any) -> Setup:
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    return Setup(tools, template_kwargs, "2026-01-01", fingerprint)


SETUP = make_setup()
UNCHANGED = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
FROM_BEFORE: dict[str, None] = {"sampled_from": None, "logprobs_of": None}
"""Fields of turns recorded before these fields existed."""


def make_turn(session_id: str, seq: int, parent: Turn | None = None, *, tokens: int = 4, **changes: Any) -> Turn:
    """Return a sealed turn with `tokens` added ids and as many sampled ids. Up to 5000, all ids differ."""
    first = 10_000 * seq
    turn = Turn(
        session_id=session_id,
        seq=seq,
        parent=None if parent is None else parent.seq,
        setup=SETUP.digest,
        messages=({"role": "user", "content": f"question {seq}"},),
        reply={"role": "assistant", "content": f"answer {seq}"},
        added_ids=np.arange(first, first + tokens, dtype=np.int32),
        added_provenance=np.full(tokens, Provenance.USER, np.uint8),
        completion_ids=np.arange(first + 5000, first + 5000 + tokens, dtype=np.int32),
        logprobs=np.arange(-tokens, 0, dtype=np.float32) / 8,
        finish_reason="stop",
        stop=7,
        fork=None,
        sampling={"temperature": 1.0, "seed": seq},
        engine="fake 1.0 raw_logprobs",
        weight_version="step-1",
        created_at=1000.5 + seq,
        digest="",
        sampled_from=UNCHANGED,
        logprobs_of=UNCHANGED,
    )
    return seal(dataclasses.replace(turn, **changes), None if parent is None else parent.digest)


def make_chain(session_id: str, count: int, **changes: Any) -> list[Turn]:
    """Return a branch of `count` turns from the session's first."""
    turns: list[Turn] = []
    for seq in range(count):
        turns.append(make_turn(session_id, seq, turns[-1] if turns else None, **changes))
    return turns


def bits(record: object) -> object:
    """Return `record` as plain values that are equal only if every bit is; tuples and lists count as equal."""
    match record:
        case np.ndarray():
            # The bytes of an array of objects are addresses.
            return str(record.dtype), record.shape, record.tolist() if record.dtype.hasobject else record.tobytes()
        case tuple() | list():
            return [bits(item) for item in record]
        case dict():
            return {key: bits(value) for key, value in record.items()}
    if dataclasses.is_dataclass(record):
        return {field.name: bits(getattr(record, field.name)) for field in dataclasses.fields(record)}
    return record


any_text = st.text(st.characters(exclude_categories=()), max_size=20)
"""Any string that JSON can spell, lone surrogates and NUL included."""

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
"""Any string that a text column accepts."""

finite = st.floats(allow_nan=False, allow_infinity=False)

distributions = st.builds(
    TokenDistribution, *[st.none() | st.booleans(), st.none() | finite, *[st.none() | st.booleans()] * 2]
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(any_text, json_values, max_size=4)

sessions = st.builds(SessionInfo, session_id=names, created_at=finite, metadata=json_objects, owner=names)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    fields = draw(st.tuples(st.lists(json_objects, max_size=2).map(tuple), json_objects, names, names))
    return Setup(*fields)


@st.composite
def turns(draw: st.DrawFn, session_id: str, seq: int, parents: list[Turn], setup: str) -> Turn:
    """Draw a sealed turn that follows every rule of turns, with any of `parents` or none."""
    parent = draw(st.sampled_from([None, *parents]))
    added = draw(st.integers(1 if parent is None else 0, 30))
    finish_reason = draw(st.sampled_from(["stop", "length", "abort"]))
    sampled = draw(st.integers(0 if finish_reason == "abort" else 1, 30))
    turn = Turn(
        session_id=session_id,
        seq=seq,
        parent=None if parent is None else parent.seq,
        setup=setup,
        messages=tuple(draw(st.lists(json_objects, max_size=3))),
        reply=draw(json_objects),
        added_ids=draw(arrays(np.int32, added)),
        added_provenance=draw(arrays(np.uint8, added, elements=st.sampled_from([int(c) for c in ADDED_CODES]))),
        completion_ids=draw(arrays(np.int32, sampled)),
        logprobs=draw(arrays(np.float32, sampled)),
        finish_reason=finish_reason,
        stop=draw(st.none() | st.integers() | any_text),
        fork=draw(st.none() | names),
        sampling=draw(json_objects),
        engine=draw(names),
        weight_version=draw(names),
        created_at=draw(finite),
        digest="",
        weight_changes=tuple(draw(st.lists(st.tuples(st.integers(1, 100), names), max_size=2))),
        abort_cause=draw(st.none() | names),
        sampled_from=draw(st.none() | distributions),
        logprobs_of=draw(st.none() | distributions),
        resumes=tuple(draw(st.lists(st.builds(Resume, st.integers(0, 99), names, st.none() | names), max_size=2))),
        adapter=draw(st.none() | names),
    )
    return seal(turn, None if parent is None else parent.digest)


@st.composite
def trees(draw: st.DrawFn, session_id: str, setup: str, max_turns: int = 4) -> list[Turn]:
    """Draw turns of a session in order, each continuing any earlier turn or none."""
    recorded: list[Turn] = []
    for seq in range(draw(st.integers(1, max_turns))):
        recorded.append(draw(turns(session_id, seq, recorded, setup)))
    return recorded


@st.composite
def turn_columns(draw: st.DrawFn, turn: Turn) -> TurnColumn:
    """Draw values for the sampled ids of a turn, or for all its ids."""
    sampled, everything = len(turn.completion_ids), len(turn.added_ids) + len(turn.completion_ids)
    size = draw(st.sampled_from([sampled, everything]))
    values = draw(arrays(np.float32, size, elements={"allow_nan": False, "allow_infinity": False}))
    return TurnColumn(turn.session_id, turn.seq, draw(names), values, draw(finite))


@st.composite
def turn_payloads(draw: st.DrawFn, turn: Turn) -> TurnPayload:
    """Draw rows of a kind for some of a turn's ids, and perhaps the last id of its parent."""
    tokens = len(turn.added_ids) + len(turn.completion_ids)
    start = draw(st.integers(0 if turn.parent is None else -1, tokens - 1))
    count = draw(st.integers(1, tokens - start))
    if draw(st.booleans()):
        return TurnPayload(turn.session_id, turn.seq, "supports", start, draw(ragged_rows(count)))
    rows = draw(arrays(np.int16, (count, 2, 3)))
    return TurnPayload(turn.session_id, turn.seq, "experts", start, rows)


@st.composite
def ragged_rows(draw: st.DrawFn, count: int) -> Any:
    """Draw rows of unequal length."""
    rows = np.full(count, b"", object)
    rows[:] = draw(st.lists(st.binary(max_size=200), min_size=count, max_size=count))
    return rows
