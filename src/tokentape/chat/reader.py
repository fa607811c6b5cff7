"""Sampled ids -> marked text, as they arrive."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice

from tokentape.chat.delimiters import first_of, held_back
from tokentape.chat.tokenizer import Tokenizer

_FORGET_FROM, _KEEP = 4096, 128


@dataclass(slots=True)
class Reader:
    """Ids -> marked text as far as it is certain: whole characters, nothing behind a stop id or stop string."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: Sequence[str]
    text: str = ""
    """What has arrived and was not forgotten."""
    at: int = 0
    """Where in it the part begins that was not taken yet."""
    stopped: bool = False
    """By a stop id or a stop string."""
    ended: bool = False
    """By a stop id: the model has ended its turn."""
    _forgotten: int = 0
    _held: str = ""
    _ends: list[int] = field(default_factory=list)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def feed(self, ids: Iterable[int]) -> None:
        """Take newly sampled ids."""
        breaks = self.tokenizer.breaks(self.stop_ids)
        for is_break, run in groupby(ids, breaks.__contains__):
            if is_break:
                self.text += "".join(map(self._break, run))
            else:
                self.text += self._text(self.tokenizer.pieces(run))

    def _text(self, pieces: Sequence[bytes]) -> str:
        """What tokens of text write."""
        whole = b"".join(pieces)
        if whole.isascii() and not self.stopped and not self.stop_strings and not self._decoder.getstate()[0]:
            # Most text is: its bytes are its characters, and none waits for another.
            self._ends.extend(islice(accumulate(map(len, pieces), initial=self._end()), 1, None))
            return whole.decode("ascii")
        return "".join([self._arrived(self._decoder.decode(piece)) for piece in pieces])

    def _break(self, token_id: int) -> str:
        """What a control token writes, or one that ends the turn."""
        if self.stopped:
            return self._arrived("")
        control = self.tokenizer.control_by_id(token_id)
        self.ended = token_id in self.stop_ids
        mark = control.mark if control is not None and not self.ended else ""
        written = self._arrived(self._decoder.decode(b"", final=True) + mark)
        self.stopped = self.stopped or self.ended
        return written

    def _arrived(self, text: str) -> str:
        """What is certain of what one more token writes."""
        self._ends.append(self._end() + (0 if self.stopped else len(text)))
        return "" if self.stopped else self._release(text, final=self.ended)

    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def finish(self) -> None:
        """Say that no more will come: give out what was held back."""
        if not self.stopped:
            self.text += self._release(self._decoder.decode(b"", final=True), final=True)

    def take(self, end: int) -> str:
        """The text up to `end`, which is done with."""
        start, self.at = self.at, max(self.at, end)
        return self.text[start:end]

    def forget(self) -> None:
        """Drop most of what was taken, so that a long completion costs no more per token than a short one.

        Changes the positions of what is left.
        """
        if self.at > _FORGET_FROM:
            cut = self.at - _KEEP
            self.text, self.at, self._forgotten = self.text[cut:], _KEEP, self._forgotten + cut

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that wrote characters start to end."""
        start, end = start + self._forgotten, end + self._forgotten
        return bisect_right(self._ends, start), min(bisect_left(self._ends, end) + 1, len(self._ends))

    def _release(self, arrived: str, *, final: bool) -> str:
        """What is certain of the text held back and the text arrived: that it is no part of a stop string."""
        if not self.stop_strings:
            return arrived
        text, self._held = self._held + arrived, ""
        found = first_of(text, 0, self.stop_strings)
        if found is not None:
            self.stopped = True
            return text[: found[0]]
        keep = 0 if final else held_back(text, 0, tuple(self.stop_strings))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
