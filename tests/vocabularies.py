"""Tokenizers that differ from the tiny model's in one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokentape.chat._tokenizer import Tokenizer


def swap_words(spec: dict[str, Any]) -> None:
    """Exchange the ids of two words: the number of ids stays the same."""
    vocab = spec["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def rename_added(spec: dict[str, Any]) -> None:
    """Rename an added token, as fine-tunes do with reserved ones."""
    token = spec["added_tokens"][-1]
    vocab = spec["model"]["vocab"]
    if token["content"] in vocab:
        vocab["<|new|>"] = vocab.pop(token["content"])
    token["content"] = "<|new|>"


def changed_source(folder: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The folder's tokenizer.json, changed."""
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(spec)
    return json.dumps(spec, indent=1).encode()


def changed_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object] = swap_words) -> Tokenizer:
    """The folder's tokenizer with a changed tokenizer.json."""
    return Tokenizer(changed_source(folder, change), {})
