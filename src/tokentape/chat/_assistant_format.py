"""Find out what a chat template writes around an assistant turn, from its own renderings.

Assistant messages with sentinels for content, reasoning, tool name, argument keys and values are rendered; the text
around each sentinel shows the delimiters. No code is specific to a model: a delimiter is whatever the template wrote.
All texts are marked text, in which control tokens are marks (see `chat/_tokenizer.py`).
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
    """The delimiters of a template that puts reasoning and content in channels, framed the same way (gpt-oss)."""

    header_close: str
    """The mark after a part's header."""
    part_close: str
    """The mark after a part, if another part follows."""
    reasoning_name: str
    """The word that names the reasoning channel in a header."""
    call_open: str
    """The text before a tool's name in the header of a call; empty if calls are written without such a header."""
    marks: tuple[str, ...]
    """All marks that frame parts. A part ends at any of them."""
    words: tuple[str, ...]
    """The words that occur in headers: a role, channels, types, and the word before a tool's name."""


@dataclass(frozen=True, slots=True)
class TurnClose:
    """What a template writes after the last text of a turn that ends a conversation."""

    last: str
    """The text without a generation prompt."""
    prompted: str
    """The text before a generation prompt. gpt-oss ends a turn with a different token there."""


@dataclass(frozen=True, slots=True)
class AssistantFormat:
    """Everything that bridging and parsing need to know about how a template writes an assistant turn."""

    generation_prompt: str
    header: str
    """The text before a turn that is no longer the last; the generation prompt may contain more, such as `<think>`."""
    content_open: str
    """The text between the generation prompt and the content of a turn without reasoning."""
    content_end: str
    """The text that closes the content within its turn, before calls or the turn's end; empty if there is none."""
    content_close: TurnClose
    """The text after the content at the end of a conversation."""
    content_suffix: str
    """The text from the content through the next user message and generation prompt; empty if that is refused."""
    turn_end: str = ""
    """The text between `content_end` and the token that ends a turn without calls; usually empty."""
    shows_reasoning_after: bool = False
    """Whether the text after a turn differs if the turn has reasoning."""
    needs_earlier: bool = False
    """The template accepts a user message only after an earlier exchange."""

    shape: CallShape | None = None
    """None if the template renders no tool calls."""
    calls: CallSyntax | None = None
    """None if the template renders no calls or their syntax was not recognized."""
    calls_close: TurnClose = TurnClose("", "")
    """The text after the last call's arguments at the end of a conversation."""
    calls_suffix: str = ""
    """The text from the last call's arguments through a tool result and generation prompt; empty if that is refused."""
    content_after_calls: TurnClose | None = None
    """The text after the content at the end of a conversation if the template writes content after calls, else None."""
    before_content: str = ""
    """The text between a turn's calls and its content, if the template writes both in one turn in that order."""
    repeats_arguments: bool = False
    """Whether the template writes a call's arguments again with the call's result."""

    reasoning: Reasoning | None = None
    content_reopen: str = ""
    """The text between the end of reasoning and the content, if content has its own delimiter."""
    empty_content: str = ""
    """The text between reasoning and the end of a turn without content, if the template frames empty content."""
    channels: Channels | None = None
    """Set if reasoning and content are framed the same way."""

    @property
    def question(self) -> tuple[Message, ...]:
        """The shortest conversation that the template accepts before a turn. It ends with `QUESTION`."""
        return (*EARLIER, QUESTION) if self.needs_earlier else (QUESTION,)

    @property
    def after_turns(self) -> tuple[TurnClose, str, TurnClose, str]:
        """The texts that can follow a turn, at the end of a conversation and within it."""
        return self.content_close, self.content_suffix, self.calls_close, self.calls_suffix

    @property
    def within_turns(self) -> str:
        """All delimiters that can occur within a turn, except those that end it."""
        reasoning = (self.reasoning.open, self.reasoning.close) if self.reasoning is not None else ()
        calls = (self.calls.section_open, self.calls.open, self.calls.between) if self.calls is not None else ()
        return "".join([self.content_open, self.content_reopen, *reasoning, *calls, self.before_content])


def read_format(render: Render, tokenizer: Tokenizer) -> AssistantFormat:
    """Read how a template writes assistant turns from its renderings of probe conversations.

    Raises `TemplateRefused` if the template does not render a user message and a plain answer.
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
    content_suffix, shows_reasoning_after = "", False
    with contextlib.suppress(TemplateRefused):
        content_suffix = _after(ask([QUESTION, turn, QUESTION], True), CONTENT)
        thinking = {**turn, **dict.fromkeys(REASONING_FIELDS, REASONING)}
        after_thinking = _after(ask([QUESTION, thinking, QUESTION], True), CONTENT)
        shows_reasoning_after = after_thinking != content_suffix and REASONING not in after_thinking
    content_open, content_close = _around(answer, prompt, CONTENT)
    if content_suffix:
        # Some templates write more after the last turn of a conversation. That text closes nothing.
        content_close = content_close[: common_prefix(content_close, content_suffix)]
    form = AssistantFormat(
        generation_prompt=generation_prompt,
        header=_read_header(followed, base, generation_prompt),
        content_open=content_open,
        content_end=content_close if MARK.search(content_close) else "",
        content_close=turn_close(ask, turn, CONTENT, generation_prompt),
        content_suffix=content_suffix,
        shows_reasoning_after=shows_reasoning_after,
        needs_earlier=len(earlier) > 0,
    )
    form = _with_calls(form, ask, prompt)
    reasoning = read_reasoning(ask, prompt, form)
    if reasoning is None:
        # Some templates render reasoning only from the second answer on.
        ask_later = _from_question(render, EARLIER)
        with contextlib.suppress(TemplateRefused):
            reasoning = read_reasoning(ask_later, ask_later([QUESTION], True), form)
    reasoning = reasoning or reasoning_never_shown(ask, tokenizer, form)
    return form if reasoning is None else _with_reasoning(form, ask, reasoning)


def _with_calls(form: AssistantFormat, ask: Render, prompt: str) -> AssistantFormat:
    """Return the format with how the template writes calls. `prompt` is the rendered question with the prompt."""
    shape = find_shape(ask)
    if shape is None:
        return form
    calling = shape.message("", [shape.probe(NAME, {KEY: VALUE})])
    content_end = _before_calls(ask, shape, form.content_end)
    calls = None
    with contextlib.suppress(TemplateRefused):
        # A template may reject some argument types in calls: calls are then not parsed; everything else works.
        calls = read_calls(ask, prompt, shape)
    if calls is not None:
        calls = replace(calls, section_open=_without_content(calls.section_open, form.content_open, content_end))
    form = replace(
        form,
        content_end=content_end,
        turn_end=form.content_end[len(content_end) :],
        shape=shape,
        calls=calls,
        calls_close=turn_close(ask, calling, VALUE, form.generation_prompt),
    )
    result = {
        "role": "tool",
        "tool_call_id": NAME if shape.name_is_id else PROBE_ID,
        "name": NAME,
        "content": OTHER_VALUE,
    }
    with contextlib.suppress(TemplateRefused):
        answered = ask([QUESTION, calling, result], True)
        repeats_arguments = answered.count(VALUE) > max(ask([QUESTION, calling], False).count(VALUE), 1)
        form = replace(form, repeats_arguments=repeats_arguments)
        form = replace(form, calls_suffix=_after(answered, VALUE))
        only_last = form.calls_close.last[common_prefix(form.calls_close.last, form.calls_suffix) :]
        if calls is not None and only_last.strip() and not MARK.search(only_last):
            # Text that is written only after the last turn of a conversation does not close calls.
            form = replace(form, calls=replace(calls, section_close=calls.section_close.removesuffix(only_last)))
        speaking = {**calling, "content": CONTENT}
        text = ask([QUESTION, speaking, result], True)
        before_content, content, _ = text.partition(VALUE)[2].partition(OTHER_VALUE)[0].partition(CONTENT)
        if content:
            has_header = form.header and form.header.strip() in before_content
            content_after_calls = turn_close(ask, speaking, CONTENT, form.generation_prompt)
            before_content = "" if has_header else before_content
            form = replace(form, content_after_calls=content_after_calls, before_content=before_content)
    return form


def _with_reasoning(form: AssistantFormat, ask: Render, reasoning: Reasoning) -> AssistantFormat:
    """Return the format with the delimiters of reasoning and of the content after it."""
    reasoning, content_reopen = shortest_close(ask, reasoning, form)
    turn_end, empty_content = form.content_end + form.turn_end, ""
    if len({*MARK.findall(turn_end)}) > 1:
        # Content also has a closing token. A template may leave out a header that nothing closes.
        thought = {"role": "assistant", "content": "", **dict.fromkeys(REASONING_FIELDS, REASONING)}
        frame = content_reopen + turn_end
        with contextlib.suppress(TemplateRefused):
            after = _after(continued(ask, thought), REASONING)
            empty_content = frame if after.startswith(reasoning.close + frame) else ""
    opened, closed = (form.generation_prompt.rfind(text.strip()) for text in (reasoning.open, reasoning.close))
    reasoning = replace(reasoning, opened_by_prompt=reasoning.opened_by_prompt and opened >= closed)
    channels = _read_channels(form, reasoning)
    return replace(
        form, reasoning=reasoning, content_reopen=content_reopen, empty_content=empty_content, channels=channels
    )


def turn_close(render: Render, turn: Message, sentinel: str, generation_prompt: str) -> TurnClose:
    """Return what the template writes after `sentinel` in a turn that ends a conversation."""
    last = _after(render([QUESTION, turn], False), sentinel)
    with contextlib.suppress(TemplateRefused):
        prompted = _after(render([QUESTION, turn], True), sentinel)
        marks = MARK.findall(generation_prompt)
        # The prompt's text may differ here, for example in a number, so its first control token is searched for.
        # Some templates write no prompt after an assistant turn: the prompt's first word is then missing.
        word = re.search(r"[^\W\d]+|\Z", MARK.split(generation_prompt)[-1])
        writes_prompt = bool(marks) and word is not None and word[0] in prompted
        begins = [mark.start() for mark in MARK.finditer(prompted) if writes_prompt and mark[0] == marks[0]]
        again = begins[-marks.count(marks[0]) :] if marks else []
        return TurnClose(last, prompted[: again[0]] if again else prompted)
    return TurnClose(last, last)


def _needed_before_question(render: Render) -> tuple[Message, ...]:
    """Return `EARLIER` if the template accepts a user message only after an earlier exchange, else an empty tuple.

    A template that removes the first user message may fail when no other message is left.
    """
    try:
        render([QUESTION], True)
    except TemplateRefused:
        with contextlib.suppress(TemplateRefused):
            render([*EARLIER, QUESTION], True)
            return EARLIER
    return ()


def _from_question(render: Render, earlier: Sequence[Message]) -> Render:
    """Return a function that renders messages after `earlier` and returns the text from the question on.

    Text before the question is cut because it may depend on later messages, like Mistral's tools.
    """

    def ask(messages: Sequence[Message], generate: bool) -> str:
        text = render([*earlier, *messages], generate)
        return text[max(text.find(QUESTION["content"]), 0) :]

    return ask


def _opening_marks(text: str) -> list[str]:
    """Return the control tokens before the question, which include those that open each message."""
    return MARK.findall(text[: max(text.find(QUESTION["content"]), 0)])


def _without_opening(text: str, openings: Sequence[str]) -> str:
    """Remove the control token that opens the next message from the end of a text."""
    return next((text.removesuffix(mark) for mark in openings if text.endswith(mark)), text)


def _read_base(render: Render, prompt: str, openings: Sequence[str]) -> str:
    """Return the question as rendered without a generation prompt.

    If the template always writes a generation prompt, a rendering of two questions in a row shows where the first one
    ends: the common beginning of both renderings, up to a control token that opens messages, one of `openings`.
    """
    base = prompt
    with contextlib.suppress(TemplateRefused):
        # No request needs this rendering, so it may fail (Nemotron Nano 2 looks for the last turn's content).
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
        # A role may stand between two control tokens, of which the prompt may have only the first.
        opening = next((mark for mark in reversed(openings[-2:]) if mark in prompt), "")
        if opening:
            # The template rejects two questions in a row. A mark that the answer's header follows ends the question.
            index = prompt.rindex(opening)
            answer = render([QUESTION, {"role": "assistant", "content": CONTENT}], False)
            header = answer[len(prompt) :].partition(CONTENT)[0] if answer.startswith(prompt) else ""
            return prompt if header.strip() and not prompt[index + len(opening) :].strip() else prompt[:index]
    return base


def _before_calls(render: Render, shape: CallShape, content_end: str) -> str:
    """Return the part of `content_end` that the template also writes between content and a call."""
    with contextlib.suppress(TemplateRefused):
        text = render([QUESTION, shape.message(CONTENT, [shape.probe(NAME, {KEY: VALUE})])], False)
        index = text.find(CONTENT)
        if 0 <= index < text.find(NAME):
            after = text[index + len(CONTENT) :]
            return after[: common_prefix(after, content_end)]
    return content_end


def _without_content(section_open: str, content_open: str, content_end: str) -> str:
    """Return `section_open` without the delimiters of empty content or an empty think block before the calls."""
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
        # Nemotron Nano 2 leaves it out before a generation prompt.
        raise TemplateRefused("the chat template drops an assistant turn that it renders in other conversations")
    return after


def _read_header(followed: str, base: str, generation_prompt: str) -> str:
    """Return the text that the template writes before the content of a turn that is not the last.

    If the template marks the last question, `before` does not begin with `base`: find the prompt's first mark instead.
    """
    before = followed[: followed.index(CONTENT)]
    header = before[common_prefix(before, base) :]
    opening = None if before.startswith(base) else MARK.match(generation_prompt)
    return header[max(header.find(opening[0]), 0) :] if opening is not None else header


def _read_channels(form: AssistantFormat, reasoning: Reasoning) -> Channels | None:
    """Return the framing if reasoning and content share one (a mark, a word, a mark), else None."""
    frames = [FRAME.fullmatch(text.strip()) for text in (reasoning.open, form.content_open)]
    close = MARK.match(reasoning.close.strip())
    if frames[0] is None or frames[1] is None or close is None or frames[0].group(1, 3) != frames[1].group(1, 3):
        return None
    calls = form.calls
    call_open = calls.open.strip() if calls is not None and calls.style == "named" else ""
    marks = MARK.findall(reasoning.open + reasoning.close)
    texts = [form.header, reasoning.open, form.content_open, call_open, calls.name_close if calls is not None else ""]
    words = MARK.sub(" ", " ".join(texts)).split()
    return Channels(
        frames[0][3], close[0], frames[0][2], call_open, tuple(dict.fromkeys(marks)), tuple(dict.fromkeys(words))
    )
