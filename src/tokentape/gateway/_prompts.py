"""Build the prompt for a request: the parent turn, the ids to append to it, and the sampling parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial

import numpy as np
from msgspec import Struct, field, structs

from tokentape._canonical import canonical_json, digest_of, quick_json_in_order
from tokentape._session.matching import call_ids, renamed_calls, with_name
from tokentape._session.media import media_spans, path_media
from tokentape._session.messages import LazyMessages, SharedMessages
from tokentape._session.tree import NO_IDS, ContinuationPoint, Session
from tokentape.chat._call_constraint import CallRule, structural_tag
from tokentape.chat._certificate import Certificate, Strategy
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._grammar import continuation_name
from tokentape.chat._last_used import LastUsed
from tokentape.chat._media import image_parts
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._splice import History, StopMismatch
from tokentape.chat._strategy import choose
from tokentape.engines._base import Engine, PromptMedia, SamplingParams
from tokentape.errors import ContextTooLong, TokentapeError, UnsupportedParameter
from tokentape.gateway._choices import DRIFT, differs_at
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._images import receive
from tokentape.gateway._prefix import ParsedPrefix
from tokentape.types import Media, Message, Provenance, Setup, TokenIds, Turn

PROMPT: Message = {"role": "prompt"}
"""The message recorded for a turn if the caller tokenized the prompt. It differs from every chat message."""

CALL_PREFIX = "call_"

_STRATEGIES: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
"""From the cheapest to the last resort."""

_QUICK = 4096
"""Maximum number of characters in new messages to render and tokenize on the event loop instead of in a thread."""

_KEPT_KINDS = 1024
_KEPT_TOKENS = 1 << 22
"""Maximum number of tokens in the cache of first prompts, at about 12 bytes each, including the messages."""

_KEPT_BYTES = 1 << 25
"""Maximum number of bytes in at most 64 first bodies, whose prefixes keep all their messages in memory."""


class Bridge(Struct, frozen=True):
    name: str
    """Name of the continuation, the roles of the new messages; see `grammar.continuation_name`."""
    strategy: Strategy


class Prompt(Struct, frozen=True):
    """A request's prompt, shared by its choices."""

    setup: Setup
    point: ContinuationPoint
    """What the prompt continues. A prompt that starts a new branch has no parent."""
    added: PromptTokens
    ids: TokenIds
    """The ids to send: the context of `point` and `added.ids`, int32 [tokens]."""
    sampling: SamplingParams
    fork: str | None = None
    """Why the turn starts a new branch, if known before sampling."""
    notes: Mapping[str, object] = field(default_factory=dict)
    """Facts about the context, recorded with the sampling parameters."""
    bridge: Bridge | None = None
    """None without a bridge, and for bridges from an external renderer."""
    media: tuple[PromptMedia, ...] = ()
    """The images in the prompt."""
    new_media: tuple[Media, ...] = ()
    """Images in the new messages, to be recorded."""


def _kind(setup: Setup, messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the setup digest and the roles of the new messages, which mostly determine a bridge's strategy."""
    return (setup.digest, *[message["role"] for message in messages])


def _from_root(point: ContinuationPoint, request: TurnRequest) -> ContinuationPoint:
    """Return the point to render a request from the start."""
    return structs.replace(point, parent=None, new_messages=tuple(request.messages), context_ids=NO_IDS)


class PromptBuilder:
    """Builds prompts for one model and engine. For `history` and `stop_mismatch` see `Turns`."""

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        history: History,
        load_media: Callable[[str, str], Media],
        stop_mismatch: StopMismatch = "keep",
    ) -> None:
        self._renderer, self._engine, self._history = renderer, engine, history
        self._stop_mismatch: StopMismatch = stop_mismatch
        self._load_media = load_media
        """Loads an image by session id and hash."""

        # The cache is bounded, because clients choose the kwargs.
        @lru_cache(maxsize=64)
        def certificate(template_kwargs: str) -> Certificate:
            return load_or_certify(renderer, json.loads(template_kwargs))

        self._certificate = certificate
        """Returns the certificate for template kwargs in canonical JSON."""
        self._bridged: set[tuple[str, ...]] = set()
        """Values of `_kind` that were bridged locally before, so that their next bridge takes a millisecond or two."""
        self.prefixes: LastUsed[tuple[bytes, str], ParsedPrefix] = LastUsed(
            _KEPT_BYTES, lambda prefix: max(prefix.size, _KEPT_BYTES // 64)
        )
        """Prefixes of the first bodies of sessions, up to the last message, by digests of the bytes and the setup."""
        self._openings: LastUsed[str, tuple[SharedMessages, PromptTokens]] = LastUsed(
            _KEPT_TOKENS, lambda opening: len(opening[1].ids)
        )
        """Cached first prompts by setup and messages, because all sessions in a group have the same first prompt."""
        self._revoked: dict[tuple[str, str], Strategy] = {}
        """The best strategy still allowed after a bridge check failed, by setup digest and continuation name."""

    def certify(self) -> None:
        """Create or load the certificate for requests without template kwargs. Raises `TemplateRefused`."""
        self._certificate(canonical_json({}))
        _ = self.call_prefix

    @cached_property
    def call_prefix(self) -> str:
        """Prefix for tool call ids: `call_`, which harnesses expect, or none if the template prints or refuses ids.

        Models see printed ids, and some were trained on ids of exactly nine letters and digits.
        """

        def conversation(call_id: str) -> list[Message]:
            call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
            return [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "f", "tool_call_id": call_id, "content": "."},
            ]

        plain, prefixed = conversation("000000000"), conversation(f"{CALL_PREFIX}000000000")
        return CALL_PREFIX if self.render_alike(plain, prefixed, self._renderer.setup()) else ""

    def revoke(self, setup: str, name: str, strategy: Strategy) -> None:
        """From now on, use at best `strategy` for continuation `name` under the setup with digest `setup`."""
        if len(self._revoked) >= _KEPT_KINDS:
            self._revoked.pop(next(iter(self._revoked)))
        self._revoked[setup, name] = max(strategy, self._revoked.get((setup, name), "local"), key=_STRATEGIES.index)
        self._bridged.clear()

    def setup(self, session: Session, request: TurnRequest) -> Setup:
        """Return the tools, template kwargs and date to render a request with."""
        # Use the day on which the session began, because templates that print the date must not change overnight.
        date = datetime.fromtimestamp(session.info.created_at, UTC).date().isoformat()
        return self._renderer.setup(request.tools, request.template_kwargs, date)

    def receive(self, request: TurnRequest) -> TurnRequest:
        """Move a request's images from `messages` to `media`. Raises `InvalidRequest` for invalid images."""
        if self._renderer.images is None or not image_parts(request.messages):
            return request
        load = partial(self._load_media, request.session_id)
        messages, media = receive(request.messages, self._renderer.images, load)
        return structs.replace(request, messages=messages, media=media)

    def render_alike(self, messages: Sequence[Message], other_messages: Sequence[Message], setup: Setup) -> bool:
        """Return whether two conversations render to the same text; False if either can't be rendered."""
        try:
            text = self._renderer.render_text(messages, setup, generate=True)
            return text == self._renderer.render_text(other_messages, setup, generate=True)
        except TokentapeError:
            return False

    def is_quick(self, request: TurnRequest, setup: Setup, point: ContinuationPoint) -> bool:
        """Return whether `build` takes only a millisecond or two: short new messages, of a kind bridged before."""
        new = point.new_messages
        if point.parent is None or request.prompt_ids is not None or self._renderer.images is not None:
            return False
        # Other values may require rendering the whole conversation.
        usual = self._history == "sampled" and self._stop_mismatch == "keep"
        if not usual or _kind(setup, new) not in self._bridged:
            return False
        contents = [message.get("content") for message in new if message["role"] != "assistant"]
        texts = [content for content in contents if isinstance(content, str)]
        return len(texts) == len(new) and sum(map(len, texts)) <= _QUICK

    def build(
        self, request: TurnRequest, session: Session, setup: Setup, point: ContinuationPoint, *, fits: bool = True
    ) -> Prompt:
        """Build the prompt: bridged if the certificate allows it, else rendered as a new branch.

        `point` is where in the session the request continues. Without `fits` the prompt may exceed the context length.
        Raises `TemplateRefused`, and `InvalidRequest` if no token fits after the prompt.
        """
        prompt = self._context(request, session, setup, point)
        if fits:
            prompt = structs.replace(prompt, sampling=self.sampling(request, setup, len(prompt.ids)))
            if prompt.sampling.json_schema is not None and request.prompt_ids is None:
                self._refuse_open_reasoning(prompt)
            if request.calls is not None:
                prompt = self._with_calls_enforced(prompt, request.calls)
        return prompt if self._renderer.images is None or not fits else self._with_media(prompt, request, session)

    def _refuse_open_reasoning(self, prompt: Prompt) -> None:
        """Raise `UnsupportedParameter` if the template begins replies with reasoning, which a schema would forbid."""
        _, nothing = self._renderer.parser(prompt.setup, (), prompt.ids).finish()
        if nothing.reasoning_open:
            raise UnsupportedParameter(
                "the template begins replies with reasoning, and the schema would apply to it; turn reasoning off "
                "(chat_template_kwargs), or define a tool with the schema as its parameters",
                "response_format",
            )

    def _with_calls_enforced(self, prompt: Prompt, rule: CallRule) -> Prompt:
        """Return the prompt with the rule as a structural tag. Raises `UnsupportedParameter` if that is impossible."""
        renderer, setup = self._renderer, prompt.setup
        tag = None
        if not renderer.is_external and (renderer.overrides is None or renderer.overrides.parser is None):
            form = renderer.format_after(prompt.ids, renderer.format(setup))
            tag = structural_tag(rule, form, renderer.tokenizer, setup.tools, prompt.sampling.stop_token_ids)
        if tag is None:
            raise UnsupportedParameter(
                "the engine can't enforce tool calls in this chat template's format; omit `strict` and tool_choice, "
                "and ask for the tool call in a message",
                "tool_choice" if rule.required else "tools",
            )
        return structs.replace(prompt, sampling=replace(prompt.sampling, structural_tag=tag))

    def captured(
        self, request: TurnRequest, session: Session, setup: Setup, point: ContinuationPoint, prompt_ids: TokenIds
    ) -> Prompt:
        """Return the prompt for `prompt_ids`, which the server rendered, as a continuation or a fork."""
        position = None if point.parent is None else differs_at(point.context_ids, prompt_ids)
        fork, notes = None, dict[str, object]()
        if point.parent is not None and position is not None:
            fork, notes = DRIFT, {DRIFT: {"turn": point.parent.seq, "token": position}}
            point = _from_root(point, request)
        ids = prompt_ids[len(point.context_ids) :]
        added: PromptTokens | None
        try:
            # Render it here too, because if the ids are equal, their provenance is known.
            if fork:
                added = self._renderer.render(request.messages, setup)
            else:
                built = self._context(request, session, setup, point)
                added = built.added if built.point.parent is point.parent else None
        except TokentapeError:
            added = None
        if added is None or not np.array_equal(added.ids, ids):
            added = PromptTokens(ids, np.full(len(ids), Provenance.TEMPLATE, np.uint8))
        return Prompt(setup, point, added, prompt_ids, self.sampling(request, setup, 0), fork, notes)

    def _context(self, request: TurnRequest, session: Session, setup: Setup, point: ContinuationPoint) -> Prompt:
        parent, new, context_ids = point.parent, point.new_messages, point.context_ids

        def prompt(added: PromptTokens, bridge: Bridge | None = None) -> Prompt:
            ids = np.concatenate([context_ids, added.ids])
            return Prompt(setup, point, added, ids, request.sampling, bridge=bridge)

        def fork(cause: str, *, unless_continued: bool = False, replies: Mapping[int, Turn] | None = None) -> Prompt:
            """Render all messages, with the sampled ids of replies, as a new branch.

            With `unless_continued`, stay on the parent's branch if the rendering continues its ids.
            """
            added = self._rendered(session, setup, request.messages, parent, replies)
            length = len(context_ids)
            if unless_continued and np.array_equal(added.ids[:length], context_ids):
                stops, provenance = self._renderer.stop_ids(setup), added.provenance[length:].copy()
                if parent is not None and stops.isdisjoint(parent.completion_ids.tolist()):
                    # As in a bridge, what ends a truncated turn is its close.
                    end = next((n for n, id_ in enumerate(added.ids[length:].tolist(), 1) if id_ in stops), 0)
                    if (provenance[:end] == Provenance.TEMPLATE).all():
                        provenance[:end] = Provenance.CLOSE
                return prompt(PromptTokens(added.ids[length:], provenance))
            return Prompt(setup, _from_root(point, request), added, added.ids, request.sampling, cause)

        if request.prompt_ids is not None:
            new_ids = request.prompt_ids[len(context_ids) :]
            return prompt(PromptTokens(new_ids, np.full(len(new_ids), Provenance.USER, np.uint8)))
        if self._history == "template":
            return fork("template_history", unless_continued=True)
        if parent is None:
            return prompt(self._rendered(session, setup, new)) if session.turns else self._first(request, setup, point)
        if any(message["role"] == "assistant" for message in new):
            replies = self._sampled_replies(session, setup, request.messages, parent)
            if any(index >= len(request.messages) - len(new) for index in replies):
                # The edited history has a sampled reply. Rendering splices its ids; a bridge would encode its text.
                return fork("edited_history", unless_continued=True, replies=replies)
        bridge = self._bridge(request, point, parent, setup)
        if bridge.strategy == "fork":
            return fork("template_rewrites")
        history = _before(request, point) if bridge.strategy == "contextual" else None
        added = self._renderer.bridge(parent.completion_ids, parent.reply, new, setup, history, context_ids)
        if added.stop_mismatch and self._stop_mismatch == "fork":
            return fork("other_stop")
        if bridge.strategy == "local" and len(self._bridged) < _KEPT_KINDS:
            self._bridged.add(_kind(setup, new))
        return prompt(added, None if self._renderer.is_external else bridge)

    def _first(self, request: TurnRequest, setup: Setup, point: ContinuationPoint) -> Prompt:
        """Build the prompt of a session's first call. Other sessions may reuse its messages."""
        shared, added = self._opening(request.messages, setup)
        whole = request.span
        if whole and whole.before:
            where = whole.before.digest, setup.digest
            if self.prefixes.get(where) is None:
                prefix = ParsedPrefix(whole.before, setup.digest, point.key_before, shared, whole.end)
                self.prefixes.put(where, prefix)
        point = structs.replace(point, new_messages=shared)
        return Prompt(setup, point, added, added.ids, request.sampling)

    def _with_media(self, prompt: Prompt, request: TurnRequest, session: Session) -> Prompt:
        """Add all images in the prompt, including images from earlier requests."""
        assert self._renderer.images is not None
        point = prompt.point
        spans = path_media([] if point.parent is None else session.path(point.parent.seq))
        spans += media_spans(point.new_messages, prompt.added.provenance, len(point.context_ids))
        if spans and "image" not in self._engine.info.media:
            raise UnsupportedParameter("the conversation contains images; this engine accepts only text", "messages")
        media = {span.sha256: request.media.get(span.sha256) for span in spans}
        loaded = {sha256: image or self._load_media(request.session_id, sha256) for sha256, image in media.items()}
        new = {part["sha256"] for part in image_parts(point.new_messages)}
        return structs.replace(
            prompt,
            media=tuple(PromptMedia(span.start, span.length, loaded[span.sha256].data) for span in spans),
            new_media=(self._renderer.images.settings, *(loaded[sha256] for sha256 in sorted(new))) if new else (),
        )

    def _rendered(
        self,
        session: Session,
        setup: Setup,
        messages: Sequence[Message],
        parent: Turn | None = None,
        replies: Mapping[int, Turn] | None = None,
    ) -> PromptTokens:
        """Render all messages, with the sampled ids of this session's replies.

        `parent` is the turn that the messages continue, if any. `replies` is `_sampled_replies`, if already known.
        """
        replies = self._sampled_replies(session, setup, messages, parent) if replies is None else replies
        if not replies:
            return self._opening(messages, setup)[1]
        return self._renderer.render(
            messages,
            setup,
            sampled={n: turn.completion_ids for n, turn in replies.items()},
            prompts={n: turn.added_ids for n, turn in replies.items() if turn.setup != setup.digest},
            history=self._history,
            stop_mismatch=self._stop_mismatch,
        )

    def _opening(self, messages: Sequence[Message], setup: Setup) -> tuple[SharedMessages, PromptTokens]:
        """Render messages that contain no replies from this session, or return their cached rendering.

        Also return the messages, as an object that all sessions share.
        """
        like = messages.known if isinstance(messages, LazyMessages) and len(messages.tail) == 1 else None
        messages = messages[:]
        digest = hashlib.sha256(quick_json_in_order(messages[:-1])).digest() if like is None else like.digest
        key = digest_of(setup.key.encode(), digest, quick_json_in_order(messages[-1:]))
        cached = self._openings.get(key)
        if cached is not None:
            return cached
        rendered = self._renderer.render(messages, setup, history=self._history, stop_mismatch=self._stop_mismatch)
        rendered.ids.flags.writeable = rendered.provenance.flags.writeable = False
        shared = SharedMessages(messages)
        shared.digest = digest
        shared.begin_like(like)
        return self._openings.put(key, (shared, rendered))

    def _sampled_replies(
        self, session: Session, setup: Setup, messages: Sequence[Message], parent: Turn | None
    ) -> dict[int, Turn]:
        """Map message indexes to the turns that sampled these messages; see `Session.sampled_replies`.

        If a harness changed tool call ids or named a reply, the messages must render to the same text as recorded.
        """
        replies = session.sampled_replies(messages, None if parent is None else parent.seq)
        renamed = {
            n: turn
            for n, turn in replies.items()
            if call_ids(messages[n]) != call_ids(turn.reply) or messages[n].get("name")
        }
        if renamed:
            recorded_ids = {n: call_ids(turn.reply) for n, turn in renamed.items()}
            unnamed = [with_name(message, None) if n in renamed else message for n, message in enumerate(messages)]
            renamed_messages = renamed_calls(unnamed, lambda n, message: recorded_ids.get(n, call_ids(message)))
            if not self.render_alike(messages, renamed_messages, setup):
                return {n: turn for n, turn in replies.items() if n not in renamed}
        return replies

    def _bridge(self, request: TurnRequest, point: ContinuationPoint, parent: Turn, setup: Setup) -> Bridge:
        certificate = self._certificate(canonical_json(setup.template_kwargs))
        new = point.new_messages
        name = continuation_name(new, tools=bool(setup.tools), system=point.system)
        strategy = choose(self._renderer, certificate, parent.reply, new, setup, _before(request, point), name)
        best = self._revoked.get((setup.digest, name), "local")
        return Bridge(name, max(strategy, best, key=_STRATEGIES.index))

    def sampling(self, request: TurnRequest, setup: Setup, prompt_length: int) -> SamplingParams:
        """Return the request's sampling parameters, with limited `max_tokens`, all stop ids, and the session's id.

        Raises `ContextTooLong`, an `InvalidRequest`, if no token fits after the prompt.
        """
        most = self._engine.info.max_context
        room = most - prompt_length
        if room < 1:
            raise ContextTooLong(
                # Anthropic's and OpenAI's phrases: harnesses recognize them and compact the conversation.
                f"prompt is too long: {prompt_length} tokens > {most - 1}, the most that leave room for a reply. "
                f"This model's maximum context length is {most} tokens",
                "messages" if request.prompt_ids is None else "prompt",
            )
        sampling = request.sampling
        stop_ids = frozenset[int]() if request.ignore_eos else self._renderer.stop_ids(setup)
        return replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop_ids})),
            session_id=request.session_id if "session_id" in self._engine.info.sampling else None,
        )


def _before(request: TurnRequest, point: ContinuationPoint) -> LazyMessages:
    """Return the messages before the reply that a request continues. They are decoded only when accessed."""
    return LazyMessages(lambda: request.messages[: -len(point.new_messages) - 1])
