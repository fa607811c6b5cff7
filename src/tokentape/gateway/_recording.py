"""Record a call that has been sampled: its turns are sealed, checked and written, or kept as aborted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from sys import intern
from typing import Any

import numpy as np

from tokentape._session.chain import seal
from tokentape._session.invariants import check_completion, check_turn
from tokentape._session.payloads import turn_payload
from tokentape._session.tree import Session
from tokentape._supports import SUPPORTS, is_known
from tokentape.chat._parse import Reply
from tokentape.engines._base import Engine, SamplingParams
from tokentape.engines._distributions import logprobs_of, sampled_from, truncates
from tokentape.errors import CommitRace, Conflict, InvariantViolation, NotFound, TokentapeError
from tokentape.gateway._bridge_checks import BridgeChecks
from tokentape.gateway._choices import Choice
from tokentape.gateway._events import Finish, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._prompts import Prompt
from tokentape.gateway._session_cache import OpenSession, SessionCache
from tokentape.gateway._telemetry import Telemetry
from tokentape.store import Record, Store
from tokentape.types import RecordedReply, Resume, Turn, TurnPayload

_log = logging.getLogger("tokentape.gateway")


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes turns: first to the store, then, and only then, to the session in memory."""

    store: Store
    sessions: SessionCache
    telemetry: Telemetry
    engine: Engine
    vocab_size: int
    """Ids at or above this are not accepted."""
    checks: BridgeChecks | None = None

    async def commit(
        self,
        opened: OpenSession,
        prompt: Prompt,
        choices: Sequence[Choice],
        started: TurnStarted,
        request: TurnRequest,
    ) -> list[TurnDone]:
        """Record all choices of a call at once. Raises, with nothing committed, if an invariant does not hold."""
        async with opened.lock:
            while True:
                if opened.deleted:
                    raise NotFound(f"session {opened.session_id!r} was deleted while this turn was being sampled")
                if self.store.shared and opened.answer_to(request.attempt) is not None:
                    raise CommitRace("another gateway has answered this call; send it again to get its reply")
                turns = self._turns(opened.session, prompt, choices)
                for turn in turns:
                    check_completion(turn.completion_ids, turn.logprobs, self.vocab_size)
                    check_turn(turn, prompt.context_ids, prompt.ids)
                answer = _answer(opened, turns, choices, started, request)
                # A client that leaves now must not tear the record in memory from the one on disk.
                writing = self._write(opened, prompt, turns, answer, _payloads(prompt, turns, choices))
                if await asyncio.shield(writing):
                    break
        self.telemetry.metrics.cached_tokens.inc(sum(choice.cached_tokens or 0 for choice in choices))
        return [
            TurnDone(choice.index, turn, choice.reply, choice.rest, finish_of(turn, choice.reply), choice.cached_tokens)
            for choice, turn in zip(choices, turns, strict=True)
            if choice.reply is not None
        ]

    async def commit_aborted(
        self, opened: OpenSession, prompt: Prompt, choices: Sequence[Choice], request: TurnRequest, cause: str
    ) -> None:
        """Record the tokens of a call that has no answer."""
        async with opened.lock:
            if not self.store.healthy:
                return
            for choice in choices:
                if choice.reply is None:
                    choice.end()
                choice.finish_reason, choice.stop = "abort", None
            try:
                while not opened.deleted:
                    turns = self._turns(opened.session, prompt, choices, abort_cause=cause)
                    if await self._write(opened, prompt, turns, None):
                        break
            except TokentapeError as error:
                _log.warning("an aborted turn could not be recorded (%s)", error.code)

    def _turns(
        self, session: Session, prompt: Prompt, choices: Sequence[Choice], abort_cause: str | None = None
    ) -> list[Turn]:
        """Return the turns of the choices of a call, sealed."""
        parent = prompt.parent
        parent_seq = None if parent is None else parent.seq
        fork = prompt.fork or session.fork_cause(parent_seq, prompt.messages, prompt.setup.digest)
        turns = []
        for choice in choices:
            assert choice.finish_reason is not None
            assert choice.reply is not None
            # One text for all turns, which are kept in memory.
            engine, *later = (intern(one or str(self.engine.info)) for one in choice.engines)
            reported = {bool(one) for one in choice.supports} or {False}
            meanings = {
                logprobs_of(one, choice.sampling, supports=given) for one in (engine, *later) for given in reported
            }
            sampling = _recorded_sampling(_values(choice.sampling))
            notes = {**prompt.notes, **choice.notes}
            if choice.reply.problem:
                notes["parse_problem"] = choice.reply.problem
            if truncates(choice.sampling):
                kept = {is_known(one) for one in choice.supports} or {False}
                notes["supports"] = "some" if len(kept) > 1 else "all" if True in kept else "none"
            turn = Turn(
                session_id=session.info.session_id,
                seq=len(session.turns) + choice.index,
                parent=parent_seq,
                setup=prompt.setup.digest,
                messages=prompt.messages,
                reply=reply_message(choice.reply),
                added_ids=prompt.added.ids,
                added_provenance=prompt.added.provenance,
                completion_ids=np.array(choice.ids, dtype=np.int32),
                logprobs=np.array(choice.logprobs, dtype=np.float32),
                finish_reason=choice.finish_reason,
                stop=choice.stop,
                fork="sibling" if choice.index else fork,
                sampling={**sampling, **notes} if notes else sampling,
                engine=engine,
                weight_version=choice.weight_version,
                created_at=time.time(),
                digest="",
                weight_changes=tuple(choice.weight_changes),
                abort_cause=abort_cause,
                sampled_from=sampled_from(choice.sampling),
                # A server that came back in another mode between two calls: one name does not fit all.
                logprobs_of=meanings.pop() if len(meanings) == 1 else None,
                resumes=tuple(
                    Resume(start, cause, None if one == engine else one)
                    for (start, cause), one in zip(choice.resumes, later, strict=True)
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
        """Write turns with what they need that is not stored yet; then, and only then, add them in memory.

        Return False if another gateway has recorded something of the session first: then that is loaded, nothing is
        written, and the turns have to be made again after it. They fit, because turns before them never change.
        """
        setup = prompt.setup
        records: list[Record] = [*prompt.new_media, *turns, *payloads]
        due = [] if self.checks is None else self.checks.due(opened, prompt, turns)
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
            opened.session.add(turn)
        if answer is not None:
            opened.remember(answer)
        if self.checks is not None:
            self.checks.recorded(opened, setup, turns, due)
        # Last: what fails here must not tear the record in memory from the one on disk.
        self.telemetry.recorded(turns, len(prompt.ids))
        return True


def _answer(
    opened: OpenSession,
    turns: Sequence[Turn],
    choices: Sequence[Choice],
    started: TurnStarted,
    request: TurnRequest,
) -> RecordedReply | None:
    """Return what the reply to a retry of a call is made from."""
    if request.attempt is None:
        return None
    tops = tuple(tuple(choice.top_logprobs) for choice in choices)
    return RecordedReply(
        session_id=opened.session_id,
        reply_id=started.reply_id,
        turns=tuple(turn.seq for turn in turns),
        key=request.attempt.key,
        body_digest=request.attempt.body_digest,
        created_at=started.created_at,
        top_logprobs=tops if any(tops) else (),
    )


def _payloads(prompt: Prompt, turns: Sequence[Turn], choices: Sequence[Choice]) -> list[TurnPayload]:
    """Return the engine's payloads per token, cut to what each turn added."""
    context = len(prompt.context_ids)
    found = [
        turn_payload(turn.session_id, turn.seq, one.name, context, one.start, one.rows)
        for turn, choice in zip(turns, choices, strict=True)
        for one in choice.payloads
    ]
    found += [
        TurnPayload(turn.session_id, turn.seq, SUPPORTS, len(turn.added_ids), np.array(choice.supports, object))
        for turn, choice in zip(turns, choices, strict=True)
        if any(choice.supports)
    ]
    return [one for one in found if one is not None]


_NOT_RECORDED = ("session_id", "payloads_from", "supports")
_RECORDED = tuple(one.name for one in fields(SamplingParams) if one.name not in _NOT_RECORDED)
"""Sampling parameters that are recorded with a turn."""

_values = attrgetter(*_RECORDED)


@lru_cache(maxsize=256)
def _recorded_sampling(values: tuple[Any, ...]) -> Mapping[str, Any]:
    """Return the recorded parameters: one mapping for all turns that were sampled alike."""
    named = zip(_RECORDED, values, strict=True)
    return {name: value for name, value in named if value is not None or name not in ("json_schema", "adapter")}


def finish_of(turn: Turn, reply: Reply) -> Finish:
    """Return why a recorded turn ended, as replies to clients say it."""
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.calls_for_client else "stop"


def reply_message(reply: Reply) -> dict[str, Any]:
    """Return the assistant message of a reply. Later requests that contain it continue this turn."""
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
