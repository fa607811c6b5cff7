"""Split a tokenizer and its template into parts, so that a change can be named.

Small parts are kept as they are, large ones as digests of blocks, which show where they changed. Settings without
effect on ids or text are left out, such as offsets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from tokentape.audit._loading_files import TEMPLATES, Settings, loading_settings, named_templates
from tokentape.audit._lock.merge_list import packed_merges
from tokentape.audit._model_config import model_configuration
from tokentape.chat._renderer import Renderer

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


class LockedToken(NamedTuple):
    id: int
    content: str
    flags: str
    """The flags that are set, of special, lstrip, rstrip, normalized, single_word, separated by spaces."""


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a tokenizer and a template."""

    files: Mapping[str, str]
    """Hex SHA-256 of each file; empty for a tokenizer in memory."""
    steps: Mapping[str, Any]
    """Normalizer, pre-tokenizer, post-processor and decoder, as in `tokenizer.json`, and the model's settings."""
    vocabulary: tuple[str, ...]
    """Digest of each `BLOCK` of ids with their pieces."""
    merges: tuple[str, ...]
    """Digest of each `BLOCK` of merges, in their order."""
    added_tokens: tuple[LockedToken, ...]
    special_tokens: Mapping[str, str]
    """The tokens that the configuration names: eos_token and others."""
    eos_ids: tuple[int, ...]
    template: tuple[str, ...]
    """Lines of the chat template."""
    template_sha256: str
    """Of the template and its variant for tools."""
    configuration: Mapping[str, Any] | None = None
    """What `model_configuration` reads, truncation and padding; None if not known, as in locks of older versions."""
    merge_list: str | None = None
    """The merges, see `packed_merges`; None if not known, or as above."""
    loading: Settings | None = None
    """What transformers reads beside tokenizer.json, see `loading_settings`, and digests of templates by other names;
    None as above."""


def components_of(renderer: Renderer, folder: Path) -> Components:
    """Return the parts of a model folder. `renderer` was loaded from it."""
    tokenizer, template = renderer.tokenizer, renderer.template
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    spec = json.loads(files["tokenizer.json"])
    lengths = {name: spec[name] for name in ("truncation", "padding") if spec.get(name) is not None}
    templates = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in named_templates(folder).items()}
    return Components(
        files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        **spec_parts(files["tokenizer.json"].decode()),
        special_tokens=dict(tokenizer.special_tokens),
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        template=tuple(template.source.splitlines()),
        template_sha256=template.sha256,
        configuration={**(model_configuration(folder) or {}), **lengths},
        loading={**loading_settings(folder, spec), **({TEMPLATES: templates} if templates else {})},
    )


def spec_parts(source: str) -> dict[str, Any]:
    """Return the fields of `Components` that a `tokenizer.json` has: steps, vocabulary, merges, added tokens.

    The installed `tokenizers` reads and writes it first, so that one in memory and one in a file look alike.
    """
    spec = json.loads(source)
    vocab, merges = spec["model"]["vocab"], spec["model"].get("merges", [])
    added = spec.get("added_tokens") or []
    if isinstance(vocab, Mapping):
        # The library reads what is left in no time.
        spec = {**spec, "model": {**spec["model"], "vocab": {}, "merges": []}, "added_tokens": []}
    spec = json.loads(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str())
    model = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    steps = {name: _step(spec[name]) for name in _PIPELINE}
    if steps["decoder"] is not None and steps["decoder"]["type"] == "ByteLevel":
        # Its flags do nothing, and libraries write them one way or another.
        steps["decoder"] = {"type": "ByteLevel"}
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    return {
        "steps": {**steps, "model": _step(model)},
        "vocabulary": tuple(_digests(_entries(vocab))),
        "merges": tuple(_digests(map(" ".join, pairs))),
        "merge_list": packed_merges(vocab, pairs) if isinstance(vocab, Mapping) else None,
        "added_tokens": tuple(
            LockedToken(token["id"], token["content"], " ".join(flag for flag in _FLAGS if token.get(flag)))
            for token in added
        ),
    }


def _step(value: Any) -> Any:
    """Return a step of a tokenizer for comparison: no settings for offsets, digests for long strings."""
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
    """Yield the first 12 hex digits of each block's SHA-256."""
    rest = iter(entries)
    while block := list(islice(rest, BLOCK)):
        yield hashlib.sha256("\n".join(block).encode("utf-8", "surrogatepass")).hexdigest()[:12]
