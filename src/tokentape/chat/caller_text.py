"""Caller text on its way through a template: disarmed before, found again after.

A template mixes its own control tokens with strings from users, tools and systems. Before rendering, every control
token that a caller's string spells loses its first character to a *mask*, a lone surrogate of the same length; after
rendering, what still spells a control token was written by the template, and masks turn back into the characters they
hid. A second rendering with *edges*, surrogates in place of each string's outer characters, tells which caller each
character came from; ids never depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import Codes, Message, Provenance

_MASKS = range(0xDB80, 0xDBA0)
_EDGES = range(0xDBA0, 0xDBC0)
SENTINELS = tuple(map(chr, range(0xDBC0, 0xDC00)))
"""Characters that stand for a string while a template is being asked what it writes around it."""

_MASK = re.compile(f"[{chr(_MASKS.start)}-{chr(_MASKS.stop - 1)}]")
_SURROGATE = re.compile("[\ud800-\udfff]")

_PROVENANCE_OF_ROLE = {
    "system": Provenance.SYSTEM,
    "developer": Provenance.SYSTEM,
    "user": Provenance.USER,
    "tool": Provenance.TOOL,
    "function": Provenance.TOOL,
    "assistant": Provenance.ASSISTANT,
}


class Disarmer:
    """Masks control tokens in caller strings and removes the masks again, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        contents = [control.content for control in tokenizer.controls]
        outer = sorted({content[0] for content in contents} | {content[-1] for content in contents})
        if len(outer) > len(_MASKS):
            raise TokenizerUnusable(f"control tokens begin or end with more than {len(_MASKS)} different characters")
        self._mask_of = dict(zip(outer, map(chr, _MASKS), strict=False))
        self._unmask = {mask: char for char, mask in self._mask_of.items()}
        self._heads = {content[:n] for content in contents for n in range(1, len(content))}
        self._tails = {content[n:] for content in contents for n in range(1, len(content))}
        self._longest = max(map(len, contents), default=0)

    def mask(self, text: str) -> str:
        """`text` with no control token in it, nor half of one at an edge that a neighbour could complete.

        Raises `InvalidRequest` for a lone surrogate.
        """
        text = self._mask_whole(text)
        for n in range(1, min(self._longest, len(text)) + 1):
            if text[-n:] in self._heads:
                at = len(text) - n
                text = text[:at] + self._mask_of[text[at]] + text[at + 1 :]
            if text[:n] in self._tails:
                text = text[: n - 1] + self._mask_of[text[n - 1]] + text[n:]
        return text

    def mask_all(self, value: Any) -> Any:
        """A copy of messages or tools with every string masked.

        Keys, roles and types are compared by templates, so of those only whole control tokens are masked.
        """
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, Mapping):
            return {
                self._mask_whole(str(key)): self._mask_whole(item)
                if key in ("role", "type") and isinstance(item, str)
                else self.mask_all(item)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.mask_all(item) for item in value]
        return value

    def _mask_whole(self, text: str) -> str:
        if _SURROGATE.search(text):
            raise InvalidRequest("the text holds a lone surrogate, which is not valid Unicode", "messages")
        pattern = self._tokenizer.control_pattern
        while pattern.search(text):
            text = pattern.sub(lambda match: self._mask_of[match[0][0]] + match[0][1:], text)
        return text

    def unmask(self, text: str) -> str:
        """`text` with every mask replaced by the character it hid."""
        return _MASK.sub(lambda match: self._unmask[match[0]], text)

    def marked(self, rendered: str) -> str:
        """Marked text of what a template rendered from masked strings."""
        return self.unmask(self._tokenizer.mark_controls(rendered))


def provenance_of_role(role: str) -> Provenance:
    """Whose the texts of a message of this role are."""
    return _PROVENANCE_OF_ROLE.get(role, Provenance.USER)


def with_edges(message: Message) -> dict[str, Any]:
    """The message with the outer characters of its texts replaced by edges that name its role."""
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


def provenance_of_characters(edged: str, length: int) -> Codes:
    """Provenance per character of an edged rendering in which marks count as one; all template if it does not fit.

    It does not fit where a template looks into a text's outer characters: then the edged rendering has another
    length than the one that gave the ids, `length`.
    """
    text = MARK.sub("\0", edged)
    codes = np.full(length, Provenance.TEMPLATE, dtype=np.uint8)
    if len(text) == length:
        for code, pattern in _EDGED.items():
            for match in pattern.finditer(text):
                codes[match.start() : match.end()] = code
    return codes


def edges_found(edged: str) -> int:
    """How many texts of callers other than the assistant can be seen in an edged rendering."""
    return sum(len(pattern.findall(edged)) for code, pattern in _EDGED.items() if code != Provenance.ASSISTANT)


def provenance_of_tokens(codes: Codes, spans: npt.NDArray[np.int64]) -> Codes:
    """Provenance per token, given the characters it covers: the caller's if any of them is, else the template's."""
    out = np.full(len(spans), Provenance.TEMPLATE, dtype=np.uint8)
    starts = spans[:, 0]
    # A caller's code differs from TEMPLATE; a token that mixes both starts or ends in the caller's text.
    ends = np.maximum(spans[:, 1] - 1, starts)
    inside = starts < len(codes)
    first = codes[starts[inside]]
    last = codes[np.minimum(ends[inside], len(codes) - 1)]
    out[inside] = np.where(first != Provenance.TEMPLATE, first, last)
    return out


def _edge_characters(code: Provenance) -> tuple[str, str, str]:
    start = _EDGES.start + 3 * int(code)
    return chr(start), chr(start + 1), chr(start + 2)


_EDGED = {
    code: re.compile("{0}[^{0}]*?{1}|{2}".format(*_edge_characters(code)), re.DOTALL)
    for code in sorted(set(_PROVENANCE_OF_ROLE.values()))
}


def _edge(text: str, code: Provenance) -> str:
    opening, closing, only = _edge_characters(code)
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    end = start + len(core)
    if len(core) == 1:
        return text[:start] + only + text[end:]
    return text[:start] + opening + text[start + 1 : end - 1] + closing + text[end:]


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
