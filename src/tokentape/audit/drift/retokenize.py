"""Completions through text and back, many at a time, as whoever keeps text and tokenizes again does.

What text can't carry is told apart from drift. A completion that was cut within a character ends with bytes that are no
UTF-8; those tokens are *unknown*, since no encoder could give them back and a longer completion would have had them
right. Tokenizers of the SentencePiece kind put a space in front of a text, some also behind control tokens. A
completion may stand at either place, so one that begins with a space is taken for the start of a text, and any other
for what stands behind a control token: their rule for starts is not counted as drift.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokentape.audit.compare.comparator import compare
from tokentape.audit.drift.classes import text_artifact
from tokentape.audit.pairing import Change, changed_stretches
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A completion, and what came back for it."""

    ids: TokenIds
    """The sampled ids without those that are unknown."""
    again: TokenIds
    """What encoding their text gives; `ids` itself where it gives the same."""
    content: bytes
    """What `ids` spell."""
    head: int
    """Unknown tokens left off in front, which go on with a character of the context."""
    tail: int
    """Unknown tokens left off at the end."""

    @property
    def drifted(self) -> bool:
        """Whether other ids came back."""
        return self.again is not self.ids


@dataclass(frozen=True, slots=True)
class Changes:
    """Where a round trip changed ids."""

    changed: npt.NDArray[np.bool_]
    """Per token of `RoundTrip.ids`."""
    stretches: tuple[Change, ...]
    same_text: bool
    """Whether the ids that came back spell the same bytes."""


class Retokenizer:
    """Decodes and encodes with one tokenizer. Ids outside of its vocabulary raise `InvalidRequest`.

    Letters that spell a control token become that token, as they do in most trainers. With `apart` they stay letters,
    and the tokenizer is not loaded a second time.
    """

    def __init__(self, tokenizer: Tokenizer, *, apart: bool = False) -> None:
        self.tokenizer = tokenizer
        self._apart = apart
        self._pieces: dict[int, bytes] = {}
        at_start, with_space = (b"".join(map(tokenizer.token_bytes, ids)) for ids in self._encoded(["x", " x"]))
        self._adds_space = at_start == b" x"
        # Some add it to a text that begins with one, too.
        self._adds_to_space = with_space == b"  x"
        first = tokenizer.controls[0] if tokenizer.controls else None
        self._anchor = "" if first is None else first.mark if apart else first.content

    def pieces(self, ids: TokenIds) -> list[bytes]:
        """The bytes of each id."""
        listed: list[int] = ids.tolist()
        try:
            return [self._pieces[token_id] for token_id in listed]
        except KeyError:
            for token_id in set(listed):
                self._pieces[token_id] = self.tokenizer.token_bytes(token_id)
            return [self._pieces[token_id] for token_id in listed]

    def round_trips(self, completions: Sequence[TokenIds]) -> list[RoundTrip]:
        """What comes back for each of these. In one call to the encoder, so keep them to some 100k tokens."""
        known = [self._known(ids) for ids in completions]
        texts = [self._text(ids, content) for ids, content, _, _ in known]
        encoded = self._encoded([anchor + text for anchor, text in texts])
        found = []
        for (ids, content, head, tail), (anchor, _), again in zip(known, texts, encoded, strict=True):
            back = np.array(again[1:] if anchor else again, np.int32)
            found.append(RoundTrip(ids, ids if np.array_equal(ids, back) else back, content, head, tail))
        return found

    def changes(self, trip: RoundTrip) -> Changes:
        """Where the ids of a round trip differ, and how."""
        one, other = self.pieces(trip.ids), self.pieces(trip.again)
        same_text = trip.content == b"".join(other)
        if same_text:
            stretches = changed_stretches(trip.ids, trip.again, one, other, self.tokenizer)[1]
        else:
            stretches = tuple(self._of_text(trip))
        changed = np.zeros(len(trip.ids), np.bool_)
        for stretch in stretches:
            changed[stretch.start : stretch.end] = True
        return Changes(changed, stretches, same_text)

    def _of_text(self, trip: RoundTrip) -> list[Change]:
        found = []
        for one in compare(trip.ids, trip.again, self.tokenizer).differences:
            left, right = (b"".join(self.pieces(np.array(ids, np.int32))) for ids in (one.expected, one.recorded))
            if one.artifact is not None:
                name = one.artifact
            elif one.kind in ("forged", "control"):
                name = "control"
            elif one.kind == "bytes" or "�".encode() in right:
                name = "partial-utf8"
            else:
                name = text_artifact(left, right)
            found.append(Change(one.expected_start, one.expected_end, one.recorded_start, one.recorded_end, name))
        return found

    def _known(self, ids: TokenIds) -> tuple[TokenIds, bytes, int, int]:
        """Ids without the halves of characters at either end, what they spell, and how many were left off."""
        pieces = self.pieces(ids)
        content = b"".join(pieces)
        try:
            content.decode()
        except UnicodeDecodeError:
            pass
        else:
            return ids, content, 0, 0
        head = 0
        while head < len(pieces) and pieces[head] and pieces[head][0] & 0xC0 == 0x80:
            head += 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(content)
        left = len(decoder.getstate()[0])
        end = len(pieces)
        while left > 0 and end > head:
            end -= 1
            left -= len(pieces[end])
        return ids[head:end], b"".join(pieces[head:end]), head, len(pieces) - end

    def _text(self, ids: TokenIds, content: bytes) -> tuple[str, str]:
        """A control token to put in front, or nothing, and the text to encode."""
        text = self._marked(ids) if self._apart else content.decode("utf-8", "replace")
        if not self._adds_space:
            return "", text
        if not text.startswith(" "):
            return self._anchor, text
        return "", text[1:] if self._adds_to_space else text

    def _marked(self, ids: TokenIds) -> str:
        parts: list[str] = []
        plain: list[bytes] = []
        for token_id, piece in zip(ids.tolist(), self.pieces(ids), strict=True):
            control = self.tokenizer.control_by_id(token_id)
            if control is None:
                plain.append(piece)
                continue
            parts += (b"".join(plain).decode("utf-8", "replace"), control.mark)
            plain = []
        return "".join([*parts, b"".join(plain).decode("utf-8", "replace")])

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        if self._apart:
            return [self.tokenizer.encode_marked(text).ids for text in texts]
        return self.tokenizer.encode_plain_batch(texts)


def check_vocabulary(ids: TokenIds, tokenizer: Tokenizer, where: str) -> None:
    """Raise `InvalidRequest` for ids that the tokenizer does not have: the file belongs to another model."""
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"{where}: id {int(ids.max())} is outside of the tokenizer's {tokenizer.vocab_size} ids; name the model "
            "folder that the ids are of"
        )
