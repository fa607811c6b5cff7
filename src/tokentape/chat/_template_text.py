"""Render a chat template to marked text, and derive assistant formats, stop tokens and turn suffixes from it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tokentape._canonical import digest_of, json_in_order
from tokentape.chat._assistant_format import AssistantFormat, TurnClose, read_format, turn_close
from tokentape.chat._bridge import trim_to_turn_end
from tokentape.chat._call_syntax import CONTENT, KEY, NAME, PROBE_ID, REASONING, VALUE, CallShape, Render
from tokentape.chat._caller_text import (
    Escaper,
    TemplateLiterals,
    Text,
    edged_text_count,
    provenance_of_characters,
    template_literals,
    texts_of,
    with_edges,
)
from tokentape.chat._template import REASONING_FIELDS, ChatTemplate, plain_message
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Codes, Message, Setup

_KEPT_SETUPS = 256
"""The maximum number of setups with cached formats and escaped tools."""

_TOOL_FIELDS = frozenset(("type", "function", "name", "description", "parameters"))

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


class TemplateText:
    """Renders one template to marked text for one tokenizer. Methods use the tools, kwargs and date in a `Setup`."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._escaper = Escaper(tokenizer, compared=template.constants.strings)
        self._formats: dict[str, AssistantFormat] = {}
        self._stops: dict[str, frozenset[int]] = {}
        self._escaped: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self._bridging: dict[str, Setup] = {}
        self._literals: dict[tuple[str, ...], TemplateLiterals] = {}
        self._closes: dict[tuple[str, str], TurnClose] = {}

    def format(self, setup: Setup) -> AssistantFormat:
        """Return the delimiters that the template writes around and in assistant turns under `setup`."""

        def read() -> AssistantFormat:
            return self._without_stops(read_format(self._asking(setup), self.tokenizer))

        return cached(self._formats, setup.key, read)

    def stop_ids(self, setup: Setup) -> frozenset[int]:
        """Return the ids that end a turn: the end-of-sequence ids, and those with which the template ends turns."""
        return cached(self._stops, setup.key, lambda: self._stop_ids(self.format(setup)))

    def _stop_ids(self, form: AssistantFormat) -> frozenset[int]:
        tokenizer = self.tokenizer
        eos_marks, ids = tokenizer.marks(tokenizer.eos_ids), set(tokenizer.eos_ids)
        # A token that also occurs within turns is not a stop token: a later part of the turn, or a second call, would
        # never be sampled. Without end-of-sequence ids it is used nevertheless, because nothing else ends the turn.
        within = MARK.findall(form.within_turns) if tokenizer.eos_ids else []
        for suffix, close in ((form.content_suffix, form.content_close), (form.calls_suffix, form.calls_close)):
            cut = trim_to_turn_end(suffix, close, form, tokenizer)
            mark = MARK.match(cut.text)
            if mark is None or mark[0] in within:
                continue
            # If conversations end with an end-of-sequence token, a different token may end the turns within them (Phi),
            # but the next message's header is not a stop token.
            if cut.ends_turn or eos_marks.isdisjoint(MARK.findall(close.last)):
                ids.add(tokenizer.control_of_mark(mark[0]).id)
        return frozenset(ids)

    def _without_stops(self, form: AssistantFormat) -> AssistantFormat:
        """Cut the format's closes of content and calls before the token that ends the turn."""
        stops, eos_marks = map(self.tokenizer.marks, (self._stop_ids(form), self.tokenizer.eos_ids))
        content_end, turn_end = form.content_end, form.turn_end
        after = content_end + turn_end
        stop = next((m.start() for m in MARK.finditer(after) if m[0] in stops), len(after))
        form = replace(form, content_end=content_end[:stop], turn_end=after[len(content_end) : stop])
        if form.calls is None:
            return form

        turn_close = form.content_close.last.strip()

        def cut(text: str) -> str:
            if turn_close and not MARK.search(turn_close):
                return text.partition(turn_close)[0]
            ends = (m.start() for m in MARK.finditer(text) if m[0] in eos_marks)
            return text[: next(ends, len(text))]

        calls = replace(form.calls, close=cut(form.calls.close), section_close=cut(form.calls.section_close))
        return replace(form, calls=calls)

    def render_text(self, messages: Sequence[Message], setup: Setup, *, generate: bool) -> str:
        """Return the marked text of a conversation. `generate` adds the generation prompt. Used by certificates."""
        return self._accepted(messages, setup, generate=generate)[1]

    def render_text_trusting(self, messages: Sequence[Message], setup: Setup) -> str:
        """Return the marked text of a conversation where control tokens spelled by the assistant are control tokens."""
        plain = [plain_message(message) for message in messages]
        escaped = [entry if entry["role"] == "assistant" else self._escaper.escape_all(entry) for entry in plain]
        return self._render(escaped, setup, generate=False)

    def render_text_with_provenance(
        self, messages: Sequence[Message], setup: Setup, *, generate: bool
    ) -> tuple[str, Codes]:
        """Return the marked text of a conversation, and each character's provenance; a mark counts as one character.

        `generate` adds the generation prompt. Raises `TemplateRefused` as `render` does.
        """
        plain, text = self._accepted(messages, setup, generate=generate)
        texts = texts_of(plain, self._escaper.unescape)
        kind = "", setup.key, str(generate), *(str(message.get("role")) for message in plain)
        characters = self.tokenizer.mark.sub("\0", text)
        codes = self._known_codes(kind, characters, texts)
        if codes is None:
            edged = self._render([with_edges(message) for message in plain], setup, generate=generate)
            self._refuse_unknown_roles(plain, edged, setup)
            codes = self._codes(edged, kind, characters, texts)
        return text, codes

    def _known_codes(self, kind: tuple[str, ...], characters: str, texts: Sequence[Text] | None) -> Codes | None:
        """Return the provenance of each character if the template wrote the same literals around earlier texts.

        `kind` is what else determines the literals: the setup, the roles of the messages, and the turn before them.
        """
        literals = self._literals.get(kind)
        return None if literals is None or texts is None else literals.codes(characters, texts)

    def _codes(self, edged: str, kind: tuple[str, ...], characters: str, texts: Sequence[Text] | None) -> Codes:
        """Return the provenance of each character by a rendering with edge markers, and cache the literals."""
        codes = provenance_of_characters(edged, characters)
        literals = None if texts is None else template_literals(characters, codes, texts)
        if literals is not None:
            keep(self._literals, kind, literals)
        return codes

    def suffix(
        self, reply: Message, new_messages: Sequence[Message], setup: Setup, history: Sequence[Message] | None = None
    ) -> str:
        """Return the template's marked text after `reply`, see `Renderer.bridge`. Used by certificates."""
        return self._suffix(reply, new_messages, setup, self.format(setup), history)[0]

    def turn_close(self, reply: Message, setup: Setup) -> TurnClose:
        """Return the text after `reply` at the end of a conversation. Used by certificates."""
        form = self.format(setup)
        probe = next(_probes(reply, (), form, ""))
        return self._close(probe, probe.message, setup, form)

    def _suffix(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        form: AssistantFormat,
        history: Sequence[Message] | None,
    ) -> tuple[str, Codes, TurnClose]:
        """Return the suffix after `reply`, its provenance, and the text after `reply` at the end of a conversation.

        `history` contains the messages before `reply`. If it is None, a placeholder user message precedes `reply`.
        """
        if history is None:
            setup = self._bridging_setup(setup)
            before: Sequence[Message] = self.format(setup).question
        else:
            before = self._plain(history, setup, reshape=True)
        plain = self._plain(new_messages, setup, reshape=True)
        calls = [{"id": c["id"], "function": {"name": c["function"]["name"]}} for c in reply.get("tool_calls") or ()]
        reply = {**reply, "tool_calls": self._escaper.escape_all(calls)}
        texts = texts_of(plain, self._escaper.unescape)
        refused = TemplateRefused("no new messages to continue with: send at least 1 message after the turn")
        content = self._escaper.escape_all(plain_message(reply).get("content") or "") if history is not None else ""
        thinks = form.shows_reasoning_after and any(reply.get(field) for field in REASONING_FIELDS)
        thinking = dict.fromkeys(REASONING_FIELDS, REASONING) if thinks else {}
        for probe in _probes(reply, plain, form, content, self._compared_ending(content)):
            message, ending = {**probe.message, **thinking}, self._escaper.unescape(probe.ending)
            after = functools.partial(_after, sentinel=probe.sentinel, ending=ending)
            kind = probe.sentinel, setup.key, str(thinks), *(message["role"] for message in plain)
            try:
                text = self._render([*before, message, *plain], setup, generate=True)
                if probe.sentinel not in text or not _after(text, probe.sentinel).startswith(ending.rstrip()):
                    continue
                if form.repeats_arguments and probe.sentinel is VALUE and any(m["role"] == "tool" for m in plain):
                    refused = TemplateRefused("the chat template writes a call's arguments again with its result")
                    break
                suffix = after(text)
                if NAME in suffix:
                    refused = TemplateRefused(
                        "the chat template writes a tool's name with its result, but neither the result nor a call in "
                        "the previous turn has the name. Send the result with a `name`."
                    )
                    continue
                if message.get("content") and content.strip() and content.strip() in suffix and probe.sentinel is VALUE:
                    # The template writes the turn's content after the results, but the model sampled it before them.
                    continue
                characters = self.tokenizer.mark.sub("\0", suffix)
                close = self._close(probe, message, setup, form)
                codes = self._known_codes(kind, characters, texts)
                if codes is not None:
                    return suffix, codes, close
                edged = after(self._render([*before, message, *map(with_edges, plain)], setup, generate=True))
            except TemplateRefused as error:
                refused = error
                continue
            self._refuse_dropped(plain, [*before, message], suffix, edged, after, setup)
            return suffix, self._codes(edged, kind, characters, texts), close
        raise refused

    def _compared_ending(self, content: str) -> str:
        """Return the end of an escaped content that the template looks for, with the white space after it."""
        bare = content.rstrip()
        length = max((len(text) for text in self.template.compared.strings if bare.endswith(text)), default=0)
        return content[len(bare) - length :] if length else ""

    def _close(self, probe: _Probe, message: Message, setup: Setup, form: AssistantFormat) -> TurnClose:
        """Return the text after `message` at the end of a conversation, which may vary with call ids or content."""
        if probe.sentinel is CONTENT or (PROBE_ID not in form.calls_close.last and not message.get("content")):
            return probe.close
        ask = self._asking(setup, form.question[:-1])
        key_text = json_in_order([message, form.generation_prompt, list(form.question)])
        key = setup.key, digest_of(key_text.encode("ascii"))
        return cached(self._closes, key, lambda: turn_close(ask, message, VALUE, form.generation_prompt))

    def _bridging_setup(self, setup: Setup) -> Setup:
        """Return the setup for local bridges, which has no tools if the text after turns is the same without them.

        Tools are written before the conversation, outside of a bridge, and can be most of the rendered text.
        """

        def choose() -> Setup:
            bare = setup if self._looks_up_fields(setup) else replace(setup, tools=())
            with contextlib.suppress(TemplateRefused):
                return bare if self.format(bare).after_turns == self.format(setup).after_turns else setup
            return setup

        return cached(self._bridging, setup.key, choose)

    def _looks_up_fields(self, setup: Setup) -> bool:
        """Return whether tools have unusual fields, such as a schema of results, that the template's source names."""
        fields = {key for tool in setup.tools for key in (*tool, *(tool.get("function") or ()))} - _TOOL_FIELDS
        return any(key in self.template.whole_source for key in fields)

    def _plain(self, messages: Sequence[Message], setup: Setup, *, reshape: bool) -> list[dict[str, Any]]:
        """Return messages as templates expect them, with callers' text escaped.

        With `reshape`, tool calls are in the template's `CallShape`.
        """
        shape = self.format(setup).shape if reshape else None
        plain = []
        for message in messages:
            entry = plain_message(message)
            if entry.get("tool_calls") and shape is not None:
                entry = shape.reshape(entry)
            plain.append(self._escaper.escape_all(entry))
        return plain

    def _accepted(
        self, messages: Sequence[Message], setup: Setup, *, generate: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """Return messages and their marked text. Calls are reshaped only if the template refuses them unchanged."""
        plain = self._plain(messages, setup, reshape=False)
        try:
            return plain, self._render(plain, setup, generate=generate)
        except TemplateRefused:
            if not any(message.get("tool_calls") for message in messages):
                raise
        plain = self._plain(messages, setup, reshape=True)
        return plain, self._render(plain, setup, generate=generate)

    def _asking(self, setup: Setup, before: Sequence[Message] = ()) -> Render:
        """Return a function that renders messages after those in `before`."""
        return lambda messages, generate: self._render([*before, *messages], setup, generate=generate)

    def _render(self, plain: Sequence[Message], setup: Setup, *, generate: bool) -> str:
        escaper = self._escaper
        tools, kwargs = cached(
            self._escaped,
            setup.key,
            lambda: (escaper.escape_all(setup.tools), escaper.escape_kwargs(setup.template_kwargs)),
        )
        rendered = self.template.render(
            plain,
            tools=tools,
            add_generation_prompt=generate,
            date=setup.date,
            variables={**self.tokenizer.special_tokens, **kwargs},
            escapes=escaper.escapes,
        )
        return escaper.marked(rendered)

    def prompt_or_nothing(self, messages: Sequence[Message], setup: Setup) -> str:
        """Return the marked text of a conversation and the generation prompt; empty if the template refuses it."""
        return self._render_or_nothing(self._plain(messages, setup, reshape=True), setup)

    def _render_or_nothing(self, plain: Sequence[Message], setup: Setup) -> str:
        try:
            return self._render(plain, setup, generate=True)
        except TemplateRefused:
            return ""

    def _refuse_unknown_roles(self, plain: Sequence[Message], edged: str, setup: Setup) -> None:
        """Raise `TemplateRefused` for a message with a role that this template never renders, such as `developer`.

        It is no error if the template drops texts for other reasons, because the result must have the template's ids.
        """
        with_text = [message for message in plain if _text_count(message)]
        if edged_text_count(edged) >= sum(map(_text_count, with_text)):
            return
        for role in dict.fromkeys(message["role"] for message in with_text if message["role"] != "tool"):
            message = {"role": role, "content": CONTENT}
            question = self.format(setup).question
            tries = [message, *question], [*question[:-1], message] if role == "user" else [*question, message]
            if not any(CONTENT in self._render_or_nothing(messages, setup) for messages in tries):
                raise TemplateRefused(
                    f"the chat template never renders messages with role {role!r}: their text would not reach the "
                    "model. Send them with a role that it renders."
                )

    def _refuse_dropped(
        self,
        new: Sequence[Message],
        before: Sequence[Message],
        suffix: str,
        edges: str,
        after: Callable[[str], str],
        setup: Setup,
    ) -> None:
        """Raise `TemplateRefused` if the bridge lacks the content of a new message.

        A template may drop the content, or write it before the turn (Mistral v3, if a system message comes last).
        """
        with_text = [n for n, message in enumerate(new) if _text_count(message)]
        if edged_text_count(edges) >= sum(map(_text_count, new)):
            return
        for n in with_text:
            content = new[n]["content"]
            marked = KEY + content if isinstance(content, str) else [{"type": "text", "text": KEY}, *content]
            changed = [*new[:n], {**new[n], "content": marked}, *new[n + 1 :]]
            if after(self._render([*before, *changed], setup, generate=True)) == suffix:
                raise TemplateRefused(
                    f"the chat template drops new message {n} (role {new[n]['role']!r}) after this assistant "
                    "turn: its text would not reach the model. Send it elsewhere, or with a different role."
                )


class _Probe(NamedTuple):
    """An assistant message to render in place of a reply."""

    message: Message
    sentinel: str
    """What the message has in place of the end of the turn's last text."""
    close: TurnClose
    ending: str = ""
    """The end of the content, after the sentinel, that the template looks for."""


def _probes(
    reply: Message, new_messages: Sequence[Message], form: AssistantFormat, content: str, ending: str = ""
) -> Iterator[_Probe]:
    """Yield messages to render in place of `reply`, the most similar one first.

    `content` is the reply's content, which the messages repeat because a template may look for words in it.
    """
    calls = [(call["id"], call["function"]["name"]) for call in reply.get("tool_calls") or ()]
    answered = [
        (message.get("tool_call_id") or PROBE_ID, message.get("name") or NAME)
        for message in new_messages
        if message["role"] == "tool"
    ]
    speaking = {"role": "assistant", "content": content.removesuffix(ending) + CONTENT + ending}
    if form.shape is not None and calls:
        calling = _calling(form.shape, calls, "" if reply.get("content") == "" else None)
        if reply.get("content") and form.content_after_calls is not None:
            yield _Probe({**calling, **speaking}, CONTENT, form.content_after_calls, ending)
        if content.strip():
            yield _Probe({**calling, "content": content}, VALUE, form.calls_close)
        yield _Probe(calling, VALUE, form.calls_close)
    yield _Probe(speaking, CONTENT, form.content_close, ending)
    if ending:
        # The template may change the end of the content.
        yield _Probe({**speaking, "content": content + CONTENT}, CONTENT, form.content_close)
    if form.shape is not None and answered and not calls:
        yield _Probe(_calling(form.shape, answered), VALUE, form.calls_close)


def _calling(shape: CallShape, calls: Sequence[tuple[str, str]], content: str | None = "") -> Message:
    *before, (last_id, last_name) = calls
    return shape.message(content, [*((i, name, {KEY: KEY}) for i, name in before), (last_id, last_name, {KEY: VALUE})])


def _after(text: str, sentinel: str, ending: str = "") -> str:
    """Return the text after the sentinel and `ending`, which the template may strip."""
    after = text[text.rindex(sentinel) + len(sentinel) :]
    return after.removeprefix(ending if after.startswith(ending) else ending.rstrip())


def _text_count(message: Message) -> int:
    """Count the texts in a message; 0 for an assistant message."""
    content = message.get("content")
    if message["role"] == "assistant" or content is None:
        return 0
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(bool(text.strip()) for text in texts)


def cached(cache: dict[_Key, _Kept], key: _Key, make: Callable[[], _Kept]) -> _Kept:
    """Return the cached value for a key. If there is none, call `make` and store its result."""
    value = cache.get(key)
    return keep(cache, key, make()) if value is None else value


def keep(cache: dict[_Key, _Kept], key: _Key, value: _Kept) -> _Kept:
    """Store a value in a cache and return it. A full cache drops its oldest entry."""
    if len(cache) >= _KEPT_SETUPS:
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value
