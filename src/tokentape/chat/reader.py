"""Sampled ids -> marked text, as they arrive."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokentape.chat.tokenizer import Tokenizer


@dataclass(slots=True)
class Reader:
    """Ids -> marked text as far as it is certain: whole characters, nothing behind a stop id or stop string."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: Sequence[str]
    text: str = ""
    _held: str = ""
    _ends: list[int] = field(default_factory=list)
    stopped: bool = False
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def feed(self, ids: Iterable[int]) -> None:
        """Take newly sampled ids."""
        for token_id in ids:
            if not self.stopped and token_id in self.stop_ids:
                self.finish()
                self.stopped = True
            if not self.stopped:
                control = self.tokenizer.control_by_id(token_id)
                if control is not None:
                    self._held += self._decoder.decode(b"", final=True) + control.mark
                else:
                    self._held += self._decoder.decode(self.tokenizer.token_bytes(token_id))
                self._release()
            self._ends.append(len(self.text) + len(self._held))

    def finish(self) -> None:
        """Say that no more will come: give out what was held back."""
        if not self.stopped:
            self._held += self._decoder.decode(b"", final=True)
            self._release()
            self.text += self._held
            self._held = ""

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that wrote characters start to end."""
        return bisect_right(self._ends, start), min(bisect_left(self._ends, end) + 1, len(self._ends))

    def _release(self) -> None:
        if not self.stop_strings:
            self.text += self._held
            self._held = ""
            return
        found = first_of(self._held, 0, self.stop_strings)
        if found is not None:
            self.text += self._held[: found[0]]
            self._held, self.stopped = "", True
            return
        keep = held_back(self._held, 0, self.stop_strings)
        cut = len(self._held) - keep
        self.text += self._held[:cut]
        self._held = self._held[cut:]


def first_of(text: str, start: int, delimiters: Sequence[str]) -> tuple[int, str] | None:
    """The leftmost delimiter at or behind `start`, the longest of those that begin there."""
    best: tuple[int, str] | None = None
    for delimiter in delimiters:
        at = text.find(delimiter, start)
        if at >= 0 and (best is None or (at, -len(delimiter)) < (best[0], -len(best[1]))):
            best = at, delimiter
    return best


def held_back(text: str, start: int, delimiters: Sequence[str]) -> int:
    """How many characters at the end may still grow into a delimiter."""
    most = 0
    for delimiter in delimiters:
        for n in range(min(len(delimiter) - 1, len(text) - start), most, -1):
            if text.endswith(delimiter[:n]):
                most = n
                break
    return most
