"""The context that decoding a body needs, for tests of bodies alone."""

from __future__ import annotations

from dataclasses import dataclass

from tokentape.engines._base import EngineInfo
from tokentape.errors import NotFound
from tokentape.types import Message

ENGINE = EngineInfo(
    name="plain",
    version="1",
    model="m",
    vocab_size=100,
    max_context=1000,
    logprobs_mode="raw_logprobs",
    sampling=frozenset({"max_tokens", "temperature", "stop_token_ids", "stop_strings", "top_logprobs", "top_k"}),
)


@dataclass(frozen=True, slots=True)
class FakeContext:
    """A session of an engine with a vocabulary of 100 that knows no earlier replies."""

    session_id: str = "s"
    engine: EngineInfo = ENGINE
    vocab_size: int = 100
    takes_images: bool = False
    enforces_tools: bool = False

    def reads_kwarg(self, name: str) -> bool:
        return name == "enable_thinking"

    async def conversation(self, reply_id: str) -> tuple[Message, ...]:
        raise NotFound(f"there is no reply {reply_id!r}")
