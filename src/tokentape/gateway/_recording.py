"""Record the turns of a sampled or aborted call: build, check, seal and write them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from sys import intern
from typing import Any

import numpy as np
from msgspec import structs

from tokentape._session.chain import seal
from tokentape._session.invariants import check_completion, check_turn
from tokentape._session.lineage_branches import CLIENT
from tokentape._session.payloads import turn_payload
from tokentape._session.tree import Session
from tokentape._supports import SUPPORTS, is_known
from tokentape.chat._parse import Reply, ReplyDelta, ReplyParser, ToolCall
from tokentape.engines._base import Engine, SampleDelta, SamplingParams
from tokentape.engines._distributions import logprobs_of, sampled_from, truncates
from tokentape.errors import CommitRace, Conflict, InvariantViolation, NotFound, TokentapeError
from tokentape.gateway._bridge_checks import BridgeChecks
from tokentape.gateway._choices import Choice, name_calls
from tokentape.gateway._events import Finish, TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._prompts import Prompt
from tokentape.gateway._session_cache import OpenSession, SessionCache
from tokentape.gateway._telemetry import Telemetry
from tokentape.store import Record, Store
from tokentape.types import RecordedReply, Resume, Turn, TurnPayload

_log = logging.getLogger("tokentape.gateway")


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes turns to the store and, only after that, to the session in memory."""

    store: Store
    sessions: SessionCache
    telemetry: Telemetry
    engine: Engine
    vocab_size: int
    """Ids greater than or equal to this are not accepted."""
    checks: BridgeChecks

    async def commit(
        self, opened: OpenSession, prompt: Prompt, choices: Sequence[Choice], started: TurnStarted, request: TurnRequest
    ) -> list[TurnDone]:
        """Record all choices of a call in one commit. If an invariant is violated, raise and commit nothing."""
        async with opened.lock:
            while True:
                if opened.deleted:
                    raise NotFound(f"session {opened.session_id!r} was deleted while this turn was being sampled")
                if self.store.shared and request.attempt is not None and opened.answer_to(request.attempt) is not None:
                    raise CommitRace("another gateway has answered this call; send it again to get its reply")
                turns = self._turns(opened.session, prompt, choices, request)
                for turn in turns:
                    check_completion(turn.completion_ids, turn.logprobs, self.vocab_size)
                    check_turn(turn, prompt.point.context_ids, prompt.ids)
                answer = None
                if request.attempt is not None:
                    tops = tuple([tuple(choice.top_logprobs) for choice in choices])
                    # Retries are answered from this.
                    answer = RecordedReply(
                        session_id=opened.session_id,
                        reply_id=started.reply_id,
                        turns=tuple([turn.seq for turn in turns]),
                        key=request.attempt.key,
                        body_digest=request.attempt.body_digest,
                        created_at=started.created_at,
                        top_logprobs=tops if any(tops) else (),
                    )
                # Shield this, because a client that disconnects now must not make memory and disk differ.
                writing = self._write(opened, prompt, turns, answer, _payloads(prompt, turns, choices))
                if await asyncio.shield(writing):
                    break
        self.telemetry.metrics.cached_tokens.inc(sum([choice.cached_tokens or 0 for choice in choices]))
        return [
            TurnDone(choice.index, turn, choice.reply, choice.rest, finish_of(turn, choice.reply), choice.cached_tokens)
            for choice, turn in zip(choices, turns, strict=True)
            if choice.reply is not None
        ]

    async def commit_aborted(
        self, opened: OpenSession, prompt: Prompt, choices: Sequence[Choice], request: TurnRequest, cause: str
    ) -> None:
        """Record the tokens of an aborted call as aborted turns. `cause` is the reason for the abort."""
        async with opened.lock:
            if not self.store.healthy:
                return
            for choice in choices:
                if choice.reply is None:
                    choice.end()
                choice.finish_reason, choice.stop = "abort", None
            try:
                while not opened.deleted:
                    turns = self._turns(opened.session, prompt, choices, request, cause)
                    if await self._write(opened, prompt, turns, None):
                        break
            except TokentapeError as error:
                _log.warning("an aborted turn could not be recorded (%s)", error.code)

    def _turns(
        self,
        session: Session,
        prompt: Prompt,
        choices: Sequence[Choice],
        request: TurnRequest,
        abort_cause: str | None = None,
    ) -> list[Turn]:
        parent = prompt.point.parent
        parent_seq = None if parent is None else parent.seq
        prompt_ids = None if request.prompt_ids is None else prompt.added.ids
        new, setup = prompt.point.new_messages, prompt.setup.digest
        fork = prompt.fork or session.fork_cause(parent_seq, new, setup, prompt_ids)
        asked = {name: value for name, (value, _) in request.overridden.items()}
        of_request = {"asked": asked, "client_session": request.client_session, CLIENT: request.client}
        of_request = {name: note for name, note in of_request.items() if note}
        turns = []
        for choice in choices:
            assert choice.finish_reason is not None
            assert choice.reply is not None
            # Intern the strings, because many turns in memory share them.
            engine, *later = [intern(name or str(self.engine.info)) for name in choice.engines]
            has_supports = {bool(support) for support in choice.supports} or {False}
            pairs = itertools.product((engine, *later), has_supports)
            meanings = {logprobs_of(name, choice.sampling, supports=reported) for name, reported in pairs}
            sampling = _recorded_sampling(_values(choice.sampling))
            notes = {**prompt.notes, **of_request, **choice.notes}
            if choice.reply.problem:
                notes["parse_problem"] = choice.reply.problem
            if truncates(choice.sampling):
                known = {is_known(support) for support in choice.supports} or {False}
                notes["supports"] = "some" if len(known) > 1 else "all" if True in known else "none"
            turn = Turn(
                session_id=session.info.session_id,
                seq=len(session.turns) + choice.index,
                parent=parent_seq,
                setup=setup,
                messages=new,
                reply=choice.reply.message(),
                added_ids=prompt.added.ids,
                added_provenance=prompt.added.provenance,
                completion_ids=np.array(choice.ids, dtype=np.int32),
                logprobs=np.array(choice.logprobs, dtype=np.float32),
                finish_reason=choice.finish_reason,
                stop=choice.stop,
                # A cause that lies in the prompt holds for every choice.
                fork="sibling" if choice.index and prompt.fork is None else fork,
                sampling={**sampling, **notes} if notes else sampling,
                engine=engine,
                weight_version=choice.weight_version,
                created_at=time.time(),
                digest="",
                weight_changes=tuple(choice.weight_changes),
                abort_cause=abort_cause,
                sampled_from=sampled_from(choice.sampling),
                # None if a server restarted in a different mode between two calls.
                logprobs_of=meanings.pop() if len(meanings) == 1 else None,
                resumes=tuple(
                    Resume(start, cause, None if name == engine else name)
                    for (start, cause), name in zip(choice.resumes, later, strict=True)
                ),
                adapter=choice.sampling.adapter,
            )
            turns.append(seal(turn, None if parent is None else parent.digest))
        return turns

    async def _write(
        self,
        opened: OpenSession,
        prompt: Prompt,
        turns: Sequence[Turn],
        answer: RecordedReply | None,
        payloads: Sequence[TurnPayload] = (),
    ) -> bool:
        """Write turns, with their session and setup if these are not stored yet, and only then add them in memory.

        Return False if another gateway has recorded turns in the session first. Those turns are loaded then, nothing is
        written, and the caller must build its turns again. They stay valid, because earlier turns never change.
        """
        setup = prompt.setup
        records: list[Record] = [*prompt.new_media, *turns, *payloads]
        due = self.checks.due(opened, prompt, turns)
        records += due
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
            if self.store.shared and (await self.sessions.catch_up(opened) or opened.deleted):
                return False
            raise
        opened.stored = True
        opened.setups.add(setup.digest)
        for turn in turns:
            opened.session.add(turn, prompt.point.key)
        if answer is not None:
            opened.remember(answer)
        self.checks.recorded(opened, setup, turns, due)
        # Do this last, because a failure here must not make memory and disk differ.
        self.telemetry.recorded(turns, len(prompt.ids))
        return True


def _payloads(prompt: Prompt, turns: Sequence[Turn], choices: Sequence[Choice]) -> list[TurnPayload]:
    """Return the per-token payloads for each turn, cut to the tokens that the turn added."""
    context, payloads = len(prompt.point.context_ids), list[TurnPayload | None]()
    for turn, choice in zip(turns, choices, strict=True):
        session_id, seq = turn.session_id, turn.seq
        payloads += (
            turn_payload(session_id, seq, payload.name, context, payload.start, payload.rows)
            for payload in choice.payloads
        )
        if any(choice.supports):
            supports = np.array(choice.supports, object)
            payloads.append(TurnPayload(session_id, seq, SUPPORTS, len(turn.added_ids), supports))
    return [payload for payload in payloads if payload is not None]


_NOT_RECORDED = ("session_id", "payloads_from", "supports")
_RECORDED = tuple(field.name for field in fields(SamplingParams) if field.name not in _NOT_RECORDED)
"""Sampling parameters that are recorded with a turn."""

_values = attrgetter(*_RECORDED)


@lru_cache(maxsize=256)
def _recorded_sampling(values: tuple[Any, ...]) -> Mapping[str, Any]:
    """Return the sampling parameters to record. Turns with equal parameters share a mapping."""
    pairs = zip(_RECORDED, values, strict=True)
    return {
        name: value
        for name, value in pairs
        if value is not None or name not in ("json_schema", "structural_tag", "adapter")
    }


def finish_of(turn: Turn, reply: Reply) -> Finish:
    """Return the finish reason that clients get for a recorded turn."""
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.calls_for_client else "stop"


def replayed(
    session: Session, answer: RecordedReply, reader_of: Callable[[Turn], ReplyParser], request: TurnRequest
) -> list[TurnEvent]:
    """Return the events of a recorded call, with one delta per choice.

    `reader_of` returns a parser like the one that parsed the turn's completion when it was sampled.
    """
    turns = [session.turns[seq] for seq in answer.turns]
    context = session.context_before(turns[0].seq)
    started = TurnStarted(answer.reply_id, answer.created_at, context, replayed=True)
    events: list[TurnEvent] = [structs.replace(started, sampling=request.sampling, overridden=request.overridden)]
    done: list[TurnEvent] = []
    for index, turn in enumerate(turns):
        reply = _read_again(turn, reader_of(turn))
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
        done.append(TurnDone(index, turn, reply, ReplyDelta(), finish_of(turn, reply)))
    return [*events, *done]


def _read_again(turn: Turn, reader: ReplyParser) -> Reply:
    """Parse the reply of a recorded turn again. Its tool calls have the ids that the client got.

    If parsing had failed, return the recorded reply, because how far a parser gets depends on the stream's chunks.
    """
    if problem := turn.sampling.get("parse_problem"):
        message, span = turn.reply, (0, len(turn.completion_ids))
        calls = [
            ToolCall(call["function"]["name"], call["function"]["arguments"], "ok", span, call["id"])
            for call in message.get("tool_calls", ())
        ]
        content, reasoning = message.get("content") or "", message.get("reasoning_content", "")
        return Reply(content, reasoning, tuple(calls), reasoning_open=False, problem=problem)
    reader.feed(turn.completion_ids.tolist())
    _, reply = reader.finish()
    recorded = iter(turn.reply.get("tool_calls", ()))
    calls = [
        call if call.status == "unclosed" else replace(call, id=next(recorded)["id"])
        for call in name_calls(reply.tool_calls, "")
    ]
    return replace(reply, tool_calls=tuple(calls))
