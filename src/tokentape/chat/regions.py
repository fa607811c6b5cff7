"""Completions that are told apart by delimiters: reasoning between tags, calls between tags, the rest content.

White space that the template writes around a delimiter belongs to it, and may be missing: models do not write exactly
what templates render.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokentape.chat.assistant_format import AssistantFormat
from tokentape.chat.call_reader import CallReader
from tokentape.chat.reader import Reader, first_of, held_back
from tokentape.chat.reply import ReplyParts, ToolCall
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.types import Tool

_Region = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class _Delimiter:
    """What ends one region of a completion and begins another, with the white space that belongs to it."""

    core: str
    enters: _Region
    space_before: int = 0
    space_after: int = 0

    @classmethod
    def of(cls, text: str, enters: _Region) -> _Delimiter | None:
        core = text.strip()
        if not core:
            return None
        at = text.index(core)
        return cls(core, enters, at, len(text) - at - len(core))


class RegionScanner:
    """Scans a completion region by region."""

    def __init__(
        self, tokenizer: Tokenizer, reader: Reader, parts: ReplyParts, form: AssistantFormat, tools: Mapping[str, Tool]
    ) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._parts = parts
        self._calls_of = CallReader(form.calls, tools) if form.calls is not None and tools else None
        self._leaves = _leaves(form, self._calls_of)
        self._end_space = len(form.content_close) - len(form.content_close.lstrip())
        self._position = 0
        self._region: _Region = "content"
        self._skip = 0
        """White space still to be left out because it belongs to the delimiter before."""
        if form.reasoning is not None and form.reasoning.opened_by_prompt:
            self._region = "reasoning"
        elif not form.content_open.strip():
            self._skip = len(form.content_open)

    @property
    def reasoning_open(self) -> bool:
        """Sampling ended, or stands, inside reasoning."""
        return self._region == "reasoning"

    def scan(self, *, final: bool) -> None:
        """Read what the reader has; `final`: no more will come."""
        while self._step_call(final=final) if self._region == "call" else self._step_text(final=final):
            pass

    def _step_text(self, *, final: bool) -> bool:
        """Move over one delimiter, or over text that is surely none; False when there is nothing more to do."""
        text, leaves = self._reader.text, self._leaves[self._region]
        if self._may_be_bare_call():
            if final and self._calls_of is not None and self._calls_of.is_bare_call(text, self._position):
                self._region = "call"
                return True
            if not final:
                return False
        found = first_of(text, self._position, [leave.core for leave in leaves])
        if found is None:
            end = len(text)
            if not final:
                end -= held_back(text, self._position, [leave.core for leave in leaves])
                end = self._before_space(end, max((leave.space_before for leave in leaves), default=0))
            elif self._region == "content" and self._reader.stopped:
                end = self._before_space(end, self._end_space)
            self._take(end)
            return False
        at, core = found
        delimiter = next(leave for leave in leaves if leave.core == core)
        self._take(self._before_space(at, delimiter.space_before))
        self._region = delimiter.enters
        self._skip = delimiter.space_after
        self._position = at if delimiter.enters == "call" else at + len(core)
        return True

    def _may_be_bare_call(self) -> bool:
        """Whether calls have no delimiters and this may be one: nothing was said yet and a brace comes first."""
        if self._calls_of is None or not self._calls_of.bare or self._parts.content:
            return False
        start = MARK.sub("", self._reader.text[self._position : self._position + 64]).lstrip()
        return not start or start[0] == "{"

    def _before_space(self, end: int, most: int) -> int:
        """`end` moved back over at most `most` characters of white space."""
        text = self._reader.text
        while most and end > self._position and text[end - 1].isspace():
            end, most = end - 1, most - 1
        return end

    def _take(self, end: int) -> None:
        """Add the text up to `end` to the open region."""
        text = self._reader.text
        while self._skip and self._position < end and text[self._position].isspace():
            self._position, self._skip = self._position + 1, self._skip - 1
        if self._position < end:
            self._skip = 0
            region = self._parts.reasoning if self._region == "reasoning" else self._parts.content
            region.append(self._tokenizer.spell_marks(text[self._position : end]))
            self._position = end

    def _step_call(self, *, final: bool) -> bool:
        assert self._calls_of is not None
        text = self._reader.text
        call = self._calls_of.read(text, self._position, final=final)
        if call is None:
            return False
        raw = text[self._position : call.end]
        if call.name is None or call.status == "unclosed":
            # Opened like a call, but nothing that was ever called: for the client it stays what it is, text.
            self._parts.content.append(self._tokenizer.spell_marks(raw))
        if call.name is not None:
            span = self._reader.tokens(self._position, call.end)
            arguments = self._tokenizer.spell_marks(call.arguments)
            self._parts.tool_calls.append(
                ToolCall(self._tokenizer.spell_marks(call.name), arguments, call.status, span, call.id)
            )
        self._position = call.end
        self._region = "call" if call.more else "content"
        self._skip = call.space_after
        return bool(raw)


def _leaves(form: AssistantFormat, calls: CallReader | None) -> dict[str, list[_Delimiter]]:
    """Per region the delimiters that end it."""
    triggers = [_Delimiter(core, "call", space) for core, space in calls.triggers] if calls is not None else []
    content: list[_Delimiter | None] = [*triggers]
    reasoning: list[_Delimiter | None] = []
    if form.reasoning is not None:
        content.append(_Delimiter.of(form.reasoning.open, "reasoning"))
        if form.content_open.strip() == form.reasoning.close.strip():
            # Turns without reasoning begin with the delimiter that would close it.
            content.append(_Delimiter.of(form.content_open, "content"))
        # Models forget to close their reasoning before a call; a call's control token is clear enough.
        reasoning = [_Delimiter.of(form.reasoning.close, "content"), *(t for t in triggers if MARK.match(t.core))]
    return {
        "content": [leave for leave in content if leave is not None],
        "reasoning": [leave for leave in reasoning if leave is not None],
    }
