"""What holds for a template and what does not: bridges, parsing, injection safety, over a grammar of conversations.

A certificate is made by asking, not by knowing: nothing here looks at a model's name. For each continuation it says
which bridge strategy is exact, and whether the template itself only appends; where it does not, it shows the smallest
conversation tried that proves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

from tokentape.chat import grammar
from tokentape.chat.bridge import cut_tail
from tokentape.chat.parse import Reply
from tokentape.chat.renderer import Renderer
from tokentape.chat.tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

Strategy = Literal["local", "contextual", "fork", "refused"]

FORMAT = 1
"""Version of the certificate's JSON."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was found for one kind of new messages."""

    name: str
    strategy: Strategy
    """`local`: what follows a turn does not depend on the history. `contextual`: it does, but only appends.
    `fork`: the template writes again behind the turn what it had written before it. `refused`: not taken."""
    append_only: Literal["yes", "clean text", "no"]
    """Whether rendering the longer conversation keeps the ids of the shorter one and of the turn. `clean text`: except
    after a turn that is empty or has white space at its ends."""
    tried: int
    """Conversations tried."""
    reason: str
    """Why it is not append-only, or refused; empty otherwise."""
    counterexample: tuple[Message, ...] = ()
    """The smallest conversation tried on which the template rewrites what came before."""


@dataclass(frozen=True, slots=True)
class ParseCheck:
    """Whether a message comes back from what the template writes for it."""

    name: str
    holds: bool | None
    """None where the template writes no such turn behind its own prompt: there is nothing to compare with."""
    detail: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found for one tokenizer, template and set of template kwargs."""

    fingerprint: str
    template_kwargs: Mapping[str, Any]
    versions: Mapping[str, str]
    continuations: tuple[Continuation, ...]
    parsing: tuple[ParseCheck, ...]
    call_style: str | None
    reasoning: tuple[str, str] | None
    """Opening and closing delimiter."""
    reasoning_opened_by_prompt: bool
    generation_prompt: str
    stop_tokens: tuple[str, ...]
    date_dependent: bool
    dropped: tuple[str, ...]
    """What the template silently leaves out."""
    injection_safe: bool

    def continuation(self, name: str) -> Continuation | None:
        """What was found for the continuation of this name; see `continuation_name`."""
        return next((found for found in self.continuations if found.name == name), None)

    def to_json(self) -> str:
        """One JSON object, keys sorted."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read what `to_json` wrote. Raises `ValueError` for anything else."""
        fields = json.loads(text)
        if fields.pop("format", None) != FORMAT:
            raise ValueError(f"not a certificate of format {FORMAT}")
        fields["continuations"] = tuple(
            Continuation(**{**found, "counterexample": tuple(found["counterexample"])})
            for found in fields["continuations"]
        )
        fields["parsing"] = tuple(ParseCheck(**found) for found in fields["parsing"])
        for key in ("stop_tokens", "dropped"):
            fields[key] = tuple(fields[key])
        fields["reasoning"] = tuple(fields["reasoning"]) if fields["reasoning"] else None
        return cls(**fields)


def continuation_name(new_messages: Sequence[Message]) -> str:
    """The kind of continuation that new messages are: their roles, a run of tool results as `tool` or `tools`.

    >>> continuation_name([{"role": "tool"}, {"role": "tool"}, {"role": "user"}])
    'tools, user'
    """
    names: list[str] = []
    for message in new_messages:
        if message["role"] == "tool" and names and names[-1] in ("tool", "tools"):
            names[-1] = "tools"
        else:
            names.append(message["role"])
    return ", ".join(names)


def certify(renderer: Renderer, template_kwargs: Mapping[str, Any] | None = None) -> Certificate:
    """Try everything and write down what holds. Takes some hundred renderings: tenths of a second.

    Raises `TemplateRefused` if the template does not even render a question and an answer.
    """
    kwargs = dict(template_kwargs or {})
    setup = grammar.setup(renderer.fingerprint, kwargs)
    form = renderer.format(setup)
    tokenizer = renderer.tokenizer
    stops = [tokenizer.control_by_id(token_id) for token_id in sorted(renderer.stop_ids(setup))]
    return Certificate(
        fingerprint=renderer.fingerprint,
        template_kwargs=kwargs,
        versions={name: version(name) for name in ("tokenizers", "jinja2")},
        continuations=tuple(_continuation(renderer, setup, name) for name in grammar.CONTINUATIONS),
        parsing=tuple(_parsing(renderer, setup)),
        call_style=form.calls.style if form.calls else None,
        reasoning=(
            (tokenizer.spell_marks(form.reasoning.open), tokenizer.spell_marks(form.reasoning.close))
            if form.reasoning
            else None
        ),
        reasoning_opened_by_prompt=form.reasoning is not None and form.reasoning.opened_by_prompt,
        generation_prompt=tokenizer.spell_marks(form.generation_prompt),
        stop_tokens=tuple(control.content for control in stops if control is not None),
        date_dependent=_depends_on_date(renderer, kwargs),
        dropped=tuple(_dropped(renderer, setup)),
        injection_safe=_injection_safe(renderer, setup),
    )


def _continuation(renderer: Renderer, setup: Setup, name: str) -> Continuation:
    refusal = "no conversation with it was taken"
    tried = 0
    strategy: Strategy = "local"
    rewritten: dict[bool, tuple[str, tuple[Message, ...]]] = {}
    for history, reply, new in sorted(grammar.conversations(name), key=lambda parts: len(parts[0])):
        try:
            full = renderer.marked([*history, reply, *new], setup, generate=True)
            tail = renderer.tail(reply, new, setup, history)
        except TemplateRefused as error:
            refusal = str(error)
            continue
        tried += 1
        strategy = _worse(strategy, _strategy(renderer, setup, history, reply, new, tail))
        clean = grammar.is_clean(reply)
        if clean not in rewritten:
            reason = _rewrites(renderer, setup, history, reply, full, tail)
            if reason is not None:
                rewritten[clean] = reason, (*history, reply, *new)
    if not tried:
        return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
    if not rewritten:
        return Continuation(name, strategy, append_only="yes", tried=tried, reason="")
    clean = True in rewritten
    reason, counterexample = rewritten[clean]
    return Continuation(name, strategy, "no" if clean else "clean text", tried, reason, counterexample)


def _worse(one: Strategy, other: Strategy) -> Strategy:
    order: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
    return max(one, other, key=order.index)


def _strategy(
    renderer: Renderer,
    setup: Setup,
    history: Sequence[Message],
    reply: Message,
    new: Sequence[Message],
    tail: str,
) -> Strategy:
    if any(word in tail for word in grammar.words_of([*history, *setup.tools])):
        return "fork"
    try:
        return "local" if renderer.tail(reply, new, setup) == tail else "contextual"
    except TemplateRefused:
        return "contextual"


def _rewrites(
    renderer: Renderer, setup: Setup, history: Sequence[Message], reply: Message, full: str, tail: str
) -> str | None:
    """How rendering the longer conversation changes the ids before; None if it does not."""
    tokenizer = renderer.tokenizer
    prompt = renderer.marked(history, setup, generate=True)
    spoken = renderer.marked([*history, reply], setup, generate=False)
    if not spoken.startswith(prompt):
        return "the generation prompt is not what the template shows in front of a turn afterwards"
    form = renderer.format(setup)
    close = form.calls_close if reply.get("tool_calls") else form.content_close
    behind = cut_tail(tail, close, form.content_close, tokenizer, tokenizer.eos_ids)
    if not full.startswith(prompt):
        return "what came before the turn is written differently once the conversation goes on"
    turn = full[len(prompt) : len(full) - len(behind.text)]
    if not spoken[len(prompt) :].startswith(turn):
        return "the turn is written differently once the conversation goes on"
    context = tokenizer.encode_marked(prompt).ids
    pieces = context + tokenizer.encode_after_control(turn).ids + tokenizer.encode_after_control(behind.text).ids
    if pieces != tokenizer.encode_marked(full).ids:
        return "the text stays, but it encodes to other ids where the turn meets its prompt"
    return None


def _parsing(renderer: Renderer, setup: Setup) -> Iterator[ParseCheck]:
    """Render each kind of turn, parse what the template wrote, compare with what of the turn it wrote."""
    for name, message in grammar.TURNS.items():
        try:
            written = written_turn(renderer, setup, message)
        except TemplateRefused as error:
            yield ParseCheck(name, holds=None, detail=str(error))
            continue
        if written is None:
            yield ParseCheck(name, holds=None, detail="the template writes no such turn behind its own prompt")
            continue
        shown, completion = written
        parser = renderer.parser(setup)
        parser.feed(renderer.tokenizer.encode_after_control(completion).ids)
        problem = _difference(shown, parser.finish()[1])
        yield ParseCheck(name, holds=problem is None, detail=problem or "")


def written_turn(renderer: Renderer, setup: Setup, message: Message) -> tuple[Message, str] | None:
    """What a model would sample for `message` if it wrote as its template does, and what of the message is in it.

    The completion is marked text that ends with the stop token. Where the prompt opens reasoning that the template does
    not show for a turn without any, the turn is given some. None where even that is not written behind the prompt.
    """
    question = [grammar.QUESTION]
    form = renderer.format(setup)
    prompt = renderer.marked(question, setup, generate=True)
    stops = [c.mark for c in renderer.tokenizer.controls if c.id in renderer.stop_ids(setup)]
    tries = [message]
    if form.reasoning is not None and form.reasoning.opened_by_prompt and "reasoning_content" not in message:
        tries.append({**message, "reasoning_content": "A thoughtword."})
    for tried in tries:
        spoken = renderer.marked([*question, tried], setup, generate=False)
        if spoken.startswith(prompt):
            turn = spoken[len(prompt) :]
            ends = [turn.index(mark) + len(mark) for mark in stops if mark in turn]
            return _shown(tried, turn), turn[: min(ends)] if ends else turn
    # The template does not show in history what its prompt opens or writes: put the turn behind the bare header.
    answer = renderer.marked([*question, message], setup, generate=False)
    before = renderer.marked(question, setup, generate=False) + form.header
    if not answer.startswith(before) or "reasoning_content" in message:
        return None
    turn = answer[len(before) :]
    shown = _shown(message, turn)
    if form.reasoning is not None and form.reasoning.opened_by_prompt:
        turn = f"A thoughtword.{form.reasoning.close}{turn}"
        shown = {**shown, "reasoning_content": "A thoughtword."}
    ends = [turn.index(mark) + len(mark) for mark in stops if mark in turn]
    return shown, turn[: min(ends)] if ends else turn


def _shown(message: Message, turn: str) -> Message:
    """What of a message its written turn shows; the rest the template dropped."""
    shown = dict(message)
    for key in ("content", "reasoning_content"):
        if (message.get(key) or "").strip() not in turn:
            shown[key] = ""
    if not any(call["function"]["name"] in turn for call in message.get("tool_calls") or ()):
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


def _depends_on_date(renderer: Renderer, kwargs: Mapping[str, Any]) -> bool:
    texts = {
        renderer.marked([grammar.QUESTION], grammar.setup(renderer.fingerprint, kwargs, date=date), generate=True)
        for date in ("2024-01-01", "2025-12-31")
    }
    return len(texts) > 1


def _dropped(renderer: Renderer, setup: Setup) -> Iterator[str]:
    """Name what callers may say that this template does not pass on."""
    for what, word, messages in grammar.LOSSES:
        try:
            text = renderer.marked(messages, setup, generate=True)
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
            expected = MARK.findall(renderer.marked(plain, setup, generate=True))
        except TemplateRefused:
            continue
        for conversation in armed:
            if MARK.findall(renderer.marked(conversation, setup, generate=True)) != expected:
                return False
    return True


def choose(
    renderer: Renderer,
    certificate: Certificate,
    reply: Message,
    new_messages: Sequence[Message],
    setup: Setup,
    history: Sequence[Message],
) -> Strategy:
    """The bridge strategy for these very messages.

    A continuation that the certificate does not name is tried out here and now, at the cost of one full rendering.
    Raises `TemplateRefused` with the certificate's reason for one that the template does not take.
    """
    found = certificate.continuation(continuation_name(new_messages))
    if found is None:
        tail = renderer.tail(reply, new_messages, setup, history)
        try:
            return "local" if renderer.tail(reply, new_messages, setup) == tail else "contextual"
        except TemplateRefused:
            return "contextual"
    if found.strategy == "refused":
        raise TemplateRefused(f"continuation {found.name!r} is not certified for this chat template: {found.reason}")
    return found.strategy
