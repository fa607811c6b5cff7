"""The interface of backends, which map texts and conversations to ids, and the facts about a backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tokentape.audit._model_files import Settings
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Tool

Ability: TypeAlias = Literal["special", "decode", "render", "controls", "mask"]
"""An ability beyond plain encoding. `special`: puts BOS and EOS around a text. `controls`: reads control tokens that a
text spells as control tokens. `mask`: says which tokens of a rendering carry loss."""


@dataclass(frozen=True, slots=True)
class SkewChat:
    """The input of a chat template. `generate` asks for the generation prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    generate: bool = True
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The result of rendering a conversation. `mask` is True for tokens that carry loss; None if unknown."""

    ids: list[int]
    text: str | None
    """The text that the template wrote; None from servers that return only ids."""
    mask: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class BackendToken:
    """An added token, which is matched in a text before the text is split and encoded."""

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """Facts about a backend that need no tokenization. None and empty mean unknown."""

    name: str
    kind: str
    """The loader: `tokenizer.json`, `AutoTokenizer Qwen2Tokenizer`, `vLLM server`..."""
    abilities: frozenset[Ability]
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Hex SHA-256 of the files, by name."""
    spec: Mapping[str, Any] | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of a model file that is no tokenizer.json, by name. The keys of `pieces` are the spellings of tokens."""
    added: Mapping[str, BackendToken] = field(default_factory=dict)
    vocab_size: int | None = None
    """One more than the highest id."""
    template: str | None = None
    tool_template: str | None = None
    """Source of its `tool_use` variant, which renders conversations with tools."""
    templates: Mapping[str, str] | None = None
    """Sources of its other variants by name; None if unknown, or if the user gave a template."""
    configuration: Mapping[str, Any] | None = None
    """Ids and embedding rows of config.json and generation_config.json, see `model_configuration`."""
    max_length: float | None = None
    """The number of ids at which transformers truncates; None if there is no limit, or it is unknown."""
    loading: Settings | None = None
    """Settings that transformers reads from files other than tokenizer.json, see `loading_settings`."""
    date: str | None = None
    """The date that templates get, ISO 8601; None is today."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Other variables of the template: special tokens, template kwargs."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By their names in tokenizer_config.json: `bos_token`, `pad_token`..."""
    cleans_up: bool | None = None
    """True if decoding removes spaces before punctuation (`clean_up_tokenization_spaces`)."""
    notes: tuple[str, ...] = ()


class Backend:
    """The base class of backends. Ids are lists of int, as the libraries return them."""

    facts: BackendFacts
    reopened_as: str | None = None
    """The name by which another process can open this backend for encoding; None if it can't."""
    refused: Collection[str] = ()
    """Texts that it refused to encode."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Return the ids of each text; with `special`, with the BOS and EOS that the backend puts around it."""
        raise NotImplementedError

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids, with control tokens spelled out."""
        raise NotImplementedError

    def render(self, conversation: SkewChat) -> Rendering:
        """Return the ids of a conversation.

        Raises `TemplateRefused` if the backend refuses the conversation, `UnsupportedParameter` if it has no way to
        render such a conversation.
        """
        raise TemplateRefused(f"{self.facts.name} has no chat template")

    def with_tables(self, names: Collection[str], other: Backend) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """Return an encoder: this backend with some of the tables of `other`. Return None if it can't make one."""
        return None

    def token(self, token_id: int) -> str | None:
        """Return the spelling of an id; None if there is no such id, or it is unknown."""
        return None

    def close(self) -> None:
        """Release resources."""


def with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of its calls as JSON text."""

    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(written, calls))} if calls else message
