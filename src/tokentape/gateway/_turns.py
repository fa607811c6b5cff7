"""One turn, from messages to a committed record.

The path of a request: the session finds the deepest turn that the messages continue, the renderer bridges (appends ids
to that turn) or renders, the engine samples, the parser reads the reply, the invariants are checked, the store commits,
and only then does the client learn that the turn is done.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, cast

from msgspec import structs

from tokentape._session.invariants import check_ids
from tokentape._session.tree import ContinuationPoint, Session
from tokentape.chat._parse import PlainReader, ReplyParser
from tokentape.chat._renderer import Renderer
from tokentape.chat._splice import History, StopMismatch
from tokentape.engines._base import ChatServer, Engine, KeepsSessions, MediaEngine, SamplingParams
from tokentape.engines._distributions import truncates
from tokentape.errors import CommitRace, EngineContractError, EngineError, EngineUnavailable
from tokentape.gateway._bridge_checks import BridgeChecks
from tokentape.gateway._choices import Choice, Sample, ServerRenderedCall, sample_together
from tokentape.gateway._events import InFlightCall, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._limits import CallsPerKey, CheckBridges, Limits, OnAbort
from tokentape.gateway._pausing import Gate, Pausing
from tokentape.gateway._pins import Pins
from tokentape.gateway._prefix import ParsedPrefix
from tokentape.gateway._prompts import PROMPT, Prompt, PromptBuilder
from tokentape.gateway._recording import Recorder, replayed
from tokentape.gateway._sampling import RETRY_SECONDS, CompletionSampler
from tokentape.gateway._session_cache import OpenSession, SessionCache, not_found
from tokentape.gateway._telemetry import Telemetry
from tokentape.gateway._unread import UnreadMarks
from tokentape.store import Store
from tokentape.types import Message, SessionInfo, Setup, TokenIds, Turn

_log = logging.getLogger("tokentape.gateway")


class Turns:
    """Samples and records the turns of sessions. It is the only writer of records. Call its methods on one event loop.

    `history` selects what stays in context from earlier turns: `sampled`, everything that was sampled; or `template`,
    what the template keeps (it may drop old reasoning at a new user message), to train what a stateless server serves.
    With `template`, a turn starts a new branch if the template rewrites its history.
    `stop_mismatch` selects what to do if a turn ended with a different stop token than the template renders: `keep` the
    sampled token and the branch; or `fork` a new branch with the template's token (docs/decisions/0006). It has no
    effect with `capture`.
    With `payloads`, the engine's per-token data besides logprobs (routed experts) are requested and recorded if the
    engine supports them. `supports` is the largest support (the ids that truncation keeps at a token) to record.
    `on_abort` selects what to do with a completion that the engine aborts, for example for new weights; see
    `CompletionSampler`.
    `pins` are sampling parameters that callers can't change, and defaults.
    `check_bridges` selects which bridges are compared with the template's own rendering while the gateway runs; see
    `BridgeChecks`. With None, no bridge is checked, and verdicts don't mention checks.
    With `enforce_tools`, forced tool choices and strict tools are enforced by the engine or refused, instead of only
    reported. It has no effect with `capture`.
    With `capture`, which must be the engine, the server renders the messages; see `ServerRenderedCall`.
    The argument `owner` of methods is the name of the caller's API key, or None for a key that may see everything.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        store: Store,
        *,
        history: History = "sampled",
        stop_mismatch: StopMismatch = "keep",
        limits: Limits | None = None,
        telemetry: Telemetry | None = None,
        payloads: bool = False,
        supports: int = 0,
        capture: ChatServer | None = None,
        on_abort: OnAbort = "resume",
        pins: Pins | None = None,
        check_bridges: CheckBridges | None = None,
        enforce_tools: bool = False,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.takes_images = "image" in engine.info.media and renderer.images is not None
        """Whether messages can have images: the engine supports them, and an image processor counts their tokens."""
        self.vocab_size = min(engine.info.vocab_size, renderer.tokenizer.vocab_size)
        """Ids greater than or equal to this are neither sent nor accepted."""
        self.store = store
        self.limits = limits or Limits()
        self.calls = CallsPerKey(self.limits)
        self.calls_in_flight = 0
        """Number of running calls. A retry joins its call."""
        self.telemetry = telemetry or Telemetry()
        self.gate = Gate(self.limits.pause_patience)
        self.pins = pins or Pins()
        self.pins.check(engine.info)
        self.enforce_tools = enforce_tools
        self._on_abort: OnAbort = on_abort
        self.pausing = Pausing(self.gate, store, self._interrupt_all)
        other_stop: StopMismatch = "keep" if capture is not None else stop_mismatch
        self._prompts = PromptBuilder(renderer, engine, history, store.load_media, other_stop)
        self._capture = capture
        policy = None if capture is not None else check_bridges
        self.checks = BridgeChecks(policy, renderer, store, self.telemetry.metrics, self._prompts.revoke)
        dropped = engine.close_session if isinstance(engine, KeepsSessions) else lambda _: None
        self.sessions = SessionCache(store, self.limits, self.checks.loaded, dropped)
        self.unread = UnreadMarks(store, self.sessions, self.telemetry.metrics)
        self._recorder = Recorder(store, self.sessions, self.telemetry, engine, self.vocab_size, self.checks)
        self._payloads = payloads and "payloads_from" in engine.info.sampling
        if payloads and not self._payloads:
            _log.warning("%s returns no per-token payloads, so none are recorded", engine.info)
        self._sampler = CompletionSampler(
            engine,
            renderer.tokenizer,
            self.vocab_size,
            self.gate,
            on_abort,
            self.limits,
            self.telemetry.metrics.engine_aborts,
        )
        self._supports = supports if "supports" in engine.info.sampling else 0
        if supports and not self._supports:
            _log.warning("%s does not report which ids truncation keeps, so no supports are recorded", engine.info)

    async def prepare(self) -> None:
        """Create or load the certificate for requests without template kwargs, so that no request waits for it.

        Raises `TemplateRefused` if the template can't render a question and an answer.
        """
        await asyncio.to_thread(self._prompts.certify)

    async def bind(self) -> None:
        """Bind the record to the renderer's tokenizer. Raises `InvalidRequest` if the record has another vocabulary."""
        # Gateways that share the record see this one by now. Of two that start at once, one is refused.
        await self.store.bind(self.renderer.tokenizer, self.pausing.gateway_id)

    async def abort_all(self, cause: str = "shutdown") -> None:
        """Abort every call in flight, and record the tokens as aborted turns with this `cause`."""
        calls = [call for opened in self.sessions for call in opened.calls]
        for call in calls:
            call.abort(cause)
        for call in calls:
            await call.ended()
        await self.unread.written()

    async def _interrupt_all(self) -> None:
        """Interrupt every engine call, for a weight update. Completions that can be resumed wait for the gate."""
        if self._capture is not None or self._on_abort == "resample":
            await self.abort_all("paused")
        else:
            self.gate.interrupt()

    def reads_kwarg(self, name: str) -> bool:
        """Return whether the chat template may read this template kwarg; True if another renderer is used."""
        renderer = self.renderer
        if self._capture is not None or renderer.is_external:
            return True
        return name in renderer.template.variables

    async def create_session(self, session_id: str, metadata: Mapping[str, Any], owner: str = "") -> SessionInfo:
        """Create a session. Raises `Conflict` if the id is in use, `InvalidRequest` for bad pins, `LimitReached`."""
        self.pins.with_session(metadata).check(self.engine.info)
        return await self.sessions.create(session_id, metadata, owner)

    def prefixes(self, session_id: str, owner: str) -> Sequence[ParsedPrefix]:
        """Return prefixes of earlier bodies, for a request to a session that belongs to `owner` if it exists."""
        return self.sessions.prefixes(session_id, owner) or self._prompts.prefixes.values()

    async def session(self, session_id: str, owner: str | None = None) -> Session:
        return (await self.sessions.get(session_id, owner)).session

    async def delete_session(self, session_id: str, owner: str | None = None, *, force: bool = False) -> None:
        """Delete a session and its record. Raises the errors of `Store.delete_session`."""
        opened = await self.sessions.get(session_id, owner)
        async with opened.lock:
            if opened.deleted:
                raise not_found(session_id)
            if opened.stored:
                await self.store.delete_session(session_id, force=force)
            opened.deleted = True
            self.sessions.drop(opened)

    def sessions_in_use(self) -> set[str]:
        return {opened.session_id for opened in self.sessions if opened.calls or opened.sending or opened.lock.locked()}

    def forget(self, session_ids: Iterable[str]) -> None:
        """Remove sessions that were dropped from the record from memory. Their calls in flight are not recorded."""
        gone = set(session_ids)
        for opened in self.sessions:
            if opened.session_id in gone:
                opened.deleted = True
                self.sessions.drop(opened)

    async def conversation(self, session_id: str, reply_id: str, owner: str | None = None) -> tuple[Message, ...]:
        """Return the conversation up to and including a reply's first choice. Raises `NotFound`."""
        opened = await self.sessions.get(session_id, owner)
        answer = opened.answers.get(reply_id)
        if answer is None:
            stored = await asyncio.to_thread(self.store.load_session, session_id)
            answer = next((answer for answer in stored.answers if answer.reply_id == reply_id), None)
        if answer is None:
            raise not_found(session_id)
        path = opened.session.path(answer.turns[0])
        return tuple(message for turn in path for message in (*turn.messages, turn.reply))

    async def count_context(self, request: TurnRequest, owner: str) -> int:
        """Count the context tokens that a turn would have, even if they exceed the limit. Nothing is recorded.

        Raises `TemplateRefused`, and `NotFound` for a session that belongs to a different key.
        """
        opened = await self.sessions.find(request.session_id, owner)
        session = Session(SessionInfo(request.session_id, time.time())) if opened is None else opened.session
        request, setup, point = await self._locate(request, session)
        prompt = await asyncio.to_thread(self._prompts.build, request, session, setup, point, fits=False)
        return len(prompt.ids)

    async def begin(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Start a call with `n` turns, and return an iterator over its events. Read it at once, or close it.

        The events are a `TurnStarted`, deltas as they arrive, and a `TurnDone` for each turn.

        A missing session is created if `request.begins_session`. A retry (see `Attempt`) joins the call that it
        repeats, or is answered from the record. Closing the iterator leaves the call. Once all clients have left, the
        call is aborted, after `Limits.retry_grace` seconds if no client has read any of its reply. Its tokens are then
        recorded as an aborted turn, which is in no trajectory.

        Raises `EngineError`, `TemplateRefused`, `InvalidRequest`, `NotFound`, `LimitReached`, `StoreError` and their
        subclasses.
        """
        opened = await self.sessions.find_or_begin(request.session_id, request.owner, begin=request.begins_session)
        try:
            # Don't await anything before the call has started, so that a retry finds it.
            session, attempt = opened.session, request.attempt
            pins = self.pins.with_session(session.info.metadata)
            if pins.pinned or pins.defaults:
                sampling, overridden = pins.applied(request.sampling, request.set_parameters)
                request = structs.replace(request, sampling=sampling, overridden=overridden)
            if attempt is not None and (call := opened.call_in_flight(attempt)) is not None:
                return call.follow()
            if attempt is not None and (answer := opened.answer_to(attempt)) is not None:
                self.telemetry.metrics.replays.inc()
                return _each(replayed(session, answer, partial(self._reader_again, session, request), request))
            if not self.store.healthy:
                self.store.check()
            opened.check_turns(request.n, self.limits.turns_per_session)
            call = InFlightCall(attempt, request.n, stream=request.stream, grace=self.limits.retry_grace)
            opened.calls.append(call)
            call.start(self._run_call(call, opened, request), partial(self._ended, opened, call))
            self.calls_in_flight += 1
            return call.follow()
        finally:
            self.sessions.drop_unused(opened)

    def _ended(self, opened: OpenSession, call: InFlightCall, failure: BaseException | None) -> None:
        self.calls_in_flight -= 1
        if isinstance(failure, Exception):
            self.telemetry.failed(failure)
        self.unread.mark(opened, call.left_reply)
        opened.calls.remove(call)
        self.sessions.drop_unused(opened)

    async def _run_call(self, call: InFlightCall, opened: OpenSession, request: TurnRequest) -> None:
        """Build a call's prompt, sample its choices, record them, and publish the events."""
        session = opened.session
        request, setup, point = await self._locate(request, session)
        if request.span is not None:
            opened.prefixes.append(ParsedPrefix(request.span, setup.digest, point.key))
        async with AsyncExitStack() as stack:
            sample: Sample = self.engine.sample
            captured = None
            if self._capture is not None and request.prompt_ids is None:
                captured = ServerRenderedCall(self._capture, request)
                prompt_ids = await self._begin(captured, stack, self._prompts.sampling(request, setup, 0))
                check_ids([int(prompt_ids.min()), int(prompt_ids.max())] if len(prompt_ids) else [], self.vocab_size)
                prompt = await asyncio.to_thread(self._prompts.captured, request, session, setup, point, prompt_ids)
                sample = captured.sample
            else:
                with self.telemetry.stage("prepare"):
                    # A quick build costs less than starting and awaiting a thread.
                    quick = self._prompts.is_quick(request, setup, point)
                    build = partial(self._prompts.build, request, session, setup, point)
                    prompt = build() if quick else await asyncio.to_thread(build)
                if prompt.media:
                    sample = partial(cast(MediaEngine, self.engine).sample, media=prompt.media)
            choices = [self._choice(index, prompt, request, sample) for index in range(request.n)]
            if captured is not None:
                choices[0].request_id = captured.request_id
            try:
                await self._sample(call, opened, request, prompt, choices, stack)
            finally:
                # Count the tokens even if all clients have disconnected.
                self.calls.spend(request.owner, [prompt.ids, *[choice.ids for choice in choices]])

    async def _begin(self, captured: ServerRenderedCall, stack: AsyncExitStack, sampling: SamplingParams) -> TokenIds:
        """Begin a call that the server renders, and return the prompt. While the server is paused, try again."""
        now = asyncio.get_running_loop().time
        until = now() + self.limits.pause_patience
        while True:
            # Pass the gate first: the server reports its prompt only when it begins to sample.
            await self.gate.opened()
            async with AsyncExitStack() as begun:
                begun.enter_context(self.gate.passed())
                try:
                    prompt_ids = await captured.begin(begun, sampling)
                except EngineUnavailable as error:
                    if not error.paused or now() > until:
                        raise
                else:
                    stack.push_async_exit(begun.pop_all())
                    return prompt_ids
            await asyncio.sleep(RETRY_SECONDS)

    async def _locate(self, request: TurnRequest, session: Session) -> tuple[TurnRequest, Setup, ContinuationPoint]:
        """Return the request with its images received, its setup, and the point in the session that it continues.

        If a harness has changed tool call ids or named replies, the returned request has the recorded ids and names.
        This is done only if the conversation renders to the same text with both, so that the model never sees an id or
        a name that the caller didn't send.
        """
        setup = self._prompts.setup(session, request)
        if self.takes_images:
            request = await asyncio.to_thread(self._prompts.receive, request)
        if request.prompt_ids is not None:
            return request, setup, session.continuation_of_ids(request.prompt_ids, PROMPT)
        point = session.continuation(request.messages, setup.digest)
        if self._capture is not None or all(message["role"] != "assistant" for message in point.new_messages):
            return request, setup, point
        messages = session.with_recorded_ids(request.messages, setup.digest)
        if messages is None:
            return request, setup, point
        renamed = session.continuation(messages, setup.digest)
        deeper = len(renamed.new_messages) < len(point.new_messages)
        if deeper and await asyncio.to_thread(self._prompts.render_alike, request.messages, messages, setup):
            return structs.replace(request, messages=messages), setup, renamed
        return request, setup, point

    async def _sample(
        self,
        call: InFlightCall,
        opened: OpenSession,
        request: TurnRequest,
        prompt: Prompt,
        choices: Sequence[Choice],
        stack: AsyncExitStack,
    ) -> None:
        started = TurnStarted(
            secrets.token_hex(12),
            time.time(),
            prompt.ids,
            engine_requests=tuple([choice.request_id for choice in choices]),
            sampling=request.sampling,
            overridden=request.overridden,
        )
        call.publish(started)
        try:
            if not choices[0].captured:
                await self.gate.opened()
            spans = self.telemetry.spans
            span = None if spans is None else spans.inference(self.engine.info, prompt, choices)
            with self.telemetry.stage("engine", span):
                asked_at: float | None = time.perf_counter()
                sample = self._sampler.sample
                sampled = sample(choices[0]) if len(choices) == 1 else sample_together(choices, sample)
                async with stack, aclosing(sampled) as deltas:
                    async for delta in deltas:
                        if asked_at is not None:
                            self.telemetry.metrics.first_token.observe(time.perf_counter() - asked_at)
                            asked_at = None
                        call.publish(delta)
            # A turn is published only after it is durable, and committed only while a client waits for it.
            await call.wait_for_reader()
            call.begin_commit()
        except (asyncio.CancelledError, EngineError) as error:
            cause = error.code if isinstance(error, EngineError) else call.abort_cause
            usable = any(choice.ids for choice in choices) and not isinstance(error, EngineContractError)
            if usable or isinstance(error, asyncio.CancelledError):
                call.begin_commit()
                await asyncio.shield(self._recorder.commit_aborted(opened, prompt, choices, request, cause))
            raise
        try:
            recorded = await self._recorder.commit(opened, prompt, choices, started, request)
        except CommitRace as error:
            await asyncio.shield(self._recorder.commit_aborted(opened, prompt, choices, request, error.code))
            raise
        for done in recorded:
            call.publish(done)

    def _choice(self, index: int, prompt: Prompt, request: TurnRequest, sample: Sample) -> Choice:
        sampling, changes = prompt.sampling, dict[str, Any]()
        if sampling.seed is not None:
            changes["seed"] = sampling.seed + index
        if self._payloads:
            # The parent's last id has not been an input before, so this call returns its row.
            changes["payloads_from"] = max(len(prompt.point.context_ids) - 1, 0)
        if self._supports and truncates(sampling):
            changes["supports"] = self._supports
        if changes:
            sampling = replace(sampling, **changes)
        return Choice(
            index,
            sampling,
            self._reader(request, prompt.setup, sampling.stop_token_ids, prompt.ids),
            sample,
            prompt.ids,
            stream=request.stream,
            captured=self._capture is not None and request.prompt_ids is None,
            weights_now=partial(self.gate.version_of, sampling.adapter),
            call_prefix=self._prompts.call_prefix,
        )

    def _reader(
        self, request: TurnRequest, setup: Setup, stop_ids: Iterable[int], context_ids: TokenIds
    ) -> ReplyParser:
        stops = request.sampling.stop_strings
        if request.prompt_ids is not None:
            return PlainReader(self.renderer.tokenizer, stop_ids=frozenset(stop_ids), stop_strings=stops)
        return self.renderer.parser(setup, stops, context_ids)

    def _reader_again(self, session: Session, request: TurnRequest, turn: Turn) -> ReplyParser:
        """Return a new parser for a recorded completion, equal to the parser that was used when it was sampled."""
        setup, stop_ids = self._prompts.setup(session, request), turn.sampling["stop_token_ids"]
        return self._reader(request, setup, stop_ids, session.context_before(turn.seq))


async def _each(events: Iterable[TurnEvent]) -> AsyncGenerator[TurnEvent, None]:
    for event in events:
        yield event
