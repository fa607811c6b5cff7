"""What a tokenizer and its template are made of, part by part, so that a change can be called by its name.

Small parts are kept as they are, large ones as digests of blocks, which tell where they changed. What has no effect on
ids or text is left out: offsets, padding, truncation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tokentape.chat.template import ChatTemplate
from tokentape.chat.tokenizer import Tokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""The files of a model folder that tokenization depends on."""

BLOCK = 4096
"""Vocabulary entries, or merges, to a digest."""

_PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

STEPS = (*_PIPELINE, "model")
"""Names of `Components.steps`."""

_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_LONG = 1024


@dataclass(frozen=True, slots=True)
class LockedToken:
    """A token beside the vocabulary."""

    id: int
    content: str
    flags: str
    """Those of special, lstrip, rstrip, normalized, single_word that are set, separated by spaces."""


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one tokenizer and one template."""

    files: Mapping[str, str]
    """Hex SHA-256 of each file that there is; empty for a tokenizer that is in memory."""
    steps: Mapping[str, Any]
    """Normalizer, pre-tokenizer, post-processor, decoder, as in `tokenizer.json`, and the model's settings."""
    vocabulary: tuple[str, ...]
    """Digest of each `BLOCK` of ids with their pieces."""
    merges: tuple[str, ...]
    """Digest of each `BLOCK` of merges, in their order."""
    added_tokens: tuple[LockedToken, ...]
    special_tokens: Mapping[str, str]
    """What the configuration names: eos_token and others."""
    eos_ids: tuple[int, ...]
    template: tuple[str, ...]
    """Lines of the chat template."""
    template_sha256: str
    """Of the template and its variant for tools."""


def components_of(tokenizer: Tokenizer, source: bytes, template: ChatTemplate, folder: Path | None) -> Components:
    """The parts of a loaded tokenizer, whose `tokenizer.json` is `source`, and of a template.

    `folder` is where files are looked for.
    """
    return Components(
        files=_files(folder) if folder is not None else {},
        **spec_parts(source.decode()),
        special_tokens=dict(tokenizer.special_tokens),
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        template=tuple(template.source.splitlines()),
        template_sha256=template.sha256,
    )


def spec_parts(source: str) -> dict[str, Any]:
    """The fields of `Components` that a `tokenizer.json` has: steps, vocabulary, merges, added tokens.

    It is read and written by the installed `tokenizers` first, so that one in memory and one in a file look alike.
    """
    spec = json.loads(source)
    vocab, merges, added = spec["model"]["vocab"], spec["model"].get("merges", []), spec["added_tokens"]
    if isinstance(vocab, Mapping):
        # The library reads what is left in no time.
        spec = {**spec, "model": {**spec["model"], "vocab": {}, "merges": []}, "added_tokens": []}
    spec = json.loads(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str())
    model = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    steps = {name: _step(spec[name]) for name in _PIPELINE}
    if steps["decoder"] is not None and steps["decoder"]["type"] == "ByteLevel":
        # Its flags do nothing, and libraries write them one way or another.
        steps["decoder"] = {"type": "ByteLevel"}
    return {
        "steps": {**steps, "model": _step(model)},
        "vocabulary": tuple(_digests(_entries(vocab))),
        "merges": tuple(_digests(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)),
        "added_tokens": tuple(
            LockedToken(token["id"], token["content"], " ".join(flag for flag in _FLAGS if token.get(flag)))
            for token in added
        ),
    }


def _files(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES if (folder / name).is_file()
    }


def _step(value: Any) -> Any:
    """A step without what changes offsets only, and with long strings as digests."""
    if isinstance(value, Mapping):
        return {key: _step(part) for key, part in value.items() if key != "trim_offsets"}
    if isinstance(value, list):
        return [_step(part) for part in value]
    if isinstance(value, str) and len(value) > _LONG:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"
    return value


def _entries(vocab: Mapping[str, int] | Sequence[Any]) -> Iterator[str]:
    if isinstance(vocab, Mapping):
        by_id = {token_id: piece for piece, token_id in vocab.items()}
        return (by_id.get(token_id, "") for token_id in range(max(by_id, default=-1) + 1))
    return (json.dumps(entry) for entry in vocab)


def _digests(entries: Iterable[str]) -> Iterator[str]:
    """The first 12 hex digits of each block's SHA-256."""
    block: list[str] = []
    for entry in entries:
        block.append(entry)
        if len(block) == BLOCK:
            yield _digest(block)
            block = []
    if block:
        yield _digest(block)


def _digest(block: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(block).encode("utf-8", "surrogatepass")).hexdigest()[:12]
