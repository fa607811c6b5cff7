"""OpenAI's chat completions: request bodies to turns, turns to replies, streamed and not.

The protocol is https://platform.openai.com/docs/api-reference/chat as the `openai` package speaks it, with the
extensions that vLLM made common: `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `chat_template_kwargs` and
`return_token_ids`. What is not known here is refused by name, never ignored, apart from the fields of `IGNORED`.

Choices where the protocol leaves some:

- Any `model` is accepted; replies name the model that is served.
- `tool_choice: "required"` or a function, `parallel_tool_calls: false`, `reasoning_effort`, `verbosity` and a tool's
  `strict` are accepted but not enforced; the reply's header `X-Tokentape-Ignored-Params` names them, and fields of
  messages that are not known.
- `response_format` is passed on to engines that can follow a schema, and refused otherwise and beside tools.
- Reasoning is in `reasoning_content` and `reasoning`: vLLM calls it by either, depending on the version.
- The caller can't begin the reply: `continue_final_message` and a message's `prefix` are refused.
- `developer` messages are system messages: most templates know no developer.
- `tool_choice: "none"` takes the tools out of the prompt: a model can't call what it does not see. Against a turn with
  tools that is another setup, so the session forks.
- Without `max_tokens` a reply may fill the context.
- `logprobs` has one entry per sampled id, the stop token included.
- With `n` > 1 and a seed, choice i samples with seed + i.
- Every choice says which turn it was recorded as: `tokentape: {session_id, turn}`, in streams in the finish chunk. It
  leaves after the turns of all choices are durable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tokentape.chat._parse import ReplyDelta
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._endpoint import DecodedRequest, DoneChoice, RequestContext
from tokentape.gateway._events import TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._http import check_depth, encode_event, encode_json, parse_json
from tokentape.gateway._images import image_part, takes
from tokentape.gateway._pins import Count
from tokentape.gateway._wire.openai_fields import (
    HINTS,
    OpenAIDialect,
    SamplingFields,
    TopLogprobs,
    ignored_scheduling,
    json_schema,
    logprob_entries,
    read_fields,
    recorded,
    refuse_prefill,
    refuse_unknown_tools,
    refuse_unserved,
    sampling_params,
    tool_arguments,
    tools_of_choice,
    unknown_fields,
    usage,
)
from tokentape.types import Message

MAX_CHOICES = 16

IGNORED = HINTS | {"metadata", "store", "user"}
"""Fields that are accepted and have no effect: none of them changes what is sampled."""


class _ChatFunction(Struct):
    name: str
    arguments: str | dict[str, Any]


class _ChatCall(Struct):
    id: str
    type: Literal["function"]
    function: _ChatFunction


class _ImageUrl(Struct):
    url: str
    detail: str | None = None


class _ChatPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    image_url: _ImageUrl | None = None


class _ChatMessage(Struct, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ChatPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ChatCall] | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None
    prefix: bool | None = None


_MESSAGE_FIELDS = frozenset(_ChatMessage.__struct_fields__) | {"annotations", "cache_control"}
"""Fields of messages that are read, or that change nothing that is sampled."""


class _ToolFunction(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ChatTool(Struct):
    type: Literal["function"]
    function: _ToolFunction


class _ChatStreamOptions(Struct):
    include_usage: bool = False


class ChatCompletionsBody(SamplingFields, kw_only=True):
    """A request's fields."""

    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]
    stream_options: _ChatStreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[_ChatTool] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    verbosity: str | None = None
    response_format: Any = None
    modalities: Any = None
    logit_bias: Any = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True


PARAMETERS = frozenset(ChatCompletionsBody.__struct_fields__) | IGNORED
"""Every parameter that is known; others are refused."""

_AFTER_TEXT = b'"}}]}\n\n'
"""How a chunk of nothing but text ends."""

_AGAIN = b',"reasoning":'
"""Between the two names that reasoning has in a chunk."""


class ChatCompletions(OpenAIDialect):
    """The dialect. `model_id` is the model's name in replies, `tokenizer` spells tokens beside their logprobs."""

    path = "/v1/chat/completions"
    summary = "OpenAI's chat completions"
    body, ignored = ChatCompletionsBody, IGNORED

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        """Read a request body. Raises `InvalidRequest` and `UnsupportedParameter` naming the parameter."""
        read, given = _read(body)
        sampling = _sampling(read, context)
        check_depth(read.chat_template_kwargs, "chat_template_kwargs")
        # As the caller wrote them: templates print tools whole, in the order of their keys.
        given_tools = given.get("tools", [])
        check_depth(given_tools, "tools")
        tools = () if read.tool_choice == "none" else tuple(map(_shown, given_tools))
        turn = TurnRequest(
            session_id=context.session_id,
            messages=_messages(read, context),
            tools=tools,
            template_kwargs=read.chat_template_kwargs,
            sampling=sampling,
            n=read.n,
            stream=read.stream,
        )
        ignored = (*_ignored_params(read, given), *ignored_scheduling(read, context.engine))
        return DecodedRequest(
            turn, lambda started: _ChatEncoder(read, started, self._model_id, self._tokenizer, ignored), ignored
        )

    def read_messages(self, data: bytes, context: RequestContext) -> tuple[Message, ...]:
        """The messages of a body that was accepted."""
        return _messages(_read(parse_json(data))[0], context)


def _read(body: Any) -> tuple[ChatCompletionsBody, dict[str, Any]]:
    """A body's fields, and the body without those that are null."""
    read, given = read_fields(body, ChatCompletionsBody, IGNORED, "messages")
    _refuse_unserved(read)
    return read, given


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the model is shown it: `strict` asks something of the server and is no part of the tool."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _ignored_params(body: ChatCompletionsBody, given: dict[str, Any]) -> tuple[str, ...]:
    """Return what is asked of the model that no engine is made to enforce, and fields of messages with no effect."""
    names = []
    if body.tool_choice not in ("auto", "none"):
        names.append("tool_choice")
    if not body.parallel_tool_calls:
        names.append("parallel_tool_calls")
    names += [name for name in ("reasoning_effort", "verbosity") if getattr(body, name) is not None]
    if any(tool["function"].get("strict") for tool in given.get("tools", ())):
        names.append("tools.strict")
    return (*names, *unknown_fields("messages", given["messages"], _MESSAGE_FIELDS))


def _refuse_unserved(body: ChatCompletionsBody) -> None:
    """Raise `UnsupportedParameter` for a known parameter with a value that is not served."""
    choice = body.tool_choice.get("type") if isinstance(body.tool_choice, dict) else body.tool_choice
    served = {
        "tool_choice": (
            choice in ("auto", "none", "required", "function", "allowed_tools"),
            '"auto", "none", "required", {"type": "function", ...} and {"type": "allowed_tools", ...}',
        ),
        "modalities": (body.modalities in (None, ["text"]), '["text"]'),
        "logit_bias": (body.logit_bias in (None, {}), "an empty object"),
        "add_generation_prompt": (body.add_generation_prompt or body.continue_final_message, "true"),
    }
    refuse_unserved(served)
    if choice in ("required", "function", "allowed_tools"):
        refuse_unknown_tools(tools_of_choice(body.tool_choice), [tool.function.name for tool in body.tools])
    if body.continue_final_message or any(message.prefix for message in body.messages):
        refuse_prefill("continue_final_message" if body.continue_final_message else "messages")


def _sampling(body: ChatCompletionsBody, context: RequestContext) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens or 0
    tools = body.tools if body.tool_choice != "none" else ()
    schema = json_schema(body.response_format, "response_format", context, tools)
    return sampling_params(body, context, max_tokens=max_tokens, top_logprobs=body.top_logprobs, schema=schema)


def _messages(body: ChatCompletionsBody, context: RequestContext) -> tuple[Message, ...]:
    return tuple(_message(index, one, context.takes_images) for index, one in enumerate(body.messages))


def _message(index: int, message: _ChatMessage, takes_images: bool) -> dict[str, Any]:
    """A message as sessions and templates take it: no empty fields, tool arguments as objects."""
    for unserved in ("function_call", "audio", "refusal"):
        if getattr(message, unserved) is not None:
            raise UnsupportedParameter(f"messages[{index}].{unserved} is not supported", "messages")
    images = {}
    if isinstance(message.content, list):
        for at, part in enumerate(message.content):
            where = f"messages[{index}].content[{at}]"
            if takes_images and part.type == "image_url" and part.image_url is not None:
                images[at] = image_part(part.image_url.url, where, detail=part.image_url.detail)
            elif part.type != "text" or part.text is None:
                raise UnsupportedParameter(
                    f"{where} is not a text part; this model takes {takes(takes_images)}", "messages"
                )
    for call in message.tool_calls or ():
        call.function.arguments = tool_arguments(call.function.arguments, "messages")
    if message.reasoning == message.reasoning_content:
        # Replies have both.
        message.reasoning = None
    message.prefix = None
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if message.role == "developer":
        # As in Responses: most templates know no developer.
        plain["role"] = "system"
    for at, image in images.items():
        plain["content"][at] = image
    return plain


def _with_both_names(message: Message) -> Message:
    """Return a message or delta with its reasoning under both names that clients read: vLLM's newer one is shorter."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "reasoning": reasoning}


class _ChatEncoder:
    """Writes the replies to one request."""

    def __init__(
        self,
        body: ChatCompletionsBody,
        started: TurnStarted,
        model_id: str,
        tokenizer: Tokenizer,
        ignored: Sequence[str],
    ) -> None:
        self._body = body
        self._ignored = ignored
        self._tells_tokens = body.logprobs or body.return_token_ids
        self._tokenizer = tokenizer
        self._prompt_ids = started.prompt_ids
        self._head = {"id": f"chatcmpl-{started.reply_id}", "created": int(started.created_at), "model": model_id}
        self._says: dict[tuple[int, str], bytes] = {}
        """By choice and field, the bytes before the text in a chunk of nothing but text."""

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        reply: dict[str, Any] = {**self._head, "object": "chat.completion"}
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt_ids.tolist()
        reply["choices"] = [self._choice(choice) for choice in choices]
        reply["usage"] = usage(self._prompt_ids, [choice.done for choice in choices], self._tokenizer)
        return reply

    async def stream(self, events: AsyncGenerator[TurnEvent]) -> AsyncGenerator[bytes]:
        """The events of a stream: an opening chunk per choice, deltas, and when all is recorded how it ended."""
        calls = [0] * self._body.n
        started: set[int] = set()
        done: dict[int, TurnDone] = {}
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TurnDelta):
                    delta, sampled = event.reply, event.sampled
                elif isinstance(event, TurnDone):
                    done[event.choice] = event
                    delta, sampled = event.rest, None
                else:
                    continue
                choice = event.choice
                if choice not in started:
                    yield self._opening(choice, first=not started)
                    started.add(choice)
                if written := self._delta(choice, delta, sampled, calls[choice]):
                    yield written
                if delta.tool_calls:
                    calls[choice] += len(delta.tool_calls)
        for choice in sorted(done):
            yield self._finish(done[choice])
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            last = {"choices": [], "usage": usage(self._prompt_ids, list(done.values()), self._tokenizer)}
            yield encode_event({**self._head, "object": "chat.completion.chunk", **last})
        yield b"data: [DONE]\n\n"

    def _choice(self, choice: DoneChoice) -> dict[str, Any]:
        turn = choice.done.turn
        written: dict[str, Any] = {
            "index": choice.done.choice,
            "message": _with_both_names(turn.reply),
            "logprobs": {"content": logprob_entries(self._tokenizer, choice.sampled)} if self._body.logprobs else None,
            "finish_reason": choice.done.finish,
            "tokentape": recorded(turn, self._ignored),
        }
        if self._body.return_token_ids:
            written["token_ids"] = turn.completion_ids.tolist()
        return written

    def _opening(self, choice: int, *, first: bool) -> bytes:
        more: dict[str, Any] = {}
        if self._body.return_token_ids and first:
            more["prompt_token_ids"] = self._prompt_ids.tolist()
        return self._chunk({"index": choice, "delta": {"role": "assistant", "content": ""}}, more)

    def _delta(self, choice: int, reply: ReplyDelta, sampled: SampleDelta | None, calls_before: int) -> bytes:
        """Return the chunk for a delta; nothing if it adds nothing."""
        if not (self._tells_tokens or reply.tool_calls):
            if not reply.reasoning:
                return self._said(choice, "content", reply.content) if reply.content else b""
            if not reply.content:
                return self._said(choice, "reasoning_content", reply.reasoning)
        if sampled is None and not reply:
            return b""
        delta: dict[str, Any] = {}
        if reply.content:
            delta["content"] = reply.content
        if reply.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reply.reasoning
        if reply.tool_calls:
            delta["tool_calls"] = [
                {
                    "index": calls_before + at,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(reply.tool_calls)
            ]
        written: dict[str, Any] = {"index": choice, "delta": delta}
        if sampled is not None and self._body.logprobs:
            written["logprobs"] = {"content": logprob_entries(self._tokenizer, [sampled])}
        if sampled is not None and self._body.return_token_ids:
            written["token_ids"] = sampled.token_ids
        return self._chunk(written)

    def _said(self, choice: int, field: str, text: str) -> bytes:
        """A chunk of nothing but text, as nearly all are: around the text it is always the same."""
        where = choice, field
        if where not in self._says:
            self._says[where] = self._chunk({"index": choice, "delta": {field: ""}}).removesuffix(_AFTER_TEXT)
        written = encode_json(text)
        again = _AGAIN + written if field == "reasoning_content" else b""
        return self._says[where] + written[1:] + again + _AFTER_TEXT[1:]

    def _finish(self, done: TurnDone) -> bytes:
        where = recorded(done.turn, self._ignored)
        return self._chunk({"index": done.choice, "delta": {}, "finish_reason": done.finish, "tokentape": where})

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        choice = {"finish_reason": None, "logprobs": None, **choice}
        return encode_event({**self._head, "object": "chat.completion.chunk", **(more or {}), "choices": [choice]})
