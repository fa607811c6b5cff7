"""Sampled ids -> assistant message, by the delimiters that the model's own template writes.

Ids are turned into marked text first, so that a `<tool_call>` token opens a call and the same letters do not. One
scanner serves streams and whole completions; it holds back no more than may still become a delimiter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tokentape.chat.assistant_format import AssistantFormat
from tokentape.chat.channels import ChannelScanner
from tokentape.chat.reader import Reader
from tokentape.chat.regions import RegionScanner
from tokentape.chat.reply import Reply, ReplyDelta, ReplyParts, ToolCall
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.types import Tool

__all__ = ["Parser", "Reply", "ReplyDelta", "ToolCall"]


class Scanner(Protocol):
    """Reads marked text into the parts of a reply."""

    @property
    def reasoning_open(self) -> bool:
        """Sampling ended, or stands, inside reasoning."""
        ...

    def scan(self, *, final: bool) -> None:
        """Read what has arrived; `final`: no more will come."""
        ...


class Parser:
    """Parses one completion: `feed` ids as they arrive, then `finish`. Made by `Renderer.parser`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: AssistantFormat,
        *,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str] = (),
        tools: Sequence[Tool] = (),
    ) -> None:
        close = form.content_close.last.strip()
        if close and not MARK.search(close):
            # The turn's end is no token of this vocabulary, so the engine can't stop at it.
            stop_strings = [*stop_strings, close]
        known = {tool["function"]["name"]: tool for tool in tools}
        self._reader = Reader(tokenizer, stop_ids, stop_strings)
        self._parts = ReplyParts()
        self._scanner: Scanner
        if form.channels is not None:
            self._scanner = ChannelScanner(tokenizer, self._reader, self._parts, form.channels, known)
        else:
            self._scanner = RegionScanner(tokenizer, self._reader, self._parts, form, known)

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Take newly sampled ids; return what can be told of the reply already."""
        self._reader.feed(ids)
        self._scanner.scan(final=False)
        return self._parts.told()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """Say that sampling ended; return the rest and the whole reply."""
        self._reader.finish()
        self._scanner.scan(final=True)
        reply = Reply(
            content="".join(self._parts.content),
            reasoning="".join(self._parts.reasoning),
            tool_calls=tuple(self._parts.tool_calls),
            reasoning_open=self._scanner.reasoning_open,
        )
        return self._parts.told(), reply
