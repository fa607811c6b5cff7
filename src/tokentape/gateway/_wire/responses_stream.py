"""Encode replies of the Responses API, whole and as events of a stream, with the fields that they repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SamplingParams
from tokentape.errors import NotFound, TokentapeError
from tokentape.gateway._dialect import Dialect, DoneChoice, Encoder
from tokentape.gateway._events import TurnDelta, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._http import encode_event
from tokentape.gateway._pins import Count
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.responses_items import call_item, message_item, output_items, reasoning_item
from tokentape.types import TokenIds, Turn

LOGPROBS = "message.output_text.logprobs"
_RESPONSE_ID = re.compile(r"resp_(.+)_([0-9a-f]{24})_([0-9]{1,9})")

Item = dict[str, Any]


class ResponsesBody(shared.SamplingFields, kw_only=True):
    """A request's fields."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Count | None = None
    top_logprobs: shared.TopLogprobs = 0
    include: list[str] = msgspec.field(default_factory=list)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Any = "disabled"
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    user: str | None = None
    store: bool = True
    background: bool = False
    conversation: Any = None
    context_management: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class ResponseId(NamedTuple):
    session_id: str
    reply_id: str
    instructions: int
    """How many characters at the start of the system message were instructions."""

    def __str__(self) -> str:
        return f"resp_{self.session_id}_{self.reply_id}_{self.instructions}"

    @classmethod
    def read(cls, text: str) -> ResponseId:
        """Parse a response id. Raises `NotFound` if it is not in the format of this gateway's ids."""
        match = _RESPONSE_ID.fullmatch(text)
        if match is None:
            raise no_response()
        return cls(match[1], match[2], int(match[3]))


_ECHOED = (
    "instructions",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "store",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
)
"""Fields of a request that its response repeats."""


def known_before(
    response_id: ResponseId, created_at: float, model_id: str, body: ResponsesBody, sampling: SamplingParams
) -> dict[str, Any]:
    """Return the fields of a response that are known before sampling."""
    return {
        "id": str(response_id),
        "object": "response",
        "created_at": int(created_at),
        "model": model_id,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        **{name: getattr(body, name) for name in _ECHOED},
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "max_output_tokens": sampling.max_tokens or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }


class ResponseEncoder(Encoder[ResponsesBody]):
    def __init__(
        self,
        dialect: Dialect,
        body: ResponsesBody,
        ignored: Sequence[str],
        turn: TurnRequest,
        namespaces: Mapping[str, tuple[str, str]],
        started: TurnStarted,
    ) -> None:
        super().__init__(dialect, body, ignored, started)
        response_id = ResponseId(turn.session_id, started.reply_id, len(body.instructions or ""))
        sampling = started.sampling or turn.sampling
        self._head = known_before(response_id, started.created_at, dialect.model_id, body, sampling)
        self._namespaces = namespaces
        self._logprobs = bool(body.top_logprobs) or LOGPROBS in body.include
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
        items = output_items(
            choice.done.turn.reply,
            self._reply_id,
            incomplete=choice.done.finish == "length",
            logprobs=shared.logprob_entries(self._tokenizer, choice.sampled) if self._logprobs else (),
            namespaces=self._namespaces,
        )
        return self._response(choice.done, items)

    @property
    def _begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._begun)
        yield self._event("response.in_progress", response=self._begun)

    def grow(self, event: TurnDelta | TurnDone) -> Iterator[bytes]:
        """Yield events for one item after another. Calls are sent as a whole after sampling."""
        reply = event.rest if isinstance(event, TurnDone) else event.reply
        if isinstance(event, TurnDelta) and self._logprobs:
            self._entries += shared.logprob_entries(self._tokenizer, [event.sampled])
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

    def end(self, done: Sequence[TurnDone]) -> Iterator[bytes]:
        (only,) = done
        calls = only.turn.reply.get("tool_calls") or ()
        if not calls and not self._has_message:
            yield from self._begin_message()
        yield from self._close(incomplete=only.finish == "length")
        if self._late_reasoning:
            yield from self._begin(reasoning_item(f"rs_{self._reply_id}_1", ""))
            yield self._say("response.reasoning_text.delta", self._late_reasoning)
            yield from self._close()
        for index, call in enumerate(calls):
            yield from self._call(call_item(self._reply_id, index, call, self._namespaces))
        finished = self._response(only, self._items)
        yield self._event(f"response.{finished['status']}", response=finished)

    def failed(self, error: TokentapeError) -> bytes:
        if type(error) is TokentapeError:
            # An unexpected error: the state of the stream is not known.
            event = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": 0}
            return encode_event(event, "error")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"status": "failed", "error": {"code": code, "message": str(error)}, "output": self._items}
        shown = self._event("error", code=error.code, message=str(error), param=None)
        return shown + self._event("response.failed", response={**self._begun, **failed})

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
            "tokentape": self._recorded(done.turn),
        }
        if self._body.return_token_ids:
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
            "output_tokens_details": {"reasoning_tokens": shared.reasoning_tokens(turn, tokenizer)},
            "total_tokens": prompt + completion,
        },
    }


def no_response() -> NotFound:
    """Return the error for an unknown response. A response in another owner's session gets the same error."""
    return NotFound("there is no response with this id")
