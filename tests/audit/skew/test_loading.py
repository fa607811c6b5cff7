"""Files next to tokenizer.json: those that change the tokenizer in transformers are findings, the rest are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.audit.skew.cases import TINY, base
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import spec as spec_backend
from tokentape.audit._skew.file_findings import same_template
from tokentape.audit._skew.findings import AuditReport, audit_cases
from tokentape.demo import MODEL
from tokentape.errors import TokenizerUnusable

CONFIG, LEGACY, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the demo's tokenizer and without templates, which an audit compares fast."""
    found = tmp_path / "a", tmp_path / "b"
    for folder in found:
        folder.mkdir()
        for name in ("tokenizer.json", CONFIG):
            shutil.copy(MODEL / name, folder / name)
    return found


def put(folder: Path, file: str, **settings: Any) -> None:
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**before, **settings}), encoding="utf-8")


def skews(report: AuditReport) -> list[tuple[str, Any]]:
    return [(finding.kind, finding.example) for finding in report.findings if finding.severity == "skew"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "settings", "kind", "example"),
    [
        (CONFIG, {"added_tokens_decoder": {"5000": {"content": "hello", **TOKEN}}}, "added token", "hello"),
        (CONFIG, {"extra_special_tokens": ["price"]}, "added token", " price"),
        (CONFIG, {"split_special_tokens": True}, "library", "<|im_end|>"),
        (CONFIG, {"padding_side": "left"}, "truncation", None),
        (CONFIG, {"truncation_side": "left"}, "truncation", None),
        (LEGACY, {"eos_token": "<|endoftext|>"}, "special tokens", None),
        (ADDED, {"price": 5000}, "added token", " price"),
    ],
)
def test_another_tokenizer_by_transformers_is_skew(
    sides: tuple[Path, Path], file: str, settings: dict[str, Any], kind: str, example: str | None
) -> None:
    put(sides[1], file, **settings)
    report = audit(*sides)
    assert skews(report) == [(kind, example)]
    assert all(f"{file} {key} is not set" in report.findings[0].cause for key in settings)


def test_a_clean_up_that_transformers_ignores_is_a_caution(sides: tuple[Path, Path]) -> None:
    """Version 5 ignores it for BPE, so both sides decode alike."""
    put(sides[1], CONFIG, clean_up_tokenization_spaces=True)
    report = audit(*sides)
    assert {(finding.kind, finding.severity) for finding in report.findings} == {("decode clean-up", "caution")}
    assert not report.skewed


def test_another_length_at_which_transformers_truncates_is_a_caution(sides: tuple[Path, Path]) -> None:
    put(sides[1], CONFIG, model_max_length=512)
    report = audit(*sides)
    (found,) = report.findings
    assert (found.kind, found.severity, report.skewed) == ("truncation", "caution", False)
    assert "tokenizer_config.json model_max_length is 2048 in A and 512 in B" in found.cause


def test_folder_without_a_model_config_has_unknown_stop_ids(sides: tuple[Path, Path]) -> None:
    put(sides[1], "config.json", eos_token_id=2)
    assert not audit(*sides).findings


def test_huge_number_counts_as_no_limit(sides: tuple[Path, Path]) -> None:
    for folder in sides:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        del settings["model_max_length"]
        (folder / CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    put(sides[1], CONFIG, model_max_length=int(1e30))
    assert not audit(*sides).findings


def test_a_special_token_that_is_null_differs_from_one_that_the_class_sets(sides: tuple[Path, Path]) -> None:
    for folder in sides:
        put(folder, CONFIG, tokenizer_class="Qwen2Tokenizer")
    put(sides[0], CONFIG, unk_token=None)
    assert "unk_token is null in A and not set in B" in audit(*sides).findings[0].cause


def test_settings_that_transformers_does_not_take_are_a_note(sides: tuple[Path, Path]) -> None:
    put(sides[0], CONFIG, add_bos_token=True)
    report = audit(*sides)
    assert not report.findings
    assert "add_bos_token is true in A and not set in B" in report.notes[-1]


def test_redundant_tokenizer_files_are_not_loaded(sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    added = json.loads((sides[0] / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    decoder = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added}
    put(sides[0], CONFIG, added_tokens_decoder=decoder, additional_special_tokens=["<|im_start|>"])
    monkeypatch.setattr(spec_backend, "AutoBackend", None)
    report = audit(*sides)
    assert (report.findings, report.notes) == ((), ())


def test_different_settings_are_not_called_equal_without_transformers(
    sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise TokenizerUnusable("transformers is not installed")

    put(sides[0], CONFIG, extra_special_tokens=["price"])
    monkeypatch.setattr(spec_backend, "AutoBackend", missing)
    report = audit(*sides)
    assert skews(report) == [("unknown", None)]
    assert "transformers is not installed" in report.findings[0].cause


@pytest.mark.parametrize("flipped", [False, True])
def test_a_template_on_one_side_only_is_skew_and_no_pass(sides: tuple[Path, Path], flipped: bool) -> None:
    (sides[0] / "chat_template.jinja").write_text(base(TINY).template or "", encoding="utf-8")
    report = audit(*(reversed(sides) if flipped else sides))
    assert [(finding.kind, finding.cause[2:]) for finding in report.findings] == [
        ("template", f"has a chat template and {'A' if flipped else 'B'} has none")
    ]
    assert [case.name for case in audit_cases(report) if case.skipped] == ["not tried: conversations"]


def test_templates_by_other_names_are_compared(sides: tuple[Path, Path]) -> None:
    for number, folder in enumerate(sides):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text(f"{{{{ messages }}}}{number}", encoding="utf-8")
    assert "named rag differs between A and B" in audit(*sides).findings[0].cause


@pytest.mark.parametrize("key", ["stop_strings", "suppress_tokens", "sequence_bias", "forced_eos_token_id"])
def test_end_of_turn_text_is_compared_although_never_sampled(sides: tuple[Path, Path], key: str) -> None:
    put(sides[0], "generation_config.json", eos_token_id=1)
    put(sides[1], "generation_config.json", eos_token_id=1, **{key: [7]})
    (found,) = audit(*sides).findings
    assert found.cause.startswith(f"generation_config.json {key} is not set in A and 7 in B")


def test_loss_markers_do_not_hide_text_differences() -> None:
    plain = "{% for m in messages %}a\n\n{{ m.content }}{% endfor %}"
    marked = "{% for m in messages %}a\n\n{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert same_template(plain, marked)
    assert not same_template(plain, marked.replace("\n\n", "\n"))
    assert not same_template(plain, marked.replace("{% endgeneration %}", "\n\n{% endgeneration %}"))


@pytest.mark.parametrize(("a", "b"), [("{{ true }}", "{{ 1 }}"), ("{{ 1 }}", "{{ 1.0 }}")])
def test_templates_that_write_equal_values_differently_are_not_the_same(a: str, b: str) -> None:
    assert not same_template(a, b)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("{% set x = 1 %}", "{{ x }}"),
        ("{% set x %}a{% endset %}", "{{ x }}"),
        ("{% macro x() %}a{% endmacro %}", "{{ x() }}"),
    ],
)
def test_a_name_set_in_a_loss_marker_is_not_set_after_it(body: str, after: str) -> None:
    assert not same_template(f"{{% generation %}}{body}{{% endgeneration %}}{after}", body + after)


@pytest.mark.parametrize(
    "body", ["{% for x in y %}{% set z = x %}{{ z }}{% endfor %}", "{% set ns.x = 1 %}"], ids=["loop", "namespace"]
)
def test_a_loss_marker_is_no_difference_if_it_limits_no_name(body: str) -> None:
    assert same_template(f"{{% generation %}}{body}{{% endgeneration %}}{{{{ z }}}}", body + "{{ z }}")


def test_a_model_type_for_which_transformers_takes_another_class_is_skew(sides: tuple[Path, Path]) -> None:
    for folder, model_type in zip(sides, ("qwen3", "gpt2"), strict=True):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if k != "tokenizer_class"}))
        put(folder, "config.json", model_type=model_type)
    report = audit(*sides)
    assert {kind for kind, _ in skews(report)} == {"normalizer", "pre-tokenizer"}
    assert all('config.json model_type is "qwen3" in A and "gpt2" in B' in one.cause for one in report.findings)


def test_a_model_type_that_changes_no_tokenizer_is_a_note(sides: tuple[Path, Path]) -> None:
    for folder, model_type in zip(sides, ("qwen2", "qwen3"), strict=True):
        put(folder, "config.json", model_type=model_type)
    report = audit(*sides)
    assert not report.skewed
    assert any('config.json model_type is "qwen2" in A and "qwen3" in B' in note for note in report.notes)


def test_a_folder_without_config_json_is_not_compared_by_its_model_type(sides: tuple[Path, Path]) -> None:
    put(sides[0], "config.json", model_type="qwen3")
    report = audit(*sides)
    assert not report.skewed
    assert not report.notes


def test_files_that_only_other_libraries_read_are_listed_as_not_covered(sides: tuple[Path, Path]) -> None:
    for folder, text in zip(sides, ("one", "two"), strict=True):
        put(folder, CONFIG, chat_template=text)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        (folder / "tokenizer.model").write_text(text)
    report = audit(*sides)
    assert not report.skewed
    listed = [what.partition(",")[0] for what in report.uncovered if "which differs" in what]
    assert listed == ["tokenizer.model", f"chat_template in {CONFIG}"]


def test_parts_that_read_alike_are_told_apart(sides: tuple[Path, Path]) -> None:
    single, first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AAB")
    end = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    special = {"<|im_end|>": {"id": "<|im_end|>", "ids": [3993], "tokens": ["<|im_end|>"]}}
    for folder, pair in zip(sides, ([first, second], [first, end, second]), strict=True):
        part = {"type": "TemplateProcessing", "single": [single], "pair": pair, "special_tokens": special}
        put(folder, "tokenizer.json", post_processor=part)
    (finding,) = audit(*sides).findings
    assert "in A and B, but pair is [" in finding.cause
