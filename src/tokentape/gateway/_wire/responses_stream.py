"""Encode replies of the Responses API, whole and as events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TokentapeError
from tokentape.gateway._endpoint import DoneChoice
from tokentape.gateway._events import SampleEvent, TurnDelta, TurnDone, TurnStarted
from tokentape.gateway._http import encode_event
from tokentape.gateway._wire.responses_items import call_item, message_item, output_items, reasoning_item
from tokentape.gateway._wire.shared_fields import logprob_entries, reasoning_tokens, recorded
from tokentape.types import TokenIds, Turn

Item = dict[str, Any]


class ResponseEncoder:
    """Writes the replies to one request. `head` has the fields of the response that are known before sampling."""

    def __init__(
        self,
        head: Mapping[str, Any],
        started: TurnStarted,
        tokenizer: Tokenizer,
        namespaces: Mapping[str, tuple[str, str]],
        ignored: Sequence[str],
        *,
        logprobs: bool,
        return_token_ids: bool,
    ) -> None:
        self._head, self._reply_id, self._prompt_ids = head, started.reply_id, started.prompt_ids
        self._tokenizer, self._namespaces, self._ignored = tokenizer, namespaces, ignored
        self._logprobs, self._return_token_ids = logprobs, return_token_ids
        self._sequence = 0
        self._items: list[Item] = []
        """The items that the stream has sent."""
        self._text: str | None = None
        """The text of the last item so far, None if the item is closed."""
        self._late_reasoning = ""
        self._entries: list[Any] = []
        self._entries_sent = 0

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        (choice,) = choices
        turn = choice.done.turn
        items = output_items(
            turn.reply,
            self._reply_id,
            incomplete=choice.done.finish == "length",
            logprobs=logprob_entries(self._tokenizer, choice.sampled) if self._logprobs else (),
            namespaces=self._namespaces,
        )
        return self._response(choice.done, items)

    async def stream(self, events: AsyncGenerator[SampleEvent]) -> AsyncGenerator[bytes]:
        """Yield the events of a stream. Items are sent one after another, calls as a whole after sampling."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        done: TurnDone | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TurnDone):
                        done = event
                    for chunk in self._grown(event):
                        yield chunk
        except TokentapeError as error:
            code = "server_error" if error.status >= 500 else "invalid_prompt"
            failed = {"status": "failed", "error": {"code": code, "message": str(error)}, "output": self._items}
            yield self._event("error", code=error.code, message=str(error), param=None)
            yield self._event("response.failed", response={**begun, **failed})
            return
        assert done is not None
        for chunk in self._end(done):
            yield chunk
        finished = self._response(done, self._items)
        yield self._event(f"response.{finished['status']}", response=finished)

    def _grown(self, event: SampleEvent) -> Iterator[bytes]:
        reply = event.rest if isinstance(event, TurnDone) else event.reply
        if isinstance(event, TurnDelta) and self._logprobs:
            self._entries += logprob_entries(self._tokenizer, [event.sampled])
        if reply.reasoning and self._has_message:
            # The reasoning item that was streamed is already closed.
            self._late_reasoning += reply.reasoning
        elif reply.reasoning:
            if not self._items:
                yield from self._begin(reasoning_item(f"rs_{self._reply_id}", ""))
            yield self._say("response.reasoning_text.delta", reply.reasoning)
        if reply.content:
            if not self._has_message:
                yield from self._begin_message()
            entries, self._entries_sent = self._entries[self._entries_sent :], len(self._entries)
            yield self._say("response.output_text.delta", reply.content, logprobs=entries)

    def _end(self, done: TurnDone) -> Iterator[bytes]:
        calls = done.turn.reply.get("tool_calls") or ()
        if not calls and not self._has_message:
            yield from self._begin_message()
        yield from self._close(incomplete=done.finish == "length")
        if self._late_reasoning:
            yield from self._begin(reasoning_item(f"rs_{self._reply_id}_1", ""))
            yield self._say("response.reasoning_text.delta", self._late_reasoning)
            yield from self._close()
        for index, call in enumerate(calls):
            yield from self._call(call_item(self._reply_id, index, call, self._namespaces))

    @property
    def _has_message(self) -> bool:
        return any(item["type"] == "message" for item in self._items)

    def _begin_message(self) -> Iterator[bytes]:
        return self._begin(message_item(self._reply_id, "", incomplete=False, logprobs=()))

    def _begin(self, empty: Item) -> Iterator[bytes]:
        """Close the open item and open `empty`, an item without text."""
        yield from self._close()
        self._items.append({**empty, "content": [], "status": "in_progress"})
        self._text = ""
        yield self._event("response.output_item.added", output_index=self._index, item=self._items[-1])
        yield self._event("response.content_part.added", **self._part, part=empty["content"][0])

    def _say(self, name: str, text: str, **more: Any) -> bytes:
        self._text = (self._text or "") + text
        return self._event(name, **self._part, delta=text, **more)

    def _close(self, *, incomplete: bool = False) -> Iterator[bytes]:
        text, self._text = self._text, None
        if text is None:
            return
        if self._items[-1]["type"] == "reasoning":
            item, name, more = reasoning_item(self._items[-1]["id"], text), "reasoning_text", {}
        else:
            item = message_item(self._reply_id, text, incomplete=incomplete, logprobs=self._entries)
            name, more = "output_text", {"logprobs": self._entries}
        self._items[-1] = item
        yield self._event(f"response.{name}.done", **self._part, text=text, **more)
        yield self._event("response.content_part.done", **self._part, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, item: Item) -> Iterator[bytes]:
        self._items.append(item)
        where, arguments = {"item_id": item["id"], "output_index": self._index}, item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    @property
    def _part(self) -> dict[str, Any]:
        """Return the fields that identify a part in events: the only part of the last item."""
        return {"item_id": self._items[-1]["id"], "output_index": self._index, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = encode_event({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += 1
        return event

    def _response(self, done: TurnDone, items: Sequence[Item]) -> dict[str, Any]:
        response = {
            **self._head,
            **ended(done.turn, self._prompt_ids, self._tokenizer, done.cached_tokens or 0),
            "output": items,
            "tokentape": recorded(done.turn, self._ignored),
        }
        if self._return_token_ids:
            response["prompt_token_ids"] = self._prompt_ids.tolist()
            response["token_ids"] = done.turn.completion_ids.tolist()
        return response


def ended(turn: Turn, prompt_ids: TokenIds, tokenizer: Tokenizer, cached: int = 0) -> dict[str, Any]:
    """Return the fields of a response with its end and usage. The record does not have the `cached` tokens."""
    cut = turn.finish_reason == "length"
    prompt, completion = len(prompt_ids), len(turn.completion_ids)
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "completed_at": None if cut else int(turn.created_at),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(turn, tokenizer)},
            "total_tokens": prompt + completion,
        },
    }
