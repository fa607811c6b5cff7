"""A fake of vLLM's two token APIs on a real socket, to inject faults that can't be produced with the real one.

Without faults, its replies have the form of vLLM 0.32.0; `transcripts/` has real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._vllm import VllmEngine

MODEL = "tiny"
VOCAB_SIZE = 100
MAX_CONTEXT = 64
SAMPLED = [11, 12, 13]
LOGPROBS = [-0.5, -1.5, -2.5]

PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)

Event = dict[str, Any]


def sampled_events(body: dict[str, Any], ids: Sequence[int] = SAMPLED) -> list[Event]:
    """Return a stream's events for a request: as many of `ids` as `max_tokens` allows, with `LOGPROBS` repeated."""
    if "sampling_params" in body:
        return _generated_events(body, ids)
    ids = ids[: body["max_tokens"]]
    events = []
    for index, (token_id, logprob) in enumerate(zip(ids, cycle(LOGPROBS), strict=False)):
        top = {f"token_id:{token_id}": logprob, "token_id:1": -1.25, "token_id:2": -3.0}
        choice = {
            "index": 0,
            "text": "x",
            "logprobs": {
                "text_offset": [index],
                "token_logprobs": [logprob],
                "tokens": [f"token_id:{token_id}"],
                "top_logprobs": [dict(list(top.items())[: body["logprobs"] + 1])],
            },
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": body["prompt"] if body["return_token_ids"] and index == 0 else None,
            "token_ids": [token_id] if body["return_token_ids"] else None,
        }
        events.append({"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]})
    last = events[-1]["choices"][0]
    stopped = ids[-1] in body["stop_token_ids"]
    last.update(finish_reason="stop" if stopped else "length", stop_reason=ids[-1] if stopped else None)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids), "total_tokens": 0}
    return [*events, {"id": "cmpl-1", "choices": [], "usage": usage}]


def _generated_events(body: dict[str, Any], ids: Sequence[int]) -> list[Event]:
    """Return the same events for `/inference/v1/generate`."""
    sampling, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
    ids = ids[: sampling["max_tokens"]]
    events = []
    for token_id, logprob in zip(ids, cycle(LOGPROBS), strict=False):
        top = [
            {"token_id": alternative_id, "logprob": lp}
            for alternative_id, lp in ((token_id, logprob), (1, -1.25), (2, -3.0))
        ]
        entry = {"token_id": token_id, "logprob": logprob, "top_logprobs": top[: sampling["logprobs"]]}
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": [token_id],
            "routed_experts": None,
            "weight_versions": None,
            "logprobs": {"content": [entry]},
        }
        events.append({"request_id": name, "output_mode": "tokens", "choices": [choice]})
    if body["return_token_ids"]:
        events[0]["prompt_token_ids"] = body["token_ids"]
    stopped = ids[-1] in sampling["stop_token_ids"]
    events[-1]["choices"][0].update(
        finish_reason="stop" if stopped else "length",
        stop_reason=ids[-1] if stopped else None,
        weight_versions=[{"version": "default", "start": 0, "end": len(ids)}],
    )
    usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(ids), "total_tokens": 0}
    return [*events, {"request_id": name, "choices": [], "usage": usage}]


def whole(events: list[Event]) -> Event:
    """Return the reply without streaming that has the content of a stream's events."""
    if "request_id" in events[0]:
        pieces = [event["choices"][0] for event in events if event["choices"]]
        joined_choice = {
            **pieces[-1],
            "token_ids": [token_id for piece in pieces for token_id in piece["token_ids"]],
            "logprobs": {"content": [entry for piece in pieces for entry in piece["logprobs"]["content"]]},
        }
        return {**events[0], "choices": [joined_choice], "usage": events[-1]["usage"]}
    choices = [event["choices"][0] for event in events if event["choices"]]
    merged = {**choices[-1], "prompt_token_ids": choices[0]["prompt_token_ids"], "logprobs": {}}
    if merged["token_ids"] is not None:
        merged["token_ids"] = [token_id for choice in choices for token_id in choice["token_ids"]]
    for name in choices[0]["logprobs"]:
        merged["logprobs"][name] = [value for choice in choices for value in choice["logprobs"][name]]
    return {**events[0], "choices": [merged], "usage": events[-1]["usage"]}


def sse(events: list[Event]) -> bytes:
    """Return the bytes of a stream of these events."""
    data = [json.dumps(event, separators=(",", ":")) for event in events] + ["[DONE]"]
    return "".join(f"data: {text}\n\n" for text in data).encode()


def streaming(*pieces: bytes, then: str = "end", pause: float = 0.0) -> StreamingResponse:
    """Send each piece separately, then the end, a broken connection, or silence."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            if pause:
                await asyncio.sleep(pause)
        if then == "break":
            raise ConnectionError("injected")
        if then == "stall":
            await asyncio.Event().wait()

    return StreamingResponse(stream(), media_type="text/event-stream")


def token_by_token(body: dict[str, Any]) -> Response:
    """Return a stream whose tokens arrive singly."""
    stream = sse(sampled_events(body))
    return streaming(*(event + b"\n\n" for event in stream.split(b"\n\n")[:-1]), pause=0.05)


def plain_answer(body: dict[str, Any]) -> Response:
    """Return the reply of a server without faults."""
    events = sampled_events(body)
    return streaming(sse(events)) if body["stream"] else JSONResponse(whole(events))


class FakeVllm:
    """The server's state: the replies, set by a test, and the received requests."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """Forget all requests and faults."""
        self.answer: Callable[[dict[str, Any]], Response] = plain_answer
        self.routes: dict[str, Response] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.client_left = threading.Event()
        self.refused: set[str] = set()
        """Fields to refuse by name, as the Rust frontend does."""
        self.scale_out = False
        """It was started with --enable-scale-out."""
        self.version = "0.32.0"
        self.aborted: list[str] = []
        """Ids of abort requests."""

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        self.headers.append(dict(request.headers))
        path = request.url.path
        if path in self.routes:
            return self.routes[path]
        if path == "/version":
            return JSONResponse({"version": self.version})
        if path == "/v1/models":
            return JSONResponse({"data": [{"id": MODEL, "max_model_len": MAX_CONTEXT}]})
        if path == "/health":
            return PlainTextResponse("")
        if path in ("/server_info", "/tokenize", "/detokenize"):
            return JSONResponse({"detail": "Not Found"}, 404)
        if path.startswith("/inference/") and not self.scale_out:
            return JSONResponse({"error": "start the server with --enable-scale-out"}, 403)
        body = await request.json()
        if path == "/inference/v1/abort_requests":
            self.aborted += body["request_ids"]
            return Response()
        self.bodies.append(body)
        if unknown := self.refused & {*body, *body.get("sampling_params", ())}:
            return JSONResponse({"error": {"type": "BadRequestError", "param": min(unknown), "code": 400}}, 400)
        return self.answer(body)


class _NotesLeaving:
    """Sets `client_left` when a request's connection is closed from the other side."""

    def __init__(self, app: Starlette, fake: FakeVllm) -> None:
        self.app = app
        self.fake = fake

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noting() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.fake.client_left.set()
            return message

        await self.app(scope, noting, send)


@contextmanager
def running() -> Iterator[FakeVllm]:
    """Run a fake server on loopback, in a separate thread."""
    fake = FakeVllm()
    app = Starlette(routes=[Route("/{path:path}", fake.handle, methods=["GET", "POST"])])
    config = uvicorn.Config(
        _NotesLeaving(app, fake), host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
    )
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()


def by_route(route: str) -> type[VllmEngine]:
    """Return the engine with only that route."""
    return type("VllmEngine", (VllmEngine,), {"_routes": (route,)})


def open_and_sample(
    server: FakeVllm,
    params: SamplingParams = PARAMS,
    *,
    prompt: np.ndarray = PROMPT,
    stream: bool = True,
    answer: Callable[[dict[str, Any]], Response] | None = None,
    vocab_size: int = VOCAB_SIZE,
    **opening: Any,
) -> list[SampleDelta]:
    """Return the deltas of a call of a new engine. `answer` replaces the replies after opening."""

    async def main() -> list[SampleDelta]:
        engine = await VllmEngine.open(server.url, vocab_size=vocab_size, **({"verify_prompt": True} | opening))
        server.bodies.clear()
        server.answer = answer or server.answer
        try:
            return [d async for d in engine.sample(prompt, params, stream=stream, request_id="call-1")]
        finally:
            await engine.close()

    return asyncio.run(main())


def joined(deltas: list[SampleDelta]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return sum((d.token_ids for d in deltas), ()), sum((d.logprobs for d in deltas), ())
