"""Define the parsed form of a completion: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CallStatus = Literal["ok", "bad_arguments", "unclosed", "unknown_tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """The arguments as JSON text. With status `bad_arguments` or `unclosed`, the text as the model wrote it."""
    status: CallStatus
    span: tuple[int, int]
    """The half-open range of completion tokens, including delimiters. A token that ends one call and begins the next
    belongs to the first."""
    id: str | None = None
    """The id that the model wrote, if the format has call ids."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed completion."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reasoning_open: bool
    """Whether sampling ended inside reasoning, which a bridge must then close first."""
    problem: str = ""
    """How the parser failed or contradicted its deltas (see `SafeParser`); empty if it did neither."""

    @property
    def calls_for_client(self) -> tuple[ToolCall, ...]:
        """The calls that clients get. Unclosed calls are left out because their text is content."""
        return tuple([call for call in self.tool_calls if call.status != "unclosed"])


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """The part of a reply that newly sampled tokens added."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class ReplyParts:
    """The parts of a reply that is being parsed.

    Content from several places, such as before and after a call, is joined with line breaks, and so is reasoning.
    """

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    _drained: tuple[int, int, int] = (0, 0, 0)
    """The number of entries in each list that `drain` has returned."""
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
        """Return the parts added since the last `drain`, without unclosed calls."""
        content, reasoning, calls = self._drained
        self._drained = len(self.content), len(self.reasoning), len(self.tool_calls)
        return ReplyDelta(
            "".join(self.content[content:]),
            "".join(self.reasoning[reasoning:]),
            tuple([call for call in self.tool_calls[calls:] if call.status != "unclosed"]),
        )

    def interrupt(self) -> None:
        """Begin a new line with the next content and the next reasoning."""
        self._interrupted = {"content": True, "reasoning": True}
