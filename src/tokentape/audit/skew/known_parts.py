"""Parts of tokenizers in common use, to try until one of them makes the other backend's ids.

The split expressions are those of the models' own tokenizer.json, or of tiktoken; servers and converters mix them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_O200K_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    "cl100k_base": (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,),
    "qwen2": (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,),
    "qwen3.5": (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _ENDS,),
    "o200k_base": (
        f"{_O200K_UPPER}{_CONTRACTIONS}?|{_O200K_LOWER}{_CONTRACTIONS}?"
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        + _ENDS,
    ),
    "tekken": (f"{_O200K_UPPER}|{_O200K_LOWER}" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _ENDS,),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|" + _ENDS,
    ),
    "llama.cpp default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "kimi-k2": (
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _ENDS,
    ),
}
"""Split expressions by the name they go by: the matches of each in turn are kept apart."""


SPLIT_NAMES: Mapping[str, str] = {parts[0]: name for name, parts in SPLITS.items() if len(parts) == 1}
"""The name of each expression that splits by itself."""


def byte_level(name: str, *, prefix_space: bool = False) -> dict[str, Any]:
    """The pre-tokenizer of a tokenizer.json that splits as one of `SPLITS` and writes bytes as characters."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in SPLITS[name]
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, _bytes(prefix_space=prefix_space)]}


def _bytes(*, prefix_space: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": False}


def metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    """SentencePiece's way with spaces; `scheme` says before what one is put."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_FIRST = {"type": "Prepend", "prepend": "▁"}
SENTENCEPIECE: Mapping[str, tuple[Any, Any]] = {
    "a space before the text and behind every control token, whatever stands there": (
        {"type": "Sequence", "normalizers": [_FIRST, _SPACES]},
        None,
    ),
    "no space put before anything": (_SPACES, None),
    "several spaces taken for one": (
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, _FIRST, _SPACES],
        },
        None,
    ),
}
"""What SentencePiece and its conversions do with spaces, as normalizer and pre-tokenizer."""


def normalizers() -> dict[str, Any]:
    """Normalizers to try, by what is said of them."""
    return {
        "no normalization": None,
        **{form: {"type": form} for form in ("NFC", "NFKC", "NFD", "NFKD")},
        "removal of white space around a text": {"type": "Strip", "strip_left": True, "strip_right": True},
        "lower case": {"type": "Lowercase"},
    }


def pre_tokenizers(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Pre-tokenizers to try for a tokenizer like this one, by what is said of them."""
    spaces = {
        "a space before the first word": metaspace("first", split=False),
        "a space before every piece": metaspace("always", split=False),
        "no space before the first word": metaspace("never", split=False),
    }
    if not is_byte_level(spec):
        return spaces
    found = {f"the split of {name}": byte_level(name) for name in SPLITS}
    found["no split at all"] = _bytes()
    own = spec.get("pre_tokenizer")
    if own is not None:
        found["its own split, with a space put before the text"] = _with_prefix_space(own)
    return {**found, "SentencePiece's handling of spaces (Metaspace)": metaspace("always", split=True)}


def is_byte_level(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json writes bytes as characters, as GPT-2 does."""
    return "ByteLevel" in str(spec.get("pre_tokenizer"))


def _with_prefix_space(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_with_prefix_space(step) for step in part["pretokenizers"]]}
    return {**part, "add_prefix_space": True} if part["type"] == "ByteLevel" else dict(part)
