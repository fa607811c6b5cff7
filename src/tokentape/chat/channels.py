"""Completions in channels: a header that says what a part is, a mark, the part, a mark.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{...}

Found where a template frames reasoning and content alike, by the same two control tokens with a word between them.
The generation prompt leaves a header open. Within a header a call's recipient may stand before or behind the channel's
name: templates and models differ in that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tokentape.chat.assistant_format import Channels
from tokentape.chat.reader import Reader
from tokentape.chat.reply import CallStatus, ReplyParts, ToolCall
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.types import Tool


class ChannelScanner:
    """Scans a completion part by part."""

    def __init__(
        self, tokenizer: Tokenizer, reader: Reader, parts: ReplyParts, channels: Channels, tools: Mapping[str, Tool]
    ) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._parts = parts
        self._channels = channels
        self._tools = tools
        self._position = 0
        self._header_at = 0
        self._region: str = "header"
        self._name = ""

    @property
    def reasoning_open(self) -> bool:
        """Sampling ended, or stands, inside reasoning."""
        return self._region == "reasoning" and not self._reader.stopped

    def scan(self, *, final: bool) -> None:
        """Read what the reader has; `final`: no more will come."""
        while self._step_header(final=final) if self._region == "header" else self._step_part(final=final):
            pass

    def _step_header(self, *, final: bool) -> bool:
        text = self._reader.text
        at = text.find(self._channels.header_close, self._position)
        if at < 0:
            rest = text[self._position :]
            if final and not MARK.search(rest):
                # No header at all: the model just spoke.
                self._parts.content.append(rest)
                self._position = len(text)
            return False
        header = MARK.sub(" ", text[self._position : at])
        self._header_at = self._position
        self._position = at + len(self._channels.header_close)
        recipient = (
            re.search(rf"{re.escape(self._channels.call_open)}(\S+)", header) if self._channels.call_open else None
        )
        if recipient is not None:
            self._region, self._name = "call", recipient[1]
        else:
            self._region = "reasoning" if self._channels.reasoning_name in header.split() else "content"
        return True

    def _step_part(self, *, final: bool) -> bool:
        text = self._reader.text
        end = MARK.search(text, self._position)
        at = end.start() if end else len(text)
        if self._region == "call":
            if end is None and not final:
                return False
            self._add_call(text[self._position : at], at, ended=end is not None or self._reader.stopped)
        else:
            region = self._parts.reasoning if self._region == "reasoning" else self._parts.content
            region.append(text[self._position : at])
        self._position = at
        if end is None:
            return False
        self._region = "header"
        if end[0] == self._channels.part_close:
            self._position = end.end()
        return True

    def _add_call(self, raw: str, end: int, *, ended: bool) -> None:
        try:
            valid = isinstance(json.loads(raw), dict)
        except (ValueError, RecursionError):
            valid = False
        status: CallStatus = "ok" if self._name in self._tools else "unknown_tool"
        if not ended and not valid:
            status = "unclosed"
            self._parts.content.append(self._tokenizer.spell_marks(self._reader.text[self._header_at : end]))
        elif not valid:
            status = "bad_arguments"
        span = self._reader.tokens(self._header_at, end)
        self._parts.tool_calls.append(ToolCall(self._name, raw, status, span))
