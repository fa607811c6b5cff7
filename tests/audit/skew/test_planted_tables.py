"""Faults planted by outside reviewers in files with their own tables: SentencePiece models, tiktoken ranks, GGUF."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.audit.skew.cases import TINY, base
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import open_backend
from tokentape.audit._skew.findings import Skew
from tokentape.audit._skew.parts import byte_level, same_settings
from tokentape.chat._byte_level import BYTE_OF
from tokentape.chat._tokenizer_files import from_text
from tokentape.demo import MODEL
from tokentape.errors import TokenizerUnusable

TEXT = "the cat sat on the mat and the rat ran at the bat that sat there then\n" * 20 + "a hat is that\n" * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "own"),
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        user_defined_symbols=["[INST]"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "own.model"


def proto(model: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    found = sentencepiece_model_pb2.ModelProto()
    found.ParseFromString(model.read_bytes())
    return found


def skews(model: Path, change: Callable[[Any], object]) -> list[Skew]:
    changed = proto(model)
    change(changed)
    other = model.with_name("other.model")
    other.write_bytes(changed.SerializeToString())
    return [finding for finding in audit(str(model), str(other)).findings if finding.severity == "skew"]


def learned(changed: Any) -> list[Any]:
    return [piece for piece in changed.pieces if piece.type == 1 and len(piece.piece) > 2]


def exchange_scores(changed: Any) -> None:
    first, *_, last = learned(changed)
    first.score, last.score = last.score, first.score


def next_score(changed: Any) -> None:
    """Change a score to the next float32, which differs in its eighth decimal."""
    piece = learned(changed)[1]
    piece.score = float(np.nextafter(np.float32(piece.score), np.float32(0)))


def rename(changed: Any) -> None:
    learned(changed)[-1].piece += "q"


def set_type(changed: Any, piece: str, number: int) -> None:
    next(entry for entry in changed.pieces if entry.piece == piece).type = number


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (rename, "vocabulary", "2 differ"),
        (lambda changed: set_type(changed, "[INST]", 1), "vocabulary", "'[INST]'"),
        (lambda changed: setattr(changed.normalizer_spec, "add_dummy_prefix", False), "normalizer", "add_dummy_prefix"),
        (lambda changed: setattr(changed.normalizer_spec, "remove_extra_whitespaces", True), "normalizer", "remove_"),
        (lambda changed: setattr(changed.trainer_spec, "treat_whitespace_as_suffix", True), "model settings", "suffix"),
    ],
    ids=["piece", "type", "prefix", "spaces", "suffix"],
)
def test_a_changed_sentencepiece_model_is_named_with_a_text(
    model: Path, change: Callable[[Any], object], kind: str, message: str
) -> None:
    """Without the tables, two of these were clean, and the others unknown."""
    found = [finding for finding in skews(model, change) if finding.kind != "decoder"]
    assert [finding.kind for finding in found] == [kind]
    assert message in found[0].cause
    assert isinstance(found[0].example, str)
    assert found[0].a.ids != found[0].b.ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchange_scores, "pieces of the model file: 2 differ"),
        (next_score, "pieces of the model file: 1 differ"),
        (lambda changed: setattr(changed.trainer_spec, "eos_piece", "[INST]"), "eos_piece"),
    ],
    ids=["scores", "score", "end"],
)
def test_changes_that_no_text_shows_are_found(model: Path, change: Callable[[Any], object], message: str) -> None:
    assert [message in finding.cause for finding in skews(model, change)] == [True]


def test_another_denormalizer_is_found(model: Path, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "rules.tsv").write_text("10428\t78\n")  # no tried text has U+10428
    files = {"input": str(tmp_path / "text.txt"), "denormalization_rule_tsv": str(tmp_path / "rules.tsv")}
    sentencepiece.SentencePieceTrainer.train(
        **files, model_prefix=str(tmp_path / "own"), vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    rules = proto(tmp_path / "own.model").denormalizer_spec
    [finding] = skews(model, lambda changed: changed.denormalizer_spec.CopyFrom(rules))
    assert finding.kind == "decoder"
    assert finding.cause.startswith("denormalizer of the model file: 1 differ")


def test_a_setting_that_decoding_shows_is_not_said_to_be_unseen(model: Path) -> None:
    found = skews(model, lambda changed: setattr(changed.trainer_spec, "unk_surface", "?"))
    assert [finding.probe for finding in found] == ["decode", "facts"]
    assert "no tried input" not in found[1].cause


def test_a_sentencepiece_model_and_its_copy_are_clean(model: Path) -> None:
    def default(changed: Any) -> None:
        changed.normalizer_spec.escape_whitespaces = True  # unwritten settings already have this value

    assert skews(model, default) == []
    assert not any("tokenizer's parts" in note for note in audit(str(model), str(model)).uncovered)


def test_a_damaged_sentencepiece_model_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.model").write_bytes(model.read_bytes()[:-3])
    with pytest.raises(TokenizerUnusable):
        open_backend(str(tmp_path / "cut.model"))


def test_byte_tokens_of_another_type_decode_as_in_llama_cpp(model: Path, tmp_path: Path) -> None:
    """llama.cpp writes the spelling of a token that has not the type BYTE: `<0x0A>` and no line break."""
    gguf = pytest.importorskip("gguf")

    def written(name: str, byte: int) -> str:
        pieces = proto(model).pieces
        writer = gguf.GGUFWriter(str(tmp_path / name), "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece.piece for piece in pieces])
        writer.add_token_scores([piece.score for piece in pieces])
        writer.add_token_types([byte if piece.type == 6 else piece.type for piece in pieces])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return str(tmp_path / name)

    healthy = written("healthy.gguf", 6)
    assert not audit(healthy, written("copy.gguf", 6)).skewed
    assert [finding.kind for finding in audit(healthy, written("normal.gguf", 1)).findings] == ["decoder"]


def test_tiktoken_ranks_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    """Tiktoken panics on them, which is not an `Exception`."""
    lines = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    lines.append(base64.b64encode(b"ab") + b" 255")
    (tmp_path / "twice.tiktoken").write_bytes(b"\n".join(lines))
    with pytest.raises(TokenizerUnusable, match="gives the rank 255 to"):
        open_backend(str(tmp_path / "twice.tiktoken"))


def test_an_added_token_of_another_spelling_is_named_on_both_sides() -> None:
    """The report used to claim that A encodes texts in pieces of 7 characters."""
    own = replace(base(TINY), template=None)
    ids = {token["content"]: token["id"] for token in own.spec["added_tokens"]}
    model = own.spec["model"]
    spec = {**own.spec, "model": {**model, "vocab": {**model["vocab"], **ids}}}
    name = {"<|im_start|>": "<|im_Start|>"}
    other = {
        **spec,
        "added_tokens": [{**t, "content": name.get(t["content"], t["content"])} for t in spec["added_tokens"]],
        "model": {**model, "vocab": {name.get(t, t): i for t, i in spec["model"]["vocab"].items()}},
    }
    found = audit(own.side("A", spec=spec), own.side("B", spec=other)).findings
    assert {finding.kind for finding in found if finding.severity == "skew"} == {"added token"}
    assert {str(finding.example) for finding in found if finding.severity == "skew"} == {"<|im_start|>", "<|im_Start|>"}


def test_unwritten_settings_are_not_named() -> None:
    own = replace(base(TINY), template=None)
    bare = {key: own.spec["model"][key] for key in ("type", "vocab", "merges")}
    other = {**own.spec, "model": {**bare, "end_of_word_suffix": "."}}
    causes = [finding.cause for finding in audit(own.side("A"), own.side("B", spec=other)).findings]
    about_settings = [cause for cause in causes if cause.startswith("the model settings")]
    assert about_settings
    assert not any("byte_fallback" in cause or "prefix" in cause for cause in about_settings)


BYTES = {
    "byte-level": (
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        [*BYTE_OF],
    ),
    "fallback": (None, [f"<0x{byte:02X}>" for byte in range(256)]),
}


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("kind", list(BYTES))
def test_settings_for_unknown_characters_matter_only_if_a_character_can_be_unknown(kind: str, lacks: bool) -> None:
    step, pieces = BYTES[kind]
    pieces = ["?", *(piece for piece in pieces if not (lacks and piece in ("\xa9", "<0xA9>")))]
    model = {"type": "BPE", "vocab": {piece: n for n, piece in enumerate(pieces)}, "merges": [], "unk_token": "?"}
    model |= {"byte_fallback": kind == "fallback", "fuse_unk": False}
    specs = [{"pre_tokenizer": step, "model": {**model, "fuse_unk": fused}} for fused in (False, True)]
    text = "\U00029a69" * 2  # bytes F0 A9 A9 A9
    ids = [from_text(json.dumps({"version": "1.0", "added_tokens": [], **spec})).encode(text).ids for spec in specs]
    assert same_settings(*specs) is not lacks
    assert (ids[0] == ids[1]) is not lacks


def test_a_difference_of_vocabularies_names_no_added_token() -> None:
    own = replace(base(TINY), template=None)
    vocab = dict(own.spec["model"]["vocab"])
    vocab["Ġthe"], vocab["Ġof"] = vocab["Ġof"], vocab["Ġthe"]
    gone = own.spec["added_tokens"][0]["content"]
    other = {
        **own.spec,
        "added_tokens": own.spec["added_tokens"][1:],
        "model": {**own.spec["model"], "vocab": {token: i for token, i in vocab.items() if token != gone}},
    }
    causes = [
        finding.cause
        for finding in audit(own.side("A"), own.side("B", spec=other)).findings
        if finding.kind == "vocabulary"
    ]
    assert causes
    assert "2 differ, for example 'Ġof'" in causes[0]


def test_files_of_processors_that_differ_are_listed_as_not_covered(tmp_path: Path) -> None:
    for name, size in (("a", 14), ("b", 16)):
        shutil.copytree(MODEL, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        (tmp_path / name / "preprocessor_config.json").write_text(f'{{"patch_size": {size}}}')
    found = audit(tmp_path / "a", tmp_path / "b")
    assert not found.skewed
    assert any(note.startswith("preprocessor_config.json, which differs") for note in found.uncovered)


IM_END = "<|im_end|>"
BYTE_LEVEL = [*(BYTE_OF), "ab", "cd", "abcd", IM_END]
MERGES = ["a b", "c d", "ab cd"]
NORMAL, CONTROL, UNUSED, BYTE = 1, 3, 5, 6
TYPES = [NORMAL] * (len(BYTE_LEVEL) - 1) + [CONTROL]


def gguf_file(
    path: Path,
    pre: str = "gpt-2",
    types: list[int] = TYPES,
    merges: list[str] = MERGES,
    tokens: list[str] = BYTE_LEVEL,
    bos: bool = False,
) -> str:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for which in ("bos", "eos"):
        getattr(writer, f"add_{which}_token_id")(tokens.index(IM_END))
    writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return f"gguf:{path}"


def json_file(folder: Path, pre: str = "gpt2", **changed: Any) -> str:
    """Write the tokenizer of `gguf_file` as tokenizer.json."""
    vocab = {token: n for n, token in enumerate(BYTE_LEVEL) if token != IM_END}
    token = {"id": len(vocab), "content": IM_END, "special": True, "normalized": False}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    model = {"type": "BPE", "vocab": vocab, "merges": [merge.split() for merge in MERGES]}
    spec = {"version": "1.0", "added_tokens": [token | flags], "pre_tokenizer": byte_level(pre), "model": model}
    spec["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec | changed))
    return str(folder)


def skewed_kinds(a: str, b: str) -> list[list[str]]:
    """Return the kinds of skew of both directions."""
    pairs = ((a, b), (b, a))
    return [[f.kind for f in audit(*pair).findings if f.severity == "skew"] for pair in pairs]


def test_a_control_token_of_a_gguf_with_the_type_of_text_is_a_control_token_by_its_name(tmp_path: Path) -> None:
    """llama.cpp overrides the type of the tokens that end turns."""
    other = gguf_file(tmp_path / "a.gguf", types=[NORMAL] * len(BYTE_LEVEL))
    assert skewed_kinds(json_file(tmp_path / "a"), other) == [[], []]


def test_a_token_that_only_llama_cpp_takes_for_a_control_token_has_a_fix_for_the_gguf(tmp_path: Path) -> None:
    vocab = {token: n for n, token in enumerate(BYTE_LEVEL)}
    model = {"type": "BPE", "vocab": vocab, "merges": [merge.split() for merge in MERGES]}
    plain = json_file(tmp_path / "a", added_tokens=[], model=model)
    findings = audit(plain, gguf_file(tmp_path / "a.gguf", types=[NORMAL] * len(BYTE_LEVEL))).findings
    (fix,) = {finding.fix for finding in findings if finding.kind == "added token"}
    assert "llama.cpp chooses some types by name" in fix


def test_of_a_merge_that_a_gguf_lists_twice_the_first_counts(tmp_path: Path) -> None:
    """The last one counts in `tokenizers`, which would merge `a b` first."""
    tokens = [*BYTE_OF, "bc", "ab", IM_END]
    merges = ["b c", "a b", "b c"]
    side = open_backend(gguf_file(tmp_path / "a.gguf", merges=merges, tokens=tokens, types=TYPES[1:]))
    assert side.encode(["abc"]) == [[*map(tokens.index, ["a", "bc"])]]


def test_a_gguf_merges_to_unused_tokens_and_decodes_them_to_nothing(tmp_path: Path) -> None:
    """The audit used to refuse the file. llama.cpp 0.5.0 loads it."""
    unused = [UNUSED if token == "abcd" else kind for token, kind in zip(BYTE_LEVEL, TYPES, strict=True)]
    side = open_backend(gguf_file(tmp_path / "a.gguf", types=unused))
    [ids] = side.encode(["abcd"])
    assert ids == [BYTE_LEVEL.index("abcd")]
    assert side.decode([ids]) == [""]


@pytest.mark.parametrize("kind", [0, UNUSED, BYTE])
def test_a_token_of_a_gguf_that_llama_cpp_decodes_to_other_text_is_found(tmp_path: Path, kind: int) -> None:
    types = [kind if token == "ab" else own for token, own in zip(BYTE_LEVEL, TYPES, strict=True)]
    found = skewed_kinds(json_file(tmp_path / "a"), gguf_file(tmp_path / "a.gguf", types=types))
    assert found == [["decoder"], ["decoder"]]


def test_kimi_is_split_as_in_llama_cpp_which_keeps_words_of_mixed_case(tmp_path: Path) -> None:
    """llama.cpp 0.5.0 reads a word of letters where the model's own expression splits `abCd` before `C`."""
    tokens = [*BYTE_OF, "bC", IM_END]
    side = open_backend(gguf_file(tmp_path / "a.gguf", pre="kimi-k2", merges=["b C"], tokens=tokens, types=TYPES[2:]))
    assert side.encode(["abCd"]) == [[*map(tokens.index, ["a", "bC", "d"])]]


def test_a_split_that_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="an unknown split"):
        open_backend(gguf_file(tmp_path / "a.gguf", pre="gpt2"))


def test_whole_words_are_not_skew_if_only_a_control_token_is_no_merge(tmp_path: Path) -> None:
    """With the GGUF first, the audit used to name `ignore_merges`, because the vocabulary lists the control token."""
    other = gguf_file(tmp_path / "a.gguf", pre="tekken")
    assert skewed_kinds(json_file(tmp_path / "a", pre="tekken"), other) == [[], []]


def test_bos_of_pairs_of_texts_is_not_compared_with_a_gguf(tmp_path: Path) -> None:
    bos = {"SpecialToken": {"id": IM_END, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    named = {IM_END: {"id": IM_END, "ids": [len(BYTE_LEVEL) - 1], "tokens": [IM_END]}}
    unused = {"<unused>": {"id": "<unused>", "ids": [0], "tokens": ["!"]}}
    post = {"type": "TemplateProcessing", "single": [bos, texts[0]], "pair": [bos, *texts]}
    ours = json_file(tmp_path / "a", post_processor=post | {"special_tokens": named | unused})
    assert skewed_kinds(ours, gguf_file(tmp_path / "a.gguf", bos=True)) == [[], []]
    assert skewed_kinds(ours, gguf_file(tmp_path / "b.gguf")) == [["BOS/EOS"], ["BOS/EOS"]]


@pytest.mark.parametrize("changed", [{"lstrip": True}, {"content": "<|other|>"}])
def test_an_added_token_is_named_if_only_one_vocabulary_lists_it(tmp_path: Path, changed: dict[str, Any]) -> None:
    """With the GGUF first, the cause used to be unknown."""
    ours = json_file(tmp_path / "a")
    spec = json.loads((tmp_path / "a/tokenizer.json").read_text())
    [token] = spec["added_tokens"]
    spec["added_tokens"] = [token | changed, token | {"id": token["id"] + 1, "content": "<|z|>"}]
    (tmp_path / "a/tokenizer.json").write_text(json.dumps(spec))
    other = gguf_file(tmp_path / "a.gguf", tokens=[*BYTE_LEVEL, "<|z|>"], types=[*TYPES, CONTROL])
    for found in skewed_kinds(ours, other):
        assert "unknown" not in found
        assert "added token" in found


def test_tables_that_differ_beside_an_unknown_cause_are_not_said_to_be_unseen(model: Path, tmp_path: Path) -> None:
    changed = proto(model)
    rename(changed)
    (tmp_path / "other.model").write_bytes(changed.SerializeToString())
    sides = open_backend(str(model)), open_backend(str(tmp_path / "other.model"))
    sides[0].with_tables = lambda names, other: None  # type: ignore[method-assign]
    found = audit(*sides).findings
    assert {finding.probe for finding in found} == {"encode", "facts"}
    assert not any("no tried input" in finding.cause for finding in found)


def test_control_tokens_are_not_decoded_by_libraries_that_write_no_text_for_them(model: Path, tmp_path: Path) -> None:
    """A GGUF with the pieces of a SentencePiece model used to have skew, because sentencepiece decodes `<s>` to ''."""
    gguf = pytest.importorskip("gguf")
    pieces = proto(model).pieces
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.type for piece in pieces])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = audit(str(tmp_path / "a.gguf"), str(model)).findings
    examples = [finding.example for finding in found if finding.probe == "decode"]
    assert not {(0,), (1,), (2,)} & {*examples}


def test_a_renumbered_control_token_is_found_if_a_library_does_not_read_it_in_texts(model: Path) -> None:
    """Texts with control tokens are not compared with sentencepiece."""
    side = open_backend(str(model))
    added = {content: replace(token, id=token.id + 1) for content, token in side.facts.added.items()}
    other = open_backend(str(model))
    other.facts = replace(other.facts, added=added, tables={})
    found = [finding for finding in audit(side, other).findings if finding.severity == "skew"]
    assert [finding.kind for finding in found] == ["added token"]
    assert "the id of the added token '<s>' (and of 1 more) is 1 in A and 2 in B" in found[0].cause
