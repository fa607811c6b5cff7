"""Anthropic's Messages API: decode requests, count the tokens of their contexts, and encode replies and streams.

The protocol is https://docs.anthropic.com/en/api/messages as the `anthropic` package and Claude Code use it. Extensions
are `seed`, `chat_template_kwargs`, `return_token_ids` and `logprobs`. Unknown fields are refused with an error that
names them. Fields in `IGNORED` have no effect. docs/how-to/connect-an-agent.md documents what the protocol leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.chat._call_constraint import CallRule
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SamplingParams
from tokentape.errors import InvalidRequest, TokentapeError, UnsupportedParameter
from tokentape.gateway._dialect import DecodedRequest, Dialect, DoneChoice, Encoder, RequestContext
from tokentape.gateway._endpoint import Gateway, address
from tokentape.gateway._events import TurnDelta, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._http import check_depth, encode_event, json_response
from tokentape.gateway._keys import new_session_id
from tokentape.gateway._openapi import also_below_sessions
from tokentape.gateway._pins import Count, Seed, StopString, Temperature, TopP
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.anthropic_history import (
    BLOCK_FIELDS,
    SOURCE_FIELDS,
    AnthropicMessage,
    Part,
    read_messages,
    takes_later_system,
    tool_use,
)
from tokentape.gateway._wire.template_kwargs import check_template_kwargs, unread_kwargs
from tokentape.types import Tool

IGNORED = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that are accepted without effect, because they do not change what is sampled."""

UNSERVED = frozenset({"container", "mcp_servers", "output_format", "thread"})
"""Fields that only Anthropic's servers implement. They are refused unless they are empty."""


class AnthropicTool(Struct):
    name: Annotated[str, Meta(min_length=1)] = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    strict: bool | None = None


_OUTPUT_FIELDS = frozenset({"format", "effort", "task_budget"})
_TOOL_FIELDS = frozenset(AnthropicTool.__struct_fields__) | {"cache_control"}
_MESSAGE_FIELDS = frozenset(AnthropicMessage.__struct_fields__)


class AnthropicToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class ContextEdit(Struct):
    type: str
    keep: Any = None


class ContextManagement(Struct):
    edits: list[ContextEdit] | None = None


class OutputConfig(Struct, frozen=True):
    format: Any = None
    effort: str | None = None
    task_budget: Any = None


class MessagesBody(Struct, kw_only=True):
    """The fields of a request."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str = ""
    system: str | list[Part] = ""
    max_tokens: Count | None = None
    stream: bool = False
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31)] = 0
    seed: Seed | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] = []
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicToolChoice = AnthropicToolChoice("auto")
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    compaction: Any = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False
    logprobs: bool = False


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


class AnthropicMessages(Dialect):
    """Anthropic's Messages API for a model."""

    path = "/v1/messages"
    summary = "Anthropic's Messages"
    body, ignored = MessagesBody, IGNORED
    lists = ("messages", "system", "tools")
    names: ClassVar[Mapping[str, str]] = {
        **Dialect.names,
        "json_schema": "output_config",
        "stop_strings": "stop_sequences",
    }

    def __init__(self, model_id: str, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        super().__init__(model_id, tokenizer)
        self._later_system = takes_later_system(template)
        self._switches_thinking = "enable_thinking" in template.source

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        read = _read(body)
        if read.max_tokens is None:
            raise InvalidRequest("max_tokens is missing", "max_tokens")
        if read.messages[-1].role == "assistant":
            shared.refuse_prefill("messages")
        turn = self.turn(read, context.session_id, takes_images=context.takes_images)
        schema = shared.json_schema(read.output_config.format, "output_config.format", context, turn.tools)
        rule = _rule(read, context)
        turn = structs.replace(turn, sampling=replace(turn.sampling, json_schema=schema), calls=rule)
        shared.refuse_unsupported(turn.sampling, context.engine, self.names)
        blocks = shared.entries("content", body["messages"])
        results = shared.entries("content", blocks)
        sources = [block.get("source") for block in (*blocks, *results)]
        ignored = (
            *self._ignored_params(read, rule),
            *shared.ignored_model(read.model, context.engine, self.model_id),
            *unread_kwargs(read.chat_template_kwargs, context),
            *shared.unknown_fields("output_config", [body.get("output_config")], _OUTPUT_FIELDS),
            *shared.unknown_fields("tools", body.get("tools") or (), _TOOL_FIELDS),
            *shared.unknown_fields("messages", body["messages"], _MESSAGE_FIELDS),
            *shared.unknown_fields("messages.content", blocks, BLOCK_FIELDS),
            *shared.unknown_fields("messages.content.content", results, BLOCK_FIELDS),
            *shared.unknown_fields("messages.content.source", sources, SOURCE_FIELDS),
            *shared.unknown_fields("system", shared.entries("system", [body]), BLOCK_FIELDS),
        )
        return DecodedRequest(turn, partial(AnthropicEncoder, self, read, ignored), ignored)

    def claims(self, request: Request) -> bool:
        """Also claim unknown paths that contain /messages or that an Anthropic client requests."""
        unknown = "endpoint" not in request.scope
        of_anthropic = "anthropic-version" in request.headers or "/messages" in request.url.path
        return super().claims(request) or (unknown and of_anthropic)

    @staticmethod
    def error_body(error: TokentapeError) -> dict[str, Any]:
        """Return an error body in Anthropic's format. `details.error_code` is the gateway's error code."""
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        details: dict[str, Any] = {"error_code": error.code}
        if isinstance(error, InvalidRequest):
            details["param"] = error.param
            if error.param == "thread":
                # On this code, the tool runner of Anthropic's client goes on without a thread: it sends all messages.
                details["error_code"] = "thread_unsupported_request"
        return {"type": "error", "error": {"type": kind, "message": str(error), "details": details}}

    def turn(self, body: MessagesBody, session_id: str, *, takes_images: bool) -> TurnRequest:
        check_template_kwargs(body.chat_template_kwargs)
        template_kwargs = body.chat_template_kwargs
        if self._switches_thinking and body.thinking is not None and body.thinking.type == "disabled":
            template_kwargs = {"enable_thinking": False, **template_kwargs}
        tools = tuple(_tool(index, tool) for index, tool in enumerate(body.tools))
        return TurnRequest(
            session_id=session_id,
            messages=read_messages(body.system, body.messages, self._later_system, takes_images),
            tools=() if body.tool_choice.type == "none" else tools,
            template_kwargs=template_kwargs,
            sampling=SamplingParams(
                max_tokens=body.max_tokens or 0,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                seed=body.seed,
                stop_strings=tuple(body.stop_sequences),
            ),
            stream=body.stream,
        )

    def _ignored_params(self, body: MessagesBody, rule: CallRule | None) -> list[str]:
        thinking, edits = body.thinking, body.context_management and body.context_management.edits
        one_call = body.tool_choice.disable_parallel_tool_use
        ignored = {
            "tool_choice": body.tool_choice.type in ("any", "tool") and rule is None,
            "tool_choice.disable_parallel_tool_use": one_call and not (rule and rule.required),
            "tools.strict": any(tool.strict for tool in body.tools) and rule is None,
            "tools.input_examples": any(tool.input_examples for tool in body.tools),
            "thinking": thinking and thinking.type == "disabled" and not self._switches_thinking,
            "thinking.budget_tokens": thinking and thinking.budget_tokens,
            "thinking.display": thinking and thinking.display not in (None, "summarized"),
            # Sampled tokens always stay in the context, so only `keep: all` for thinking is honored.
            "context_management": any(
                edit.keep != "all" or not edit.type.startswith("clear_thinking") for edit in edits or ()
            ),
            "compaction": body.compaction,
            "output_config.effort": body.output_config.effort,
            "output_config.task_budget": body.output_config.task_budget,
        }
        return [name for name, is_set in ignored.items() if is_set]


def count_routes(gateway: Gateway, dialect: AnthropicMessages) -> list[Route]:
    """Return the routes that count the tokens of a request's context. They record nothing."""
    turns = gateway.turns

    async def count(request: Request) -> Response:
        gateway.drain.refuse()
        caller = gateway.caller(request)
        with turns.calls.track(caller.owner):
            session_id = address(request, caller) or new_session_id()
            body = _read(await gateway.json(request))
            turn = dialect.turn(body, session_id, takes_images=turns.takes_images)
            return json_response({"input_tokens": await turns.count_context(turn, caller.owner)})

    counted: dict[str, Any] = {"body": MessagesBody, "more_fields": IGNORED}
    return also_below_sessions("POST", f"{dialect.path}/count_tokens", count, "Count a context's tokens", **counted)


def _read(body: Any) -> MessagesBody:
    """Decode a body and check its tool choice. A field with the value null counts as missing."""
    empty = {name for name in UNSERVED if isinstance(body, dict) and not body.get(name)}
    read, _ = shared.read_fields(body, MessagesBody, IGNORED | empty, "messages")
    if read.tool_choice.type in ("any", "tool"):
        names = [read.tool_choice.name] if read.tool_choice.type == "tool" else []
        shared.refuse_unknown_tools(names, [tool.name for tool in read.tools])
    return read


def _rule(body: MessagesBody, context: RequestContext) -> CallRule | None:
    choice, names = body.tool_choice, [tool.name for tool in body.tools]
    forced = {"any": names, "tool": [choice.name or ""]}.get(choice.type, [])
    strict = [tool.name for tool in body.tools if tool.strict and choice.type != "none"]
    parallel = not choice.disable_parallel_tool_use
    return shared.call_rule(context, choice if forced else None, forced, strict, parallel=parallel)


def _tool(index: int, tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"tools[{index}] has type {tool.type[:64]!r}, which this server can't run: send tools that the "
            "client runs, with a name and an input_schema",
            "tools",
        )
    for name in ("input_schema", "name"):
        if getattr(tool, name) in (None, ""):
            raise InvalidRequest(f"tools[{index}].{name} is missing", "tools")
    assert tool.input_schema is not None
    check_depth(tool.input_schema, "tools")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


class AnthropicEncoder(Encoder[MessagesBody]):
    def __init__(self, dialect: Dialect, body: MessagesBody, ignored: Sequence[str], started: TurnStarted) -> None:
        super().__init__(dialect, body, ignored, started)
        head = {"id": f"msg_{self._reply_id}", "type": "message", "role": "assistant", "model": dialect.model_id}
        self._head: dict[str, Any] = head
        if body.return_token_ids:
            self._head["prompt_token_ids"] = self._prompt_ids.tolist()
        self._signature = f"tokentape-{self._reply_id}"
        self._kind: str | None = None
        """The type of the content block that the stream has open, which is closed when another kind begins."""
        self._index = -1

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

    def begin(self) -> Iterator[bytes]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message={**self._head, **empty})

    def grow(self, event: TurnDelta | TurnDone) -> Iterator[bytes]:
        reply = event.rest if isinstance(event, TurnDone) else event.reply
        if reply.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": reply.reasoning})
        if reply.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": reply.content})
        for call in reply.tool_calls:
            assert call.id is not None
            block, arguments = tool_use(call.id, call.name, call.arguments)
            yield from self._close()
            yield from self._open("tool_use", {**block, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield from self._close()

    def end(self, done: Sequence[TurnDone]) -> Iterator[bytes]:
        (only,) = done
        yield from self._close()
        yield _event("message_delta", delta=self._stop(only), **self._end(only))
        yield _event("message_stop")

    def failed(self, error: TokentapeError) -> bytes:
        return encode_event(self._dialect.error_body(error), "error")

    def _stop(self, done: TurnDone) -> dict[str, Any]:
        turn, stop = done.turn, {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[done.finish]
        # The context window can be full before `max_tokens` is reached.
        if done.finish == "length" and len(turn.completion_ids) < (self._body.max_tokens or 0):
            stop = "model_context_window_exceeded"
        string = turn.stop if done.finish == "stop" and isinstance(turn.stop, str) else None
        return {"stop_reason": stop if string is None else "stop_sequence", "stop_sequence": string}

    def _usage(self, done: TurnDone | None = None) -> dict[str, Any]:
        # In this API, `input_tokens` excludes cached tokens. Their number is only known at the end.
        cached = 0 if done is None else done.cached_tokens or 0
        usage: dict[str, Any] = {
            "input_tokens": len(self._prompt_ids) - cached,
            "output_tokens": 0 if done is None else len(done.turn.completion_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }
        if done is not None and (thought := shared.reasoning_tokens(done.turn, self._tokenizer)):
            usage["output_tokens_details"] = {"thinking_tokens": thought}
        return usage

    def _end(self, done: TurnDone) -> dict[str, Any]:
        turn = done.turn
        fields: dict[str, Any] = {"usage": self._usage(done), "tokentape": self._recorded(turn)}
        if self._body.return_token_ids:
            fields["token_ids"] = turn.completion_ids.tolist()
        if self._body.logprobs:
            fields["logprobs"] = turn.logprobs.tolist()
        return fields

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._kind is not None:
            yield _event("content_block_stop", index=self._index)
        self._kind = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)
