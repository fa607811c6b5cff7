"""Anthropic's Messages API: decode request bodies to turns, and count their tokens.

The protocol is https://docs.anthropic.com/en/api/messages as the `anthropic` package and Claude Code speak it, with the
extensions `seed`, `chat_template_kwargs`, `return_token_ids` (the reply has `prompt_token_ids` and `token_ids`) and
`logprobs` (the reply has `logprobs`, one number per sampled id). In streams the prompt's ids are in `message_start`,
the rest in `message_delta`. Unknown fields are refused with their name, except the fields in `IGNORED`.

docs/how-to/connect-an-agent.md has the rules that all wire APIs share. Other choices that the protocol leaves open:

- `tool_choice` of `any` or a tool, `disable_parallel_tool_use`, an effort, a thinking budget, context edits and other
  requests to the model or the server are accepted but not enforced. With `enforce_tools` the tool choice and `strict`
  are enforced or refused.
- `tool_choice` `none` removes the tools from the prompt, as in chat completions.
- `thinking` `disabled` becomes the template kwarg `enable_thinking: false` if the template uses that. Other settings of
  `thinking` set no kwarg: a kwarg that changes between requests would fork the session.
- Tools that run on Anthropic's servers, or with a schema that only its models know, are refused.
- Thinking blocks get signatures from this gateway, which prove nothing: the session has the sampled ids.
- A reply that ends because the context is full has the stop reason `model_context_window_exceeded`.
- In streams the recorded turn is in `message_delta`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.chat._call_constraint import CallRule
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SamplingParams
from tokentape.errors import InvalidRequest, TokentapeError, UnsupportedParameter
from tokentape.gateway._endpoint import DecodedRequest, Dialect, Gateway, RequestContext, address
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._http import check_depth, encode_event, json_response, parse_json, read_json_body
from tokentape.gateway._keys import new_session_id
from tokentape.gateway._openapi import also_below_sessions
from tokentape.gateway._pins import Count, Seed, StopString, Temperature, TopP
from tokentape.gateway._wire import openai_fields as shared
from tokentape.gateway._wire.anthropic_history import (
    BLOCK_FIELDS,
    AnthropicMessage,
    Part,
    read_messages,
    takes_later_system,
)
from tokentape.gateway._wire.anthropic_replies import AnthropicEncoder, error_body
from tokentape.gateway._wire.tool_rules import call_rule
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
"""Fields that are accepted and have no effect: none of them changes what is sampled."""

UNSERVED = frozenset({"container", "mcp_servers", "output_format", "thread"})
"""Fields that are refused unless they are empty, because only Anthropic's servers implement them."""


class AnthropicTool(Struct):
    name: Annotated[str, Meta(min_length=1)] = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    strict: bool | None = None


_TOOL_FIELDS = frozenset(AnthropicTool.__struct_fields__) | {"cache_control"}
"""Known fields of tools: those in `AnthropicTool`, and `cache_control`, which has no effect."""


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
    """A request's fields."""

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


_API_NAMES = {"stop_strings": "stop_sequences"}
"""Fields of `SamplingParams` with another name in requests."""


class AnthropicMessages(Dialect):
    """Anthropic's Messages API for a model with this `template`."""

    path = "/v1/messages"
    summary = "Anthropic's Messages"
    body, ignored = MessagesBody, IGNORED

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
        schema = shared.json_schema(read.output_config.format, "output_config", context, turn.tools)
        rule = _rule(read, context)
        turn = replace(turn, sampling=replace(turn.sampling, json_schema=schema), calls=rule)
        shared.refuse_unsupported(turn.sampling, context.engine, _API_NAMES)
        contents = [content for one in body["messages"] if isinstance(content := one["content"], list)]
        blocks = [block for content in contents for block in content]
        ignored = (
            *self._ignored_params(read, rule),
            *shared.ignored_model(read.model, context.engine, self.model_id),
            *shared.unknown_fields("tools", body.get("tools") or (), _TOOL_FIELDS),
            *shared.unknown_fields("messages", body["messages"], _MESSAGE_FIELDS),
            *shared.unknown_fields("messages.content", blocks, BLOCK_FIELDS),
        )

        return DecodedRequest(turn, partial(AnthropicEncoder, read, self, ignored), ignored)

    def error_event(self, error: TokentapeError) -> bytes:
        return encode_event(error_body(error), "error")

    def turn(self, body: MessagesBody, session_id: str, *, takes_images: bool) -> TurnRequest:
        check_depth(body.chat_template_kwargs, "chat_template_kwargs")
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
    """Return the endpoint that counts the tokens of a turn's context. Nothing is recorded."""
    turns = gateway.turns

    async def count(request: Request) -> Response:
        gateway.drain.refuse()
        caller = gateway.caller(request)
        with turns.calls.track(caller.owner):
            session_id = address(request, caller) or new_session_id()
            body = _read(parse_json(await read_json_body(request, turns.limits.body_bytes)))
            turn = dialect.turn(body, session_id, takes_images=turns.takes_images)
            return json_response({"input_tokens": await turns.count_context(turn, caller.owner)})

    counted: dict[str, Any] = {"body": MessagesBody, "more_fields": IGNORED}
    return also_below_sessions("POST", f"{dialect.path}/count_tokens", count, "Count a context's tokens", **counted)


def _read(body: Any) -> MessagesBody:
    """Decode a body and check its tool choice. Fields with null count as missing."""
    empty = {name for name in UNSERVED if isinstance(body, dict) and not body.get(name)}
    read, _ = shared.read_fields(body, MessagesBody, IGNORED | empty, "messages")
    if read.tool_choice.type in ("any", "tool"):
        named = [read.tool_choice.name] if read.tool_choice.type == "tool" else []
        shared.refuse_unknown_tools(named, [tool.name for tool in read.tools])
    return read


def _rule(body: MessagesBody, context: RequestContext) -> CallRule | None:
    choice, names = body.tool_choice, [tool.name for tool in body.tools]
    forced = {"any": names, "tool": [choice.name or ""]}.get(choice.type, [])
    strict = [tool.name for tool in body.tools if tool.strict and choice.type != "none"]
    parallel = not choice.disable_parallel_tool_use
    return call_rule(context, choice if forced else None, forced, strict, parallel=parallel)


def _tool(index: int, tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise UnsupportedParameter(
            f"tools[{index}] is of type {tool.type[:64]!r}, which is not supported here; give tools with a name and an "
            "input_schema, which the client runs",
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
