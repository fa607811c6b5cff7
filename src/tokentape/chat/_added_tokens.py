"""Added tokens of a tokenizer.json: the ids that the library gives them, and which of them are control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SPACE = "\u2581"
"""What SentencePiece vocabularies write a space with."""

_BARS = (("<|", "|>"), ("<\uff5c", "\uff5c>"))
"""Spellings that are kept for control tokens, with the full-width form that DeepSeek uses."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of `added_tokens`."""

    id: int
    """The id that `tokenizers` gives it, which may differ from the declared one."""
    declared_id: int
    content: str
    special: bool
    normalized: bool
    single_word: bool
    strips: bool
    """It takes white space next to it, or matches only beside certain characters."""

    @property
    def is_space(self) -> bool:
        """Whether it is nothing but white space."""
        return not self.content.replace(_SPACE, " ").strip()

    @property
    def is_words(self) -> bool:
        """Whether it is made of letters, digits and white space only, as ordinary text is."""
        return all(char.isalnum() or char.isspace() or char == _SPACE for char in self.content)


def read_added_tokens(spec: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Return the added tokens of a tokenizer.json with the ids that `tokenizers` 0.21 to 0.23 gives them.

    The library ignores a declared id: a token that is in the model's vocabulary keeps its id there, and any other one
    takes the next free id. A token listed twice counts once.
    """
    vocab = spec["model"]["vocab"]
    ids = vocab if isinstance(vocab, Mapping) else {entry[0]: n for n, entry in enumerate(vocab)}
    found: dict[str, AddedToken] = {}
    next_id = len(vocab)
    for token in spec.get("added_tokens", []):
        content = token["content"]
        if not content or content in found:
            continue
        token_id = ids.get(content, next_id)
        next_id = max(next_id, token_id + 1)
        strips = any(token.get(flag, False) for flag in ("lstrip", "rstrip", "single_word"))
        found[content] = AddedToken(
            token_id,
            token["id"],
            content,
            token.get("special", False),
            token.get("normalized", not token.get("special", False)),
            token.get("single_word", False),
            strips,
        )
    return tuple(found.values())


def is_control(token: AddedToken, named: str, named_ids: frozenset[int]) -> bool:
    """Return whether text must never become this token.

    `named` holds the texts that name control tokens: chat templates and the strings of configurations.
    """
    if token.special:
        return True
    if token.is_words:
        return False
    bars = any(token.content.startswith(opening) or token.content.endswith(end) for opening, end in _BARS)
    return bars or token.id in named_ids or token.content in named


def config_values(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a configuration at any depth, each with its key.

    The list of all added tokens that some configurations repeat is left out.
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
    """Return an expression for any of these tokens, the longest first, as `tokenizers` finds them."""
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    found = (
        rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
        for token in longest_first
    )
    return re.compile("|".join(found) or "(?!)")
