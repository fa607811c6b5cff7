"""A side that is Mistral's own library: tekken.json, or one of its SentencePiece models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit.skew.sides.base import BackendToken, Rendering, SideFacts, SkewChat
from tokentape.audit.skew.sides.from_spec import hash_file
from tokentape.errors import TemplateRefused, TokenizerUnusable, UnsupportedParameter


class MistralSide:
    """mistral-common on a file. It never reads control tokens in text, and renders without a chat template."""

    def __init__(self, name: str, path: Path) -> None:
        try:
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError:
            raise TokenizerUnusable("mistral-common is not installed; run: pip install 'tokentape[audit]'") from None
        file = path / "tekken.json" if path.is_dir() else path
        try:
            self._chat: Any = MistralTokenizer.from_file(str(file))
        except Exception as error:  # the library raises what its parts raise
            raise TokenizerUnusable(f"mistral-common can't load {file}: {type(error).__name__}: {error}") from error
        self._tokenizer: Any = self._chat.instruct_tokenizer.tokenizer
        self._file = file
        added = {}
        for number in range(self._tokenizer.n_words):
            if self._tokenizer.is_special(number):
                content = self._tokenizer.id_to_piece(number)
                added[content] = BackendToken(number, content)
            elif number >= self._tokenizer.num_special_tokens:
                break
        self.facts = SideFacts(
            name=name,
            kind=f"mistral-common {type(self._tokenizer).__name__} {self._tokenizer.version.value}",
            abilities=frozenset({"decode", "render"}),
            versions={"mistral-common": version("mistral-common")},
            files={file.name: hash_file(file)},
            added=added,
            vocab_size=self._tokenizer.n_words,
            notes=("mistral-common reads control tokens in text as text",),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`."""
        return [self._tokenizer.encode(text, bos=special, eos=False) for text in texts]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        return [self._tokenizer.decode(list(ids), special_token_policy=SpecialTokenPolicy.IGNORE) for ids in sequences]

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`. What the library's checks don't let through can't be compared."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if not conversation.generate:
            raise UnsupportedParameter("mistral-common renders prompts only", "add_generation_prompt")
        try:
            request = ChatCompletionRequest.from_openai(
                messages=[_sent(message) for message in conversation.messages], tools=list(conversation.tools) or None
            )
            rendered = self._chat.encode_chat_completion(request)
        except Exception as error:  # the library raises what its checks raise
            if (
                conversation.messages
                and conversation.messages[-1]["role"] == "user"
                and len(conversation.messages) == 1
            ):
                raise TemplateRefused(f"mistral-common refuses it: {type(error).__name__}") from error
            raise UnsupportedParameter(f"mistral-common refuses it: {type(error).__name__}", "messages") from error
        return Rendering(list(rendered.tokens), None)

    def token(self, token_id: int) -> str | None:
        """See `Side`."""
        return str(self._tokenizer.id_to_piece(token_id)) if 0 <= token_id < self._tokenizer.n_words else None

    def reopen(self) -> str | None:
        """See `Side`."""
        return f"mistral:{self._file}"

    def close(self) -> None:
        """Nothing is held open."""


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as OpenAI's API has it."""
    sent = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
            if "function" in call
        ]
    return sent
