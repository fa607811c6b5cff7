"""One turn, from messages to a committed record.

The way of a request: the session finds the deepest turn that the messages continue, the renderer bridges (or renders),
the engine samples, the parser reads the reply, the invariants are checked, the store commits, and only then is the
client told that the turn is done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tokentape.chat.certificate import Certificate, Strategy
from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.certify import choose
from tokentape.chat.parse import Reply, ReplyDelta, ToolCall
from tokentape.chat.renderer import Added, Renderer
from tokentape.chat.splice import History
from tokentape.engines.base import Engine, SampleDelta, SamplingParams
from tokentape.errors import (
    Conflict,
    EngineContractError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    TokentapeError,
)
from tokentape.session.chain import canonical_json, seal, setup_digest
from tokentape.session.invariants import check_completion, check_ids, check_turn
from tokentape.session.tree import NO_IDS, Continuation, Session
from tokentape.store import Record, SqliteStore
from tokentape.types import FinishReason, Message, Reward, SessionInfo, Setup, TokenIds, Tool, Turn


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a wire API asks for, whatever its dialect."""

    session_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    template_kwargs: Mapping[str, Any]
    sampling: SamplingParams
    """`max_tokens` 0 stands for as many as fit; `stop_token_ids` are added to those of the model."""
    n: int = 1
    stream: bool = False


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """Newly sampled tokens of one choice, with what they added to the reply."""

    choice: int
    prompt_ids: TokenIds
    sampled: SampleDelta
    reply: ReplyDelta


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A committed turn. `rest` is what was held back of the reply until sampling had ended."""

    choice: int
    prompt_ids: TokenIds
    """The whole context that was sent, int32 [tokens]."""
    turn: Turn
    reply: Reply
    rest: ReplyDelta
    finish: Literal["stop", "length", "tool_calls"]


class Turns:
    """Takes turns in sessions: the only writer of records. All methods belong to one event loop.

    `history` says what of earlier turns stays in context: `sampled`, all that was sampled, whatever the template does
    to old turns; or `template`, what the template keeps (it may drop old reasoning at a new user message), to train
    what a stateless server serves. Then a turn whose history the template rewrites starts a new branch.
    """

    def __init__(self, engine: Engine, renderer: Renderer, store: SqliteStore, *, history: History = "sampled") -> None:
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self._history = history
        self._sessions: dict[str, Session] = {}
        self._unstored: set[str] = set()
        """Sessions that begin with their first turn: stored together with it."""
        self._setups: dict[str, set[str]] = {}
        """Per session the digests of setups that the store has."""
        self._locks: dict[str, asyncio.Lock] = {}

        # Kwargs come from clients, who must not fill the memory.
        @lru_cache(maxsize=64)
        def certificate(template_kwargs: str) -> Certificate:
            return load_or_certify(renderer, json.loads(template_kwargs))

        self._certificate = certificate
        """By template kwargs, as canonical JSON."""

    async def prepare(self) -> None:
        """Make or load the certificate of requests without template kwargs, so that the first need not wait for it.

        Raises `TemplateRefused` if the template renders not even a question and an answer.
        """
        await asyncio.to_thread(self._certificate, canonical_json({}))

    @property
    def vocab_size(self) -> int:
        """Ids at or above this are neither sent nor accepted."""
        return min(self.engine.info.vocab_size, self.renderer.tokenizer.vocab_size)

    async def create_session(self, session_id: str, metadata: Mapping[str, Any]) -> SessionInfo:
        """Create a session. Raises `Conflict` if there is one with this id."""
        if await self._find(session_id) is not None:
            raise Conflict(f"session {session_id!r} exists already; use another id or none")
        info = SessionInfo(session_id, time.time(), metadata)
        await self.store.write(info)
        self._sessions[session_id] = Session(info)
        return info

    async def session(self, session_id: str) -> Session:
        """The session with this id. Raises `NotFound`."""
        found = await self._find(session_id)
        if found is None:
            raise NotFound(f"there is no session {session_id!r}")
        return found

    async def delete_session(self, session_id: str) -> None:
        """Delete a session and its record. Raises `NotFound`."""
        async with self._lock(session_id):
            await self.store.delete_session(session_id)
            self._sessions.pop(session_id, None)
            self._setups.pop(session_id, None)
        self._locks.pop(session_id, None)

    async def reward(self, session_id: str, turn: int | None, value: float) -> Reward:
        """Give a session, or one of its turns, a reward. Raises `NotFound`."""
        session = await self.session(session_id)
        if turn is not None and not 0 <= turn < len(session.turns):
            raise NotFound(f"session {session_id!r} has no turn {turn}; it has {len(session.turns)} turns")
        given = Reward(session_id, turn, value, time.time())
        await self.store.write(given)
        return given

    async def take(self, request: TurnRequest) -> AsyncGenerator[TurnDelta | TurnDone, None]:
        """Sample and record `n` turns; yields deltas as they come and a `TurnDone` for each.

        A session that does not exist is created. Closing the iterator aborts what is still being sampled; nothing of
        that is committed.
        """
        session = await self._find_or_start(request.session_id)
        setup = self._setup(session, request)
        found = session.continuation(request.messages, setup.digest)
        call = await asyncio.to_thread(self._call, request, session, setup, found)
        finished: list[_Sampled] = []
        async with aclosing(self._sample(call, 0) if request.n == 1 else self._sample_all(call)) as events:
            async for event in events:
                if isinstance(event, TurnDelta):
                    yield event
                else:
                    finished.append(event)
        finished.sort(key=lambda sampled: sampled.choice)
        turns = await self._commit(call, finished)
        for sampled, turn in zip(finished, turns, strict=True):
            finish: Literal["stop", "length", "tool_calls"] = "length" if turn.finish_reason == "length" else "stop"
            if finish == "stop" and sampled.reply.calls_for_client:
                finish = "tool_calls"
            yield TurnDone(sampled.choice, call.prompt_ids, turn, sampled.reply, sampled.rest, finish)

    async def _sample(self, call: _Call, choice: int) -> AsyncGenerator[TurnDelta | _Sampled, None]:
        """Sample one completion and parse it as it comes."""
        request_id = secrets.token_hex(12)
        sampling = call.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + choice)
        parser = self.renderer.parser(call.setup, sampling.stop_strings)
        completion = _Completion()
        told = 0
        engine = self.engine.sample(call.prompt_ids, sampling, stream=call.request.stream, request_id=request_id)
        async with aclosing(engine) as deltas:
            async for delta in deltas:
                check_ids(delta.token_ids, self.vocab_size)
                completion.add(delta)
                reply_delta = _name_calls(parser.feed(delta.token_ids), request_id, told)
                told += len(reply_delta.tool_calls)
                yield TurnDelta(choice, call.prompt_ids, delta, reply_delta)
        if completion.finish_reason is None:
            raise EngineContractError("the engine stopped answering without a finish reason")
        if completion.finish_reason == "abort":
            raise EngineUnavailable("the engine aborted this call before it was finished; send it again")
        rest, reply = parser.finish()
        reply = replace(reply, tool_calls=_named(reply.tool_calls, request_id))
        yield _Sampled(choice, sampling, completion, reply, _name_calls(rest, request_id, told))

    async def _sample_all(self, call: _Call) -> AsyncGenerator[TurnDelta | _Sampled, None]:
        """Several completions at once, their events as they come; one that fails ends them all."""
        events: asyncio.Queue[TurnDelta | _Sampled | None] = asyncio.Queue()

        async def run(choice: int) -> None:
            async with aclosing(self._sample(call, choice)) as own:
                async for event in own:
                    events.put_nowait(event)

        async def run_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in range(call.request.n):
                        group.create_task(run(choice))
            except* TokentapeError as errors:
                raise errors.exceptions[0] from None
            finally:
                events.put_nowait(None)

        running = asyncio.create_task(run_all())
        try:
            while (event := await events.get()) is not None:
                yield event
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _commit(self, call: _Call, sampled: Sequence[_Sampled]) -> list[Turn]:
        """Record all choices of a call at once. Raises, with nothing committed, if an invariant does not hold."""
        session, setup = call.session, call.setup
        session_id = session.info.session_id
        async with self._lock(session_id):
            if self._sessions.get(session_id) is not session:
                raise NotFound(f"session {session_id!r} was deleted while this turn was being sampled")
            turns = [self._turn(call, one, len(session.turns) + n) for n, one in enumerate(sampled)]
            records: list[Record] = [*turns]
            if setup.digest not in self._setups.get(session_id, ()):
                records.insert(0, setup)
            if session_id in self._unstored:
                records.insert(0, session.info)
            # A client that leaves now must not tear the record in memory from the one on disk.
            await asyncio.shield(self._write(session, setup, turns, records))
        return turns

    def _turn(self, call: _Call, sampled: _Sampled, seq: int) -> Turn:
        """The record of one choice, its invariants checked."""
        session, parent = call.session, call.parent
        parent_seq = None if parent is None else parent.seq
        fork = call.fork or session.fork_cause(parent_seq, call.messages, call.setup.digest)
        completion = sampled.completion
        assert completion.finish_reason is not None
        turn = Turn(
            session_id=session.info.session_id,
            seq=seq,
            parent=parent_seq,
            setup=call.setup.digest,
            messages=call.messages,
            reply=reply_message(sampled.reply),
            added_ids=call.added.ids,
            added_provenance=call.added.provenance,
            completion_ids=np.array(completion.ids, dtype=np.int32),
            logprobs=np.array(completion.logprobs, dtype=np.float32),
            finish_reason=completion.finish_reason,
            stop=completion.stop,
            fork="sibling" if sampled.choice else fork,
            sampling=asdict(sampled.sampling),
            engine=str(self.engine.info),
            weight_version=completion.weight_version,
            created_at=time.time(),
            digest="",
        )
        check_completion(turn.completion_ids, turn.logprobs, self.vocab_size)
        check_turn(turn, call.context_ids, call.prompt_ids)
        return seal(turn, None if parent is None else parent.digest)

    async def _write(self, session: Session, setup: Setup, turns: Sequence[Turn], records: Sequence[Record]) -> None:
        await self.store.write(*records)
        self._unstored.discard(session.info.session_id)
        self._setups.setdefault(session.info.session_id, set()).add(setup.digest)
        for turn in turns:
            session.add(turn)

    async def _find(self, session_id: str) -> Session | None:
        """The session in memory, else from the store."""
        async with self._lock(session_id):
            session = self._sessions.get(session_id)
            if session is None:
                try:
                    stored = await asyncio.to_thread(self.store.load_session, session_id)
                except NotFound:
                    return None
                session = self._sessions[session_id] = Session(stored.info, stored.turns)
                self._setups[session_id] = {turn.setup for turn in stored.turns}
            return session

    async def _find_or_start(self, session_id: str) -> Session:
        """The session, or a new one that is stored with its first turn."""
        session = await self._find(session_id)
        if session is None:
            session = self._sessions.setdefault(session_id, Session(SessionInfo(session_id, time.time(), {})))
            if not session.turns:
                self._unstored.add(session_id)
        return session

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())

    def _setup(self, session: Session, request: TurnRequest) -> Setup:
        # The day the session began, on every turn: templates that print the date must not change overnight.
        date = datetime.fromtimestamp(session.info.created_at, UTC).date().isoformat()
        fingerprint = self.renderer.fingerprint
        digest = setup_digest(request.tools, request.template_kwargs, date, fingerprint)
        return Setup(request.tools, request.template_kwargs, date, fingerprint, digest)

    def _call(self, request: TurnRequest, session: Session, setup: Setup, found: Continuation) -> _Call:
        """What to send for a request: bridged where its certificate allows that, else rendered as a new branch."""
        parent, messages, context_ids, fork = found.parent, found.new_messages, found.context_ids, None
        if self._history == "template":
            added = self._rendered(session, setup, request.messages)
            if np.array_equal(added.ids[: len(context_ids)], context_ids):
                added = Added(added.ids[len(context_ids) :], added.provenance[len(context_ids) :])
            else:
                parent, messages, context_ids, fork = None, request.messages, NO_IDS, "template_history"
        elif parent is None:
            added = self._rendered(session, setup, messages)
        elif (strategy := self._strategy(found, parent, setup)) == "fork":
            parent, messages, context_ids, fork = None, request.messages, NO_IDS, "template_rewrites"
            added = self._rendered(session, setup, messages)
        else:
            history = found.history if strategy == "contextual" else None
            added = self.renderer.bridge(parent.completion_ids, parent.reply, messages, setup, history, context_ids)
        prompt_ids = np.concatenate([context_ids, added.ids])
        sampling = self._sampling(request, setup, len(prompt_ids))
        return _Call(request, session, setup, parent, messages, context_ids, added, prompt_ids, fork, sampling)

    def _rendered(self, session: Session, setup: Setup, messages: Sequence[Message]) -> Added:
        """A rendering from the start in which what this session sampled stands by its exact ids."""
        replies = {n: session.turn_of_reply(m) for n, m in enumerate(messages) if m["role"] == "assistant"}
        sampled = {n: turn.completion_ids for n, turn in replies.items() if turn is not None}
        return self.renderer.render(messages, setup, sampled, self._history)

    def _strategy(self, found: Continuation, parent: Turn, setup: Setup) -> Strategy:
        certificate = self._certificate(canonical_json(setup.template_kwargs))
        return choose(self.renderer, certificate, parent.reply, found.new_messages, setup, found.history)

    def _sampling(self, request: TurnRequest, setup: Setup, prompt_length: int) -> SamplingParams:
        most = self.engine.info.max_context
        room = most - prompt_length
        if room < 1:
            raise InvalidRequest(
                f"the context has {prompt_length} tokens, the model takes {most} with its reply", "messages"
            )
        sampling = request.sampling
        return replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *self.renderer.stop_ids(setup)})),
        )


def reply_message(reply: Reply) -> dict[str, Any]:
    """The assistant message that a client is told, and that the record matches later requests with."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    calls = reply.calls_for_client
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


@dataclass(frozen=True, slots=True)
class _Call:
    """One request made ready for the engine; its choices share it."""

    request: TurnRequest
    session: Session
    setup: Setup
    parent: Turn | None
    messages: tuple[Message, ...]
    """Those that the parent does not have."""
    context_ids: TokenIds
    """The parent's context and completion."""
    added: Added
    prompt_ids: TokenIds
    """`context_ids` and `added.ids`: what is sent."""
    fork: str | None
    """A cause that lies with the template, known before sampling."""
    sampling: SamplingParams


@dataclass(slots=True)
class _Completion:
    """What the engine has returned of a completion so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    weight_version: str = "unknown"

    def add(self, delta: SampleDelta) -> None:
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop
        self.weight_version = delta.weight_version or self.weight_version


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One choice, sampled and parsed but not recorded yet."""

    choice: int
    sampling: SamplingParams
    completion: _Completion
    reply: Reply
    rest: ReplyDelta


def _name_calls(delta: ReplyDelta, request_id: str, start: int) -> ReplyDelta:
    if not delta.tool_calls:
        return delta
    return replace(delta, tool_calls=_named(delta.tool_calls, request_id, start))


def _named(calls: Sequence[ToolCall], request_id: str, start: int = 0) -> tuple[ToolCall, ...]:
    """Calls with an id each: the model's own, else nine letters and digits, which every template takes."""
    named, told = [], start
    for call in calls:
        own = hashlib.sha256(f"{request_id} {told}".encode()).hexdigest()[:9]
        named.append(call if call.id else replace(call, id=own))
        told += call.status != "unclosed"
    return tuple(named)
