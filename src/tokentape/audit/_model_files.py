"""Read the configuration files of a model folder: token ids, embedding rows, and settings that transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tokentape.chat._template import listed_templates, read_source
from tokentape.chat._tokenizer_files import named_special_tokens, read_json

CONFIG = "tokenizer_config.json"
_LEGACY = ("special_tokens_map.json", "added_tokens.json")
_FILES = (CONFIG, *_LEGACY)
MODEL_CONFIG = "config.json"
_CLASS = ("model_type", "tokenizer_class")
"""Keys of config.json by which AutoTokenizer chooses a class; some classes replace parts of tokenizer.json."""
_ELSEWHERE = ("chat_template", "model_max_length", "name_or_path", "is_local", "local_files_only")
"""Keys that are compared elsewhere, or that only name a location."""
_OFF_BY_DEFAULT = ("split_special_tokens", "clean_up_tokenization_spaces")
_SHOWN = 5
TEMPLATES = "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"
"""A template file that processors of images and audio read, but tokenizers do not."""
PROCESSOR_FILES = (PROCESSOR_TEMPLATE, "processor_config.json", "preprocessor_config.json")

SHADOWED_TEMPLATE = f"chat_template in {CONFIG}"
"""A template that is not used, because the folder has a chat_template.jinja. Older libraries read it."""
OTHER_FILES = (
    "tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "merges.txt", "vocab.txt",
    SHADOWED_TEMPLATE,
)  # fmt: skip
"""Files that hold a tokenizer or template beside tokenizer.json and chat_template.jinja."""

CONFIG_FILES = (MODEL_CONFIG, "generation_config.json")
ROWS = f"{MODEL_CONFIG} vocab_size"
"""The key of `model_configuration` for the number of embedding rows."""
MAX_LENGTH = f"{CONFIG} model_max_length"
_NO_LIMIT = 10**20
"""transformers treats a larger `model_max_length` as no limit, and writes no limit as 10^30."""
SAMPLED = (
    "stop_strings", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_decoder_ids",
)  # fmt: skip
"""Keys of generation_config.json that change where turns end, or which ids are sampled."""

_TOKEN_ID = re.compile("_token_(id|ids|index)$")

Settings: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Values by file and key."""


def changed_entries(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (value in `ours`, value in `theirs`) of each key that differs, sorted by key; None for a missing value."""
    pairs = {key: (ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs})}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def model_configuration(folder: Path) -> dict[str, Any] | None:
    """Return ids, stop strings and rows in `CONFIG_FILES`, by file and key; None without files.

    A nested key has its path, such as `vision_config.image_token_id`, but `text_config` only if it contradicts the top
    level: some versions of transformers write its keys there, and some at the top.
    """
    present = [name for name in CONFIG_FILES if (folder / name).is_file()]
    configuration: dict[str, Any] = {}
    for name in present:
        for path, key, value in sorted(_keys(read_json(folder / name)), key=lambda entry: entry[0]):
            top, text = f"{name} {key}", path in ("", "text_config.")
            if _TOKEN_ID.search(key) or (key in SAMPLED and name != MODEL_CONFIG and text):
                ids = _ids(value)
                configuration[top if text and configuration.get(top, ids) == ids else f"{name} {path}{key}"] = ids
            elif top == ROWS and text:
                configuration.setdefault(ROWS, value)
    return configuration if present else None


def _keys(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, key, value) of each key that is set, at any depth."""
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{key}.")
        elif value is not None:
            yield path, key, value


def max_length(folder: Path) -> int | float | None:
    """Return the number of ids to which transformers truncates on request; None if there is no limit."""
    length = read_json(folder / CONFIG).get("model_max_length")
    return length if isinstance(length, int | float) and length <= _NO_LIMIT else None


def _ids(value: Any) -> list[Any]:
    listed = value if isinstance(value, list) else [value]
    return [json.loads(text) for text in sorted(set(map(json.dumps, listed)), key=lambda text: (len(text), text))]


def loading_settings(folder: Path, spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings, by file, that may change how transformers loads `spec`, without those that repeat `spec`."""
    config = read_json(folder / CONFIG)
    by_file = {CONFIG: config}
    if "added_tokens_decoder" not in config:
        by_file |= {name: read_json(folder / name) for name in _LEGACY}
    by_file[MODEL_CONFIG] = {key: value for key, value in read_json(folder / MODEL_CONFIG).items() if key in _CLASS}
    added = {token["content"]: token for token in spec.get("added_tokens") or ()}
    named = named_special_tokens(config)
    loading: dict[str, dict[str, Any]] = {}
    for file, settings in by_file.items():
        own = {key: value for key, value in settings.items() if key not in _ELSEWHERE}
        values = {key: _unrepeated(file, key, value, added, named) for key, value in own.items()}
        # A special token that is null is none; if its key is missing, some classes set one of their own.
        null_tokens = {key for key, value in own.items() if value is None and key.endswith("_token")}
        kept = {key: value for key, value in values.items() if value is not None or key in null_tokens}
        if kept:
            loading[file] = kept
    return loading


def _unrepeated(
    file: str, key: str, value: Any, added: Mapping[str, Mapping[str, Any]], special_tokens: Mapping[str, str]
) -> Any:
    """Return the part of a setting that does not repeat tokenizer.json; None if nothing is left."""
    if file == "added_tokens.json":
        return None if added.get(key, {}).get("id") == value else value
    text = named_special_tokens({key: value}).get(key)
    if text is not None and text in added and special_tokens.get(key) == text:
        return None
    if key == "added_tokens_decoder" and isinstance(value, Mapping):
        return {number: token for number, token in value.items() if not _repeats(number, token, added)} or None
    if key in ("additional_special_tokens", "extra_special_tokens") and isinstance(value, list | tuple):
        texts = [entry.get("content") if isinstance(entry, Mapping) else entry for entry in value]
        new = [not added.get(str(text), {}).get("special") for text in texts]
        return [entry for entry, is_new in zip(value, new, strict=True) if is_new] or None
    return None if (key in _OFF_BY_DEFAULT and not value) or value == {} else value


def _repeats(number: str, token: Any, added: Mapping[str, Mapping[str, Any]]) -> bool:
    own = added.get(str(token.get("content"))) if isinstance(token, Mapping) else None
    return own is not None and str(own["id"]) == number and {**token, "id": own["id"]} == own


def named_templates(folder: Path) -> dict[str, str]:
    """Return the named chat templates of a folder, without `default` and `tool_use`."""
    files = sorted((folder / TEMPLATES).glob("*.jinja"))
    templates = {file.stem: read_source(file) for file in files}
    listed = read_json(folder / CONFIG).get("chat_template")
    if isinstance(listed, list) and not templates and not (folder / "chat_template.jinja").is_file():
        templates = listed_templates(listed)
    return {name: source for name, source in templates.items() if name not in ("default", "tool_use")}


def require_known_files(settings: Settings) -> None:
    """Raise `ValueError` if settings belong to an unknown file, or if a template's name is a path."""
    expected = (*_FILES, MODEL_CONFIG, TEMPLATES)
    if unknown := [file for file in settings if file not in expected]:
        raise ValueError(f"unknown settings files: {', '.join(unknown)}; expected only {', '.join(expected)}")
    if paths := [name for name in settings.get(TEMPLATES, ()) if "/" in name or "\\" in name]:
        raise ValueError(f"invalid template names: {', '.join(paths)}; expected names without / and \\")


def comparable_settings(ours: Settings, theirs: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both sides' settings, without those of config.json if a side has none, such as a tokenizer's folder."""
    lacking = any(MODEL_CONFIG not in side for side in (ours, theirs))
    a, b = ({k: v for k, v in side.items() if not (lacking and k == MODEL_CONFIG)} for side in (ours, theirs))
    return a, b


def settings_apart(ours: Settings, theirs: Settings, words: str = "{} is {} in A and {} in B") -> str:
    """Describe the settings that differ. `words` formats a name and its values in `ours` and `theirs`."""
    # As text, because null differs from a missing key.
    flat = (
        {
            f"{file} {key}": json.dumps(value, ensure_ascii=False, sort_keys=True)
            for file, keys in side.items()
            for key, value in keys.items()
        }
        for side in (ours, theirs)
    )
    differences = [
        words.format(name, *(_brief(name, value) for value in pair)) for name, pair in changed_entries(*flat).items()
    ]
    more = len(differences) - _SHOWN
    return "; ".join([*differences[:_SHOWN], *([f"{more} more differ"] if more > 0 else [])])


def _brief(name: str, text: str | None) -> str:
    if text is None:
        return "not set or false" if name.endswith(_OFF_BY_DEFAULT) else "not set"
    return text if len(text) <= 100 else f"{text[:97]}..."


def write_settings(settings: Settings, special_tokens: Mapping[str, str], folder: Path, like: Path) -> None:
    """Write files to `folder` from which `AutoTokenizer` loads what it would load from `like` with these settings."""
    config = {CONFIG: {**special_tokens, **settings.get(CONFIG, {})}}
    for file, keys in {**settings, **config}.items():
        if file in _FILES:  # an untrusted lock may name any path, so write only known files
            (folder / file).write_text(json.dumps(keys), encoding="utf-8")
    chosen = {key: value for key, value in settings.get(MODEL_CONFIG, {}).items() if key in _CLASS}
    if chosen:
        rest = {key: value for key, value in read_json(like / MODEL_CONFIG).items() if key not in _CLASS}
        (folder / MODEL_CONFIG).write_text(json.dumps({**rest, **chosen}), encoding="utf-8")
    for name in ("tokenizer.json", MODEL_CONFIG):
        if (like / name).is_file() and not (folder / name).exists():
            (folder / name).symlink_to((like / name).resolve())
