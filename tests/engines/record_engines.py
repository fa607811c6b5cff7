"""Record what a real server answers an engine, for `test_engines_replay.py` to replay.

    python tests/engines/record_engines.py sglang http://127.0.0.1:30000 VOCAB_SIZE VERSION "the server's command"

VERSION is how the server's release is called where it is got from; the command is only a label.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.engines._base import SamplingParams
from tokentape.engines._http import HttpClient
from tokentape.engines._opening import open_engine

PROMPT = np.array([3317, 2484, 1993, 1052, 1200, 159, 293, 64, 683, 3171], np.int32)


class Recorder(HttpClient):
    """Keeps what was sent and what came back."""

    exchanges: list[dict[str, Any]] = []  # noqa: RUF012

    async def post(self, path: str, body: bytes, headers: Any) -> bytes:
        """As `HttpClient.post`."""
        reply = await super().post(path, body, headers)
        self.exchanges.append({"path": path, "request": json.loads(body), "reply": reply.decode()})
        return reply

    async def arrivals(self, path: str, body: bytes, headers: Any) -> AsyncGenerator[list[bytes], None]:
        """As `HttpClient.arrivals`."""
        received = b""
        try:
            async with aclosing(super().arrivals(path, body, headers)) as arrivals:
                async for several in arrivals:
                    received += b"".join(b"data: " + data + b"\n\n" for data in several)
                    yield several
        finally:
            self.exchanges.append({"path": path, "request": json.loads(body), "reply": received.decode()})


async def record(kind: str, url: str, vocab_size: int, version: str, command: str) -> None:
    """Write one transcript per kind of reply."""
    engine = await open_engine(kind, url, vocab_size=vocab_size)
    engine.http.__class__ = Recorder
    (greedy,) = [
        delta
        async for delta in engine.sample(
            PROMPT, SamplingParams(max_tokens=6, temperature=0), stream=False, request_id="probe"
        )
    ]
    calls = {
        "stop_stream": ({"max_tokens": 20, "temperature": 0.0, "stop_token_ids": [greedy.token_ids[4]]}, True),
        "length_stream": ({"max_tokens": 6, "temperature": 0.0, "top_logprobs": 2}, True),
        "length_whole": ({"max_tokens": 40, "temperature": 1.5, "top_p": 0.9, "top_logprobs": 2}, False),
    }
    for name, (params, stream) in calls.items():
        Recorder.exchanges.clear()
        given = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})  # type: ignore[arg-type]
        deltas = [d async for d in engine.sample(PROMPT, given, stream=stream, request_id=name)]
        transcript = {
            "engine": f"{kind} {version}",
            "command": command,
            "vocab_size": vocab_size,
            "max_context": engine.info.max_context,
            "prompt": PROMPT.tolist(),
            "params": params,
            "stream": stream,
            "ids": [token_id for delta in deltas for token_id in delta.token_ids],
            "finish_reason": deltas[-1].finish_reason,
            "exchanges": Recorder.exchanges,
        }
        path = Path(__file__).parent / "transcripts" / f"{kind}_{version}_{name}.json"
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in transcript.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(path, file=sys.stderr)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]))
