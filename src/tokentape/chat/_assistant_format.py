"""What a template writes around an assistant turn, read off its own renderings.

Assistant messages with sentinels for content, reasoning, tool name, argument keys and values are rendered, and the
text around each sentinel is read off. Nothing here knows any model: a delimiter is whatever the template wrote.
All texts are marked text (see `tokenizer`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokentape.chat._call_syntax import (
    CONTENT,
    EARLIER,
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
from tokentape.chat._reasoning_format import (
    FRAME,
    Reasoning,
    continued,
    read_reasoning,
    reasoning_never_shown,
    shortest_close,
)
from tokentape.chat._template import REASONING_FIELDS
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Message


@dataclass(frozen=True, slots=True)
class Channels:
    """How a template frames the parts of a turn where it frames reasoning and content alike."""

    header_close: str
    """The mark after a part's header."""
    part_close: str
    """The mark after a part that another one follows."""
    reasoning_name: str
    """The word in the header of reasoning."""
    call_open: str
    """The text before a tool's name in the header of a call; empty if calls are not written so."""
    marks: tuple[str, ...]
    """All marks of such framing: what a part ends at."""
    words: tuple[str, ...]
    """The words of headers: a role, channels, types, and the word before a tool's name."""


@dataclass(frozen=True, slots=True)
class TurnClose:
    """What a template writes after the last text of a turn that ends a conversation."""

    last: str
    """Where the conversation is rendered as it is."""
    prompted: str
    """Where a generation prompt follows, without that. gpt-oss ends a turn with another token there."""


@dataclass(frozen=True, slots=True)
class AssistantFormat:
    """Everything that bridging and parsing need to know of how a template writes an assistant turn."""

    generation_prompt: str
    header: str
    """The text before a turn once the conversation has gone on; the generation prompt may open more."""
    content_open: str
    """Between the generation prompt and the content of a turn without reasoning."""
    content_reopen: str
    """Between reasoning that was closed and the content after it, where content has a delimiter of its own."""
    content_end: str
    """What closes the content within its turn, before calls or the turn's end; empty where nothing does."""
    turn_end: str
    """What closes a turn that just speaks after that, before the token that ends it; mostly empty."""
    empty_content: str
    """Between reasoning that was closed and the token that ends the turn, where empty content has its delimiters."""
    content_close: TurnClose
    """After the content at the end of a conversation."""
    reasoning: Reasoning | None
    shape: CallShape | None
    """None where the template renders no tool calls."""
    calls: CallSyntax | None
    """None where there are no calls or their syntax could not be read off."""
    calls_close: TurnClose
    """After the last call's arguments at the end of a conversation."""
    content_suffix: str
    """After the content when a user message follows, to the end of the generation prompt; empty where it may not."""
    channels: Channels | None
    """Where reasoning and content are framed alike."""
    calls_suffix: str
    """After the last call's arguments when a tool result follows; empty where the template refuses that."""
    content_after_calls: TurnClose | None
    """After the content of a turn at the end of a conversation, if it stands after the turn's calls; else None."""
    before_content: str = ""
    """Between the calls of such a turn and its content, where that is one turn."""
    needs_earlier: bool = False
    """The template refuses a question alone: something has to be said before it."""

    @property
    def question(self) -> tuple[Message, ...]:
        """The shortest conversation that the template takes before a turn. It ends with `QUESTION`."""
        return (*EARLIER, QUESTION) if self.needs_earlier else (QUESTION,)

    @property
    def after_turns(self) -> tuple[TurnClose, str, TurnClose, str]:
        """What may stand after turns, at the end of a conversation and within it."""
        return self.content_close, self.content_suffix, self.calls_close, self.calls_suffix

    @property
    def within_turns(self) -> str:
        """What may stand within a turn: all delimiters but those that end it."""
        reasoning = (self.reasoning.open, self.reasoning.close) if self.reasoning is not None else ()
        calls = (self.calls.section_open, self.calls.open, self.calls.between) if self.calls is not None else ()
        return "".join([self.content_open, self.content_reopen, *reasoning, *calls, self.before_content])


def read_format(render: Render, tokenizer: Tokenizer) -> AssistantFormat:
    """Ask a template how it writes assistant turns.

    Raises `TemplateRefused` if it does not even render a user's question and a plain answer.
    """
    earlier = _needed_before_question(render)
    ask = _from_question(render, earlier)
    prompt = ask([QUESTION], True)
    base = _read_base(ask, prompt, _opening_marks(render([*earlier, QUESTION], True)))
    generation_prompt = prompt[len(base) :] if prompt.startswith(base) else prompt[common_prefix(prompt, base) :]
    turn = {"role": "assistant", "content": CONTENT}
    answer, followed = ask([QUESTION, turn], False), continued(ask, turn)
    if CONTENT not in answer or CONTENT not in followed:
        raise TemplateRefused("the chat template does not render the content of an assistant message")
    content_suffix = ""
    with contextlib.suppress(TemplateRefused):
        content_suffix = _after(ask([QUESTION, turn, QUESTION], True), CONTENT)
    header = _read_header(followed, base, generation_prompt)
    content_open, content_close = _around(answer, prompt, CONTENT)
    if content_suffix:
        # Some write more after the last turn of a conversation, which closes nothing.
        content_close = content_close[: common_prefix(content_close, content_suffix)]
    content_end = turn_end = content_close if MARK.search(content_close) else ""
    shape = find_shape(ask)
    calls, calls_close, calls_suffix, content_after_calls, before_content = None, TurnClose("", ""), "", None, ""
    if shape is not None:
        calling = shape.message("", [shape.probe(NAME, {KEY: VALUE})])
        content_end = _before_calls(ask, shape, content_end)
        with contextlib.suppress(TemplateRefused):
            # It may take calls, but not with arguments of each type: then they are not read, and the rest holds.
            calls = read_calls(ask, prompt, shape)
        if calls is not None:
            calls = replace(calls, section_open=_without_content(calls.section_open, content_open, content_end))
        calls_close = turn_close(ask, calling, VALUE, generation_prompt)
        result = {
            "role": "tool",
            "tool_call_id": NAME if shape.name_is_id else PROBE_ID,
            "name": NAME,
            "content": OTHER_VALUE,
        }
        with contextlib.suppress(TemplateRefused):
            calls_suffix = _after(ask([QUESTION, calling, result], True), VALUE)
            only_last = calls_close.last[common_prefix(calls_close.last, calls_suffix) :]
            if calls is not None and only_last.strip() and not MARK.search(only_last):
                # Text that only the last turn of a conversation ends with closes no calls.
                calls = replace(calls, section_close=calls.section_close.removesuffix(only_last))
            speaking = {**calling, "content": CONTENT}
            text = ask([QUESTION, speaking, result], True)
            after = text.partition(VALUE)[2].partition(OTHER_VALUE)[0]
            if CONTENT in after:
                content_after_calls = turn_close(ask, speaking, CONTENT, generation_prompt)
                before_content = after.partition(CONTENT)[0]
    reasoning = read_reasoning(ask, prompt, header, generation_prompt, shape, calls)
    if reasoning is None:
        # Some templates show it from the second answer on.
        ask_later = _from_question(render, EARLIER)
        with contextlib.suppress(TemplateRefused):
            prompt_later = ask_later([QUESTION], True)
            reasoning = read_reasoning(ask_later, prompt_later, header, generation_prompt, shape, calls)
    if reasoning is None:
        reasoning = reasoning_never_shown(ask, tokenizer, header, generation_prompt)
    content_reopen = empty_content = ""
    if reasoning is not None:
        reasoning, content_reopen = shortest_close(ask, reasoning, shape, content_open)
        thought = {"role": "assistant", "content": "", **dict.fromkeys(REASONING_FIELDS, REASONING)}
        if len({*MARK.findall(turn_end)}) > 1:
            # Content has a token that closes it as well. A header that nothing closes is left out.
            frame = content_reopen + turn_end
            with contextlib.suppress(TemplateRefused):
                after = _after(continued(ask, thought), REASONING)
                empty_content = frame if after.startswith(reasoning.close + frame) else ""
        opened, closed = (generation_prompt.rfind(delimiter.strip()) for delimiter in (reasoning.open, reasoning.close))
        reasoning = replace(reasoning, opened_by_prompt=reasoning.opened_by_prompt and opened >= closed)
    return AssistantFormat(
        generation_prompt=generation_prompt,
        header=header,
        content_open=content_open,
        content_reopen=content_reopen,
        content_end=content_end,
        turn_end=turn_end[len(content_end) :],
        empty_content=empty_content,
        content_close=turn_close(ask, turn, CONTENT, generation_prompt),
        reasoning=reasoning,
        channels=_read_channels(header, content_open, reasoning, calls),
        shape=shape,
        calls=calls,
        calls_close=calls_close,
        content_suffix=content_suffix,
        calls_suffix=calls_suffix,
        content_after_calls=content_after_calls,
        before_content="" if header and header.strip() in before_content else before_content,
        needs_earlier=len(earlier) > 0,
    )


def turn_close(render: Render, turn: Message, sentinel: str, generation_prompt: str) -> TurnClose:
    """Return what the template writes after `sentinel` in a turn that ends a conversation."""
    last = _after(render([QUESTION, turn], False), sentinel)
    with contextlib.suppress(TemplateRefused):
        prompted = _after(render([QUESTION, turn], True), sentinel)
        marks = MARK.findall(generation_prompt)
        # The prompt may say something else here, such as a number. It begins at its first control token.
        # Some write none after an assistant's turn: its first word is not there.
        word = re.search(r"[^\W\d]+|\Z", MARK.split(generation_prompt)[-1])
        writes_prompt = bool(marks) and word is not None and word[0] in prompted
        begins = [mark.start() for mark in MARK.finditer(prompted) if writes_prompt and mark[0] == marks[0]]
        again = begins[-marks.count(marks[0]) :] if marks else []
        return TurnClose(last, prompted[: again[0]] if again else prompted)
    return TurnClose(last, last)


def _needed_before_question(render: Render) -> tuple[Message, ...]:
    """Return an earlier exchange if the template takes a question after it only, else nothing.

    One that takes the first user message out may fail when no other message is left.
    """
    try:
        render([QUESTION], True)
    except TemplateRefused:
        with contextlib.suppress(TemplateRefused):
            render([*EARLIER, QUESTION], True)
            return EARLIER
    return ()


def _from_question(render: Render, earlier: Sequence[Message]) -> Render:
    """Return renderings after `earlier`, from the question on.

    The text before the question may depend on later messages (Mistral's tools).
    """

    def ask(messages: Sequence[Message], generate: bool) -> str:
        text = render([*earlier, *messages], generate)
        return text[max(text.find(QUESTION["content"]), 0) :]

    return ask


def _opening_marks(text: str) -> list[str]:
    """Return the control tokens before the question, among them those that open every message."""
    return MARK.findall(text[: max(text.find(QUESTION["content"]), 0)])


def _without_opening(text: str, openings: Sequence[str]) -> str:
    """Return a text without the control token at its end that opens the next message."""
    return next((text.removesuffix(mark) for mark in openings if text.endswith(mark)), text)


def _read_base(render: Render, prompt: str, openings: Sequence[str]) -> str:
    """Return the question as rendered without a generation prompt.

    If the rendering always ends with one, a rendering of two questions in a row shows where the first question ends:
    what both renderings begin with, up to the control token that opens messages, one of `openings`.
    """
    base = prompt
    with contextlib.suppress(TemplateRefused):
        # No request asks for this, so a template may fail on it (Nemotron Nano 2 looks for the last turn's content).
        base = render([QUESTION], False)
    if base == prompt:
        with contextlib.suppress(TemplateRefused):
            asked_twice = render([QUESTION, {**QUESTION, "content": CONTENT}], True)
            before = asked_twice[: asked_twice.find(CONTENT)] if CONTENT in asked_twice else prompt
            end = MARK.search(before, len(QUESTION["content"]))
            shared = prompt[: common_prefix(prompt, before)]
            if end is None:
                return shared
            start = prompt.find(end[0], len(QUESTION["content"]))
            if start > len(shared):
                # The last question is marked before what ends it.
                shared = prompt[: start + common_prefix(prompt[start:], before[end.start() :])]
            if shared == prompt:
                return prompt  # Nothing follows what ends the question.
            # The control token that ends the question may end messages before it too.
            return _without_opening(shared, openings if len(shared) > start + len(end[0]) else openings[-1:])
        opening = openings[-1] if openings else ""
        if opening and opening in prompt:
            # It takes no two questions in a row. Where the answer's header follows the mark, that ends the question.
            index = prompt.rindex(opening)
            answer = render([QUESTION, {"role": "assistant", "content": CONTENT}], False)
            header = answer[len(prompt) :].partition(CONTENT)[0] if answer.startswith(prompt) else ""
            return prompt if header.strip() and not prompt[index + len(opening) :].strip() else prompt[:index]
    return base


def _before_calls(render: Render, shape: CallShape, content_end: str) -> str:
    """Return the part of `content_end`, read at the end of a conversation, that also separates content and a call."""
    with contextlib.suppress(TemplateRefused):
        text = render([QUESTION, shape.message(CONTENT, [shape.probe(NAME, {KEY: VALUE})])], False)
        index = text.find(CONTENT)
        if 0 <= index < text.find(NAME):
            after = text[index + len(CONTENT) :]
            return after[: common_prefix(after, content_end)]
    return content_end


def _without_content(section_open: str, content_open: str, content_end: str) -> str:
    """`section_open` without the frame of an empty content, or an empty think block, before the calls."""
    for frame in (content_open, content_end):
        section_open = section_open[common_prefix(section_open, frame) :]
    return section_open


def _around(text: str, prompt: str, sentinel: str) -> tuple[str, str]:
    """Return the text between `prompt` and the sentinel, and the text after it."""
    index = text.index(sentinel)
    return text[min(common_prefix(text, prompt), index) : index], _after(text, sentinel)


def _after(text: str, sentinel: str) -> str:
    _, separator, after = text.rpartition(sentinel)
    if not separator:
        # With a generation prompt, for one (Nemotron Nano 2).
        raise TemplateRefused("the chat template leaves out an assistant turn that it writes in another conversation")
    return after


def _read_header(followed: str, base: str, generation_prompt: str) -> str:
    """Return what the template writes before the content of a turn that the conversation has moved on from.

    If it marks the last question, so that `base` is written differently there, the header begins as the prompt does.
    """
    before = followed[: followed.index(CONTENT)]
    header = before[common_prefix(before, base) :]
    opening = None if before.startswith(base) else MARK.match(generation_prompt)
    return header[max(header.find(opening[0]), 0) :] if opening is not None else header


def _read_channels(
    header: str, content_open: str, reasoning: Reasoning | None, calls: CallSyntax | None
) -> Channels | None:
    """Return the framing that reasoning and content share: a mark, a word, a mark."""
    if reasoning is None:
        return None
    frames = [FRAME.fullmatch(text.strip()) for text in (reasoning.open, content_open)]
    close = MARK.match(reasoning.close.strip())
    if frames[0] is None or frames[1] is None or close is None or frames[0].group(1, 3) != frames[1].group(1, 3):
        return None
    call_open = calls.open.strip() if calls is not None and calls.style == "named" else ""
    marks = MARK.findall(reasoning.open + reasoning.close)
    texts = [header, reasoning.open, content_open, call_open, calls.name_close if calls is not None else ""]
    words = MARK.sub(" ", " ".join(texts)).split()
    return Channels(
        frames[0][3], close[0], frames[0][2], call_open, tuple(dict.fromkeys(marks)), tuple(dict.fromkeys(words))
    )
