"""A side of an audit: something that maps text and messages to ids, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from tokentape.types import Message, Tool

Ability: TypeAlias = Literal["special", "decode", "render", "controls", "mask"]
"""What a side may be asked besides plain encoding. `special`: to put BOS and EOS around a text. `controls`: it reads
control tokens that a text spells as control tokens. `mask`: it says which tokens of a rendering carry loss."""


@dataclass(frozen=True, slots=True)
class SkewChat:
    """Messages as they are given to a chat template, with everything else that its output depends on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    generate: bool = True
    """Whether the generation prompt is asked for."""
    name: str = ""
    """Names it in reports."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a side makes of a conversation."""

    ids: list[int]
    text: str | None
    """What the template wrote; None from servers that tell only ids."""
    mask: list[bool] | None = None
    """Per id, whether it carries loss; None where the side makes no masks."""


@dataclass(frozen=True, slots=True)
class BackendToken:
    """A token that is looked for in text before anything else is done with it."""

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What is known of a side without asking it to tokenize. None and empty: the side does not tell."""

    name: str
    """As it was named."""
    kind: str
    """The loader: `tokenizer.json`, `AutoTokenizer Qwen2Tokenizer`, `vLLM server`..."""
    abilities: frozenset[Ability]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the libraries that do the work, by name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Hex SHA-256 by name of the files that it is made of."""
    spec: Mapping[str, Any] | None = None
    """What a tokenizer.json for it says."""
    added: Mapping[str, BackendToken] = field(default_factory=dict)
    """Added tokens by what they spell."""
    vocab_size: int | None = None
    """One more than its highest id."""
    template: str | None = None
    """Source of its chat template."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What its template is given besides messages and tools: special tokens, template kwargs."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By their names in tokenizer_config.json: `bos_token`, `pad_token`..."""
    cleans_up: bool | None = None
    """Whether decoding takes out spaces before punctuation (`clean_up_tokenization_spaces`)."""
    notes: tuple[str, ...] = ()
    """What a reader of the report should know of it."""


class Side(Protocol):
    """One side of an audit. Ids are lists of int, as the libraries return them."""

    @property
    def facts(self) -> SideFacts:
        """What it says of itself."""
        ...

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """The ids of each text; with `special`, with the BOS and EOS that it puts around one."""
        ...

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, control tokens spelled out."""
        ...

    def render(self, conversation: SkewChat) -> Rendering:
        """The ids of a conversation.

        Raises `TemplateRefused` if it does not take it, `UnsupportedParameter` for what it can't be asked at all.
        """
        ...

    def token(self, token_id: int) -> str | None:
        """How it writes one id; None if there is no such id, or it does not tell."""
        ...

    def reopen(self) -> str | None:
        """The name under which another process can open it again for encoding; None if it can't."""
        ...

    def close(self) -> None:
        """Give back what it holds open."""
        ...
