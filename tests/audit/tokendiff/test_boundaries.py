"""Each class and artifact, on a stretch that has it."""

from __future__ import annotations

import pytest

from tokentape.audit._tokendiff.kinds import ARTIFACTS, boundary_artifact, text_artifact


@pytest.mark.parametrize(
    ("before", "left", "right", "name"),
    [
        ("in", " |February", " February", "whitespace-detach"),
        ("", "in |February", "in| February", "whitespace-shift"),
        ("", "\n\n", "\n|\n", "whitespace-run"),
        ("", ".|\n", ".\n", "whitespace-detach"),
        ("It was", " bri|ck", " brick", "intra-word"),
        ("It was", " D|orm|er", " Dorm|er", "proper-noun"),
        ("It was. ", "D|orm|er", "Dorm|er", "intra-word"),
        ("They", " re|paid", " repaid", "morpheme"),
        ("They", " walk|ing", " walking", "morpheme"),
        ("an", " H|IV", " HIV", "acronym"),
        ("our", " right|s", " rights", "tail"),
        ("", "dog|'s", "dog's", "tail"),
        ("", "12|3", "1|23", "digits"),
        ("", '"|:', '":', "punctuation"),
    ],
)
def test_changed_span_has_the_artifact_of_its_cut(before: str, left: str, right: str, name: str) -> None:
    sides = [[piece.encode() for piece in side.split("|")] for side in (left, right)]
    assert boundary_artifact(sides[0], sides[1], before.encode()) == name
    assert boundary_artifact(sides[1], sides[0], before.encode()) == name


def test_partial_utf8_takes_precedence() -> None:
    assert boundary_artifact([b" \xe2", b"\x82\xac"], [b" ", b"\xe2\x82\xac"]) == "partial-utf8"


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        (" However", "\nHowever", "whitespace-substitution"),
        (" February", "February", "space-dropped"),
        ("é", "e\u0301", "normal-form"),
        ("pears", "plums", "text"),
    ],
)
def test_other_bytes_have_artifacts_too(left: str, right: str, name: str) -> None:
    assert text_artifact(left.encode(), right.encode()) == name


def test_every_artifact_is_of_a_class_and_every_phantom_edit_has_one() -> None:
    id_drift = {"control", "bytes", "whitespace", "digits", "word", "punctuation"}
    assert {artifact.kind for artifact in ARTIFACTS.values()} <= {*id_drift, "spacing", "text"}
    assert {artifact.phantom for artifact in ARTIFACTS.values()} - {None} == set(range(1, 9))
