"""Define the parsed form of a completion: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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

    def message(self) -> dict[str, Any]:
        """Return the assistant message that clients get, as `Renderer.bridge` and `Renderer.render` take it.

        A call has the id that the model wrote, or None. If tool results name a call by its id, set one first.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = self.calls_for_client
        if calls:
            message["tool_calls"] = [function_call(call.id, call.name, call.arguments) for call in calls]
        return message


def function_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as an entry of a message's `tool_calls`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
    _interrupted: set[str] = field(default_factory=set)

    def add(self, region: Literal["content", "reasoning"], text: str) -> None:
        if not text:
            return
        parts = self.content if region == "content" else self.reasoning
        if parts and region in self._interrupted and not parts[-1].endswith("\n") and not text.startswith("\n"):
            text = f"\n{text}"
        self._interrupted.discard(region)
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
        self._interrupted = {"content", "reasoning"}
