from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import FROM_BEFORE, SETUP, json_values, make_turn, trees
from tokentape._canonical import canonical_json, json_in_order, quick_json, quick_json_in_order
from tokentape._session.chain import (
    array_bytes,
    array_from_bytes,
    fits_digest,
    seal,
    session_digest,
    turn_digest,
)
from tokentape._session.messages import SharedMessages
from tokentape.errors import InvalidRequest, InvariantViolation
from tokentape.types import Resume, Setup, TokenDistribution, Turn

OTHER_VALUES: dict[str, Any] = {
    "session_id": "other",
    "seq": 5,
    "parent": 1,
    "setup": "other",
    "messages": ({"role": "user", "content": "other"},),
    "reply": {"role": "assistant", "content": "other"},
    "added_ids": np.array([9, 9], np.int32),
    "added_provenance": np.array([4, 4, 4, 5], np.uint8),
    "completion_ids": np.array([9, 9], np.int32),
    "logprobs": np.array([-9.0], np.float32),
    "finish_reason": "length",
    "stop": "7",
    "fork": "history edited",
    "sampling": {"temperature": 1, "seed": 4},
    "engine": "other",
    "weight_version": "other",
    "created_at": 1.0,
    "weight_changes": ((2, "other"),),
    "abort_cause": "client_left",
    "sampled_from": TokenDistribution(temperature=0.6),
    "logprobs_of": TokenDistribution(True, 1.0, None, False),
    "resumes": (Resume(3, "engine_abort"),),
    "adapter": "a@1",
}
YOUNGER = ("weight_changes", "abort_cause", "sampled_from", "logprobs_of", "resumes", "adapter")


def plainly(turn: Turn, parent_digest: str) -> str:
    """The digest as the docstring of the module defines it, implemented a second time."""

    def field(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    arrays = {"added_ids": "<i4", "added_provenance": "|u1", "completion_ids": "<i4", "logprobs": "<f4"}
    scalars = {
        each.name: getattr(turn, each.name)
        for each in dataclasses.fields(turn)
        if each.name not in arrays and each.name != "digest" and (each.name not in YOUNGER or getattr(turn, each.name))
    }
    text = json.dumps(scalars, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
    encoded = field(b"tokentape turn 1") + field(parent_digest.encode()) + field(text.encode())
    for name, dtype in arrays.items():
        element = {"<i4": "<i", "|u1": "B", "<f4": "<f"}[dtype]
        data = b"".join(struct.pack(element, value) for value in getattr(turn, name).tolist())
        encoded += field(name.encode()) + field(dtype.encode()) + field(data)
    return hashlib.sha256(encoded).hexdigest()


def test_digests_never_change_from_release_to_release() -> None:
    turn = make_turn("session", 0, **FROM_BEFORE)
    assert SETUP.digest == "02e01f276d638c4c0fa6e9c02088f8ac337a1573d2f62feeb5b3a739b6954723"
    assert session_digest("session") == "dc365e52d021e2230c3dcc52f59d112b20b4c5b90e4e43c3ca41e111901e7475"
    assert turn.digest == "d1291193da632272b7fabeace2b677256d36ddc3f65f17f8606f1f3c61140579"


def test_a_digest_follows_the_written_encoding() -> None:
    root = make_turn("session", 0)
    child = make_turn("session", 3, root)
    assert root.digest == plainly(root, session_digest("session"))
    assert child.digest == plainly(child, root.digest)
    full = make_turn("session", 3, root, **{name: OTHER_VALUES[name] for name in YOUNGER})
    assert full.digest == plainly(full, root.digest)


def test_changed_fields_cover_every_field_of_a_turn() -> None:
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(Turn)} - {"digest"}


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_a_change_to_any_field_changes_the_digest(field: str) -> None:
    root = make_turn("session", 0)
    turn = make_turn("session", 3, root)
    changed = dataclasses.replace(turn, **{field: OTHER_VALUES[field]})
    assert turn_digest(changed, root.digest) != turn.digest


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_a_change_to_any_field_is_seen_with_the_digest(field: str) -> None:
    root = make_turn("session", 0)
    turn = make_turn("session", 3, root)
    assert fits_digest(turn, root.digest)
    assert not fits_digest(dataclasses.replace(turn, **{field: OTHER_VALUES[field]}), root.digest)


@given(data=st.data())
def test_every_sealed_turn_fits_its_digest(data: st.DataObject) -> None:
    digests: dict[int | None, str | None] = {None: None}
    for turn in data.draw(trees("session", "setup")):
        assert fits_digest(turn, digests[turn.parent])
        digests[turn.seq] = turn.digest


@given(value=json_values)
def test_quick_json_has_the_value(value: Any) -> None:
    assert canonical_json(json.loads(quick_json(value))) == canonical_json(value)


def test_quick_json_escapes_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"b": "é 😀\n", "a": [1.5, "\u2028"]}
    expected = canonical_json(value).encode()
    monkeypatch.setattr("tokentape._canonical.canonical_json", None)
    assert quick_json(value) == expected


@pytest.mark.parametrize("field", ["tools", "template_kwargs", "date", "fingerprint"])
def test_a_change_to_any_field_of_a_setup_changes_its_digest(field: str) -> None:
    fields: dict[str, Any] = {"tools": (), "template_kwargs": {}, "date": "d", "fingerprint": "f"}
    other: dict[str, Any] = {"tools": ({},), "template_kwargs": {"a": 1}, "date": "e", "fingerprint": "g"}
    assert Setup(**fields).digest != Setup(**{**fields, field: other[field]}).digest


def test_a_change_to_an_ancestor_changes_the_digest() -> None:
    turn = make_turn("session", 1, make_turn("session", 0))
    changed = make_turn("session", 1, make_turn("session", 0, weight_version="other"))
    assert turn.digest != changed.digest


def test_the_same_root_in_two_sessions_has_two_digests() -> None:
    assert make_turn("one", 0).digest != make_turn("two", 0).digest


@given(data=st.data())
def test_no_single_bit_of_an_array_can_change_unnoticed(data: st.DataObject) -> None:
    turn = data.draw(trees("session", "setup", max_turns=1))[0]
    name = data.draw(st.sampled_from(["added_ids", "added_provenance", "completion_ids", "logprobs"]))
    raw = bytearray(getattr(turn, name).tobytes())
    if not raw:
        return
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = dataclasses.replace(turn, **{name: np.frombuffer(raw, getattr(turn, name).dtype)})
    assert turn_digest(changed, None) != turn.digest


def test_ids_moved_between_two_arrays_change_the_digest() -> None:
    turn = make_turn("session", 0)
    joined = np.concatenate([turn.added_ids, turn.completion_ids])
    moved = dataclasses.replace(turn, added_ids=joined[:5], completion_ids=joined[5:])
    assert turn_digest(moved, None) != turn.digest


@given(value=json_values)
def test_canonical_json_reads_back_and_is_ascii(value: Any) -> None:
    text = canonical_json(value)
    assert text.isascii()
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


def test_canonical_json_is_independent_of_key_order_and_mapping_type() -> None:
    assert canonical_json({"a": {"c": 1, "b": (2,)}}) == canonical_json({"a": MappingProxyType({"b": [2], "c": 1})})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1: 0, "a": 0}, np.int32(1)])
def test_values_that_are_not_json_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest):
        canonical_json({"value": [value]} if not isinstance(value, dict) else value)


def test_a_cycle_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(InvalidRequest):
        canonical_json(cycle)


def test_a_refusal_does_not_quote_the_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        canonical_json({"content": "LEAKMARKER", "LEAKMARKER": {"LEAKMARKER"}})
    assert "LEAKMARKER" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_integer_time_has_the_digest_of_its_float() -> None:
    assert make_turn("session", 0, created_at=1000).digest == make_turn("session", 0, created_at=1000.0).digest


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("added_ids", np.array([1, 2, 3, 4], np.int64)),
        ("completion_ids", np.array([[1, 2], [3, 4]], np.int32)),
        ("added_provenance", np.array([4, 4, 4, 4], np.int8)),
        ("logprobs", np.array([-1, -1, -1, -1], np.float64)),
        ("added_ids", np.array([1, 2, 3, 4], ">i4")),
    ],
)
def test_an_array_of_another_type_is_refused_rather_than_cast(name: str, array: Any) -> None:
    turn = dataclasses.replace(make_turn("session", 0), **{name: array})
    with pytest.raises(InvariantViolation, match=name):
        seal(turn, None)


def test_a_parent_digest_is_needed_exactly_when_there_is_a_parent() -> None:
    root = make_turn("session", 0)
    with pytest.raises(InvariantViolation):
        seal(root, root.digest)
    with pytest.raises(InvariantViolation):
        seal(make_turn("session", 1, root), None)


def test_array_bytes_read_back_without_a_copy_and_read_only() -> None:
    data = array_bytes("logprobs", np.array([-1.5, 0.0], np.float32))
    array = array_from_bytes("logprobs", data)
    assert array.tolist() == [-1.5, 0.0]
    assert array.base is not None
    assert not array.flags.writeable


def test_a_view_with_strides_has_the_bytes_of_its_elements() -> None:
    assert array_bytes("added_ids", np.arange(6, dtype=np.int32)[::2]) == struct.pack("<3i", 0, 2, 4)


def test_messages_that_sessions_share_have_the_digest_of_equal_messages() -> None:
    turn = make_turn("session", 0, None)
    shared = dataclasses.replace(turn, messages=SharedMessages(turn.messages))
    assert turn_digest(shared, None) == turn_digest(turn, None)


@given(value=json_values)
def test_quick_json_in_order_has_the_value(value: Any) -> None:
    assert json.loads(quick_json_in_order(value)) == json.loads(json_in_order(value))
