"""From what a user names to a side: a prefix says what it is, or the files themselves do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tokentape.audit.skew.sides.base import Side
from tokentape.audit.skew.sides.from_spec import SideOptions, open_json
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
"""What each prefix means."""

_SERVERS = ("vllm", "sglang", "llamacpp", "gateway")


def open_side(name: str, options: SideOptions | None = None) -> Side:
    """Open what `name` says, such as `models/qwen3`, `auto:models/qwen3` or `vllm:http://127.0.0.1:8000`.

    Raises:
        InvalidRequest: the name says nothing that there is.
        TokenizerUnusable: it is there, and can't be read.
        EngineError: the server does not answer.

    """
    options = options or SideOptions()
    prefix, colon, rest = name.partition(":")
    if not colon or prefix not in PREFIXES:
        if name.startswith(("http://", "https://")):
            prefix, rest = "server", name
        else:
            prefix, rest = _detected(name), name
    if prefix in _SERVERS or prefix == "server":
        from tokentape.audit.skew.sides.server import open_server

        return open_server(name, prefix, rest, options)
    path, _, detail = rest.partition("#")
    if not Path(path).exists():
        raise InvalidRequest(f"there is no {path}; a side is a file or folder here, or one of {_prefixes()}")
    return _openers()[prefix](name, Path(path), detail, options)


def _detected(name: str) -> str:
    path = Path(name.partition("#")[0])
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return "json"
        for file, prefix in (("tekken.json", "mistral"), ("tokenizer.model", "spm"), ("tiktoken.model", "tiktoken")):
            if (path / file).is_file():
                return prefix
        raise InvalidRequest(f"no tokenizer.json, tekken.json, tokenizer.model or tiktoken.model in {path}")
    match path.suffix:
        case ".gguf":
            return "gguf"
        case ".tiktoken":
            return "tiktoken"
        case ".json":
            return "mistral" if path.name.startswith("tekken") else "json"
        case ".model":
            return "tiktoken" if path.name == "tiktoken.model" else "spm"
    if path.name.rpartition(".")[2] in ("v1", "v2", "v3", "v7"):
        return "mistral"
    if not path.exists():
        raise InvalidRequest(f"there is no {path}; a side is a file or folder here, or one of {_prefixes()}")
    raise InvalidRequest(f"can't tell what {path} is; say it with one of {_prefixes()}")


def _prefixes() -> str:
    return ", ".join(f"{prefix}:" for prefix in PREFIXES)


def _openers() -> Mapping[str, Callable[[str, Path, str, SideOptions], Side]]:
    def json_file(name: str, path: Path, _: str, options: SideOptions) -> Side:
        return open_json(name, path, options)

    def auto(name: str, path: Path, _: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.auto import AutoSide

        return AutoSide(name, path, options)

    def slow(name: str, path: Path, _: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.auto import AutoSide

        return AutoSide(name, path, options, use_fast=False)

    def gguf(name: str, path: Path, _: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.gguf_file import open_gguf

        return open_gguf(name, path, options)

    def spm(name: str, path: Path, _: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.sentencepiece_model import SentencePieceSide

        return SentencePieceSide(name, path, options)

    def ranks(name: str, path: Path, split: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.tiktoken_ranks import TiktokenSide

        return TiktokenSide(name, path, split, options)

    def mistral(name: str, path: Path, _: str, options: SideOptions) -> Side:
        from tokentape.audit.skew.sides.mistral_common import MistralSide

        return MistralSide(name, path)

    return {
        "json": json_file,
        "auto": auto,
        "slow": slow,
        "spm": spm,
        "tiktoken": ranks,
        "mistral": mistral,
        "gguf": gguf,
    }
