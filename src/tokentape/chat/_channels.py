"""Parse completions in channels. Each part consists of a header that names its kind, a mark, its text, and a mark.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{...}

A template has channels if it frames reasoning and content the same way, by two control tokens with a word between
them. The generation prompt leaves a header open. In a header, a call's recipient may come before or after the channel
name: templates and models differ. Words in place of a header that the template never writes in headers are content:
the model left out the header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokentape.chat._assistant_format import Channels
from tokentape.chat._call_body import object_arguments
from tokentape.chat._parse import Parser
from tokentape.chat._reader import Reader
from tokentape.chat._reply import ToolCall
from tokentape.chat._tokenizer import MARK
from tokentape.types import Tool


class ChannelParser(Parser):
    """Splits a completion with channels into reasoning, content and calls, part by part."""

    def __init__(self, reader: Reader, tools: Mapping[str, Tool], channels: Channels) -> None:
        super().__init__(reader, tools)
        self._channels = channels
        self._header_at = 0
        self._seek = 0
        """Where to continue searching for the end of the open header or call."""
        self._region: str = "header"
        self._name = ""
        prefix, _, place = channels.call_open.partition("=")
        self._recipient = re.compile(rf"(?:^|\s){re.escape(prefix)}=(?:{re.escape(place)})?(\S+)" if prefix else "(?!)")
        self._words = frozenset(channels.words)
        others = [mark for mark in channels.marks if mark != channels.header_close]
        self._part_end = re.compile("|".join(map(re.escape, others)))
        self._header_end = re.compile(f"{re.escape(channels.header_close)}|{re.escape(channels.part_close)}")

    @property
    def reasoning_open(self) -> bool:
        return self._region == "reasoning" and not self._reader.stopped

    def scan(self, *, final: bool) -> None:
        while self._step_header(final=final) if self._region == "header" else self._step_part(final=final):
            pass
        if self._region in ("content", "reasoning"):
            self._reader.forget()

    def _step_header(self, *, final: bool) -> bool:
        reader, channels = self._reader, self._channels
        end = self._header_end.search(reader.text, max(self._seek, reader.position))
        self._seek = len(reader.text) if end is None else 0
        if end is None and not final:
            return False
        if end is None or end[0] == channels.part_close:
            # The model wrote text without a header, or its completion was cut off within one.
            self._header_at = reader.position
            unframed = reader.take(end.start() if end else len(reader.text))
            recipient = self._recipient.search(MARK.sub(" ", unframed))
            is_call = recipient and (MARK.search(unframed) or recipient[1] in self._tools)
            if end is None and recipient and is_call and self._tools and not reader.ended:
                self._name = recipient[1]
                self._add_call("", len(reader.text), ended=False)
                return False
            for n, text in enumerate(MARK.split(unframed)):
                if n == 0 or not self._is_header(text, cut_off=end is None):
                    self._add_text("content", text)
            if end is not None:
                reader.take(end.end())
            return end is not None
        self._header_at = reader.position
        named = MARK.split(reader.take(end.start()))
        reader.take(end.end())
        for n, text in enumerate(named):
            match = self._recipient.search(text)
            before, after = (text[: match.start()], text[match.end() :]) if match else (text, "")
            # The model may name a channel that the template never writes.
            other_channel = 0 < n == len(named) - 1 and self._is_type_or_less(before)
            unknown = ["" if other_channel or self._is_header(before) else before]
            unknown.append("" if self._is_type_or_less(after) else after)
            for words in filter(None, unknown):
                self._add_text("content", words)
                self._parts.interrupt()
                named[n] = named[n].replace(words, " ")
        header = " ".join(named)
        recipient = self._recipient.search(header)
        if recipient is not None and self._tools:
            self._region, self._name = "call", recipient[1]
        else:
            self._region = "reasoning" if channels.reasoning_name in header.split() else "content"
        return True

    def _step_part(self, *, final: bool) -> bool:
        reader = self._reader
        call = self._region == "call"
        match = self._part_end.search(reader.text, max(self._seek, reader.position) if call else reader.position)
        end = match.start() if match else len(reader.text)
        self._seek = end if call and match is None else 0
        if call:
            if match is None and not final:
                return False
            raw = self._tokenizer.spell_marks(reader.take(end))
            self._add_call(raw, end, ended=match is not None or reader.ended)
        else:
            self._add_text(self._region, reader.take(end))
        if match is None:
            return False
        self._parts.interrupt()
        self._region = "header"
        if match[0] == self._channels.part_close:
            reader.take(match.end())
        return True

    def _is_header(self, text: str, *, cut_off: bool = False) -> bool:
        """Return whether a text has only known header words, and optionally a recipient followed by at most a type.

        With `cut_off`, its last word may be the beginning of a known word.
        """
        match = self._recipient.search(text)
        if match is not None:
            return self._is_type_or_less(text[match.end() :]) and self._is_header(text[: match.start()])
        *before, last = text.split() or [""]
        begins = cut_off and any(word.startswith(last) for word in self._words)
        return self._words.issuperset(before) and (not last or last in self._words or begins)

    def _is_type_or_less(self, after: str) -> bool:
        """Return whether a text has at most one unknown word, such as the type after a recipient."""
        return len([word for word in after.split() if word not in self._words]) <= 1

    def _add_text(self, region: str, text: str) -> None:
        self._parts.add("reasoning" if region == "reasoning" else "content", self._tokenizer.spell_marks(text))

    def _add_call(self, raw: str, end: int, *, ended: bool) -> None:
        arguments, status = object_arguments(raw)
        if not ended and not (status == "ok" and raw.strip()):
            status = "unclosed"
            self._add_text("content", self._reader.text[self._header_at : end])
        elif status == "ok" and self._name not in self._tools:
            status = "unknown_tool"
        span = self._reader.tokens(self._header_at, end)
        self._parts.tool_calls.append(ToolCall(self._name, arguments, status, span))
