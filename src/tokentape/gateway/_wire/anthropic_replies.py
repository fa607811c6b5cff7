"""Encode replies and errors of Anthropic's Messages API, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from tokentape.chat._parse import ReplyDelta, ToolCall
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway._endpoint import Dialect, DoneChoice
from tokentape.gateway._events import SampleEvent, TurnDone, TurnStarted
from tokentape.gateway._http import encode_event
from tokentape.gateway._wire.anthropic_history import tool_use
from tokentape.gateway._wire.openai_fields import reasoning_tokens, recorded

if TYPE_CHECKING:
    from tokentape.gateway._wire.anthropic_messages import MessagesBody

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: TokentapeError) -> dict[str, Any]:
    """Return an error body for Anthropic's clients. `details.error_code` is the gateway's error code."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details: dict[str, Any] = {"error_code": error.code}
    if isinstance(error, InvalidRequest):
        details["param"] = error.param
        if error.param == "thread":
            # With this code the client's tool runner continues without a thread and sends the whole conversation.
            details["error_code"] = "thread_unsupported_request"
    return {"type": "error", "error": {"type": kind, "message": str(error), "details": details}}


class AnthropicEncoder:
    def __init__(self, body: MessagesBody, dialect: Dialect, ignored: Sequence[str], started: TurnStarted) -> None:
        self._body, self._ignored, self._tokenizer = body, ignored, dialect.tokenizer
        self._prompt_ids = started.prompt_ids
        named = {"id": f"msg_{started.reply_id}", "type": "message", "role": "assistant", "model": dialect.model_id}
        self._head: dict[str, Any] = named
        if body.return_token_ids:
            self._head["prompt_token_ids"] = self._prompt_ids.tolist()
        self._signature = f"tokentape-{started.reply_id}"

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        done = choices[0].done
        reply = done.turn.reply
        content: list[dict[str, Any]] = []
        if "reasoning_content" in reply:
            thinking = reply["reasoning_content"]
            content.append({"type": "thinking", "thinking": thinking, "signature": self._signature})
        if reply["content"]:
            content.append({"type": "text", "text": reply["content"]})
        for call in reply.get("tool_calls", ()):
            block, arguments = tool_use(call["id"], call["function"]["name"], call["function"]["arguments"])
            content.append({**block, "input": msgspec.Raw(arguments.encode())})
        return {**self._head, "content": content, **self._stop(done), **self._end(done)}

    async def stream(self, events: AsyncGenerator[SampleEvent]) -> AsyncGenerator[bytes]:
        """Yield the events of a stream: blocks while they grow, and the stop reason after the commit."""
        blocks = _OpenBlock(self._signature)
        done: TurnDone | None = None
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message={**self._head, **begun})
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TurnDone):
                    done = event
                for written in blocks.grow(event.rest if isinstance(event, TurnDone) else event.reply):
                    yield written
        assert done is not None
        for written in blocks.close():
            yield written
        yield _event("message_delta", delta=self._stop(done), **self._end(done))
        yield _event("message_stop")

    def _stop(self, done: TurnDone) -> dict[str, Any]:
        turn, stop = done.turn, {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[done.finish]
        # The context can be full before `max_tokens`.
        if done.finish == "length" and len(turn.completion_ids) < (self._body.max_tokens or 0):
            stop = "model_context_window_exceeded"
        string = turn.stop if done.finish == "stop" and isinstance(turn.stop, str) else None
        return {"stop_reason": stop if string is None else "stop_sequence", "stop_sequence": string}

    def _usage(self, done: TurnDone | None = None) -> dict[str, Any]:
        # In this API `input_tokens` excludes cached tokens, which are only known at the end.
        cached = 0 if done is None else done.cached_tokens or 0
        written: dict[str, Any] = {
            "input_tokens": len(self._prompt_ids) - cached,
            "output_tokens": 0 if done is None else len(done.turn.completion_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }
        if done is not None and (thought := reasoning_tokens(done.turn, self._tokenizer)):
            written["output_tokens_details"] = {"thinking_tokens": thought}
        return written

    def _end(self, done: TurnDone) -> dict[str, Any]:
        turn = done.turn
        more: dict[str, Any] = {"usage": self._usage(done), "tokentape": recorded(turn, self._ignored)}
        if self._body.return_token_ids:
            more["token_ids"] = turn.completion_ids.tolist()
        if self._body.logprobs:
            more["logprobs"] = turn.logprobs.tolist()
        return more


class _OpenBlock:
    """The open block of a stream. It ends when a block of another kind begins."""

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._kind: str | None = None
        self._index = -1

    def grow(self, delta: ReplyDelta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            yield from self._call(call)

    def close(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._kind is not None:
            yield _event("content_block_stop", index=self._index)
        self._kind = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        assert call.id is not None
        block, arguments = tool_use(call.id, call.name, call.arguments)
        yield from self.close()
        yield from self._open("tool_use", {**block, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield from self.close()

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self.close()
        self._kind = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)
