"""Areas of a model's files that are changed, exchanged and named together, and the exchange of one of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tests.audit.mutator.changes import Path
from tests.audit.mutator.files import CONFIG, GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Model

AREAS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "normalizer": ((TOKENIZER, "normalizer"),),
    "pre_tokenizer": ((TOKENIZER, "pre_tokenizer"),),
    "post_processor": ((TOKENIZER, "post_processor"),),
    "decoder": ((TOKENIZER, "decoder"),),
    "added_tokens": ((TOKENIZER, "added_tokens"),),
    "truncation": ((TOKENIZER, "truncation"),),
    "padding": ((TOKENIZER, "padding"),),
    "vocabulary": ((TOKENIZER, "model/vocab"),),
    "merges": ((TOKENIZER, "model/merges"),),
    "settings": ((TOKENIZER, "model"),),
    "special_tokens": ((TOKENIZER_CONFIG, r"(?!add_)\w+_token"),),
    "clean_up": ((TOKENIZER_CONFIG, "clean_up_tokenization_spaces"),),
    "template": ((TEMPLATE, ".*"), (TOKENIZER_CONFIG, "chat_template")),
    "rows": ((CONFIG, r"(\w+/)?vocab_size"),),
    "model_ids": ((CONFIG, r"(\w+/)?\w+_token_id"),),
    "generation_ids": ((GENERATION, r"\w+_token_id"),),
    "tokenizer.json": ((TOKENIZER, ".*"),),
    "tokenizer_config.json": ((TOKENIZER_CONFIG, ".*"),),
    "config.json": ((CONFIG, ".*"),),
    "generation_config.json": ((GENERATION, ".*"),),
}
"""Areas with the file and the path, as a regular expression, of what belongs to them: the first that fits counts."""

TABLES = frozenset({"vocabulary", "merges", "settings"})
"""Areas with changes that need the whole vocabulary to be judged."""

AREAS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "normalizer": ("normalizer",),
    "pre-tokenizer": ("pre_tokenizer",),
    "added token": ("added_tokens",),
    "vocabulary": ("vocabulary",),
    "merges": ("merges",),
    "model settings": ("settings",),
    "BOS/EOS": ("post_processor",),
    "decoder": ("decoder",),
    "decode clean-up": ("clean_up",),
    "special tokens": ("special_tokens", "model_ids", "generation_ids"),
    "padding": ("special_tokens",),
    "truncation": ("truncation", "padding"),
    "stop ids": ("model_ids", "generation_ids"),
    "embedding rows": ("rows", "vocabulary", "added_tokens"),
    "library": (),
    **dict.fromkeys(
        (
            "template",
            "generation prompt",
            "date",
            "JSON",
            "booleans",
            "content parts",
            "control text",
            "tools",
            "reasoning",
            "loss mask",
        ),
        ("template",),
    ),
}
"""The areas that a finding of a kind blames. `library` means that no file differs; `unknown` blames nothing."""


def area_of(file: str, path: Path) -> str:
    """Return the area of a path."""
    text = "/".join(map(str, path))
    for name, places in AREAS.items():
        for in_file, pattern in places:
            if in_file == file and re.match(rf"(?:{pattern})(?:/|$)", text):
                return name
    raise KeyError(f"{file}: {text}")


def areas_between(a: Model, b: Model) -> tuple[str, ...]:
    """Return the areas in which two models differ."""
    found: dict[str, None] = {}
    for file in dict.fromkeys([*a.docs, *b.docs]):
        left, right = a.docs.get(file), b.docs.get(file)
        if left == right:
            continue
        if file == TEMPLATE:
            found["template"] = None
            continue
        own, others = dict(_parts(left or {})), dict(_parts(right or {}))
        unlike = [path for path in own.keys() | others.keys() if own.get(path, ...) != others.get(path, ...)]
        found |= dict.fromkeys(sorted(area_of(file, path) for path in unlike))
    return tuple(found)


def exchange(model: Model, other: Model, areas: Collection[str]) -> Model:
    """Return the model with some areas as the other one has them."""
    docs: dict[str, Any] = {}
    for file in dict.fromkeys([*model.docs, *other.docs]):
        ours, theirs = model.docs.get(file), other.docs.get(file)
        if ours is theirs:
            docs[file] = ours
        elif file == TEMPLATE:
            docs[file] = theirs if "template" in areas else ours
        else:
            docs[file] = _exchanged(file, ours, theirs, areas)
    return Model(model.name, {file: doc for file, doc in docs.items() if doc is not None})


def _exchanged(file: str, ours: Any, theirs: Any, areas: Collection[str]) -> Any:
    own, others = dict(_parts(ours or {})), dict(_parts(theirs or {}))
    made: dict[str, Any] = {}
    for path in dict.fromkeys([*own, *others]):
        source = others if area_of(file, path) in areas else own
        if path not in source:
            continue
        within = made
        for step in path[:-1]:
            within = within.setdefault(step, {})
        within[path[-1]] = source[path]
    return made or (None if ours is None or theirs is None else {})


def _parts(doc: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The entries of a file; those of the model and of a nested configuration one by one."""
    for key, value in doc.items():
        if key in ("model", "text_config") and isinstance(value, Mapping):
            yield from (((key, name), entry) for name, entry in value.items())
        else:
            yield (key,), value
