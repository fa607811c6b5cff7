"""Products with one planted fault each, which the oracle must find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.generator.conversations import Message
from tests.generator.product import Product
from tokentape.chat._certificate import Continuation
from tokentape.chat._parse import Reply
from tokentape.errors import TemplateRefused


class AlwaysLocal(Product):
    """Says of every continuation that it is local and append-only."""

    def row(self, *args: Any) -> Continuation | None:
        row = super().row(*args)
        return row and replace(row, strategy="local", append_only="yes")

    def strategy(self, *args: Any) -> str:
        return "local"


class AlwaysForks(Product):
    """Never bridges."""

    def row(self, *args: Any) -> Continuation | None:
        row = super().row(*args)
        return row and replace(row, strategy="fork")

    def strategy(self, *args: Any) -> str:
        return "fork"


class OneWrongToken(Product):
    """Changes the last token of every bridge."""

    def bridge(self, *args: Any) -> list[int]:
        *ids, last = super().bridge(*args)
        return [*ids, last - 1]


class DropsNewline(Product):
    """Drops the first token of every bridge."""

    def bridge(self, *args: Any) -> list[int]:
        return super().bridge(*args)[1:]


class RepeatsStop(Product):
    """Appends the stop token that was sampled already."""

    def bridge(self, completion: Sequence[int], *args: Any) -> list[int]:
        return [completion[-1], *super().bridge(completion, *args)]


class OtherPrompt(Product):
    """Puts another token at the end of prompts."""

    def render(self, *args: Any) -> list[int]:
        *ids, last = super().render(*args)
        return [*ids, last - 1]


class EncodesEverything(Product):
    """Encodes callers' texts like the template's own, so they can become control tokens."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        text = self.renderer.tokenizer.decode(super().render(messages, tools))
        return self.renderer.tokenizer.encode_plain(text)


class RefusesTools(Product):
    """Refuses everything after a call."""

    def strategy(self, history: Any, reply: Message, new: Any, tools: Any) -> str:
        if reply.get("tool_calls"):
            raise TemplateRefused("no calls here")
        return super().strategy(history, reply, new, tools)


class RefusesSystem(Product):
    """Refuses prompts with a system message."""

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        if messages[0]["role"] == "system":
            raise TemplateRefused("no system messages here")
        return super().render(messages, tools)


class LosesCalls(Product):
    """Finds no more than one call."""

    def parse(self, *args: Any, **options: Any) -> Reply:
        reply = super().parse(*args, **options)
        return replace(reply, tool_calls=reply.tool_calls[:1])


class FailsAtCalls(Product):
    """Has a parser that fails where a call is not complete."""

    def parse(self, *args: Any, **options: Any) -> Reply:
        reply = super().parse(*args, **options)
        if any(call.status == "unclosed" for call in reply.tool_calls):
            raise IndexError("tuple index out of range")
        return reply


class CutsReplies(Product):
    """Reads other content when tokens come one by one."""

    def parse(self, *args: Any, step: int = 0) -> Reply:
        reply = super().parse(*args, step=step)
        return replace(reply, content=reply.content[:-1]) if step else reply


class StopsAtCalls(Product):
    """Takes what closes a call for a stop token."""

    def stop_ids(self, tools: Sequence[Message]) -> set[int]:
        control = self.renderer.tokenizer.control("</tool_call>")
        return super().stop_ids(tools) | ({control.id} if control else set())


class ForgetsNewMessages(Product):
    """Bridges without the last new message after a turn that was cut short."""

    def bridge(self, completion: Sequence[int], *args: Any) -> list[int]:
        ids = super().bridge(completion, *args)
        return ids if completion[-1] in self.stop_ids(()) else ids[:2]


class LosesSampledIds(Product):
    """Renders other ids in place of sampled ones."""

    def splice(self, messages: Sequence[Message], tools: Sequence[Message], sampled: Any) -> list[int]:
        return [token_id + 1 for token_id in super().splice(messages, tools, {})]


class DropsNewlineOfTheCut(Product):
    """Bridges without the line break that ends a turn which was cut short."""

    def bridge(self, completion: Sequence[int], *args: Any) -> list[int]:
        ids = super().bridge(completion, *args)
        return ids[1:] if self.renderer.tokenizer.decode(ids[:1]) == "\n" else ids


def _is_reasoning(reply: Message) -> bool:
    """Whether a reply was cut short before any other output."""
    return bool(reply.get("reasoning_content")) and not reply.get("content") and not reply.get("tool_calls")


class ForgetsPromptAfterReasoning(Product):
    """Bridges without the generation prompt after reasoning that was cut short."""

    def bridge(self, completion: Sequence[int], reply: Message, *args: Any) -> list[int]:
        ids = super().bridge(completion, reply, *args)
        prompt = self.renderer.tokenizer.control("<|im_start|>")
        if not _is_reasoning(reply) or prompt is None:
            return ids
        return ids[: len(ids) - 1 - ids[::-1].index(prompt.id)]


EXPECTED: Mapping[type[Product], tuple[str, Mapping[str, str]]] = {
    AlwaysLocal: ("false local", {"numbering": "messages"}),
    AlwaysForks: ("needless fork", {}),
    OneWrongToken: ("bridge ids", {}),
    DropsNewline: ("bridge ids", {}),
    RepeatsStop: ("wrong bridge", {}),
    OtherPrompt: ("prompt ids", {}),
    EncodesEverything: ("injection", {}),
    RefusesTools: ("false refusal of a bridge", {}),
    RefusesSystem: ("false refusal of a prompt", {}),
    LosesCalls: ("false claim of parsing", {}),
    FailsAtCalls: ("exception in parser", {}),
    CutsReplies: ("reply depends on how it is cut", {}),
    StopsAtCalls: ("stop within turn", {}),
    LosesSampledIds: ("splice ids", {}),
    DropsNewlineOfTheCut: ("wrong bridge after a truncated reply", {"end": "none"}),
    ForgetsPromptAfterReasoning: (
        "wrong bridge after a truncated reply",
        {"thinking": "kept", "prompt": "think_open"},
    ),
    ForgetsNewMessages: ("message lost after a truncated reply", {}),
}
"""By product, the kind of finding that its fault has to bring about, and the options it shows with."""
