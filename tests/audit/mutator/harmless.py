"""Folders that are written differently and provably do the same: an alarm about one is false.

Each of them changes how a file is written, or a field that neither ids, text, stops nor renderings depend on by its
definition. None is chosen because no difference was found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.audit.mutator.drawing import pair
from tests.audit.mutator.files import CONFIG, GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Model, token_text


def draw(model: Model, rng: random.Random) -> tuple[str, Model]:
    """Return the name of a rewriting and the model rewritten so."""
    while True:
        name = rng.choice(sorted(REWRITINGS))
        made = REWRITINGS[name](model, rng)
        if made is not None:
            return name, made


def _with(model: Model, file: str, doc: Any) -> Model:
    return Model(model.name, {**model.docs, file: doc}, model.styles)


def _json_file(model: Model, rng: random.Random) -> str:
    return rng.choice([file for file in model.docs if file != TEMPLATE])


def copied(model: Model, rng: random.Random) -> Model:
    return model


def indented(model: Model, rng: random.Random) -> Model:
    return Model(model.name, model.docs, {_json_file(model, rng): {"indent": rng.choice([1, 4])}})


def escaped(model: Model, rng: random.Random) -> Model:
    return Model(model.name, model.docs, {_json_file(model, rng): {"ensure_ascii": True}})


def reordered(model: Model, rng: random.Random) -> Model:
    """Keys of an object have no order: shuffle those of the model and of the file, which are few."""
    file = _json_file(model, rng)
    doc = _shuffled(model.docs[file], rng)
    if file == TOKENIZER:
        doc["model"] = _shuffled(doc["model"], rng)
    return _with(model, file, doc)


def _shuffled(doc: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    return {key: doc[key] for key in rng.sample(list(doc), len(doc))}


def unused_field(model: Model, rng: random.Random) -> Model:
    file = rng.choice([file for file in (TOKENIZER_CONFIG, CONFIG, GENERATION) if file in model.docs])
    return _with(model, file, {**model.docs[file], "_comment": "nothing reads this"})


def wrapped(model: Model, rng: random.Random) -> Model | None:
    """A normalizer, pre-tokenizer or decoder as a sequence of this one."""
    spec = model.docs[TOKENIZER]
    keys = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    slot = rng.choice([name for name in keys if spec.get(name)])
    return _with(model, TOKENIZER, {**spec, slot: {"type": "Sequence", keys[slot]: [spec[slot]]}})


def empty_sequence(model: Model, rng: random.Random) -> Model | None:
    spec = model.docs[TOKENIZER]
    if spec.get("normalizer") is not None:
        return None
    return _with(model, TOKENIZER, {**spec, "normalizer": {"type": "Sequence", "normalizers": []}})


def merges_spelled(model: Model, rng: random.Random) -> Model | None:
    """Merges as pairs or as strings, which is the same where no piece holds a space."""
    spec = model.docs[TOKENIZER]
    merges = spec["model"].get("merges")
    if not merges:
        return None
    if isinstance(merges[0], str):
        other: list[Any] = [list(pair(merge)) for merge in merges]
    elif any(" " in piece for merge in merges for piece in merge):
        return None
    else:
        other = [" ".join(merge) for merge in merges]
    return _with(model, TOKENIZER, {**spec, "model": {**spec["model"], "merges": other}})


def offsets(model: Model, rng: random.Random) -> Model | None:
    """`trim_offsets` of a byte-level post-processor: it moves offsets and nothing else."""
    spec = model.docs[TOKENIZER]
    part = spec.get("post_processor") or {}
    if part.get("type") != "ByteLevel":
        return None
    return _with(model, TOKENIZER, {**spec, "post_processor": {**part, "trim_offsets": not part["trim_offsets"]}})


def byte_decoder(model: Model, rng: random.Random) -> Model | None:
    """The fields of a byte-level decoder: they are those of the pre-tokenizer of this name, and decoding reads none."""
    spec = model.docs[TOKENIZER]
    part = spec.get("decoder") or {}
    if part.get("type") != "ByteLevel":
        return None
    key = rng.choice(["add_prefix_space", "trim_offsets", "use_regex"])
    return _with(model, TOKENIZER, {**spec, "decoder": {**part, key: not part.get(key, True)}})


def token_object(model: Model, rng: random.Random) -> Model | None:
    """A special token as an object instead of a string, with the flags that it has in tokenizer.json."""
    config, spec = model.docs[TOKENIZER_CONFIG], model.docs[TOKENIZER]
    added = {token["content"]: token for token in spec.get("added_tokens") or ()}
    named = [key for key in ("eos_token", "pad_token", "bos_token") if isinstance(config.get(key), str)]
    named = [key for key in named if token_text(config[key]) in added]
    if not named:
        return None
    key = rng.choice(named)
    flags = {name: value for name, value in added[config[key]].items() if name != "id"}
    return _with(model, TOKENIZER_CONFIG, {**config, key: {"__type": "AddedToken", **flags}})


def template_moved(model: Model, rng: random.Random) -> Model | None:
    """The template in tokenizer_config.json instead of its own file, or the reverse."""
    docs = dict(model.docs)
    config = docs[TOKENIZER_CONFIG]
    if TEMPLATE in docs:
        docs[TOKENIZER_CONFIG] = {**config, "chat_template": docs.pop(TEMPLATE)}
    elif isinstance(config.get("chat_template"), str):
        docs[TEMPLATE] = config["chat_template"]
        docs[TOKENIZER_CONFIG] = {key: value for key, value in config.items() if key != "chat_template"}
    else:
        return None
    return Model(model.name, docs)


def single_stop_id(model: Model, rng: random.Random) -> Model | None:
    """A list of one end-of-sequence id as the id, or the other way."""
    file = rng.choice([file for file in (CONFIG, GENERATION) if file in model.docs])
    value = model.docs[file].get("eos_token_id")
    if isinstance(value, list) and len(value) == 1:
        return _with(model, file, {**model.docs[file], "eos_token_id": value[0]})
    if isinstance(value, int):
        return _with(model, file, {**model.docs[file], "eos_token_id": [value]})
    return None


def template_comment(model: Model, rng: random.Random) -> Model | None:
    """A comment before the template that removes no whitespace, so the template's first text is unchanged."""
    if TEMPLATE not in model.docs:
        return None
    return _with(model, TEMPLATE, "{# says nothing #}" + model.docs[TEMPLATE])


def library_version(model: Model, rng: random.Random) -> Model | None:
    """The note which version of transformers wrote the file."""
    return _with(model, CONFIG, {**model.docs[CONFIG], "transformers_version": "5.0.0"})


REWRITINGS: Mapping[str, Callable[[Model, random.Random], Model | None]] = {
    mutation.__name__: mutation
    for mutation in (
        copied,
        indented,
        escaped,
        reordered,
        unused_field,
        wrapped,
        empty_sequence,
        merges_spelled,
        offsets,
        byte_decoder,
        token_object,
        template_moved,
        single_stop_id,
        template_comment,
        library_version,
    )
}
"""Rewritings by name; one returns None for a model to which it does not apply."""

NOT_AS_LOCKED = frozenset({"wrapped", "empty_sequence", "offsets", "byte_decoder", "template_comment"})
"""Those that change a part of the lock, which `check` may report."""
