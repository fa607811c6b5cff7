"""Every difference of two sequences is found and classified, also where a peer is known to miss it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_tokenizer
from tokentape.audit._tokendiff import comparing as compare_module
from tokentape.audit._tokendiff.comparing import Comparison, compare
from tokentape.audit._tokendiff.kinds import KINDS
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import Provenance


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


def chat(tokenizer: Tokenizer, *turns: tuple[str, str]) -> list[int]:
    return tokenizer.encode_plain("".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns))


def applied(expected: list[int], found: Comparison) -> list[int]:
    """`expected` with the recorded ids in place of what each difference names."""
    out, at = [], 0
    for difference in found.differences:
        assert difference.expected_start >= at
        out += expected[at : difference.expected_start]
        assert list(difference.expected) == expected[difference.expected_start : difference.expected_end]
        assert len(out) == difference.recorded_start
        out += difference.recorded
        at = difference.expected_end
    return out + expected[at:]


def kinds(expected: list[int], recorded: list[int], tokenizer: Tokenizer) -> list[str]:
    found = compare(expected, recorded, tokenizer)
    assert applied(expected, found) == recorded
    return [difference.kind for difference in found.differences]


def test_the_same_ids_have_no_difference(tokenizer: Tokenizer) -> None:
    ids = chat(tokenizer, ("user", "What do pears cost?"))
    assert compare(ids, np.array(ids, np.int32), tokenizer) == Comparison(len(ids), len(ids), ())


def test_other_ids_of_the_same_text_are_found_outside_of_the_assistant_too(tokenizer: Tokenizer) -> None:
    """Miles' comparator decodes what is not the assistant's, and sees nothing (facts of its version 31f1ca961)."""
    expected = chat(tokenizer, ("user", "What does it cost?"), ("assistant", "It costs 12."))
    cost = tokenizer.encode_plain(" cost")
    at = next(n for n in range(len(expected)) if expected[n : n + len(cost)] == cost)
    recorded = expected[:at] + tokenizer.encode_plain(" co") + tokenizer.encode_plain("st") + expected[at + len(cost) :]
    codes = np.full(len(expected), Provenance.USER, np.uint8)
    (difference,) = compare(expected, recorded, tokenizer, provenance=codes).differences
    assert (difference.kind, difference.artifact, difference.severity, difference.source) == (
        "ids",
        "intra-word",
        "warning",
        "user",
    )
    assert (difference.expected_start, difference.expected_text, difference.recorded_text) == (at, " cost", " cost")
    codes[:] = Provenance.SAMPLED
    (difference,) = compare(expected, recorded, tokenizer, provenance=codes).differences
    assert (difference.severity, difference.assistant) == ("error", True)


def test_different_bytes_with_one_replacement_character_are_distinguished() -> None:
    """Paired U+FFFD: both decode to the same text, so whoever compares text sees nothing."""
    tokenizer = load_tokenizer("qwen3")
    by_bytes = {tokenizer.token_bytes(i): i for i in range(256)}
    expected, recorded = ([*tokenizer.encode_plain("a"), by_bytes[byte]] for byte in (b"\xe2", b"\xf0"))
    assert tokenizer.decode(expected) == tokenizer.decode(recorded)
    assert kinds(expected, recorded, tokenizer) == ["bytes"]


def test_content_that_was_rendered_empty_is_missing(tokenizer: Tokenizer) -> None:
    """Content parts that a renderer leaves out, where it renders both sides itself."""
    expected = chat(tokenizer, ("user", "What do pears cost?"), ("assistant", "12"))
    recorded = chat(tokenizer, ("user", ""), ("assistant", "12"))
    assert kinds(expected, recorded, tokenizer) == ["missing"]
    assert kinds(recorded, expected, tokenizer) == ["extra"]


def test_extra_message_does_not_hide_later_differences(tokenizer: Tokenizer) -> None:
    before, after = ("user", "Pears?"), ("user", "And plums?")
    expected = chat(tokenizer, before, ("assistant", "12"), after, ("assistant", "They cost 30."))
    recorded = chat(tokenizer, before, ("tool", "{}"), ("assistant", "12"), after, ("assistant", "They cost 31."))
    found = compare(expected, recorded, tokenizer)
    assert applied(expected, found) == recorded
    assert [difference.kind for difference in found.differences] == ["control", "text"]
    assert found.differences[0].recorded_text.count("<|im_start|>") == 1
    assert found.differences[1].expected_text in "30."


def test_separately_changed_words_are_separate_differences(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_plain("The pears cost 12 and the plums cost 30 in this shop.")
    recorded = tokenizer.encode_plain("The oats cost 12 and the plums cost 30 in that shop.")
    assert kinds(expected, recorded, tokenizer) == ["text", "text"]


def test_replaced_sentence_is_one_difference_despite_a_shared_word(tokenizer: Tokenizer) -> None:
    sides = [
        tokenizer.encode_plain(f"First.<|im_end|>{text}<|im_end|>")
        for text in ("They cost twelve in here and there", "Nobody knows a thing in any shop at all")
    ]
    assert kinds(*sides, tokenizer) == ["text"]


def test_many_messages_without_their_reasoning_are_as_many_differences(tokenizer: Tokenizer) -> None:
    turns = [("assistant", f"<think>\nhm {n}\n</think>\n\nIt is {n}.") for n in range(100)]
    dropped = [(role, text.partition("</think>\n\n")[2]) for role, text in turns]
    found = kinds(chat(tokenizer, *turns), chat(tokenizer, *dropped), tokenizer)
    assert found == ["reasoning"] * 100


def test_unique_messages_align_when_too_many_segments_differ(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "SEGMENTS", 100)
    turns = [turn for n in range(50) for turn in (("user", f"What {n}?"), ("assistant", "<think>hm</think>It is."))]
    dropped = [(role, text.replace("<think>hm</think>", "")) for role, text in turns]
    found = kinds(chat(tokenizer, *turns), chat(tokenizer, *dropped), tokenizer)
    assert found == ["reasoning"] * 50


def test_letters_of_a_control_token_are_not_a_control_token(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_plain("a<|im_end|>b")
    recorded = tokenizer.encode_marked("a<|im_end|>b").ids
    (difference,) = compare(expected, recorded, tokenizer).differences
    assert (difference.kind, difference.severity) == ("forged", "error")


def test_a_control_token_in_place_of_another_is_a_difference(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_plain("12<|im_end|>\n")
    assert kinds(expected, tokenizer.encode_plain("12<|endoftext|>\n"), tokenizer) == ["control"]


def test_dropped_reasoning_is_reported(tokenizer: Tokenizer) -> None:
    expected = chat(tokenizer, ("assistant", "<think>\nhm\n</think>\n\n12"))
    assert kinds(expected, chat(tokenizer, ("assistant", "12")), tokenizer) == ["reasoning"]
    assert kinds(chat(tokenizer, ("assistant", "12")), expected, tokenizer) == ["reasoning"]
    assert kinds(expected, chat(tokenizer, ("assistant", "<think>\n\n</think>\n\n12")), tokenizer) == ["reasoning"]


@pytest.mark.parametrize(
    ("expected", "recorded", "kind"),
    [
        ('<tool_call>\n{"a": 1, "b": "x y"}\n</tool_call>', '<tool_call>\n{"b": "x y", "a": 1}\n</tool_call>', "json"),
        ('<tool_call>{"a": "é"}</tool_call>', r'<tool_call>{"a": "\u00e9"}</tool_call>', "json"),
        ('<tool_call>{"a": 1.0}</tool_call>', '<tool_call>{"a": 1}</tool_call>', "json"),
        ('<tool_call>{"a": true}</tool_call>', '<tool_call>{"a": "True"}</tool_call>', "boolean"),
        ('<tool_call>{"a": true}</tool_call>', "<tool_call>{'a': True}</tool_call>", "json"),
        ('<tool_call>{"a": true}</tool_call>', '<tool_call>{"a": false}</tool_call>', "text"),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": true}</tool_call>', "text"),
        ("<parameter=a>\ntrue\n</parameter>", "<parameter=a>\nTrue\n</parameter>", "boolean"),
        ("one two", "one\ntwo", "spacing"),
        ("one two", "one three", "text"),
        ("one", "one two", "extra"),
        ("one two", "one", "cut"),
    ],
)
def test_text_difference_has_the_kind_of_its_meaning(
    tokenizer: Tokenizer, expected: str, recorded: str, kind: str
) -> None:
    found = kinds(*(tokenizer.encode_plain(text) for text in (expected, recorded)), tokenizer)
    assert set(found) == {kind}


def test_an_early_end_is_an_error_only_for_sampled_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain("one two three")
    codes = np.full(len(ids), Provenance.SAMPLED, np.uint8)
    assert [difference.severity for difference in compare(ids, ids[:-1], tokenizer).differences] == ["warning"]
    assert [difference.severity for difference in compare(ids, ids[:-1], tokenizer, provenance=codes).differences] == [
        "error"
    ]


def test_ids_outside_of_the_vocabulary_are_compared_too(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 5
    assert kinds([1, beyond, 2], [1, beyond + 1, 2], tokenizer) == ["control"]


def test_codes_for_another_number_of_ids_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="2 provenance codes for 3 ids"):
        compare([1, 2, 3], [1], tokenizer, provenance=np.ones(2, np.uint8))


@st.composite
def edited(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A sequence in which control tokens are frequent, and the same after a few edits."""
    token = st.integers(0, 40) | st.integers(0, 3999)
    ids = draw(st.lists(token, max_size=40))
    other = list(ids)
    for _ in range(draw(st.integers(0, 4))):
        at, gone = draw(st.integers(0, len(other))), draw(st.integers(0, 5))
        other[at : at + gone] = draw(st.lists(token, max_size=4))
    return ids, other


@given(edited())
def test_differences_turn_one_sequence_into_the_other(
    tokenizer: Tokenizer, sequences: tuple[list[int], list[int]]
) -> None:
    expected, recorded = sequences
    found = compare(expected, recorded, tokenizer)
    assert applied(expected, found) == recorded
    assert bool(found.differences) == (expected != recorded)
    assert all(
        difference.kind in KINDS and difference.expected != difference.recorded for difference in found.differences
    )


@given(st.text(max_size=30), st.integers(0, 30))
def test_a_retokenized_text_has_differences_of_ids_only_where_boundaries_moved(
    tokenizer: Tokenizer, text: str, cut: int
) -> None:
    """Against the obvious: the pairs (end, id) that the other side lacks."""
    expected = tokenizer.encode_marked(text[:cut]).ids + tokenizer.encode_marked(text[cut:]).ids
    recorded = tokenizer.encode_marked(text).ids
    if tokenizer.decode(expected) != tokenizer.decode(recorded):
        return
    found = compare(expected, recorded, tokenizer)
    assert applied(expected, found) == recorded

    def places(ids: list[int]) -> list[tuple[int, int]]:
        return [
            (sum(len(tokenizer.token_bytes(token_id)) for token_id in ids[: n + 1]), ids[n]) for n in range(len(ids))
        ]

    changed = {n for difference in found.differences for n in range(difference.expected_start, difference.expected_end)}
    assert changed == {n for n, place in enumerate(places(expected)) if place not in places(recorded)}
    assert all(difference.kind == "ids" for difference in found.differences)


PIECES = ("a", "b", "ab", " a", " ", "\n", "12", "1", "<|im_end|>", "{", "é")


def slow_differences(
    expected: list[int], recorded: list[int], tokenizer: Tokenizer
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The differing spans of ids that spell the same bytes, between neighboring boundaries that both share."""

    def ends(ids: list[int]) -> list[int]:
        return [len(b"".join(map(tokenizer.token_bytes, ids[:n]))) for n in range(len(ids) + 1)]

    mine, theirs = ends(expected), ends(recorded)
    common = [place for place in mine if place in theirs]
    found = []
    for start, end in itertools.pairwise(common):
        left, right = (mine.index(start), mine.index(end)), (theirs.index(start), theirs.index(end))
        if expected[slice(*left)] != recorded[slice(*right)]:
            found.append((left, right))
    return found


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
def test_differences_of_the_same_bytes_are_the_shortest_stretches(
    tokenizer: Tokenizer, pieces: list[str], data: st.DataObject
) -> None:
    """Against the slow and obvious: two random ways to cut a text into tokens."""
    text = "".join(pieces)
    cuts = [sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4))) for _ in range(2)]
    expected, recorded = (
        [
            token_id
            for start, end in itertools.pairwise([0, *cut, len(text)])
            for token_id in tokenizer.encode_plain(text[start:end])
        ]
        for cut in cuts
    )
    found = compare(expected, recorded, tokenizer)
    places = [
        ((each.expected_start, each.expected_end), (each.recorded_start, each.recorded_end))
        for each in found.differences
    ]
    assert places == slow_differences(expected, recorded, tokenizer)
    assert all(each.same_bytes for each in found.differences)


@given(edited())
def test_segments_and_partners_follow_from_the_differences(
    tokenizer: Tokenizer, sequences: tuple[list[int], list[int]]
) -> None:
    expected, recorded = sequences
    found = compare(expected, recorded, tokenizer)
    at = other_at = 0
    for (start, end, other_start, other_end), difference in found.segments():
        assert (start, other_start) == (at, other_at)
        assert (expected[start:end] == recorded[other_start:other_end]) == (difference is None)
        at, other_at = end, other_end
    assert (at, other_at) == (len(expected), len(recorded))
    partner = found.recorded_positions()
    kept = np.flatnonzero(partner >= 0)
    assert [expected[n] for n in kept] == [recorded[n] for n in partner[kept]]
    assert (np.diff(partner[kept]) > 0).all()
    assert kept.tolist() == np.flatnonzero(~found.changed()).tolist()


def test_completion_that_lost_its_end_by_retokenizing_is_an_error(tokenizer: Tokenizer) -> None:
    """Row 37 of docs/how-to/audit.md: retokenized text has no end-of-turn token."""
    ids = chat(tokenizer, ("user", "What does it cost?"), ("assistant", "It costs 12."))[:-1]
    end = ids[-1]
    codes = np.full(len(ids), Provenance.SAMPLED, np.uint8)
    (difference,) = compare(ids, ids[:-1], tokenizer, provenance=codes).differences
    assert (difference.kind, difference.severity, list(difference.expected)) == ("cut", "error", [end])
    assert kinds([*ids, *ids], [*ids[:-1], *ids], tokenizer) == ["control"]


def test_retokenized_image_placeholders_are_differences(tokenizer: Tokenizer) -> None:
    """Row 38: a run of placeholders becomes one, or is read as text."""
    (pad,) = tokenizer.encode_plain("<|endoftext|>")
    image = [*tokenizer.encode_plain("See"), *[pad] * 4, *tokenizer.encode_plain("this")]
    expected = [*tokenizer.encode_plain("See"), pad, *tokenizer.encode_plain("this")]
    assert set(kinds(image, expected, tokenizer)) == {"control"}
    spelled = tokenizer.encode_marked("See" + "<|endoftext|>" * 4 + "this").ids
    assert set(kinds(image, spelled, tokenizer)) == {"forged"}


def test_fractions_are_no_ids(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="expected a flat list of token ids"):
        compare([1.5], [1], tokenizer)  # type: ignore[list-item]
