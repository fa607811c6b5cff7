"""Open an engine by the name of its kind, as a command line gives it."""

from __future__ import annotations

from tokentape.engines.base import Timeouts
from tokentape.engines.remote import RemoteEngine
from tokentape.errors import InvalidRequest

KINDS = ("vllm", "sglang", "llamacpp", "openai")
"""The kinds of servers that there is an engine for."""


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
    """The engine of one of `KINDS` for the server at `url`.

        engine = await open_engine("sglang", "http://127.0.0.1:30000", vocab_size=len(tokenizer))

    `model`: the name to ask for, of those that vLLM and OpenAI-compatible servers list; others serve one.
    `verify_prompt`: have vLLM and SGLang return the prompt's ids with each reply, and compare them. Others can't.

    Raises:
        InvalidRequest: there is no such kind, or the address can't be used.
        EngineError: or one of its kinds; see the `open` of each engine.

    """
    match kind:
        case "vllm":
            from tokentape.engines.vllm import VllmEngine

            return await VllmEngine.open(
                url,
                vocab_size=vocab_size,
                model=model,
                api_key=api_key,
                timeouts=timeouts,
                verify_prompt=verify_prompt,
            )
        case "sglang":
            from tokentape.engines.sglang import SglangEngine

            return await SglangEngine.open(
                url, vocab_size=vocab_size, api_key=api_key, timeouts=timeouts, verify_prompt=verify_prompt
            )
        case "llamacpp":
            from tokentape.engines.llamacpp import LlamaCppEngine

            return await LlamaCppEngine.open(url, vocab_size=vocab_size, api_key=api_key, timeouts=timeouts)
        case "openai":
            from tokentape.engines.openai_compatible import OpenAiEngine

            return await OpenAiEngine.open(url, vocab_size=vocab_size, model=model, api_key=api_key, timeouts=timeouts)
        case _:
            raise InvalidRequest(f"there is no engine {kind!r}; there are {', '.join(KINDS)}", "engine")
