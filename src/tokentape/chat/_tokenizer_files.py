"""Read a tokenizer's files: load and change tokenizer.json, and tell which added tokens are control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from tokentape.errors import TokenizerUnusable

_SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "image_token",
    "audio_token",
    "video_token",
)

NAMING_CONFIGS = ("config.json", "processor_config.json", "preprocessor_config.json", "special_tokens_map.json")
"""Files that name image, audio and other control tokens."""

_SPACE = "\u2581"
"""The character that stands for a space in SentencePiece vocabularies."""

_BARS = (("<|", "|>"), ("<\uff5c", "\uff5c>"))
"""Delimiters that mark a token as control. The second pair is the full-width form that DeepSeek uses."""

_HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


def from_text(source: str) -> tokenizers.Tokenizer:
    """Load the text of a tokenizer.json with `tokenizers`. Raises `TokenizerUnusable` if the library rejects it."""
    refuse_short_merges(source)
    try:
        return tokenizers.Tokenizer.from_str(source)
    except BaseException as error:
        if not is_refusal(error):
            raise
        raise TokenizerUnusable(f"tokenizers {tokenizers.__version__} can't load tokenizer.json: {error}") from error


def is_refusal(error: BaseException) -> bool:
    """Return whether `tokenizers` raises this for bad files or input. Panics in Rust are not an `Exception`."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def refuse_short_merges(source: str) -> None:
    """Raise `TokenizerUnusable` if `continuing_subword_prefix` does not fit the merges in a tokenizer.json.

    `tokenizers` removes the prefix's number of bytes from the second token string of each merge. If the string is
    shorter, it panics. If a character is cut, the whole process may abort, which can't be caught.
    """
    if not _HAS_PREFIX.search(source):
        return
    try:
        model = json.loads(source)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges") or ()
        seconds = [(merge.split(" ") if isinstance(merge, str) else merge)[1] for merge in merges]
        size = len(prefix.encode())
        pieces = {piece: piece.encode() for piece in seconds}
    except (ValueError, LookupError, TypeError, AttributeError):
        return  # `tokenizers` reports what is wrong with such a file
    for piece, raw in pieces.items():
        cut = raw[size : size + 1]
        if len(raw) < size or (cut and cut[0] & 0xC0 == 0x80):
            raise TokenizerUnusable(
                f"continuing_subword_prefix is {prefix!r} in tokenizer.json, but {piece!r}, the second part of a"
                " merge, does not begin with it: `tokenizers` can't load that. Set continuing_subword_prefix to its"
                " value when the merges were trained (null for most models), or copy the original tokenizer.json."
            )


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens named in a tokenizer_config.json, as {key: token}."""
    return {key: text for key in _SPECIAL_TOKEN_KEYS if (text := _token_text(config.get(key))) is not None}


def with_configured_tokens(spec: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parsed tokenizer.json with the added tokens that transformers makes of it and a tokenizer_config.json.

    `added_tokens_decoder` replaces the flags of added tokens and adds others. A special token that is only an entry of
    the vocabulary becomes an added token too. If nothing changes, `spec` itself is returned. Raises `TokenizerUnusable`
    if `added_tokens_decoder` is not of the form that transformers writes.
    """
    own: dict[str, Mapping[str, Any]] = {}
    for token in spec.get("added_tokens", []):
        own.setdefault(token["content"], token)
    tokens, vocab = dict(own), spec["model"]["vocab"]
    try:
        listed = sorted((int(key), token) for key, token in (config.get("added_tokens_decoder") or {}).items())
        tokens |= {
            token["content"]: _described(token, own.get(token["content"], {"id": number})["id"])
            for number, token in listed
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise TokenizerUnusable(
            f"added_tokens_decoder in tokenizer_config.json can't be read ({found}); expected ids as keys, and objects "
            "with `content` and flags: copy the file again"
        ) from None
    ids = vocab if isinstance(vocab, Mapping) else {entry[0]: n for n, entry in enumerate(vocab)}
    more = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    lists = [[*value.values()] if isinstance(value, Mapping) else value for value in more]
    named = [value for key, value in config.items() if key.endswith("_token")]
    for value in chain(named, *(one for one in lists if isinstance(one, list))):
        content = _token_text(value)
        if content is not None and content in ids and content not in tokens:
            flags = value if isinstance(value, Mapping) else {"content": content}
            tokens[content] = _described({**flags, "special": True}, ids[content])
    return spec if tokens == own else {**spec, "added_tokens": list(tokens.values())}


def _described(token: Mapping[str, Any], token_id: int) -> Mapping[str, Any]:
    """Return an entry of `added_tokens`, with the defaults that transformers has for missing flags."""
    flags = {flag: token.get(flag, False) for flag in ("single_word", "lstrip", "rstrip", "special")}
    normalized = token.get("normalized", not flags["special"])
    return {"id": token_id, "content": token["content"], **flags, "normalized": normalized}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing. Raises `TokenizerUnusable` if it has no object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerUnusable(f"{path} contains a {type(content).__name__}, expected an object")
    return content


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of `added_tokens` in a tokenizer.json."""

    id: int
    """The id in `tokenizers`, which may differ from `declared_id`."""
    declared_id: int
    content: str
    special: bool
    normalized: bool
    single_word: bool
    strips: bool
    """Whether `lstrip`, `rstrip` or `single_word` is set: the match then depends on the characters around the token."""
    mark: str = ""
    """The characters that stand for a control token in marked text; empty for text."""

    @property
    def is_space(self) -> bool:
        """Whether the token is only white space."""
        return not self.content.replace(_SPACE, " ").strip()

    @property
    def is_words(self) -> bool:
        """Whether the token consists of letters, digits and white space only, like ordinary text."""
        return all(char.isalnum() or char.isspace() or char == _SPACE for char in self.content)


def read_added_tokens(spec: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Return the added tokens of a parsed tokenizer.json, with their ids in `tokenizers` 0.21 to 0.23.

    The library ignores declared ids: a token in the model's vocabulary keeps its id there, and any other token gets the
    next free id. If a token is listed twice, the first entry is used.
    """
    vocab = spec["model"]["vocab"]
    ids = vocab if isinstance(vocab, Mapping) else {entry[0]: n for n, entry in enumerate(vocab)}
    tokens: dict[str, AddedToken] = {}
    next_id = len(vocab)
    for token in spec.get("added_tokens", []):
        content = token["content"]
        if not content or content in tokens:
            continue
        token_id = ids.get(content, next_id)
        next_id = max(next_id, token_id + 1)
        strips = any(token.get(flag, False) for flag in ("lstrip", "rstrip", "single_word"))
        tokens[content] = AddedToken(
            token_id,
            token["id"],
            content,
            token.get("special", False),
            token.get("normalized", not token.get("special", False)),
            token.get("single_word", False),
            strips,
        )
    return tuple(tokens.values())


def is_control(token: AddedToken, named: str, named_ids: frozenset[int]) -> bool:
    """Return whether the token is a control token. Text from callers must never be encoded as one.

    `named` contains the chat templates and the strings in the configurations, `named_ids` the ids that the
    configurations name. A token that occurs in either is a control token.
    """
    if token.special:
        return True
    if token.is_words:
        return False
    bars = any(token.content.startswith(opening) or token.content.endswith(end) for opening, end in _BARS)
    return bars or token.id in named_ids or token.content in named


def config_values(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each scalar in a configuration, at any depth.

    `added_tokens_decoder` is skipped because some configurations repeat all added tokens there.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name != "added_tokens_decoder":
                yield from config_values(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from config_values(value, key)
    else:
        yield key, config


def any_of(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Return a regular expression that matches any of these tokens and, like `tokenizers`, prefers the longest."""
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    patterns = (
        rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
        for token in longest_first
    )
    return re.compile("|".join(patterns) or "(?!)")


def renamed_controls(spec: Mapping[str, Any], name: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a tokenizer.json in which control tokens have different names and the same ids.

    `name` maps spellings to names. Each name replaces its token in the vocabulary or in the added tokens, so that ids
    that the library assigns by position stay the same.
    """
    model = dict(spec["model"])
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = {name.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
        if "merges" in model:
            pairs = map(_pair, model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if a not in name and b not in name and a + b not in name]
    else:
        model["vocab"] = [[name.get(entry[0], entry[0]), *entry[1:]] for entry in model["vocab"]]
    if model.get("unk_token") in name:
        model["unk_token"] = name[model["unk_token"]]
    added = [
        {**token, "content": name[token["content"]], "normalized": False, "single_word": False}
        if token["content"] in name
        else token
        for token in spec.get("added_tokens", [])
    ]
    unused = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**spec, "model": model, "added_tokens": added, **unused}


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
