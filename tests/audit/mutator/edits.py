"""Other values for a value of a tokenizer's files: by type first, and by key where only some values are legal."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENUMS: Mapping[str, tuple[Any, ...]] = {
    "behavior": ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"),
    "prepend_scheme": ("always", "never", "first"),
    "direction": ("Left", "Right"),
    "strategy": ("LongestFirst", "OnlyFirst", "OnlySecond"),
    "padding_side": ("left", "right"),
    "truncation_side": ("left", "right"),
    "tokenizer_class": ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2TokenizerFast", "Qwen2TokenizerFast"),
    "version": ("1.0", "2.0"),
}
"""Legal values of keys that take only some."""

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_BOUNDARY = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}

SLOTS: Mapping[str, tuple[Any, ...]] = {
    "normalizer": (
        *({"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")),
        {"type": "Strip", "strip_left": True, "strip_right": False},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": "ﷲ"}, "content": "الله"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ),
    "pre_tokenizer": (
        _BYTES,
        {**_BYTES, "add_prefix_space": True},
        _META,
        _BOUNDARY,
        {"type": "Digits", "individual_digits": True},
        {"type": "Digits", "individual_digits": False},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "WhitespaceSplit"},
        {"type": "UnicodeScripts"},
    ),
    "post_processor": (_BYTES, {**_BYTES, "trim_offsets": False}),
    "decoder": (
        _BYTES,
        _META,
        {"type": "Fuse"},
        {"type": "ByteFallback"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    ),
    "truncation": ({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},),
    "padding": (
        {
            "strategy": {"Fixed": 24},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    ),
    "dropout": (0.1, 0.5),
    "continuing_subword_prefix": ("##", ""),
    "end_of_word_suffix": ("</w>", ""),
}
"""Legal values of parts of a tokenizer.json that may also be null."""

TYPES = tuple(
    sorted({part["type"] for parts in SLOTS.values() for part in parts if isinstance(part, dict) and "type" in part})
)

STEPS = {
    "normalizers": "normalizer",
    "pretokenizers": "pre_tokenizer",
    "processors": "post_processor",
    "decoders": "decoder",
}
"""Lists of parts, with the slot that names what they may hold."""


@dataclass(frozen=True)
class Known:
    """What is known of a model, to draw values that mean something in it."""

    added: tuple[str, ...]
    """What its added tokens spell."""
    ids: tuple[int, ...]
    """Their ids."""
    top_id: int


def other_values(key: str, value: Any, rng: random.Random, known: Known) -> list[Any]:
    """Return values that may replace one under `key`."""
    found: list[Any] = []
    if key in ENUMS:
        found += ENUMS[key]
    elif key in SLOTS:
        found += [rng.choice(SLOTS[key]), rng.choice(SLOTS[key]), *_null(value)]
        if isinstance(value, Mapping):
            steps = next(name for name, slot in STEPS.items() if slot == key) if key in STEPS.values() else None
            if steps:
                found.append({"type": "Sequence", steps: [value, rng.choice(SLOTS[key])]})
                found.append({"type": "Sequence", steps: [rng.choice(SLOTS[key]), value]})
    elif key.endswith("_token") and known.added:
        found += [rng.choice(known.added), rng.choice(known.added), *_null(value)]
    elif key.endswith("_token_id") and known.ids:
        found += [rng.choice(known.ids), rng.choice(known.ids), *_null(value)]
    elif key == "vocab_size" and isinstance(value, int):
        found += [known.top_id + 1, known.top_id, known.top_id - rng.randrange(1, 64), value + 64]
    elif key == "type":
        return [other for other in TYPES if other != value]
    match value:
        case bool():
            found.append(not value)
        case int():
            found += [value + 1, value - 1, 0]
        case float():
            found += [value * 2, value + 0.5]
        case str():
            found += strings(value, rng)
            if key == "Regex":
                found += regexes(value, rng) * 3
        case None if key not in SLOTS:
            found += [True, rng.choice(known.added or ("x",))]
    return [other for other in found if other != value or type(other) is not type(value)]


def _null(value: Any) -> list[None]:
    return [] if value is None else [None]


def strings(value: str, rng: random.Random) -> list[str]:
    """Return edits of a string: case, Unicode forms, a character more or less."""
    if not value:
        return [" ", "x"]
    at = rng.randrange(len(value))
    edited = [
        value[:at] + value[at + 1 :],
        value[:at] + value[at].swapcase() + value[at + 1 :],
        value[: at + 1] + value[at:],
        value + " ",
        " " + value,
        value.strip(),
        value.lower(),
        *(unicodedata.normalize(form, value) for form in ("NFD", "NFKC")),
    ]
    return [candidate for candidate in edited if candidate != value]


_REGEX_EDITS: Sequence[tuple[str, str]] = (
    (r"\{1,3\}", ""),
    (r"\{1,3\}", "{1,2}"),
    (r"\\p\{N\}", r"\\p{Nd}"),
    (r"\\p\{N\}(?!\{)", r"\\p{N}{1,3}"),
    (r"\\p\{L\}", r"\\p{L}\\p{M}"),
    (r"\\p\{L\}\+", r"\\p{L}"),
    (r"\(\?i:", "(?:"),
    (r" \?", ""),
    (r"\(\?!\\S\)", ""),
    (r"\\r\\n", r"\\n"),
    (r"\[\\r\\n\]\*", ""),
    (r"\[\\r\\n/\]\*", r"[\\r\\n]*"),
    (r"\\s", r"[ \\t]"),
    (r"\+", "*"),
    (r"'ll", "'LL"),
)


def regexes(value: str, rng: random.Random) -> list[str]:
    """Return edits of a regular expression that are likely to be one still."""
    found = []
    for pattern, new in _REGEX_EDITS:
        places = list(re.finditer(pattern, value))
        if places:
            place = rng.choice(places)
            found.append(value[: place.start()] + place.expand(new) + value[place.end() :])
    parts = _alternatives(value)
    if len(parts) > 1:
        at = rng.randrange(len(parts))
        found.append("|".join(parts[:at] + parts[at + 1 :]))
        found.append("|".join(_swapped(parts, rng)))
    return [candidate for candidate in found if candidate != value]


def _alternatives(value: str) -> list[str]:
    """The alternatives at the top of a regular expression."""
    parts, depth, klass, at, start = [], 0, False, 0, 0
    while at < len(value):
        sign = value[at]
        if sign == "\\":
            at += 1
        elif klass:
            klass = sign != "]"
        elif sign == "[":
            klass = True
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and depth == 0:
            parts.append(value[start:at])
            start = at + 1
        at += 1
    return [*parts, value[start:]]


def _swapped(parts: Sequence[str], rng: random.Random) -> list[str]:
    left, right = sorted(rng.sample(range(len(parts)), 2))
    copy = list(parts)
    copy[left], copy[right] = copy[right], copy[left]
    return copy


_TEMPLATE_EDITS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"\|\s*trim\b", ""),
    (r"\|\s*tojson\b", "| tojson(indent=2)"),
    (r"\|\s*tojson\b", "| string"),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"==", "!="),
    (r"\band\b", "or"),
    (r"\bis defined\b", "is not defined"),
    (r"\bif not\b", "if"),
    (r"\{%-", "{%"),
    (r"-%\}", "%}"),
    (r"\{\{-", "{{"),
    (r"\\n", ""),
    (r"\\n", r"\\n\\n"),
    (r"\[0\]", "[-1]"),
    (r"\bloop\.first\b", "loop.last"),
    (r"add_generation_prompt", "not add_generation_prompt"),
    (r"reasoning_content", "reasoning"),
    (r"'[^'\n{}%]{3,}'", lambda m: m[0][:-2] + "'"),
    (r"'[^'\n{}%]{3,}'", lambda m: m[0].swapcase()),
    (r"'[^'\n{}%]{3,}'", lambda m: "' " + m[0][1:]),
    (r"[^\n]*\n", ""),
    (r"[ \t]+(?=\{%)", ""),
    (r"\n", "\n\n"),
)


def template_splice(source: str, rng: random.Random) -> list[Any] | None:
    """Return one edit of a template as `[at, old, new]`; None if the pattern that was drawn is not in it."""
    pattern, new = rng.choice(_TEMPLATE_EDITS)
    places = list(re.finditer(pattern, source))
    if not places:
        return None
    place = rng.choice(places)
    return [place.start(), place[0], new(place) if callable(new) else place.expand(new)]
