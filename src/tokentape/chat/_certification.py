"""Test a template's bridges, parsing and injection safety on a grammar of conversations.

All results come from renderings; nothing here looks at a model's name. For each continuation, the certificate says
which bridge strategy is exact and whether the template itself only appends. If it does not, the certificate has the
smallest tried conversation that shows it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tokentape.chat import _grammar as grammar
from tokentape.chat._caller_text import without_brackets
from tokentape.chat._certificate import Certificate, Continuation, ParseCheck
from tokentape.chat._certify_continuations import Continuations
from tokentape.chat._external_renderer import ExternalRenderer
from tokentape.chat._parse import Reply
from tokentape.chat._reader import read_text
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import plain_message
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

_DATES = ("2024-01-01", "2049-12-31")


def certify(renderer: Renderer, template_kwargs: Mapping[str, Any] | None = None) -> Certificate:
    """Return the certificate of a renderer's template, from hundreds to ten thousand renderings (0.5 to 25 s of CPU).

    A template that fails on the grammar's tool is tried with a plainer tool, then without tools. If it renders only
    without tools, all continuations with tools are refused, and vice versa.

    Raises `TemplateRefused` if the template does not render a question and an answer.
    """
    kwargs = dict(template_kwargs or {})
    with_tools, tools_refused = _setup_with_tools(renderer, kwargs)
    without_tools = grammar.setup(renderer.fingerprint, kwargs, tools=())
    setup = without_tools if tools_refused else with_tools
    form = renderer.format(setup)
    tokenizer = renderer.tokenizer
    stops = [tokenizer.control_by_id(token_id) for token_id in sorted(renderer.stop_ids(setup))]
    return Certificate(
        fingerprint=renderer.fingerprint,
        template_kwargs=kwargs,
        versions={name: version(name) for name in ("tokentape", "tokenizers", "jinja2")},
        overrides=renderer.overrides.name if renderer.overrides else None,
        continuations=tuple(_continuations(renderer, with_tools, without_tools)),
        parsing=tuple(_parsing(renderer, setup, without_tools, tools_refused)),
        call_style=form.calls.style if form.calls else None,
        reasoning=(
            (tokenizer.spell_marks(form.reasoning.open), tokenizer.spell_marks(form.reasoning.close))
            if form.reasoning
            else None
        ),
        reasoning_opened_by_prompt=form.reasoning is not None and form.reasoning.opened_by_prompt,
        generation_prompt=tokenizer.spell_marks(form.generation_prompt),
        stop_tokens=tuple(control.content for control in stops if control is not None),
        date_dependent=len({_prompt(renderer, [grammar.QUESTION], setup, date) for date in _DATES}) > 1,
        dropped=tuple(_dropped(renderer, setup)),
        injection_safe=_injection_safe(renderer, setup),
        control_tokens=tuple(control.content for control in tokenizer.controls),
        text_tokens=tuple(token.content for token in tokenizer.text_tokens),
        replaced_ids=tuple((t.content, t.declared_id, t.id) for t in tokenizer.added_tokens if t.id != t.declared_id),
    )


def _setup_with_tools(renderer: Renderer, kwargs: Mapping[str, Any]) -> tuple[Setup, str]:
    """Return the grammar's setup with the first tool that the template accepts, and the error if it accepts none.

    The error is empty if a tool is accepted.
    """
    refused = ""
    for tool in (grammar.TOOL, grammar.PLAIN_TOOL):
        setup = grammar.setup(renderer.fingerprint, kwargs, tools=(tool,))
        try:
            renderer.format(setup)
        except TemplateRefused as error:
            refused = f"with tools, {error}"
        else:
            return setup, ""
    return setup, refused


def _continuations(renderer: Renderer, with_tools: Setup, without_tools: Setup) -> Iterator[Continuation]:
    tested = {setup.key: Continuations(renderer, setup) for setup in (with_tools, without_tools)}
    for name in grammar.NAMES:
        setup = without_tools if grammar.NO_TOOLS in name else with_tools
        if isinstance(renderer, ExternalRenderer):
            yield renderer.continuation(setup, name)
        else:
            yield tested[setup.key].find(name)


_PARTS = {"content": "content", "reasoning_content": "reasoning", "tool_calls": "calls"}


def _parsing(renderer: Renderer, setup: Setup, without_tools: Setup, tools_refused: str) -> Iterator[ParseCheck]:
    """Render each kind of turn, parse what the template wrote, and compare with the parts of the turn that it shows.

    `tools_refused` is the reason that calls can't be tested if the template accepts no tools.
    """
    form, differs_without = renderer.format(setup), False
    with contextlib.suppress(TemplateRefused):  # Some templates accept no conversation without tools.
        differs_without = renderer.format(without_tools) != form
    for name, message in grammar.TURNS.items():
        if tools_refused and message.get("tool_calls"):
            yield ParseCheck(name, holds=None, detail=tools_refused)
            continue
        three = grammar.THREE_CALLS
        if form.shape is not None and form.shape.name_is_id:
            message, three = grammar.with_names_in_ids(message), grammar.with_names_in_ids(three)
        question = grammar.accepted((grammar.QUESTION,), form)
        check = _parse_check(renderer, setup, name, message, question)
        # A template may number turns; if the generation prompt lacks the number, the model writes it.
        others = [(setup, message, grammar.LATER), (setup, message, grammar.accepted(grammar.AFTER_RESULT, form))]
        if name == "parallel calls":
            others.append((setup, three, question))
        if differs_without and not message.get("tool_calls"):
            others.append((without_tools, message, grammar.LATER))
        for under, turn, history in others:
            if check.holds:
                other = _parse_check(renderer, under, name, turn, history)
                check = other if other.holds is False else check
        yield check


def _parse_check(
    renderer: Renderer, setup: Setup, name: str, message: Message, history: Sequence[Message]
) -> ParseCheck:
    """Compare a turn as the template writes it after `history` with what is parsed from it."""
    try:
        turn = written_turn(renderer, setup, message, history)
    except TemplateRefused as error:
        return ParseCheck(name, holds=None, detail=str(error))
    if turn is None:
        return ParseCheck(name, holds=None, detail="the template writes no such turn after its own prompt")
    shown, completion = turn
    left_out = [key for key in _PARTS if message.get(key) and not shown.get(key)]
    if left_out:
        # An engine stops at the first stop token, so the agent never gets what the template writes after it.
        whole = renderer.render_text([*history, message], setup, generate=False)
        after = whole.partition(completion)[2] if completion else ""
        late = [key for key in left_out if _word_of(message, key) in after]
        parts = " and the ".join(_PARTS[key] for key in late or left_out)
        if late:
            stop = renderer.tokenizer.spell_marks(completion[-2:])
            detail = f"the template writes the stop token {stop} before the {parts}, so engines end the turn there"
            return ParseCheck(name, holds=False, detail=detail)
        return ParseCheck(name, holds=None, detail=f"the template leaves out the {parts}")
    if _writes_content_as_reasoning(renderer, setup, message, completion, history):
        return ParseCheck(name, holds=None, detail="the template writes this content just as it writes reasoning")
    prompt = renderer.render_text(history, setup, generate=True)
    parser = renderer.parser(setup, prompt_ids=renderer.tokenizer.encode_marked(prompt).array)
    parser.feed(renderer.tokenizer.encode_after_control(completion).ids)
    reply = parser.finish()[1]
    # A reply with a problem is the fallback for a parser that failed.
    problem = reply.problem or _difference(shown, reply)
    return ParseCheck(name, holds=not problem, detail=problem or "")


def _word_of(message: Message, part: str) -> str:
    return str(message[part][0]["function"]["name"] if part == "tool_calls" else message[part])


def _writes_content_as_reasoning(
    renderer: Renderer, setup: Setup, message: Message, completion: str, history: Sequence[Message]
) -> bool:
    if not message.get("content") or "reasoning_content" in message:
        return False
    try:
        thought = {**message, "content": "", "reasoning_content": message["content"]}
        turn = written_turn(renderer, setup, thought, history)
    except TemplateRefused:
        return False
    return turn is not None and turn[1] == completion


def written_turn(
    renderer: Renderer, setup: Setup, message: Message, history: Sequence[Message] = (grammar.QUESTION,)
) -> tuple[Message, str] | None:
    """Return the part of `message` that the template writes, and the completion that a model would have sampled for it.

    `history` contains `grammar.QUESTION`, and the assistant speaks next.

    The completion is marked text that ends with the stop token. If the prompt opens reasoning that the template does
    not write for a turn without any, reasoning is added. Return None if the turn is still not written after the prompt.
    """
    tokenizer, rendered = renderer.tokenizer, renderer.render_text(history, setup, generate=True)
    form = renderer.format_after(tokenizer.encode_marked(rendered).array, renderer.format(setup))
    prompt = _from_question(rendered)
    thought = {**message, "reasoning_content": "A thoughtword."}
    opened = form.reasoning if form.reasoning is not None and form.reasoning.opened_by_prompt else None
    shape = form.shape if message.get("tool_calls") else None

    def ask(tried: Message) -> str:
        # Reshape calls: a template that expects arguments as text would print an object in a different notation.
        shaped = shape.reshape(plain_message(tried)) if shape is not None else tried
        return _from_question(renderer.render_text([*history, shaped], setup, generate=False))

    for tried in [message] if opened is None or "reasoning_content" in message else [message, thought]:
        spoken = ask(tried)
        turn = spoken[len(prompt) :]
        if spoken.startswith(prompt) and (opened is None or opened.close.strip() in turn):
            return _cut_turn(renderer, setup, tried, turn)
    # The template does not write in histories what its prompt contains: look for the turn after the bare header.
    spoken = ask(message)
    unopened = prompt.removesuffix(form.generation_prompt)
    before = next((b for b in (prompt, (unopened + form.header).rstrip()) if spoken.startswith(b)), None)
    if before is None or "reasoning_content" in message:
        return None
    turn = spoken[len(before) :]
    if opened is None:
        return _cut_turn(renderer, setup, message, turn)
    return _cut_turn(renderer, setup, thought, f"{thought['reasoning_content']}{opened.close}{turn}")


def _from_question(text: str) -> str:
    """Return a rendering from the question on. The text before the question may depend on later messages."""
    return text[max(text.find(grammar.QUESTION["content"]), 0) :]


def _cut_turn(renderer: Renderer, setup: Setup, message: Message, turn: str) -> tuple[Message, str]:
    """Return the part of the message in the turn up to its first stop token, and the turn up to there."""
    stops = renderer.tokenizer.marks(renderer.stop_ids(setup))
    ends = [turn.index(mark) + len(mark) for mark in stops if mark in turn]
    turn = turn[: min(ends)] if ends else turn
    return _shown(message, turn), turn


def _shown(message: Message, turn: str) -> Message:
    """Return the message without the parts that the template dropped from its written turn.

    Calls are dropped all together if any is missing.
    """
    shown = dict(message)
    for key in ("content", "reasoning_content"):
        if (message.get(key) or "").strip() not in turn:
            shown[key] = ""
    calls = message.get("tool_calls") or ()
    if calls and turn.count(calls[0]["function"]["name"]) < len(calls):
        shown["tool_calls"] = []
    return shown


def _difference(message: Message, reply: Reply) -> str | None:
    """Describe how the parsed reply differs from the message; None if it does not. Outer white space is ignored."""
    expected_calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    parsed_calls = [(call.name, call.arguments) for call in reply.tool_calls if call.status == "ok"]
    if len(expected_calls) != len(parsed_calls):
        return f"{len(expected_calls)} calls were written, {len(parsed_calls)} found"
    for (name, arguments), (parsed_name, parsed_arguments) in zip(expected_calls, parsed_calls, strict=True):
        if name != parsed_name or arguments != json.loads(parsed_arguments):
            return f"a call of {name} with {json.dumps(arguments)} came back as {parsed_name} with {parsed_arguments}"
    if (message.get("content") or "").strip() != reply.content.strip():
        return f"content came back as {reply.content!r}"
    if (message.get("reasoning_content") or "").strip() != reply.reasoning.strip():
        return f"reasoning came back as {reply.reasoning!r}"
    return None


def _dropped(renderer: Renderer, setup: Setup) -> Iterator[str]:
    """Yield the names of message parts that this template silently drops."""
    for what, word, messages in grammar.LOSSES:
        if what == "tools" and not setup.tools:
            # The template refuses tools; it does not drop them.
            continue
        text = _prompt_or_nothing(renderer, messages, setup)
        if text and word not in text:
            yield what


def _injection_safe(renderer: Renderer, setup: Setup) -> bool:
    """Return whether control tokens in callers' text leave a rendering's own control tokens unchanged."""
    controls = renderer.tokenizer.controls
    sample = [control for control in controls if control.content in renderer.template.source] or list(controls)
    # Words that the template compares are not escaped, also if brackets around them would make control tokens.
    inner = {word for control in controls for word in without_brackets(control.content)}
    compared = sorted(inner.intersection(renderer.template.constants.strings))

    def prompts(text: str) -> list[str]:
        return [_prompt_or_nothing(renderer, messages, setup) for messages in grammar.conversations_with(text)]

    usual, empty = prompts("word"), prompts("")
    for text in (*(control.content for control in sample[:24]), *compared):
        twice, joined = (prompts(f"{text} {more}") if text in compared else usual for more in (text, "word"))
        for prompt, plain, other, *others in zip(prompts(text), usual, joined, empty, twice, strict=True):
            # A template that leaves out a word may then write control tokens of its own, as for an empty text.
            left_out = text in compared and all(each == prompt for each in others)
            for tried in (other,) if left_out else (other, prompt):
                if tried and plain and MARK.findall(tried) != MARK.findall(plain):
                    return False
    return True


def _prompt_or_nothing(renderer: Renderer, messages: Sequence[Message], setup: Setup) -> str:
    """Return a conversation and the generation prompt; empty if the template refuses it."""
    with contextlib.suppress(TemplateRefused):
        return _prompt(renderer, messages, setup)
    return ""


def _prompt(renderer: Renderer, messages: Sequence[Message], setup: Setup, date: str | None = None) -> str:
    """Return a conversation and the generation prompt as marked text, which external renderers' ids are decoded to.

    `date`, if given, replaces the setup's date.
    """
    messages = grammar.accepted(messages, renderer.format(setup))
    setup = replace(setup, date=date or setup.date)
    if not renderer.is_external:
        return renderer.render_text(messages, setup, generate=True)
    return read_text(renderer.tokenizer, renderer.render(messages, setup).ids.tolist())
