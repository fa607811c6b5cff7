"""Convert one model's messages to token ids and back: render, bridge and parse with its own chat template.

    renderer = Renderer.load("path/to/model")
    conversation = Conversation(renderer, messages, tools)
    ids = sample(conversation.token_ids, stop=conversation.stop_ids)
    reply = conversation.add_completion(ids)                        # content, reasoning, tool calls
    conversation.add_messages(new_messages)                         # appends the certified bridge

Its parts are `Renderer.render`, `Renderer.parser` and `Renderer.bridge`. `certify` renders a grammar of conversations
with the template and returns a `Certificate`: which bridges are exact, which messages the parser reads back unchanged,
and what the template drops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.chat._certificate import Certificate, Continuation, ParseCheck
    from tokentape.chat._certificate_cache import load_or_certify
    from tokentape.chat._certification import certify
    from tokentape.chat._conversation import Conversation
    from tokentape.chat._external_renderer import ExternalRenderer, RendererObject
    from tokentape.chat._media import ImageProcessor
    from tokentape.chat._overrides import Completion, Overrides, parse_whole
    from tokentape.chat._parse import ReplyParser
    from tokentape.chat._renderer import PromptTokens, Renderer
    from tokentape.chat._reply import Reply, ReplyDelta, ToolCall
    from tokentape.chat._tokenizer import Tokenizer

__all__ = [
    "Certificate", "Completion", "Continuation", "Conversation", "ExternalRenderer", "ImageProcessor", "Overrides",
    "ParseCheck", "PromptTokens", "Renderer", "RendererObject", "Reply", "ReplyDelta", "ReplyParser", "Tokenizer",
    "ToolCall", "certify", "load_or_certify", "parse_whole",
]  # fmt: skip

__getattr__ = lazy_names(__name__)
