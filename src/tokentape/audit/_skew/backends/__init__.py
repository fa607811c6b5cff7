"""Backends: everything that an audit can compare, with one interface. `open_backend` opens one by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from tokentape.audit._skew.backends.base import Backend
from tokentape.audit._skew.backends.spec import BackendOptions
from tokentape.errors import InvalidRequest

PREFIXES: Mapping[str, str] = {
    "json": "tokenizer.json by `tokenizers`, with the folder's chat template",
    "auto": "a folder by AutoTokenizer of transformers",
    "slow": "a folder by AutoTokenizer with use_fast=False",
    "spm": "a SentencePiece model",
    "tiktoken": "tiktoken ranks; #NAME names the split (cl100k_base, o200k_base...)",
    "mistral": "tekken.json or a SentencePiece model of mistral-common",
    "gguf": "the vocabulary of a GGUF file",
    "vllm": "a running vLLM server, http://...",
    "sglang": "a running SGLang server",
    "llamacpp": "a running llama.cpp server",
    "gateway": "a running gateway of Tokentape",
}

_SERVERS = ("vllm", "sglang", "llamacpp", "gateway", "server")
_OPENERS = {
    "json": "spec:open_json",
    "auto": "auto:AutoBackend",
    "slow": "auto:SlowBackend",
    "spm": "native:SentencePieceBackend",
    "tiktoken": "native:TiktokenBackend",
    "mistral": "native:MistralBackend",
    "gguf": "gguf:open_gguf",
}
"""Module and callable per prefix. Each takes the name, the path with its `#detail`, and options."""

_FILES = {
    "tokenizer.json": "json",
    "tekken.json": "mistral",
    "tokenizer.model": "spm",
    "tiktoken.model": "tiktoken",
}
_SUFFIXES = {".gguf": "gguf", ".tiktoken": "tiktoken", ".json": "json", ".model": "spm"}


def open_backend(name: str, options: BackendOptions | None = None) -> Backend:
    """Open a backend by name, such as `models/qwen3`, `auto:models/qwen3` or `vllm:http://127.0.0.1:8000`.

    Raises:
        InvalidRequest: no file or folder has that name.
        TokenizerUnusable: the file or folder can't be read.
        EngineError: the server does not answer.

    """
    options = options or BackendOptions()
    prefix, colon, rest = name.partition(":")
    if not colon or prefix not in PREFIXES:
        is_url = name.startswith(("http://", "https://"))
        prefix, rest = "server" if is_url else _detected(Path(name.partition("#")[0])), name
    if prefix in _SERVERS:
        from tokentape.audit._skew.backends.server import open_server

        return open_server(name, prefix, rest, options)
    if not Path(rest.partition("#")[0]).exists():
        raise InvalidRequest(_nothing_at(rest))
    module, _, function = _OPENERS[prefix].partition(":")
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
