"""OpenAI's chat completions: decode request bodies to turns, and encode replies, streamed and not.

The protocol is https://platform.openai.com/docs/api-reference/chat as the `openai` package speaks it, with extensions
of vLLM. Unknown fields are refused with their name, except the fields in `IGNORED`. docs/how-to/connect-an-agent.md has
the choices that the protocol leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tokentape.chat._call_constraint import CallRule
from tokentape.engines._base import SampleDelta
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._endpoint import DecodedRequest, Dialect, DoneChoice, RequestContext
from tokentape.gateway._events import SampleEvent, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._http import check_depth, encode_json, parse_json
from tokentape.gateway._images import image_part
from tokentape.gateway._pins import Count
from tokentape.gateway._recording import function_call
from tokentape.gateway._wire import shared_fields as shared
from tokentape.gateway._wire.shared_fields import call_rule, forced_tools
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
        read, fields = _read(body)
        if read.top_logprobs and not read.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        max_tokens = read.max_completion_tokens or read.max_tokens or 0
        with_tools = read.tools if read.tool_choice != "none" else ()
        schema = shared.json_schema(read.response_format, "response_format", context, with_tools)
        sampling = shared.sampling_params(
            read,
            context,
            max_tokens=max_tokens,
            top_logprobs=read.top_logprobs,
            names=self.names,
            min_tokens=read.min_tokens,
            schema=schema,
        )
        check_depth(read.chat_template_kwargs, "chat_template_kwargs")
        # Keep tools as the caller wrote them: templates print them with all keys, in their order.
        given_tools = fields.get("tools", [])
        check_depth(given_tools, "tools")
        tools = () if read.tool_choice == "none" else tuple(map(_shown, given_tools))
        choice = None if read.tool_choice in ("auto", "none") else read.tool_choice
        forced = forced_tools(choice, [tool["function"]["name"] for tool in tools])
        strict = _strict(fields) if tools else ()
        rule = call_rule(context, choice, forced, strict, parallel=read.parallel_tool_calls)
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
        ignored = (*_ignored_params(read, fields, rule), *shared.ignored_fields(read, context.engine, self.model_id))
        return DecodedRequest(turn, partial(_ChatEncoder, read, self, ignored), ignored)

    def read_messages(self, data: bytes, context: RequestContext) -> tuple[Message, ...]:
        return _messages(_read(parse_json(data))[0], context)


def _read(body: Any) -> tuple[ChatCompletionsBody, dict[str, Any]]:
    """Return a decoded body, and the JSON body without fields that are null."""
    read, fields = shared.read_fields(body, ChatCompletionsBody, IGNORED, "messages")
    _refuse_unserved(read)
    return read, fields


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool for the prompt, without `strict`, which is an option for the server."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _strict(fields: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in fields.get("tools", ()) if tool["function"].get("strict")]


def _ignored_params(body: ChatCompletionsBody, fields: dict[str, Any], rule: CallRule | None) -> tuple[str, ...]:
    """Return the names of parameters that are accepted but not enforced, and of message fields with no effect."""
    names = []
    if body.tool_choice not in ("auto", "none") and rule is None:
        names.append("tool_choice")
    if not body.parallel_tool_calls and not (rule and rule.required):
        names.append("parallel_tool_calls")
    names += [name for name in ("reasoning_effort", "verbosity") if getattr(body, name) is not None]
    if rule is None and _strict(fields):
        names.append("tools.strict")
    parts = shared.entries("content", fields["messages"])
    images = [part.get("image_url") for part in parts]
    return (
        *names,
        *shared.unknown_fields("stream_options", [fields.get("stream_options")], _STREAM_FIELDS),
        *shared.unknown_fields("messages", fields["messages"], _MESSAGE_FIELDS),
        *shared.unknown_fields("messages.content", parts, _PART_FIELDS),
        *shared.unknown_fields("messages.content.image_url", images, _IMAGE_FIELDS),
    )


def _refuse_unserved(body: ChatCompletionsBody) -> None:
    shared.check_tool_choice(body.tool_choice, [tool.function.name for tool in body.tools])
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
        self, body: ChatCompletionsBody, dialect: Dialect, ignored: Sequence[str], started: TurnStarted
    ) -> None:
        super().__init__(body, dialect, ignored, started)
        self._tells_tokens = body.logprobs or body.return_token_ids
        self._calls: dict[int, int] = {}
        """The number of tool calls sent, for each choice that the stream has opened."""
        self._before_text: dict[tuple[int, str], bytes] = {}
        """The bytes before the text in a chunk with only text, by choice and field."""

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompt_ids.tolist()} if self._body.return_token_ids else {}
        return {**super().whole(choices), **ids}

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
            "tokentape": shared.recorded(turn, self._ignored),
        }
        if self._body.return_token_ids:
            fields["token_ids"] = turn.completion_ids.tolist()
        return fields

    def _logprobs(self, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        as_ids = self._body.return_tokens_as_token_ids
        return {"content": shared.logprob_entries(self._tokenizer, sampled, as_ids=as_ids)}

    def _grown(self, event: SampleEvent) -> Iterator[bytes]:
        choice = event.choice
        if choice not in self._calls:
            first = self._body.return_token_ids and not self._calls
            ids = {"prompt_token_ids": self._prompt_ids.tolist()} if first else {}
            yield self._delta(choice, {"role": "assistant", "content": ""}, **ids)
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
        where = shared.recorded(done.turn, self._ignored)
        return self._chunk(
            {**_NOTHING, "index": done.choice, "delta": {}, "finish_reason": done.finish, "tokentape": where}
        )
