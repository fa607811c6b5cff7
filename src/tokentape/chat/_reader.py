"""Convert sampled ids to marked text while they arrive."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from tokentape.chat._delimiters import held_back
from tokentape.chat._tokenizer import Tokenizer

_FORGET_FROM, _KEEP = 4096, 128


@dataclass(slots=True)
class Reader:
    """Converts ids to marked text. Holds back incomplete characters and possible beginnings of stop strings.

    The text ends before the first stop id or stop string.
    """

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: Sequence[str]
    text: str = ""
    """The text so far, without the beginning that `forget` dropped."""
    position: int = 0
    """The position in `text` up to which the text was taken."""
    stopped: bool = False
    """Whether a stop id or a stop string was found."""
    ended: bool = False
    """Whether a stop id was found, with which the model ended its turn."""
    _forgotten: int = 0
    _held: str = ""
    _within_character: bool = False
    """Whether the decoder has the first bytes of an incomplete character."""
    _breaks: frozenset[int] = field(init=False)
    _written: int = 0
    """The number of characters in all tokens so far, before the stop."""
    _ends: list[int] = field(default_factory=list)
    """For each token, the value of `_written` after it."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def __post_init__(self) -> None:
        self._breaks = self.tokenizer.breaks(self.stop_ids)

    def feed(self, ids: Iterable[int]) -> None:
        """Add newly sampled ids."""
        for is_break, run in groupby(ids, self._breaks.__contains__):
            if is_break:
                self.text += "".join(map(self._break, run))
            else:
                self.text += self._text(self.tokenizer.pieces(run))

    def _text(self, pieces: Sequence[bytes]) -> str:
        """Add text tokens, and return the new text that later ids can't change."""
        whole = b"".join(pieces)
        if whole.isascii() and not (self.stopped or self.stop_strings or self._within_character):
            # This is the usual case: each byte is a complete character.
            ends = list(accumulate(map(len, pieces), initial=self._written))
            self._ends += ends[1:]
            self._written = ends[-1]
            return whole.decode("ascii")
        text = "".join([self._arrived(self._decoder.decode(piece)) for piece in pieces])
        self._within_character = bool(self._decoder.getstate()[0])
        return text

    def _break(self, token_id: int) -> str:
        """Add a control token or stop token, and return the new text that later ids can't change."""
        if self.stopped:
            return self._arrived("")
        control = self.tokenizer.control_by_id(token_id)
        self.ended = token_id in self.stop_ids
        mark = control.mark if control is not None and not self.ended else ""
        text = self._arrived(self._decoder.decode(b"", final=True) + mark)
        self._within_character = False
        self.stopped = self.stopped or self.ended
        return text

    def _arrived(self, text: str) -> str:
        """Record the text of the next token, and return the new text that later ids can't change."""
        self._written += 0 if self.stopped else len(text)
        self._ends.append(self._written)
        return "" if self.stopped else self._release(text, final=self.ended)

    def finish(self) -> None:
        """End the text and add the characters that were held back."""
        if not self.stopped:
            self.text += self._release(self._decoder.decode(b"", final=True), final=True)

    def take(self, end: int) -> str:
        """Return the text from `position` to `end`, and move `position` there."""
        start = self.position
        if end > start:
            self.position = end
        return self.text[start:end]

    def forget(self) -> None:
        """Drop most of the text before `position`, so that the cost per token does not grow with the completion.

        Positions in `text` from before this call are no longer valid.
        """
        if self.position > _FORGET_FROM:
            cut = self.position - _KEEP
            self.text, self.position, self._forgotten = self.text[cut:], _KEEP, self._forgotten + cut

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Return the half-open range of tokens that contain the characters from `start` to `end`."""
        start, end = start + self._forgotten, end + self._forgotten
        return bisect_right(self._ends, start), min(bisect_left(self._ends, end) + 1, len(self._ends))

    def _release(self, arrived: str, *, final: bool) -> str:
        """Return the held-back text and the new text, up to a stop string or the possible beginning of one."""
        if not self.stop_strings:
            return arrived
        text, self._held = self._held + arrived, ""
        starts = [start for string in self.stop_strings if (start := text.find(string)) >= 0]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        keep = 0 if final else held_back(text, 0, tuple(self.stop_strings))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def read_text(
    tokenizer: Tokenizer, ids: Iterable[int], stop_ids: frozenset[int] = frozenset(), stop_strings: Sequence[str] = ()
) -> str:
    """Return the marked text of the ids before the first stop id or stop string."""
    reader = Reader(tokenizer, stop_ids, stop_strings)
    reader.feed(ids)
    reader.finish()
    return reader.text
