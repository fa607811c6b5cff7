"""Sides without known files: a cause is named if undoing it makes them equal, and is `unknown` otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, BackendFacts, Rendering, SkewChat
from tokentape.audit._skew.backends.spec import SpecBackend
from tokentape.audit._skew.findings import AuditReport, audit_layout

Encode = Callable[[Sequence[str]], list[list[int]]]


class Unknown(Backend):
    """Encodes as a function does, renders with the tiny model's template, and counts the texts that it encodes."""

    def __init__(self, encode: Encode, kind: str = "vLLM server") -> None:
        self._encode, self.encoded = encode, 0
        self.is_server = "server" in kind
        self.facts = BackendFacts("B", kind, frozenset({"controls", "decode", "render"}))

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        self.encoded += len(texts)
        return self._encode(texts)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return healthy(TINY).decode(sequences)

    def render(self, conversation: SkewChat) -> Rendering:
        text = healthy(TINY).render(conversation).text or ""
        return Rendering(self._encode([text])[0], None)


def plain(texts: Sequence[str]) -> list[list[int]]:
    return healthy(TINY).encode(texts)


def in_pieces(size: int) -> Encode:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        cut = [[text[at : at + size] for at in range(0, len(text), size)] for text in texts]
        return [[i for ids in plain(pieces) for i in ids] if pieces else [] for pieces in cut]

    return encode


def causes(report: AuditReport) -> dict[str, str]:
    return {finding.kind: finding.cause for finding in report.findings if finding.severity == "skew"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("encode", "named"),
    [
        (lambda texts: [ids[:100] for ids in plain(texts)], {"truncation": "B cuts texts to their first 100 ids"}),
        (lambda texts: [ids[-90:] for ids in plain(texts)], {"truncation": "B cuts texts to their last 90 ids"}),
        (in_pieces(60), {"truncation": "B encodes texts in pieces of 60 characters"}),
        (
            lambda texts: plain([t.replace("\r\n", "\n") for t in texts]),
            {"normalizer": r"B reads text with \r\n as \n"},
        ),
    ],
    ids=["first", "last", "pieces", "lines"],
)
def test_changes_of_texts_by_a_server_are_named(encode: Encode, named: dict[str, str]) -> None:
    assert causes(audit(healthy(TINY), Unknown(encode))) == named


def test_prefix_space_is_named_without_a_tokenizer_json() -> None:
    spaced = Unknown(lambda texts: plain([f" {text}" for text in texts]), "native")
    found = causes(audit(Unknown(plain, "native"), spaced))
    assert found == {"pre-tokenizer": "B puts a space before the text (add_prefix_space, add_dummy_prefix)"}


def test_missing_nfc_is_named_without_a_tokenizer_json() -> None:
    raw = base(TINY).side(spec={**base(TINY).spec, "normalizer": None})
    found = causes(audit(Unknown(plain, "native"), Unknown(raw.encode, "native")))
    assert found == {"normalizer": "A reads text in Unicode form NFC"}


def test_unexplained_difference_is_unknown_with_its_first_ids() -> None:
    def odd(texts: Sequence[str]) -> list[list[int]]:
        return [[ids[0] + 1, *ids[1:]] if "7" in text else ids for text, ids in zip(texts, plain(texts), strict=True)]

    report = audit(healthy(TINY), Unknown(odd))
    (token_id,) = plain(["7"])[0]
    assert set(causes(report)) == {"unknown"}
    assert f"at 0, are {token_id} and {token_id + 1}" in report.findings[0].cause


def test_a_merge_that_a_server_lacks_is_found_with_few_requests() -> None:
    merges = base(TINY).spec["model"]["merges"]
    model = {**base(TINY).spec["model"], "merges": merges[:3000] + merges[3001:]}
    server = Unknown(base(TINY).side(spec={**base(TINY).spec, "model": model}).encode)
    report = audit(healthy(TINY), server)
    assert report.skewed
    shown = [finding.example for finding in report.findings if isinstance(finding.example, str)]
    assert shown
    assert all(plain([text]) != server.encode([text]) for text in shown)
    fine = Unknown(plain)
    assert not audit(healthy(TINY), fine).skewed
    battery = Unknown(plain, "native")
    assert not audit(healthy(TINY), battery).skewed
    assert fine.encoded < battery.encoded < 10_000


def test_missing_merge_is_found_although_whole_words_need_no_merges() -> None:
    model = {**base(TINY).spec["model"], "ignore_merges": True}
    lacking = {**model, "merges": model["merges"][:3000] + model["merges"][3001:]}
    whole, other = (base(TINY).side(spec={**base(TINY).spec, "model": model_spec}) for model_spec in (model, lacking))
    report = audit(whole, Unknown(other.encode))
    (found,) = report.findings
    assert (found.kind, found.severity) == ("unknown", "skew")
    assert isinstance(found.example, str)
    assert whole.encode([found.example]) != other.encode([found.example])
    assert not audit(whole, Unknown(whole.encode)).skewed


def test_token_is_not_blamed_for_a_difference_of_the_text_after_it() -> None:
    token = "<|im_start|>"

    def without_first_line_end(texts: Sequence[str]) -> list[list[int]]:
        return plain([token.join(piece.removeprefix("\n") for piece in text.split(token)) for text in texts])

    assert set(causes(audit(healthy(TINY), Unknown(without_first_line_end)))) == {"unknown"}


def test_side_with_extra_ids_is_not_reported_as_truncating() -> None:
    def prepended(texts: Sequence[str]) -> list[list[int]]:
        return [plain(["\u2581"])[0] + ids for ids in plain(texts)]

    assert set(causes(audit(healthy(TINY), Unknown(prepended)))) == {"unknown"}


class Chatty(SpecBackend):
    """Renders another number each time."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.numbers = count()

    def render(self, conversation: SkewChat) -> Rendering:
        made = super().render(conversation)
        return Rendering([*made.ids, *self.encode([str(next(self.numbers))])[0]], made.text)


def test_unstable_rendering_is_the_finding() -> None:
    report = audit(healthy(TINY), base(TINY).side(kind=Chatty))
    assert list(causes(report)) == ["template"]
    assert causes(report)["template"].startswith("B disagrees with itself")


def test_template_with_the_date_is_a_caution() -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}" + (base(TINY).template or "")
    report = audit(base(TINY).side("A", template=template), base(TINY).side(template=template))
    assert not report.skewed
    assert (
        "the template of A and B uses today's date"
        in {finding.kind: finding.cause for finding in report.findings}["date"]
    )


def test_prompt_that_is_not_a_prefix_of_its_answer_is_a_caution() -> None:
    """Row 25: the prompt is not a prefix of the conversation with its answer."""
    template = (base(TINY).template or "") + "{% if add_generation_prompt %}<think>{% endif %}"
    report = audit(base(TINY).side("A", template=template), base(TINY).side(template=template))
    assert not report.skewed
    assert (
        "in A and B, a prompt is not a prefix"
        in {finding.kind: finding.cause for finding in report.findings}["generation prompt"]
    )


def test_clean_report_lists_what_it_does_not_cover() -> None:
    report = audit(healthy(TINY), healthy(TINY))
    assert report.findings == ()
    assert any(line.startswith("texts longer than") for line in report.uncovered)
    blocks = [str(block) for block in audit_layout(report).blocks]
    assert any("Not covered" in line and "images" in line for line in blocks)


class ReadsMessagesAsText(Unknown):
    """Encodes messages, and texts, without control tokens, and the rest of the template's text with them."""

    def __init__(self) -> None:
        literal = SpecBackend("B", {**base(TINY).spec, "added_tokens": []})
        super().__init__(literal.encode, "native")
        self.facts = replace(self.facts, added=healthy(TINY).facts.added, abilities=frozenset({"decode", "render"}))

    def render(self, conversation: SkewChat) -> Rendering:
        message, said = conversation.messages[-1], conversation.messages[-1].get("content")
        if len(conversation.messages) > 1 or not isinstance(said, str) or conversation.tools:
            return Rendering(healthy(TINY).render(conversation).ids, None)
        named = replace(conversation, messages=({**message, "content": "placeholderword"},))
        before, _, after = (healthy(TINY).render(named).text or "").partition("placeholderword")
        return Rendering([*plain([before])[0], *self._encode([said])[0], *plain([after])[0]], None)


def test_equal_texts_with_control_tokens_on_one_side_show_no_date() -> None:
    """The finding used to be `the template shows a date: none in A, none in B`."""
    found = causes(audit(healthy(TINY), ReadsMessagesAsText()))
    assert "date" not in found
    assert found["control text"].startswith("A turns message text into control tokens")
