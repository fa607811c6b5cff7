"""Open an engine by its kind, for example "vllm" from a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from tokentape.errors import InvalidRequest

if TYPE_CHECKING:
    from tokentape.engines._base import Timeouts
    from tokentape.engines._remote import RemoteEngine

EngineKind: TypeAlias = Literal["transformers", "vllm", "sglang", "llamacpp", "openai"]

KINDS: tuple[str, ...] = tuple(kind for kind in get_args(EngineKind) if kind != "transformers")
"""The kinds of servers that `open_engine` supports."""


async def open_engine(
    kind: str,
    url: str,
    *,
    vocab_size: int,
    model: str | None = None,
    api_key: str | None = None,
    timeouts: Timeouts | None = None,
    verify_prompt: bool = False,
) -> RemoteEngine:
    """Open an engine for the server at `url`. `kind` is one of `KINDS`; for the rest see `RemoteEngine.open`.

        engine = await open_engine("sglang", "http://127.0.0.1:30000", vocab_size=len(tokenizer))

    Raises:
        InvalidRequest: the kind is unknown, or the URL can't be used.
        EngineError: the server failed, did not answer or can't be used. May be a subclass.

    """
    return await engine_class(kind).open(
        url, vocab_size=vocab_size, model=model, api_key=api_key, timeouts=timeouts, verify_prompt=verify_prompt
    )


def engine_class(kind: str) -> type[RemoteEngine]:
    """Return the engine class for a kind of server. Raises `InvalidRequest` for an unknown kind."""
    match kind:
        case "vllm":
            from tokentape.engines._vllm import VllmEngine

            return VllmEngine
        case "sglang":
            from tokentape.engines._sglang import SglangEngine

            return SglangEngine
        case "llamacpp":
            from tokentape.engines._llamacpp import LlamaCppEngine

            return LlamaCppEngine
        case "openai":
            from tokentape.engines._openai_compatible import OpenAiEngine

            return OpenAiEngine
    raise InvalidRequest(f"unknown engine {kind!r}; expected one of {', '.join(KINDS)}", "engine")
