"""Each kind of side, made from the same vocabulary: the same ids where healthy, and what differs where it is not."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.audit.skew.cases import TINY, base, healthy
from tests.data import REAL
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import PREFIXES, BackendOptions, SkewChat, open_backend
from tokentape.audit._skew.backends.gguf import merges_of
from tokentape.audit._skew.backends.spec import open_json
from tokentape.audit._skew.findings import AuditReport
from tokentape.audit._skew.parts import SPLITS, byte_level, same_step, with_only
from tokentape.chat._byte_level import BYTE_OF
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable


def skews(report: AuditReport) -> dict[str, str]:
    return {finding.kind: finding.cause for finding in report.findings if finding.severity == "skew"}


def write_gguf(path: Path, *, pre: str | None, with_eos: bool = True) -> Path:
    """The tiny vocabulary as GGUF, with the name of a split or none, and with or without EOS."""
    gguf = pytest.importorskip("gguf")
    spec = base(TINY).spec
    added = {token["id"]: token for token in spec["added_tokens"]}
    by_id = {number: token for token, number in spec["model"]["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(max(by_id) + 1)]
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            (kinds.CONTROL if added[n]["special"] else kinds.USER_DEFINED)
            if n in added
            else (kinds.NORMAL if n in by_id else kinds.UNUSED)
            for n in range(len(tokens))
        ]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    if with_eos:
        writer.add_add_bos_token(False)
        writer.add_eos_token_id(next(n for n, token in added.items() if token["content"] == "<|im_end|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def unnormalized() -> Any:
    """The tiny tokenizer as llama.cpp can run it, and as the GGUFs here have it: no normalizer, no template."""
    return replace(base(TINY), template=None).side("A", spec={**base(TINY).spec, "normalizer": None})


def test_missing_gguf_fields_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    """Read in llama.cpp's llama-vocab.cpp: BOS is added with Llama 3's split, and 11 is the id of BOS and EOS."""
    eleventh = open_backend(str(write_gguf(tmp_path / "qwen.gguf", pre="qwen2", with_eos=False)))
    assert eleventh.facts.special_tokens["eos_token"] == eleventh.token(11)
    assert eleventh.encode(["a"], special=True) == eleventh.encode(["a"])
    llama = open_backend(str(write_gguf(tmp_path / "llama.gguf", pre="llama-bpe", with_eos=False)))
    assert llama.encode(["a"], special=True) == [[11, *llama.encode(["a"])[0]]]
    assert llama.facts.spec is not None
    assert llama.facts.spec["model"]["ignore_merges"]


def test_a_gguf_with_the_right_split_is_clean(unnormalized: Any, tmp_path: Path) -> None:
    assert skews(audit(unnormalized, write_gguf(tmp_path / "tiny.gguf", pre="qwen2"))) == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pre", [None, "gpt-2"])
def test_a_gguf_with_no_split_or_another_one_is_found(unnormalized: Any, tmp_path: Path, pre: str | None) -> None:
    """Row 8: the name of the pre-tokenizer is missing from the GGUF."""
    report = audit(unnormalized, write_gguf(tmp_path / "tiny.gguf", pre=pre))
    assert list(skews(report)) == ["pre-tokenizer"]
    assert "tokenizer.ggml.pre" in report.findings[0].fix
    assert any("no tokenizer.ggml.pre" in note for note in report.notes) == (pre is None)


@pytest.mark.parametrize("content", [b"", b"neither", b"GGUF", b"GGUF\x03\x00\x00\x00"])
def test_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(TokenizerUnusable, match=r"a\.gguf is corrupt or not a GGUF file"):
        open_backend(str(tmp_path / "a.gguf"))


def test_a_gguf_without_a_type_for_each_token_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerUnusable, match="found 3 tokens, 2 token_type"):
        open_backend(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("before", [[], [{"type": "Digits", "individual_digits": True}]], ids=["alone", "after digits"])
@pytest.mark.parametrize("space", [False, True], ids=["as is", "space put before"])
def test_the_split_built_into_byte_level_is_that_of_gpt2(before: list[dict[str, Any]], space: bool) -> None:
    """A GGUF or tiktoken side of GPT-2 used to differ from its tokenizer.json."""
    built_in = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    ours, theirs = ({"type": "Sequence", "pretokenizers": [*before, step]} for step in (built_in, byte_level("gpt2")))
    texts = ["it's 12  a\u3000b!?\r\n\n  c ", " x", "d\u0301\u00b2_9"]
    pieces = [
        [
            [piece for piece, _ in with_only("pre_tokenizer", part).pre_tokenizer.pre_tokenize_str(text)]
            for text in texts
        ]
        for part in (ours, theirs)
    ]
    assert same_step("pre_tokenizer", ours, theirs) == (pieces[0] == pieces[1]) == (not space)


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_strips_accents_by_default_if_it_writes_lower_case(lowercase: bool) -> None:
    part = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lowercase}
    ours, theirs = ({**part, "strip_accents": strips} for strips in (None, True))
    texts = [with_only("normalizer", part).normalizer.normalize_str("É") for part in (ours, theirs)]
    assert same_step("normalizer", ours, theirs) is (texts[0] == texts[1]) is lowercase


def test_a_gguf_of_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="'of-tomorrow', an unknown split"):
        open_backend(str(write_gguf(tmp_path / "tiny.gguf", pre="of-tomorrow")))


@pytest.fixture(scope="module")
def tiktoken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json that is trained to tiktoken's terms, and the same as ranks."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("ranks")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLITS["cl100k_base"][0]), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([Path(__file__).read_text(), json.dumps(list(SPLITS))] * 2, trainer)
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    lines = [
        base64.b64encode(bytes(BYTE_OF[char] for char in piece)) + b" %d" % number
        for piece, number in spec["model"]["vocab"].items()
    ]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    end = {"content": "<|end|>", "special": True}
    config = {"added_tokens_decoder": {str(spec["added_tokens"][0]["id"]): end}, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tiktoken_ranks_of_the_same_vocabulary_are_clean(tiktoken_folder: Path) -> None:
    pytest.importorskip("tiktoken")
    report = audit(tiktoken_folder, f"tiktoken:{tiktoken_folder}#cl100k_base")
    assert skews(report) == {}
    assert report.tried["encode"] > 300


def test_tiktoken_ranks_with_another_split_are_found(tiktoken_folder: Path) -> None:
    pytest.importorskip("tiktoken")
    report = audit(tiktoken_folder, f"tiktoken:{tiktoken_folder}#gpt2")
    assert list(skews(report)) == ["pre-tokenizer"]
    assert "as cl100k_base" in skews(report)["pre-tokenizer"]
    assert "as gpt2" in skews(report)["pre-tokenizer"]


@pytest.mark.parametrize("rank", [300, 700, 1190])
def test_a_rank_that_is_missing_is_found_and_shown(tiktoken_folder: Path, tmp_path: Path, rank: int) -> None:
    pytest.importorskip("tiktoken")
    lines = (tiktoken_folder / "tiktoken.model").read_bytes().splitlines()
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines[:rank] + lines[rank + 1 :]))
    (tmp_path / "tokenizer_config.json").write_bytes((tiktoken_folder / "tokenizer_config.json").read_bytes())
    report = audit(tiktoken_folder, f"tiktoken:{tmp_path}#cl100k_base")
    assert set(skews(report)) <= {"vocabulary", "merges"}
    shown = [finding for finding in report.findings if isinstance(finding.example, str)]
    assert shown
    assert all(finding.a.ids != finding.b.ids for finding in shown)


def test_tiktoken_accepts_only_known_splits(tiktoken_folder: Path) -> None:
    pytest.importorskip("tiktoken")
    with pytest.raises(InvalidRequest, match="tiktoken accepts one of: gpt2, cl100k_base"):
        open_backend(f"tiktoken:{tiktoken_folder}#nonsense")


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained SentencePiece model that normalizes to NFKC, and its conversion that does not."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    written = io.BytesIO()
    lines = [line for path in Path(__file__).parent.glob("*.py") for line in path.read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="nfkc",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    model = folder / "tokenizer.model"
    model.write_bytes(written.getvalue())
    loaded = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = {loaded.id_to_piece(n): n for n in range(loaded.vocab_size())}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": pieces[p], "content": p, **flags} for p in ("<unk>", "<s>", "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": pieces,
            "merges": merges_of(pieces, [loaded.get_score(n) for n in range(loaded.vocab_size())]),
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    converted = folder / "converted.json"
    converted.write_text(json.dumps(spec))
    return model, converted


def test_a_conversion_that_lost_the_normalizer_is_found(sentencepiece_model: tuple[Path, Path]) -> None:
    """Row 7: the conversion normalizes differently from SentencePiece."""
    model, converted = sentencepiece_model
    report = audit(f"spm:{model}", converted)
    assert "normalizer" in skews(report)
    assert "NFKC" in skews(report)["normalizer"]


def test_mistral_common_uses_its_own_library() -> None:
    """Row 11: run where mistral-common is installed; it pins an older numpy than the other tools take."""
    mistral_common = pytest.importorskip("mistral_common")
    data = Path(mistral_common.__file__).parent / "data"
    report = audit(
        f"spm:{data}/mistral_instruct_tokenizer_240323.model.v3",
        f"mistral:{data}/mistral_instruct_tokenizer_240323.model.v3",
    )
    assert not {"normalizer", "vocabulary", "pre-tokenizer"} & set(skews(report))


def test_tekken_files_that_the_library_reads_alike_are_clean(tmp_path: Path) -> None:
    """One lists the library's own control tokens, and texts of pieces, of which only the bytes are read."""
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    vocab = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": None} for n in range(256)]
    config = {"pattern": ".", "num_vocab_tokens": 256, "default_vocab_size": 276, "default_num_special_tokens": 20}
    doc: dict[str, Any] = {"vocab": vocab, "config": config | {"version": "v3"}}
    listed = doc | {"vocab": [entry | {"token_str": f"piece {entry['rank']}"} for entry in vocab]}
    listed["special_tokens"] = [dict(token) for token in tekken.Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    for name, content in (("bare", doc), ("listed", listed)):
        (tmp_path / f"{name}_tekken.json").write_text(json.dumps(content))
    report = audit(f"mistral:{tmp_path}/bare_tekken.json", f"mistral:{tmp_path}/listed_tekken.json")
    assert not report.skewed, [finding.cause for finding in report.findings]


@pytest.mark.real
@pytest.mark.slow
def test_mistral_common_and_tokenizer_json_of_nemo_give_the_same_ids() -> None:
    mistral_common = pytest.importorskip("mistral_common")
    data = Path(mistral_common.__file__).parent / "data"
    report = audit(REAL / "mistral_nemo", f"mistral:{data}/tekken_240718.json")
    assert {finding.probe for finding in report.findings if finding.severity == "skew"} <= {"render"}


def test_auto_tokenizer_of_the_tiny_model_is_clean() -> None:
    report = audit(MODEL, f"auto:{MODEL}")
    assert skews(report) == {}
    assert report.tried["render"] > 90


def test_single_json_file_is_a_side() -> None:
    assert skews(audit(MODEL / "tokenizer.json", f"json:{MODEL}")) == {}


def test_marks_of_generation_blocks_become_masks_of_the_same_ids() -> None:
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    body = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    template = f"{{% for m in messages %}}<|im_start|>{body}{{% endfor %}}"
    side = base(TINY).side(template=template)
    plain = base(TINY).side(template=template.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    chat = SkewChat(({"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}))
    made = side.render(chat)
    assert made.ids == plain.render(chat).ids
    assert made.mask is not None
    trained = [token for token, kept in zip(made.ids, made.mask, strict=True) if kept]
    assert side.decode([trained]) == ["three"]


def test_template_kwargs_that_differ_are_named(tmp_path: Path) -> None:
    template = base(TINY).template or ""
    source = template.replace(
        "'<|im_start|>assistant\\n' -}}\n{%- endif",
        "'<|im_start|>assistant\\n' + ('<think>\\n' if thinking else '') -}}\n{%- endif",
    )
    assert source != template
    side = base(TINY).side("A", template=source, kwargs={"thinking": True})
    other = base(TINY).side("B", template=source)
    report = audit(side, other)
    assert set(skews(report)) & {"template kwargs", "generation prompt", "reasoning"}
    assert any("thinking is True in A and None in B" in cause for cause in skews(report).values())


@pytest.mark.parametrize("prefix", [p for p in PREFIXES if p not in ("vllm", "sglang", "llamacpp", "gateway")])
def test_missing_path_is_an_invalid_request_for_each_prefix(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no nowhere"):
        open_backend(f"{prefix}:nowhere")


def test_a_file_of_unknown_kind_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "thing.bin").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="can't tell what"):
        open_backend(str(tmp_path / "thing.bin"))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json, tekken\.json"):
        open_backend(str(tmp_path))


def test_a_side_without_a_template_refuses_conversations() -> None:
    side = open_json("A", MODEL / "tokenizer.json", BackendOptions(template=None))
    if "render" not in side.facts.abilities:
        with pytest.raises(TemplateRefused):
            side.render(SkewChat(({"role": "user", "content": "hi"},)))


FAMILIES = ("qwen3", "qwen2_5", "llama3", "deepseek_v3", "deepseek_v31", "gpt_oss", "mistral_nemo", "mistral_v3_spm")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "glm4_5", "nemotron3"])
@pytest.mark.filterwarnings("ignore")
def test_auto_tokenizer_and_tokenizer_json_agree_on_every_healthy_folder(family: str) -> None:
    report = audit(REAL / family, f"auto:{REAL / family}")
    assert skews(report) == {}
    assert report.tried["encode"] > 300


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("glm4_5", {"pre-tokenizer", "model settings"}),
        ("gpt_oss", {"pre-tokenizer"}),
        ("qwen3", {"pre-tokenizer", "normalizer"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_auto_tokenizer_that_builds_gpt2_from_its_class_is_found(family: str, kinds: set[str], tmp_path: Path) -> None:
    """Row 3, by transformers itself: 5.23.0 puts GPT-2's split in place of the one in tokenizer.json."""
    config = {**base(f"real/{family}").config, "tokenizer_class": "GPT2Tokenizer", "chat_template": None}
    (tmp_path / "tokenizer.json").symlink_to(REAL / family / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert set(skews(audit(tmp_path, f"auto:{tmp_path}"))) == kinds


def test_the_same_side_twice_is_clean() -> None:
    assert audit(healthy(TINY), healthy(TINY)).findings == ()
