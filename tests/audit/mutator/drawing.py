"""Changes drawn at random over every path of a model's files, small settings as often as large tables.

A file is drawn first, then a part of it (`undo.AREAS`), then a path with list positions and table keys left out, and
only then a place. So a vocabulary of 150,000 entries is drawn as often as a normalizer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tests.audit.mutator.changes import Change, Path, apply, value_at
from tests.audit.mutator.edits import SLOTS, STEPS, Known, other_values, strings, template_splice
from tests.audit.mutator.files import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Model, added_ids, load, top_id
from tests.audit.mutator.undo import area_of, areas_between

VOCAB: Path = ("model", "vocab")
MERGES: Path = ("model", "merges")
WEIGHTS: Mapping[str, float] = {
    "merges": 3,
    "vocabulary": 2,
    "settings": 3,
    "normalizer": 2,
    "pre_tokenizer": 3,
    "post_processor": 1,
    "decoder": 1.5,
    "added_tokens": 3,
    "truncation": 0.7,
    "padding": 0.5,
    "special_tokens": 2,
    "clean_up": 0.5,
    "template": 4,
    "rows": 1.5,
    "model_ids": 1.5,
    "generation_ids": 1.5,
}
"""How often each area is drawn; areas that are not here are drawn with weight 0.5."""

_WIDE = 64


def draw(name: str, seed: int, changes: int = 1) -> tuple[Model, tuple[Change, ...]]:
    """Return a model with changes drawn under a seed, and the changes. Each of them changes a file."""
    rng = random.Random(f"{name}:{seed}")
    model = load(name)
    made: list[Change] = []
    while len(made) < changes or not areas_between(load(name), model):
        drawn = _draw(model, rng)
        if drawn is None:
            continue
        try:
            changed = apply(model, drawn)
        except (KeyError, IndexError):
            continue  # an earlier change took away what this one is about
        if all(changed.docs.get(change.file) == model.docs.get(change.file) for change in drawn):
            continue
        made += drawn
        model = changed
    return model, tuple(made)


def places(model: Model) -> dict[str, dict[Path, list[tuple[str, Path]]]]:
    """Return the places of all files by area, then by path with positions left out. Tables are one place each."""
    found: dict[str, dict[Path, list[tuple[str, Path]]]] = defaultdict(lambda: defaultdict(list))
    for file, doc in model.docs.items():
        for path, general in _walk(doc, (), (), file == TOKENIZER):
            found[area_of(file, path)][(file, *general)].append((file, path))
    return found


def _walk(doc: Any, path: Path, general: Path, tables: bool) -> Iterator[tuple[Path, Path]]:
    yield path, general
    if tables and path in (VOCAB, MERGES):
        return
    if isinstance(doc, Mapping):
        for key, value in doc.items():
            named = "*" if len(doc) > _WIDE or key.isdigit() else key
            yield from _walk(value, (*path, key), (*general, named), tables)
    elif isinstance(doc, list):
        for at, value in enumerate(doc):
            yield from _walk(value, (*path, at), (*general, "*"), tables)


@lru_cache(maxsize=2)
def _places_of(name: str) -> dict[str, dict[Path, list[tuple[str, Path]]]]:
    return places(load(name))


def _draw(model: Model, rng: random.Random) -> tuple[Change, ...] | None:
    found = _places_of(model.name)
    areas = sorted(found)
    area = rng.choices(areas, [WEIGHTS.get(name, 0.5) for name in areas])[0]
    if area == "template" and rng.random() < 0.2:
        return _variant(model, rng)
    file, path = rng.choice(found[area][rng.choice(sorted(found[area], key=str))])
    if file not in model.docs:
        return None
    doc = model.docs[file]
    try:
        value = value_at(doc, path)
    except (KeyError, IndexError, TypeError):
        return None
    if file == TOKENIZER and path == MERGES:
        return _merges(model, value, rng)
    if file == TOKENIZER and path == VOCAB:
        return _vocabulary(model, value, rng)
    if isinstance(value, str) and ("{%" in value or "{{" in value):
        splice = template_splice(value, rng)
        return splice and (Change(file, "splice", path, splice),)
    if not path:
        return (Change(file, "remove"),) if file not in (TOKENIZER, TOKENIZER_CONFIG) else _inserted(file, rng)
    options = list(_options(file, path, value, doc, model, rng))
    return (rng.choice(options),) if options else None


def _options(file: str, path: Path, value: Any, doc: Any, model: Model, rng: random.Random) -> Iterator[Change]:
    key = str(next(step for step in reversed(path) if isinstance(step, str)))
    known = _known(model.name)
    slot = STEPS.get(key, key) if isinstance(value, Mapping) else key
    others = other_values(slot, value, rng, known)
    if others:
        yield Change(file, "set", path, rng.choice(others))
        yield Change(file, "set", path, rng.choice(others))
    yield Change(file, "remove", path)
    if isinstance(value, list):
        yield from _list_changes(file, path, key, value, rng)
    if isinstance(value, Mapping) and file == TOKENIZER and path[0] == "added_tokens":
        flag = rng.choice(("lstrip", "rstrip", "normalized", "single_word", "special"))
        yield Change(file, "set", (*path, flag), not value.get(flag, False))


def _list_changes(file: str, path: Path, key: str, value: list[Any], rng: random.Random) -> Iterator[Change]:
    if value:
        at = rng.randrange(len(value))
        yield Change(file, "remove", (*path, at))
        yield Change(file, "insert", (*path, at), value[at])
    if len(value) > 1:
        yield Change(file, "swap", path, rng.sample(range(len(value)), 2))
    if key in STEPS:
        yield Change(file, "insert", (*path, rng.randrange(len(value) + 1)), rng.choice(SLOTS[STEPS[key]]))


def _inserted(file: str, rng: random.Random) -> tuple[Change, ...]:
    """A key that the file may have and does not."""
    within: Path = ("model",) if file == TOKENIZER else ()
    key, value = rng.choice(
        (("ignore_merges", True), ("byte_fallback", True), ("fuse_unk", True), ("dropout", 0.1))
        if file == TOKENIZER
        else (
            ("add_bos_token", True),
            ("add_prefix_space", True),
            ("clean_up_tokenization_spaces", True),
            ("split_special_tokens", True),
            ("extra_special_tokens", ["the"]),
        )
    )
    return (Change(file, "set", (*within, key), value),)


def _merges(model: Model, merges: list[Any], rng: random.Random) -> tuple[Change, ...] | None:
    if not merges:
        return None
    at = rng.randrange(len(merges))
    match rng.randrange(6):
        case 0 | 1:
            return (Change(TOKENIZER, "remove", (*MERGES, at)),)
        case 2:
            return (Change(TOKENIZER, "swap", MERGES, rng.sample(range(len(merges)), 2)),)
        case 3:
            competing = _competing(merges, at)
            return (Change(TOKENIZER, "swap", MERGES, [at, rng.choice(competing)]),) if competing else None
        case 4:
            return Change(TOKENIZER, "remove", (*MERGES, at)), Change(TOKENIZER, "insert", (*MERGES, 0), merges[at])
        case _:
            last = len(merges) - 1
            return Change(TOKENIZER, "remove", (*MERGES, at)), Change(TOKENIZER, "insert", (*MERGES, last), merges[at])


def _competing(merges: list[Any], at: int) -> list[int]:
    """Merges that may want a piece that this one wants: a text with both gets other ids when they change places."""
    left, right = pair(merges[at])
    return [n for n, merge in enumerate(merges) if n != at and (pair(merge)[0] == right or pair(merge)[1] == left)]


def pair(merge: Any) -> tuple[str, str]:
    """Return the two pieces of a merge, written as a pair or as one string."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _vocabulary(model: Model, vocab: Any, rng: random.Random) -> tuple[Change, ...] | None:
    if isinstance(vocab, list):
        at = rng.randrange(len(vocab))
        piece, score = vocab[at]
        return rng.choice(
            [
                (Change(TOKENIZER, "swap", VOCAB, rng.sample(range(len(vocab)), 2)),),
                (Change(TOKENIZER, "set", (*VOCAB, at), [piece, score - 3.0]),),
                (Change(TOKENIZER, "remove", (*VOCAB, at)),),
                (Change(TOKENIZER, "set", (*VOCAB, at), [rng.choice(strings(piece, rng)), score]),),
            ]
        )
    tokens = list(vocab)
    left, right = rng.sample(tokens, 2)
    match rng.randrange(4):
        case 0 | 1:
            return (Change(TOKENIZER, "swap", VOCAB, [left, right]),)
        case 2:
            new = rng.choice(strings(left, rng))
            return None if new in vocab else (Change(TOKENIZER, "rename", (*VOCAB, left), new),)
        case _:
            return (Change(TOKENIZER, "remove", (*VOCAB, left)),)


def _variant(model: Model, rng: random.Random) -> tuple[Change, ...] | None:
    """The template as a list of variants in tokenizer_config.json, that for tools or the default edited."""
    source = model.docs.get(TEMPLATE) or model.docs[TOKENIZER_CONFIG].get("chat_template")
    splice = template_splice(source, rng) if isinstance(source, str) else None
    if not splice:
        return None
    at, old, new = splice
    edited = source[:at] + new + source[at + len(old) :]
    default, tools = (source, edited) if rng.random() < 0.8 else (edited, source)
    variants = [{"name": "default", "template": default}, {"name": "tool_use", "template": tools}]
    put = Change(TOKENIZER_CONFIG, "set", ("chat_template",), variants)
    return (Change(TEMPLATE, "remove"), put) if TEMPLATE in model.docs else (put,)


@lru_cache(maxsize=2)
def _known(name: str) -> Known:
    docs = load(name).docs
    added = added_ids(docs[TOKENIZER])
    return Known(tuple(added), tuple(added.values()), top_id(docs))
