"""Compare, describe and exchange the parts of a tokenizer.json, and make widely used parts, which `causes` tries.

A merge can apply in a text only if it is also the last step of encoding its own result, because the steps that make its
two pieces are the same in a text as alone. So two merge lists are equivalent if only merges that never apply differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

from tokentape._alignment import first_difference
from tokentape.audit._model_files import changed_entries
from tokentape.audit._skew.backends import BackendFacts, BackendToken
from tokentape.audit._skew.findings import Kind

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
Merge: TypeAlias = tuple[str, ...]

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


def merges_of(model: Spec) -> list[Merge]:
    """Return the merges of a tokenizer.json's model, which stores each as a string or as a list."""
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges") or ()]


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
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and "Regex" in pattern:
        regex = pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n").replace("\t", r"\t").replace(r"\"", '"')
        return {**part, "pattern": {"Regex": regex}}
    return part


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
        if {key for key in a_part if a_part[key] != b_part[key]} != {"ignore_merges"}:
            return False
        merges = [part_of(spec, "merges") for spec in (a, b)]
        fewer = min(merges, key=len)
        return makes_whole_vocabulary(a["model"], fewer) and (merges[0] == merges[1] or same_merges(*merges))
    return bool(_loaded(a_part, name) == _loaded(b_part, name))


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


def same_merges(ours: Sequence[Merge], theirs: Sequence[Merge]) -> bool:
    """Return True if both lists are proven to encode every text equally.

    They are if they apply the same merges, and merges that share no piece are all that changed places. The second holds
    if no merge comes before one that makes its pieces: then each merge is applied everywhere before the next one.
    """
    applied = applied_merges(tuple(ours)), applied_merges(tuple(theirs))
    if applied[0] == applied[1]:
        return True
    of_pieces = [_merges_of_pieces(merges) for merges in applied]
    return of_pieces[0] == of_pieces[1] and all(
        "".join(later) != piece or "".join(earlier) == piece
        for piece, merges in of_pieces[0].items()
        for earlier, later in pairwise(merges)
    )


def _merges_of_pieces(merges: Iterable[Merge]) -> dict[str, list[Merge]]:
    """Return the merges that make or use each piece, in their order."""
    of_pieces: dict[str, list[Merge]] = {}
    for merge in merges:
        for piece in {*merge, "".join(merge)}:
            of_pieces.setdefault(piece, []).append(merge)
    return of_pieces


_BYTES_SPELLED = re.compile("(<0x[0-9A-F]{2}>)+")
"""Tokens of byte fallback. Their merges apply to characters that the vocabulary lacks, not to this spelling."""


@lru_cache(4)
def applied_merges(merges: tuple[Merge, ...]) -> list[Merge]:
    """Return the merges in a list that at least one text can use, by rank and without duplicates."""
    # `tokenizers` gives a merge that is listed twice its last place.
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    ordered = sorted(ranks, key=ranks.__getitem__)
    return [merge for merge in ordered if any(map(_BYTES_SPELLED.fullmatch, merge)) or _applied(merge, ranks)]


def makes_whole_vocabulary(model: Mapping[str, Any], merges: Sequence[Merge]) -> bool:
    """Return True if merging the text of each token gives that token, so that `ignore_merges` has no effect."""
    if not isinstance(model["vocab"], Mapping):
        return False
    long = {token for token in model["vocab"] if len(token) > 1}
    # Looking up merge results is fast, and decides most cases.
    return long <= {"".join(merge) for merge in merges} and long <= {*map("".join, applied_merges(tuple(merges)))}


def _applied(merge: Merge, ranks: Mapping[Merge, int]) -> bool:
    """Return True if a merge is the last step of encoding its own result, see the module docstring."""
    parts = list("".join(merge))
    while len(parts) > 2:
        pairs = [ranks.get(pair, inf) for pair in pairwise(parts)]
        first = min(pairs)
        if first == inf:
            return False
        index = pairs.index(first)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return tuple(parts) == merge


def with_tokens(spec: Spec, other: Spec, tokens: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `spec` with the added `tokens` as `other` defines them, or removed if `other` lacks them."""
    unchanged = [token for token in spec.get("added_tokens") or () if token["content"] not in tokens]
    others = [token for token in other.get("added_tokens") or () if token["content"] in tokens]
    changed = {**spec, "added_tokens": sorted([*unchanged, *others], key=lambda token: token["id"])}
    vocab, theirs = spec["model"]["vocab"], other["model"]["vocab"]
    if isinstance(vocab, Mapping) and isinstance(theirs, Mapping):
        # `tokenizers` ignores the id of an added token that is in the vocabulary, or that does not come next.
        own = {token: theirs[token] for token in tokens if token in theirs}
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
