"""Decode ids to the bytes of each token, and mark control tokens and text that only spells a control token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest


class Mark(IntFlag):
    """A property of a token that its bytes do not show."""

    CONTROL = 1
    """A control token."""
    UNKNOWN = 2
    """An id that the tokenizer does not have. It has no bytes."""
    LETTERS = 4
    """Text that spells a control token or a part of it."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The bytes of a token sequence."""

    ends: npt.NDArray[np.int32]
    """Offset after each token's last byte, shape [tokens]."""
    data: bytes
    """The bytes of all tokens. Control tokens are spelled out."""
    marks: npt.NDArray[np.uint8]
    """`Mark`s, shape [tokens]."""

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """`data` as uint8, shape [bytes]."""
        return np.frombuffer(self.data, np.uint8)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> TokenTexts:
    """Return the bytes of `ids`. Ids that the tokenizer lacks are marked: the record may be from a different model."""
    pieces: list[bytes] = []
    marks = np.zeros(len(ids), np.uint8)
    controls: list[int] = []
    for n, token_id in enumerate(ids):
        if tokenizer.control_by_id(token_id) is not None:
            controls.append(n)
        try:
            pieces.append(tokenizer.token_bytes(token_id))
        except InvalidRequest:
            pieces.append(b"")
            marks[n] = Mark.UNKNOWN
    marks[controls] = Mark.CONTROL
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int32)
    # Replace control tokens by a byte that no text has, so that only text that spells them is found.
    blank = set(controls)
    letters = b"".join(b"\xff" * len(piece) if n in blank else piece for n, piece in enumerate(pieces))
    for match in _spelled(tokenizer).finditer(letters):
        first = int(np.searchsorted(ends, match.start(), "right"))
        last = int(np.searchsorted(ends, match.end(), "left"))
        marks[first : last + 1] |= np.uint8(Mark.LETTERS)
    return TokenTexts(ends, b"".join(pieces), marks)


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the shortest runs of tokens that together spell whole characters, as (start, end, text).

    Invalid UTF-8 becomes U+FFFD. Raises `InvalidRequest` for an id that the tokenizer doesn't have.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start, text = 0, ""
    for n, token_id in enumerate(ids):
        text += decoder.decode(tokenizer.token_bytes(token_id), final=n == len(ids) - 1)
        if not decoder.getstate()[0]:
            yield start, n + 1, text
            start, text = n + 1, ""


def _spelled(tokenizer: Tokenizer) -> re.Pattern[bytes]:
    contents = sorted((control.content.encode() for control in tokenizer.controls), key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, contents)) or b"(?!)")
