"""Record the replies of a real vLLM server, for `test_vllm_replay.py` to replay.

    python tests/engines/record_vllm.py ROUTE http://127.0.0.1:8000 VOCAB_SIZE "vllm serve MODEL --dtype float32"

ROUTE is generate or completions. Needs a server with VLLM_SERVER_DEV_MODE=1, whose `/abort_requests` makes the aborted
reply, and which names the weights. The command is only a label.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx2
import msgspec
import numpy as np
from tests.engines.fake_vllm import by_route

from tokentape.engines._base import SamplingParams
from tokentape.engines._vllm import Route

PROMPT = np.array([40, 41, 42, 300, 301], np.int32)


async def record(route: Route, url: str, vocab_size: int, command: str) -> None:
    """Write a transcript per kind of reply."""
    engine = await by_route(route).open(url, vocab_size=vocab_size, verify_prompt=True)
    path_of, prefix, infix = {
        "generate": ("/inference/v1/generate", "generate-tokens-{}", "generate_"),
        "completions": ("/v1/completions", "cmpl-{}-0", ""),
    }[route]
    (greedy,) = [
        delta
        async for delta in engine.sample(
            PROMPT, SamplingParams(max_tokens=6, temperature=0), stream=False, request_id="probe"
        )
    ]
    stopping = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(greedy.token_ids[4],))
    sampling = SamplingParams(max_tokens=5, top_p=0.9, seed=1, top_logprobs=2)
    long = SamplingParams(max_tokens=1500)
    outside = np.array([5, vocab_size], np.int32)
    calls = {
        "stop_stream": (PROMPT, stopping, True, "stop"),
        "length_whole": (PROMPT, sampling, False, "length"),
        "abort_whole": (PROMPT, long, False, "abort"),
        "refused_stream": (outside, SamplingParams(max_tokens=1), True, "refused"),
    }
    if route == "generate":
        calls["renamed_whole"] = (PROMPT, SamplingParams(max_tokens=300, temperature=0), False, "renamed")
    folder = Path(__file__).parent / "transcripts"
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for name, (prompt, params, stream, expect) in calls.items():
            body = engine._request_body(
                msgspec.json.encode(prompt.tolist()), params, len(prompt), (), stream=stream, request_id=name
            )
            headers = {"x-request-id": name, "content-type": "application/json"}
            asked = asyncio.create_task(client.post(path_of, content=body, headers=headers))
            if expect == "abort":
                await asyncio.sleep(0.1)
                await client.post("/abort_requests", json={"request_ids": [prefix.format(name)]})
            elif expect == "renamed":
                await asyncio.sleep(0.1)
                await client.post("/update_weight_version", json={"new_version": "step-1"})
            transcript = {
                "engine": f"{engine.info.name} {engine.info.version}",
                "command": command,
                "vocab_size": vocab_size + (expect == "refused"),
                "max_context": engine.info.max_context,
                "expect": expect,
                "request": json.loads(body),
                "reply": (await asked).text,
            }
            path = folder / f"vllm_{engine.info.version}_{infix}{name}.json"
            lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in transcript.items()]
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(path, file=sys.stderr)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))  # type: ignore[arg-type]
