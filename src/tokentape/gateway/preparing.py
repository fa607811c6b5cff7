"""From a request to what is sent: which turn it continues, what is appended there, how it is to be sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import overload

import numpy as np

from tokentape.canonical import canonical_json
from tokentape.chat.certificate import Certificate, Strategy
from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.grammar import continuation_name
from tokentape.chat.media import image_parts
from tokentape.chat.renderer import PromptTokens, Renderer
from tokentape.chat.splice import History, WrongStop
from tokentape.chat.strategy import choose
from tokentape.engines.base import Engine, PromptMedia, SamplingParams
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway.events import TurnRequest
from tokentape.gateway.images import receive
from tokentape.session.media import media_spans, path_media
from tokentape.session.tree import NO_IDS, Continuation, Session
from tokentape.types import Media, Message, Provenance, Setup, TokenIds, Turn

PROMPT: Message = {"role": "prompt"}
"""What stands for the messages of a turn whose context the caller made: no message of a chat is like it."""


_QUICK = 4096
"""Characters of new messages that are rendered and tokenized between two events of other calls."""

_KEPT_KINDS = 1024


@dataclass(frozen=True, slots=True)
class Bridge:
    """How a bridge was made."""

    name: str
    """Of the continuation; see `grammar.continuation_name`."""
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request made ready for the engine; its choices share it."""

    setup: Setup
    parent: Turn | None
    messages: tuple[Message, ...]
    """Those that the parent does not have."""
    context_ids: TokenIds
    """The parent's context and completion."""
    added: PromptTokens
    prompt_ids: TokenIds
    """`context_ids` and `added.ids`: what is sent."""
    fork: str | None
    """A cause that lies with the template, known before sampling."""
    sampling: SamplingParams
    noted: Mapping[str, object] = field(default_factory=dict)
    """What is recorded of how the context came about, beside the sampling parameters."""
    bridge: Bridge | None = None
    """None where nothing was bridged, or an overriding renderer did it."""
    media: tuple[PromptMedia, ...] = ()
    """The images of the prompt."""
    new_media: tuple[Media, ...] = ()
    """What is to be recorded of those in `messages`."""


def _kind(setup: Setup, messages: Sequence[Message]) -> tuple[str, ...]:
    """What a bridge's strategy depends on, about: the setup and the roles that follow."""
    return (setup.digest, *(message["role"] for message in messages))


def _least(*strategies: Strategy) -> Strategy:
    """Return the strategy that claims least."""
    order: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
    return max(strategies, key=order.index)


class _History(Sequence[Message]):
    """The messages before the reply that a request continues. They are read only if somebody looks at them."""

    def __init__(self, request: TurnRequest, found: Continuation) -> None:
        self._request = request
        self._behind = len(found.new_messages) + 1
        self._read: tuple[Message, ...] | None = None

    def _messages(self) -> tuple[Message, ...]:
        if self._read is None:
            self._read = self._request.whole().messages[: -self._behind]
        return self._read

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, at: int | slice) -> Message | tuple[Message, ...]:
        return self._messages()[at]

    def __len__(self) -> int:
        return len(self._messages())


class Preparer:
    """Prepares requests for one model and engine. `history` and `wrong_stop` are explained at `Turns`."""

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        history: History,
        load_media: Callable[[str, str], Media],
        wrong_stop: WrongStop = "keep",
    ) -> None:
        self._renderer = renderer
        self._engine = engine
        self._history = history
        self._wrong_stop: WrongStop = wrong_stop
        self._load_media = load_media
        """By session and hash."""

        # Kwargs come from clients, who must not fill the memory.
        @lru_cache(maxsize=64)
        def certificate(template_kwargs: str) -> Certificate:
            return load_or_certify(renderer, json.loads(template_kwargs))

        self._certificate = certificate
        """By template kwargs, as canonical JSON."""
        self._bridged: set[tuple[str, ...]] = set()
        """Kinds of continuations that were bridged locally before, so that all is at hand for another."""
        self._revoked: dict[tuple[str, str], Strategy] = {}
        """By setup and continuation, the least that is left of what the certificate allows."""

    def certify(self) -> None:
        """Make or load the certificate of requests without template kwargs. Raises `TemplateRefused`."""
        self._certificate(canonical_json({}))

    def revoke(self, setup: str, name: str, strategy: Strategy) -> None:
        """From now on bridge no other way than by `strategy` what is so called, under the setup of this digest."""
        if len(self._revoked) >= _KEPT_KINDS:
            self._revoked.pop(next(iter(self._revoked)))
        self._revoked[setup, name] = _least(strategy, self._revoked.get((setup, name), "local"))
        self._bridged.clear()

    def setup(self, session: Session, request: TurnRequest) -> Setup:
        """What rendering depends on besides the messages."""
        # The day the session began, on every turn: templates that print the date must not change overnight.
        date = datetime.fromtimestamp(session.info.created_at, UTC).date().isoformat()
        return self._renderer.setup(request.tools, request.template_kwargs, date)

    def receive(self, request: TurnRequest) -> TurnRequest:
        """The request with its images taken out of its messages. Raises `InvalidRequest` for what is none."""
        if self._renderer.images is None or not image_parts(request.messages):
            return request
        messages, media = receive(
            request.messages, self._renderer.images, partial(self._load_media, request.session_id)
        )
        return replace(request, messages=messages, media=media)

    def is_quick(self, request: TurnRequest, setup: Setup, found: Continuation) -> bool:
        """Whether `prepare` takes a millisecond or two: few new messages behind a turn, and all is at hand for them."""
        new = found.new_messages
        if found.parent is None or _kind(setup, new) not in self._bridged:
            return False
        if self._history != "sampled" or self._wrong_stop != "keep":
            # All of the messages may have to be rendered.
            return False
        if request.prompt_ids is not None or self._renderer.images is not None:
            return False
        contents = [message.get("content") for message in new if message["role"] != "assistant"]
        texts = [content for content in contents if isinstance(content, str)]
        return len(texts) == len(new) and sum(map(len, texts)) <= _QUICK

    def prepare(self, request: TurnRequest, session: Session, setup: Setup, found: Continuation) -> Prepared:
        """What to send: bridged where the certificate allows that, else rendered as a new branch.

        `found` is what the request continues. Raises `TemplateRefused`, and `InvalidRequest` if nothing fits behind
        the context.
        """
        prepared = self.with_context(request, session, setup, found)
        prepared = replace(prepared, sampling=self.sampling(request, setup, len(prepared.prompt_ids)))
        return prepared if self._renderer.images is None else self._with_media(prepared, request, session)

    def with_context(self, request: TurnRequest, session: Session, setup: Setup, found: Continuation) -> Prepared:
        """As `prepare`, but with the sampling parameters as requested and however long the context is."""
        parent, messages, context_ids, fork = found.parent, found.new_messages, found.context_ids, None
        bridge: Bridge | None = None
        if request.prompt_ids is not None:
            own = request.prompt_ids[len(context_ids) :]
            added = PromptTokens(own, np.full(len(own), Provenance.USER, np.uint8))
        elif self._history == "template":
            added = self._rendered(session, setup, request.whole().messages, parent)
            if np.array_equal(added.ids[: len(context_ids)], context_ids):
                added = PromptTokens(added.ids[len(context_ids) :], added.provenance[len(context_ids) :])
            else:
                parent, messages, context_ids, fork = None, request.whole().messages, NO_IDS, "template_history"
        elif parent is None:
            added = self._rendered(session, setup, messages)
        elif any(message["role"] == "assistant" and session.turn_of_reply(message) for message in messages):
            # A reply of this session behind an edit: a bridge would encode its text, a rendering splices its ids.
            added = self._rendered(session, setup, request.whole().messages, parent)
            if np.array_equal(added.ids[: len(context_ids)], context_ids):
                added = PromptTokens(added.ids[len(context_ids) :], added.provenance[len(context_ids) :])
            else:
                parent, messages, context_ids, fork = None, request.whole().messages, NO_IDS, "edited_history"
        elif (bridge := self._bridge(request, found, parent, setup)).strategy == "fork":
            bridge = None
            added = self._rendered(session, setup, request.whole().messages, parent)
            parent, messages, context_ids, fork = None, request.whole().messages, NO_IDS, "template_rewrites"
        else:
            history = _History(request, found) if bridge.strategy == "contextual" else None
            added = self._renderer.bridge(parent.completion_ids, parent.reply, messages, setup, history, context_ids)
            if added.stop_mismatch and self._wrong_stop == "fork":
                added = self._rendered(session, setup, request.whole().messages, parent)
                parent, messages, context_ids, fork = None, request.whole().messages, NO_IDS, "other_stop"
                bridge = None
            elif bridge.strategy == "local" and len(self._bridged) < _KEPT_KINDS:
                self._bridged.add(_kind(setup, messages))
        prompt_ids = np.concatenate([context_ids, added.ids])
        if self._renderer.is_external:
            bridge = None
        return Prepared(setup, parent, messages, context_ids, added, prompt_ids, fork, request.sampling, bridge=bridge)

    def _with_media(self, prepared: Prepared, request: TurnRequest, session: Session) -> Prepared:
        """Add the images of the whole prompt, whose bytes may have come with an earlier request only."""
        assert self._renderer.images is not None
        path = [] if prepared.parent is None else session.path(prepared.parent.seq)
        spans = path_media(path)
        spans += media_spans(prepared.messages, prepared.added.provenance, len(prepared.context_ids))
        if spans and "image" not in self._engine.info.media:
            raise UnsupportedParameter("the conversation holds images; this engine takes text only", "messages")
        media = {span.sha256: request.media.get(span.sha256) for span in spans}
        loaded = {sha256: one or self._load_media(request.session_id, sha256) for sha256, one in media.items()}
        new = {part["sha256"] for part in image_parts(prepared.messages)}
        return replace(
            prepared,
            media=tuple(PromptMedia(span.start, span.length, loaded[span.sha256].data) for span in spans),
            new_media=(self._renderer.images.settings, *(loaded[sha256] for sha256 in sorted(new))) if new else (),
        )

    def _rendered(
        self, session: Session, setup: Setup, messages: Sequence[Message], parent: Turn | None = None
    ) -> PromptTokens:
        """A rendering from the start in which what this session sampled stands by its exact ids.

        `parent` is the turn whose messages begin these, if there is one.
        """
        replies = {n: session.turn_of_reply(m) for n, m in enumerate(messages) if m["role"] == "assistant"}
        at = 0
        for turn in [] if parent is None else session.path(parent.seq):
            # Two turns may have said the same in other ids; which one was meant is known here.
            at += len(turn.messages)
            replies[at] = turn
            at += 1
        sampled = {n: turn.completion_ids for n, turn in replies.items() if turn is not None}
        return self._renderer.render(
            messages, setup, sampled=sampled, history=self._history, wrong_stop=self._wrong_stop
        )

    def _bridge(self, request: TurnRequest, found: Continuation, parent: Turn, setup: Setup) -> Bridge:
        certificate = self._certificate(canonical_json(setup.template_kwargs))
        history = _History(request, found)
        new = found.new_messages
        strategy = choose(self._renderer, certificate, parent.reply, new, setup, history, found.system)
        name = continuation_name(new, tools=bool(setup.tools), system=found.system)
        return Bridge(name, _least(strategy, self._revoked.get((setup.digest, name), "local")))

    def sampling(self, request: TurnRequest, setup: Setup, prompt_length: int) -> SamplingParams:
        """How to sample behind a prompt: no more than fits, and not beyond the model's own stop ids.

        Raises `InvalidRequest` if nothing fits.
        """
        most = self._engine.info.max_context
        room = most - prompt_length
        if room < 1:
            raise InvalidRequest(
                # Harnesses know these words (Claude Code then compacts the conversation).
                f"prompt is too long: {prompt_length} tokens > {most - 1}, the most that leave room for a reply",
                "messages" if request.prompt_ids is None else "prompt",
            )
        sampling = request.sampling
        own = frozenset[int]() if request.ignore_eos else self._renderer.stop_ids(setup)
        return replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *own})),
        )
