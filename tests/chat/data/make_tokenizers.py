"""Train the small tokenizers of the tests: a vocabulary of each kind, each with the added tokens of a model family.

`python tests/chat/data/make_tokenizers.py` writes `models/FAMILY/tokenizer.json` and `tokenizer_config.json`. The
corpus is `corpus.txt` and the license of this repository. Names of added tokens, split expressions and the order of the
parts are those of the families; vocabularies, merges and ids are trained here.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece as sentencepiece_library
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
MODELS = HERE / "models"
MERGES = 640
"""Number of learned tokens beyond bytes or letters."""

RUN = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = TEKKEN_SPLIT.replace(f"{LOWER}+|", f"{LOWER}+{SUFFIX}|").replace(f"{LOWER}*|", f"{LOWER}*{SUFFIX}|")
O200K_SPLIT = O200K_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

Spec = dict[str, Any]


def corpus() -> list[str]:
    """Return the training texts, a document each."""
    own = (HERE / "corpus.txt").read_text(encoding="utf-8")
    license_text = (HERE.parents[2] / "LICENSE").read_text(encoding="utf-8")
    return [own, own, license_text]


def byte_level(*splits: str) -> Spec:
    steps = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, last]}


BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPACES_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": RUN}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
FIRST_SPACE_DECODER = {
    **SPACES_DECODER,
    "decoders": [*SPACES_DECODER["decoders"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
}


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Spec:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(corpus(), trainer)
    trained: Spec = json.loads(tokenizer.to_str())["model"]
    return trained


def _split(*expressions: str) -> Any:
    steps = [pre_tokenizers.Split(tokenizers.Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def byte_pairs() -> Spec:
    """Byte-level BPE, as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False)
    model = _trained(models.BPE(), trainer, _split(QWEN_SPLIT), normalizers.NFC())
    return {**model, "continuing_subword_prefix": "", "end_of_word_suffix": ""}


@cache
def ranks() -> Spec:
    """Byte-level BPE of ranks, as tiktoken's: two neighbors merge if together they are a token, lowest rank first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False)
    model = _trained(models.BPE(), trainer, _split(O200K_SPLIT))
    rank = model["vocab"]
    merges = [
        (rank[piece], rank[piece[:n]], rank[piece[n:]], [piece[:n], piece[n:]])
        for piece in rank
        for n in range(1, len(piece))
        if piece[:n] in rank and piece[n:] in rank
    ]
    return {**model, "merges": [merge for *_, merge in sorted(merges)], "ignore_merges": True}


@cache
def sentencepiece() -> Spec:
    """BPE over characters, U+2581 for spaces, bytes for characters that the vocabulary lacks."""
    letters = Counter("".join(corpus()).replace("\n", "").replace(" ", RUN))
    alphabet = sorted(letters, key=lambda char: (-letters[char], char))[:140]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=["<unk>", *BYTES],
        show_progress=False,
    )
    model = _trained(
        models.BPE(byte_fallback=True, unk_token="<unk>"), trainer, pre_tokenizers.Metaspace(prepend_scheme="first")
    )
    return {**model, "fuse_unk": True}


RUNS = [RUN * n for n in range(2, 17)]


@cache
def sentencepiece_with_runs() -> Spec:
    """The same with tokens for runs of spaces, which Gemma's vocabulary has."""
    model = sentencepiece()
    vocab = {**model["vocab"], **{run: len(model["vocab"]) + n for n, run in enumerate(RUNS)}}
    merges = [[run[1:], RUN] for run in RUNS] + [[RUN * n, RUN * n] for n in (2, 4, 8)]
    return {**model, "vocab": vocab, "merges": merges + model["merges"]}


@cache
def unigram() -> Spec:
    """Unigram: pieces with log probabilities, bytes for characters that the vocabulary lacks."""
    written = io.BytesIO()
    sentencepiece_library.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus() for line in text.splitlines()),
        model_writer=written,
        model_type="unigram",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=[],
        bos_id=-1,
        eos_id=-1,
        num_threads=1,  # sums of scores depend on their order
        minloglevel=2,
    )
    trained = sentencepiece_library.SentencePieceProcessor(model_proto=written.getvalue())
    scored = [[trained.id_to_piece(n), round(trained.get_score(n), 4)] for n in range(trained.get_piece_size())]
    return {"type": "Unigram", "unk_id": trained.unk_id(), "byte_fallback": True, "vocab": scored}


def _pairs(*names: str) -> list[str]:
    return [spelled for name in names for spelled in (f"<{name}>", f"</{name}>")]


@dataclass(frozen=True)
class Kind:
    """A trained vocabulary and the parts around it."""

    model: Any
    parts: Mapping[str, Any]
    added: Sequence[str] = ()
    """Added tokens that are text: not special in any family."""


METASPACE = {"type": "Metaspace", "replacement": RUN, "split": False}
KINDS = {
    "byte-level BPE": Kind(
        byte_pairs,
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level(QWEN_SPLIT), "decoder": BYTE_LEVEL_DECODER},
    ),
    "tiktoken ranks": Kind(
        ranks, {"normalizer": None, "pre_tokenizer": byte_level(O200K_SPLIT), "decoder": BYTE_LEVEL_DECODER}
    ),
    "BPE with byte fallback": Kind(
        sentencepiece,
        {
            "normalizer": None,
            "pre_tokenizer": {**METASPACE, "prepend_scheme": "first"},
            "decoder": FIRST_SPACE_DECODER,
        },
    ),
    "runs of spaces": Kind(
        sentencepiece_with_runs,
        {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": RUN},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "decoder": SPACES_DECODER,
        },
        added=[
            *("\n" * n for n in range(2, 9)),
            *RUNS,
            *_pairs("table", "caption", "tr", "td", "h1", "h2", "b", "i", "ul", "li", "code"),
        ],
    ),
    "Unigram": Kind(
        unigram,
        {
            "normalizer": None,
            "pre_tokenizer": {**METASPACE, "prepend_scheme": "always", "split": True},
            "decoder": FIRST_SPACE_DECODER,
        },
    ),
}


@dataclass(frozen=True)
class Family:
    """The additions of a model family to a vocabulary of a kind."""

    kind: str
    special: Sequence[str]
    plain: Sequence[str] = ()
    """Added tokens that are not special."""
    config: Mapping[str, Any] = field(default_factory=dict)
    first: bool = False
    """Whether added tokens have the lowest ids."""
    bos: str | None = None
    """Ids before a text if special tokens are requested."""
    parts: Mapping[str, Any] = field(default_factory=dict)


def _numbered(pattern: str, numbers: Iterable[int]) -> list[str]:
    return [pattern.format(n) for n in numbers]


QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    f"<|{name}|>"
    for name in (
        *("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"),
        *("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    )
]
QWEN_PLAIN = [
    *_pairs("tool_call"),
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
]
QWEN_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
MISTRAL = [f"[{slash}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for slash in ("", "/")]
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>", *MISTRAL, "[TOOL_CALLS]"]
MISTRAL_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DEEPSEEK_SPECIAL = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>", "<|EOT|>"),
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end", "sep")),
]
DEEPSEEK = {
    "kind": "byte-level BPE",
    "config": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "parts": {"normalizer": None, "pre_tokenizer": byte_level(*DEEPSEEK_SPLITS)},
}

FAMILIES = {
    "qwen3": Family(
        "byte-level BPE", QWEN_SPECIAL, [*QWEN_PLAIN, *_pairs("tool_response", "think")], config=QWEN_CONFIG
    ),
    "qwen2_5": Family("byte-level BPE", QWEN_SPECIAL, QWEN_PLAIN, config=QWEN_CONFIG),
    "deepseek_v3": Family(special=DEEPSEEK_SPECIAL, **DEEPSEEK),
    "deepseek_v31": Family(special=DEEPSEEK_SPECIAL, plain=_pairs("think"), **DEEPSEEK),
    "gpt_oss": Family(
        "tiktoken ranks",
        [
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>"),
        ],
        config={"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
    ),
    "llama3": Family(
        "tiktoken ranks",
        [
            *("<|begin_of_text|>", "<|end_of_text|>", *_numbered("<|reserved_special_token_{}|>", range(4))),
            *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ],
        config={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        bos="<|begin_of_text|>",
        parts={"pre_tokenizer": byte_level(CL100K_SPLIT)},
    ),
    "glm4_5": Family(
        "tiktoken ranks",
        [
            *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ],
        [*_pairs("think", "tool_call", "tool_response", "arg_key", "arg_value"), "/nothink"],
        config={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        parts={"pre_tokenizer": byte_level(CL100K_SPLIT)},
    ),
    "mistral_nemo": Family(
        "tiktoken ranks",
        [
            *(*MISTRAL_SPECIAL, "<pad>", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
            *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[TOOL_CONTENT]"),
        ],
        config=MISTRAL_CONFIG,
        first=True,
        bos="<s>",
        parts={"pre_tokenizer": byte_level(TEKKEN_SPLIT)},
    ),
    "nemotron3": Family(
        "tiktoken ranks",
        ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        _pairs("think", "tool_call", "tool_response"),
        config={**MISTRAL_CONFIG, "eos_token": "<|im_end|>"},
        first=True,
        bos="<s>",
        parts={"pre_tokenizer": byte_level(TEKKEN_SPLIT)},
    ),
    "mistral_v3_spm": Family(
        "BPE with byte fallback",
        [*MISTRAL_SPECIAL, "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]"],
        config=MISTRAL_CONFIG,
        first=True,
        bos="<s>",
    ),
    "gemma3": Family(
        "runs of spaces",
        ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"],
        ["[multimodal]", "<unused0>", "<unused1>"],
        config={"bos_token": "<bos>", "eos_token": "<end_of_turn>", "unk_token": "<unk>", "pad_token": "<pad>"},
        bos="<bos>",
    ),
    "unigram": Family(
        "Unigram",
        ["<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"],
        [*_pairs("think", "tool_call")],
        config={"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"},
        bos="<s>",
    ),
}


def compose(kind: str, family: Family) -> Spec:
    """Return the tokenizer.json of a kind's vocabulary with a family's added tokens."""
    parts: dict[str, Any] = dict(KINDS[kind].parts)
    if kind == family.kind:
        parts |= family.parts
    model = dict(KINDS[kind].model())
    added = list(dict.fromkeys([*family.special, *family.plain, *KINDS[kind].added]))
    listed = not isinstance(model["vocab"], Mapping)
    pieces = [piece for piece, *_ in model["vocab"]] if listed else list(model["vocab"])
    if family.first:
        order = [*added, *(piece for piece in pieces if piece not in added)]
    else:
        order = [*pieces, *(content for content in added if content not in pieces)]
    ids = {piece: n for n, piece in enumerate(order)}
    if listed:
        scores = dict(model["vocab"])
        model["vocab"] = [[piece, scores.get(piece, 0.0)] for piece in order]
        model["unk_id"] = ids["<unk>"]
    else:
        model["vocab"] = ids
    special = set(family.special)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    post: Spec | None = None
    if parts["decoder"] is BYTE_LEVEL_DECODER:
        post = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if family.bos is not None:
        start = {"SpecialToken": {"id": family.bos, "type_id": 0}}
        post = {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, *({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))],
            "special_tokens": {family.bos: {"id": family.bos, "ids": [ids[family.bos]], "tokens": [family.bos]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[content], "content": content, **flags, "special": content in special}
            for content in sorted(added, key=ids.__getitem__)
        ],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": post,
        "decoder": parts["decoder"],
        "model": model,
    }


def tiktoken_ranks() -> str:
    """Return the file of ranks that tiktoken reads: a token in base64 and its rank on each line."""
    byte_of = {char: byte for byte, char in _byte_characters().items()}
    pieces = [(bytes(byte_of[char] for char in piece), rank) for piece, rank in ranks()["vocab"].items()]
    return "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in sorted(pieces, key=lambda p: p[1]))


def _byte_characters() -> dict[int, str]:
    """Return the character that byte-level vocabularies write each byte as."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(rest)}


def files() -> dict[str, str]:
    """Return what is written below `models/`, by path."""
    files = {"gpt_oss/tiktoken.model": tiktoken_ranks()}
    for name, family in FAMILIES.items():
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **family.config}
        spec = compose(family.kind, family)
        files[f"{name}/tokenizer.json"] = json.dumps(spec, ensure_ascii=False, separators=(",", ":")) + "\n"
        files[f"{name}/tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    return files


def main() -> None:
    for name, text in files().items():
        path = MODELS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
