"""What holds for a template and what does not: bridges, parsing, injection safety, over a grammar of conversations.

A certificate is made by asking, not by knowing: nothing here looks at a model's name. For each continuation it says
which bridge strategy is exact, and whether the template itself only appends; where it does not, it shows the smallest
conversation tried that proves it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tokentape.chat import grammar
from tokentape.chat.bridge import Tail, cut_tail
from tokentape.chat.certificate import Certificate, Continuation, ParseCheck, Strategy
from tokentape.chat.certify_foreign import foreign_continuation
from tokentape.chat.media import IMAGE, image_parts
from tokentape.chat.parse import Reply
from tokentape.chat.reader import Reader
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import plain_message
from tokentape.chat.tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup


def certify(renderer: Renderer, template_kwargs: Mapping[str, Any] | None = None) -> Certificate:
    """Try everything and write down what holds. Takes some hundred renderings: tenths of a second.

    A template that fails on the grammar's tool is tried with a plainer one, then with none: if it only renders without
    tools, all continuations with tools are refused.

    Raises `TemplateRefused` if the template does not even render a question and an answer.
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
        continuations=tuple(
            _continuation(renderer, without_tools if grammar.NO_TOOLS in name else with_tools, name)
            for name in grammar.NAMES
        ),
        parsing=tuple(_parsing(renderer, setup, tools_refused)),
        call_style=form.calls.style if form.calls else None,
        reasoning=(
            (tokenizer.spell_marks(form.reasoning.open), tokenizer.spell_marks(form.reasoning.close))
            if form.reasoning
            else None
        ),
        reasoning_opened_by_prompt=form.reasoning is not None and form.reasoning.opened_by_prompt,
        generation_prompt=tokenizer.spell_marks(form.generation_prompt),
        stop_tokens=tuple(control.content for control in stops if control is not None),
        date_dependent=_depends_on_date(renderer, setup),
        dropped=tuple(_dropped(renderer, setup)),
        injection_safe=_injection_safe(renderer, setup),
        control_tokens=tuple(control.content for control in tokenizer.controls),
        text_tokens=tuple(token.content for token in tokenizer.text_tokens),
        replaced_ids=tuple((t.content, t.declared_id, t.id) for t in tokenizer.added_tokens if t.id != t.declared_id),
    )


def _setup_with_tools(renderer: Renderer, kwargs: Mapping[str, Any]) -> tuple[Setup, str]:
    """The grammar's setup with the first tool that the template takes, and why it takes none; empty if it does."""
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


def _continuation(renderer: Renderer, setup: Setup, name: str) -> Continuation:
    if renderer.overrides is not None and renderer.overrides.renderer is not None:
        return foreign_continuation(renderer, renderer.overrides.renderer, setup, name)
    refusal = "no conversation with it was taken"
    tried = 0
    strategy: Strategy = "local"
    rewritten: dict[bool, tuple[str, tuple[Message, ...]]] = {}
    ends: dict[str, None] = {}
    for history, reply, new in grammar.conversations(name):
        try:
            full = renderer.marked([*history, reply, *new], setup, generate=True)
            found, tail = _strategy(renderer, setup, history, reply, new)
        except TemplateRefused as error:
            refusal = str(error)
            continue
        tried += 1
        strategy = _worse(strategy, found)
        ends |= dict.fromkeys(_ends(renderer, setup, reply, tail))
        clean = grammar.is_clean(reply)
        if clean not in rewritten:
            reason = _rewrites(renderer, setup, history, reply, full, tail)
            if reason is not None:
                rewritten[clean] = reason, (*history, reply, *new)
    if not tried:
        return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
    if True not in rewritten:
        for reply in _replies_that_merge(renderer, setup):
            rewritten.setdefault(grammar.is_clean(reply), (_MERGES, (grammar.QUESTION, reply)))
    if strategy in ("local", "contextual"):
        depends, found_rewritten = _under_words(renderer, setup, name)
        strategy = "contextual" if depends else strategy
        if found_rewritten is not None:
            rewritten.setdefault(True, found_rewritten)
    if not rewritten:
        return Continuation(name, strategy, append_only="yes", tried=tried, reason="", ends=tuple(ends))
    clean = True in rewritten
    reason, counterexample = rewritten[clean]
    return Continuation(name, strategy, "no" if clean else "clean text", tried, reason, counterexample, tuple(ends))


def _under_words(renderer: Renderer, setup: Setup, name: str) -> tuple[bool, tuple[str, tuple[Message, ...]] | None]:
    """Try histories with words that the template compares with texts, such as `/no_think`.

    Return whether the tail depends on them, and how such a conversation is rewritten, with the conversation.
    """
    replies, new = grammar.CONTINUATIONS[name.partition("/")[0]]
    reply, depends = replies[0], False
    rewritten: tuple[str, tuple[Message, ...]] | None = None
    usual = functools.cache(lambda: renderer.tail(reply, new, setup))
    for words in renderer.template.compared_strings:
        for history in grammar.histories_with(words):
            if grammar.NO_SYSTEM in name and history[0]["role"] == "system":
                continue
            try:
                tail = renderer.tail(reply, new, setup, history)
                said = {**reply, "content": words}
                depends = depends or tail != usual() or tail != renderer.tail(said, new, setup, history)
                full = renderer.marked([*history, reply, *new], setup, generate=True)
                reason = _rewrites(renderer, setup, history, reply, full, tail) if rewritten is None else None
            except TemplateRefused:
                continue
            if reason is not None:
                rewritten = reason, (*history, reply, *new)
            if depends and rewritten is not None:
                return depends, rewritten
    return depends, rewritten


_MERGES = "the text stays, but it encodes to other ids where the turn meets its prompt"


def _replies_that_merge(renderer: Renderer, setup: Setup) -> Iterator[Message]:
    """Yield replies that share a token with the end of the generation prompt, where nothing stands in between.

    Their first characters are the rest of entries of the vocabulary that begin like the prompt ends.
    """
    tokenizer = renderer.tokenizer
    if renderer.format(setup).content_open:
        return
    prompt = renderer.marked([grammar.QUESTION], setup, generate=True)
    ends = [prompt[-n:] for n in range(1, 4) if not MARK.search(prompt[-n - 1 :])]
    ids = tokenizer.encode_marked(prompt).ids
    for end in ends:
        for rest in tokenizer.continuations(end):
            if tokenizer.encode_marked(prompt + rest).ids[: len(ids)] != ids:
                yield {"role": "assistant", "content": rest}


def _worse(one: Strategy, other: Strategy) -> Strategy:
    order: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
    return max(one, other, key=order.index)


def _strategy(
    renderer: Renderer, setup: Setup, history: Sequence[Message], reply: Message, new: Sequence[Message]
) -> tuple[Strategy, str | None]:
    """The strategy for one conversation of the grammar, with its tail if there is one that says all that is new."""
    try:
        tail = renderer.tail(reply, new, setup, history)
    except TemplateRefused:
        if _reaches_prompt(renderer, setup, [*history, reply], new):
            return "fork", None
        raise
    if any(word in tail for word in grammar.words_of([*history, *setup.tools])):
        return "fork", tail
    return _local_or_contextual(renderer, setup, reply, new, tail), tail


def _local_or_contextual(
    renderer: Renderer, setup: Setup, reply: Message, new: Sequence[Message], tail: str
) -> Strategy:
    try:
        return "local" if renderer.tail(reply, new, setup) == tail else "contextual"
    except TemplateRefused:
        return "contextual"


def _rewrites(
    renderer: Renderer, setup: Setup, history: Sequence[Message], reply: Message, full: str, tail: str | None
) -> str | None:
    """How rendering the longer conversation changes the ids before; None if it does not."""
    if tail is None:
        return "what a new message says is written in front of the turn"
    tokenizer = renderer.tokenizer
    prompt = renderer.marked(history, setup, generate=True)
    spoken = renderer.marked([*history, reply], setup, generate=False)
    if not spoken.startswith(prompt):
        return "the generation prompt is not what the template shows in front of a turn afterwards"
    behind = _behind_turn(renderer, setup, reply, tail)
    if not full.startswith(prompt):
        return "what came before the turn is written differently once the conversation goes on"
    turn = full[len(prompt) : len(full) - len(behind.text)]
    if not spoken[len(prompt) :].startswith(turn):
        return "the turn is written differently once the conversation goes on"
    context = tokenizer.encode_marked(prompt).ids
    pieces = context + tokenizer.encode_after_control(turn).ids + tokenizer.encode_after_control(behind.text).ids
    if pieces != tokenizer.encode_marked(full).ids:
        return _MERGES
    return None


def _behind_turn(renderer: Renderer, setup: Setup, reply: Message, tail: str) -> Tail:
    form, tokenizer = renderer.format(setup), renderer.tokenizer
    close = renderer.turn_close(reply, setup)
    return cut_tail(tail, close, form, tokenizer, tokenizer.eos_ids)


def _ends(renderer: Renderer, setup: Setup, reply: Message, tail: str | None) -> Iterator[str]:
    """The stop token that the template ends such a turn with, if it is one."""
    mark = MARK.match(_behind_turn(renderer, setup, reply, tail).text) if tail is not None else None
    if mark is not None:
        control = renderer.tokenizer.control_of_mark(mark[0])
        if control.id in renderer.stop_ids(setup):
            yield control.content


_PARTS = {"content": "content", "reasoning_content": "reasoning", "tool_calls": "calls"}


def _parsing(renderer: Renderer, setup: Setup, tools_refused: str) -> Iterator[ParseCheck]:
    """Render each kind of turn, parse what the template wrote, compare with what of the turn it wrote.

    `tools_refused`: why no calls can be asked for, if the template takes no tools.
    """
    for name, message in grammar.TURNS.items():
        if tools_refused and message.get("tool_calls"):
            yield ParseCheck(name, holds=None, detail=tools_refused)
            continue
        try:
            written = written_turn(renderer, setup, message)
        except TemplateRefused as error:
            yield ParseCheck(name, holds=None, detail=str(error))
            continue
        if written is None:
            yield ParseCheck(name, holds=None, detail="the template writes no such turn behind its own prompt")
            continue
        shown, completion = written
        left_out = [what for key, what in _PARTS.items() if message.get(key) and not shown.get(key)]
        if left_out:
            yield ParseCheck(name, holds=None, detail=f"the template leaves out the {' and the '.join(left_out)}")
            continue
        if _writes_content_as_reasoning(renderer, setup, message, completion):
            yield ParseCheck(name, holds=None, detail="the template writes this content just as it writes reasoning")
            continue
        parser = renderer.parser(setup)
        parser.feed(renderer.tokenizer.encode_after_control(completion).ids)
        problem = _difference(shown, parser.finish()[1])
        yield ParseCheck(name, holds=problem is None, detail=problem or "")


def _writes_content_as_reasoning(renderer: Renderer, setup: Setup, message: Message, completion: str) -> bool:
    if not message.get("content") or "reasoning_content" in message:
        return False
    try:
        written = written_turn(renderer, setup, {**message, "content": "", "reasoning_content": message["content"]})
    except TemplateRefused:
        return False
    return written is not None and written[1] == completion


def written_turn(renderer: Renderer, setup: Setup, message: Message) -> tuple[Message, str] | None:
    """What a model would sample for `message` if it wrote as its template does, and what of the message is in it.

    The completion is marked text that ends with the stop token. Where the prompt opens reasoning that the template does
    not show for a turn without any, the turn is given some. None where even that is not written behind the prompt.
    """
    question = [grammar.QUESTION]
    form = renderer.format(setup)
    prompt = _behind_question(renderer.marked(question, setup, generate=True))
    thought = {**message, "reasoning_content": "A thoughtword."}
    opened = form.reasoning if form.reasoning is not None and form.reasoning.opened_by_prompt else None
    shape = form.shape if message.get("tool_calls") else None

    def ask(tried: Message) -> str:
        # In the template's own shape: one that takes arguments as text prints an object in some notation of its own.
        shaped = shape.reshape(plain_message(tried)) if shape is not None else tried
        return _behind_question(renderer.marked([*question, shaped], setup, generate=False))

    for tried in [message] if opened is None or "reasoning_content" in message else [message, thought]:
        spoken = ask(tried)
        turn = spoken[len(prompt) :]
        if spoken.startswith(prompt) and (opened is None or opened.close.strip() in turn):
            return _cut_turn(renderer, setup, tried, turn)
    # The template does not show in history what its prompt opens or writes: put the turn behind the bare header.
    spoken = ask(message)
    unopened = prompt[: len(prompt) - len(form.generation_prompt)]
    before = next((b for b in (prompt, (unopened + form.header).rstrip()) if spoken.startswith(b)), None)
    if before is None or "reasoning_content" in message:
        return None
    turn = spoken[len(before) :]
    if opened is None:
        return _cut_turn(renderer, setup, message, turn)
    return _cut_turn(renderer, setup, thought, f"{thought['reasoning_content']}{opened.close}{turn}")


def _behind_question(text: str) -> str:
    """A rendering without what stands in front of the question, which may move with what follows it."""
    return text[max(text.find(grammar.QUESTION["content"]), 0) :]


def _cut_turn(renderer: Renderer, setup: Setup, message: Message, turn: str) -> tuple[Message, str]:
    """The turn up to its first stop token, and what of the message is in it."""
    stop_ids = renderer.stop_ids(setup)
    stops = [control.mark for control in renderer.tokenizer.controls if control.id in stop_ids]
    ends = [turn.index(mark) + len(mark) for mark in stops if mark in turn]
    turn = turn[: min(ends)] if ends else turn
    return _shown(message, turn), turn


def _shown(message: Message, turn: str) -> Message:
    """What of a message its written turn shows; the rest the template dropped. Calls are shown all or not at all."""
    shown = dict(message)
    for key in ("content", "reasoning_content"):
        if (message.get(key) or "").strip() not in turn:
            shown[key] = ""
    calls = message.get("tool_calls") or ()
    if calls and turn.count(calls[0]["function"]["name"]) < len(calls):
        shown["tool_calls"] = []
    return shown


def _difference(message: Message, reply: Reply) -> str | None:
    """What of a message did not come back; None if all did. Outer white space is the template's affair."""
    wanted_calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    found_calls = [(call.name, call.arguments) for call in reply.tool_calls if call.status == "ok"]
    if len(wanted_calls) != len(found_calls):
        return f"{len(wanted_calls)} calls were written, {len(found_calls)} found"
    for (name, arguments), (found_name, found) in zip(wanted_calls, found_calls, strict=True):
        if name != found_name or arguments != json.loads(found):
            return f"a call of {name} with {json.dumps(arguments)} came back as {found_name} with {found}"
    if (message.get("content") or "").strip() != reply.content.strip():
        return f"content came back as {reply.content!r}"
    if (message.get("reasoning_content") or "").strip() != reply.reasoning.strip():
        return f"reasoning came back as {reply.reasoning!r}"
    return None


def _depends_on_date(renderer: Renderer, setup: Setup) -> bool:
    kwargs, tools = setup.template_kwargs, setup.tools
    texts = {
        _prompt(renderer, [grammar.QUESTION], grammar.setup(renderer.fingerprint, kwargs, tools=tools, date=date))
        for date in ("2024-01-01", "2025-12-31")
    }
    return len(texts) > 1


def _dropped(renderer: Renderer, setup: Setup) -> Iterator[str]:
    """Name what callers may say that this template does not pass on."""
    for what, word, messages in grammar.LOSSES:
        if what == "tools" and not setup.tools:
            # They are refused, not dropped.
            continue
        try:
            text = _prompt(renderer, messages, setup)
        except TemplateRefused:
            continue
        if word not in text:
            yield what


def _injection_safe(renderer: Renderer, setup: Setup) -> bool:
    """Whether control tokens said by callers leave the control tokens of a rendering as they are."""
    controls = renderer.tokenizer.controls
    sample = [control for control in controls if control.content in renderer.template.source] or list(controls)
    for plain, *armed in zip(
        grammar.spoken_everywhere("word"), *(grammar.spoken_everywhere(c.content) for c in sample[:24]), strict=True
    ):
        try:
            expected = MARK.findall(_prompt(renderer, plain, setup))
        except TemplateRefused:
            continue
        for conversation in armed:
            if MARK.findall(_prompt(renderer, conversation, setup)) != expected:
                return False
    return True


def _prompt(renderer: Renderer, messages: Sequence[Message], setup: Setup) -> str:
    """Marked text of a conversation with the generation prompt, read from the ids of an overriding renderer."""
    if renderer.overrides is None or renderer.overrides.renderer is None:
        return renderer.marked(messages, setup, generate=True)
    reader = Reader(renderer.tokenizer, frozenset(), ())
    reader.feed(renderer.render(messages, setup).ids.tolist())
    reader.finish()
    return reader.text


def choose(
    renderer: Renderer,
    certificate: Certificate,
    reply: Message,
    new_messages: Sequence[Message],
    setup: Setup,
    history: Sequence[Message],
    system: bool | None = None,
) -> Strategy:
    """The bridge strategy for these very messages.

    `system` says whether `history` has a message of the system's or the developer's, if that is known already.

    A continuation that the certificate does not name is tried out here and now, at the cost of some full renderings.
    Raises `TemplateRefused` with the certificate's reason for one that the template does not take.
    """
    if system is None:
        system = any(message["role"] in ("system", "developer") for message in history)
    name = grammar.continuation_name(new_messages, tools=bool(setup.tools), system=system)
    found = certificate.continuation(name)
    if found is None and renderer.overrides is not None and renderer.overrides.renderer is not None:
        return "fork"
    if found is not None and found.strategy == "refused":
        raise TemplateRefused(f"continuation {name!r} is not certified for this chat template: {found.reason}")
    strategy = _try_out(renderer, reply, new_messages, setup, history) if found is None else found.strategy
    if strategy == "local" and image_parts(new_messages) and _counts_images(renderer, reply, new_messages, setup):
        return "contextual"
    return strategy


def _counts_images(renderer: Renderer, reply: Message, new_messages: Sequence[Message], setup: Setup) -> bool:
    """Whether what the template writes of images depends on those before (`Picture 2:`)."""
    behind_image = [{"role": "user", "content": [{"type": IMAGE}, {"type": "text", "text": _TELLING}]}]
    here = renderer.tail(reply, new_messages, setup)
    return renderer.tail(reply, new_messages, setup, behind_image) != here


_TELLING = "tokentapetellingword"


def _try_out(
    renderer: Renderer, reply: Message, new_messages: Sequence[Message], setup: Setup, history: Sequence[Message]
) -> Strategy:
    """As `_strategy`, for a real conversation: a word put into all that was said before shows if it comes up again."""
    try:
        tail = renderer.tail(reply, new_messages, setup, history)
    except TemplateRefused:
        if _reaches_prompt(renderer, setup, [*history, reply], new_messages):
            return "fork"
        raise
    tools = tuple(
        {**tool, "function": {**tool["function"], "description": _told(tool["function"].get("description") or "")}}
        for tool in setup.tools
    )
    told = [_telling(message) if message["role"] != "assistant" else message for message in history]
    telling = replace(setup, tools=tools)
    if _TELLING in renderer.tail(reply, new_messages, telling, told):
        return "fork"
    return _local_or_contextual(renderer, setup, reply, new_messages, tail)


def _reaches_prompt(renderer: Renderer, setup: Setup, before: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether a rendering from the start has, wherever, the turn that `before` ends with and each new message."""
    messages = [*before, *new]
    return all(
        _TELLING in renderer.marked([*messages[:n], _telling(messages[n]), *messages[n + 1 :]], setup, generate=True)
        for n in range(len(before) - 1, len(messages))
    )


def _telling(message: Message) -> Message:
    """The message with the telling word in its content, or in the name of its last call."""
    plain = plain_message(message)
    if not plain.get("tool_calls"):
        content = plain.get("content", "")
        told = _told(content) if isinstance(content, str) else [{"type": "text", "text": _TELLING}, *content]
        return {**plain, "content": told}
    *calls, last = plain["tool_calls"]
    name = _told(last["function"]["name"])
    return {**plain, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": name}}]}


def _told(text: str) -> str:
    # In the middle: templates look at how texts begin and end.
    return text[: len(text) // 2] + _TELLING + text[len(text) // 2 :]
