"""What all engines over HTTP share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import Response
from tests.engines import fake_server

from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._http import HttpClient
from tokentape.engines._remote import RemoteEngine
from tokentape.engines._replies import EngineReply, whole
from tokentape.types import TokenIds

INFO = EngineInfo("plain", "1", "m", 10, 100, "raw_logprobs", frozenset({"max_tokens"}))
PARAMS = SamplingParams(max_tokens=1)


class PlainReply(EngineReply):
    """Reads a reply that is one event: an id and nothing after it."""

    def _read(self, data: bytes) -> SampleDelta:
        self.done = True
        return SampleDelta((int(data),), (-0.5,), "length")


class PlainEngine(RemoteEngine):
    @classmethod
    async def _connect(cls, http: HttpClient, *_: Any, **options: Any) -> PlainEngine:
        return cls(http, INFO)

    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        return self._receive(PlainReply(params, 10, path="/s", prompt=None, prompt_tokens=1), b"{}", {}, stream=stream)


@pytest.mark.parametrize(("stream", "body"), [(False, b"7"), (True, b"data: 7\n\n")])
def test_reply_may_end_without_done(stream: bool, body: bytes) -> None:
    async def main() -> tuple[int, ...]:
        engine = await PlainEngine.open(server.url, vocab_size=10)
        try:
            return (await whole(engine.sample(None, PARAMS, stream=stream, request_id="r"))).token_ids
        finally:
            await engine.close()

    with fake_server.running() as server:
        server.reset({"/s": Response(body, media_type="text/event-stream" if stream else "application/json")})
        assert asyncio.run(main()) == (7,)
