"""What a completion says once it is parsed: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CallStatus = Literal["ok", "bad_arguments", "unclosed", "unknown_tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: str
    """JSON text of the arguments; with `bad_arguments` and `unclosed` whatever stood there."""
    status: CallStatus
    span: tuple[int, int]
    """Half-open range of completion tokens, delimiters included. A token that ends one call and begins the next is the
    first one's."""
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
    problem: str = ""
    """Why the completion was not parsed, or not as a parser said: its text is content then. Empty where it was."""

    @property
    def calls_for_client(self) -> tuple[ToolCall, ...]:
        """The calls that clients get. An unclosed call is content, since it was never made."""
        return tuple(call for call in self.tool_calls if call.status != "unclosed")


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What newly sampled tokens added to the reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class ReplyParts:
    """A reply while it grows.

    What is said in several places, before and after a call say, comes out as several lines.
    """

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    _drained: tuple[int, int, int] = (0, 0, 0)
    """How much of each `drain` has returned."""
    _interrupted: dict[str, bool] = field(default_factory=lambda: {"content": False, "reasoning": False})

    def add(self, region: Literal["content", "reasoning"], text: str) -> None:
        if not text:
            return
        parts = self.content if region == "content" else self.reasoning
        if parts and self._interrupted[region] and not parts[-1].endswith("\n") and not text.startswith("\n"):
            text = f"\n{text}"
        self._interrupted[region] = False
        parts.append(text)

    def drain(self) -> ReplyDelta:
        """Return what was added since this was asked before, but for unclosed calls."""
        content, reasoning, calls = self._drained
        self._drained = len(self.content), len(self.reasoning), len(self.tool_calls)
        return ReplyDelta(
            "".join(self.content[content:]),
            "".join(self.reasoning[reasoning:]),
            tuple([call for call in self.tool_calls[calls:] if call.status != "unclosed"]),
        )

    def interrupt(self) -> None:
        """Say that what was said is over, and something else comes."""
        self._interrupted = {"content": True, "reasoning": True}
