"""Serve a mock of vLLM on loopback that costs almost nothing: fixed completions, with real token ids and logprobs.

It serves `/v1/completions` with token ids (for Tokentape), `/v1/chat/completions` with `return_token_ids` (for gateways
that capture), and, on a second port, also `/inference/v1/generate` (for verifiers). It counts prompts and never decodes
them, so that the figures show the gateway.

    python -m benchmarks.gateway.upstream REPLIES.json     # prints the two ports
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httptools
import uvloop

MODEL = "m"
MAX_CONTEXT = 262_144
BYTES_PER_TOKEN = 4.4
"""Approximate bytes per token of a request with messages; the made-up prompt is as long as a real one."""


class Replies:
    """The completions, serialized for each route. Requests get them in turn."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        noise = random.Random(0)
        self._taken = 0
        self._all = [_Written(one, noise) for one in replies]
        self.one = _Written({**replies[0], "ids": replies[0]["ids"][:1]}, noise, finish="length", alternatives=2)
        """Reply to probes that sample one token."""
        ids = [str(noise.randrange(1000, 150_000)) for _ in range(MAX_CONTEXT)]
        self._prompt = ",".join(ids).encode()
        self._ends = [0]
        for one in ids:
            self._ends.append(self._ends[-1] + len(one) + 1)

    def next(self) -> _Written:
        """Return the next completion."""
        self._taken += 1
        return self._all[self._taken % len(self._all)]

    def prompt_of(self, body: bytes) -> tuple[bytes, int]:
        """Return ids, as JSON, that could be the rendering of the messages in `body`, and their number."""
        tokens = min(int(len(body) / BYTES_PER_TOKEN), MAX_CONTEXT - 1)
        return b"[" + self._prompt[: max(self._ends[tokens] - 1, 0)] + b"]", tokens


class _Written:
    def __init__(
        self, reply: dict[str, Any], noise: random.Random, finish: str = "stop", alternatives: int = 1
    ) -> None:
        ids: list[int] = reply["ids"]
        self._alternatives = alternatives
        logprobs = [round(-noise.expovariate(3.0), 6) for _ in ids]
        self.tokens = len(ids)
        self.completion = self._completion(reply["text"], ids, logprobs, finish)
        self.completion_events = [
            self._completion("x", [one], [logprob], finish if at == len(ids) - 1 else None)
            for at, (one, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]
        named = [
            {"token": f"token_id:{i}", "logprob": lp, "top_logprobs": []} for i, lp in zip(ids, logprobs, strict=True)
        ]
        generated = {"index": 0, "token_ids": ids, "logprobs": {"content": named}, "finish_reason": "stop"}
        self.generated = _json(generated | {"stop_reason": ids[-1]})
        spelled = [{"token": "x", "logprob": lp, "bytes": [120], "top_logprobs": []} for lp in logprobs]
        message = {"role": "assistant", "content": reply["content"], "tool_calls": reply["tool_calls"]}
        choice = {"index": 0, "finish_reason": "tool_calls", "stop_reason": None, "token_ids": ids}
        self.chat = _json(choice | {"message": message, "logprobs": {"content": spelled}})
        self.chat_plain = _json({k: v for k, v in choice.items() if k != "token_ids"} | {"message": message})
        self.chat_events = []
        for at, (one, entry) in enumerate(zip(ids, spelled, strict=True)):
            last = at == len(ids) - 1
            delta: dict[str, Any] = {"content": " x"} if not last else {"tool_calls": _indexed(reply["tool_calls"])}
            if at == 0:
                delta["role"] = "assistant"
            finish = "tool_calls" if last else None
            event = {"index": 0, "delta": delta, "logprobs": {"content": [entry]}, "token_ids": [one]}
            self.chat_events.append(_json(event | {"finish_reason": finish}))

    def _completion(self, text: str, ids: list[int], logprobs: list[float], finish: str | None) -> bytes:
        others = {f"token_id:{other}": -9.0 - other for other in range(self._alternatives - 1)}
        return _json(
            {
                "index": 0,
                "text": text,
                "logprobs": {
                    "text_offset": [],
                    "token_logprobs": logprobs,
                    "tokens": [f"token_id:{one}" for one in ids],
                    "top_logprobs": [{f"token_id:{one}": lp} | others for one, lp in zip(ids, logprobs, strict=True)],
                },
                "finish_reason": finish,
                "stop_reason": ids[-1] if finish == "stop" else None,
                "token_ids": ids,
            }
        )


def _indexed(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": at, **call} for at, call in enumerate(calls)]


class Upstream:
    """State that both ports share."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies
        self.interval = 0.0
        """Seconds between the events of a stream."""

    async def answer(self, path: str, body: bytes, write: Callable[[bytes], None], *, generates: bool) -> None:
        """Answer one request."""
        if path == "/v1/completions":
            await self._complete(body, write)
        elif path == "/v1/chat/completions":
            await self._chat(body, write)
        elif path == "/inference/v1/generate" and generates:
            tokens = _ids_in(body, b'"token_ids":')[1]
            reply = self.replies.next()
            write(
                _whole(
                    b'{"request_id":"g","choices":[' + reply.generated + b'],"usage":' + _usage(tokens, reply) + b"}"
                )
            )
        elif path == "/version":
            write(_whole(b'{"version":"0.32.0"}'))
        elif path == "/v1/models":
            card = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": MAX_CONTEXT}
            write(_whole(_json({"object": "list", "data": [card]})))
        elif path in ("/health", "/ping"):
            write(_whole(b"{}"))
        elif path == "/interval":
            self.interval = float(body)
            write(_whole(b"{}"))
        else:
            write(_whole(b'{"detail":"Not Found"}', 404))

    async def _complete(self, body: bytes, write: Callable[[bytes], None]) -> None:
        prompt, tokens = _ids_in(body, b'"prompt":')
        reply = self.replies.one if b'"max_tokens":1,' in body else self.replies.next()
        echo = prompt if b'"return_token_ids":true' in body else b"null"
        usage = _usage(tokens, reply)
        head = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":['
        if b'"stream":true' not in body:
            choice = reply.completion[:-1] + b',"prompt_token_ids":' + echo + b"}"
            write(_whole(head + choice + b'],"usage":' + usage + b"}"))
            return
        first = reply.completion_events[0][:-1] + b',"prompt_token_ids":' + echo + b"}"
        events = [head + one + b"]}" for one in (first, *reply.completion_events[1:])]
        await self._stream([*events, head + b'],"usage":' + usage + b"}"], write)

    async def _chat(self, body: bytes, write: Callable[[bytes], None]) -> None:
        prompt, tokens = self.replies.prompt_of(body)
        reply = self.replies.next()
        compact = body[-4096:].replace(b" ", b"") + body[:4096].replace(b" ", b"")
        with_ids = b'"return_token_ids":true' in compact
        usage = _usage(tokens, reply)
        told = b'"prompt_token_ids":' + prompt + b"," if with_ids else b""
        if b'"stream":true' not in compact:
            choice = reply.chat if with_ids else reply.chat_plain
            head = b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m",' + told + b'"choices":['
            write(_whole(head + choice + b'],"usage":' + usage + b"}"))
            return
        head = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
        events = [
            head + (told if at == 0 else b"") + b'"choices":[' + one + b"]}" for at, one in enumerate(reply.chat_events)
        ]
        await self._stream([*events, head + b'"choices":[],"usage":' + usage + b"}"], write)

    async def _stream(self, events: list[bytes], write: Callable[[bytes], None]) -> None:
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in [*events, b"[DONE]"]:
            data = b"data: " + event + b"\n\n"
            write(b"%x\r\n%s\r\n" % (len(data), data))
            await asyncio.sleep(self.interval)
        write(b"0\r\n\r\n")


class Connection(asyncio.Protocol):
    """Connection of one client."""

    def __init__(self, upstream: Upstream, *, generates: bool) -> None:
        self._upstream = upstream
        self._generates = generates
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._body = bytearray()
        self._path = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.decode().partition("?")[0]
        self._body = bytearray()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        answering = self._upstream.answer(
            self._path, bytes(self._body), self._transport.write, generates=self._generates
        )
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()


def _ids_in(body: bytes, key: bytes) -> tuple[bytes, int]:
    start = body.index(b"[", body.index(key))
    end = body.index(b"]", start) + 1
    return body[start:end], body.count(b",", start, end) + 1


def _usage(prompt: int, reply: _Written) -> bytes:
    text = '{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
    return (text % (prompt, reply.tokens, prompt + reply.tokens)).encode()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _whole(body: bytes, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def main(replies: list[dict[str, Any]]) -> None:
    upstream = Upstream(Replies(replies))
    loop = asyncio.get_running_loop()
    servers = [
        # As many waiting connections as uvicorn, which vLLM uses, allows.
        await loop.create_server(partial(Connection, upstream, generates=generates), "127.0.0.1", 0, backlog=2048)
        for generates in (False, True)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(json.loads(Path(sys.argv[1]).read_bytes())))
