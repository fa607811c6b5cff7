"""The product as the judge asks it: certificate, ids of prompts and bridges, strategies, replies.

The only module here that calls `tokentape.chat`. Everything that it raises is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.generator.conversations import Message
from tests.generator.oracle import DATE
from tokentape.chat._certificate import Certificate, Continuation
from tokentape.chat._certification import certify
from tokentape.chat._grammar import continuation_name
from tokentape.chat._parse import Reply
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import choose
from tokentape.errors import TemplateRefused
from tokentape.types import Setup


class Product:
    """One model folder, as Tokentape handles it."""

    def __init__(self, folder: Path, kwargs: dict[str, bool]) -> None:
        self.kwargs = kwargs
        self.renderer = Renderer.load(folder)
        self.certificate: Certificate = certify(self.renderer, kwargs)
        self.certificate.to_json().encode()

    def _setup(self, tools: Sequence[Message]) -> Setup:
        return self.renderer.setup(tuple(tools), self.kwargs, DATE)

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        return [int(i) for i in self.renderer.render(messages, self._setup(tools)).ids]

    def splice(
        self, messages: Sequence[Message], tools: Sequence[Message], sampled: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """A conversation rendered from the start, with sampled ids in place of some messages."""
        arrays = {n: np.asarray(ids, dtype=np.int32) for n, ids in sampled.items()}
        return [int(i) for i in self.renderer.render(messages, self._setup(tools), sampled=arrays).ids]

    def stop_ids(self, tools: Sequence[Message]) -> set[int]:
        """The ids that end turns; without tools if the template refuses a plain question with tools."""
        try:
            return set(self.renderer.stop_ids(self._setup(tools)))
        except TemplateRefused:
            return set(self.renderer.stop_ids(self._setup(())))

    def row(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Message]) -> Continuation | None:
        """The certificate's entry for such a continuation."""
        system = any(message["role"] in ("system", "developer") for message in history)
        return self.certificate.continuation(continuation_name(new, tools=bool(tools), system=system))

    def strategy(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], tools: Sequence[Message]
    ) -> str:
        return choose(self.renderer, self.certificate, reply, new, self._setup(tools), history)

    def bridge(
        self,
        completion: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Message],
        history: Sequence[Message] | None,
        before: Sequence[int],
    ) -> list[int]:
        """What to append after a completion; `before` has the ids of its prompt."""
        context, ids = (np.asarray(ids, dtype=np.int32) for ids in ([*before, *completion], completion))
        return [int(i) for i in self.renderer.bridge(ids, reply, new, self._setup(tools), history, context).ids]

    def parse(self, completion: Sequence[int], tools: Sequence[Message], before: Sequence[int], step: int = 0) -> Reply:
        parser = self.renderer.parser(self._setup(tools), prompt_ids=np.asarray(before, dtype=np.int32))
        for at in range(0, len(completion), step or max(len(completion), 1)):
            parser.feed(completion[at : at + step] if step else completion)
        return parser.finish()[1]

    @property
    def reasoning(self) -> tuple[str, str]:
        """What opens and closes reasoning, by the certificate; empty texts if nothing does."""
        return self.certificate.reasoning or ("", "")

    def left_in_reasoning(self, prompt: str, turn: str) -> bool:
        """Whether the prompt ends with the certificate's start of reasoning, and the turn does not close it."""
        opening, close = self.reasoning
        return bool(opening.strip()) and prompt.rstrip().endswith(opening.strip()) and close.strip() not in turn

    def parses(self, checks: Sequence[str]) -> bool:
        """Whether the certificate claims that turns of these kinds parse back."""
        held = {check.name: check.holds for check in self.certificate.parsing}
        return all(held.get(check) is True for check in checks)


def message_of(reply: Reply, made_from: Message) -> dict[str, Any]:
    """The reply as a message; calls keep the ids of the message that it was made from."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    calls = [call for call in reply.tool_calls if call.status != "unclosed"]
    if calls:
        call_ids = [call["id"] for call in made_from.get("tool_calls") or ()]
        message["tool_calls"] = [
            {
                "id": call_ids[n] if n < len(call_ids) else f"call_{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(calls)
        ]
    return message
