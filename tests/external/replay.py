"""Replay a conversation turn by turn on a template, and compare each step with transformers' rendering.

Each assistant message is a sampled completion: the ids that the template writes for it. Three comparisons are made
per turn. `render`: our ids of the prompt against the oracle's. `bridge`: context + completion + bridge against
the oracle's ids of the longer conversation. `parse`: the message that our parser reads from the completion against the
message of the suite.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.external.oracle import Oracle, Unrenderable
from tests.external.suites import Conversation
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import choose
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

EQUAL, TAIL, FORKED = "equal", "equal tail", "forked"
REFUSED_BOTH, REFUSED, DIFFERENT, SKIPPED = "refused by both", "refused by us", "different", "not compared"
VERDICTS = (EQUAL, TAIL, FORKED, REFUSED_BOTH, REFUSED, DIFFERENT, SKIPPED)
"""`equal tail`: the template writes earlier turns differently, and its whole rendering ends with our appended ids.
`forked`: the template writes earlier turns differently, and we start a new branch."""


THOUGHT = "A thought."
"""Text of reasoning that the prompt opens and the template does not show."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a comparison."""

    kind: str
    case: str
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Pair:
    """A template in our renderer and in the oracle, with the setup of both."""

    name: str
    renderer: Renderer
    certificate: Certificate
    oracle: Oracle

    @cached_property
    def takes_any_id(self) -> bool:
        """Return whether the template accepts a call's id other than nine letters and digits."""
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        asked = {"role": "user", "content": "go"}
        result = {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "1"}
        try:
            shaped = self.oracle.shaped([asked, {"role": "assistant", "tool_calls": [call]}, result])
            self.oracle.text(shaped, (), generate=True)
        except Unrenderable:
            return False
        return True

    def stop_texts(self, setup: Setup) -> list[str]:
        """Return the spellings of the tokens that end a turn."""
        controls = [self.renderer.tokenizer.control_by_id(i) for i in self.renderer.stop_ids(setup)]
        return [control.content for control in controls if control is not None]


def replay(pair: Pair, conversation: Conversation, setup: Setup) -> Iterator[Outcome]:
    """Yield the outcomes of all comparisons of a conversation."""
    messages = [as_sent(message) for message in conversation.messages]
    if not pair.takes_any_id:
        messages = _with_short_ids(messages)
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n]
    ends = [*turns[1:], len(messages)]
    for at, end in zip(turns, ends, strict=True):
        step = _Step(pair, conversation, setup, messages, at, end)
        yield step.render()
        if end > at + 1:
            yield step.bridge()
        yield step.parse()


@dataclass(frozen=True)
class _Step:
    """An assistant message and the messages after it."""

    pair: Pair
    conversation: Conversation
    setup: Setup
    messages: list[dict[str, Any]]
    at: int
    end: int

    def _outcome(self, kind: str, verdict: str, note: str = "") -> Outcome:
        return Outcome(kind, f"{self.conversation.name}#{self.at}", verdict, note)

    @cached_property
    def shaped(self) -> list[dict[str, Any]]:
        """Return the messages up to the next turn in the form that the oracle accepts."""
        return self.pair.oracle.shaped(self.messages[: self.end])

    def _text(self, until: int, *, generate: bool) -> str:
        return self.pair.oracle.text(self.shaped[:until], self.setup.tools, generate=generate)

    def render(self) -> Outcome:
        """Compare the prompt of this turn."""
        try:
            ours: list[int] | str = self.pair.renderer.render(self.messages[: self.at], self.setup).ids.tolist()
        except TemplateRefused as error:
            ours = str(error)
        try:
            text = self._text(self.at, generate=True)
        except Unrenderable as error:
            if isinstance(ours, str):
                return self._outcome("render", REFUSED_BOTH, f"{error} / {ours}")
            return self._outcome("render", SKIPPED, f"transformers refuses: {error}")
        if isinstance(ours, str):
            return self._outcome("render", REFUSED, ours)
        theirs = self.pair.oracle.ids(text)
        return self._outcome("render", EQUAL) if ours == theirs else self._differing("render", ours, theirs)

    @cached_property
    def sampled(self) -> tuple[list[int], list[int], str] | str:
        """Return the ids of prompt and completion, and the completion's text; or the reason that there are none."""
        try:
            prompt = self._text(self.at, generate=True)
            spoken = self._text(self.at + 1, generate=False)
        except Unrenderable as error:
            return f"transformers refuses the turn by itself: {error}"
        form = self.pair.renderer.format(self.setup)
        before, turn = "", spoken[len(prompt) :]
        opened = form.reasoning is not None and form.reasoning.opened_by_prompt
        prompt_ids = self.pair.oracle.ids(prompt)
        if not spoken.startswith(prompt):
            # The prompt opens reasoning that the template does not show in the history.
            common = os.path.commonprefix([prompt, spoken])
            start = max(common.rfind("\n"), common.rfind(">")) + 1
            if start < len(self._text(self.at, generate=False)):
                return "the template writes this turn elsewhere than behind its generation prompt"
            turn = spoken[start:]
            if opened and form.reasoning is not None:
                before = THOUGHT + self.pair.renderer.tokenizer.spell_marks(form.reasoning.close)
            elif self.messages[self.at].get("reasoning_content"):
                return "the generation prompt closes the reasoning that this turn has"
        elif opened and self.pair.oracle.ids(spoken)[: len(prompt_ids)] != prompt_ids:
            before = THOUGHT
        stops = [text for text in self.pair.stop_texts(self.setup) if text in turn]
        if stops:
            turn = turn[: min(turn.index(text) + len(text) for text in stops)]
        text = before + turn
        if not turn:
            return "the template writes nothing for this turn"
        if _lacks_calls(self.messages[self.at], text):
            return "the template does not write all calls of this turn"
        ids = self.pair.oracle.ids(prompt + text)
        if ids[: len(prompt_ids)] != prompt_ids:
            return "the turn's first characters merge with the prompt's last"
        completion = ids[len(prompt_ids) :]
        if not stops and (stop := self._next_header(completion)) is not None:
            completion.append(stop)
        return prompt_ids, completion, text

    def _next_header(self, completion: list[int]) -> int | None:
        """Return the stop token of a model if the template writes no end: the next message's header."""
        if self.end == self.at + 1:
            return None
        try:
            added = self._bridge(completion)
        except TemplateRefused:
            return None
        if added is None:
            return None
        return next((i for i in added.ids.tolist() if i in self.pair.renderer.stop_ids(self.setup)), None)

    def _bridge(self, completion: list[int]) -> Any:
        renderer, setup = self.pair.renderer, self.setup
        history, reply, new = self.messages[: self.at], self.messages[self.at], self.messages[self.at + 1 : self.end]
        strategy = choose(renderer, self.pair.certificate, reply, new, setup, history)
        if strategy == "fork":
            return None
        before = history if strategy == "contextual" else None
        return renderer.bridge(renderer.tokenizer.array(completion), reply, new, setup, before)

    def bridge(self) -> Outcome:
        """Compare the ids after the turn."""
        try:
            whole = self._text(self.end, generate=True)
        except Unrenderable as error:
            whole, refusal = "", str(error)
        else:
            refusal = ""
        sampled = self.sampled if not refusal else ([], [], "")
        if isinstance(sampled, str):
            return self._outcome("bridge", SKIPPED, sampled)
        context, completion, _ = sampled
        try:
            added = self._bridge(completion)
        except TemplateRefused as error:
            verdict = REFUSED_BOTH if refusal else REFUSED
            return self._outcome("bridge", verdict, f"{refusal} / {error}" if refusal else str(error))
        if refusal:
            return self._outcome("bridge", SKIPPED, f"transformers refuses: {refusal}")
        theirs = self.pair.oracle.ids(whole)
        before = context + completion
        kept = theirs[: len(before)] == before
        if added is None:
            return self._outcome("bridge", DIFFERENT, "forked, but the template appends") if kept else self._forked()
        ours = added.ids.tolist()
        if before + ours == theirs:
            return self._outcome("bridge", EQUAL)
        if kept or not _ends_with(theirs, completion, ours, added.stop_mismatch):
            return self._differing("bridge", before + ours, theirs)
        if self._claims_append_only() and not added.stop_mismatch:
            return self._outcome("bridge", DIFFERENT, "the certificate says append-only; the template rewrites")
        return self._outcome("bridge", TAIL)

    def _forked(self) -> Outcome:
        return self._outcome("bridge", FORKED)

    def _claims_append_only(self) -> bool:
        reply, new = self.messages[self.at], self.messages[self.at + 1 : self.end]
        system = any(message["role"] == "system" for message in self.messages[: self.at])
        name = grammar.continuation_name(new, tools=bool(self.setup.tools), system=system)
        continuation = self.pair.certificate.continuation(name)
        if continuation is None:
            return False
        return continuation.append_only == "yes" or (
            continuation.append_only == "clean text" and grammar.is_clean(reply)
        )

    def parse(self) -> Outcome:
        """Compare the parsed message of the completion."""
        try:
            sampled = self.sampled
        except Unrenderable as error:
            return self._outcome("parse", SKIPPED, str(error))
        if isinstance(sampled, str):
            return self._outcome("parse", SKIPPED, sampled)
        message, (context, completion, text) = self.messages[self.at], sampled
        left_out = _left_out(message, text)
        if left_out:
            return self._outcome("parse", SKIPPED, f"the template leaves out {left_out}")
        tokenizer = self.pair.renderer.tokenizer
        parser = self.pair.renderer.parser(self.setup, prompt_ids=tokenizer.array(context))
        parser.feed(completion)
        _, reply = parser.finish()
        calls = [(c.name, json.loads(c.arguments) if c.status == "ok" else c.status) for c in reply.tool_calls]
        expected_calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
        ]
        if calls != expected_calls:
            return self._outcome("parse", DIFFERENT, f"calls came back as others: {expected_calls} as {calls}"[:300])
        if (message.get("content") or "").strip() == reply.reasoning.strip() != "" and self._opens_reasoning(text):
            return self._outcome("parse", SKIPPED, "the template writes this content as it writes reasoning")
        for field, actual in (("content", reply.content), ("reasoning_content", reply.reasoning)):
            expected = (message.get(field) or "").strip()
            if field == "reasoning_content" and not expected:
                continue
            if expected != actual.strip():
                return self._outcome("parse", DIFFERENT, f"{field} came back as other text: {expected!r}"[:300])
        return self._outcome("parse", EQUAL)

    def _opens_reasoning(self, text: str) -> bool:
        """Return whether the prompt or the completion opens reasoning."""
        form = self.pair.renderer.format(self.setup)
        if form.reasoning is None:
            return False
        opening = self.pair.renderer.tokenizer.spell_marks(form.reasoning.open).strip()
        return opening in text or self._text(self.at, generate=True).rstrip().endswith(opening)

    def _differing(self, kind: str, ours: list[int], theirs: list[int]) -> Outcome:
        at = len(os.path.commonprefix([ours, theirs]))
        decode = self.pair.renderer.tokenizer.decode
        our_text, their_text = decode(ours[at : at + 12]), decode(theirs[at : at + 12])
        return self._outcome(kind, DIFFERENT, f"token {at}: ours {our_text!r}, transformers {their_text!r}")


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the gateway passes it on: no empty fields, arguments as objects."""
    sent = {key: value for key, value in message.items() if value is not None}
    if sent.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    elif "tool_calls" in sent:
        del sent["tool_calls"]
    return sent


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which each call's id is nine letters and digits, which every template accepts."""
    names: dict[str, str] = {}

    def short(call_id: str) -> str:
        return names.setdefault(call_id, f"call{len(names):05d}")

    out = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": short(call["id"])} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])
        out.append(message)
    return out


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _ends_with(whole: list[int], completion: list[int], added: list[int], other_stop: bool) -> bool:
    """Return whether a rendering ends with `added`, after the end of the completion.

    With `other_stop`, the template's stop token, or none, replaces the sampled one.
    """
    if not added or whole[-len(added) :] != added:
        return False
    before = whole[: -len(added)]
    if not other_stop:
        shown = completion[-3:]
        return before[-len(shown) :] == shown
    shown = completion[-4:-1]
    return shown in (before[-len(shown) :], before[-len(shown) - 1 : -1])


def _lacks_calls(message: Message, text: str) -> bool:
    """Return whether a written turn lacks any of its calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return any(text.count(name) < names.count(name) for name in names)


def _left_out(message: Message, text: str) -> str:
    """Return which text of a message its written turn lacks; empty if none."""
    fields = ("content", "reasoning_content")
    return next((field for field in fields if (message.get(field) or "").strip() not in text), "")
