"""Tokenizer parts in common use. `causes` tries them until one gives the other backend's ids.

The split expressions come from the models' own tokenizer.json, or from tiktoken. Servers and converters mix them up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPLITS: Mapping[str, tuple[str, ...]] = {
    name: tuple(parts)
    for name, parts in json.loads(Path(__file__).with_name("splits.json").read_text(encoding="utf-8")).items()
}
"""Split expressions by name. They are applied one after the other, and split text around their matches."""

SPLIT_NAMES: Mapping[str, str] = {parts[0]: name for name, parts in SPLITS.items() if len(parts) == 1}


def byte_level(name: str, *, prefix_space: bool = False) -> dict[str, Any]:
    """Return a pre-tokenizer in tokenizer.json form that splits by `SPLITS[name]` and writes bytes as characters."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in SPLITS[name]
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, _bytes(prefix_space=prefix_space)]}


def _bytes(*, prefix_space: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": False}


def metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    """Return SentencePiece's handling of spaces. `scheme` says where to add one: `first`, `always` or `never`."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_FIRST = {"type": "Prepend", "prepend": "▁"}
SENTENCEPIECE: Mapping[str, tuple[Any, Any]] = {
    "a space before the text and after every control token, whatever stands there": (
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


def normalizers() -> dict[str, Any]:
    """Return normalizers to try, by description."""
    return {
        "no normalization": None,
        **{form: {"type": form} for form in ("NFC", "NFKC", "NFD", "NFKD")},
        **{
            f"removal of white space {where} a text": {"type": "Strip", "strip_left": left, "strip_right": right}
            for where, left, right in (("around", True, True), ("before", True, False), ("after", False, True))
        },
        "lower case": {"type": "Lowercase"},
    }


def pre_tokenizers(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return pre-tokenizers to try for a tokenizer like this one, by description."""
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
    """Return True if a tokenizer.json writes bytes as characters, as GPT-2 does."""
    return "ByteLevel" in str(spec.get("pre_tokenizer"))


def _with_prefix_space(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_with_prefix_space(step) for step in part["pretokenizers"]]}
    return {**part, "add_prefix_space": True} if part["type"] == "ByteLevel" else dict(part)
