"""Cache the literal text that a template writes around callers' texts, to save a second rendering.

The provenance of characters comes from a second rendering with edge markers in callers' texts (`_caller_text.py`).
Suffixes of turns are mostly alike. If a suffix equals an earlier one with the new texts in place of the earlier texts,
character for character, its provenance follows from the cached literals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokentape.chat._caller_text import provenance_of_role
from tokentape.types import Codes, Message, Provenance


@dataclass(frozen=True, slots=True)
class Text:
    """A caller's text."""

    whole: str
    core: str
    """The text without the white space around it, which gets the provenance TEMPLATE."""
    code: Provenance


@dataclass(frozen=True, slots=True)
class TemplateLiterals:
    """The literals that a template writes before, between and after texts. A mark counts as one character."""

    pieces: tuple[str, ...]
    trims: bool
    """Whether the template writes texts without the white space around them."""

    def codes(self, written: str, texts: Sequence[Text]) -> Codes | None:
        """Return the provenance of each character of `written`; None if it is not these pieces around the texts."""
        if len(texts) + 1 != len(self.pieces):
            return None
        codes = np.full(len(written), Provenance.TEMPLATE, dtype=np.uint8)
        at = 0
        for piece, one in zip(self.pieces, texts, strict=False):
            text = one.core if self.trims else one.whole
            start = at + len(piece)
            if not (written.startswith(piece, at) and written.startswith(text, start)):
                return None
            at = start + len(text)
            start += text.index(one.core)
            codes[start : start + len(one.core)] = one.code
        return codes if written[at:] == self.pieces[-1] else None


def template_literals(written: str, codes: Codes, texts: Sequence[Text]) -> TemplateLiterals | None:
    """Return the literals around the texts in `written`, given the provenance of its characters.

    Return None if `written` is not made of literals and these texts, in this order.
    """
    for trims in (False, True):
        pieces, at = [], 0
        for one in texts:
            text = one.core if trims else one.whole
            begun = np.flatnonzero(codes[at:] != Provenance.TEMPLATE)[:1].tolist()
            start = at + max(begun[0] - text.index(one.core), 0) if begun else at
            pieces.append(written[at:start])
            at = start + len(text)
        found = TemplateLiterals((*pieces, written[at:]), trims)
        same = found.codes(written, texts)
        if same is not None and np.array_equal(same, codes):
            return found
    return None


def texts_of(messages: Sequence[Message], unescape: Callable[[str], str]) -> list[Text] | None:
    """Return the contents of escaped messages. Return None if one is the assistant's, empty or not a string."""
    texts = []
    for message in messages:
        content = message.get("content")
        whole = unescape(content) if isinstance(content, str) else ""
        if not whole.strip() or message["role"] == "assistant":
            return None
        texts.append(Text(whole, whole.strip(), provenance_of_role(message["role"])))
    return texts
