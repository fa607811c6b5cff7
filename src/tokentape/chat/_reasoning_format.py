"""Find out how a chat template opens and closes reasoning in an assistant turn, from its own renderings.

`_assistant_format` reads the rest of a turn. All texts are marked text, in which control tokens are marks.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokentape.chat._call_syntax import CONTENT, KEY, NAME, QUESTION, REASONING, VALUE, Render, common_prefix
from tokentape.chat._template import REASONING_FIELDS
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Message

if TYPE_CHECKING:
    from tokentape.chat._assistant_format import AssistantFormat

FRAME = re.compile(f"({MARK.pattern})(\\w+)({MARK.pattern})")
"""Matches a control token, a word and a control token, which together frame a part of a turn in a channel."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The delimiters of reasoning, including the white space around them."""

    open: str
    close: str
    opened_by_prompt: bool
    """Whether the generation prompt opens reasoning, so that the first sampled ids are reasoning."""


def continued(render: Render, message: Message) -> str:
    """Render a turn and a question after it.

    Some templates require a generation prompt. If a template accepts only one exchange, the question is left out.
    """
    for generate in (False, True):
        with contextlib.suppress(TemplateRefused):
            return render([QUESTION, message, QUESTION], generate)
    return render([QUESTION, message], False)


def read_reasoning(render: Render, prompt: str, form: AssistantFormat) -> Reasoning | None:
    """Return the delimiters of reasoning before content, or before a call if the template shows it only there."""
    header, generation_prompt, shape, calls = form.header, form.generation_prompt, form.shape, form.calls
    around = _spoken(render, {"role": "assistant", "content": CONTENT}, CONTENT)
    if around is None and shape is not None and calls is not None:
        around = _spoken(render, shape.message("", [shape.probe(NAME, {KEY: VALUE})]), NAME)
        opening = calls.section_open + calls.open
        if around is not None:
            around = around[0], around[1].partition(opening)[0] if opening.strip() else around[1]
    if around is None or not around[1].strip():
        return None
    before, close = around
    if before.startswith(prompt):
        opening = before[len(prompt) :]
        if opening.strip():
            return Reasoning(opening, close, opened_by_prompt=False)
        after_header = generation_prompt[common_prefix(generation_prompt, header) :]
        opening = after_header if after_header.strip() else _last_delimiter(generation_prompt)
        return Reasoning(opening, close, opened_by_prompt=True)
    opening = _last_delimiter(before)
    if opening.strip() in header:
        # The same text opens the content: what differs is the word before it.
        framed = re.search(rf"{FRAME.pattern}\s*\Z", before)
        index = before.rfind(header[: common_prefix(header, generation_prompt)])
        # A prompt that closes reasoning is not written before reasoning.
        turn = before[index:] if index >= 0 else ""
        differing = turn[common_prefix(turn, header) :] if framed is None else framed[0]
        if not differing.strip() and re.match(r"[\w#:]", opening):
            return None  # The word also opens content, so it does not show reasoning.
        opening = differing if differing.strip() else opening
    opened, closed = generation_prompt.rfind(opening.strip()), generation_prompt.rfind(close.strip())
    return Reasoning(opening, close, opened_by_prompt=opened > closed)


def _spoken(render: Render, message: Message, following: str, *later: Message) -> tuple[str, str] | None:
    """Return the text before reasoning and the text right after it in its turn; None if reasoning is not shown."""
    try:
        text = render([QUESTION, {**message, **dict.fromkeys(REASONING_FIELDS, REASONING)}, *later], False)
    except TemplateRefused:
        return None
    start = text.find(REASONING)
    end = text.find(following, start)
    return None if start < 0 or end < 0 else (text[:start], text[start + len(REASONING) : end])


def shortest_close(render: Render, reasoning: Reasoning, form: AssistantFormat) -> tuple[Reasoning, str]:
    """Shorten the close of reasoning to the part that is also written before calls and within a conversation.

    Return the reasoning, and the rest of the close, which opens the content after the reasoning.
    """
    close, shape, content_open = reasoning.close, form.shape, form.content_open.strip()
    shared = in_history = len(close)
    if shape is not None:
        around = _spoken(render, shape.message("", [shape.probe(NAME, {KEY: VALUE})]), NAME)
        if around is not None:
            shared = common_prefix(close, around[1])
    within = _spoken(render, {"role": "assistant", "content": CONTENT}, CONTENT, QUESTION)
    if within is not None:
        # Text that only a conversation's last turn has before its content does not close reasoning.
        in_history = common_prefix(close, within[1])
        shared = min(shared, in_history)
    if content_open and close.rstrip().endswith(content_open):
        shared = min(shared, close.rindex(content_open) or shared)
    if not close[shared:].strip():
        return reasoning, ""
    # A delimiter ends with a control token, a tag or a line.
    ends = (match.end() for match in re.finditer(rf"{MARK.pattern}|[>\]\n]", close))
    shared = max((end for end in ends if end <= shared), default=0)
    if not close[:shared].strip():
        # The header of the content closes the reasoning.
        shared = in_history if close[:in_history].strip() else len(close)
    return replace(reasoning, close=close[:shared]), close[shared:]


def reasoning_never_shown(render: Render, tokenizer: Tokenizer, form: AssistantFormat) -> Reasoning | None:
    """Return the delimiters of reasoning that the prompt opens and the template strips from history, or None.

    No rendering shows how it is closed, so the likely close, `</x>` for `<x>`, is tried: a template that knows it
    strips the text before it.
    """
    opening = form.generation_prompt[common_prefix(form.generation_prompt, form.header) :]
    tag = re.fullmatch(r"([<\[]\W*)(\w[^<\[]*)", tokenizer.spell_marks(opening).strip())
    if tag is None:
        return None
    closing = f"{tag[1]}/{tag[2]}"
    message = {"role": "assistant", "content": f"{REASONING}{closing}{CONTENT}"}
    text = continued(render, message)
    if REASONING in text or CONTENT not in text:
        return None
    return Reasoning(opening, f"\n{tokenizer.mark_controls(closing)}\n\n", opened_by_prompt=True)


def _last_delimiter(text: str) -> str:
    """Return the text's last control token if the text ends with one, else its last word, with trailing white space."""
    core = text.rstrip()
    marks = list(MARK.finditer(core))
    if marks and marks[-1].end() == len(core):
        return text[marks[-1].start() :]
    words = core.split()
    return text[core.rindex(words[-1]) :] if words else text
