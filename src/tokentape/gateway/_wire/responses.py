"""OpenAI's Responses API: decode request bodies to turns, and read responses from the record.

The protocol is https://platform.openai.com/docs/api-reference/responses as the `openai` package speaks it, with the
extensions that chat completions have here. Unknown fields are refused with their name, except the fields in `IGNORED`.
docs/how-to/connect-an-agent.md has the choices that the protocol leaves open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape._session.tree import Session
from tokentape.engines._base import SamplingParams
from tokentape.errors import InvalidRequest, NotFound
from tokentape.gateway._dialect import DecodedRequest, Dialect, RequestContext
from tokentape.gateway._endpoint import Gateway, address
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._http import check_depth, json_response
from tokentape.gateway._openapi import also_below_sessions
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.responses_items import (
    ITEM_FIELDS,
    PART_FIELDS,
    input_items,
    join_leading,
    output_items,
    read_input,
    read_tools,
    without_instructions,
)
from tokentape.gateway._wire.responses_stream import (
    LOGPROBS,
    ResponseEncoder,
    ResponseId,
    ResponsesBody,
    ended,
    known_before,
    no_response,
)
from tokentape.gateway._wire.template_kwargs import check_template_kwargs, unread_kwargs
from tokentape.store import StoredSession
from tokentape.types import Message, RecordedReply

IGNORED = shared.HINTS | {"client_metadata", "max_tool_calls", "stream_options"}
"""Fields that are accepted and have no effect: none of them changes what is sampled."""

_TEXT_FIELDS = frozenset({"format", "verbosity"})


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
        check_template_kwargs(read.chat_template_kwargs)
        for name in ("metadata", "tool_choice", "reasoning", "text"):
            check_depth([getattr(read, name)], name)
        tools = read_tools(read.tools)
        names = [tool["function"]["name"] for tool in tools.shown]
        in_namespaces = [name for _, name in tools.namespaces.values()]
        # Left-out tools satisfy "required". Other choices are checked only if they name a tool.
        named_only = bool(read.tools) or read.tool_choice != "required"
        chosen = shared.forced_tools(read.tool_choice, [*names, *in_namespaces], named_only=named_only)
        # A choice names a function of a namespace by its own name.
        forced = [name for name in names if name in chosen or tools.namespaces.get(name, ("", ""))[1] in chosen]
        shown = () if read.tool_choice == "none" else tools.shown
        choice = None if read.tool_choice in ("auto", "none") else read.tool_choice
        strict = tools.strict if shown else ()
        rule = shared.call_rule(context, choice, forced, strict, parallel=read.parallel_tool_calls)
        schema = shared.json_schema((read.text or {}).get("format"), "text.format", context, shown)
        max_tokens, top_logprobs = read.max_output_tokens or 0, read.top_logprobs
        turn = TurnRequest(
            session_id=context.session_id,
            sampling=shared.sampling_params(read, context, self.names, max_tokens, top_logprobs, json_schema=schema),
            messages=await _messages(read, context),
            tools=shown,
            template_kwargs=read.chat_template_kwargs,
            stream=read.stream,
            calls=rule,
        )
        ignored = (
            *(["tools"] if tools.left_out or (rule is None and tools.strict) else []),
            *shared.unenforced(choice, read.parallel_tool_calls, rule),
            *_without_effect(read),
            *unread_kwargs(read.chat_template_kwargs, context),
            *shared.ignored_fields(read, context, self.model_id),
        )
        return DecodedRequest(turn, partial(ResponseEncoder, self, read, ignored, turn, tools.namespaces), ignored)


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
            raise no_response() from None
        stored = await asyncio.to_thread(turns.store.load_session, response_id.session_id)
        answer = next((answer for answer in stored.answers if answer.reply_id == response_id.reply_id), None)
        if answer is None:
            raise no_response()
        return response_id, answer, stored.tree(), stored

    async def retrieve(request: Request) -> Response:
        response_id, answer, session, stored = await addressed_response(request)
        turn, tokenizer = stored.turns[answer.turns[0]], turns.renderer.tokenizer
        first = session.path(turn.seq)[0].messages[:1]
        system = first[0]["content"] if first and first[0]["role"] == "system" else ""
        body = ResponsesBody(input="", instructions=system[: response_id.instructions] or None)
        body.tools = [{"type": "function", **tool["function"]} for tool in stored.setups[turn.setup].tools]
        sampled = {name: turn.sampling[name] for name in ("temperature", "top_p")}
        head = known_before(
            response_id, answer.created_at, gateway.model_id, body, SamplingParams(max_tokens=0, **sampled)
        )
        end = ended(turn, session.context_before(turn.seq), tokenizer)
        output = output_items(turn.reply, response_id.reply_id, incomplete=turn.finish_reason == "length")
        recorded = {"session_id": turn.session_id, "turn": turn.seq}
        return json_response({**head, **end, "output": output, "tokentape": recorded})

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
            raise no_response() from None
        before = without_instructions(before, previous.instructions)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = join_leading([*instructions, *before, *await read_input(body.input, context)])
    if not messages:
        raise InvalidRequest("input contains no item; expected at least one", "input")
    return messages


def _refuse_unserved(body: ResponsesBody) -> None:
    served = ("reasoning.encrypted_content", LOGPROBS)
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


def _without_effect(body: ResponsesBody) -> Iterator[str]:
    """Yield the parameters with no effect, and the fields inside a body."""
    items = body.input if isinstance(body.input, list) else []
    if any(value is not None for value in (body.reasoning or {}).values()):
        yield "reasoning"
    if (body.text or {}).get("verbosity") is not None:
        yield "text"
    if body.truncation == "auto":
        yield "truncation"
    yield from shared.unknown_fields("text", [body.text], _TEXT_FIELDS)
    yield from shared.unknown_fields("input", items, ITEM_FIELDS)
    yield from shared.unknown_fields("input.content", shared.entries("content", items), PART_FIELDS)
    yield from shared.unknown_fields("input.output", shared.entries("output", items), PART_FIELDS)
