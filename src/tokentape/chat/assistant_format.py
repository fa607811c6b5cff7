"""What a template writes around an assistant turn, found out by asking it.

Assistant messages whose content, reasoning, tool name, argument keys and values are sentinels are rendered, and the
text around each sentinel is read off. Nothing here knows any model: a delimiter is whatever the template wrote.
All texts are marked text (see `tokenizer`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from tokentape.chat.call_syntax import (
    CONTENT,
    KEY,
    NAME,
    OTHER_VALUE,
    QUESTION,
    REASONING,
    VALUE,
    CallShape,
    CallSyntax,
    Render,
    common_prefix,
    find_shape,
    read_calls,
)
from tokentape.chat.tokenizer import MARK
from tokentape.errors import TemplateRefused


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The delimiters of reasoning, white space at their outer sides included."""

    open: str
    close: str
    opened_by_prompt: bool
    """The generation prompt already opened it: sampled ids start inside."""


@dataclass(frozen=True, slots=True)
class AssistantFormat:
    """Everything that bridging and parsing need to know of how a template writes an assistant turn."""

    generation_prompt: str
    content_open: str
    """Between the generation prompt and the content of a turn without reasoning."""
    content_close: str
    """Behind the content at the end of a conversation."""
    reasoning: Reasoning | None
    shape: CallShape | None
    """None where the template renders no tool calls."""
    calls: CallSyntax | None
    """None where there are no calls or their syntax could not be read off."""
    calls_close: str
    """Behind the last call's arguments at the end of a conversation."""
    content_tail: str
    """Behind the content when a user message follows, to the end of the generation prompt."""
    calls_tail: str
    """Behind the last call's arguments when a tool result follows; empty where the template refuses that."""


def read_format(render: Render) -> AssistantFormat:
    """Ask a template how it writes assistant turns.

    Raises `TemplateRefused` if it does not even render a user's question and a plain answer.
    """
    base = render([QUESTION], False)
    prompt = render([QUESTION], True)
    generation_prompt = prompt[len(base) :] if prompt.startswith(base) else prompt[common_prefix(prompt, base) :]
    answer = render([QUESTION, {"role": "assistant", "content": CONTENT}], False)
    if CONTENT not in answer:
        raise TemplateRefused("the chat template does not render the content of an assistant message")
    content_open, content_close = _around(answer, prompt, CONTENT)
    shape = find_shape(render)
    calls, calls_close, calls_tail = None, "", ""
    if shape is not None:
        calls = read_calls(render, prompt, shape)
        if calls is not None:
            # An empty think block before the call is no part of the call.
            shared = common_prefix(calls.section_open, content_open)
            calls = replace(calls, section_open=calls.section_open[shared:])
        calling = shape.message("", [("call00000", NAME, {KEY: VALUE})])
        calls_close = _behind(render([QUESTION, calling], False), VALUE)
        result = {"role": "tool", "tool_call_id": "call00000", "name": NAME, "content": OTHER_VALUE}
        with contextlib.suppress(TemplateRefused):
            calls_tail = _behind(render([QUESTION, calling, result], True), VALUE)
    return AssistantFormat(
        generation_prompt=generation_prompt,
        content_open=content_open,
        content_close=content_close,
        reasoning=_read_reasoning(render, prompt, generation_prompt),
        shape=shape,
        calls=calls,
        calls_close=calls_close,
        content_tail=_behind(render([QUESTION, {"role": "assistant", "content": CONTENT}, QUESTION], True), CONTENT),
        calls_tail=calls_tail,
    )


def _around(text: str, prompt: str, sentinel: str) -> tuple[str, str]:
    """What stands between `prompt` and the sentinel, and what stands behind it."""
    at = text.index(sentinel)
    return text[min(common_prefix(text, prompt), at) : at], _behind(text, sentinel)


def _behind(text: str, sentinel: str) -> str:
    return text[text.rindex(sentinel) + len(sentinel) :]


def _prompt_opening(render: Render, generation_prompt: str) -> str:
    """What the generation prompt writes behind the assistant's header."""
    answered = render([QUESTION, {"role": "assistant", "content": CONTENT}, QUESTION], False)
    header = answered[answered.index(QUESTION["content"]) : answered.index(CONTENT)]
    for at in range(len(generation_prompt), 0, -1):
        if header.endswith(generation_prompt[:at]):
            opening = generation_prompt[at:]
            break
    else:
        opening = ""
    return opening if opening.strip() else _last_delimiter(generation_prompt)


def _last_delimiter(text: str) -> str:
    """The last control token, or else the last word, with the white space behind it."""
    core = text.rstrip()
    marks = list(MARK.finditer(core))
    if marks and marks[-1].end() == len(core):
        return text[marks[-1].start() :]
    words = core.split()
    return text[core.rindex(words[-1]) :] if words else text


def _read_reasoning(render: Render, prompt: str, generation_prompt: str) -> Reasoning | None:
    message = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING, "thinking": REASONING}
    try:
        text = render([QUESTION, message], False)
    except TemplateRefused:
        return None
    start, end = text.find(REASONING), text.find(CONTENT)
    if start < 0 or end < start:
        return None
    before, close = text[:start], text[start + len(REASONING) : end]
    if not close.strip():
        return None
    if before.startswith(prompt):
        opening = before[len(prompt) :]
        if opening.strip():
            return Reasoning(opening, close, opened_by_prompt=False)
        return Reasoning(_prompt_opening(render, generation_prompt), close, opened_by_prompt=True)
    opening = _last_delimiter(before)
    opened, closed = generation_prompt.rfind(opening.strip()), generation_prompt.rfind(close.strip())
    return Reasoning(opening, close, opened_by_prompt=opened > closed)
