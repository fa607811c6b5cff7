"""Read a tokenizer's files, and load a tokenizer.json with `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tokentape.errors import TokenizerUnusable

_SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "image_token",
    "audio_token",
    "video_token",
)

NAMING_CONFIGS = ("config.json", "processor_config.json", "preprocessor_config.json", "special_tokens_map.json")
"""Files that name image, audio and other control tokens."""


_HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


def from_text(source: str) -> tokenizers.Tokenizer:
    """Load the text of a tokenizer.json with `tokenizers`. Raises `TokenizerUnusable` if the library rejects it."""
    refuse_short_merges(source)
    try:
        return tokenizers.Tokenizer.from_str(source)
    except BaseException as error:
        if not is_refusal(error):
            raise
        raise TokenizerUnusable(f"tokenizers {tokenizers.__version__} can't load tokenizer.json: {error}") from error


def is_refusal(error: BaseException) -> bool:
    """Return whether `tokenizers` raises this for bad files or input. Panics in Rust are not an `Exception`."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def refuse_short_merges(source: str) -> None:
    """Raise `TokenizerUnusable` if `continuing_subword_prefix` does not fit the merges in a tokenizer.json.

    `tokenizers` removes the prefix's number of bytes from the second token string of each merge. If the string is
    shorter, it panics. If a character is cut, the whole process may abort, which can't be caught.
    """
    if not _HAS_PREFIX.search(source):
        return
    try:
        model = json.loads(source)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges") or ()
        seconds = [(merge.split(" ") if isinstance(merge, str) else merge)[1] for merge in merges]
        size = len(prefix.encode())
        pieces = {piece: piece.encode() for piece in seconds}
    except (ValueError, LookupError, TypeError, AttributeError):
        return  # `tokenizers` reports what is wrong with such a file
    for piece, raw in pieces.items():
        cut = raw[size : size + 1]
        if len(raw) < size or (cut and cut[0] & 0xC0 == 0x80):
            raise TokenizerUnusable(
                f"continuing_subword_prefix is {prefix!r} in tokenizer.json, but {piece!r}, the second part of a"
                " merge, does not begin with it: `tokenizers` can't load that. Set continuing_subword_prefix to its"
                " value when the merges were trained (null for most models), or copy the original tokenizer.json."
            )


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens named in a tokenizer_config.json, as {key: token}."""
    return {key: text for key in _SPECIAL_TOKEN_KEYS if (text := _token_text(config.get(key))) is not None}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing. Raises `TokenizerUnusable` if it has no object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerUnusable(f"{path} contains a {type(content).__name__}, expected an object")
    return content


def highest_id(vocab: Mapping[str, int] | Sequence[Any]) -> int:
    """Return the highest id in a tokenizer.json's vocabulary; -1 if the vocabulary is empty."""
    return max(vocab.values(), default=-1) if isinstance(vocab, Mapping) else len(vocab) - 1
