"""Text of anybody's, so that it can be shown in a terminal without steering it."""

from __future__ import annotations

import unicodedata


def readable(text: str) -> str:
    """`text` with newlines shown as ↵ and control and format characters as escapes. Emoji and scripts stay whole.

    >>> readable("a\\n\\x1b[2Jb")
    'a↵\\n\\\\x1b[2Jb'
    """
    return "".join(map(_readable, text))


def _readable(char: str) -> str:
    if char == "\n":
        return "↵\n"
    # Joiners are part of how emoji and several scripts are written; other format characters reorder or hide text.
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\u200c\u200d":
        return char.encode("unicode_escape", "surrogatepass").decode("ascii")
    return char
