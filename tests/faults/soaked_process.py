"""A gateway in its own process, with an engine that keeps no state: `python -m tests.faults.soaked_process DATA`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import tokentape.demo
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import serve
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds


class EchoEngine:
    """An engine with a constant reply."""

    def __init__(self, renderer: Renderer) -> None:
        tokenizer = renderer.tokenizer
        self._ids = tuple(tokenizer.encode_plain("Pears are 12, plums 7.<|im_end|>"))
        self.info = EngineInfo(
            name="parrot",
            version="1",
            model="parrot",
            vocab_size=tokenizer.vocab_size,
            max_context=1 << 20,
            logprobs_mode="raw_logprobs",
            sampling=frozenset({"max_tokens", "temperature", "top_p", "stop_token_ids"}),
        )

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        yield SampleDelta(self._ids, (-0.5,) * len(self._ids), "stop", self._ids[-1])

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


if __name__ == "__main__":
    renderer = Renderer.load(Path(tokentape.demo.__file__).parent / "model")
    # How long a flush takes is not the point here, how many turns are taken is.
    store = SqliteStore.open(sys.argv[1], synchronous="NORMAL")
    turns = Turns(EchoEngine(renderer), renderer, store, limits=Limits(idle_seconds=2.0))
    serve(create_app(turns, model_id="m"), port=0, on_ready=lambda url: print(url, flush=True))
