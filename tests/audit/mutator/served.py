"""A changed model as the tokenizer of a server: what such a server shows of the change, by plain `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.audit.mutator.oracle import Effect, Refused, View, conversations
from tokentape.audit._skew.backends import Backend, BackendFacts, Rendering, SkewChat
from tokentape.errors import TemplateRefused

KINDS = ("vllm", "sglang", "llamacpp")


class ServedView(Backend):
    """Answers as a server of this folder does. It shares no code with the backends that audits read folders with."""

    facts = BackendFacts("served", "planted", frozenset())

    def __init__(self, view: View, kind: str) -> None:
        self._view, self._kind = view, kind

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return self._view.encode_anew(texts, special=special)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return self._view.decode(sequences)

    def render(self, conversation: SkewChat) -> Rendering:
        messages = [dict(message) for message in conversation.messages]
        for message in messages:
            parts = message.get("content")
            if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
                message["content"] = "".join(part["text"] for part in parts)
        try:
            text = self._view.render(messages, conversation.tools, conversation.generate)
            text = _sent(self._view, self._kind, text)
            return Rendering(self.encode([text])[0], text)
        except Refused as error:
            raise TemplateRefused(str(error)) from None

    def prompt(self, conversation: SkewChat) -> list[int]:
        """Return the ids that the server samples from."""
        made = self.render(conversation)
        return self.encode([made.text or ""], special=True)[0] if self._kind == "llamacpp" else made.ids


def _sent(view: View, kind: str, text: str) -> str:
    """What a server of a kind shows of a rendering: llama.cpp takes off a BOS that its tokenizer puts before a text."""
    adds_bos = view.encode(["a"], special=True) != view.encode(["a"])
    return text.removeprefix(view.auto.bos_token or "") if kind == "llamacpp" and adds_bos else text


def shown(effects: Sequence[Effect], a: View, b: View, kind: str) -> list[Effect]:
    """Return the effects that requests to a server of `b` show: it has endpoints for texts, ids and conversations."""
    kept = [effect for effect in effects if effect.what in ("ids", "special ids", "unstable", "text of ids")]
    kept = [effect for effect in kept if "skipped: True" not in effect.shown and "by transformers" not in effect.shown]
    tried = [f"{name}, True, {{}}" for name, messages, _ in conversations() if _is_tried(messages)]
    unlike = [name for name in tried if _rendered(a, name, kind) != _rendered(b, name, kind)]
    return [*kept, Effect("rendering", f"{len(unlike)} of {len(tried)}, {unlike[0]}")] if unlike else kept


def _is_tried(messages: Sequence[Any]) -> bool:
    """Servers join parts before a template sees them, and llama.cpp continues a final assistant message."""
    return messages[-1]["role"] != "assistant" and all(isinstance(message["content"], str) for message in messages)


def _rendered(view: View, name: str, kind: str) -> list[list[int]] | None:
    text = view.renderings[name]
    return None if text == "\0refused" else view.encode([_sent(view, kind, text)])
