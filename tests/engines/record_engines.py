"""Record the replies of a real server, for `test_engines_replay.py` to replay.

    python tests/engines/record_engines.py sglang http://127.0.0.1:30000 VOCAB_SIZE VERSION "the server's command"

VERSION is the name of the server's release; the command is only a label. If the server has the model of
`tests/media/tiny_vision.py`, a prompt with two of its pictures is recorded instead.
"""

from __future__ import annotations

import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from tests.media.tiny_vision import picture

from tokentape.engines._base import PromptMedia, SamplingParams
from tokentape.engines._http import HttpClient
from tokentape.engines._kinds import open_engine

PROMPT = np.array([3317, 2484, 1993, 1052, 1200, 159, 293, 64, 683, 3171], np.int32)

PICTURES = PromptMedia(2, 8, picture(1, 100, 60)), PromptMedia(13, 9, picture(3, 90, 90))
WITH_PICTURES = np.array([3317, 4000, *[4002] * 8, 4001, 2484, 4000, *[4002] * 9, 4001, 1993], np.int32)
"""4000 and 4001 are before and after an image, 4002 stands for it."""


class Recorder(HttpClient):
    """Keeps requests and replies."""

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
    """Write a transcript per kind of reply."""
    engine = await open_engine(kind, url, vocab_size=vocab_size)
    engine.http.__class__ = Recorder
    if engine.info.media:
        await write(
            engine, f"{kind} {version}", command, vocab_size, "images_whole", ({"max_tokens": 6}, False), PICTURES
        )
        await engine.close()
        return
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
    for name, call in calls.items():
        await write(engine, f"{kind} {version}", command, vocab_size, name, call)
    await engine.close()


async def write(
    engine: Any, label: str, command: str, vocab_size: int, name: str, call: Any, media: tuple[PromptMedia, ...] = ()
) -> None:
    """Write the transcript of a call."""
    Recorder.exchanges.clear()
    (params, stream), prompt = call, WITH_PICTURES if media else PROMPT
    sampling = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})
    pictures = {"media": media} if media else {}
    deltas = [d async for d in engine.sample(prompt, sampling, stream=stream, request_id=name, **pictures)]
    transcript = {
        "engine": label,
        "command": command,
        "vocab_size": vocab_size,
        "max_context": engine.info.max_context,
        "prompt": prompt.tolist(),
        "media": [[item.start, item.length, b64encode(item.data).decode()] for item in media],
        "params": params,
        "stream": stream,
        "ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "finish_reason": deltas[-1].finish_reason,
        "exchanges": Recorder.exchanges,
    }
    path = Path(__file__).parent / "transcripts" / f"{label.replace(' ', '_')}_{name}.json"
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in transcript.items() if value != []]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path, file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]))
