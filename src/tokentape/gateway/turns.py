"""One turn, from messages to a committed record.

The way of a request: the session finds the deepest turn that the messages continue, the renderer bridges (or renders),
the engine samples, the parser reads the reply, the invariants are checked, the store commits, and only then is the
client told that the turn is done.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import fields, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, cast

import numpy as np

from tokentape.chat.parse import Reply, ReplyDelta
from tokentape.chat.plain_text import PlainReader
from tokentape.chat.renderer import Renderer
from tokentape.chat.splice import History, WrongStop
from tokentape.engines.base import ChatServer, Engine, MediaEngine, SampleDelta, SamplingParams
from tokentape.errors import (
    AnsweredElsewhere,
    Conflict,
    EngineContractError,
    EngineError,
    InvariantViolation,
    LimitReached,
    NotFound,
    TokentapeError,
)
from tokentape.gateway.capturing import Begun, Capture
from tokentape.gateway.choices import Choice, ReplyReader, Sampler, name_calls, sample_choices
from tokentape.gateway.events import Finish, TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway.flights import Flight
from tokentape.gateway.gate import Gate
from tokentape.gateway.images import ImageSampler
from tokentape.gateway.known_prefix import Known
from tokentape.gateway.limits import Limits
from tokentape.gateway.open_sessions import OpenSession, OpenSessions, not_found
from tokentape.gateway.pausing import Pausing
from tokentape.gateway.preparing import PROMPT, Prepared, Preparer
from tokentape.gateway.telemetry import Telemetry
from tokentape.session.chain import seal
from tokentape.session.invariants import check_completion, check_turn
from tokentape.session.payloads import turn_payload
from tokentape.session.tree import Continuation, Session
from tokentape.store import Record, Store
from tokentape.types import Answer, Message, SessionInfo, Setup, Turn, TurnPayload

_log = logging.getLogger("tokentape.gateway")


class Turns:
    """Takes turns in sessions: the only writer of records. All methods belong to one event loop.

    `history` says what of earlier turns stays in context: `sampled`, all that was sampled, whatever the template does
    to old turns; or `template`, what the template keeps (it may drop old reasoning at a new user message), to train
    what a stateless server serves. Then a turn whose history the template rewrites starts a new branch.

    `wrong_stop` says what becomes of a turn that ended with another stop token than the template writes there: `keep`,
    the sampled one stands for the end and the branch goes on; or `fork`, what follows it starts a new branch with the
    template's own end (docs/decisions/0006). Not with `capture`: there the server's context counts.

    With `payloads`, what an engine returns per token besides the logprob (routed experts) is asked for and recorded,
    each token's once. An engine that returns nothing of the kind is not asked.

    With `capture`, which is the engine again, it renders the messages, and its prompts are the contexts; see `Capture`.

    Where a method takes an `owner`, it is the name of the API key that asks, and None for one that may see all.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        store: Store,
        *,
        history: History = "sampled",
        wrong_stop: WrongStop = "keep",
        limits: Limits | None = None,
        telemetry: Telemetry | None = None,
        payloads: bool = False,
        capture: ChatServer | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self.limits = limits or Limits()
        self.telemetry = telemetry or Telemetry()
        self.gate = Gate(self.limits.pause_patience)
        self.pausing = Pausing(self.gate, store, self.abort_all)
        other_stop: WrongStop = "keep" if capture is not None else wrong_stop
        self._preparer = Preparer(renderer, engine, history, store.load_media, other_stop)
        self._capture = None if capture is None else Capture(capture, renderer, self._preparer)
        self._sessions = OpenSessions(store, self.limits)
        self._payloads = payloads and "payloads_from" in engine.info.sampling
        if payloads and not self._payloads:
            _log.warning("%s returns no payloads per token: none are recorded", engine.info)

    async def prepare(self) -> None:
        """Make or load the certificate of requests without template kwargs, so that the first need not wait for it.

        Raises `TemplateRefused` if the template renders not even a question and an answer.
        """
        await asyncio.to_thread(self._preparer.certify)

    async def abort_all(self, cause: str = "shutdown") -> None:
        """End every call under way; what was sampled of it is recorded as aborted, because of `cause`."""
        flights = [flight for opened in self._sessions for flight in opened.flights]
        for flight in flights:
            flight.abort(cause)
        for flight in flights:
            await flight.ended()

    @property
    def open_sessions(self) -> int:
        """How many sessions are in memory."""
        return len(self._sessions)

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images: the engine takes them, and there is what tells their tokens."""
        return "image" in self.engine.info.media and self.renderer.images is not None

    @property
    def vocab_size(self) -> int:
        """Ids at or above this are neither sent nor accepted."""
        return min(self.engine.info.vocab_size, self.renderer.tokenizer.vocab_size)

    async def create_session(self, session_id: str, metadata: Mapping[str, Any], owner: str = "") -> SessionInfo:
        """Create a session. Raises `Conflict` if there is one with this id, and `LimitReached`."""
        return await self._sessions.create(session_id, metadata, owner)

    def known(self, session_id: str, owner: str) -> Sequence[Known]:
        """With what a request to a session in memory may begin, so that it need not be read again."""
        return self._sessions.known(session_id, owner)

    async def session(self, session_id: str, owner: str | None = None) -> Session:
        """The session with this id. Raises `NotFound`."""
        return (await self._sessions.get(session_id, owner)).session

    async def delete_session(self, session_id: str, owner: str | None = None, *, force: bool = False) -> None:
        """Delete a session and its record.

        Raises `NotFound`, and unless `force` is given `Conflict` if an unconfirmed snapshot holds it.
        """
        opened = await self._sessions.get(session_id, owner)
        async with opened.lock:
            if opened.deleted:
                raise not_found(session_id)
            if opened.stored:
                await self.store.delete_session(session_id, force=force)
            opened.deleted = True
            self._sessions.drop(opened)

    def sessions_in_use(self) -> set[str]:
        """Ids of the sessions in which calls are under way."""
        return {opened.session_id for opened in self._sessions if opened.flights or opened.lock.locked()}

    def forget(self, session_ids: Iterable[str]) -> None:
        """Let go of sessions whose record has been dropped; what is still sampled for them is not recorded."""
        gone = set(session_ids)
        for opened in self._sessions:
            if opened.session_id in gone:
                opened.deleted = True
                self._sessions.drop(opened)

    async def conversation(self, session_id: str, reply_id: str, owner: str | None = None) -> tuple[Message, ...]:
        """The messages up to and including the first choice of a reply. Raises `NotFound`."""
        opened = await self._sessions.get(session_id, owner)
        answer = opened.answer_named(reply_id)
        if answer is None:
            stored = await asyncio.to_thread(self.store.load_session, session_id)
            answer = next((one for one in stored.answers if one.reply_id == reply_id), None)
        if answer is None:
            raise not_found(session_id)
        path = opened.session.path(answer.turns[0])
        return tuple(message for turn in path for message in (*turn.messages, turn.reply))

    async def count_context(self, request: TurnRequest, owner: str) -> int:
        """How many tokens the context of a turn would have, even one that is too long; nothing is recorded.

        Raises `TemplateRefused`, and `NotFound` for somebody else's session.
        """
        opened = await self._sessions.find(request.session_id, owner)
        session = Session(SessionInfo(request.session_id, time.time())) if opened is None else opened.session
        setup = self._preparer.setup(session, request)
        request = await self._received(request)
        found = session.continuation(request.messages, setup.digest)
        prepared = await asyncio.to_thread(self._preparer.with_context, request, session, setup, found)
        return len(prepared.prompt_ids)

    async def take(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Sample and record `n` turns; yields a `TurnStarted`, deltas as they come, and a `TurnDone` for each.

        A session that does not exist is created. A call that repeats another (see `Attempt`) joins it, or is answered
        with what is recorded. Closing the iterator leaves the call; when everybody has left it, it is aborted, after
        `Limits.retry_grace` seconds if nothing of its reply was read, and what was sampled is recorded as an aborted
        turn, outside of every trajectory.

        Raises `EngineError`, `TemplateRefused`, `InvalidRequest`, `NotFound`, `LimitReached`, `StoreError` and kinds.
        """
        async with aclosing(await self.begin(request)) as events:
            async for event in events:
                yield event

    async def begin(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """As `take`, but returns once the call is under way. Its events are to be read at once, or to be closed."""
        opened = await self._sessions.find_or_begin(request.session_id, request.owner)
        # No await from here to the start of the flight: a repetition must find it.
        flight = opened.flight_of(request.attempt)
        if flight is None:
            answer = opened.answer_to(request.attempt)
            if answer is not None:
                self.telemetry.replayed()
                return _each(self._recorded(opened.session, answer, request))
            flight = self._start(opened, request)
        return flight.follow()

    def _start(self, opened: OpenSession, request: TurnRequest) -> Flight:
        most = self.limits.turns_per_session
        if most and len(opened.session.turns) + request.n > most:
            raise LimitReached(f"session {opened.session_id!r} has {most} turns, which is the limit; begin another")
        flight = Flight(request.attempt, stream=request.stream, grace=self.limits.retry_grace)
        opened.flights.append(flight)
        work = self.telemetry.call(partial(self._fly, flight, opened, request))
        flight.start(work, partial(self._ended, opened, flight))
        return flight

    def _ended(self, opened: OpenSession, flight: Flight) -> None:
        opened.flights.remove(flight)
        if not opened.stored and not opened.flights:
            # Its calls have all failed and nothing is recorded: there is no such session.
            self._sessions.drop(opened)

    async def _fly(self, flight: Flight, opened: OpenSession, request: TurnRequest) -> None:
        """Take the turns of a call, telling its flight what happens."""
        session = opened.session
        setup = self._preparer.setup(session, request)
        request = await self._received(request)
        if request.prompt_ids is not None:
            found = session.continuation_of_ids(request.prompt_ids, PROMPT)
        else:
            request, found = self._continued(opened, request, setup)
        async with AsyncExitStack() as held:
            prepared, sampler = await self._ready(held, request, session, setup, found)
            await self._sample(flight, opened, request, prepared, sampler, held)

    def _continued(self, opened: OpenSession, request: TurnRequest, setup: Setup) -> tuple[TurnRequest, Continuation]:
        """The turn that a request continues, and the request with all of its messages if they had to be read for it."""
        session, known = opened.session, request.known
        found = None
        if known is not None and known.setup == setup.digest and self._capture is None:
            found = session.continuation(request.messages, setup.digest, known.key)
        if found is None or (known is not None and found.parent is None):
            request = request.whole()
            found = session.continuation(request.messages, setup.digest)
        if request.place is not None:
            opened.know(Known(request.place, setup.digest, found.key))
        return request, found

    async def _received(self, request: TurnRequest) -> TurnRequest:
        """The request with its images decoded, off the event loop."""
        return await asyncio.to_thread(self._preparer.receive, request) if self.takes_images else request

    async def _ready(
        self, held: AsyncExitStack, request: TurnRequest, session: Session, setup: Setup, found: Continuation
    ) -> tuple[Prepared, Sampler]:
        """The context of a call and what samples from it."""
        if self._capture is None or request.prompt_ids is not None:
            with self.telemetry.stage("prepare"):
                if self._preparer.is_quick(request, setup, found):
                    # A thread costs more than that, and waits for its turn.
                    prepared = self._preparer.prepare(request, session, setup, found)
                else:
                    prepared = await asyncio.to_thread(self._preparer.prepare, request, session, setup, found)
            if prepared.media:
                return prepared, ImageSampler(cast(MediaEngine, self.engine), prepared.media)
            return prepared, self.engine
        # A server that renders says what it samples from when it samples: the gate comes first.
        await held.enter_async_context(self.gate.passing())
        return await self._capture.begin(held, request, session, setup, found)

    async def _sample(
        self,
        flight: Flight,
        opened: OpenSession,
        request: TurnRequest,
        prepared: Prepared,
        sampler: Sampler,
        held: AsyncExitStack,
    ) -> None:
        """Sample the choices of a call and record them; `held` is let go of in between."""
        choices = [self._choice(index, prepared, request) for index in range(request.n)]
        if isinstance(sampler, Begun):
            choices[0].request_id = sampler.request_id
        asked = tuple(choice.request_id for choice in choices)
        started = TurnStarted(secrets.token_hex(12), time.time(), prepared.prompt_ids, engine_requests=asked)
        flight.tell(started)
        sampling = sample_choices(
            sampler, prepared.prompt_ids, choices, vocab_size=self.vocab_size, stream=request.stream
        )
        try:
            if not isinstance(sampler, Begun):
                await held.enter_async_context(self.gate.passing())
            with self.telemetry.stage("engine"):
                asked_at: float | None = time.perf_counter()
                async with held, aclosing(sampling) as deltas:
                    async for delta in deltas:
                        if asked_at is not None:
                            self.telemetry.first_token(time.perf_counter() - asked_at)
                            asked_at = None
                        flight.tell(delta)
            # Nobody is told of it before it is durable, and it is not made durable as long as there is nobody to tell.
            await flight.wanted()
            flight.land()
        except asyncio.CancelledError:
            await asyncio.shield(self._commit_aborted(opened, prepared, choices, flight.abort_cause))
            raise
        except EngineContractError:
            raise
        except EngineError as error:
            if any(choice.ids for choice in choices):
                await asyncio.shield(self._commit_aborted(opened, prepared, choices, error.code))
            raise
        try:
            told = await self._commit(opened, prepared, choices, started, request)
        except AnsweredElsewhere as error:
            await asyncio.shield(self._commit_aborted(opened, prepared, choices, error.code))
            raise
        for done in told:
            flight.tell(done)

    def _choice(self, index: int, prepared: Prepared, request: TurnRequest) -> Choice:
        sampling = prepared.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        if "session_id" in self.engine.info.sampling:
            sampling = replace(sampling, session_id=request.session_id)
        if self._payloads:
            # The parent's last id was never an input before: its row comes with this call.
            sampling = replace(sampling, payloads_from=max(len(prepared.context_ids) - 1, 0))
        return Choice(index, sampling, self._reader(prepared, request), lambda: self.gate.weight_version)

    def _reader(self, prepared: Prepared, request: TurnRequest) -> ReplyReader:
        stop_strings = prepared.sampling.stop_strings
        if request.prompt_ids is not None:
            stop_ids = frozenset(prepared.sampling.stop_token_ids)
            return PlainReader(self.renderer.tokenizer, stop_ids=stop_ids, stop_strings=stop_strings)
        return self.renderer.parser(prepared.setup, stop_strings)

    async def _commit(
        self,
        opened: OpenSession,
        prepared: Prepared,
        choices: Sequence[Choice],
        started: TurnStarted,
        request: TurnRequest,
    ) -> list[TurnDone]:
        """Record all choices of a call at once. Raises, with nothing committed, if an invariant does not hold."""
        async with opened.lock:
            while True:
                if opened.deleted or opened.session.info.owner != request.owner:
                    raise NotFound(f"session {opened.session_id!r} was deleted while this turn was being sampled")
                if self.store.shared and opened.answer_to(request.attempt) is not None:
                    raise AnsweredElsewhere("another gateway has answered this call; send it again to get its reply")
                turns = self._turns(opened.session, prepared, choices)
                for turn in turns:
                    check_completion(turn.completion_ids, turn.logprobs, self.vocab_size)
                    check_turn(turn, prepared.context_ids, prepared.prompt_ids)
                answer = self._answer(opened, turns, choices, started, request)
                # A client that leaves now must not tear the record in memory from the one on disk.
                writing = self._write(opened, prepared, turns, answer, _payloads(prepared, turns, choices))
                if await asyncio.shield(writing):
                    break
        return [
            TurnDone(choice.index, turn, choice.reply, choice.rest, _finish(turn, choice.reply))
            for choice, turn in zip(choices, turns, strict=True)
            if choice.reply is not None
        ]

    def _answer(
        self,
        opened: OpenSession,
        turns: Sequence[Turn],
        choices: Sequence[Choice],
        started: TurnStarted,
        request: TurnRequest,
    ) -> Answer | None:
        """What a retry of a call is answered with."""
        if request.attempt is None:
            return None
        tops = tuple(tuple(choice.top_logprobs) for choice in choices)
        return Answer(
            session_id=opened.session_id,
            reply_id=started.reply_id,
            turns=tuple(turn.seq for turn in turns),
            key=request.attempt.key,
            body_digest=request.attempt.body_digest,
            created_at=started.created_at,
            top_logprobs=tops if any(tops) else (),
        )

    async def _commit_aborted(
        self, opened: OpenSession, prepared: Prepared, choices: Sequence[Choice], cause: str
    ) -> None:
        """Record what was sampled of a call that nobody gets an answer to."""
        async with opened.lock:
            if opened.deleted or not self.store.healthy:
                return
            for choice in choices:
                if choice.reply is None:
                    choice.end()
                choice.finish_reason, choice.stop = "abort", None
            try:
                while not opened.deleted:
                    turns = self._turns(opened.session, prepared, choices, abort_cause=cause)
                    if await self._write(opened, prepared, turns, None):
                        break
            except TokentapeError as error:
                _log.warning("an aborted turn could not be recorded (%s)", error.code)

    def _turns(
        self, session: Session, prepared: Prepared, choices: Sequence[Choice], abort_cause: str | None = None
    ) -> list[Turn]:
        """The records of the choices of a call, sealed."""
        parent = prepared.parent
        parent_seq = None if parent is None else parent.seq
        fork = prepared.fork or session.fork_cause(parent_seq, prepared.messages, prepared.setup.digest)
        turns = []
        for choice in choices:
            assert choice.finish_reason is not None
            assert choice.reply is not None
            sampling = _recorded_sampling(_values(choice.sampling))
            turn = Turn(
                session_id=session.info.session_id,
                seq=len(session.turns) + choice.index,
                parent=parent_seq,
                setup=prepared.setup.digest,
                messages=prepared.messages,
                reply=reply_message(choice.reply),
                added_ids=prepared.added.ids,
                added_provenance=prepared.added.provenance,
                completion_ids=np.array(choice.ids, dtype=np.int32),
                logprobs=np.array(choice.logprobs, dtype=np.float32),
                finish_reason=choice.finish_reason,
                stop=choice.stop,
                fork="sibling" if choice.index else fork,
                sampling={**sampling, **prepared.noted} if prepared.noted else sampling,
                engine=choice.engine or str(self.engine.info),
                weight_version=choice.weight_version,
                created_at=time.time(),
                digest="",
                weight_changes=tuple(choice.weight_changes),
                abort_cause=abort_cause,
            )
            turns.append(seal(turn, None if parent is None else parent.digest))
        return turns

    async def _write(
        self,
        opened: OpenSession,
        prepared: Prepared,
        turns: Sequence[Turn],
        answer: Answer | None,
        payloads: Sequence[TurnPayload] = (),
    ) -> bool:
        """Write turns with what they need that is not stored yet; then, and only then, add them in memory.

        False if another gateway was first to record something of the session: it is taken in, nothing is written, and
        the turns have to be made anew behind it. They fit: nothing that they build on ever changes.
        """
        setup = prepared.setup
        records: list[Record] = [*prepared.new_media, *turns, *payloads]
        if answer is not None:
            records.append(answer)
        if setup.digest not in opened.setups:
            records.insert(0, setup)
        if not opened.stored:
            records.insert(0, opened.session.info)
        try:
            with self.telemetry.stage("commit"):
                await self.store.write(*records)
        except (Conflict, NotFound, InvariantViolation):
            if self.store.shared and (await self._sessions.catch_up(opened) or opened.deleted):
                return False
            raise
        opened.stored = True
        opened.setups.add(setup.digest)
        self.telemetry.recorded(turns, len(prepared.prompt_ids))
        for turn in turns:
            opened.session.add(turn)
        if answer is not None:
            opened.remember(answer)
        return True

    def _recorded(self, session: Session, answer: Answer, request: TurnRequest) -> list[TurnEvent]:
        """The events of a call that was answered before, each choice in one delta."""
        turns = [session.turns[seq] for seq in answer.turns]
        context = session.context_before(turns[0].seq)
        events: list[TurnEvent] = [TurnStarted(answer.reply_id, answer.created_at, context, replayed=True)]
        done: list[TurnEvent] = []
        for index, turn in enumerate(turns):
            reply = self._read_again(session, turn, request)
            tops = answer.top_logprobs[index] if answer.top_logprobs else ()
            sampled = SampleDelta(
                tuple(turn.completion_ids.tolist()),
                tuple(turn.logprobs.tolist()),
                turn.finish_reason,
                turn.stop,
                tops,
                turn.weight_version,
            )
            whole = ReplyDelta(reply.content, reply.reasoning, reply.calls_for_client)
            events.append(TurnDelta(index, sampled, whole))
            done.append(TurnDone(index, turn, reply, ReplyDelta(), _finish(turn, reply)))
        return [*events, *done]

    def _read_again(self, session: Session, turn: Turn, request: TurnRequest) -> Reply:
        """A recorded completion's reply, its calls with the ids that the client was told."""
        stop_strings = request.sampling.stop_strings
        reader: ReplyReader
        if request.prompt_ids is not None:
            stop_ids = frozenset(turn.sampling["stop_token_ids"])
            reader = PlainReader(self.renderer.tokenizer, stop_ids=stop_ids, stop_strings=stop_strings)
        else:
            reader = self.renderer.parser(self._preparer.setup(session, request), stop_strings)
        reader.feed(turn.completion_ids.tolist())
        _, reply = reader.finish()
        told = iter(turn.reply.get("tool_calls", ()))
        calls = [
            call if call.status == "unclosed" else replace(call, id=next(told)["id"])
            for call in name_calls(reply.tool_calls, "")
        ]
        return replace(reply, tool_calls=tuple(calls))


async def _each(events: Iterable[TurnEvent]) -> AsyncGenerator[TurnEvent, None]:
    for event in events:
        yield event


def _payloads(prepared: Prepared, turns: Sequence[Turn], choices: Sequence[Choice]) -> list[TurnPayload]:
    """What the engine said per token, cut to what each turn added."""
    context = len(prepared.context_ids)
    found = [
        turn_payload(turn.session_id, turn.seq, one.name, context, one.start, one.rows)
        for turn, choice in zip(turns, choices, strict=True)
        for one in choice.payloads
    ]
    return [one for one in found if one is not None]


_RECORDED = tuple(one.name for one in fields(SamplingParams) if one.name not in ("session_id", "payloads_from"))
"""What of the parameters a turn does not say by itself."""

_values = attrgetter(*_RECORDED)


@lru_cache(maxsize=256)
def _recorded_sampling(values: tuple[Any, ...]) -> Mapping[str, Any]:
    """What was sent to the engine, one mapping for all turns that were sampled alike."""
    return dict(zip(_RECORDED, values, strict=True))


def _finish(turn: Turn, reply: Reply) -> Finish:
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.calls_for_client else "stop"


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
