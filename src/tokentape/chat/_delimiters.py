"""Find a template's delimiters in completions, allowing any white space between their pieces, as models write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokentape.chat._caller_text import SENTINELS
from tokentape.chat._tokenizer import MARK

ANY = SENTINELS[-1]
"""Placeholder in a delimiter for a word or number that varies, such as the 2 in `index="2"`."""

_BETWEEN_PIECES = re.compile(rf"({MARK.pattern})|\s+|(?<=>)(?=<)")

SPACE = r"\s{0,1000}"
"""White space around a delimiter. It is limited because the search after it is repeated with every token. The limit
also applies to whole completions, so that streaming and parsing at once give the same reply."""

_SPACE = re.compile(SPACE)


@lru_cache(1024)
def pieces(delimiter: str) -> tuple[str, ...]:
    """Split a delimiter into its control tokens, tags and words.

    >>> pieces("</function>\\n</call>")
    ('</function>', '</call>')
    """
    return tuple(piece for piece in _BETWEEN_PIECES.split(delimiter) if piece)


def pattern(delimiter: str) -> str:
    """Return a regular expression that matches all pieces of a delimiter in order."""
    return SPACE.join(map(_escaped, pieces(delimiter)))


def optional(delimiters: Iterable[str]) -> str:
    """Return a regular expression for the `pieces` of all these delimiters in order; each piece may be missing.

    So it also matches the empty string.
    """
    parts = [piece for delimiter in delimiters for piece in pieces(delimiter)]
    return "".join(rf"(?:{SPACE}{_whole(piece)})?" for piece in parts)


def any_of(delimiters: Iterable[str]) -> str:
    """Return a regular expression for any single piece of these delimiters; it never matches if there are no pieces."""
    parts = {piece: None for delimiter in delimiters for piece in pieces(delimiter)}
    return "|".join(_whole(piece) for piece in sorted(parts, key=len, reverse=True)) or "(?!)"


def may_grow(text: str, position: int, delimiters: Iterable[str]) -> bool:
    """Return whether `text[position:]` may be the beginning of a delimiter, which may lack its first pieces.

    White space before the delimiter counts as its beginning.
    """
    for parts in map(pieces, delimiters):
        for n in range(max(len(parts), 1)):
            if _is_beginning(text, position, parts[n:]):
                return True
    return False


def held_back(text: str, start: int, delimiters: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text[start:]` may be the beginning of a delimiter."""
    if text[-1:] not in before_ends(delimiters):
        return 0
    most = 0
    for delimiter in delimiters:
        for n in range(min(len(delimiter) - 1, len(text) - start), most, -1):
            if text.endswith(delimiter[:n]):
                most = n
                break
    return most


@lru_cache(1024)
def before_ends(delimiters: tuple[str, ...]) -> frozenset[str]:
    """Return the characters with which an incomplete delimiter can end: all but the last of each delimiter."""
    return frozenset("".join(delimiter[:-1] for delimiter in delimiters))


def skip(expected: re.Pattern[str], text: str, position: int) -> int:
    """Return the position after what the expression matches at `position`; `position` if it does not match there."""
    match = expected.match(text, position)
    return match.end() if match else position


def skip_space(text: str, position: int) -> int:
    """Return the position after at most 1000 white-space characters at `position`."""
    return skip(_SPACE, text, position)


def _whole(piece: str) -> str:
    """Return an expression for a piece that does not match within a longer word, as `function` in `function_name`."""
    return _escaped(piece) + (r"(?!\w)" if re.match(r"\w", piece[-1]) else "")


def _escaped(piece: str) -> str:
    return re.escape(piece).replace(ANY, r"\w+")


def _is_beginning(text: str, position: int, expected: Sequence[str]) -> bool:
    for piece in expected:
        position = skip_space(text, position)
        if ANY in piece:
            match = re.compile(_escaped(piece)).match(text, position)
            if match is None:
                return _is_part(text[position:], piece)
            position = match.end()
            continue
        if not text.startswith(piece, position):
            return piece.startswith(text[position : position + len(piece)])
        position += len(piece)
    return not expected and skip_space(text, position) == len(text)


def _is_part(text: str, piece: str) -> bool:
    """Return whether more text could turn `text` into `piece`, in which `ANY` stands for any word."""
    before, _, after = piece.partition(ANY)
    if not text.startswith(before):
        return before.startswith(text)
    word = re.compile(r"\w*").match(text, len(before))
    return word is not None and after.startswith(text[word.end() :])
