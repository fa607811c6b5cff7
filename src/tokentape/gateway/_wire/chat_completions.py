"""OpenAI's chat completions: decode request bodies to turns, and encode replies, streamed and not.

The protocol is https://platform.openai.com/docs/api-reference/chat as the `openai` package speaks it, with extensions
of vLLM. Unknown fields are refused with their name, except the fields in `IGNORED`. docs/how-to/connect-an-agent.md has
the choices that the protocol leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tokentape._canonical import quick_json_in_order
from tokentape.chat._reply import function_call
from tokentape.engines._base import SampleDelta
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._dialect import DecodedRequest, Dialect, DoneChoice, RequestContext
from tokentape.gateway._events import TurnDelta, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._http import check_depth, encode_json, parse_json
from tokentape.gateway._images import image_part
from tokentape.gateway._pins import Count
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.template_kwargs import check_template_kwargs, unread_kwargs
from tokentape.types import Message

IGNORED = shared.HINTS | {"metadata", "store", "user"}
"""Fields that are accepted and have no effect: none of them changes what is sampled."""


class ChatFunction(Struct):
    name: str
    arguments: str | dict[str, Any]


class ChatCall(Struct):
    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatImageUrl(Struct):
    url: str
    detail: str | None = None


class ChatPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    image_url: ChatImageUrl | None = None


class ChatMessage(Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ChatCall] | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None
    prefix: bool | None = None


_MESSAGE_FIELDS = frozenset(ChatMessage.__struct_fields__) | {"annotations", "cache_control"}
"""Known fields of messages: those in `ChatMessage`, and others that have no effect."""

_PART_FIELDS = frozenset(ChatPart.__struct_fields__) | {"cache_control", "prompt_cache_breakpoint"}
"""Known fields of parts: those in `ChatPart`, and others that have no effect."""

_IMAGE_FIELDS = frozenset(ChatImageUrl.__struct_fields__)
_STREAM_FIELDS = frozenset({"include_obfuscation", "include_usage"})

_UNSERVED = {"function_call": "tool_calls", "audio": "its transcript as content", "refusal": "it as content"}
"""Fields of messages that are refused, and what to send instead."""


class ChatToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Struct):
    type: Literal["function"]
    function: ChatToolFunction


class ChatCompletionsBody(shared.ChoicesBody, kw_only=True):
    """A request's fields."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: shared.TopLogprobs = 0
    return_tokens_as_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[ChatTool] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: Any = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True


_AFTER_TEXT = b'"}}]}\n\n'
"""End of a chunk that has only text."""

_AGAIN = b',"reasoning":'
"""Separator of the two fields with reasoning in a chunk."""

_NOTHING = {"finish_reason": None, "logprobs": None}
"""Fields that clients expect in every chunk."""


class ChatCompletions(Dialect):
    path = "/v1/chat/completions"
    summary = "OpenAI's chat completions"
    body, ignored = ChatCompletionsBody, IGNORED

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        read, fields = shared.read_fields(body, ChatCompletionsBody, IGNORED, "messages")
        forced = shared.forced_tools(read.tool_choice, [tool.function.name for tool in read.tools])
        _refuse_unserved(read)
        if read.top_logprobs and not read.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        with_tools = read.tools if read.tool_choice != "none" else ()
        schema = shared.json_schema(read.response_format, "response_format", context, with_tools)
        max_tokens = read.max_completion_tokens or read.max_tokens or 0
        more = {"min_tokens": read.min_tokens, "json_schema": schema}
        sampling = shared.sampling_params(read, context, self.names, max_tokens, read.top_logprobs, **more)
        check_template_kwargs(read.chat_template_kwargs)
        # Keep tools as the caller wrote them: templates print them with all keys, in their order.
        data = quick_json_in_order(fields.get("tools", []))
        shown, strict = _tools(data) if len(data) <= _CACHED_BYTES else _tools.__wrapped__(data)
        tools = shown if with_tools else ()
        choice = None if read.tool_choice in ("auto", "none") else read.tool_choice
        rule = shared.call_rule(context, choice, forced, strict if tools else (), parallel=read.parallel_tool_calls)
        turn = TurnRequest(
            session_id=context.session_id,
            messages=_messages(read, context),
            tools=tools,
            template_kwargs=read.chat_template_kwargs,
            sampling=sampling,
            n=read.n,
            stream=read.stream,
            calls=rule,
        )
        ignored = (
            *shared.unenforced(choice, read.parallel_tool_calls, rule),
            *[name for name in ("reasoning_effort", "verbosity") if getattr(read, name) is not None],
            *(["tools.strict"] if strict and rule is None else []),
            *unread_kwargs(read.chat_template_kwargs, context),
            *_unknown_fields(fields),
            *shared.ignored_fields(read, context, self.model_id),
        )
        return DecodedRequest(turn, partial(_ChatEncoder, self, read, ignored), ignored)

    def read_messages(self, data: bytes, context: RequestContext) -> tuple[Message, ...]:
        read, _ = shared.read_fields(parse_json(data), ChatCompletionsBody, IGNORED, "messages")
        return _messages(read, context)


_CACHED_BYTES = 1 << 20
"""Largest JSON of tools to cache, which bounds the memory of the cache."""


@lru_cache(maxsize=32)
def _tools(data: bytes) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return the tools in this JSON for the prompt, without the server's option `strict`, and the names with it.

    The result is cached, because an agent sends its tools with every call.
    """
    tools = parse_json(data)
    check_depth(tools, "tools")
    functions = [tool["function"] for tool in tools]
    strict = tuple([function["name"] for function in functions if function.get("strict")])
    bare = [{name: value for name, value in function.items() if name != "strict"} for function in functions]
    return tuple([{**tool, "function": function} for tool, function in zip(tools, bare, strict=True)]), strict


def _unknown_fields(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the fields inside a body that have no effect."""
    parts = shared.entries("content", fields["messages"])
    images = [part.get("image_url") for part in parts]
    yield from shared.unknown_fields("stream_options", [fields.get("stream_options")], _STREAM_FIELDS)
    yield from shared.unknown_fields("messages", fields["messages"], _MESSAGE_FIELDS)
    yield from shared.unknown_fields("messages.content", parts, _PART_FIELDS)
    yield from shared.unknown_fields("messages.content.image_url", images, _IMAGE_FIELDS)


def _refuse_unserved(body: ChatCompletionsBody) -> None:
    shared.refuse_unserved(
        {
            "modalities": (body.modalities in (None, ["text"]), '["text"]'),
            "logit_bias": (body.logit_bias in (None, {}), "an empty object"),
            "add_generation_prompt": (body.add_generation_prompt or body.continue_final_message, "true"),
        }
    )
    if body.continue_final_message or any(message.prefix for message in body.messages):
        shared.refuse_prefill("continue_final_message" if body.continue_final_message else "messages")


def _messages(body: ChatCompletionsBody, context: RequestContext) -> tuple[Message, ...]:
    return tuple([_message(index, message, context.takes_images) for index, message in enumerate(body.messages)])


def _message(index: int, message: ChatMessage, takes_images: bool) -> dict[str, Any]:
    """Convert a message of a request to a chat message: without empty fields, with tool arguments as objects."""
    for name, instead in _UNSERVED.items():
        if getattr(message, name) is not None:
            raise UnsupportedParameter(f"messages[{index}].{name} is not supported; send {instead} instead", "messages")
    images = {}
    if isinstance(message.content, list):
        for part_index, part in enumerate(message.content):
            where = f"messages[{index}].content[{part_index}]"
            if takes_images and part.type == "image_url":
                image_url = part.image_url or ChatImageUrl("")
                images[part_index] = image_part(image_url.url, where, detail=image_url.detail)
            elif part.type != "text" or part.text is None:
                shared.refuse_part(part, where, takes_images)
    for call_index, call in enumerate(message.tool_calls or ()):
        where = f"messages[{index}].tool_calls[{call_index}].function.arguments"
        call.function.arguments = shared.tool_arguments(call.function.arguments, where)
    if message.reasoning == message.reasoning_content:
        # Replies have both `reasoning` and `reasoning_content`.
        message.reasoning = None
    message.prefix = None
    if message.role == "assistant" and message.content is None and not message.tool_calls:
        # Clients leave out the content of an empty reply, and some templates fail without it. vLLM adds it too.
        message.content = ""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if message.role == "developer":
        # As in Responses: most templates have no developer role.
        plain["role"] = "system"
    for part_index, image in images.items():
        plain["content"][part_index] = image
    return plain


class _ChatEncoder(shared.ChoicesEncoder[ChatCompletionsBody]):
    _id, _whole, _chunks = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, dialect: Dialect, body: ChatCompletionsBody, ignored: Sequence[str], started: TurnStarted
    ) -> None:
        super().__init__(dialect, body, ignored, started)
        self._tells_tokens = body.logprobs or body.return_token_ids
        self._calls: dict[int, int] = {}
        """The number of tool calls sent, for each choice that the stream has opened."""
        self._before_text: dict[tuple[int, str], bytes] = {}
        """The bytes before the text in a chunk with only text, by choice and field."""

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        return {**super().whole(choices), **self._prompt_fields()}

    def _choice(self, choice: DoneChoice) -> dict[str, Any]:
        turn = choice.done.turn
        message = dict(turn.reply)
        if "reasoning_content" in message:
            # The name in newer versions of vLLM.
            message["reasoning"] = message["reasoning_content"]
        fields: dict[str, Any] = {
            "index": choice.done.choice,
            "message": message,
            "logprobs": self._logprobs(choice.sampled) if self._body.logprobs else None,
            "finish_reason": choice.done.finish,
            "tokentape": self._recorded(turn),
        }
        if self._body.return_token_ids:
            fields["token_ids"] = turn.completion_ids.tolist()
        return fields

    def _logprobs(self, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        as_ids = self._body.return_tokens_as_token_ids
        return {"content": shared.logprob_entries(self._tokenizer, sampled, as_ids=as_ids)}

    def grow(self, event: TurnDelta | TurnDone) -> Iterator[bytes]:
        choice = event.choice
        if choice not in self._calls:
            more = {} if self._calls else self._prompt_fields()
            yield self._delta(choice, {"role": "assistant", "content": ""}, **more)
            self._calls[choice] = 0
        reply, sampled = (event.rest, None) if isinstance(event, TurnDone) else (event.reply, event.sampled)
        if not (self._tells_tokens or reply.tool_calls or (reply.reasoning and reply.content)):
            if reply.content:
                yield self._text(choice, "content", reply.content)
            elif reply.reasoning:
                yield self._text(choice, "reasoning_content", reply.reasoning)
            return
        if sampled is None and not reply:
            return
        delta: dict[str, Any] = {}
        if reply.content:
            delta["content"] = reply.content
        if reply.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reply.reasoning
        if reply.tool_calls:
            delta["tool_calls"] = [
                {"index": call_index, **function_call(call.id, call.name, call.arguments)}
                for call_index, call in enumerate(reply.tool_calls, self._calls[choice])
            ]
            self._calls[choice] += len(reply.tool_calls)
        tokens: dict[str, Any] = {}
        if sampled is not None and self._body.logprobs:
            tokens["logprobs"] = self._logprobs([sampled])
        if sampled is not None and self._body.return_token_ids:
            tokens["token_ids"] = sampled.token_ids
        yield self._chunk({**_NOTHING, "index": choice, "delta": delta, **tokens})

    def _delta(self, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        return self._chunk({**_NOTHING, "index": choice, "delta": delta}, **more)

    def _text(self, choice: int, field: str, text: str) -> bytes:
        """Return a chunk with only text. Most chunks are like this, so their constant parts are encoded only once."""
        where = choice, field
        if where not in self._before_text:
            self._before_text[where] = self._delta(choice, {field: ""}).removesuffix(_AFTER_TEXT)
        encoded = encode_json(text)
        again = _AGAIN + encoded if field == "reasoning_content" else b""
        return self._before_text[where] + encoded[1:] + again + _AFTER_TEXT[1:]

    def _finish(self, done: TurnDone) -> bytes:
        end = {"finish_reason": done.finish, "tokentape": self._recorded(done.turn)}
        return self._chunk({**_NOTHING, "index": done.choice, "delta": {}, **end})
