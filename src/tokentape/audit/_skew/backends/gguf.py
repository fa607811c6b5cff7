"""The GGUF backend: makes a tokenizer.json that encodes as llama.cpp does with the file's vocabulary.

llama.cpp does not normalize text for byte-level vocabularies. `tokenizer.ggml.pre` names how it splits text; without
this key it uses its default split, whatever the model was trained with.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokentape.audit._skew.backends import BackendOptions
from tokentape.audit._skew.backends.spec import SpecBackend, hash_file, require
from tokentape.audit._skew.parts import byte_level
from tokentape.chat._template import ChatTemplate, read_source
from tokentape.errors import TokenizerUnusable

_LLAMA3 = ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"]
_SPLIT_OF = {
    "default": "llama.cpp default",
    "gpt-2": "gpt2",
    **dict.fromkeys([*_LLAMA3, "smaug-bpe", "glm4", "chatglm-bpe", "dbrx"], "cl100k_base"),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"], "qwen2"),
    "qwen35": "qwen3.5",
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie"], "o200k_base"),
    **{name: name for name in ("tekken", "deepseek-v3")},
    "kimi-k2": "llama.cpp kimi-k2",
}
"""Names of splits by `tokenizer.ggml.pre`, from llama.cpp's llama-vocab.cpp of November 2026."""

_WHOLE_WORDS = (*_LLAMA3, "tekken")
"""Values of `tokenizer.ggml.pre` with which words that are tokens are not merged, and BOS is added by default."""

_NO_BOS = ("glm4", "chatglm-bpe")
_DEFAULT_IDS = {"gpt2": {"bos": 11, "eos": 11}, "llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""The special token ids that llama.cpp uses if the file lacks them, by `tokenizer.ggml.model`."""

_NAMES = {
    "pad_token": "padding",
    "unk_token": "unknown",
    **{f"{token}_token": token for token in ("bos", "eos", "eot", "eom")},
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPELLED = {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED}
"""Types of tokens that llama.cpp decodes to their text, and of SentencePiece's tokens also bytes."""

_ALWAYS_CONTROL = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "</s>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>",
}  # fmt: skip
"""Tokens at which llama.cpp ends turns: it reads them as control tokens, whatever their type in the file."""


class GgufBackend(SpecBackend):
    """A tokenizer.json made from a GGUF file. llama.cpp decodes the ids in `silent` to no text."""

    silent: frozenset[int] = frozenset()

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return super().decode([[number for number in ids if number not in self.silent] for ids in sequences])


def open_gguf(name: str, path: str | Path, options: BackendOptions) -> SpecBackend:
    """Open a GGUF file with the package `gguf`. Raises `TokenizerUnusable` if it is corrupt, or its split unknown."""
    path = Path(path)
    try:
        fields = require("gguf").GGUFReader(str(path)).fields
    except (ValueError, IndexError) as error:
        raise TokenizerUnusable(f"{path} is corrupt or not a GGUF file: {error}") from error
    metadata: dict[str, Any] = {
        key.removeprefix("tokenizer."): field.contents()
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    }
    notes = []
    lengths = {key: len(metadata.get(f"ggml.{key}") or ()) for key in ("tokens", "token_type", "scores", "merges")}
    model = metadata.get("ggml.model")
    needed = {"gpt2": "merges", "llama": "scores"}.get(str(model), "tokens")
    if not lengths[needed] or not {lengths["token_type"], lengths["scores"]} <= {0, lengths["tokens"]}:
        found = ", ".join(f"{count} {key}" for key, count in lengths.items())
        raise TokenizerUnusable(
            f"{path}: found {found}; expected {needed}; token_type and scores are optional, with one value per token"
        )
    match model:
        case "gpt2":
            pre = metadata.get("ggml.pre")
            if pre is None:
                notes.append("the file has no tokenizer.ggml.pre: llama.cpp uses its default split, not a model's")
            split = _SPLIT_OF.get(pre or "default")
            if split is None:
                expected = ", ".join(_SPLIT_OF)
                raise TokenizerUnusable(f"{path}: tokenizer.ggml.pre is {pre!r}, an unknown split; expected {expected}")
            spec = _byte_level_spec(metadata, split, whole_words=pre in _WHOLE_WORDS)
        case "llama":
            spec = _sentencepiece_spec(metadata)
        case _:
            raise TokenizerUnusable(f"{path}: tokenizer.ggml.model is {model!r}; expected gpt2 or llama")
    ids = {name: _special_id(metadata, which) for name, which in _NAMES.items()}
    source = read_source(options.template) if options.template else metadata.get("chat_template")
    backend = GgufBackend(
        name,
        spec,
        kind=f"GGUF {model}",
        # The default BOS of gpt2 counts only if it is added, and no key names it.
        config={name: metadata["ggml.tokens"][number] for name, number in ids.items() if number is not None},
        template=ChatTemplate(source) if source else None,
        options=options,
        files={path.name: hash_file(path)},
        notes=notes,
        reopened_as=f"gguf:{path}",
    )
    spelled = {*_SPELLED, _BYTE} if model == "llama" else _SPELLED
    kinds = metadata.get("ggml.token_type") or ()
    backend.silent = frozenset(number for number, kind in enumerate(kinds) if kind not in spelled)
    return backend


def _byte_level_spec(metadata: Mapping[str, Any], split: str, *, whole_words: bool) -> dict[str, Any]:
    vocab, added = _vocabulary(metadata)
    model = {
        "type": "BPE",
        "vocab": vocab,
        # Of a merge that is listed twice, llama.cpp uses the first rank, and `tokenizers` the last.
        "merges": [merge.split(" ", 1) for merge in dict.fromkeys(metadata["ggml.merges"])],
        "ignore_merges": whole_words,
    }
    return {
        **_common(metadata, added, model, bos_by_default=whole_words),
        "normalizer": None,
        "pre_tokenizer": byte_level(split),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }


def _sentencepiece_spec(metadata: Mapping[str, Any]) -> dict[str, Any]:
    vocab, added = _vocabulary(metadata)
    model = {
        "type": "BPE",
        "vocab": vocab,
        "merges": merges_of(vocab, metadata["ggml.scores"]),
        "unk_token": metadata["ggml.tokens"][metadata.get("ggml.unknown_token_id", 0)],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    first = [{"type": "Prepend", "prepend": "▁"}] if metadata.get("ggml.add_space_prefix", True) else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    if _BYTE in (metadata.get("ggml.token_type") or ()):  # byte tokens of a different type decode to their spelling
        decoders.append({"type": "ByteFallback"})
    decoders.append({"type": "Fuse"})
    if first:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        **_common(metadata, added, model, bos_by_default=True),
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return merges that make the same pieces as SentencePiece's BPE does by scores, highest score first."""
    merges = []
    for piece, number in vocab.items():
        for left, right in _cuts(piece, vocab):
            merges.append((-scores[number], vocab[left], vocab[right], left, right))
    return [[left, right] for _, _, _, left, right in sorted(merges)]


def _cuts(piece: str, known: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield each way to cut a piece into two known ones."""
    pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
    return (pair for pair in pairs if pair[0] in known and pair[1] in known)


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    tokens: Sequence[str] = metadata["ggml.tokens"]
    listed: Sequence[int] = metadata.get("ggml.token_type") or [_NORMAL] * len(tokens)
    kinds = [
        _CONTROL if token in _ALWAYS_CONTROL and kind != _USER_DEFINED else kind
        for token, kind in zip(tokens, listed, strict=True)
    ]
    # llama.cpp merges to unused tokens too. Those that nothing can merge to only fill the vocabulary up.
    known = set(tokens)
    vocab = {
        token: number
        for number, token in enumerate(tokens)
        if kinds[number] != _UNUSED or len(token) == 1 or any(_cuts(token, known))
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, "special": kinds[number] != _USER_DEFINED, **flags}
        for number, token in enumerate(tokens)
        if kinds[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return vocab, added


def _common(
    metadata: Mapping[str, Any], added: list[dict[str, Any]], model: Mapping[str, Any], *, bos_by_default: bool
) -> dict[str, Any]:
    around: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special_tokens = {}
    for which, is_added in (
        ("bos", metadata.get("ggml.add_bos_token", bos_by_default)),
        ("eos", metadata.get("ggml.add_eos_token")),
    ):
        number = _special_id(metadata, which)
        if is_added and number is not None:
            token = metadata["ggml.tokens"][number]
            special_tokens[token] = {"id": token, "ids": [number], "tokens": [token]}
            piece = {"SpecialToken": {"id": token, "type_id": 0}}
            around = [piece, *around] if which == "bos" else [*around, piece]
    second = [
        {kind: {"id": "B" if kind == "Sequence" else value["id"], "type_id": 1}}
        for piece in around
        for kind, value in piece.items()
    ]
    pair = [*around, *second]
    post = {"type": "TemplateProcessing", "single": around, "pair": pair, "special_tokens": special_tokens}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "model": dict(model),
        "post_processor": post if special_tokens else None,
    }


def _special_id(metadata: Mapping[str, Any], which: str) -> int | None:
    """Return the id that llama.cpp uses for a special token, or None if it has no such token."""
    count = len(metadata["ggml.tokens"])
    default = _DEFAULT_IDS[metadata["ggml.model"]].get(which)
    if default is not None and (default >= count or (which == "bos" and metadata.get("ggml.pre") in _NO_BOS)):
        default = None
    number: int | None = metadata.get(f"ggml.{which}_token_id", default)
    return number if number is None or number < count else default
