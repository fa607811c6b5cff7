"""Escape callers' text before a template renders it, and find it in the rendering.

A template mixes its own control tokens with strings from users, tools and systems. Before rendering, the first
character of every control token that a caller's string spells is replaced by a placeholder, a lone surrogate. A string
that becomes a control token in brackets (`'<' ~ key ~ '>'`) also gets a placeholder. Every control token spelled in
the rendering was therefore written by the template. The placeholders are then turned back into their characters. A
second rendering has edge markers, different surrogates, before and after each string. It shows who wrote each
character; ids never depend on it. If a suffix equals an earlier one, character for character, with only callers' texts
replaced, its provenance follows from the cached literals, without a second rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tokentape.chat._limits import Escapes
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import Codes, Message, Provenance

_PLACEHOLDERS = range(0xDB80, 0xDBA0)
_EDGES = range(0xDBA0, 0xDBBF)
_NOTHING = "\udbbf"
"""A placeholder that does not stand for any character."""
SENTINELS = tuple(map(chr, range(0xDBC0, 0xDC00)))
"""Characters for strings that are rendered to find out what a template writes around them."""

_WRITTEN = re.compile(
    r'\\udb(?:(?:[89][0-9a-f]|bf)(?!\\ud[c-f])|(?<="\\udb)[c-f][0-9a-f]\\udb[c-f][0-9a-f](?="))'  # all begin alike
)
"""A placeholder as Python writes it in a list or a mapping, and as ASCII JSON, or two sentinels as text in ASCII JSON.

A low surrogate after a placeholder would show that it is part of a caller's character.
"""

_SURROGATE = re.compile("[\ud800-\udfff]")

_SHORT = 64
"""The maximum length of texts that are cached in escaped form: roles, keys and names recur in each message."""

_BRACKETS = "<>[]{}()|｜/"

_SCHEMA_WORDS = frozenset(
    (
        *("type", "properties", "required", "description", "enum", "items", "title", "default", "format", "const"),
        *("anyOf", "oneOf", "allOf", "nullable", "minimum", "maximum", "pattern", "name", "additionalProperties"),
    )
)
"""JSON Schema keys that templates look for."""

_PROVENANCE_OF_ROLE = {
    "system": Provenance.SYSTEM,
    "developer": Provenance.SYSTEM,
    "user": Provenance.USER,
    "tool": Provenance.TOOL,
    "function": Provenance.TOOL,
    "assistant": Provenance.ASSISTANT,
}


class Escaper:
    """Escapes one tokenizer's control tokens in callers' strings, and unescapes renderings."""

    def __init__(self, tokenizer: Tokenizer, *, compared: Sequence[str] = ()) -> None:
        """Create an escaper. Strings in `compared` get no placeholder, because the template compares them."""
        self._tokenizer = tokenizer
        contents = [control.content for control in tokenizer.controls]
        outer = sorted({content[0] for content in contents} | {content[-1] for content in contents})
        if len(outer) > len(_PLACEHOLDERS):
            most = len(_PLACEHOLDERS)
            raise TokenizerUnusable(f"control tokens begin or end with {len(outer)} different characters, over {most}")
        self._placeholder_of = dict(zip(outer, map(chr, _PLACEHOLDERS), strict=False))
        self._character_of = {placeholder: char for char, placeholder in self._placeholder_of.items()}
        self.escapes = Escapes({ord(p): char for p, char in self._character_of.items()}, self._join)
        self._heads = {content[:n] for content in contents for n in range(1, len(content))}
        self._tails = {content[n:] for content in contents for n in range(1, len(content))}
        self._inner = {inner for content in contents for inner in without_brackets(content)}.difference(compared)
        self._part_lengths = sorted(set(map(len, self._heads | self._tails)))
        self._cached = lru_cache(4096)(self._escape)

    def escape(self, text: str, *, ends: bool = True) -> str:
        """Escape control tokens in `text`, and with `ends` parts of them at its ends that adjacent text could complete.

        Raises `InvalidRequest` if the text contains a lone surrogate.
        """
        return self._cached(text, ends) if len(text) <= _SHORT else self._escape(text, ends)

    def _escape(self, text: str, ends: bool) -> str:
        if not text.isascii() and _SURROGATE.search(text):
            raise InvalidRequest("the text contains a lone surrogate, which is not valid Unicode", "messages")
        if "\\udb" in text:
            text = text.replace("\\udb", f"\\{_NOTHING}udb")  # The caller's own text is no placeholder.
        pattern = self._tokenizer.control_pattern
        while pattern.search(text):
            text = pattern.sub(lambda match: self._placeholder_of[match[0][0]] + match[0][1:], text)
        if ends and text in self._inner:
            # At the end, so that templates that sort keys or look for their beginning see them as they are.
            return text + _NOTHING
        most = self._part_lengths[-1] if self._part_lengths else 0
        # Most texts have neither end of a control token near their own ends.
        near = ends and not self._placeholder_of.keys().isdisjoint(text[:most] + text[-most:])
        for n in self._part_lengths if near else ():
            if n > len(text):
                break
            if text[-n:] in self._heads:
                index = len(text) - n
                text = text[:index] + self._placeholder_of[text[index]] + text[index + 1 :]
            if text[:n] in self._tails:
                text = text[: n - 1] + self._placeholder_of[text[n - 1]] + text[n:]
        return text

    def _join(self, pieces: Sequence[str]) -> str:
        """Return the joined pieces of a text, with escaped control tokens where two pieces create one."""
        text, joints = "".join(pieces), list(accumulate(map(len, pieces)))
        for match in reversed(list(self._tokenizer.control_pattern.finditer(text))):
            if any(match.start() < joint < match.end() for joint in joints):
                text = text[: match.start()] + self._placeholder_of[match[0][0]] + text[match.start() + 1 :]
        return text

    def escape_all(self, value: Any, *, keys: Literal["known", "schema", "any"] = "known") -> Any:
        """Return a copy of messages or tools with every string escaped.

        In roles, types and keys with fixed names, only whole control tokens are escaped, because templates compare
        them. `keys` says which keys have fixed names: all, those of JSON Schema, or none (parameter names).
        """
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict | Mapping):
            escaped = {}
            for key, item in value.items():
                made_up = keys == "any" or (keys == "schema" and key not in _SCHEMA_WORDS)
                name = self.escape(str(key)) if made_up else self.escape(str(key), ends=False)
                if key in ("role", "type") and isinstance(item, str) and not made_up:
                    escaped[name] = self.escape(item, ends=False)
                else:
                    escaped[name] = self.escape_all(item, keys=_keys_below(key, keys))
            return escaped
        if isinstance(value, list | tuple | Sequence) and not isinstance(value, bytes):
            return [self.escape_all(item, keys=keys) for item in value]
        return value

    def escape_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Escape template kwargs, but not words that become control tokens in brackets: templates compare these."""
        escaped = self.escape_all(kwargs)
        return {key: value.replace(_NOTHING, "") if isinstance(value, str) else value for key, value in escaped.items()}

    def unescape(self, text: str) -> str:
        """Return `text` with every placeholder replaced by its character."""
        if "\\udb" in text:
            text = _WRITTEN.sub(lambda match: str(json.loads(f'"{match[0]}"')), text)
        if not text.isascii():
            # Replacing single characters takes a fraction of a regular expression's time.
            for placeholder, char in self._character_of.items():
                text = text.replace(placeholder, char)
            text = text.replace(_NOTHING, "")
        return text

    def marked(self, rendered: str) -> str:
        """Return the marked text of a rendering of escaped strings."""
        return self.unescape(self._tokenizer.mark_controls(rendered))


def without_brackets(token: str) -> Iterator[str]:
    """Yield what is left of a control token after removing at least one bracket on each side."""
    left, right = (len(token) - len(bare) for bare in (token.lstrip(_BRACKETS), token.rstrip(_BRACKETS)))
    for start in range(1, left + 1):
        yield from (token[start : len(token) - end] for end in range(1, right + 1) if start + end < len(token))


def _keys_below(key: str, keys: Literal["known", "schema", "any"]) -> Literal["known", "schema", "any"]:
    """Return which kind of keys the mapping under `key` has; see `escape_all`."""
    if keys == "known":
        below: Mapping[str, Literal["schema", "any"]] = {"arguments": "any", "parameters": "schema"}
        return below.get(key, "known")
    return "any" if keys == "schema" and key == "properties" else "schema"


def provenance_of_role(role: str) -> Provenance:
    """Return the provenance of texts in messages with this role."""
    return _PROVENANCE_OF_ROLE.get(role, Provenance.USER)


def with_edges(message: Message) -> dict[str, Any]:
    """Return the message with its role's edge markers around each text, without the white space at its ends."""
    code = provenance_of_role(message.get("role", ""))
    edged = dict(message)
    for key in ("content", "reasoning_content", "thinking", "reasoning"):
        if isinstance(edged.get(key), str):
            edged[key] = _edge(edged[key], code)
    if isinstance(edged.get("content"), list):
        edged["content"] = [
            {**part, "text": _edge(part["text"], code)} if "text" in part else part for part in edged["content"]
        ]
    if isinstance(edged.get("tool_calls"), Sequence):
        edged["tool_calls"] = [_edged_call(call, code) for call in edged["tool_calls"]]
    return edged


def provenance_of_characters(edged: str, characters: str) -> Codes:
    """Return the provenance of each character in a rendering with edge markers. A mark counts as one character.

    `characters` is the rendering without edge markers, which is encoded to ids. If the texts differ in more than edge
    markers, because the template looks at the first or last characters of texts, all characters get TEMPLATE.
    """
    text = MARK.sub("\0", edged)
    codes = np.full(len(characters), Provenance.TEMPLATE, dtype=np.uint8)
    if _EDGE.sub("", text) == characters:
        for code, start, end in _edged_texts(text):
            codes[start:end] = code
    return codes


def edged_text_count(edged: str) -> int:
    """Count the callers' texts in a rendering with edge markers, except the assistant's."""
    return sum(code != Provenance.ASSISTANT for code, _, _ in _edged_texts(edged))


def provenance_of_tokens(codes: Codes, spans: npt.NDArray[np.int64]) -> Codes:
    """Return the provenance of each token, given the characters' provenance and each token's character span.

    A token that covers both a caller's and the template's characters gets the caller's provenance.
    """
    # What follows the text is the template's.
    padded, starts = np.append(codes, np.uint8(_TEMPLATE)), spans[:, 0]
    # Callers' codes differ from TEMPLATE; a token that mixes both starts or ends in the caller's text.
    first = padded.take(starts, mode="clip")
    last = padded.take(np.maximum(np.minimum(spans[:, 1], len(codes)) - 1, starts), mode="clip")
    return np.where(first != _TEMPLATE, first, last)


def _edge_characters(code: Provenance) -> tuple[str, str]:
    start = _EDGES.start + 2 * int(code)
    return chr(start), chr(start + 1)


_TEMPLATE = int(Provenance.TEMPLATE)
"""An int because comparing with an enum member in NumPy, or looking one up in Python 3.11, is many times slower."""

_CODES = sorted(set(_PROVENANCE_OF_ROLE.values()))
_EDGE = re.compile(f"[{chr(_EDGES.start)}-{chr(_EDGES.stop - 1)}]")


def _edged_texts(edged: str) -> list[tuple[Provenance, int, int]]:
    """Return the provenance and the range of each text between edge markers, by provenance and position.

    Edge markers do not count in the positions.
    """
    edges = [(match.start() - before, match[0]) for before, match in enumerate(_EDGE.finditer(edged))]
    ranges = []
    for code in _CODES:
        opening, closing = _edge_characters(code)
        start: int | None = None
        for position, edge in edges:
            if edge == opening:
                start = position
            elif edge == closing and start is not None:
                ranges.append((code, start, position))
                start = None
    return ranges


def _edge(text: str, code: Provenance) -> str:
    opening, closing = _edge_characters(code)
    text = text.removesuffix(_NOTHING)  # The edges themselves keep the word from becoming a control token.
    core = text.strip()
    # The text stays between them, because a template may compare texts with each other.
    return text.replace(core, opening + core + closing) if core else text


def _edged_values(value: Any, code: Provenance) -> Any:
    if isinstance(value, str):
        return _edge(value, code)
    if isinstance(value, Mapping):
        return {key: _edged_values(item, code) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_edged_values(item, code) for item in value]
    return value


def _edged_call(call: Any, code: Provenance) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    function["arguments"] = _edged_values(function.get("arguments"), code)
    return {**call, "function": function}


class Text(Struct, frozen=True):
    """A caller's text."""

    whole: str
    core: str
    """The text without the surrounding white space, which gets the provenance TEMPLATE."""
    code: Provenance


@dataclass(frozen=True, slots=True)
class TemplateLiterals:
    """The literals that a template writes before, between and after texts. A mark counts as one character."""

    pieces: tuple[str, ...]
    trims: bool
    """Whether the template strips the white space around texts."""

    def codes(self, rendering: str, texts: Sequence[Text]) -> Codes | None:
        """Return the provenance of each character; None if `rendering` does not consist of the pieces and `texts`."""
        if len(texts) + 1 != len(self.pieces):
            return None
        codes = np.full(len(rendering), _TEMPLATE, dtype=np.uint8)
        position = 0
        for piece, caller_text in zip(self.pieces, texts, strict=False):
            text = caller_text.core if self.trims else caller_text.whole
            start = position + len(piece)
            if not (rendering.startswith(piece, position) and rendering.startswith(text, start)):
                return None
            position = start + len(text)
            start += text.index(caller_text.core)
            codes[start : start + len(caller_text.core)] = caller_text.code
        return codes if rendering[position:] == self.pieces[-1] else None


def template_literals(rendering: str, codes: Codes, texts: Sequence[Text]) -> TemplateLiterals | None:
    """Return the literals around the texts in `rendering`, given its characters' provenance.

    Return None if `rendering` does not consist of literals and these texts, in this order.
    """
    for trims in (False, True):
        pieces, position = [], 0
        for caller_text in texts:
            text = caller_text.core if trims else caller_text.whole
            begun = np.flatnonzero(codes[position:] != _TEMPLATE)[:1].tolist()
            start = position + max(begun[0] - text.index(caller_text.core), 0) if begun else position
            pieces.append(rendering[position:start])
            position = start + len(text)
        literals = TemplateLiterals((*pieces, rendering[position:]), trims)
        same = literals.codes(rendering, texts)
        if same is not None and np.array_equal(same, codes):
            return literals
    return None


_PLAIN_FIELDS = frozenset(("role", "content", "tool_call_id", "name"))


def texts_of(messages: Sequence[Message], unescape: Callable[[str], str]) -> list[Text] | None:
    """Return the contents of escaped messages; None if one is empty or not a string, or if there are other texts."""
    texts = []
    for message in messages:
        content = message.get("content")
        whole = unescape(content) if isinstance(content, str) else ""
        if not whole.strip() or not _PLAIN_FIELDS.issuperset(message):
            return None
        texts.append(Text(whole, whole.strip(), provenance_of_role(message["role"])))
    return texts
