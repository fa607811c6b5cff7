"""Cache the literal text that a template writes around callers' texts, to save a second rendering.

The provenance of characters comes from a second rendering with edge markers in callers' texts (`_caller_text.py`).
Most suffixes differ only in callers' texts. If a suffix equals an earlier one with only these texts replaced, character
for character, its provenance follows from the cached literals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from tokentape.chat._caller_text import TEMPLATE, provenance_of_role
from tokentape.types import Codes, Message, Provenance


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
        codes = np.full(len(rendering), TEMPLATE, dtype=np.uint8)
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
            begun = np.flatnonzero(codes[position:] != TEMPLATE)[:1].tolist()
            start = position + max(begun[0] - text.index(caller_text.core), 0) if begun else position
            pieces.append(rendering[position:start])
            position = start + len(text)
        literals = TemplateLiterals((*pieces, rendering[position:]), trims)
        same = literals.codes(rendering, texts)
        if same is not None and np.array_equal(same, codes):
            return literals
    return None


def texts_of(messages: Sequence[Message], unescape: Callable[[str], str]) -> list[Text] | None:
    """Return the contents of escaped messages; None if one is from the assistant, empty or not a string."""
    texts = []
    for message in messages:
        content = message.get("content")
        whole = unescape(content) if isinstance(content, str) else ""
        if not whole.strip() or message["role"] == "assistant":
            return None
        texts.append(Text(whole, whole.strip(), provenance_of_role(message["role"])))
    return texts
