"""Read the files of a tokenizer, and load a tokenizer.json with `tokenizers`."""

from __future__ import annotations

import json
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


def from_text(source: str) -> tokenizers.Tokenizer:
    """Load the text of a tokenizer.json with `tokenizers`. Raises `TokenizerUnusable` if the library refuses it."""
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnusable(f"tokenizers {tokenizers.__version__} does not take it: {error}") from error


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, as {key: token}."""
    return {key: text for key in _SPECIAL_TOKEN_KEYS if (text := _token_text(config.get(key))) is not None}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing. Raises `TokenizerUnusable` for other content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerUnusable(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def highest_id(vocab: Mapping[str, int] | Sequence[Any]) -> int:
    """Return the highest id of a vocabulary in a tokenizer.json; -1 if it is empty."""
    return max(vocab.values(), default=-1) if isinstance(vocab, Mapping) else len(vocab) - 1
