"""Sampled ids -> text and nothing else, for callers that make their own prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokentape.chat.reader import Reader
from tokentape.chat.reply import Reply, ReplyDelta
from tokentape.chat.tokenizer import MARK, Tokenizer


@dataclass(slots=True)
class PlainReader:
    """Reads one completion as text: `feed` ids as they arrive, then `finish`.

    Special tokens are left out of the text, as servers do; nothing stands in it behind a stop id or stop string.
    """

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    stop_strings: Sequence[str] = ()
    _reader: Reader = field(init=False)
    _told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = Reader(self.tokenizer, self.stop_ids, self.stop_strings)

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Take newly sampled ids; return the text that is certain now."""
        self._reader.feed(ids)
        return self._tell()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """Say that sampling ended; return the rest of the text, and all of it."""
        self._reader.finish()
        rest = self._tell()
        return rest, Reply("".join(self._told), "", (), reasoning_open=False)

    def _tell(self) -> ReplyDelta:
        marked = self._reader.take(len(self._reader.text))
        self._reader.forget()
        text = MARK.sub(lambda mark: self._spelled(mark[0]), marked)
        self._told.append(text)
        return ReplyDelta(text)

    def _spelled(self, mark: str) -> str:
        control = self.tokenizer.control_of_mark(mark)
        return "" if control.special else control.content
