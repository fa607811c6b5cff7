"""Each kind of change to a real tokenizer or template is reported by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentape
from tests.chat.conftest import FAMILIES, REAL_FAMILIES, SMALL, model_path, slow_unless
from tokentape.audit._lock import Lock, LockReport, examine, make_lock, read_lock, write_lock
from tokentape.audit._lock.lockfile import spec_parts
from tokentape.errors import InvalidRequest, TokenizationChanged, TokenizerUnusable

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Qwen3's added tokens and template."""
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL / "qwen3" / name, folder / name)
    template = next(path for path in sorted((SMALL / "qwen3" / "templates").glob("*.jinja")))
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="module")
def lock(qwen: Path) -> Lock:
    return make_lock(qwen)


@pytest.fixture(scope="module")
def tiny_lock(model_dir: Path) -> Lock:
    return make_lock(model_dir)


@pytest.fixture
def tiny(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's tokenizer, to be changed."""
    folder = tmp_path / "tiny"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def edited(folder: Path, edit: Edit, name: str = "tokenizer.json") -> Path:
    spec = json.loads((folder / name).read_text(encoding="utf-8"))
    edit(spec)
    (folder / name).write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    return folder


def changed(report: LockReport) -> list[str]:
    return [change.what for change in report.changes]


def copy_of(folder: Path, into: Path) -> Path:
    return Path(shutil.copytree(folder, into / "model"))


def test_unchanged_parts_are_not_reported(tiny_lock: Lock, tiny: Path) -> None:
    report = examine(tiny_lock, tiny, strict=True)
    assert (report.ok, report.changes, report.notes) == (True, (), ())
    assert report.inputs == len(tiny_lock.goldens) > 40


def test_lock_round_trips(tiny_lock: Lock, tmp_path: Path) -> None:
    write_lock(tiny_lock, tmp_path / "a.lock")
    again = read_lock(tmp_path / "a.lock")
    assert again == tiny_lock
    assert again.to_text() == (tmp_path / "a.lock").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda fields: fields.update(template_kwargs=None), "template_kwargs"),
        (lambda fields: fields["components"].update(steps=None), "steps"),
        (lambda fields: fields["components"]["steps"].pop("decoder"), "its steps are"),
        (lambda fields: fields["goldens"][0].update(text=5), "text"),
        (lambda fields: fields["goldens"][0].update(txet="a"), "unknown or missing fields"),
        (lambda fields: fields["goldens"][0].pop("ids"), "unknown or missing fields"),
        (lambda fields: fields["components"]["added_tokens"].append([1]), "added_tokens"),
        (lambda fields: fields.pop("components"), "components"),
        (lambda fields: fields["components"]["loading"].update({"/tmp/x": {}}), "/tmp/x; expected only tokenizer_c"),
        (lambda fields: fields["components"]["loading"].update({"../x.json": {}}), "../x.json; expected only"),
        (
            lambda fields: fields["components"]["loading"].update(additional_chat_templates={"../x": "0"}),
            "template names: ../x; expected names without",
        ),
    ],
)
def test_a_damaged_lock_is_refused(tiny_lock: Lock, tmp_path: Path, damage: Edit, message: str) -> None:
    write_lock(tiny_lock, tmp_path / "a.lock")
    edited(tmp_path, damage, "a.lock")
    with pytest.raises(InvalidRequest, match=f"not a valid lockfile: .*{message}"):
        read_lock(tmp_path / "a.lock")


def test_added_token_that_lost_special_is_named(tiny_lock: Lock, tiny: Path) -> None:
    edited(tiny, lambda spec: spec["added_tokens"][0].update(special=False))
    report = examine(tiny_lock, tiny)
    assert "added tokens" in changed(report)
    assert f"{tiny_lock.components.added_tokens[0].content!r} is no longer special" in str(report)


def test_edited_template_is_reported_with_line_and_conversation(tiny_lock: Lock, tiny: Path) -> None:
    template = tiny / "chat_template.jinja"
    template.write_text("{{ '' }}" + template.read_text(encoding="utf-8") + "x", encoding="utf-8")
    report = examine(tiny_lock, tiny)
    (part,) = (change for change in report.changes if change.what == "template")
    assert part.found.startswith("line 1 was ")
    (shown,) = (change for change in report.changes if change.what == "golden ids")
    assert shown.golden is not None
    assert shown.golden.messages
    assert shown.ids != shown.golden.ids
    assert "template" in shown.cause


def test_replaced_piece_is_reported_with_block_and_text(tiny_lock: Lock, tiny: Path) -> None:
    def swap(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    report = examine(tiny_lock, edited(tiny, swap))
    assert "vocabulary" in changed(report)
    text = next(change for change in report.changes if change.golden is not None and not change.golden.messages)
    assert text.golden is not None
    assert text.golden.ids is not None
    assert text.ids is not None
    assert text.golden.ids[: text.at] == text.ids[: text.at]
    assert text.golden.ids[text.at] != text.ids[text.at]


def test_merges_that_changed_are_named(tiny_lock: Lock, tiny: Path) -> None:
    def edit(spec: dict[str, Any]) -> None:
        merges = spec["model"]["merges"]
        names.extend(" ".join(merges[at]) for at in (50, 900))
        merges.insert(2000, merges.pop(50))
        del merges[899]

    names: list[str] = []
    report = examine(tiny_lock, edited(tiny, edit))
    (merges,) = (change for change in report.changes if change.what == "merges")
    assert merges.found == f"1 gone: {names[1]!r}; 1 moved: {names[0]!r}"


def without_effect(spec: dict[str, Any]) -> None:
    spec["normalizer"] = {"type": "Sequence", "normalizers": [part] if (part := spec["normalizer"]) else []}
    spec["model"]["merges"].insert(0, spec["model"]["merges"][-1])  # the last place counts


def test_parts_that_provably_have_no_other_effect_are_as_locked(tiny_lock: Lock, tiny: Path) -> None:
    assert examine(tiny_lock, edited(tiny, without_effect)).ok


def test_settings_that_provably_have_no_other_effect_are_as_locked(tiny_lock: Lock, tiny: Path) -> None:
    assert examine(tiny_lock, edited(tiny, lambda spec: spec["model"].update(fuse_unk=True, dropout=0.0))).ok


@pytest.mark.parametrize(("added", "same"), [("{# A comment. #}", True), ("\n", True), ("{{ '.' }}", False)])
def test_a_template_that_provably_writes_the_same_is_as_locked(
    tiny_lock: Lock, tiny: Path, added: str, same: bool
) -> None:
    template = tiny / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").rstrip("\n") + added, encoding="utf-8")
    assert ("template" not in changed(examine(tiny_lock, tiny))) is same


def test_different_eos_id_is_reported(tiny_lock: Lock, tiny: Path) -> None:
    report = examine(
        tiny_lock, edited(tiny, lambda spec: spec.update(eos_token_id=[0, 1, 5]), "generation_config.json")
    )
    assert changed(report)[0] == "end-of-sequence ids"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "change", "part", "message"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["price"]}, "loading", "extra_special_tokens was not set"),
        (
            "tokenizer_config.json",
            {"split_special_tokens": True},
            "loading",
            "split_special_tokens was not set or false, is true",
        ),
        ("special_tokens_map.json", {"eos_token": "bye"}, "loading", "eos_token was not set"),
        ("generation_config.json", {"stop_strings": ["x"]}, "configuration", "stop_strings was null"),
        ("tokenizer_config.json", {"model_max_length": 512}, "configuration", "model_max_length was 2048, is 512"),
    ],
)
def test_other_tokenizer_files_are_compared(
    tiny_lock: Lock, tiny: Path, name: str, change: dict[str, Any], part: str, message: str
) -> None:
    if not (tiny / name).is_file():
        (tiny / name).write_text("{}", encoding="utf-8")
    report = examine(tiny_lock, edited(tiny, lambda settings: settings.update(change), name))
    assert set(changed(report)) == {part}
    assert message in str(report)


def test_named_template_is_compared(tiny_lock: Lock, tiny: Path) -> None:
    (tiny / "additional_chat_templates").mkdir()
    (tiny / "additional_chat_templates" / "rag.jinja").write_text("x", encoding="utf-8")
    (change,) = examine(tiny_lock, tiny).changes
    assert (change.what, change.found) == ("template", "the template named rag is new")


def test_file_that_transformers_ignores_is_not_recorded(tiny_lock: Lock, tiny: Path, tmp_path: Path) -> None:
    loading = {str(tmp_path / "victim"): {"x": 1}, "tokenizer_config.json": {"add_bos_token": True}}
    examine(replace(tiny_lock, components=replace(tiny_lock.components, loading=loading)), tiny)
    assert not (tmp_path / "victim").exists()


def test_settings_that_make_the_same_tokenizer_are_a_note(tiny_lock: Lock, tiny: Path) -> None:
    edited(tiny, lambda settings: settings.update(add_bos_token=True), "tokenizer_config.json")
    report = examine(tiny_lock, tiny)
    assert report.ok
    assert any("loads the same tokenizer from both" in note for note in report.notes)


def test_a_special_token_that_stays_null_is_no_change(tiny: Path) -> None:
    """If the key is missing, this class sets an unknown token of its own."""
    settings = {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
    edited(tiny, lambda config: config.update(settings), "tokenizer_config.json")
    lock = make_lock(tiny)
    assert examine(lock, edited(tiny, lambda config: config.update(errors="replace"), "tokenizer_config.json")).ok


def test_different_template_kwargs_are_reported_for_the_same_files(tiny_lock: Lock, tiny: Path) -> None:
    report = examine(tiny_lock, tiny, {"enable_thinking": False})
    assert changed(report)[0] == "template kwargs"
    assert 'were {}, are {"enable_thinking": false}' in str(report)


def test_equivalent_bytes_are_a_note_and_fail_only_with_strict(tiny_lock: Lock, tiny: Path) -> None:
    edited(tiny, lambda spec: None)
    report = examine(tiny_lock, tiny)
    assert report.ok
    assert report.notes == (
        "tokenizer.json has different bytes, but nothing that was compared in it has another effect",
    )
    assert changed(examine(tiny_lock, tiny, strict=True)) == ["versions and files"]


def test_library_version_is_a_note_and_fails_only_with_strict(tiny_lock: Lock, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.lock"
    path.write_text(tiny_lock.to_text().replace(f'"jinja2": "{tiny_lock.versions["jinja2"]}"', '"jinja2": "2.0"'))
    old = read_lock(path)
    report = examine(old, tiny)
    assert report.ok
    assert report.notes == (f"jinja2 was 2.0, is {tiny_lock.versions['jinja2']}",)
    assert not examine(old, tiny, strict=True).ok


def test_other_certifier_result_is_a_note_and_fails_only_with_strict(tiny_lock: Lock, tiny: Path) -> None:
    certificate = {**tiny_lock.certificate, "injection-safe": "no"}
    old = replace(tiny_lock, certificate=certificate, certifier="0" * 64)
    report = examine(old, tiny)
    assert report.ok
    (note,) = report.notes
    assert note.startswith(
        'a different version of the certifier made the certificate in the lock: injection-safe: was "no"'
    )
    assert changed(examine(old, tiny, strict=True)) == ["versions and files"]
    # Under the same files the same certifier has no excuse, nor has another one for a part that changed.
    assert changed(examine(replace(tiny_lock, certificate=certificate), tiny)) == ["certificate"]
    assert "certificate" in changed(examine(old, tiny, {"enable_thinking": False}))


def test_changed_parsing_setting_fails_despite_another_certifier(tiny_lock: Lock, tiny: Path) -> None:
    certificate = {**tiny_lock.certificate, "parsing call": "does not come back"}
    old = replace(tiny_lock, certificate=certificate, certifier="0" * 64)
    edited(tiny, lambda config: config.update(response_template={"fields": {}}), "tokenizer_config.json")
    assert changed(examine(old, tiny)) == ["certificate"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_unreadable_tokenizer_json_is_refused(tiny_lock: Lock, tiny: Path, encoding: str) -> None:
    source = tiny / "tokenizer.json"
    source.write_text(source.read_text(encoding="utf-8"), encoding=encoding)
    with pytest.raises(TokenizerUnusable):
        examine(tiny_lock, tiny)


def test_swapped_ids_of_newline_pieces_change_the_vocabulary() -> None:
    model = {"type": "BPE", "merges": []}
    left, right, plain = (
        spec_parts({"model": {**model, "vocab": {piece: number for number, piece in enumerate(pieces)}}})["vocabulary"]
        for pieces in (["a", "\n", "\n\n"], ["a", "\n\n", "\n"], ["a", "b", "c"])
    )
    assert left != right
    # Other vocabularies keep the digests that locks have.
    assert plain == (hashlib.sha256(b"a\nb\nc").hexdigest()[:12],)


def test_processor_only_template_is_named_and_not_called_unchanged(tiny_lock: Lock, tiny: Path) -> None:
    (tiny / "chat_template.json").write_text("{}")
    report = examine(tiny_lock, tiny)
    assert report.ok
    assert report.notes == ("chat_template.json is new, which transformers processors read: it was not compared",)


def test_a_changed_certificate_names_changes_only_if_there_are_some(tiny_lock: Lock, tiny: Path) -> None:
    lock = replace(tiny_lock, certificate={**tiny_lock.certificate, "injection-safe": "no"})
    found = {kwargs: examine(lock, tiny, {"a": 1} if kwargs else {}) for kwargs in (True, False)}
    causes = {kwargs: report.changes[-1].cause for kwargs, report in found.items()}
    assert causes == {True: "the changes above", False: ""}
    assert "    usual cause: the changes above\n" in f"{found[True]}\n"


def test_different_ids_of_equal_parts_are_blamed_on_the_library(tiny_lock: Lock, tiny: Path, tmp_path: Path) -> None:
    written = json.loads(tiny_lock.to_text())
    written["goldens"][0]["ids"][3] += 1
    written["versions"]["tokenizers"] = "0.1"
    path = tmp_path / "old.lock"
    path.write_text(json.dumps(written), encoding="utf-8")
    (change,) = examine(read_lock(path), tiny).changes
    assert (change.what, change.at) == ("golden ids", 3)
    assert "tokenizers was 0.1" in change.cause


@pytest.mark.parametrize("found", [0, 2])
def test_lock_of_another_format_is_refused_with_advice(tiny_lock: Lock, tmp_path: Path, found: int) -> None:
    path = tmp_path / "other.lock"
    path.write_text(tiny_lock.to_text().replace('"format": 1', f'"format": {found}'), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=f"format {found}, but this version of tokentape reads format 1"):
        read_lock(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "components": {}}'])
def test_file_that_is_not_a_lock_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "not.lock"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match="lockfile"):
        read_lock(path)


def test_check_raises_the_text_of_the_report(tiny_lock: Lock, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokentape.lock"
    write_lock(tiny_lock, path)
    tokentape.check(path, tiny)
    edited(tiny, lambda spec: spec["added_tokens"][0].update(lstrip=True))
    with pytest.raises(TokenizationChanged, match="is now lstrip") as raised:
        tokentape.check(path, tiny)
    assert raised.value.report == examine(tiny_lock, tiny)


def test_check_without_anything_to_compare_is_refused(tiny_lock: Lock, tmp_path: Path) -> None:
    path = tmp_path / "tokentape.lock"
    write_lock(tiny_lock, path)
    with pytest.raises(InvalidRequest, match="nothing to compare"):
        tokentape.check(path)
    with pytest.raises(InvalidRequest, match="a int can't be checked"):
        tokentape.check(path, 3)


@pytest.mark.slow
def test_dropped_normalizer_is_reported_with_a_text(lock: Lock, qwen: Path, tmp_path: Path) -> None:
    report = examine(lock, edited(copy_of(qwen, tmp_path), lambda spec: spec.update(normalizer=None)))
    part, shown = (next(c for c in report.changes if c.what == what) for what in ("normalizer", "golden ids"))
    assert part.found == "was NFC, is none"
    assert shown.golden is not None
    assert shown.golden.name == "combining characters"
    assert "normalizer" in shown.cause


@pytest.mark.slow
def test_different_pre_tokenizer_pattern_is_reported(lock: Lock, qwen: Path, tmp_path: Path) -> None:
    def three_digits(spec: dict[str, Any]) -> None:
        step = spec["pre_tokenizer"]["pretokenizers"][0]
        step["pattern"]["Regex"] = step["pattern"]["Regex"].replace(r"\p{N}|", r"\p{N}{1,3}|")

    report = examine(lock, edited(copy_of(qwen, tmp_path), three_digits))
    assert changed(report)[0] == "pre_tokenizer"
    assert ".pretokenizers[0].pattern.Regex" in report.changes[0].found


def test_tokenizer_of_another_model_is_reported(lock: Lock, qwen: Path, tmp_path: Path) -> None:
    folder = copy_of(qwen, tmp_path)
    shutil.copy(SMALL / "glm4_5" / "tokenizer.json", folder / "tokenizer.json")
    report = examine(lock, folder)
    assert {"vocabulary", "merges", "added tokens", "golden ids"} <= set(changed(report))


def test_a_live_tokenizer_is_compared_as_a_trainer_calls_it(tiny_lock: Lock, model_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    live = transformers.AutoTokenizer.from_pretrained(model_dir)
    assert examine(tiny_lock, live).ok
    live.add_special_tokens({"additional_special_tokens": ["<|act|>"]})
    report = examine(tiny_lock, live)
    assert changed(report) == ["added tokens"]
    assert "'<|act|>' is new" in str(report)


def test_a_special_token_that_code_sets_is_told_if_the_locked_files_name_none(tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    locked = make_lock(edited(tiny, lambda config: config.pop("pad_token"), "tokenizer_config.json"))
    live = transformers.AutoTokenizer.from_pretrained(tiny)
    assert examine(locked, live).ok
    live.pad_token = live.eos_token
    report = examine(locked, live)
    assert changed(report) == ["special tokens"]
    assert "pad_token was none, is '<|im_end|>'" in str(report)


def test_a_special_token_of_a_special_tokens_map_was_not_set_by_code(tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    edited(tiny, lambda config: config.pop("pad_token"), "tokenizer_config.json")
    (tiny / "special_tokens_map.json").write_text('{"pad_token": "<|endoftext|>"}')
    live = transformers.AutoTokenizer.from_pretrained(tiny)
    assert live.pad_token == "<|endoftext|>"
    assert examine(make_lock(tiny), live).ok


def test_a_model_type_for_which_transformers_takes_another_class_is_told(tiny: Path) -> None:
    pytest.importorskip("transformers")
    edited(tiny, lambda config: config.pop("tokenizer_class", None), "tokenizer_config.json")
    locked = make_lock(edited(tiny, lambda config: config.update(model_type="qwen3"), "config.json"))
    assert examine(locked, tiny).ok
    report = examine(locked, edited(tiny, lambda config: config.update(model_type="gpt2"), "config.json"))
    assert set(changed(report)) == {"loading"}
    assert 'config.json model_type was "qwen3", is "gpt2"' in str(report)


def test_a_lock_without_the_class_in_config_json_says_so(tiny_lock: Lock, tiny: Path) -> None:
    components = tiny_lock.components
    loading = {file: keys for file, keys in (components.loading or {}).items() if file != "config.json"}
    report = examine(replace(tiny_lock, components=replace(components, loading=loading)), tiny)
    assert report.ok
    assert any("the tokenizer class that config.json names" in what for what in report.not_compared)


@pytest.mark.parametrize("part", ["goldens", "certificate"])
def test_a_lock_that_was_emptied_is_refused(tiny_lock: Lock, tmp_path: Path, part: str) -> None:
    path = tmp_path / "tokentape.lock"
    write_lock(replace(tiny_lock, **{part: () if part == "goldens" else {}}), path)
    with pytest.raises(InvalidRequest, match="no golden inputs or no certificate"):
        read_lock(path)


def test_the_template_of_a_live_tokenizer_is_compared(tiny_lock: Lock, model_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    live = transformers.AutoTokenizer.from_pretrained(model_dir)
    live.chat_template = live.chat_template.replace("assistant", "Assistant")
    report = examine(tiny_lock, live)
    assert changed(report) == ["template", "golden ids"]


def test_a_processor_is_compared_by_its_tokenizer(tiny_lock: Lock, model_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Processor:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        chat_template = tokenizer.chat_template

    assert examine(tiny_lock, Processor()).ok


@pytest.mark.parametrize(
    "family",
    [slow_unless(name, "qwen2_5") for name in FAMILIES + REAL_FAMILIES],
)
def test_every_family_matches_its_lock_in_folder_and_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path(family) / name, tmp_path / name)
    for template in sorted((model_path(family) / "templates").glob("*.jinja")):
        shutil.copy(template, tmp_path / "chat_template.jinja")
        made = make_lock(tmp_path)
        assert len(made.to_text()) - len(made.components.merge_list or "") < 100_000
        assert (
            str(examine(made, tmp_path)) == f"{tmp_path} is as locked: {len(made.goldens)} golden inputs have their ids"
        )
        assert examine(made, transformers.AutoTokenizer.from_pretrained(tmp_path)).changes == ()
