"""Convert Anthropic's messages, made of blocks, to chat messages with text, reasoning and tool calls.

Replies are encoded such that decoding them returns the recorded message, so that sessions recognize them. The rules are
in docs/how-to/connect-an-agent.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tokentape.chat._template import ChatTemplate
from tokentape.errors import InvalidRequest, TemplateRefused, UnsupportedParameter
from tokentape.gateway._http import check_depth, encode_json
from tokentape.gateway._images import append_content, image_part
from tokentape.gateway._wire.shared_fields import refuse_part
from tokentape.types import Message

UNPARSED = "unparsed_arguments"

_ESCAPED = "toolu_x"
_TAKEN_ID = re.compile(rf"(?!{_ESCAPED})[A-Za-z0-9_-]+")
_SAYS_ERROR = re.compile(r"\W*\w*error", re.IGNORECASE)
_ASKED = "asked-word"
_BILLING = "x-anthropic-billing-header:"


class ImageSource(Struct):
    """The source of an image."""

    type: str
    media_type: str = ""
    data: str = ""


class Part(Struct):
    """A block inside a `tool_result`, or a block of the system prompt."""

    type: str
    text: str | None = None
    source: ImageSource | str | None = None


class Block(Struct):
    """A block of a message, with the fields of all supported types."""

    type: str
    text: str | None = None
    source: ImageSource | str | None = None
    """A string only in `search_result` blocks."""
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    is_error: bool | None = None


BLOCK_FIELDS = frozenset(Block.__struct_fields__) | {"cache_control", "citations", "data", "signature"}
"""Known fields of blocks: those in `Block`, and others that clients send back and that have no effect."""

SOURCE_FIELDS = frozenset(ImageSource.__struct_fields__)


class AnthropicMessage(Struct):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def takes_later_system(template: ChatTemplate) -> bool:
    """Return whether a template renders system messages after a user message. Some templates refuse or omit them."""
    messages = [{"role": "user", "content": "question"}, {"role": "system", "content": _ASKED}]
    names = {"bos_token": "", "eos_token": ""}
    try:
        return _ASKED in template.render(
            messages, tools=(), add_generation_prompt=True, date="2000-01-01", variables=names
        )
    except TemplateRefused:
        return False


def read_messages(
    system: str | Sequence[Part], messages: Sequence[AnthropicMessage], later_system: bool, takes_images: bool = False
) -> tuple[Message, ...]:
    """Convert a request's messages to chat messages. `later_system` is the result of `takes_later_system`.

    Raises `UnsupportedParameter` for unsupported blocks, and `InvalidRequest` for blocks that lack a field.
    """
    if not isinstance(system, str):
        parts = [part for part in system if not (part.text or "").startswith(_BILLING)]
        system = _text(parts, "system")
    read: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [Block("text", text=blocks)]
        if message.role == "assistant":
            reply = _assistant(blocks, where)
            if index and messages[index - 1].role == "assistant":
                _join(read[-1], reply)
            else:
                read.append(reply)
        elif not blocks:
            raise InvalidRequest(f"{where} is empty; send text, or at least one block", "messages")
        elif message.role == "system":
            _add_system(read, _text(blocks, where), later_system)
        else:
            read += _user(blocks, where, takes_images)
    return tuple(read)


def tool_use(call_id: str, name: str, arguments: str) -> tuple[dict[str, Any], str]:
    """Return a call's `tool_use` block without `input`, and the input as JSON text."""
    return {"type": "tool_use", "id": _sent_id(call_id), "name": name}, _input(arguments)


def _add_system(read: list[dict[str, Any]], text: str, later_system: bool) -> None:
    last = read[-1] if read else None
    if last is None or later_system:
        read.append({"role": "system", "content": text})
    elif last["role"] == "system":
        last["content"] += f"\n\n{text}"
    else:
        reminder = f"<system-reminder>\n{text}\n</system-reminder>"
        if last["role"] == "user":
            last["content"] = append_content(last["content"], f"\n\n{reminder}")
        else:
            read.append({"role": "user", "content": reminder})


def _user(blocks: Sequence[Block], where: str, takes_images: bool) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        if block.type == "tool_result":
            call_id = _own_id(_needed(block.tool_use_id, here, "tool_use_id"))
            content = (
                block.content
                if isinstance(block.content, str)
                else _result(block.content or (), f"{here}.content", takes_images)
            )
            if block.is_error and not (isinstance(content, str) and _SAYS_ERROR.match(content)):
                content = append_content("Error: ", content)
            read.append({"role": "tool", "tool_call_id": call_id, "content": content})
            continue
        is_image = takes_images and block.type == "image"
        content = [_image(block, here)] if is_image else _text([block], where, index, takes_images)
        if read and read[-1]["role"] == "user":
            read[-1]["content"] = append_content(read[-1]["content"], content)
        else:
            read.append({"role": "user", "content": content})
    return read


def _result(parts: Sequence[Part], where: str, takes_images: bool) -> Any:
    """Return the content of a tool result: adjacent texts joined with line breaks, images in their places."""
    content: Any = ""
    for index, part in enumerate(parts):
        if takes_images and part.type == "image":
            content = append_content(content, [_image(part, f"{where}[{index}]")])
        else:
            after_text = index > 0 and parts[index - 1].type == "text"
            content = append_content(content, ("\n" if after_text else "") + _text([part], where, index, takes_images))
    return content


def _image(block: Part | Block, where: str) -> dict[str, str]:
    source = block.source
    if not isinstance(source, ImageSource) or source.type != "base64":
        raise UnsupportedParameter(
            f"{where} is an image without its bytes, and URLs are not fetched; use a source of type base64", "messages"
        )
    return image_part(f"data:{source.media_type};base64,{source.data}", where)


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    texts, thought, calls = [], [], []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        if block.type == "thinking":
            thought.append(_needed(block.thinking, here, "thinking"))
        elif block.type == "tool_use":
            function = {"name": _needed(block.name, here, "name"), "arguments": _arguments(block.input, here)}
            calls.append({"id": _own_id(_needed(block.id, here, "id")), "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            texts.append(_text([block], where, index))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _join(message: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if name != "role":
            message[name] = message[name] + value if name in message else value


def _text(blocks: Iterable[Part | Block], where: str, start: int = 0, takes_images: bool = False) -> str:
    texts = []
    for index, block in enumerate(blocks, start):
        if block.type != "text" or block.text is None:
            refuse_part(block, f"{where}[{index}]", takes_images)
        texts.append(block.text)
    return "".join(texts)


def _needed(value: str | None, where: str, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where}.{name} is missing; send a string", "messages")
    return value


def _arguments(value: Any, where: str) -> dict[str, Any] | str:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}.input is not an object; send the call's arguments as an object", "messages")
    if value.keys() == {UNPARSED} and isinstance(value[UNPARSED], str):
        text: str = value[UNPARSED]
        return text
    check_depth(value, f"{where}.input")
    return value


def _input(arguments: str) -> str:
    """Return a call's `input` as JSON text. An object's text stays unchanged, since re-encoding could alter numbers.

    An object that `_arguments` would refuse is sent as text, so that the client can send it back.
    """
    try:
        value = msgspec.json.decode(arguments)
        check_depth(value if isinstance(value, dict) else {}, "input")
    except (ValueError, RecursionError):
        value = None
    return arguments if isinstance(value, dict) else encode_json({UNPARSED: arguments}).decode()


def _sent_id(call_id: str) -> str:
    if _TAKEN_ID.fullmatch(call_id):
        return call_id
    return _ESCAPED + base64.urlsafe_b64encode(call_id.encode("utf-8", "surrogatepass")).decode().rstrip("=")


def _own_id(wire_id: str) -> str:
    if not wire_id.startswith(_ESCAPED):
        return wire_id
    digits = wire_id.removeprefix(_ESCAPED)
    try:
        data = base64.b64decode(digits + "=" * (-len(digits) % 4), altchars="-_", validate=True)
        return data.decode("utf-8", "surrogatepass")
    except ValueError:
        return wire_id
