"""Split completions at delimiters into reasoning, calls and content.

White space that the template writes around a delimiter belongs to the delimiter. It may be missing because models do
not write exactly what templates render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tokentape.chat._assistant_format import AssistantFormat
from tokentape.chat._call_body import ReadCall
from tokentape.chat._call_reader import CallReader
from tokentape.chat._delimiters import before_ends, held_back
from tokentape.chat._parse import Parser
from tokentape.chat._reader import Reader
from tokentape.chat._reply import ToolCall
from tokentape.chat._tokenizer import MARK
from tokentape.types import Tool

_Speech = Literal["reasoning", "content"]
_Region = Literal["reasoning", "content", "call", "between calls"]

_MOST_BLANK = 1000
"""The maximum number of white-space characters that are held back until the text after them arrives."""

_MOST_INDENT = 100
"""The maximum number of white-space characters before a call without delimiters on its line."""


@dataclass(frozen=True, slots=True)
class _Delimiter:
    """A delimiter between two regions of a completion, with the white space that belongs to it."""

    core: str
    enters: Literal["reasoning", "content", "call"]
    space_before: int = 0
    space_after: int = 0
    anywhere: bool = False
    """Whether it is also recognized within the region that it enters, not only at the region's beginning."""
    at_beginning: bool = False
    """Whether it is recognized only before all other text in its region, because text may contain this word."""

    @classmethod
    def of(cls, text: str, enters: _Speech, *, anywhere: bool = False) -> list[_Delimiter]:
        core = text.strip()
        start = text.index(core)
        is_word = enters == "reasoning" and re.match(r"[\w#:]", core) is not None
        return [cls(core, enters, start, len(text) - start - len(core), anywhere, is_word)] if core else []


class RegionParser(Parser):
    """Splits a completion into reasoning, content and calls, region by region."""

    def __init__(self, reader: Reader, tools: Mapping[str, Tool], form: AssistantFormat) -> None:
        super().__init__(reader, tools)
        borders = _borders(form, with_calls=bool(tools))
        self._calls = borders.calls.fresh(tools) if borders.calls is not None else None
        self._ends, self._before_calls = borders.ends, borders.before_calls
        self._end_space = len(form.content_close.last) - len(form.content_close.last.lstrip())
        self._region: _Region = "content"
        self._speech: _Speech = "content"
        """The region of the current text, or of the text before the call that is being read."""
        self._call_at = 0
        self._blank = True
        """Whether the region has only white space so far."""
        self._skip = 0
        """The number of white-space characters still to leave out because they belong to the last delimiter."""
        if form.reasoning is not None and form.reasoning.opened_by_prompt:
            self._region = self._speech = "reasoning"
        elif not form.content_open.strip():
            self._skip = len(form.content_open)

    @property
    def reasoning_open(self) -> bool:
        return self._speech == "reasoning"

    def scan(self, *, final: bool) -> None:
        more = True
        while more:
            if self._region == "call":
                more = self._step_call(final=final)
            elif self._region == "between calls":
                more = self._step_between(final=final)
            else:
                more = self._step_text(final=final)
        if self._region != "call":
            self._reader.forget()

    def _step_text(self, *, final: bool) -> bool:
        """Read through the next delimiter, or all text that can't be part of one. Return whether to continue."""
        reader, ends = self._reader, self._ends[self._speech]
        match = ends.search.search(reader.text, reader.position)
        if match is None:
            end = len(reader.text)
            if not final:
                last, space = reader.text[-1:], max(ends.space_before, self._end_space)
                if last in ends.before_ends or (space and last.isspace()):
                    end -= held_back(reader.text, reader.position, ends.cores)
                    end = self._before_space(end, space)
                if self._blank and self._is_blank(end):
                    return False
            elif self._speech == "content" and reader.stopped:
                end = self._before_space(end, self._end_space)
            self._add_text(end)
            return False
        unsure = 0 if final else held_back(reader.text, reader.position, ends.cores)
        if unsure >= len(reader.text) - match.start():
            # The match may be part of a longer delimiter, or of one that begins earlier.
            return False
        delimiter = ends.delimiters.get(match[0]) or _Delimiter(match[0], "call")
        if delimiter.enters == "call":
            return self._enter_call(match.start(), delimiter)
        repeated = delimiter.enters == self._speech and not delimiter.anywhere
        if (repeated or delimiter.at_beginning) and not self._is_blank(match.start()):
            self._add_text(match.end())
            return True
        self._leave(match.start(), delimiter.space_before)
        reader.take(match.end())
        if delimiter.enters != self._speech or delimiter.anywhere:
            self._parts.interrupt()
        self._region = self._speech = delimiter.enters
        self._blank, self._skip = True, delimiter.space_after
        return True

    def _enter_call(self, position: int, delimiter: _Delimiter) -> bool:
        assert self._calls is not None
        if delimiter.core == "{" and self._calls.begins_lines and not self._begins_line(position):
            self._add_text(position + 1)
            return True
        # White space before a call is left out, but kept before text that turns out not to be a call.
        self._leave(position, delimiter.space_before)
        self._region, self._call_at = "call", position
        return True

    def _step_call(self, *, final: bool) -> bool:
        assert self._calls is not None
        reader = self._reader
        thinking = self._speech == "reasoning"
        call = self._calls.read(reader.text, self._call_at, final=final, ended=reader.ended, within_reasoning=thinking)
        if call is None:
            return False
        is_call = call.name is not None and (call.status == "ok" if thinking else call.status != "unclosed")
        if is_call or (call.status == "unclosed" and not thinking):
            self._record(call)
        if is_call:
            reader.take(call.end)
            self._parts.interrupt()
            self._region, self._speech, self._blank, self._skip = "between calls", "content", True, 0
        else:
            # The text only begins like a call: keep it as text.
            self._region = self._speech
            self._add_no_call(call.end)
        return True

    def _add_no_call(self, end: int) -> None:
        """Add text up to `end` that is not a call. A delimiter at its beginning that also ends content is left out."""
        reader = self._reader
        closing = next(
            (delimiter for delimiter in self._before_calls if reader.text.startswith(delimiter.core, self._call_at)),
            None,
        )
        if closing is None or self._speech == "reasoning":
            self._add_text(end)
            return
        self._add_text(self._call_at)
        reader.take(self._call_at + len(closing.core))
        self._parts.interrupt()
        self._blank, self._skip = True, closing.space_after

    def _record(self, call: ReadCall) -> None:
        if call.name is None:
            return
        spell = self._tokenizer.spell_marks
        start, end = self._reader.tokens(self._call_at, call.end)
        if self._parts.tool_calls:
            start = min(max(start, self._parts.tool_calls[-1].span[1]), end - 1)
        span = start, end
        call_id = _valid(spell(call.id)) if call.id is not None else None
        arguments = spell(call.arguments)
        if call.status in ("ok", "unknown_tool"):
            # In JSON, a control token is part of a string, and its spelling may have a quote.
            arguments = MARK.sub(lambda mark: json.dumps(spell(mark[0]), ensure_ascii=False)[1:-1], call.arguments)
        self._parts.tool_calls.append(ToolCall(_valid(spell(call.name)), _valid(arguments), call.status, span, call_id))

    def _step_between(self, *, final: bool) -> bool:
        assert self._calls is not None
        result = self._calls.skip_between(self._reader.text, self._reader.position, final=final)
        if result is None:
            return False
        self._call_at, another = result
        self._reader.take(self._call_at)
        self._region = "call" if another else "content"
        return True

    def _leave(self, position: int, space_before: int) -> None:
        """End a region before a delimiter and its white space. Drop the region if it has only white space."""
        end = self._before_space(position, space_before)
        if not self._is_blank(end):
            self._add_text(end)

    def _is_blank(self, end: int) -> bool:
        start = self._reader.position
        return self._blank and end - start <= _MOST_BLANK and not self._reader.text[start:end].strip()

    def _begins_line(self, position: int) -> bool:
        text, start = self._reader.text, max(0, position - _MOST_INDENT)
        before = text[start:position].rstrip(" \t")
        return (not before and start == 0) or before.endswith("\n") or MARK.fullmatch(before[-2:]) is not None

    def _before_space(self, end: int, most: int) -> int:
        """Return `end` moved before at most `most` white-space characters that precede it."""
        text = self._reader.text
        while most and end > self._reader.position and text[end - 1].isspace():
            end, most = end - 1, most - 1
        return end

    def _add_text(self, end: int) -> None:
        reader = self._reader
        while self._skip and reader.position < end and reader.text[reader.position].isspace():
            reader.take(reader.position + 1)
            self._skip -= 1
        if reader.position < end:
            self._skip, self._blank = 0, False
            text = reader.take(end)
            self._parts.add(self._speech, text if text.isascii() else self._tokenizer.spell_marks(text))


@dataclass(frozen=True, slots=True)
class _RegionEnds:
    """The delimiters that end a region of a completion."""

    delimiters: Mapping[str, _Delimiter]
    """The delimiters by their `core`."""
    cores: tuple[str, ...]
    search: re.Pattern[str]
    """Matches any delimiter."""
    before_ends: frozenset[str]
    """The characters with which an incomplete delimiter can end."""
    space_before: int
    """The maximum length of the white space before a delimiter that belongs to it."""

    @classmethod
    def of(cls, delimiters: Sequence[_Delimiter], *, marks: bool) -> _RegionEnds:
        """Return the ends for these delimiters and, with `marks`, for all control tokens."""
        cores = tuple(dict.fromkeys(delimiter.core for delimiter in delimiters))
        patterns = [re.escape(core) for core in sorted(cores, key=len, reverse=True)]
        return cls(
            {delimiter.core: delimiter for delimiter in delimiters},
            cores,
            re.compile("|".join([*patterns, *([MARK.pattern] if marks else [])]) or "(?!)"),
            before_ends(cores),
            max((delimiter.space_before for delimiter in delimiters), default=0),
        )


@dataclass(frozen=True, slots=True)
class _Borders:
    """The delimiters that end a format's regions."""

    ends: Mapping[_Speech, _RegionEnds]
    calls: CallReader | None
    before_calls: Sequence[_Delimiter]
    """Delimiters that end content and also begin calls. They are not text, even if no call follows."""


@lru_cache(maxsize=64)
def _borders(form: AssistantFormat, *, with_calls: bool) -> _Borders:
    """Return a format's delimiters, cached because they do not depend on the completion."""
    calls = CallReader(form.calls) if form.calls is not None and with_calls else None
    delimiters = _delimiters(form, calls)
    any_mark = calls is not None and calls.bare
    ends = _Delimiter.of(form.content_end, "content") + _Delimiter.of(form.turn_end, "content")
    begin_calls = [delimiter.core for delimiter in delimiters["content"] if delimiter.enters == "call"]
    return _Borders(
        {region: _RegionEnds.of(ending, marks=any_mark) for region, ending in delimiters.items()},
        calls,
        [end for end in ends if end.core in begin_calls],
    )


def _delimiters(form: AssistantFormat, calls: CallReader | None) -> dict[_Speech, list[_Delimiter]]:
    """Return the delimiters that end content, and those that end reasoning."""
    space = form.calls.space_before if form.calls is not None else 0
    triggers = [_Delimiter(core, "call", space) for core in calls.triggers] if calls is not None else []
    if calls is not None and calls.bare:
        triggers = [_Delimiter("{", "call")]
    content, reasoning = [*triggers], [t for t in triggers if MARK.search(t.core)]
    for text in (form.content_open, form.content_reopen):
        if form.reasoning is None or form.reasoning.open.strip() not in text:
            content += _Delimiter.of(text, "content")
    space_at_end = "" if form.content_end.strip() else form.content_end
    for text in (form.content_end, space_at_end + form.turn_end):
        ends = _Delimiter.of(text, "content", anywhere=True)
        content += [end for end in ends if end.core not in {trigger.core for trigger in triggers}]
    if form.reasoning is not None:
        opening = _Delimiter.of(form.reasoning.open, "reasoning")
        # Some models open reasoning again even if the prompt has opened it.
        content, reasoning = content + opening, reasoning + opening
        # Some models do not close reasoning before a call; a call's control token is clear enough.
        reasoning += _Delimiter.of(form.reasoning.close, "content")
        if MARK.match(form.reasoning.close.strip()):
            # Some models close reasoning twice, or without having opened it.
            content += _Delimiter.of(form.reasoning.close, "content")
    return {"content": content, "reasoning": reasoning}


def _valid(text: str) -> str:
    """Replace lone surrogates, which JSON escapes may decode to, so that the text can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
