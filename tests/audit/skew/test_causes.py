"""Causes without a row in the catalogue of known bugs, and their texts."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tokentape.audit._skew import parts
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import BackendOptions, Rendering, SkewChat
from tokentape.audit._skew.backends.spec import SpecBackend, open_json
from tokentape.audit._skew.causes import TextCauses
from tokentape.audit._skew.file_findings import configuration_findings
from tokentape.audit._skew.findings import Skew, quoted
from tokentape.audit._skew.template_causes import TemplateCauses
from tokentape.demo import MODEL
from tokentape.errors import TokenizerUnusable


def found(b: SpecBackend) -> dict[str, Skew]:
    return {finding.kind: finding for finding in audit(healthy(TINY), b).findings if finding.severity == "skew"}


def with_model(**changed: Any) -> SpecBackend:
    return base(TINY).side(spec={**base(TINY).spec, "model": {**base(TINY).spec["model"], **changed}})


class Stutters(SpecBackend):
    """Says the first id of digits twice, though its tokenizer.json is the same."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        encoded = super().encode(texts, special=special)
        return [ids[:1] + ids if text[:1].isdigit() else ids for text, ids in zip(texts, encoded, strict=True)]


def test_different_ids_of_the_same_files_are_blamed_on_the_library() -> None:
    kinds = found(base(TINY).side(kind=Stutters))
    assert set(kinds) == {"library"}
    assert "is equal on both sides" in kinds["library"].cause
    assert kinds["library"].example in tuple("0123456789")


def test_a_token_that_is_listed_twice_has_the_flags_that_tokenizers_loads() -> None:
    spec = base(TINY).spec
    tokens = [{**token, "rstrip": token["content"] == "<tool_call>"} for token in spec["added_tokens"]]
    (own,) = (token for token in spec["added_tokens"] if token["content"] == "<tool_call>")
    twice = {**spec, "added_tokens": [*tokens, {**own, "id": own["id"] + 100, "lstrip": True}]}
    cause = found(base(TINY).side(spec=twice))["added token"].cause
    assert cause == "the flags of the added token '<tool_call>' differ: lstrip=False against True"


def test_tokens_with_each_others_ids_are_another_vocabulary() -> None:
    vocab = dict(base(TINY).spec["model"]["vocab"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    kinds = found(with_model(vocab=vocab))
    assert set(kinds) >= {"vocabulary"}
    assert kinds["vocabulary"].example in ("a", "b")


def test_vocabulary_difference_without_a_text_is_found_by_its_facts() -> None:
    vocab = dict(base(TINY).spec["model"]["vocab"])
    texts = healthy(TINY)
    shown = {i for text in ("Ġquestion", "price", "Hello") for i in texts.encode([text])[0]}
    rare = [token for token, number in vocab.items() if len(token) > 6 and number not in shown][-2:]
    vocab[rare[0]], vocab[rare[1]] = vocab[rare[1]], vocab[rare[0]]
    kinds = found(with_model(vocab=vocab))
    assert "vocabulary" in kinds


def test_a_part_that_differs_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    monkeypatch.setattr(parts, "part_words", lambda name, a, b: described.append(name) or name)
    vocab = dict(base(TINY).spec["model"]["vocab"])
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    causes = TextCauses(healthy(TINY), with_model(vocab=vocab))
    assert [causes.words("vocabulary"), causes.words("vocabulary")] == ["vocabulary"] * 2
    assert described == ["vocabulary"]


def swapped_bytes(spec: dict[str, Any]) -> None:
    vocab = spec["model"]["vocab"]
    vocab["<0xFB>"], vocab["<0x23>"] = vocab["<0x23>"], vocab["<0xFB>"]


def token_with_a_space(spec: dict[str, Any]) -> None:
    (token,) = [entry for entry in spec["added_tokens"] if entry["content"] == "<tr>"]
    token["content"] = "<tr> "


def facts_shown(change: Callable[[Any], None]) -> list[Skew]:
    spec = copy.deepcopy(base("gemma3").spec)
    change(spec)
    return [
        finding
        for finding in audit(healthy("gemma3"), base("gemma3").side(spec=spec)).findings
        if finding.severity == "skew"
    ]


def test_vocabulary_difference_without_a_text_is_shown_by_an_id() -> None:
    (found,) = facts_shown(swapped_bytes)
    assert found.cause.startswith("the vocabularies differ: 2 tokens")
    assert found.example == (base("gemma3").spec["model"]["vocab"]["<0x23>"],)
    assert (found.a.text, found.b.text) == ("#", "\ufffd")


def test_each_added_token_that_one_side_lacks_is_shown() -> None:
    left, right = facts_shown(token_with_a_space)
    assert (left.example, right.example) == ("<tr>", "<tr> ")
    assert right.cause == "'<tr> ' is an added token in B but not in A, which reads it as text"
    assert (len(right.a.ids), len(right.b.ids)) == (2, 1)


class FillsInTools(SpecBackend):
    """Writes every field that its own schema of a tool has, as servers do that read tools into objects."""

    def render(self, conversation: SkewChat) -> Rendering:
        tools = tuple({**tool, "function": {**tool["function"], "strict": False}} for tool in conversation.tools)
        return super().render(replace(conversation, tools=tools))


def test_tool_definitions_with_more_fields_are_named_and_shown_on_a_whole_tool() -> None:
    kinds = found(base(TINY).side(kind=FillsInTools))
    assert set(kinds) == {"tools"}
    assert isinstance(kinds["tools"].example, SkewChat)
    (tool,) = kinds["tools"].example.tools
    assert set(tool) == {"type", "function"}
    assert "name" in tool["function"]
    assert kinds["tools"].count > 50


@pytest.mark.slow
def test_settings_of_the_model_are_named() -> None:
    kinds = found(with_model(ignore_merges=True, merges=base(TINY).spec["model"]["merges"][:500]))
    assert set(kinds) <= {"merges", "model settings"}
    assert kinds


def test_another_end_token_in_the_configuration_is_found() -> None:
    kinds = found(base(TINY).side(config={**base(TINY).config, "eos_token": "<|endoftext|>"}))
    assert set(kinds) >= {"special tokens"}
    assert "eos_token is <|im_end|> in A and <|endoftext|> in B" in kinds["special tokens"].cause


@pytest.mark.parametrize(
    ("files", "same"),
    [
        ({"generation_config.json": [5, 3]}, True),
        ({"config.json": [5]}, False),
        ({"config.json": [5, 3], "generation_config.json": None}, False),
        ({"config.json": [5, 3]}, True),
    ],
)
def test_end_tokens_that_one_of_two_files_repeats_are_no_skew(
    tmp_path: Path, files: dict[str, list[int] | None], same: bool
) -> None:
    sides = []
    both: dict[str, list[int] | None] = {"config.json": [3, 5], "generation_config.json": [3, 5]}
    for name, listed in (("a", both), ("b", files)):
        folder = shutil.copytree(MODEL, tmp_path / name)
        for file in both:
            (folder / file).unlink()
        for file, ids in listed.items():
            (folder / file).write_text(json.dumps({"eos_token_id": ids}))
        sides.append(open_json(name, folder, BackendOptions()))
    found = configuration_findings(sides[0].facts, sides[1].facts)
    assert {finding.kind for finding in found} == (set() if same else {"stop ids"})


@pytest.mark.parametrize("part", ["vision_config", "text_config", "thinker_config.text_config"])
@pytest.mark.parametrize("key", ["image_token_index", "pad_token_id"])
def test_ids_in_nested_configurations_are_compared(tmp_path: Path, part: str, key: str) -> None:
    sides = []
    for number in (7, 8):
        config: dict[str, Any] = {key: number}
        for name in reversed(part.split(".")):
            config = {name: config}
        folder = shutil.copytree(MODEL, tmp_path / str(number))
        (folder / "config.json").write_text(json.dumps(config))
        sides.append(open_json(str(number), folder, BackendOptions()))
    (finding,) = configuration_findings(sides[0].facts, sides[1].facts)
    assert finding.cause.endswith(f"{key} is 7 in A and 8 in B")


def test_an_end_token_that_only_a_nested_configuration_contradicts_is_found(tmp_path: Path) -> None:
    sides = []
    for nested in ({"eos_token_id": 3}, {}):
        folder = shutil.copytree(MODEL, tmp_path / str(len(nested)))
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": nested}))
        (folder / "generation_config.json").unlink()
        sides.append(open_json("side", folder, BackendOptions()))
    (finding,) = configuration_findings(sides[0].facts, sides[1].facts)
    assert finding.cause.startswith("config.json text_config.eos_token_id is 3 in A and not set in B")


def test_keys_that_transformers_moves_into_text_config_are_the_same(tmp_path: Path) -> None:
    sides = []
    for name, config in (("a", {"eos_token_id": 5}), ("b", {"text_config": {"eos_token_id": 5}})):
        folder = shutil.copytree(MODEL, tmp_path / name)
        (folder / "config.json").write_text(json.dumps(config))
        sides.append(open_json(name, folder, BackendOptions()))
    assert not configuration_findings(sides[0].facts, sides[1].facts)


@pytest.mark.parametrize("name", ["truncation", "padding"])
def test_another_order_of_keys_is_the_same_truncation_and_padding(name: str) -> None:
    setting = {"direction": "Right", "max_length": 512}
    a, same, other = (
        replace(healthy(TINY).facts, spec={name: value})
        for value in (setting, dict(reversed(setting.items())), {**setting, "max_length": 256})
    )
    assert not configuration_findings(a, same)
    (found,) = configuration_findings(a, other)
    assert found.cause.startswith(f"{name} in tokenizer.json is")


@pytest.mark.parametrize("name", ["truncation", "padding"])
def test_truncation_and_padding_of_one_file_are_a_caution(name: str) -> None:
    a = replace(healthy(TINY).facts, spec={name: {"max_length": 512}})
    (found,) = configuration_findings(a, replace(a, kind="vLLM server", spec=None))
    assert found.severity == "caution"
    assert found.cause.startswith(f'{name} in tokenizer.json is {{"max_length": 512}} in A: `tokenizers` applies it')


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_piece_changed_in_two_places_is_named_by_both_outputs(role: str) -> None:
    roles = "{{ 'user' }}{{ ': ' }}", "{{ 'assistant' }}{{ ': ' }}"
    source = (
        "{%% for m in messages %%}{%% if m.role == 'user' %%}%s{%% else %%}%s{%% endif %%}{{ m.content }}{%% endfor %%}"
    )
    a = base(TINY).side("A", template=source % roles)
    b = base(TINY).side(template=(source % roles).replace("': '", "':'"))
    written = [side.render(SkewChat(({"role": role, "content": "hi"},), generate=False)).text for side in (a, b)]
    causes = TemplateCauses(a.facts, b.facts, "2026-01-01", lambda _: (written[0], written[1]))
    found = causes.cause_of(SkewChat(({"role": role, "content": "hi"},), generate=False), *written)
    assert "the template has" in found.what


def test_rows_without_a_token_are_a_caution(tmp_path: Path) -> None:
    """Row 19: ids of padding rows can be sampled."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4096}}))
    report = audit(open_json("A", tmp_path, BackendOptions()), healthy(TINY))
    assert [(finding.kind, finding.severity) for finding in report.findings] == [("embedding rows", "caution")]
    assert report.findings[0].cause == "ids 4000 to 4095 have embedding rows in A, but no token"


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_json_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerUnusable):
        open_json("A", tmp_path, BackendOptions())


def test_lookalike_text_is_quoted_with_escapes() -> None:
    assert quoted("e\u0301 \u00e9 \u00a0\u200b\n") == '"e\\u0301 é \\u00a0\\u200b\\n"'
