"""Read the files beside tokenizer.json from which transformers makes a tokenizer, and templates by other names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tokentape.chat._template import read_source
from tokentape.chat._tokenizer_files import named_special_tokens, read_json

CONFIG = "tokenizer_config.json"
_LEGACY = ("special_tokens_map.json", "added_tokens.json")
_FILES = (CONFIG, *_LEGACY)
_ELSEWHERE = ("chat_template", "model_max_length", "name_or_path", "is_local", "local_files_only")
"""Keys that are compared elsewhere, or only say where and how long."""
_OFF_BY_DEFAULT = ("split_special_tokens", "clean_up_tokenization_spaces")
_SHOWN = 5
SAME_SETTINGS = "Use the tokenizer files that the weights were trained with on both sides, not tokenizer.json alone."
TEMPLATES = "additional_chat_templates"

Settings: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Values by file and key."""


def loading_settings(folder: Path, spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a folder that may make another tokenizer of its tokenizer.json, the dictionary `spec`.

    Left out is what repeats tokenizer.json, since transformers then adds nothing, and files that it does not read.
    Raises `TokenizerUnusable` if a file is not a JSON object.
    """
    config = read_json(folder / CONFIG)
    read = {CONFIG: config}
    if "added_tokens_decoder" not in config:
        read |= {name: read_json(folder / name) for name in _LEGACY}
    added = {token["content"]: token for token in spec.get("added_tokens") or ()}
    named = named_special_tokens(config)
    found: dict[str, dict[str, Any]] = {}
    for file, settings in read.items():
        kept = {key: _kept(file, key, value, added, named) for key, value in settings.items() if key not in _ELSEWHERE}
        if kept := {key: value for key, value in kept.items() if value is not None}:
            found[file] = kept
    return found


def _kept(file: str, key: str, value: Any, added: Mapping[str, Mapping[str, Any]], named: Mapping[str, str]) -> Any:
    """Return a setting without what repeats tokenizer.json; None if nothing is left."""
    if file == "added_tokens.json":
        return None if added.get(key, {}).get("id") == value else value
    text = named_special_tokens({key: value}).get(key)
    if text is not None and text in added and named.get(key) == text:
        return None
    if key == "added_tokens_decoder" and isinstance(value, Mapping):
        return {number: one for number, one in value.items() if not _repeats(number, one, added)} or None
    if key in ("additional_special_tokens", "extra_special_tokens") and isinstance(value, list | tuple):
        texts = [one.get("content") if isinstance(one, Mapping) else one for one in value]
        new = [not added.get(str(text), {}).get("special") for text in texts]
        return [one for one, is_new in zip(value, new, strict=True) if is_new] or None
    return None if (key in _OFF_BY_DEFAULT and not value) or value == {} else value


def _repeats(number: str, token: Any, added: Mapping[str, Mapping[str, Any]]) -> bool:
    own = added.get(str(token.get("content"))) if isinstance(token, Mapping) else None
    return own is not None and {**token, "id": int(number)} == own


def named_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by names other than `default` and `tool_use`.

    Raises `TokenizerUnusable` if one is not text.
    """
    files = sorted((folder / TEMPLATES).glob("*.jinja"))
    found = {file.stem: read_source(file) for file in files}
    listed = read_json(folder / CONFIG).get("chat_template")
    if isinstance(listed, list) and not found and not (folder / "chat_template.jinja").is_file():
        found = {entry["name"]: entry["template"] for entry in listed}
    return {name: source for name, source in found.items() if name not in ("default", "tool_use")}


def require_known_files(settings: Settings) -> None:
    """Raise `ValueError` if settings are of other files than those that are read, or a template's name is a path."""
    expected = (*_FILES, TEMPLATES)
    if unknown := [file for file in settings if file not in expected]:
        raise ValueError(f"it has settings of {', '.join(unknown)}, expected only {', '.join(expected)}")
    if paths := [name for name in settings.get(TEMPLATES, ()) if "/" in name or "\\" in name]:
        raise ValueError(f"it names templates {', '.join(paths)}, expected names without / and \\")


def settings_apart(ours: Settings, theirs: Settings, words: str = "{} is {} in A and {} in B") -> str:
    """Return in words the settings in which two folders differ."""
    one, other = (
        {f"{file} {key}": v for file, keys in each.items() for key, v in keys.items()} for each in (ours, theirs)
    )
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    said = [words.format(name, _brief(one.get(name)), _brief(other.get(name))) for name in names[:_SHOWN]]
    return "; ".join([*said, *([f"{len(names) - _SHOWN} more differ"] if len(names) > _SHOWN else [])])


def _brief(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def write_settings(settings: Settings, special_tokens: Mapping[str, str], folder: Path, like: Path) -> None:
    """Write `settings` and `special_tokens` into `folder`, and link the tokenizer.json and config.json of `like` there.

    Then `AutoTokenizer` loads `folder` as it would load `like` with these settings.
    """
    named = {CONFIG: {**special_tokens, **settings.get(CONFIG, {})}}
    for file, keys in {**settings, **named}.items():
        if file in _FILES:  # a lock may come from others: never write to another path that it names
            (folder / file).write_text(json.dumps(keys), encoding="utf-8")
    for name in ("tokenizer.json", "config.json"):
        if (like / name).is_file():
            (folder / name).symlink_to((like / name).resolve())
