"""Which script a character is of, by the name that Unicode gives it."""

from __future__ import annotations

import unicodedata
from functools import cache

COMMON = "Common"
"""Digits, punctuation, white space, symbols, emoji: what belongs to no script."""

_NAMES = {"CJK": "Han", "IDEOGRAPHIC": "Han", "HANGZHOU": "Han", "KATAKANA-HIRAGANA": "Katakana", "KANGXI": "Han"}
_NO_SCRIPT = ("MODIFIER", "COMBINING", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "VARIATION")
_WIDTHS = ("FULLWIDTH", "HALFWIDTH", "SMALL", "SUPERSCRIPT", "SUBSCRIPT")
_TWO_WORDS = ("OLD", "NEW", "TAI", "MEETEI", "OL", "LINEAR", "PAHAWH", "NYIAKENG", "CANADIAN", "SYLOTI")


@cache
def script_of(char: str) -> str:
    """The script of a letter or a mark, as English names it; `COMMON` for anything else.

    From the first words of the character's name, which is the script for all letters in wide use; Unicode's own
    property would tell a few rare marks apart that are `COMMON` here.

    >>> [script_of(char) for char in "aяあ漢한ア9"]
    ['Latin', 'Cyrillic', 'Hiragana', 'Han', 'Hangul', 'Katakana', 'Common']
    """
    if unicodedata.category(char)[0] not in "LM":
        return COMMON
    words = unicodedata.name(char, "").split()
    if words and words[0] in _WIDTHS:
        words = words[1:]
    if not words or words[0] in _NO_SCRIPT:
        return COMMON
    if words[0] in ("FEMININE", "MASCULINE", "KELVIN", "ANGSTROM"):
        return "Latin"
    if words[0] in _NAMES:
        return _NAMES[words[0]]
    name = " ".join(words[:2]) if words[0] in _TWO_WORDS else words[0]
    return name.title()


def scripts_of(text: str) -> list[str]:
    """A script for each character of a text; what belongs to none takes that of the letter before it, or behind."""
    found = [script_of(char) for char in text]
    last = next((script for script in found if script != COMMON), COMMON)
    for at, script in enumerate(found):
        if script == COMMON:
            found[at] = last
        else:
            last = script
    return found
