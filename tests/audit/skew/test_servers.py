"""Servers as sides: queried by the API of each kind, detected by kind, and caught sampling from another prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tests.audit.skew.fake_server import serving
from tokentape.audit._skew import battery
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, BackendFacts, open_backend
from tokentape.errors import EngineError, InvalidRequest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_a_server_with_the_same_tokenizer_and_template_is_clean(kind: str) -> None:
    with serving(kind, healthy(TINY), on_socket=True) as url:
        report = audit(healthy(TINY), f"{kind}:{url}")
    assert not report.skewed, [(finding.kind, finding.cause) for finding in report.findings]
    assert report.tried["render"] > 70
    assert report.tried["decode"] > 70


def test_server_encodes_each_text_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    side, requests = base(TINY).side(), Counter[str]()
    encode = side.encode

    def counted(texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        requests.update(() if special else texts)
        return encode(texts, special=special)

    monkeypatch.setattr(side, "encode", counted)
    with serving("vllm", side) as url:
        assert not audit(healthy(TINY), f"vllm:{url}").skewed
    assert {requests[text] for text in battery.by_text(battery.texts()) if len(text) > 1} == {2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_token_that_a_server_spells_differently_is_found(kind: str) -> None:
    """No text of the battery has the word of the removed merge."""
    word, model = "Ġpears", base(TINY).spec["model"]
    merges = [merge for merge in model["merges"] if "".join(merge).replace(" ", "") != word]
    assert len(merges) < len(model["merges"])
    with serving(kind, base(TINY).side(spec={**base(TINY).spec, "model": {**model, "merges": merges}})) as url:
        report = audit(healthy(TINY), f"{kind}:{url}")
    shown = [finding.example for finding in report.findings if finding.where == ("vocabulary",)]
    assert " pears" in shown, [(finding.kind, finding.example, finding.where) for finding in report.findings]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_reordered_merges_of_a_server_are_found_by_a_text(ignore_merges: bool) -> None:
    """Both sides spell each token the same, and no text of the battery has both merges."""
    model = {**base(TINY).spec["model"], "ignore_merges": ignore_merges}
    swapped = list(model["merges"])
    left, right = (swapped.index(merge) for merge in (["D", "e"], ["e", "gg"]))
    swapped[left], swapped[right] = swapped[right], swapped[left]
    ours, theirs = (
        base(TINY).side(spec={**base(TINY).spec, "model": {**model, "merges": merges}})
        for merges in (model["merges"], swapped)
    )
    assert ours.encode(["Degg"]) != theirs.encode(["Degg"])
    with serving("vllm", theirs) as url:
        report = audit(ours, f"vllm:{url}")
    shown = [finding.example for finding in report.findings if "competing merges" in finding.where]
    assert "Degg" in shown, [(finding.kind, finding.example, finding.where) for finding in report.findings]


def test_gateway_is_compared_by_texts_only() -> None:
    with serving("gateway", healthy(TINY)) as url:
        side = open_backend(f"gateway:{url}")
        try:
            assert side.facts.abilities >= {"special", "controls", "decode"}
            assert side.facts.versions == {"gateway": "tokentape-1.2"}
            assert side.encode(["hello", "a b"]) == healthy(TINY).encode(["hello", "a b"])
        finally:
            side.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "gateway"])
def test_kind_of_a_server_is_detected(kind: str) -> None:
    with serving(kind, healthy(TINY), on_socket=True) as url:
        side = open_backend(url)
        try:
            assert side.facts.kind.lower().replace(".", "") == f"{kind} server"
        finally:
            side.close()


def test_missing_normalization_of_a_server_is_found() -> None:
    spec = {**base(TINY).spec, "normalizer": None}
    with serving("vllm", base(TINY).side(spec=spec)) as url:
        report = audit(healthy(TINY), f"vllm:{url}")
    assert [finding.kind for finding in report.findings] == ["normalizer"]
    assert report.findings[0].cause == "B behaves as A would with no normalization"
    assert report.findings[0].example == "e\u0301"


def test_token_that_a_server_finds_in_normalized_text_is_found() -> None:
    added = [{**token, "normalized": True} for token in base(TINY).spec["added_tokens"]]
    with serving("vllm", base(TINY).side(spec={**base(TINY).spec, "added_tokens": added})) as url:
        assert audit(healthy(TINY), f"vllm:{url}").skewed


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_a_flag_of_one_token_of_a_server_is_named(flag: str) -> None:
    """Regression: it was "lstrip=True on its added tokens", and the renderings were unknown."""
    spec = base(TINY).spec
    tokens = [{**token, flag: token[flag] or token["content"] == "<tool_call>"} for token in spec["added_tokens"]]
    with serving("vllm", base(TINY).side(spec={**spec, "added_tokens": tokens})) as url:
        report = audit(healthy(TINY), f"vllm:{url}")
    causes = {finding.cause for finding in report.findings if finding.severity == "skew"}
    assert causes == {f"B behaves as A would with {flag}=True on '<tool_call>'"}


def test_part_that_changes_agreeing_texts_is_not_named() -> None:
    spec = {**base(TINY).spec, "normalizer": {"type": "Nmt"}}
    with serving("vllm", base(TINY).side(spec=spec)) as url:
        report = audit(healthy(TINY), f"vllm:{url}")
    assert report.skewed
    assert {finding.kind for finding in report.findings if finding.severity == "skew"} <= {"normalizer", "unknown"}


def test_a_server_that_samples_from_another_prompt_than_it_shows_is_caught() -> None:
    """Row 14: the offline and the online path render differently."""
    with serving("vllm", healthy(TINY), echo_offset=1) as url:
        report = audit(healthy(TINY), f"vllm:{url}")
    assert [finding.kind for finding in report.findings] == ["server"]
    assert report.findings[0].a.ids[1:] == report.findings[0].b.ids


class Cautious(Backend):
    """Takes no text with a digit, and no conversation."""

    facts = BackendFacts("cautious", "planted", frozenset())

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        if any(char.isdigit() for text in texts for char in text):
            raise InvalidRequest("a text has a digit")
        return healthy(TINY).encode(texts, special=special)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return healthy(TINY).decode(sequences)


def test_a_server_that_refuses_each_message_of_a_user_is_skew() -> None:
    source = base(TINY).template or ""
    refuses = "{% for m in messages if m.role == 'user' %}{{ raise_exception('no') }}{% endfor %}" + source
    with serving("vllm", base(TINY).side(template=refuses)) as url:
        report = audit(healthy(TINY), f"vllm:{url}")
    (found,) = [finding for finding in report.findings if finding.severity == "skew"]
    assert (found.kind, found.b.refused is not None) == ("template", True)


def test_texts_that_two_servers_refuse_are_named_as_not_covered() -> None:
    """Neither gives them ids, which is not agreement."""
    with serving("vllm", Cautious()) as first, serving("vllm", Cautious()) as second:
        report = audit(f"vllm:{first}", f"vllm:{second}")
    assert not report.skewed
    assert any("texts that both sides refuse, the shortest of" in line for line in report.uncovered)


def test_unreachable_address_is_an_error() -> None:
    with serving("vllm", healthy(TINY), on_socket=True) as url:
        pass
    with pytest.raises(EngineError, match=f"vllm:{url}: .* is it running"):
        open_backend(f"vllm:{url}")


def test_invalid_address_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="URL must be"):
        open_backend("vllm:models/tiny")
