"""Backends: one interface to everything that an audit can compare. `open_backend` opens a backend by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokentape.audit._model_files import Settings
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.types import Message, Tool

Ability: TypeAlias = Literal["special", "decode", "render", "controls", "mask"]
"""An ability beyond plain encoding. `special`: adds BOS and EOS to a text. `controls`: encodes text that spells a
control token as that token. `mask`: returns which tokens of a rendering carry loss."""


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
    """The text that the template wrote; None for servers, which return only ids."""
    mask: list[bool] | None = None
    refused: str | None = None
    """Why the conversation was refused; then the other fields are empty. `Backend.render` raises an error instead."""


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
    """What is known about a backend without encoding anything. None and empty values mean unknown."""

    name: str
    kind: str
    """The loader: `tokenizer.json`, `AutoTokenizer Qwen2Tokenizer`, `vLLM server`..."""
    abilities: frozenset[Ability]
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Hex SHA-256 of the files, by name."""
    spec: Mapping[str, Any] | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of a model file in a format other than tokenizer.json, by name. The keys of `pieces` are token strings."""
    added: Mapping[str, BackendToken] = field(default_factory=dict)
    vocab_size: int | None = None
    """One more than the highest id."""
    template: str | None = None
    tool_template: str | None = None
    """The source of the template's `tool_use` variant, which renders conversations with tools."""
    templates: Mapping[str, str] | None = None
    """The sources of its other variants by name; None if unknown, or if the user passed a template."""
    configuration: Mapping[str, Any] | None = None
    """Ids and embedding rows of config.json and generation_config.json, see `model_configuration`."""
    max_length: float | None = None
    """The number of ids at which transformers truncates; None if unlimited or unknown."""
    loading: Settings | None = None
    """Settings that transformers reads from files other than tokenizer.json, see `loading_settings`."""
    date: str | None = None
    """The date that is passed to templates, ISO 8601; None means today."""
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
    """Texts that the backend refused to encode."""
    echoes: bool = False
    """True if `echo` returns ids."""

    is_server: bool = False
    """True if each call sends a request."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Return the ids of each text. With `special`, include the BOS and EOS that the backend adds."""
        raise NotImplementedError

    def remember(self, texts: Sequence[str], ids: Sequence[list[int]]) -> None:
        """Keep the ids of plain texts that will be encoded again, if encoding sends requests."""

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids, with control tokens spelled out."""
        raise NotImplementedError

    def render(self, conversation: SkewChat) -> Rendering:
        """Return the ids of a conversation.

        Raises `TemplateRefused` if the backend refuses the conversation, `UnsupportedParameter` if it can't render
        this kind of conversation.
        """
        raise TemplateRefused(f"{self.facts.name} has no chat template")

    def with_tables(self, names: Collection[str], other: Backend) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """Return an encoder that is this backend with the tables `names` from `other`, or None if it can't be made."""
        return None

    def token(self, token_id: int) -> str | None:
        """Return the token string of an id, or None if the id does not exist or its string is unknown."""
        return None

    def echo(self, conversation: SkewChat) -> list[int] | None:
        """Return the prompt ids that a server's reply reports, or None if it refuses or does not report them."""
        return None

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options that a user may set for each backend."""

    template: Path | None = None
    """A template file to use instead of the backend's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    """The date that is passed to templates, ISO 8601; None means today."""
    api_key: str | None = None


PREFIXES: Mapping[str, str] = {
    "json": "spec:open_json",  # tokenizer.json run by `tokenizers`, with the folder's chat template
    "auto": "spec:AutoBackend",  # a folder loaded with transformers' AutoTokenizer
    "slow": "spec:SlowBackend",  # a folder loaded with AutoTokenizer and use_fast=False
    "spm": "native:SentencePieceBackend",  # a SentencePiece model
    "tiktoken": "native:TiktokenBackend",  # tiktoken ranks; #NAME names the split (cl100k_base, o200k_base...)
    "mistral": "native:MistralBackend",  # tekken.json or a SentencePiece model, run by mistral-common
    "gguf": "gguf:open_gguf",  # the vocabulary of a GGUF file
    **dict.fromkeys(("vllm", "sglang", "llamacpp", "gateway"), ""),
}
"""By prefix: module and callable, which takes the name, the path with its `#detail`, and options; empty for servers."""

_FILES = {"tokenizer.json": "json", "tekken.json": "mistral", "tokenizer.model": "spm", "tiktoken.model": "tiktoken"}
_SUFFIXES = {".gguf": "gguf", ".tiktoken": "tiktoken", ".json": "json", ".model": "spm"}


def open_backend(name: str, options: BackendOptions | None = None) -> Backend:
    """Open a backend by name, such as `models/qwen3`, `auto:models/qwen3` or `vllm:http://127.0.0.1:8000`.

    Raises:
        InvalidRequest: there is no such file or folder.
        TokenizerUnusable: the file or folder can't be read.
        EngineError: the server does not answer.

    """
    options = options or BackendOptions()
    prefix, colon, rest = name.partition(":")
    if not colon or prefix not in PREFIXES:
        is_url = name.startswith(("http://", "https://"))
        prefix, rest = "server" if is_url else _detected(Path(name.partition("#")[0])), name
    if not PREFIXES.get(prefix):
        from tokentape.audit._skew.backends.server import open_server

        return open_server(name, prefix, rest, options)
    if not Path(rest.partition("#")[0]).exists():
        raise InvalidRequest(_nothing_at(rest))
    module, _, function = PREFIXES[prefix].partition(":")
    backend: Backend = getattr(import_module(f"{__name__}.{module}"), function)(name, rest, options)
    return backend


def _detected(path: Path) -> str:
    if path.is_dir():
        for file, prefix in _FILES.items():
            if (path / file).is_file():
                return prefix
        raise InvalidRequest(f"no tokenizer.json, tekken.json, tokenizer.model or tiktoken.model in {path}")
    if path.name in _FILES:
        return _FILES[path.name]
    if path.name.startswith("tekken") or path.name.rpartition(".")[2] in ("v1", "v2", "v3", "v7"):
        return "mistral"
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    raise InvalidRequest(
        f"can't tell what {path} is; put one of these before it: {_prefixes()}" if path.exists() else _nothing_at(path)
    )


def _nothing_at(path: str | Path) -> str:
    return f"there is no {path}; expected a file or folder, or a name that begins with one of {_prefixes()}"


def _prefixes() -> str:
    return ", ".join(f"{prefix}:" for prefix in PREFIXES)
