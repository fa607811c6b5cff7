"""OpenAI's Responses API: decode request bodies to turns, and read responses from the record.

The protocol is https://platform.openai.com/docs/api-reference/responses as the `openai` package speaks it, with the
extensions that chat completions have here. Unknown fields are refused with their name, except the fields in `IGNORED`.
docs/how-to/connect-an-agent.md has the choices that the protocol leaves open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape._session.tree import Session
from tokentape.chat._call_constraint import CallRule
from tokentape.engines._base import SamplingParams
from tokentape.errors import InvalidRequest, NotFound, TokentapeError
from tokentape.gateway._endpoint import DecodedRequest, Dialect, Gateway, RequestContext, address
from tokentape.gateway._events import TurnRequest, TurnStarted
from tokentape.gateway._http import check_depth, encode_event, json_response
from tokentape.gateway._openapi import also_below_sessions
from tokentape.gateway._pins import Count
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.responses_items import (
    ITEM_FIELDS,
    PART_FIELDS,
    Tools,
    input_items,
    join_leading,
    output_items,
    read_input,
    read_tools,
    without_instructions,
)
from tokentape.gateway._wire.responses_stream import ResponseEncoder, ended
from tokentape.gateway._wire.shared_fields import call_rule, forced_tools
from tokentape.store import StoredSession
from tokentape.types import Message, RecordedReply

IGNORED = shared.HINTS | {"client_metadata", "max_tool_calls", "stream_options"}
"""Fields that are accepted and have no effect: none of them changes what is sampled."""

_LOGPROBS = "message.output_text.logprobs"
_TEXT_FIELDS = frozenset({"format", "verbosity"})
_RESPONSE_ID = re.compile(r"resp_(.+)_([0-9a-f]{24})_([0-9]{1,9})")


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
            raise _no_response()
        return cls(match[1], match[2], int(match[3]))


class Responses(Dialect):
    path = "/v1/responses"
    summary = "OpenAI's Responses"
    body, ignored = ResponsesBody, IGNORED
    lists, parts = ("input", "tools"), ("content", "output", "summary")
    names: ClassVar[Mapping[str, str]] = {**Dialect.names, "json_schema": "text", "messages": "input"}

    def session_of(self, body: Any) -> str | None:
        previous = body.get("previous_response_id") if isinstance(body, dict) else None
        return ResponseId.read(previous).session_id if isinstance(previous, str) else None

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        read, _ = shared.read_fields(body, ResponsesBody, IGNORED, "input")
        _refuse_unserved(read)
        logprobs = bool(read.top_logprobs) or _LOGPROBS in read.include
        for name in ("chat_template_kwargs", "metadata", "tool_choice", "reasoning", "text"):
            check_depth([getattr(read, name)], name)
        tools = read_tools(read.tools)
        names = [tool["function"]["name"] for tool in tools.shown]
        in_namespaces = [name for _, name in tools.namespaces.values()]
        # Left-out tools satisfy "required". Other choices are checked only if they name a tool.
        named_only = bool(read.tools) or read.tool_choice != "required"
        shared.check_tool_choice(read.tool_choice, [*names, *in_namespaces], named_only=named_only)
        shown = () if read.tool_choice == "none" else tools.shown
        choice = None if read.tool_choice in ("auto", "none") else read.tool_choice
        chosen = forced_tools(choice, [*names, *in_namespaces])
        # A choice names a function of a namespace by its own name.
        forced = [name for name in names if name in chosen or tools.namespaces.get(name, ("", ""))[1] in chosen]
        strict = tools.strict if shown else ()
        rule = call_rule(context, choice, forced, strict, parallel=read.parallel_tool_calls)
        sampling = shared.sampling_params(
            read,
            context,
            max_tokens=read.max_output_tokens or 0,
            top_logprobs=read.top_logprobs,
            names=self.names,
            schema=shared.json_schema((read.text or {}).get("format"), "text.format", context, shown),
        )
        turn = TurnRequest(
            session_id=context.session_id,
            messages=await _messages(read, context),
            tools=shown,
            template_kwargs=read.chat_template_kwargs,
            sampling=sampling,
            stream=read.stream,
            calls=rule,
        )

        ignored = (*_ignored_params(read, tools, rule), *shared.ignored_fields(read, context.engine, self.model_id))

        def encoder(started: TurnStarted) -> ResponseEncoder:
            response_id = ResponseId(context.session_id, started.reply_id, len(read.instructions or ""))
            head = _head(response_id, started.created_at, self.model_id, read, started.sampling or sampling)
            options: dict[str, bool] = {"logprobs": logprobs, "return_token_ids": read.return_token_ids}
            return ResponseEncoder(head, started, self.tokenizer, tools.namespaces, ignored, **options)

        return DecodedRequest(turn, encoder, ignored)

    def error_event(self, error: TokentapeError) -> bytes:
        """Return the last event of a stream for an error that the encoder did not handle."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": 0}
        return encode_event(event, "error")


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints of recorded responses. They show the fields that the record has."""
    turns = gateway.turns

    async def addressed_response(request: Request) -> tuple[ResponseId, RecordedReply, Session, StoredSession]:
        caller = gateway.caller(request)
        response_id = ResponseId.read(request.path_params["response_id"])
        address(request, caller, response_id.session_id)
        try:
            await turns.session(response_id.session_id, caller.sees)
        except NotFound:
            raise _no_response() from None
        stored = await asyncio.to_thread(turns.store.load_session, response_id.session_id)
        answer = next((answer for answer in stored.answers if answer.reply_id == response_id.reply_id), None)
        if answer is None:
            raise _no_response()
        return response_id, answer, stored.tree(), stored

    async def retrieve(request: Request) -> Response:
        response_id, answer, session, stored = await addressed_response(request)
        turn, tokenizer = stored.turns[answer.turns[0]], turns.renderer.tokenizer
        first = session.path(turn.seq)[0].messages[:1]
        system = first[0]["content"] if first and first[0]["role"] == "system" else ""
        body = ResponsesBody(input="", instructions=system[: response_id.instructions] or None)
        body.tools = [{"type": "function", **tool["function"]} for tool in stored.setups[turn.setup].tools]
        sampled = {name: turn.sampling[name] for name in ("temperature", "top_p")}
        head = _head(response_id, answer.created_at, gateway.model_id, body, SamplingParams(max_tokens=0, **sampled))
        end = ended(turn, session.context_before(turn.seq), tokenizer)
        output = output_items(turn.reply, response_id.reply_id, incomplete=turn.finish_reason == "length")
        return json_response({**head, **end, "output": output, "tokentape": shared.recorded(turn, ())})

    async def list_input(request: Request) -> Response:
        response_id, answer, session, _ = await addressed_response(request)
        *earlier, last = session.path(answer.turns[0])
        before = [message for turn in earlier for message in (*turn.messages, turn.reply)]
        items = input_items(
            without_instructions((*before, *last.messages), response_id.instructions), response_id.reply_id
        )
        if request.query_params.get("order", "desc") == "desc":
            items.reverse()
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return json_response({"object": "list", "data": items, "has_more": False, **ends})

    async def delete(request: Request) -> Response:
        response_id, *_ = await addressed_response(request)
        raise InvalidRequest(
            "a response is part of its session and can't be deleted alone; delete the session with "
            f"DELETE /sessions/{response_id.session_id}",
            "response_id",
        )

    path = Responses.path + "/{response_id}"
    return [
        *also_below_sessions("GET", path, retrieve, "A recorded response"),
        *also_below_sessions("DELETE", path, delete, "Refused: responses are turns of a session"),
        *also_below_sessions("GET", f"{path}/input_items", list_input, "What a recorded response answers"),
    ]


async def _messages(body: ResponsesBody, context: RequestContext) -> tuple[Message, ...]:
    before: tuple[Message, ...] = ()
    if body.previous_response_id is not None:
        previous = ResponseId.read(body.previous_response_id)
        try:
            before = await context.conversation(previous.reply_id)
        except NotFound:
            raise _no_response() from None
        before = without_instructions(before, previous.instructions)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = join_leading([*instructions, *before, *await read_input(body.input, context)])
    if not messages:
        raise InvalidRequest("input contains no item; expected at least one", "input")
    return messages


def _refuse_unserved(body: ResponsesBody) -> None:
    served = ("reasoning.encrypted_content", _LOGPROBS)
    # The other values ask for more output of tools that are not supported here, so they have no effect.
    supported = all(name in served or name.partition(".")[0].endswith("_call") for name in body.include)
    shared.refuse_unserved(
        {
            "include": (supported and "message.input_image.image_url" not in body.include, " and ".join(served)),
            "truncation": (body.truncation in ("auto", "disabled"), '"auto" or "disabled"'),
            "background": (not body.background, "false"),
            "conversation": (body.conversation is None, "null; continue with previous_response_id"),
            "context_management": (body.context_management in (None, []), "an empty list"),
            "prompt": (body.prompt is None, "null; send instructions and input"),
        }
    )


def _ignored_params(body: ResponsesBody, tools: Tools, rule: CallRule | None) -> tuple[str, ...]:
    flags = {
        "tools": tools.left_out or (rule is None and bool(tools.strict)),
        "tool_choice": body.tool_choice not in ("auto", "none") and rule is None,
        "parallel_tool_calls": not body.parallel_tool_calls and not (rule and rule.required),
        "reasoning": any(value is not None for value in (body.reasoning or {}).values()),
        "text": (body.text or {}).get("verbosity") is not None,
        "truncation": body.truncation == "auto",
    }
    items = body.input if isinstance(body.input, list) else []
    return (
        *(name for name, is_set in flags.items() if is_set),
        *shared.unknown_fields("text", [body.text], _TEXT_FIELDS),
        *shared.unknown_fields("input", items, ITEM_FIELDS),
        *shared.unknown_fields("input.content", shared.entries("content", items), PART_FIELDS),
        *shared.unknown_fields("input.output", shared.entries("output", items), PART_FIELDS),
    )


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


def _head(
    response_id: ResponseId, created_at: float, model_id: str, body: ResponsesBody, sampling: SamplingParams
) -> dict[str, Any]:
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


def _no_response() -> NotFound:
    """Return the error for unknown responses and, without distinction, responses in other owners' sessions."""
    return NotFound("there is no response with this id")
