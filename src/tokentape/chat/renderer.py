"""One model's renderer: render, bridge and parse, through its own template and tokenizer only."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tokentape.chat import grammar
from tokentape.chat.assistant_format import AssistantFormat, TurnClose, read_format, turn_close
from tokentape.chat.bridge import cut_tail, overlap
from tokentape.chat.call_syntax import CONTENT, KEY, NAME, PROBE_ID, QUESTION, VALUE, CallShape
from tokentape.chat.caller_text import (
    Disarmer,
    edges_found,
    provenance_of_characters,
    provenance_of_tokens,
    with_edges,
)
from tokentape.chat.foreign_renderer import foreign_bridge, foreign_parse, foreign_render
from tokentape.chat.media import ImageProcessor, image_parts, repeat_placeholders
from tokentape.chat.overrides import Overrides, ReplyParser, find_overrides, parse_whole
from tokentape.chat.parse import Parser
from tokentape.chat.reader import Reader
from tokentape.chat.safe_parser import SafeParser
from tokentape.chat.splice import History, WrongStop, find_splices
from tokentape.chat.surroundings import Surroundings, surroundings, texts_of
from tokentape.chat.template import ChatTemplate, plain_message, read_source
from tokentape.chat.tokenizer import MARK, Tokenizer
from tokentape.chat.twin_proof import prove_twin
from tokentape.errors import InvalidRequest, InvariantViolation, TemplateRefused
from tokentape.types import Codes, Message, Provenance, Setup, TokenIds, Tool, setup_key

_KEPT_SETUPS = 256
"""For how many setups the format and the masked tools are kept."""

_PROMPT_END = 96
"""Ids at the end of a prompt in which its generation prompt is looked for."""

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Added:
    """Ids to append to a context, with where each came from. Arrays of shape [tokens]."""

    ids: TokenIds
    provenance: Codes
    behind_other_stop: bool = False
    """The turn before ended with another stop token than the template writes there, which stands for it."""


class Renderer:
    """Messages to ids and back, for one tokenizer and one chat template.

    >>> renderer = Renderer.load("path/to/model")              # doctest: +SKIP
    >>> renderer.render([{"role": "user", "content": "hi"}], tools).ids     # doctest: +SKIP
    array([...], dtype=int32)

    Methods that take a `Setup` take one that `setup` made. Of another renderer's, they use the tools, kwargs and date.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        overrides: Overrides | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        tokenizer = tokenizer.for_template(_spelled_by(template, tokenizer))
        self.tokenizer = tokenizer
        self.template = template
        self.overrides = overrides
        self.images = images
        self.fingerprint = _fingerprint(tokenizer, template, overrides, images)
        self._disarmer = Disarmer(tokenizer)
        self._setups: dict[str, Setup] = {}
        self._formats: dict[str, AssistantFormat] = {}
        self._stops: dict[str, frozenset[int]] = {}
        self._disarmed: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self._bridging: dict[str, Setup] = {}
        self._surroundings: dict[tuple[str, ...], Surroundings] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | Path | None = None,
        overrides: Overrides | None = None,
        images: ImageProcessor | None = None,
        *,
        strict_text: bool = False,
    ) -> Renderer:
        """Load from a model folder; `chat_template` names a file to use in place of the model's own template.

        `overrides` replace what is read off the template; without, see `find_overrides`. Without `images`, messages
        with images are refused.

        With `strict_text` no added token is text, see `Tokenizer.load`.

        Raises `TokenizerUnusable` if tokenizer or template can't be loaded safely, or if text and control tokens cannot
        be kept apart without changing ids (`prove_twin`; the proof is made once per machine).
        """
        tokenizer = Tokenizer.load(folder, strict_text=strict_text)
        if chat_template is not None:
            template = ChatTemplate(read_source(Path(chat_template)))
        else:
            template = ChatTemplate.load(folder, tokenizer.config)
        bare = cls(tokenizer, template)
        prove_twin(bare.tokenizer)
        return cls(bare.tokenizer, template, overrides or find_overrides(bare), images)

    def setup(
        self, tools: Sequence[Tool] = (), template_kwargs: Mapping[str, Any] | None = None, date: str | None = None
    ) -> Setup:
        """Return what rendering depends on besides the messages: make it once and use it for many calls.

        `date` is what the template takes for today, ISO 8601; without, it is today's in UTC. Raises `InvalidRequest`
        if tools or kwargs are not JSON.
        """
        kwargs, date = template_kwargs or {}, date or datetime.now(UTC).date().isoformat()
        key = setup_key(tools, kwargs, date, self.fingerprint)
        found = self._setups.get(key)
        return _keep(self._setups, key, Setup(tuple(tools), kwargs, date, self.fingerprint)) if found is None else found

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Setup = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        sampled: Mapping[int, TokenIds] | None = None,
        history: History = "sampled",
        wrong_stop: WrongStop = "keep",
    ) -> Added:
        """Ids of a conversation, ending with the generation prompt.

        On conversations that spell no control token these are the ids of `transformers.apply_chat_template`. A control
        token that a caller's text spells is encoded as text. `tools`, `template_kwargs` and `date` are as for `setup`;
        a `Setup` in place of the tools stands for all three.

        `sampled` maps indices of assistant messages to the completions they were parsed from, whose exact ids then
        stand in the rendering, with provenance ASSISTANT: all of them (`history` "sampled"), or as far as the template
        keeps their text ("template"). Where one ends with another stop token than the template writes there, that one
        stands in place of the template's, or, with `wrong_stop` "fork" and where the template's text is followed, the
        template's in place of it. An overriding renderer knows of no such ids and renders the text.

        Raises `TemplateRefused` if the template refuses the conversation or does not know one of its roles.
        """
        if not isinstance(tools, Setup):
            setup = self.setup(tools, template_kwargs, date)
        elif template_kwargs is None and date is None:
            setup = tools
        else:
            raise InvalidRequest("a setup has its own template kwargs and date; give one or the other", "setup")
        self._refuse_images(messages)
        if self.overrides is not None and self.overrides.renderer is not None:
            return self._foreign(foreign_render(self.overrides.renderer, messages, setup))
        text, codes = self.written(messages, setup, generate=True)
        splices = find_splices(
            text,
            messages,
            {n: self._with_part_closed(ids, setup) for n, ids in (sampled or {}).items()},
            tokenizer=self.tokenizer,
            form=self.format(setup),
            stop_ids=self.stop_ids(setup) if sampled else frozenset(),
            prompt_of=lambda n: self._render_or_nothing(self._plain(messages[:n], setup, reshape=True), setup),
            words=self.template.compared_strings,
            history=history,
            wrong_stop=wrong_stop,
        )
        pieces: list[Added] = []
        at, before = 0, None
        for splice in splices:
            pieces.append(self._encode_piece(text, at, splice.start, codes, before))
            provenance = np.full(len(splice.ids), Provenance.ASSISTANT, dtype=np.uint8)
            pieces.append(Added(self.tokenizer.array(splice.ids), provenance))
            at, before = splice.end, splice.ids[-1] if splice.ids else None
        pieces.append(self._encode_piece(text, at, len(text), codes, before))
        ids, codes = np.concatenate([p.ids for p in pieces]), np.concatenate([p.provenance for p in pieces])
        return self._with_images(Added(ids, codes), messages)

    def _refuse_images(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidRequest` for images that can't be rendered."""
        if not image_parts(messages):
            return
        if self.images is None:
            raise InvalidRequest("a message holds an image; this model takes text only", "messages")
        if self.overrides is not None and self.overrides.renderer is not None:
            raise InvalidRequest("a message holds an image; the overriding renderer takes text only", "messages")

    def _with_images(self, added: Added, messages: Sequence[Message]) -> Added:
        """As many placeholders for each image as it has tokens."""
        if self.images is None:
            return added
        counts = [part["tokens"] for part in image_parts(messages)]
        return Added(*repeat_placeholders(added.ids, added.provenance, self.images.placeholder_id, counts))

    def _encode_piece(self, text: str, start: int, end: int, codes: Codes, before: int | None) -> Added:
        """Ids of a stretch of marked text, with `codes` per character of the whole text in which marks count as one.

        `before` is the id that stands in front of it.
        """
        control = None if before is None else self.tokenizer.control_by_id(before)
        mark = "" if control is None else control.mark
        if start:
            encoded = self.tokenizer.encode_after_control(text[start:end], mark)
        else:
            encoded = self.tokenizer.encode_marked(text[start:end])
        offset = len(MARK.sub(" ", text[:start]))
        own = codes[offset : offset + len(encoded.text)]
        return Added(self.tokenizer.array(encoded.ids), provenance_of_tokens(own, encoded.spans))

    def bridge(
        self,
        completion_ids: TokenIds,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        history: Sequence[Message] | None = None,
        context_ids: TokenIds | None = None,
    ) -> Added:
        """Ids to append behind a sampled turn for `new_messages`, ending with the generation prompt.

        `completion_ids` are the turn's sampled ids, none of which is ever repeated or replaced, and `reply` the message
        that was parsed from them. A turn that the model did not end is closed as the template would, with provenance
        CLOSE.

        Without `history` the turn is thought of behind one made-up question (strategy `local`): the cost does not
        depend on what came before. With `history`, the messages before `reply`, it is the real conversation
        (`contextual`). A certificate says which a template needs.

        `context_ids` are all ids so far, the completion's included: an overriding renderer continues those, and they
        say whether the turn's prompt opened reasoning.

        Raises `TemplateRefused` if the template does not take these messages after such a turn, and
        `InvariantViolation` if an overriding renderer would change `context_ids`.
        """
        self._refuse_images(new_messages)
        if self.overrides is not None and self.overrides.renderer is not None:
            if context_ids is None:
                raise InvariantViolation("an overriding renderer bridges from the ids of the context; none were given")
            foreign = self.overrides.renderer
            return self._foreign(foreign_bridge(foreign, context_ids, completion_ids, new_messages, setup))
        form = self.format(setup)
        tail, codes, close = self._tail(reply, new_messages, setup, form, history)
        last_id = int(completion_ids[-1]) if len(completion_ids) else None
        eos_ids = self.tokenizer.eos_ids
        cut = cut_tail(tail, close, form, self.tokenizer, eos_ids, last_id)
        encoded = self.tokenizer.encode_after_control(cut.text)
        ids = self.tokenizer.array(encoded.ids)
        provenance = provenance_of_tokens(codes[len(codes) - len(encoded.text) :], encoded.spans)
        sampled = overlap(completion_ids.tolist(), encoded.ids)
        if sampled:
            return self._with_images(_rest(ids, provenance, sampled), new_messages)
        if len(completion_ids) and int(completion_ids[-1]) in self.stop_ids(setup):
            # Another stop than the template writes here. It was sampled, so it stays; it stands for the turn's end,
            # but not for the next message's header.
            skip = 1 if cut.ends_turn else 0
            added = self._with_images(_rest(ids, provenance, skip), new_messages)
            return replace(added, behind_other_stop=True)
        prompt_ids = None if context_ids is None else context_ids[: len(context_ids) - len(completion_ids)]
        closing = self._close_part(completion_ids, setup, form, prompt_ids)
        if cut.ends_turn:
            provenance[:1] = Provenance.CLOSE
        added = Added(
            np.concatenate([closing, ids]),
            np.concatenate([np.full(len(closing), Provenance.CLOSE, dtype=np.uint8), provenance]),
        )
        return self._with_images(added, new_messages)

    def _foreign(self, ids: TokenIds) -> Added:
        # It does not say whose text a token is.
        return Added(ids, np.full(len(ids), Provenance.TEMPLATE, dtype=np.uint8))

    def parser(self, setup: Setup, stop_strings: Sequence[str] = (), prompt_ids: TokenIds | None = None) -> SafeParser:
        """Return a parser for one completion sampled under `setup`. It never raises, see `SafeParser`.

        `prompt_ids` are the ids that the completion continues, or the last of them. They say whether this prompt opens
        reasoning, which it may do after a question and not after a tool's result. Without them it does what the
        generation prompt after a question does.
        """
        parser = self._unsafe_parser(setup, stop_strings, prompt_ids)
        return SafeParser(parser, self.tokenizer, self.stop_ids(setup), stop_strings)

    def _unsafe_parser(
        self, setup: Setup, stop_strings: Sequence[str], prompt_ids: TokenIds | None = None
    ) -> ReplyParser:
        overrides = self.overrides
        if overrides is not None and overrides.parser is not None:
            return overrides.parser(setup, stop_strings)
        if overrides is not None and overrides.renderer is not None:
            foreign = overrides.renderer
            return parse_whole(self, lambda completion: foreign_parse(foreign, completion.ids, setup))(
                setup, stop_strings
            )
        return self.derived_parser(setup, stop_strings, prompt_ids)

    def derived_parser(
        self, setup: Setup, stop_strings: Sequence[str] = (), prompt_ids: TokenIds | None = None
    ) -> Parser:
        """The parser that is read off the template, whatever overrides there are."""
        return Parser(
            self.tokenizer,
            self._format_after(prompt_ids, self.format(setup)),
            stop_ids=self.stop_ids(setup),
            stop_strings=stop_strings,
            tools=setup.tools,
        )

    def stop_ids(self, setup: Setup) -> frozenset[int]:
        """Ids that end a turn: the model's end-of-sequence ids and what its template ends assistant turns with."""
        found = self._stops.get(setup.key)
        return _keep(self._stops, setup.key, self._stop_ids(self.format(setup))) if found is None else found

    def _stop_ids(self, form: AssistantFormat) -> frozenset[int]:
        eos_ids = self.tokenizer.eos_ids
        found = set(eos_ids)
        # What stands within turns ends none: a part of the turn, or a second call, would never be sampled. Without any
        # end-of-sequence id, the first of it is better than no end at all.
        within = {self._mark_id(mark) for mark in MARK.findall(form.within_turns)} if eos_ids else set()
        for tail, close in ((form.content_tail, form.content_close), (form.calls_tail, form.calls_close)):
            cut = cut_tail(tail, close, form, self.tokenizer, eos_ids)
            mark = MARK.match(cut.text)
            if mark is None or self._mark_id(mark[0]) in within:
                continue
            # Where the conversation ends with an end-of-sequence token, another one may end the turns within it (Phi),
            # but the next message's header does not.
            ended = not eos_ids.isdisjoint(self._mark_id(m) for m in MARK.findall(close.last))
            if cut.ends_turn or not ended:
                found.add(self._mark_id(mark[0]))
        return frozenset(found)

    def format(self, setup: Setup) -> AssistantFormat:
        """What the template writes around assistant turns under `setup`."""
        found = self._formats.get(setup.key)
        if found is None:
            found = read_format(functools.partial(self._ask, setup), self.tokenizer)
            found = _keep(self._formats, setup.key, self._without_stops(found))
        return found

    def _format_after(self, prompt_ids: TokenIds | None, form: AssistantFormat) -> AssistantFormat:
        """Return the format for a turn after this prompt; one after a tool's result may not open reasoning (R1)."""
        if prompt_ids is None or form.reasoning is None:
            return form
        reader = Reader(self.tokenizer, frozenset(), ())
        reader.feed(prompt_ids[-_PROMPT_END:].tolist())
        reader.finish()
        text = reader.text.rstrip()
        if text.endswith(form.generation_prompt.rstrip()):
            return form
        opened = text.endswith(form.reasoning.open.strip())
        return replace(form, reasoning=replace(form.reasoning, opened_by_prompt=opened))

    def _without_stops(self, form: AssistantFormat) -> AssistantFormat:
        """The format with content and calls that close before the token that ends the turn."""
        stop_ids = self._stop_ids(form)
        content_end, turn_end = form.content_end, form.turn_end
        behind = content_end + turn_end
        stop = next((m.start() for m in MARK.finditer(behind) if self._mark_id(m[0]) in stop_ids), len(behind))
        form = replace(form, content_end=content_end[:stop], turn_end=behind[len(content_end) : stop])
        if form.calls is None:
            return form

        turn_close = form.content_close.last.strip()

        def cut(text: str) -> str:
            if turn_close and not MARK.search(turn_close):
                return text.partition(turn_close)[0]
            ends = (m.start() for m in MARK.finditer(text) if self._mark_id(m[0]) in self.tokenizer.eos_ids)
            return text[: next(ends, len(text))]

        calls = replace(form.calls, close=cut(form.calls.close), section_close=cut(form.calls.section_close))
        return replace(form, calls=calls)

    def _mark_id(self, mark: str) -> int:
        return self.tokenizer.control_of_mark(mark).id

    def _plain(self, messages: Sequence[Message], setup: Setup, *, reshape: bool) -> list[dict[str, Any]]:
        """Messages as templates take them, caller text disarmed; `reshape`: tool calls in the template's own shape."""
        shape = self.format(setup).shape if reshape else None
        plain = []
        for message in messages:
            one = plain_message(message)
            if one.get("tool_calls") and shape is not None:
                one = shape.reshape(one)
            plain.append(self._disarmer.mask_all(one))
        return plain

    def _accepted(
        self, messages: Sequence[Message], setup: Setup, *, generate: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """Messages in the shape that the template accepts, as they come if it does, and their marked text."""
        plain = self._plain(messages, setup, reshape=False)
        try:
            return plain, self._render(plain, setup, generate=generate)
        except TemplateRefused:
            if not any(message.get("tool_calls") for message in messages):
                raise
        plain = self._plain(messages, setup, reshape=True)
        return plain, self._render(plain, setup, generate=generate)

    def marked(self, messages: Sequence[Message], setup: Setup, *, generate: bool) -> str:
        """Marked text of a conversation, with or without the generation prompt. For certificates."""
        return self._accepted(messages, setup, generate=generate)[1]

    def written(self, messages: Sequence[Message], setup: Setup, *, generate: bool) -> tuple[str, Codes]:
        """Marked text of a conversation, and whose each of its characters is, a mark counting as one.

        With or without the generation prompt. Raises as `render`.
        """
        plain, text = self._accepted(messages, setup, generate=generate)
        edged = self._render([with_edges(message) for message in plain], setup, generate=generate)
        self._refuse_unknown_roles(plain, edged, setup)
        return text, provenance_of_characters(edged, len(MARK.sub(" ", text)))

    def _ask(self, setup: Setup, plain: Sequence[Message], generate: bool) -> str:
        return self._render(plain, setup, generate=generate)

    def _render(self, plain: Sequence[Message], setup: Setup, *, generate: bool) -> str:
        """Marked text of messages that are disarmed already."""
        disarmed = self._disarmed.get(setup.key)
        if disarmed is None:
            mask = self._disarmer.mask_all
            disarmed = _keep(self._disarmed, setup.key, (mask(setup.tools), mask(setup.template_kwargs)))
        tools, kwargs = disarmed
        rendered = self.template.render(
            plain,
            tools=tools,
            add_generation_prompt=generate,
            date=setup.date,
            variables={**self.tokenizer.special_tokens, **kwargs},
        )
        return self._disarmer.marked(rendered)

    def tail(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        history: Sequence[Message] | None = None,
    ) -> str:
        """Marked text that the template writes behind a turn like `reply`; see `bridge`. For certificates."""
        return self._tail(reply, new_messages, setup, self.format(setup), history)[0]

    def _tail(
        self,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        form: AssistantFormat,
        history: Sequence[Message] | None,
    ) -> tuple[str, Codes, TurnClose]:
        """The tail behind a turn like `reply`, whose its characters are, and how such a turn ends a conversation."""
        before: Sequence[Message] = [QUESTION]
        if history is None:
            setup = self._bridging_setup(setup)
        else:
            before = self._plain(history, setup, reshape=True)
        plain = self._plain(new_messages, setup, reshape=True)
        texts = texts_of(plain, self._disarmer.unmask)
        refused = TemplateRefused("there is no new message to continue with")
        said = self._disarmer.mask_all(plain_message(reply).get("content") or "") if history is not None else ""
        for probe, sentinel, close in _probes(reply, new_messages, form, said):
            kind = sentinel, setup.key, *(message["role"] for message in plain)
            try:
                text = self._render([*before, probe, *plain], setup, generate=True)
                if sentinel not in text:
                    continue
                tail = _behind(text, sentinel)
                if NAME in tail:
                    refused = TemplateRefused(
                        "the chat template writes the name of the tool that a result is of, and neither the result nor "
                        "a call of the turn before says it. Send the result with a `name`."
                    )
                    continue
                if probe.get("content") and said.strip() and said.strip() in tail and sentinel is VALUE:
                    # It writes content that stands beside calls after their results. It was sampled already.
                    continue
                written = MARK.sub("\0", tail)
                close = self._close(probe, close, setup, form)
                known = None if texts is None else self._surroundings.get(kind)
                codes = None if known is None or texts is None else known.codes(written, texts)
                if codes is not None:
                    return tail, codes, close
                edged = self._render([*before, probe, *map(with_edges, plain)], setup, generate=True)
            except TemplateRefused as error:
                refused = error
                continue
            edges = _behind(edged, sentinel)
            self._refuse_dropped(plain, [*before, probe], tail, edges, sentinel, setup)
            codes = provenance_of_characters(edges, len(written))
            found = None if texts is None else surroundings(written, codes, texts)
            if found is not None:
                _keep(self._surroundings, kind, found)
            return tail, codes, close
        raise refused

    def _close(self, probe: Message, close: TurnClose, setup: Setup, form: AssistantFormat) -> TurnClose:
        """Return what ends `probe` at the end of a conversation: `close`, with the ids of its own calls."""
        if not probe.get("tool_calls") or PROBE_ID not in form.calls_close.last:
            return close
        ask = functools.partial(self._ask, setup)
        return turn_close(ask, probe, VALUE, form.generation_prompt)

    def turn_close(self, reply: Message, setup: Setup) -> TurnClose:
        """Return what the template writes after a turn like `reply` at the end of a conversation. For certificates."""
        form = self.format(setup)
        calls = [(call["id"], call["function"]["name"]) for call in reply.get("tool_calls") or ()]
        if not calls or form.shape is None:
            return form.content_close
        return self._close(_calling(form.shape, calls), form.calls_close, setup, form)

    def _bridging_setup(self, setup: Setup) -> Setup:
        """The setup to think of a local bridge in: without tools, if what stands behind a turn is the same without.

        Tools stand in front of the conversation, where a bridge does not reach, and can be most of what is rendered.
        """
        found = self._bridging.get(setup.key)
        if found is None:
            found = setup
            bare = replace(setup, tools=())
            with contextlib.suppress(TemplateRefused):
                found = bare if self.format(bare).behind_turns == self.format(setup).behind_turns else setup
            found = _keep(self._bridging, setup.key, found)
        return found

    def _refuse_unknown_roles(self, plain: Sequence[Message], edged: str, setup: Setup) -> None:
        """Raise `TemplateRefused` for a message whose role this template never renders, such as `developer`.

        What a template leaves out for another reason is left out here too: the ids are to be the template's.
        """
        spoken = [message for message in plain if _texts(message)]
        if edges_found(edged) >= sum(map(_texts, spoken)):
            return
        for role in dict.fromkeys(message["role"] for message in spoken if message["role"] != "tool"):
            asked = {"role": role, "content": CONTENT}
            tries = ([asked], [asked, QUESTION]) if role == "user" else ([asked, QUESTION], [QUESTION, asked])
            if not any(CONTENT in self._render_or_nothing(messages, setup) for messages in tries):
                raise TemplateRefused(
                    f"the chat template never renders messages of role {role!r}: what they say would not reach the "
                    "model. Send them under a role that it renders."
                )

    def _render_or_nothing(self, messages: Sequence[Message], setup: Setup) -> str:
        try:
            return self._render(messages, setup, generate=True)
        except TemplateRefused:
            return ""

    def _refuse_dropped(
        self, new: Sequence[Message], before: Sequence[Message], tail: str, edges: str, sentinel: str, setup: Setup
    ) -> None:
        """Raise `TemplateRefused` if the content of a new message does not reach the bridge.

        A template may drop it, or write it in front of the turn (Mistral v3, a system message that comes last).
        """
        spoken = [n for n, message in enumerate(new) if _texts(message)]
        if edges_found(edges) >= sum(map(_texts, new)):
            return
        for n in spoken:
            content = new[n]["content"]
            marked = KEY + content if isinstance(content, str) else [{"type": "text", "text": KEY}, *content]
            changed = [*new[:n], {**new[n], "content": marked}, *new[n + 1 :]]
            if _behind(self._render([*before, *changed], setup, generate=True), sentinel) == tail:
                raise TemplateRefused(
                    f"the chat template drops new message {n} (role {new[n]['role']!r}) after such a turn: what it "
                    "says would not reach the model"
                )

    def _with_part_closed(self, completion_ids: TokenIds, setup: Setup) -> TokenIds:
        """A completion, and what closes the part of the turn within which it was cut short."""
        if not self.stop_ids(setup).isdisjoint(completion_ids.tolist()):
            return completion_ids
        return np.concatenate([completion_ids, self._close_part(completion_ids, setup, self.format(setup))])

    def _close_part(
        self, completion_ids: TokenIds, setup: Setup, form: AssistantFormat, prompt_ids: TokenIds | None = None
    ) -> TokenIds:
        """Ids that close the reasoning, or the frame of the content, that a truncated completion left open."""
        parser = self.parser(setup, prompt_ids=prompt_ids)
        parser.feed(completion_ids.tolist())
        _, reply = parser.finish()
        close = ""
        if reply.reasoning_open:
            close = form.reasoning.close if form.reasoning is not None else ""
        elif not reply.tool_calls:
            close = self._content_left_open(completion_ids, form, reasoned=bool(reply.reasoning))
        return self.tokenizer.array(self.tokenizer.encode_after_control(close).ids if close else [])

    def _content_left_open(self, completion_ids: TokenIds, form: AssistantFormat, *, reasoned: bool) -> str:
        """What closes content within its turn, if it has a frame of its own and the completion is inside of it."""
        close = form.content_end + form.turn_end
        opening, closing = (
            MARK.findall(form.content_reopen if reasoned else form.content_open)[-1:],
            MARK.findall(close),
        )
        reader = Reader(self.tokenizer, frozenset(), ())
        reader.feed(completion_ids.tolist())
        reader.finish()
        framing = [mark for mark in MARK.findall(reader.text) if mark in (*opening, *closing[:1])]
        inside = framing[-1] in opening if framing else not opening
        return close if closing and inside else ""


def _spelled_by(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return the template's source and, since it may put tokens together (`'[' + role + ']'`), some renderings."""
    texts = [template.whole_source]
    for messages in grammar.SAMPLES if tokenizer.text_tokens else ():
        with contextlib.suppress(TemplateRefused):
            plain = [plain_message(message) for message in messages]
            variables = tokenizer.special_tokens
            texts.append(
                template.render(
                    plain, tools=[grammar.TOOL], add_generation_prompt=True, date=grammar.DATE, variables=variables
                )
            )
    return "\0".join(texts)


def _keep(kept: dict[_Key, _Kept], key: _Key, value: _Kept) -> _Kept:
    """Keep a value, in place of the oldest one if there are too many."""
    if len(kept) >= _KEPT_SETUPS:
        kept.pop(next(iter(kept)), None)
    kept[key] = value
    return value


def _probes(
    reply: Message, new_messages: Sequence[Message], form: AssistantFormat, said: str
) -> Iterator[tuple[Message, str, TurnClose]]:
    """Yield assistant messages to try as stand-ins for `reply`: message, sentinel in it, what ends it.

    `said` is content of the reply that a stand-in repeats, since a template may look for words in it.
    """
    calls = [(call["id"], call["function"]["name"]) for call in reply.get("tool_calls") or ()]
    answered = [
        (message.get("tool_call_id") or PROBE_ID, message.get("name") or NAME)
        for message in new_messages
        if message["role"] == "tool"
    ]
    speaking = {"role": "assistant", "content": said + CONTENT}
    if form.shape is not None and calls:
        if said.strip():
            yield {**_calling(form.shape, calls), "content": said}, VALUE, form.calls_close
        yield _calling(form.shape, calls), VALUE, form.calls_close
    yield speaking, CONTENT, form.content_close
    if form.shape is not None and answered and not calls:
        yield _calling(form.shape, answered), VALUE, form.calls_close


def _calling(shape: CallShape, calls: Sequence[tuple[str, str]]) -> Message:
    *before, (last_id, last_name) = calls
    return shape.message("", [*((i, name, {KEY: KEY}) for i, name in before), (last_id, last_name, {KEY: VALUE})])


def _rest(ids: TokenIds, provenance: Codes, start: int) -> Added:
    # No views: a turn is kept in memory, and would keep what they were cut from.
    return Added(ids[start:].copy(), provenance[start:].copy())


def _behind(text: str, sentinel: str) -> str:
    return text[text.rindex(sentinel) + len(sentinel) :]


def _texts(message: Message) -> int:
    """How many texts of somebody other than the assistant the message holds."""
    content = message.get("content")
    if message["role"] == "assistant" or content is None:
        return 0
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(bool(text.strip()) for text in texts)


def _fingerprint(
    tokenizer: Tokenizer, template: ChatTemplate, overrides: Overrides | None, images: ImageProcessor | None
) -> str:
    """Hex SHA-256 of everything that maps messages to ids, library versions included."""
    parts = {
        "tokenizer": tokenizer.sha256,
        "special_tokens": tokenizer.special_tokens,
        **({"text_tokens": [t.content for t in tokenizer.text_tokens]} if tokenizer.text_tokens else {}),
        "template": template.sha256,
        "tokenizers": version("tokenizers"),
        "jinja2": version("jinja2"),
        **({"overrides": overrides.name} if overrides else {}),
        **({"images": images.settings.sha256} if images else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
