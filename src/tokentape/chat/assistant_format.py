"""What a template writes around an assistant turn, found out by asking it.

Assistant messages whose content, reasoning, tool name, argument keys and values are sentinels are rendered, and the
text around each sentinel is read off. Nothing here knows any model: a delimiter is whatever the template wrote.
All texts are marked text (see `tokenizer`).
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace

from tokentape.chat.call_syntax import (
    CONTENT,
    KEY,
    NAME,
    OTHER_VALUE,
    PROBE_ID,
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
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.errors import TemplateRefused

_FRAME = re.compile(f"({MARK.pattern})(\\w+)({MARK.pattern})")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The delimiters of reasoning, white space at their outer sides included."""

    open: str
    close: str
    opened_by_prompt: bool
    """The generation prompt already opened it: sampled ids start inside."""


@dataclass(frozen=True, slots=True)
class Channels:
    """How a template frames the parts of a turn where it frames reasoning and content alike."""

    header_close: str
    """The mark behind a part's header."""
    part_close: str
    """The mark behind a part that another one follows."""
    reasoning_name: str
    """The word in the header of reasoning."""
    call_open: str
    """What stands in front of a tool's name in the header of a call; empty if calls are not written so."""
    marks: tuple[str, ...]
    """All marks of such framing: what a part ends at."""


@dataclass(frozen=True, slots=True)
class AssistantFormat:
    """Everything that bridging and parsing need to know of how a template writes an assistant turn."""

    generation_prompt: str
    header: str
    """What stands in front of a turn once the conversation has gone on; the generation prompt may open more."""
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
    channels: Channels | None
    """Where reasoning and content are framed alike."""
    calls_tail: str
    """Behind the last call's arguments when a tool result follows; empty where the template refuses that."""


def read_format(render: Render, tokenizer: Tokenizer) -> AssistantFormat:
    """Ask a template how it writes assistant turns.

    Raises `TemplateRefused` if it does not even render a user's question and a plain answer.
    """
    base = render([QUESTION], False)
    prompt = render([QUESTION], True)
    generation_prompt = prompt[len(base) :] if prompt.startswith(base) else prompt[common_prefix(prompt, base) :]
    header = _read_header(render, base)
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
        calling = shape.message("", [shape.probe(NAME, {KEY: VALUE})])
        calls_close = _behind(render([QUESTION, calling], False), VALUE)
        result = {
            "role": "tool",
            "tool_call_id": NAME if shape.name_is_id else PROBE_ID,
            "name": NAME,
            "content": OTHER_VALUE,
        }
        with contextlib.suppress(TemplateRefused):
            calls_tail = _behind(render([QUESTION, calling, result], True), VALUE)
    reasoning = _read_reasoning(render, prompt, header, generation_prompt) or _reasoning_never_shown(
        render, tokenizer, header, generation_prompt
    )
    return AssistantFormat(
        generation_prompt=generation_prompt,
        header=header,
        content_open=content_open,
        content_close=content_close,
        reasoning=reasoning,
        channels=_read_channels(content_open, reasoning, calls),
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


def _read_header(render: Render, base: str) -> str:
    """What the template writes in front of the content of a turn that the conversation has left behind."""
    answered = render([QUESTION, {"role": "assistant", "content": CONTENT}, QUESTION], False)
    before = answered[: answered.index(CONTENT)]
    return before[common_prefix(before, base) :]


def _prompt_opening(header: str, generation_prompt: str) -> str:
    """What the generation prompt writes behind the assistant's header."""
    opening = generation_prompt[common_prefix(generation_prompt, header) :]
    return opening if opening.strip() else _last_delimiter(generation_prompt)


def _reasoning_never_shown(
    render: Render, tokenizer: Tokenizer, header: str, generation_prompt: str
) -> Reasoning | None:
    """Reasoning that the prompt opens and the template strips from history, so that no rendering shows how it closes.

    What would close it by the look of its opening, `</x>` for `<x>`, is tried on the template: one that knows it strips
    what comes before it.
    """
    opening = generation_prompt[common_prefix(generation_prompt, header) :]
    tag = re.fullmatch(r"([<\[]\W*)(\w.*)", tokenizer.spell_marks(opening).strip())
    if tag is None:
        return None
    closing = f"{tag[1]}/{tag[2]}"
    message = {"role": "assistant", "content": f"{REASONING}{closing}{CONTENT}"}
    text = render([QUESTION, message, QUESTION], False)
    if REASONING in text or CONTENT not in text:
        return None
    return Reasoning(opening, f"\n{tokenizer.mark_controls(closing)}\n\n", opened_by_prompt=True)


def _read_channels(content_open: str, reasoning: Reasoning | None, calls: CallSyntax | None) -> Channels | None:
    """The framing that reasoning and content share: a mark, a word, a mark."""
    if reasoning is None:
        return None
    frames = [_FRAME.fullmatch(text.strip()) for text in (reasoning.open, content_open)]
    close = MARK.match(reasoning.close.strip())
    if frames[0] is None or frames[1] is None or close is None or frames[0].group(1, 3) != frames[1].group(1, 3):
        return None
    call_open = calls.open.strip() if calls is not None and calls.style == "named" else ""
    marks = MARK.findall(reasoning.open + reasoning.close)
    return Channels(frames[0][3], close[0], frames[0][2], call_open, tuple(dict.fromkeys(marks)))


def _last_delimiter(text: str) -> str:
    """The last control token, or else the last word, with the white space behind it."""
    core = text.rstrip()
    marks = list(MARK.finditer(core))
    if marks and marks[-1].end() == len(core):
        return text[marks[-1].start() :]
    words = core.split()
    return text[core.rindex(words[-1]) :] if words else text


def _read_reasoning(render: Render, prompt: str, header: str, generation_prompt: str) -> Reasoning | None:
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
        return Reasoning(_prompt_opening(header, generation_prompt), close, opened_by_prompt=True)
    opening = _last_delimiter(before)
    opened, closed = generation_prompt.rfind(opening.strip()), generation_prompt.rfind(close.strip())
    return Reasoning(opening, close, opened_by_prompt=opened > closed)
