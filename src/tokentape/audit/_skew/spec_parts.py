"""Compare and exchange the parts of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import tokenizers

from tokentape.audit._skew.backends.base import BackendFacts, BackendToken
from tokentape.audit._skew.findings import Kind
from tokentape.audit._skew.merge_tables import makes_whole_vocabulary, same_merges

Spec: TypeAlias = Mapping[str, Any]

PARTS: Mapping[str, Kind] = {
    "normalizer": "normalizer",
    "pre_tokenizer": "pre-tokenizer",
    "settings": "model settings",
    "merges": "merges",
    "vocabulary": "vocabulary",
    "post_processor": "BOS/EOS",
    "decoder": "decoder",
}
"""The parts of a tokenizer.json in the order in which they are tried, with the kind of a difference by them."""


def part_of(spec: Spec, name: str) -> Any:
    """Return a part of a tokenizer.json in a form that can be compared."""
    model = spec["model"]
    match name:
        case "settings":
            return {key: _setting(key, value) for key, value in _raw(spec, name).items()}
        case "merges":
            return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model.get("merges") or ()]
        case "vocabulary":
            vocab = model["vocab"]
            return vocab if isinstance(vocab, Mapping) else [tuple(entry) for entry in vocab]
    return _written(spec.get(name), name)


def _written(part: Any, name: str) -> Any:
    """Return a part without what changes neither ids nor text, and with patterns in one spelling."""
    if not isinstance(part, Mapping):
        return part
    for steps in ("normalizers", "pretokenizers", "processors", "decoders"):
        if steps in part:
            kept = [_written(step, name) for step in part[steps]]
            kept = [step for step in kept if step is not None]
            return ({**part, steps: kept} if len(kept) > 1 else kept[0]) if kept else None
    if part.get("type") == "ByteLevel":
        if name == "post_processor":
            return None  # it moves offsets only
        decoder = name == "decoder"
        return {key: value for key, value in part.items() if key != "trim_offsets" and (key == "type" or not decoder)}
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and "Regex" in pattern:
        return {**part, "pattern": {"Regex": _escaped(pattern["Regex"])}}
    return part


def _escaped(pattern: str) -> str:
    for char, escape in (("\r", r"\r"), ("\n", r"\n"), ("\t", r"\t")):
        pattern = pattern.replace(char, escape)
    return pattern.replace(r"\"", '"')


_PREFIXES = {"continuing_subword_prefix", "end_of_word_suffix"}
_DEFAULTS = {
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "ignore_merges": False,
    "byte_fallback": False,
    "fuse_unk": False,
    "unk_token": None,
    "dropout": None,
}


def _setting(key: str, value: Any) -> Any:
    return _DEFAULTS[key] if key in _DEFAULTS and not value else value


def _loaded(part: Any, name: str) -> Any:
    """Return a part as `tokenizers` writes it, with every default; unchanged if it does not take the part."""
    try:
        return json.loads(with_only(name, part).to_str())[name] if isinstance(part, Mapping) else part
    except Exception:  # `tokenizers` raises no narrower error
        return part


def with_only(name: str, part: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer with an empty vocabulary and one part."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, name: part}
    return tokenizers.Tokenizer.from_str(json.dumps(empty))


def differing_parts(a: BackendFacts, b: BackendFacts) -> list[str]:
    """Return the parts of tokenizer.json that differ, without added tokens; none if one side has no such file."""
    if a.spec is None or b.spec is None:
        return []
    found = []
    for name in PARTS:
        if _raw(a.spec, name) == _raw(b.spec, name):
            continue
        one, other = part_of(a.spec, name), part_of(b.spec, name)
        if name == "vocabulary":
            one, other = (_without(part, {**a.added, **b.added}) for part in (one, other))
        if name == "settings":
            keys = {*one, *other}
            one, other = ({k: part.get(k, _DEFAULTS.get(k)) for k in keys} for part in (one, other))
        if one != other and not _does_the_same(name, one, other, a.spec, b.spec):
            found.append(name)
    return found


def _does_the_same(name: str, one: Any, other: Any, a: Spec, b: Spec) -> bool:
    """Return True if it is proven that a part written in two ways changes neither ids nor text."""
    if name == "merges":
        return not any(_PREFIXES & {key for key, value in spec["model"].items() if value} for spec in (a, b)) and (
            same_merges(one, other)
        )
    if name == "settings":
        if {key for key in one if one[key] != other[key]} != {"ignore_merges"}:
            return False
        merges = [part_of(spec, "merges") for spec in (a, b)]
        fewer = min(merges, key=len)
        return makes_whole_vocabulary(a["model"], fewer) and (merges[0] == merges[1] or same_merges(*merges))
    return bool(_loaded(one, name) == _loaded(other, name))


def _raw(spec: Spec, name: str) -> Any:
    model: Spec = spec["model"]
    match name:
        case "settings":
            return {key: value for key, value in model.items() if key not in ("vocab", "merges")}
        case "merges":
            return model.get("merges")
        case "vocabulary":
            return model["vocab"]
    return spec.get(name)


def _without(vocab: Any, added: Mapping[str, BackendToken]) -> Any:
    """Return a vocabulary without added tokens, since only some list them."""
    return {token: i for token, i in vocab.items() if token not in added} if isinstance(vocab, Mapping) else vocab


def with_part(spec: Spec, name: str, other: Spec) -> dict[str, Any]:
    """Return a tokenizer.json with one part of another one."""
    model, theirs = spec["model"], other["model"]
    big = ("vocab", "merges")
    match name:
        case "settings":
            kept = {key: model[key] for key in big if key in model}
            return {**spec, "model": {**{k: v for k, v in theirs.items() if k not in big}, **kept}}
        case "merges":
            return {**spec, "model": {**model, "merges": theirs.get("merges", [])}}
        case "vocabulary":
            taken = {key: theirs[key] for key in big if key in theirs}
            return {**spec, "model": {**model, **taken}}
    return {**spec, name: other.get(name)}
