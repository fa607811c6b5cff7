"""Read the added tokens of a tokenizer.json: their ids in `tokenizers`, and which of them are control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SPACE = "\u2581"
"""The character that stands for a space in SentencePiece vocabularies."""

_BARS = (("<|", "|>"), ("<\uff5c", "\uff5c>"))
"""Delimiters that mark a token as control. The second pair is the full-width form that DeepSeek uses."""


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
