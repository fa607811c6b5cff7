"""Convert items and tools of the Responses API to messages and tools, and recorded replies to items.

The items of a reply convert back to the same message, so that the session recognizes it: consecutive reasoning, text
and calls become one assistant message. Clients may omit reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from tokentape.chat._reply import function_call
from tokentape.errors import InvalidRequest, NotFound, UnsupportedParameter
from tokentape.gateway._dialect import RequestContext
from tokentape.gateway._http import check_depth, read_as
from tokentape.gateway._images import append_content, image_part
from tokentape.gateway._wire.shared_fields import TEXT_PARTS, refuse_part, shown_type, tool_arguments
from tokentape.types import Message, Tool

_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})(?:_[0-9]+)?")

_Item = TypeVar("_Item", bound=Struct)

_HOSTED = ("web_search", "image_generation", "tool_search")
"""Tools that OpenAI runs itself and that harnesses add by default. They are not in the prompt."""

_SEPARATOR = "__"


class _Part(Struct):
    type: str
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _Message(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    id: str | None = None


class _Text(Struct):
    text: str


class _Reasoning(Struct):
    content: list[_Text] | None = None
    summary: list[_Text] | None = None
    id: str | None = None


class _Call(Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CallOutput(Struct):
    call_id: str
    output: str | list[_Part]


class _Reference(Struct):
    id: str


ITEM_FIELDS = frozenset(
    {name for kind in (_Message, _Reasoning, _Call, _CallOutput, _Reference) for name in kind.__struct_fields__}
    | {"created_by", "encrypted_content", "phase", "status", "type"}
)
"""Known fields of items: those that are read, and others that clients send back and that have no effect."""

PART_FIELDS = frozenset(_Part.__struct_fields__) | {"annotations", "logprobs", "prompt_cache_breakpoint"}
"""Known fields of the parts of messages and outputs."""


async def read_input(items: str | Sequence[Any], context: RequestContext) -> list[dict[str, Any]]:
    """Convert the field `input` to messages.

    Raises `InvalidRequest`, `UnsupportedParameter` for unsupported items, and `NotFound` for a reference to an item
    that the session does not have.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    reply_id: str | None = None
    for index, item in enumerate(items):
        kind = _kind(item, index)
        if kind == "item_reference":
            item = await _referred(_read_item(item, _Reference, index).id, context, index)
            kind = item["type"]
        if kind == "message":
            message = _read_item(item, _Message, index)
            is_user = message.role == "user"
            content = _content(message.content, index, "content", is_user and context.takes_images)
            if message.role == "assistant":
                # Haystack sends the text of a reply after its calls.
                _open(messages, fresh=("content",))["content"] = content
                reply_id = _reply_of(message.id)
            else:
                messages.append({"role": "user" if is_user else "system", "content": content})
        elif kind == "reasoning":
            reasoning = _read_item(item, _Reasoning, index)
            # Reasoning after the text of the same reply belongs to the same message.
            same = reply_id is not None and _reply_of(reasoning.id) == reply_id
            opened = _open(messages, fresh=() if same else ("content", "tool_calls"))
            text = "".join(part.text for part in reasoning.content or reasoning.summary or ())
            if text:
                opened["reasoning_content"] = opened.get("reasoning_content", "") + text
        elif kind == "function_call":
            call = _read_item(item, _Call, index)
            name = flat_name(call.name, call.namespace)
            arguments = tool_arguments(call.arguments, f"input[{index}].arguments")
            calls = _open(messages, fresh=()).setdefault("tool_calls", [])
            calls.append(function_call(call.call_id, name, arguments))
        else:
            output = _read_item(item, _CallOutput, index)
            content = _content(output.output, index, "output", context.takes_images)
            messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})
    return messages


def join_leading(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join the leading system messages, because many templates accept only one."""
    texts: list[str] = []
    for message in messages:
        if message["role"] != "system":
            break
        texts.append(message["content"])
    if len(texts) < 2:
        return tuple(messages)
    return {"role": "system", "content": "\n\n".join(texts)}, *messages[len(texts) :]


def without_instructions(messages: Sequence[Message], length: int) -> tuple[Message, ...]:
    """Remove the first `length` characters of the system message, which were the instructions."""
    if not length or not messages or messages[0]["role"] != "system":
        return tuple(messages)
    rest = messages[0]["content"][length:].removeprefix("\n\n")
    return (*([{"role": "system", "content": rest}] if rest else []), *messages[1:])


def output_items(
    reply: Message,
    reply_id: str,
    *,
    incomplete: bool = False,
    logprobs: Sequence[Any] = (),
    namespaces: Mapping[str, tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Return the items of a recorded reply: reasoning, a message, calls, with at least a message or a call."""
    items: list[dict[str, Any]] = []
    calls = reply.get("tool_calls") or ()
    if reply.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{reply_id}", reply["reasoning_content"]))
    if reply.get("content") or not calls:
        items.append(message_item(reply_id, reply.get("content") or "", incomplete=incomplete, logprobs=logprobs))
    items += (call_item(reply_id, index, call, namespaces or {}) for index, call in enumerate(calls))
    return items


def reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
        "status": "completed",
    }


def message_item(reply_id: str, text: str, *, incomplete: bool, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if incomplete else "completed",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}],
    }


def call_item(
    reply_id: str, index: int, call: Mapping[str, Any], namespaces: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return the item of call number `index` of a reply, with the function's name as in the request."""
    function = call["function"]
    namespace, name = namespaces.get(function["name"], (None, function["name"]))
    item = {
        "id": f"fc_{reply_id}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": name,
        "arguments": function["arguments"],
        "status": "completed",
    }
    return item if namespace is None else {**item, "namespace": namespace}


def input_items(messages: Sequence[Message], reply_id: str) -> list[dict[str, Any]]:
    """Return the messages before a recorded reply as items. Their ids are derived from the reply's id."""
    items: list[dict[str, Any]] = []
    for message in messages:
        index, role, content = len(items), message["role"], message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
        if role == "assistant":
            items += output_items(message, f"{reply_id}_{index}")
        elif role == "tool":
            result = {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": "".join(parts)}
            items.append({"id": f"fco_{reply_id}_{index}", "status": "completed", **result})
        else:
            texts = [{"type": "input_text", "text": part} for part in parts]
            fields = {"type": "message", "role": role, "status": "completed", "content": texts}
            items.append({"id": f"msg_{reply_id}_{index}", **fields})
    return items


def _kind(item: Any, index: int) -> str:
    if not isinstance(item, dict):
        raise InvalidRequest(f"input[{index}] is not an object; send an item, such as a message", "input")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if kind not in ("message", "reasoning", "function_call", "function_call_output", "item_reference"):
        raise UnsupportedParameter(
            f"input[{index}] has {shown_type(kind)}; expected message, reasoning, function_call, function_call_output "
            "or item_reference",
            "input",
        )
    return str(kind)


def _open(messages: list[dict[str, Any]], fresh: Sequence[str]) -> dict[str, Any]:
    """Return the last message if it is the assistant's and has no key in `fresh`; else append and return a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in fresh):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _content(content: str | list[_Part], item_index: int, name: str, takes_images: bool) -> Any:
    read: Any = content if isinstance(content, str) else ""
    for index, part in enumerate(() if isinstance(content, str) else content):
        where = f"input[{item_index}].{name}[{index}]"
        if part.type == "input_image" and takes_images:
            read = append_content(read, [image_part(part.image_url, where, detail=part.detail)])
        elif part.type in TEXT_PARTS and part.text is not None:
            read = append_content(read, part.text)
        else:
            refuse_part(part, where, takes_images)
    return read


async def _referred(item_id: str, context: RequestContext, index: int) -> dict[str, Any]:
    reply_id = _reply_of(item_id)
    if reply_id is not None:
        try:
            conversation = await context.conversation(reply_id)
        except NotFound:
            conversation = ()
        for item in output_items(conversation[-1], reply_id) if conversation else ():
            if item["id"] == item_id:
                return item
    raise NotFound(f"input[{index}] refers to an item that this session does not have")


def _reply_of(item_id: str | None) -> str | None:
    match = _ITEM_ID.fullmatch(item_id or "")
    return None if match is None else match[1]


def _read_item(item: Mapping[str, Any], kind: type[_Item], index: int) -> _Item:
    return read_as({name: value for name, value in item.items() if value is not None}, kind, f"input[{index}]")


class _Function(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamespaceTool(Struct):
    name: Annotated[str, Meta(min_length=1)]
    tools: list[Any]


@dataclass(frozen=True, slots=True)
class Tools:
    shown: tuple[Tool, ...] = ()
    """The tools in the prompt."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Maps the names of functions in namespaces, as in the prompt, to namespace and name."""
    left_out: bool = False
    """Whether any tool was omitted from the prompt."""
    strict: frozenset[str] = frozenset()
    """The names, as in the prompt, of tools with `strict`."""


def read_tools(declared: Sequence[Any]) -> Tools:
    """Decode the field `tools`.

    The model sees a function of a namespace as `namespace__function`. Raises `UnsupportedParameter` for tools that are
    not functions. Kinds that harnesses add by default are left out instead.
    """
    check_depth(declared, "tools")
    shown: list[Tool] = []
    namespaces: dict[str, tuple[str, str]] = {}
    left_out, strict = False, set[str]()
    for index, tool in enumerate(declared):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            functions = [("", tool)]
        elif kind == "namespace":
            group = read_as(tool, _NamespaceTool, f"tools[{index}]")
            functions = [(group.name, function) for function in group.tools]
        elif isinstance(kind, str) and kind.startswith(_HOSTED):
            left_out = True
            continue
        else:
            raise UnsupportedParameter(
                f"tools[{index}] has {shown_type(kind)}; expected function, or a namespace of functions", "tools"
            )
        for namespace, value in functions:
            function = read_as(value, _Function, f"tools[{index}]")
            name = flat_name(function.name, namespace)
            if namespace:
                namespaces[name] = namespace, function.name
            if function.strict:
                strict.add(name)
            fields = {"name": name, "description": function.description, "parameters": function.parameters}
            present_fields = {key: value for key, value in fields.items() if value is not None}
            shown.append({"type": "function", "function": present_fields})
    return Tools(tuple(shown), namespaces, left_out, frozenset(strict))


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name
