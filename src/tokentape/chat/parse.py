"""Sampled ids -> assistant message, by the delimiters that the model's own template writes.

Ids are turned into marked text first, so that a `<tool_call>` token opens a call and the same letters do not. One
state machine serves streams and whole completions; it holds back no more than may still become a delimiter.
White space that the template writes around a delimiter belongs to it, and may be missing: models do not write exactly
what templates render.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokentape.chat.assistant_format import AssistantFormat
from tokentape.chat.call_reader import CallReader, CallStatus
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.types import Tool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: str
    """JSON text of the arguments; with `bad_arguments` and `unclosed` whatever stood there."""
    status: CallStatus
    span: tuple[int, int]
    """Half-open range of completion tokens, delimiters included."""
    id: str | None = None
    """The id the model gave it, in formats that have one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed completion."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reasoning_open: bool
    """Sampling ended inside reasoning: a bridge has to close it first."""

    @property
    def calls_for_client(self) -> tuple[ToolCall, ...]:
        """The calls a client is told of. An unclosed call is told as content, since it was never made."""
        return tuple(call for call in self.tool_calls if call.status != "unclosed")


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What newly sampled tokens added to the reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class _Delimiter:
    """What ends one region of a completion and begins another, with the white space that belongs to it."""

    core: str
    enters: Literal["reasoning", "content", "call"]
    space_before: int = 0
    space_after: int = 0

    @classmethod
    def of(cls, text: str, enters: Literal["reasoning", "content", "call"]) -> _Delimiter | None:
        core = text.strip()
        if not core:
            return None
        at = text.index(core)
        return cls(core, enters, at, len(text) - at - len(core))


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
        self._tokenizer = tokenizer
        self._reader = _Reader(tokenizer, stop_ids, stop_strings)
        self._known_tools = {tool["function"]["name"]: tool for tool in tools}
        self._calls_of = CallReader(form.calls, self._known_tools) if form.calls is not None and tools else None
        self._leaves = _leaves(form, self._calls_of)
        self._end_space = len(form.content_close) - len(form.content_close.lstrip())
        self._state: Literal["reasoning", "content", "call"] = "content"
        self._skip = 0
        """White space still to be left out because it belongs to the delimiter before."""
        if form.reasoning is not None and form.reasoning.opened_by_prompt:
            self._state = "reasoning"
        elif not form.content_open.strip():
            self._skip = len(form.content_open)
        self._position = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        """Take newly sampled ids; return what can be told of the reply already."""
        self._reader.feed(ids)
        return self._advance(final=False)

    def finish(self) -> tuple[ReplyDelta, Reply]:
        """Say that sampling ended; return the rest and the whole reply."""
        self._reader.finish()
        rest = self._advance(final=True)
        reply = Reply(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
            reasoning_open=self._state == "reasoning",
        )
        return rest, reply

    def _advance(self, *, final: bool) -> ReplyDelta:
        content, reasoning, calls = len(self._content), len(self._reasoning), len(self._calls)
        while self._step_call(final=final) if self._state == "call" else self._step_text(final=final):
            pass
        return ReplyDelta(
            "".join(self._content[content:]),
            "".join(self._reasoning[reasoning:]),
            tuple(call for call in self._calls[calls:] if call.status != "unclosed"),
        )

    def _step_text(self, *, final: bool) -> bool:
        """Move over one delimiter, or over text that is surely none; False when there is nothing more to do."""
        text, leaves = self._reader.text, self._leaves[self._state]
        found = _first(text, self._position, [leave.core for leave in leaves])
        if found is None:
            end = len(text)
            if not final:
                end -= _held_back(text, self._position, [leave.core for leave in leaves])
                end = self._before_space(end, max((leave.space_before for leave in leaves), default=0))
            elif self._state == "content" and self._reader.stopped:
                end = self._before_space(end, self._end_space)
            self._take(end)
            return False
        at, core = found
        delimiter = next(leave for leave in leaves if leave.core == core)
        self._take(self._before_space(at, delimiter.space_before))
        self._state = delimiter.enters
        self._skip = delimiter.space_after
        self._position = at if delimiter.enters == "call" else at + len(core)
        return True

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
            region = self._reasoning if self._state == "reasoning" else self._content
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
            self._content.append(self._tokenizer.spell_marks(raw))
        if call.name is not None:
            span = self._reader.tokens(self._position, call.end)
            arguments = self._tokenizer.spell_marks(call.arguments)
            self._calls.append(ToolCall(self._tokenizer.spell_marks(call.name), arguments, call.status, span, call.id))
        self._position = call.end
        self._state = "call" if call.more else "content"
        self._skip = call.space_after
        return bool(raw)


def _leaves(form: AssistantFormat, calls: CallReader | None) -> dict[str, list[_Delimiter]]:
    """Per region the delimiters that end it."""
    triggers = [_Delimiter(core, "call", space) for core, space in calls.triggers] if calls is not None else []
    content: list[_Delimiter | None] = [*triggers]
    reasoning: list[_Delimiter | None] = []
    if form.reasoning is not None:
        content.append(_Delimiter.of(form.reasoning.open, "reasoning"))
        # Models forget to close their reasoning before a call; a call's control token is clear enough.
        reasoning = [_Delimiter.of(form.reasoning.close, "content"), *(t for t in triggers if MARK.match(t.core))]
    return {
        "content": [leave for leave in content if leave is not None],
        "reasoning": [leave for leave in reasoning if leave is not None],
    }


@dataclass(slots=True)
class _Reader:
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
        found = _first(self._held, 0, self.stop_strings)
        if found is not None:
            self.text += self._held[: found[0]]
            self._held, self.stopped = "", True
            return
        keep = _held_back(self._held, 0, self.stop_strings)
        cut = len(self._held) - keep
        self.text += self._held[:cut]
        self._held = self._held[cut:]


def _first(text: str, start: int, delimiters: Sequence[str]) -> tuple[int, str] | None:
    """The leftmost delimiter at or behind `start`, the longest of those that begin there."""
    best: tuple[int, str] | None = None
    for delimiter in delimiters:
        at = text.find(delimiter, start)
        if at >= 0 and (best is None or (at, -len(delimiter)) < (best[0], -len(best[1]))):
            best = at, delimiter
    return best


def _held_back(text: str, start: int, delimiters: Sequence[str]) -> int:
    """How many characters at the end may still grow into a delimiter."""
    most = 0
    for delimiter in delimiters:
        for n in range(min(len(delimiter) - 1, len(text) - start), most, -1):
            if text.endswith(delimiter[:n]):
                most = n
                break
    return most
