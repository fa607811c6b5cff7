"""Sampled ids -> marked text, as they arrive."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
        fresh: list[str] = []
        end = self._ends[-1] if self._ends else 0
        decode, token_bytes, control_by_id = (
            self._decoder.decode,
            self.tokenizer.token_bytes,
            self.tokenizer.control_by_id,
        )
        for token_id in ids:
            if not self.stopped:
                control = control_by_id(token_id)
                self.ended = token_id in self.stop_ids
                if control is not None or self.ended:
                    arrived = decode(b"", final=True)
                    arrived += control.mark if control is not None and not self.ended else ""
                else:
                    arrived = decode(token_bytes(token_id))
                fresh.append(self._release(arrived, final=self.ended) if self.stop_strings else arrived)
                self.stopped = self.stopped or self.ended
                end += len(arrived)
            self._ends.append(end)
        self.text += "".join(fresh)

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
