"""Compare, describe and exchange the parts of a tokenizer.json, and make widely used parts, which `causes` tries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

from tokentape._alignment import first_difference
from tokentape.audit._model_files import changed_entries
from tokentape.audit._skew.backends import BackendFacts, BackendToken
from tokentape.audit._skew.findings import Kind
from tokentape.audit._skew.merge_tables import makes_whole_vocabulary, merges_of, same_merges
from tokentape.chat._byte_level import BYTE_OF

SPLITS: Mapping[str, tuple[str, ...]] = {
    name: tuple(parts)
    for name, parts in json.loads(Path(__file__).with_name("splits.json").read_text(encoding="utf-8")).items()
}
"""Split expressions by name, from the models' own tokenizer.json or from tiktoken. Servers and converters mix them up.
They are applied one after the other, and split text around their matches."""
SPLIT_NAMES: Mapping[str, str] = {parts[0]: name for name, parts in SPLITS.items() if len(parts) == 1}

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_FIRST = {"type": "Prepend", "prepend": "▁"}
_SINGLE_SPACE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
SENTENCEPIECE: Mapping[str, Any] = {
    "a space before the text and after every control token, whatever is there": [_FIRST, _SPACES],
    "no space put before anything": [_SPACES],
    "several spaces taken for one": [_SINGLE_SPACE, _FIRST, _SPACES],
}
"""Normalizers that handle spaces as SentencePiece does, without a pre-tokenizer, by description."""


def byte_level(name: str) -> dict[str, Any]:
    """Return a pre-tokenizer in tokenizer.json form that splits by `SPLITS[name]` and writes bytes as characters."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in SPLITS[name]
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, _BYTES]}


def metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    """Return a pre-tokenizer that handles spaces like SentencePiece. `scheme`: `first`, `always` or `never` add one."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


NORMALIZERS: Mapping[str, Any] = {
    "no normalization": None,
    **{form: {"type": form} for form in ("NFC", "NFKC", "NFD", "NFKD")},
    **{
        f"removal of whitespace {where} a text": {"type": "Strip", "strip_left": left, "strip_right": right}
        for where, left, right in (("around", True, True), ("before", True, False), ("after", False, True))
    },
    "lower case": {"type": "Lowercase"},
}


def pre_tokenizers(spec: Mapping[str, Any]) -> dict[str, Any]:
    if not is_byte_level(spec):
        schemes = {"a space before the first word": "first", "a space before every piece": "always"}
        schemes["no space before the first word"] = "never"
        return {what: metaspace(scheme, split=False) for what, scheme in schemes.items()}
    variants = {f"the split of {name}": byte_level(name) for name in SPLITS}
    variants["no split at all"] = _BYTES
    own = spec.get("pre_tokenizer")
    if own is not None:
        variants["its own split, with a space put before the text"] = _with_prefix_space(own)
    return {**variants, "SentencePiece's handling of spaces (Metaspace)": metaspace("always", split=True)}


def is_byte_level(spec: Mapping[str, Any]) -> bool:
    return "ByteLevel" in str(spec.get("pre_tokenizer"))


def _with_prefix_space(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_with_prefix_space(step) for step in part["pretokenizers"]]}
    return {**part, "add_prefix_space": True} if part["type"] == "ByteLevel" else dict(part)


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
"""The parts of a tokenizer.json in the order in which they are tried, each with the kind of finding that it causes."""


def part_of(spec: Spec, name: str) -> Any:
    """Return a part of a tokenizer.json in a comparable form."""
    raw = _raw(spec, name)
    match name:
        case "settings":
            return {key: _DEFAULTS[key] if key in _DEFAULTS and not value else value for key, value in raw.items()}
        case "merges":
            return merges_of(spec["model"])
        case "vocabulary":
            return raw if isinstance(raw, Mapping) else [tuple(entry) for entry in raw]
    return _normalized(raw, name)


def _normalized(part: Any, name: str) -> Any:
    """Normalize a part: drop fields that change neither ids nor text, and write patterns in one way."""
    if not isinstance(part, Mapping):
        return part
    if steps := _STEPS & part.keys():
        key = min(steps)
        kept = [step for step in (_normalized(step, name) for step in part[key]) if step is not None]
        flat = [inner for step in kept for inner in step.get(key, [step])]
        return ({**part, key: flat} if len(flat) > 1 else flat[0]) if flat else None
    if part.get("type") == "ByteLevel":
        if name == "post_processor":
            return None  # it changes only offsets
        if name == "pre_tokenizer" and part.get("use_regex", True) and not part.get("add_prefix_space", True):
            return _normalized(byte_level("gpt2"), name)  # the split that is built into ByteLevel
        decoder = name == "decoder"
        return {key: value for key, value in part.items() if key != "trim_offsets" and (key == "type" or not decoder)}
    if part.get("type") == "TemplateProcessing":
        ids = {name: token["ids"] for name, token in part["special_tokens"].items()}
        return {"type": part["type"], **{key: _template_ids(part[key], ids) for key in ("single", "pair")}}
    if part.get("type") == "BertNormalizer" and part.get("strip_accents") is None:
        return {**part, "strip_accents": part.get("lowercase")}
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and "Regex" in pattern:
        regex = pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t").replace(r"\"", '"')
        return {**part, "pattern": {"Regex": regex}}
    return part


def _template_ids(pieces: Any, ids: Mapping[str, Any]) -> Any:
    """Return the text (`A`) or the ids that each piece of a TemplateProcessing stands for."""
    if not isinstance(pieces, list):
        return pieces
    entries = [next(iter(piece.values()))["id"] for piece in pieces]
    return [ids[entry] if "SpecialToken" in piece else entry for piece, entry in zip(pieces, entries, strict=True)]


_STEPS = {"normalizers", "pretokenizers", "processors", "decoders"}
PREFIXES = {"continuing_subword_prefix", "end_of_word_suffix"}
_DEFAULTS = {
    **dict.fromkeys(PREFIXES, ""),
    **dict.fromkeys(["ignore_merges", "byte_fallback", "fuse_unk"], False),
    **dict.fromkeys(["unk_token", "dropout"]),
}


def _loaded(part: Any, name: str) -> Any:
    """Return a part of tokenizer.json (`name`: "normalizer", ...) with its defaults written out.

    `tokenizers` loads and saves it. A part that it rejects is returned unchanged.
    """
    try:
        return json.loads(with_only(name, part).to_str())[name] if isinstance(part, Mapping) else part
    except Exception:  # `tokenizers` raises no narrower error
        return part


def with_only(name: str, part: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer with an empty vocabulary and `part` as its part `name`."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, name: part}
    return tokenizers.Tokenizer.from_str(json.dumps(empty))


TABLES: Mapping[str, Kind] = {
    "normalizer": "normalizer",
    "denormalizer": "decoder",
    "settings": "model settings",
    "pieces": "vocabulary",
    "control tokens": "added token",
}
"""The tables that `BackendFacts.tables` may have, each with the kind of finding that it causes."""


def differing_tables(a: BackendFacts, b: BackendFacts) -> list[str]:
    return [name for name in TABLES if name in a.tables and name in b.tables and a.tables[name] != b.tables[name]]


def table_words(name: str, a: BackendFacts, b: BackendFacts) -> str:
    (entry, pair), *others = changed_entries(a.tables[name], b.tables[name]).items()
    values = " in A and ".join("absent" if value is None else str(value) for value in pair)
    return f"{name} of the model file: {1 + len(others)} differ, such as {entry!r}: {values} in B"


def differing_parts(a: BackendFacts, b: BackendFacts) -> list[str]:
    """Return the names of parts that differ, without added tokens; [] if a side has no tokenizer.json."""
    if a.spec is None or b.spec is None:
        return []
    unequal = {name: _both(name, a, b) for name in PARTS if _raw(a.spec, name) != _raw(b.spec, name)}
    return [
        name
        for name, (a_part, b_part) in unequal.items()
        if a_part != b_part and not _equivalent(name, a_part, b_part, a.spec, b.spec)
    ]


def _both(name: str, a: BackendFacts, b: BackendFacts) -> list[Any]:
    """Return both backends' version of a part, without added tokens, which only some vocabularies list."""
    parts = [part_of(side.spec or {}, name) for side in (a, b)]
    if name == "settings":
        return [{**_DEFAULTS, **part} for part in parts]
    if name == "post_processor" and any("GGUF" in side.kind for side in (a, b)):  # llama.cpp encodes no pairs of texts
        return [{**part, "pair": None} if isinstance(part, Mapping) and "pair" in part else part for part in parts]
    if name == "vocabulary":
        added = {**a.added, **b.added}
        parts = [
            {t: i for t, i in part.items() if t not in added} if isinstance(part, Mapping) else part for part in parts
        ]
    return parts


def _equivalent(name: str, a_part: Any, b_part: Any, a: Spec, b: Spec) -> bool:
    """Return True if two versions of a part are proven to give the same ids and text."""
    if name == "merges":
        prefixed = any(spec["model"].get(prefix) for spec in (a, b) for prefix in PREFIXES)
        return not prefixed and same_merges(a_part, b_part)
    if name == "settings":
        return same_settings(a, b)
    return bool(_loaded(a_part, name) == _loaded(b_part, name))


def same_settings(a: Spec, b: Spec) -> bool:
    """Return True if the settings of two models are proven to have the same effect with the models' other parts."""
    ours, theirs = ({**_DEFAULTS, **part_of(spec, "settings")} for spec in (a, b))
    changed = {key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key)}
    if changed & _OF_UNKNOWN and any(all(map(test, (a, b))) for test in (_has_all_bytes, _is_byte_level_only)):
        changed -= _OF_UNKNOWN
    if changed == {"ignore_merges"}:
        merges = [part_of(spec, "merges") for spec in (a, b)]
        fewer = min(merges, key=len)
        whole = all(makes_whole_vocabulary(_looked_up(spec), fewer) for spec in (a, b))
        return whole and (merges[0] == merges[1] or same_merges(*merges))
    return not changed


def _looked_up(spec: Spec) -> Spec:
    """Return the model without the added tokens in its vocabulary: they are found before words are looked up."""
    added = {token["content"] for token in spec.get("added_tokens") or () if not token.get("single_word")}
    vocab = part_of(spec, "vocabulary")
    return {"vocab": {t: i for t, i in vocab.items() if t not in added} if isinstance(vocab, Mapping) else vocab}


_OF_UNKNOWN = {"unk_token", "fuse_unk", "byte_fallback"}
"""Settings that have an effect only on characters that the vocabulary lacks."""


def _has_all_bytes(spec: Spec) -> bool:
    """Return True if BPE writes each character that its vocabulary lacks as bytes."""
    model = spec["model"]
    return bool(model["type"] == "BPE" and model.get("byte_fallback")) and {
        f"<0x{byte:02X}>" for byte in range(256)
    } <= set(model["vocab"])


def _is_byte_level_only(spec: Spec) -> bool:
    """Return True if BPE gets only characters that stand for bytes, and its vocabulary has all of them."""
    model, steps = spec["model"], part_of(spec, "pre_tokenizer") or {}
    last = steps.get("pretokenizers", [steps])[-1]
    plain = model["type"] == "BPE" and not any(model.get(prefix) for prefix in PREFIXES)
    return plain and last.get("type") == "ByteLevel" and set(BYTE_OF) <= set(model["vocab"])


def same_step(name: str, ours: Any, theirs: Any) -> bool:
    """Return True if two versions of a normalizer, pre-tokenizer, post-processor or decoder are proven equivalent."""
    a_part, b_part = _normalized(ours, name), _normalized(theirs, name)
    return bool(a_part == b_part or _loaded(a_part, name) == _loaded(b_part, name))


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


def with_part(spec: Spec, name: str, other: Spec) -> dict[str, Any]:
    model, theirs = spec["model"], other["model"]
    match name:
        case "settings":
            model = {**theirs, **{key: model[key] for key in ("vocab", "merges") if key in model}}
        case "merges":
            model = {**model, "merges": theirs.get("merges", [])}
        case "vocabulary":
            model = {**model, **{key: theirs[key] for key in ("vocab", "merges") if key in theirs}}
        case _:
            return {**spec, name: other.get(name)}
    return {**spec, "model": model}


def with_tokens(spec: Spec, other: BackendFacts, tokens: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `spec` with the added `tokens` as `other` defines them, or removed if `other` lacks them."""
    unchanged = [token for token in spec.get("added_tokens") or () if token["content"] not in tokens]
    others = [asdict(other.added[token]) for token in tokens if token in other.added]
    changed = {**spec, "added_tokens": sorted([*unchanged, *others], key=lambda token: token["id"])}
    vocab, theirs = spec["model"]["vocab"], (other.spec or {})["model"]["vocab"]
    if isinstance(vocab, Mapping) and isinstance(theirs, Mapping):
        # `tokenizers` ignores the id of an added token that is not in the vocabulary and does not come next.
        own = {token: theirs[token] for token in tokens if token in theirs}
        # All of them: one more entry in the vocabulary would move the ids of those that come next.
        own |= {token["content"]: token["id"] for token in changed["added_tokens"]}
        changed["model"] = {**spec["model"], "vocab": {t: i for t, i in vocab.items() if t not in tokens} | own}
    return changed


def part_words(name: str, a: BackendFacts, b: BackendFacts) -> str:
    """Describe how a part differs between two backends."""
    a_part, b_part = _both(name, a, b)
    if name in ("merges", "vocabulary"):
        return f"the {name} {'differ' if name == 'merges' else 'differs'}: {_entries_apart(a_part, b_part)}"
    if name == "settings":
        changed = changed_entries(a_part, b_part).items()
        return "the model settings differ: " + ", ".join(f"{key}={x} in A and {y} in B" for key, (x, y) in changed)
    words = brief(a_part), brief(b_part)
    if words[0] == words[1]:
        path, a_value, b_value = nested_difference(a_part, b_part)
        where = path.removeprefix(".")
        return f"the {PARTS[name]} is {words[0]} in A and B, but {where} is {a_value!r} in A and {b_value!r} in B"
    return f"the {PARTS[name]} is {words[0]} in A and {words[1]} in B"


def nested_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return the path to the first difference between two nested values, such as `.steps[1]`, and the values there."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.get("type") == b.get("type"):
        for key in (*a, *b):
            if a.get(key) != b.get(key):
                return nested_difference(a.get(key), b.get(key), f"{path}.{key}")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        index = first_difference(a, b)
        return nested_difference(a[index], b[index], f"{path}[{index}]")
    return path, a, b


def _entries_apart(a_part: Any, b_part: Any) -> str:
    """Describe how two lists of merges, or two vocabularies, differ: how many entries, and the first difference."""
    counts = f"{len(a_part)} entries in A, {len(b_part)} in B"
    if isinstance(a_part, Mapping) and isinstance(b_part, Mapping):
        changed = changed_entries(a_part, b_part)
        if not changed:
            return counts
        entry, pair = next(iter(changed.items()))
        ids = ["absent" if number is None else number for number in pair]
        return f"{counts}; {len(changed)} differ, for example {entry!r}: {ids[0]} in A, {ids[1]} in B"
    index = first_difference(a_part, b_part)
    shown = [repr(" ".join(map(str, part[index]))) if index < len(part) else "none" for part in (a_part, b_part)]
    return f"{counts}; the first that differs, at {index}, is {shown[0]} in A and {shown[1]} in B"


def differing_tokens(a: BackendFacts, b: BackendFacts) -> dict[str, tuple[str, ...]]:
    """Group the added tokens that differ between the backends by a description of their difference."""
    groups: dict[str, list[str]] = {}
    plain = all(side.spec is not None and part_of(side.spec, "normalizer") is None for side in (a, b))
    for content in {**a.added, **b.added}:
        a_token, b_token = a.added.get(content), b.added.get(content)
        if plain and a_token and b_token and a_token != b_token and not _overlaps(content, {*a.added, *b.added}):
            a_token = replace(a_token, normalized=b_token.normalized)  # the flag has no effect without a normalizer
        if a_token is None or b_token is None:
            groups.setdefault(f"not in {'A' if a_token is None else 'B'}", []).append(content)
        elif a_token != b_token:
            groups.setdefault("ids" if a_token.id != b_token.id else _flags(a_token, b_token), []).append(content)
    return {difference: tuple(tokens) for difference, tokens in groups.items()}


def _overlaps(token: str, others: Iterable[str]) -> bool:
    """Return True if a token can overlap one of `others` in a text."""
    return any(
        token in other
        or other in token
        or any(token[-n:] == other[:n] or other[-n:] == token[:n] for n in range(1, min(len(token), len(other))))
        for other in others
        if other != token
    )


def _flags(a: BackendToken, b: BackendToken) -> str:
    names = [name for name in BackendToken.__dataclass_fields__ if getattr(a, name) != getattr(b, name)]
    return ", ".join(f"{name}={getattr(a, name)} against {getattr(b, name)}" for name in names)


def added_words(tokens: Sequence[str], a: BackendFacts, b: BackendFacts) -> str:
    """Describe the difference between the sides' added `tokens`, which all differ in the same way."""
    token, more = tokens[0], len(tokens) - 1
    a_token, b_token = a.added.get(token), b.added.get(token)
    if a_token is None or b_token is None:
        have, lack = ("B", "A") if a_token is None else ("A", "B")
        are = f" and {more} more are added tokens" if more else " is an added token"
        return f"{token!r}{are} in {have} but not in {lack}, which reads it as text"
    name = f"the added token {token!r}" + (f" (and of {more} more)" if more else "")
    if a_token.id != b_token.id:
        return f"the id of {name} is {a_token.id} in A and {b_token.id} in B"
    return f"the flags of {name} differ: {_flags(a_token, b_token)}"


def brief(part: Any) -> str:
    """Describe a part of a tokenizer.json in a few words."""
    if part is None:
        return "none"
    if steps := _STEPS & part.keys():
        return " + ".join(map(brief, part[min(steps)])) or "none"
    arguments = [
        _argument(key, value) for key, value in part.items() if key != "type" and value not in (None, False, "")
    ]
    short = ", ".join(filter(None, arguments))
    return f"{part['type']}({short})" if short else str(part["type"])


def _argument(key: str, value: Any) -> str:
    if key in ("trim_offsets", "behavior", "special_tokens", "pair"):
        return ""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), "")
        if value in SPLIT_NAMES:
            return f"as {SPLIT_NAMES[value]}"
    text = str(value)
    return f"{key}={text if len(text) <= 60 else text[:57] + '...'}"
