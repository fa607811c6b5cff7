"""Parse completions while they are sampled, from ids to content, reasoning and tool calls."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tokentape.chat._reader import Reader, read_text
from tokentape.chat._reply import Reply, ReplyDelta, ReplyParts, ToolCall
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.types import Tool

__all__ = ["Parser", "PlainReader", "Reply", "ReplyDelta", "ReplyParser", "SafeParser", "ToolCall"]

_log = logging.getLogger("tokentape.chat")


class ReplyParser(Protocol):
    """Parses one completion; see `Parser`. An external renderer can have a parser of its own."""

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Add newly sampled ids, and return the new part of the reply that later ids can't change."""
        ...

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """End the completion, and return the rest of the reply and the whole reply."""
        ...


class Parser(ABC):
    """Parses one completion: call `feed` with ids as they arrive, then `finish`. `Renderer.parser` creates parsers."""

    def __init__(self, reader: Reader, tools: Mapping[str, Tool]) -> None:
        """Create a parser for calls of `tools`, by name. `reader` converts the ids to text."""
        self._reader = reader
        self._tools = tools
        self._tokenizer = reader.tokenizer
        self._parts = ReplyParts()

    @property
    @abstractmethod
    def reasoning_open(self) -> bool:
        """Whether the text so far ends inside reasoning."""

    @abstractmethod
    def scan(self, *, final: bool) -> None:
        """Parse the reader's text. `final` means that it is complete."""

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Add newly sampled ids, and return the new part of the reply that later ids can't change."""
        self._reader.feed(ids)
        self.scan(final=False)
        return self._parts.drain()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """End the completion, and return the rest of the reply and the whole reply."""
        self._reader.finish()
        self.scan(final=True)
        reply = Reply(
            content="".join(self._parts.content),
            reasoning="".join(self._parts.reasoning),
            tool_calls=tuple(self._parts.tool_calls),
            reasoning_open=self.reasoning_open,
        )
        return self._parts.drain(), reply


class SafeParser:
    """Wraps a parser, and returns the completion's text as content if that parser fails.

    Deltas that `feed` has returned are never withdrawn. If the parser fails, the reply consists of them and the
    remaining text. If the parser's reply differs from its deltas, the reply is built from the deltas. In both cases,
    `Reply.problem` says so.
    """

    def __init__(
        self, parser: ReplyParser, tokenizer: Tokenizer, stop_ids: frozenset[int], stop_strings: Sequence[str]
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._stop_ids, self._stop_strings = stop_ids, stop_strings
        self._ids: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._problem = ""

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Add newly sampled ids, and return the new part of the reply, which is empty once the parser has failed."""
        fed = list(ids)
        self._ids += fed
        if self._problem:
            return ReplyDelta()
        try:
            return self._returned(self._parser.feed(fed))
        except Exception as error:
            self._problem = _described(error)
            return ReplyDelta()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """End the completion, and return the rest of the reply and the whole reply. Never raises."""
        if not self._problem:
            try:
                rest, reply = self._parser.finish()
                self._returned(rest)
                return rest, self._agreeing(reply)
            except Exception as error:
                self._problem = _described(error)
        _log.warning("the parser failed on a completion (%s); its text is returned as content", self._problem)
        text, returned = self._text(), "".join(self._content)
        if not self._reasoning and not self._calls and text.startswith(returned):
            rest = ReplyDelta(text[len(returned) :])
        else:
            rest = ReplyDelta(f"\n{text}" if returned else text)
        self._returned(rest)
        return rest, Reply("".join(self._content), "".join(self._reasoning), tuple(self._calls), False, self._problem)

    def _returned(self, delta: ReplyDelta) -> ReplyDelta:
        calls = [call.name + call.arguments for call in delta.tool_calls]
        # An overriding parser may return anything. This raises unless it is text that can be sent and recorded.
        "".join([delta.content, delta.reasoning, *calls]).encode()
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        self._calls += delta.tool_calls
        return delta

    def _agreeing(self, reply: Reply) -> Reply:
        """Return `reply`. If the deltas that were returned differ from it, replace its texts and calls by theirs."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [(call.name, call.arguments) for call in reply.calls_for_client]
        if (reply.content, reply.reasoning) == (content, reasoning) and calls == [
            (call.name, call.arguments) for call in self._calls
        ]:
            return reply
        problem = "the parser's reply differs from the deltas that it returned before; the deltas are kept"
        _log.warning("%s", problem)
        unclosed = tuple(call for call in reply.tool_calls if call.status == "unclosed")
        tool_calls = (*self._calls, *unclosed)
        return replace(reply, content=content, reasoning=reasoning, tool_calls=tool_calls, problem=problem)

    def _text(self) -> str:
        """Return the text of all ids before the stop id or stop string, with control tokens spelled out."""
        return self._tokenizer.spell_marks(read_text(self._tokenizer, self._ids, self._stop_ids, self._stop_strings))


def _described(error: Exception) -> str:
    """Return an error's type and the line that raised it, without its text, which may quote the completion."""
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(cause).__name__}{place}"


class PlainReader(Parser):
    """Reads one completion as plain text, which ends before the stop id or stop string.

    Special tokens are left out, as servers do.
    """

    reasoning_open = False

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], stop_strings: Sequence[str] = ()) -> None:
        super().__init__(Reader(tokenizer, stop_ids, stop_strings), {})

    def scan(self, *, final: bool) -> None:
        marked = self._reader.take(len(self._reader.text))
        self._reader.forget()
        self._parts.add("content", MARK.sub(lambda mark: self._spelled(mark[0]), marked))

    def _spelled(self, mark: str) -> str:
        control = self._tokenizer.control_of_mark(mark)
        return "" if control.special else control.content
