"""A parser that never fails: sampled ids are never lost because a completion could not be read."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tokentape.chat.overrides import ReplyParser
from tokentape.chat.reader import Reader
from tokentape.chat.reply import Reply, ReplyDelta, ToolCall
from tokentape.chat.tokenizer import Tokenizer

_log = logging.getLogger("tokentape.chat")


class SafeParser:
    """Parses one completion with another parser, and returns its text as content where that one fails.

    What was returned by `feed` stays: the reply holds it, and after it the text that is left. A reply that differs from
    what `feed` returned is replaced by what was returned. Either way `Reply.problem` says so.
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
        """Take newly sampled ids; return what can be said of the reply already."""
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
        """Say that sampling ended; return the rest and the whole reply. Never raises."""
        if not self._problem:
            try:
                rest, reply = self._parser.finish()
                self._returned(rest)
                return rest, self._agreeing(reply)
            except Exception as error:
                self._problem = _described(error)
        _log.warning("a completion was not parsed (%s); its text is returned as content", self._problem)
        text, said = self._text(), "".join(self._content)
        if not self._reasoning and not self._calls and text.startswith(said):
            rest = ReplyDelta(text[len(said) :])
        else:
            rest = ReplyDelta(f"\n{text}" if said else text)
        self._returned(rest)
        return rest, Reply("".join(self._content), "".join(self._reasoning), tuple(self._calls), False, self._problem)

    def _returned(self, delta: ReplyDelta) -> ReplyDelta:
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        self._calls += delta.tool_calls
        return delta

    def _agreeing(self, reply: Reply) -> Reply:
        """Return the reply, or what was returned before where that is something else."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [(call.name, call.arguments) for call in reply.calls_for_client]
        if (reply.content, reply.reasoning) == (content, reasoning) and calls == [
            (call.name, call.arguments) for call in self._calls
        ]:
            return reply
        problem = "the parser's reply differs from what it returned before; what was returned before is kept"
        _log.warning("%s", problem)
        unclosed = tuple(call for call in reply.tool_calls if call.status == "unclosed")
        kept = (*self._calls, *unclosed)
        return replace(reply, content=content, reasoning=reasoning, tool_calls=kept, problem=problem)

    def _text(self) -> str:
        """Return the text of all ids up to what ended them, with control tokens spelled out."""
        reader = Reader(self._tokenizer, self._stop_ids, self._stop_strings)
        reader.feed(self._ids)
        reader.finish()
        return self._tokenizer.spell_marks(reader.text)


def _described(error: Exception) -> str:
    """Name an error and the place that raised it, without its text, which may quote the completion."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
