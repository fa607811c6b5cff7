"""The bytes of a chat completion's stream: writing pieces gives the same bytes as serializing every chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_tokenizer
from tests.gateway.request_context import FakeContext
from tests.records import make_turn
from tokentape.chat._parse import Reply, ReplyDelta, ToolCall
from tokentape.engines._base import SampleDelta
from tokentape.gateway._access import RequestLog
from tokentape.gateway._events import TurnDelta, TurnDone, TurnEvent, TurnStarted
from tokentape.gateway._wire.chat_completions import ChatCompletions
from tokentape.gateway._wire.shared_fields import logprob_entries

STARTED = TurnStarted("0" * 24, 1700000000.5, np.array([5, 6, 7], np.int32))
TEXT = st.sampled_from(["", "", " fox", 'say "so"\n', "\u00e9\u4e2d\U0001f642", "\\u0000\x00</script>\u2028"])
CALLS = st.lists(st.builds(ToolCall, st.just("f"), TEXT, st.just("ok"), st.just((0, 1)), st.just("id1")), max_size=2)
REPLIES = st.builds(ReplyDelta, TEXT, TEXT, CALLS.map(tuple) | st.just(()))
DELTAS = st.builds(
    TurnDelta, st.integers(0, 1), st.builds(SampleDelta, st.just((11, 12)), st.just((-0.5, -1.25))), REPLIES
)


def _done(choice: int, rest: ReplyDelta) -> TurnDone:
    return TurnDone(choice, make_turn("s", choice), Reply("", "", (), reasoning_open=False), rest, "stop")


def _written_whole(events: Sequence[TurnEvent], body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks, each built separately."""
    tokenizer = load_tokenizer("qwen3")
    chunks: list[dict[str, Any]] = []
    calls, begun = [0, 0], set[int]()

    def chunk(choice: dict[str, Any], **more: Any) -> None:
        head = {"id": f"chatcmpl-{STARTED.reply_id}", "created": 1700000000, "model": "m"}
        whole = {"finish_reason": None, "logprobs": None, **choice}
        chunks.append({**head, "object": "chat.completion.chunk", **more, "choices": [whole]})

    for event in events:
        assert not isinstance(event, TurnStarted)
        if event.choice not in begun:
            prompt = {"prompt_token_ids": [5, 6, 7]} if body.get("return_token_ids") and not begun else {}
            chunk({"index": event.choice, "delta": {"role": "assistant", "content": ""}}, **prompt)
            begun.add(event.choice)
        deltas = event.rest if isinstance(event, TurnDone) else event.reply
        delta: dict[str, Any] = {}
        if deltas.content:
            delta["content"] = deltas.content
        if deltas.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = deltas.reasoning
        for call in deltas.tool_calls:
            function = {"name": call.name, "arguments": call.arguments}
            made = {"index": calls[event.choice], "id": call.id, "type": "function", "function": function}
            delta.setdefault("tool_calls", []).append(made)
            calls[event.choice] += 1
        choice: dict[str, Any] = {"index": event.choice, "delta": delta}
        if isinstance(event, TurnDelta) and body.get("logprobs"):
            choice["logprobs"] = {"content": logprob_entries(tokenizer, [event.sampled])}
        if isinstance(event, TurnDelta) and body.get("return_token_ids"):
            choice["token_ids"] = list(event.sampled.token_ids)
        if delta or len(choice) > 2:
            chunk(choice)
    for at in (0, 1):
        recorded = {"session_id": "s", "turn": at}
        chunk({"index": at, "delta": {}, "finish_reason": "stop", "tokentape": recorded})
    return chunks


@given(
    deltas=st.lists(DELTAS, max_size=8),
    rests=st.tuples(REPLIES, REPLIES),
    more=st.sampled_from([{}, {"logprobs": True}, {"return_token_ids": True}]),
)
def test_stream_bytes_equal_chunks_serialized_one_by_one(
    deltas: list[TurnDelta], rests: tuple[ReplyDelta, ReplyDelta], more: dict[str, Any]
) -> None:
    events: list[TurnEvent] = [*deltas, *(_done(choice, rest) for choice, rest in enumerate(rests))]
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": 2, **more}

    async def main() -> bytes:
        request = await ChatCompletions("m", load_tokenizer("qwen3")).decode(body, FakeContext())

        async def happening() -> AsyncGenerator[TurnEvent]:
            for event in events:
                yield event

        happened = happening()
        stream = request.encoder(STARTED).stream(await anext(happened), happened, RequestLog())
        return b"".join([event async for event in stream])

    written = [json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in _written_whole(events, body)]
    assert asyncio.run(main()).decode() == "".join(f"data: {text}\n\n" for text in [*written, "[DONE]"])
