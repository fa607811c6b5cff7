"""Sessions under random events, compared with a model of plain lists: the replies that clients received.

It drives `Turns` as the endpoints do, on its own event loop, without sockets: thousands of steps take minutes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.gateway.scripted import ScriptedEngine, run_turn
from tests.waiting import PATIENCE
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SamplingParams
from tokentape.errors import Conflict, EngineError, EngineUnavailable, IdempotencyMismatch, NotFound
from tokentape.gateway._events import Attempt, TurnDelta, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._limits import Limits
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, verify

SESSIONS = ("a", "b", "c")
GRACE = 0.02
REPLIES = (
    "Answer {0}: pears are 12.<|im_end|>",
    "<think>\nhm {0}\n</think>\n\nPlums are {0}.<|im_end|>",
    'One moment, {0}.\n<tool_call>\n{{"name": "lookup", "arguments": {{"item": "{0}"}}}}\n</tool_call><|im_end|>',
    "Cut short at {0}",
    "<think>\nstill thinking about {0}",
)
"""A reply each in turn; the number makes it the only one of its kind. The last two do not end by themselves."""

TOOLS = ({"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}},)

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Node:
    """A reply that a client received, as far as the client knows it."""

    messages: tuple[Any, ...]
    """The request's messages and the reply."""
    ids: list[int]
    """The context that was sent, and the sampled ids."""
    sampled: list[int]
    parent: int | None


@dataclass
class Call:
    """A call as a client remembers it, to send it again."""

    session: str
    messages: tuple[Any, ...]
    n: int
    stream: bool
    key: str | None
    digest: str
    received: list[int] | None = None
    """The turns of a reply that came whole."""

    def request(self, *, retried: bool = False) -> TurnRequest:
        return TurnRequest(
            session_id=self.session,
            messages=self.messages,
            tools=TOOLS,
            template_kwargs={},
            sampling=SamplingParams(max_tokens=0),
            n=self.n,
            stream=self.stream,
            attempt=Attempt(self.digest, self.key, retried=retried),
        )


@dataclass
class CallResult:
    """The events of one call, put together."""

    prompt: list[int] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, TurnDone] = field(default_factory=dict)
    replayed: bool = False


def history(messages: Sequence[Any]) -> str:
    """The message fields that the gateway compares: all but reasoning, which many harnesses omit."""
    plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    return json.dumps(plain, sort_keys=True)


def agreement(known: Sequence[Any], sent: Sequence[Any]) -> int:
    """How many replies were sent with the reasoning that they had."""
    pairs = zip(known, sent, strict=True)
    return sum(bool(b.get("reasoning_content")) and a == b for a, b in pairs if a["role"] == "assistant")


def holds(whole: list[int], part: list[int]) -> bool:
    """Whether `part` is a contiguous part of `whole`."""
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


class Machine(RuleBasedStateMachine):
    """Rules are actions of clients and the world; each checks the session that it changed."""

    renderer: Renderer
    replies: Mapping[tuple[int, ...], str]
    """Texts by their ids: each reply is sampled at most once."""
    steps: Counter[str]

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="tokentape-machine-"))
        self.nodes: dict[str, dict[int, Node]] = {}
        """Per session that exists its turns, aborted ones left out, by `seq`: the model."""
        self.calls: list[Call] = []
        self.count = 0
        self.engine = ScriptedEngine(self.renderer, list(self.replies.values()))
        self.unsaid = {*self.replies}
        self.open(self.root / "0")

    def open(self, directory: Path) -> None:
        self.directory = directory
        # Only the death of the process is tried here, so nothing need reach the disk itself.
        self.store = SqliteStore.open(directory, synchronous="NORMAL")
        self.turns = Turns(self.engine, self.renderer, self.store, limits=Limits(retry_grace=GRACE))

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    async def receive(self, call: Call, *, retried: bool = False) -> CallResult:
        """Take a call and read its events to the end."""
        result = CallResult()
        async with aclosing(run_turn(self.turns, call.request(retried=retried))) as events:
            async for event in events:
                match event:
                    case TurnStarted():
                        result.prompt, result.replayed = event.prompt_ids.tolist(), event.replayed
                    case TurnDelta():
                        result.ids.setdefault(event.choice, []).extend(event.sampled.token_ids)
                    case TurnDone():
                        result.done[event.choice] = event
        assert sorted(result.done) == list(range(call.n))
        return result

    def new_call(self, session: str, at: int, edit: str, n: int, stream: bool, keyed: bool) -> Call:
        """A call that continues one of the session's turns, or edits the history before it."""
        self.count += 1
        nodes = [*self.nodes.get(session, {}).values()]
        messages: list[Any] = list(nodes[at % len(nodes)].messages) if nodes else []
        if edit == "first" or not messages:
            messages = []
        elif edit == "same question":
            # A shorter history, ending with a question that was answered before.
            del messages[max(at for at, message in enumerate(messages) if message["role"] != "assistant") + 1 :]
        elif edit != "go on":
            where = at % len(messages)
            if edit == "truncate":
                messages = messages[:where]
                while messages and messages[-1]["role"] != "assistant":
                    messages.pop()
            elif edit == "drop reasoning":
                messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
            else:
                messages[where] = {**messages[where], "content": f"edited {self.count}"}
        if not messages or messages[-1]["role"] == "assistant":
            calls = messages[-1].get("tool_calls", ()) if messages else ()
            for known_call in calls:
                messages.append({"role": "tool", "tool_call_id": known_call["id"], "content": f"price {self.count}"})
            if not calls:
                messages.append({"role": "user", "content": f"question {self.count}"})
        key = f"key-{self.count}" if keyed else None
        call = Call(session, tuple(messages), n, stream, key, f"{self.count:064x}")
        self.calls.append(call)
        return call

    def expected_parent(self, call: Call) -> int | None:
        """The turn with the longest history that begins the call's messages.

        Of equals the one with most of its reasoning in the call, then the last.
        """
        nodes = self.nodes.get(call.session, {})
        for end in range(len(call.messages), 0, -1):
            sent = call.messages[:end]
            same = [seq for seq, node in nodes.items() if history(node.messages) == history(sent)]
            if same:
                return max(same, key=lambda seq: (agreement(nodes[seq].messages, sent), seq))
        return None

    def note(self, call: Call, result: CallResult, parent: int | None) -> None:
        """Check a new reply against the model, and add it."""
        assert not result.replayed
        nodes = self.nodes.setdefault(call.session, {})
        context = [] if parent is None else nodes[parent].ids
        assert result.prompt[: len(context)] == context, "the context is not that of the turn before"
        for message in call.messages:
            same = [node for node in nodes.values() if history(node.messages[-1:]) == history([message])]
            agreeing = [node for node in same if agreement(node.messages[-1:], [message])] or same
            kept = any(holds(result.prompt, node.sampled) for node in agreeing)
            assert kept or not same, "a reply that was kept is not there as it was sampled"
        siblings = any(node.parent == parent for node in nodes.values())
        call.received = [result.done[choice].turn.seq for choice in range(call.n)]
        for choice in range(call.n):
            turn = result.done[choice].turn
            ids = result.ids[choice]
            assert tuple(ids) in self.unsaid, "ids that the engine never returned"
            self.unsaid.remove(tuple(ids))
            assert turn.completion_ids.tolist() == ids
            assert (turn.parent, turn.fork is not None) == (parent, siblings or choice > 0)
            nodes[turn.seq] = Node((*call.messages, turn.reply), result.prompt + ids, ids, parent)

    def check(self, session: str, aborted: int | None = None) -> None:
        """The record of a session is the model's lists: no token less, none more."""
        nodes = self.nodes.get(session)
        if nodes is None:
            with pytest.raises(NotFound):
                self.store.load_session(session)
            return
        stored = self.store.load_session(session)
        kept = [turn for turn in stored.turns if turn.finish_reason != "abort"]
        assert [turn.seq for turn in kept] == sorted(nodes)
        if aborted is not None:
            assert len(stored.turns) - len(kept) == aborted
        parents = {node.parent for node in nodes.values()}
        leaves = sorted(node.ids for seq, node in nodes.items() if seq not in parents)
        found = trajectories(Session(stored.info, stored.turns))
        assert sorted(trajectory.token_ids.tolist() for trajectory in found) == leaves
        trained = sum(int(trajectory.loss_mask.sum()) for trajectory in found)
        assert trained == sum(len(node.sampled) for node in nodes.values())

    def aborted(self, session: str) -> int:
        """How many aborted turns a session has."""
        if session not in self.nodes:
            return 0
        return sum(turn.finish_reason == "abort" for turn in self.store.load_session(session).turns)

    session = st.sampled_from(SESSIONS)
    at = st.integers(0, 30)
    edit = st.sampled_from(["go on"] * 4 + ["first", "same question", "edit", "truncate", "drop reasoning"])
    shape: ClassVar[dict[str, Any]] = {
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "stream": st.booleans(),
        "keyed": st.booleans(),
    }

    @rule(session=session)
    def create(self, session: str) -> None:
        if session in self.nodes:
            with pytest.raises(Conflict):
                self.run(self.turns.create_session(session, {}))
        else:
            self.run(self.turns.create_session(session, {}))
            self.nodes[session] = {}
        self.check(session)
        self.steps["create"] += 1

    @rule(session=session, at=at, edit=edit, **shape)
    def turn(self, session: str, at: int, edit: str, **shape: Any) -> None:
        call = self.new_call(session, at, edit, **shape)
        parent = self.expected_parent(call)
        self.note(call, self.run(self.receive(call)), parent)
        self.check(session)
        self.steps[f"turn: {edit}"] += 1

    @rule(session=session, at=at, edit=edit, **shape)
    def turn_joined_by_its_retry(self, session: str, at: int, edit: str, **shape: Any) -> None:
        call = self.new_call(session, at, edit, **shape)
        parent = self.expected_parent(call)
        requests = len(self.engine.requests)

        async def both() -> list[CallResult]:
            first = asyncio.create_task(self.receive(call))
            await self.until(lambda: len(self.engine.requests) > requests)
            return list(await asyncio.gather(first, self.receive(call, retried=True)))

        original, retry = self.run(both())
        assert (original.ids, original.prompt) == (retry.ids, retry.prompt)
        assert len(self.engine.requests) == requests + call.n
        original.replayed = False
        self.note(call, original, parent)
        self.check(session)
        self.steps["joined retry"] += 1

    @rule(session=session, at=at)
    def turns_at_once(self, session: str, at: int) -> None:
        calls = [self.new_call(session, at, "go on", n=1, stream=bool(i % 2), keyed=False) for i in range(3)]
        parent = self.expected_parent(calls[0])

        async def together() -> list[CallResult]:
            return list(await asyncio.gather(*map(self.receive, calls)))

        replies = list(zip(calls, self.run(together()), strict=True))
        for call, result in sorted(replies, key=lambda pair: pair[1].done[0].turn.seq):
            self.note(call, result, parent)
        self.check(session)
        self.steps["turns at once"] += 1

    @rule(at=at)
    def retry(self, at: int) -> None:
        # No preconditions: they would depend on how races went, which hypothesis takes for a flaky test.
        if not self.calls:
            return
        call = self.calls[-1 - at % min(len(self.calls), 40)]
        self.retry_call(call)
        self.check(call.session)
        self.steps["retry"] += 1

    @rule(at=at)
    def key_with_another_body(self, at: int) -> None:
        keyed = [call for call in self.calls if call.key and call.received]
        if not keyed:
            return
        call = keyed[at % len(keyed)]
        other = Call(call.session, call.messages, call.n, call.stream, call.key, "f" * 64)
        with pytest.raises(IdempotencyMismatch):
            self.run(self.receive(other))
        self.check(call.session)
        self.steps["key with another body"] += 1

    @rule(session=session, at=at, edit=edit, after=st.integers(0, 3), back=st.booleans(), **shape)
    def client_leaves(self, session: str, at: int, edit: str, after: int, back: bool, **shape: Any) -> None:
        """Before anything was sampled or after some tokens, for good; it may have come back in between."""
        aborted = self.aborted(session)
        call = self.new_call(session, at, edit, **shape)

        async def leave(*, retried: bool) -> None:
            if call.stream or not after:
                await read_on(retried=retried)
                return
            # A client that does not stream gets no delta to leave at: it leaves while the engine samples.
            if not retried:
                self.engine.stalled.clear()
            reading = asyncio.create_task(read_on(retried=retried))
            await self.until(lambda: reading.done() or self.engine.stalled.is_set())
            reading.cancel()
            await asyncio.wait([reading])

        async def read_on(*, retried: bool) -> None:
            deltas = 0
            async with aclosing(run_turn(self.turns, call.request(retried=retried))) as events:
                async for event in events:
                    deltas += isinstance(event, TurnDelta)
                    if deltas == after * call.n:
                        break

        async def leave_for_good() -> None:
            self.engine.stall_after = after
            await leave(retried=False)
            if back and not (call.stream and after):
                await leave(retried=True)
            await self.idle()
            self.engine.stall_after = None

        self.run(leave_for_good())
        self.nodes.setdefault(session, {})
        self.check(session, aborted + call.n)
        self.steps["client leaves"] += 1

    @rule(session=session, at=at, edit=edit, **shape)
    def client_comes_back(self, session: str, at: int, edit: str, **shape: Any) -> None:
        """It leaves before it has read anything and asks again within the grace: one generation, one reply."""
        call = self.new_call(session, at, edit, **shape)
        parent = self.expected_parent(call)
        requests = len(self.engine.requests)

        async def leave_and_return() -> CallResult:
            first = asyncio.create_task(self.receive(call))
            for _ in range(at % 7):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                return first.result()
            return await self.receive(call, retried=True)

        result = self.run(leave_and_return())
        generations = len(self.engine.requests) - requests
        # A started stream can't be joined: it is aborted, and the retry is a new call.
        assert generations == call.n or (call.stream and generations == 2 * call.n)
        result.replayed = False
        self.note(call, result, parent)
        self.check(session)
        self.steps["client comes back"] += 1

    @rule(session=session, at=at, edit=edit, after=st.integers(0, 3), **shape)
    def engine_fails(self, session: str, at: int, edit: str, after: int, **shape: Any) -> None:
        aborted = self.aborted(session)
        call = self.new_call(session, at, edit, **shape)
        self.engine.fail_after, self.engine.error = after, EngineError("injected")
        with pytest.raises(EngineError):
            self.run(self.receive(call))
        self.run(self.idle())
        self.engine.fail_after = self.engine.error = None
        if session in self.nodes or after:
            self.nodes.setdefault(session, {})
        self.check(session, aborted + (call.n if after else 0))
        self.steps["engine fails"] += 1

    @rule(session=session)
    def delete(self, session: str) -> None:
        if session not in self.nodes:
            with pytest.raises(NotFound):
                self.run(self.turns.delete_session(session))
        else:
            self.run(self.turns.delete_session(session))
        self.forget(session)
        self.check(session)
        self.steps["delete"] += 1

    @rule(session=session, at=at, edit=edit, **shape)
    def delete_during_a_turn(self, session: str, at: int, edit: str, **shape: Any) -> None:
        call = self.new_call(session, at, edit, **shape)
        gate = self.engine.gate = threading.Event()

        async def both() -> None:
            requests = len(self.engine.requests)
            receiving = asyncio.create_task(self.receive(call))
            await self.until(lambda: len(self.engine.requests) > requests)
            await self.turns.delete_session(session)
            gate.set()
            with pytest.raises(NotFound):
                await receiving
            self.engine.gate = None

        self.run(both())
        self.forget(session)
        self.check(session)
        self.steps["delete during a turn"] += 1

    def forget(self, session: str) -> None:
        self.nodes.pop(session, None)
        self.calls = [call for call in self.calls if call.session != session]

    @rule()
    def reopen(self) -> None:
        self.run(self.turns.abort_all())
        self.store.close()
        self.open(self.directory)
        for session in self.nodes:
            self.check(session)
        self.steps["reopen"] += 1

    @rule(session=session, at=at, edit=edit, wait=st.integers(0, 60), retried=st.booleans(), **shape)
    def crash(self, session: str, at: int, edit: str, wait: int, retried: bool, **shape: Any) -> None:
        """The process dies during a call: only its files at that moment remain."""
        call = self.new_call(session, at, edit, **shape)
        parent = self.expected_parent(call)
        image = self.root / str(self.count)

        async def die() -> CallResult | None:
            receiving = asyncio.create_task(self.receive(call))
            for _ in range(wait):
                await asyncio.sleep(0)
            result = receiving.result() if receiving.done() else None
            shutil.copytree(self.directory, image, ignore=shutil.ignore_patterns("*-shm"))
            # What follows happens in a process that is dead already.
            await self.turns.abort_all()
            with suppress(EngineUnavailable, asyncio.CancelledError):
                await receiving
            return result

        outcome = self.run(die())
        self.store.close()
        shutil.rmtree(self.directory)
        self.open(image)
        if outcome is not None:
            self.note(call, outcome, parent)
        else:
            self.adopt(call, parent)
        assert verify(image).findings == ()
        for name in {*self.nodes, session}:
            self.check(name)
        self.steps["crash"] += 1
        if retried:
            self.steps["retry of what was lost in a crash"] += outcome is None and call.received is not None
            self.retry_call(call)
            self.check(session)

    def retry_call(self, call: Call) -> None:
        """A retry gets the recorded reply, even if no client received it; otherwise it is a new call."""
        requests, parent = len(self.engine.requests), self.expected_parent(call)
        result = self.run(self.receive(call, retried=True))
        if call.received is None:
            self.note(call, result, parent)
            return
        assert result.replayed
        assert [result.done[choice].turn.seq for choice in range(call.n)] == call.received
        for choice, seq in enumerate(call.received):
            assert result.prompt + result.ids[choice] == self.nodes[call.session][seq].ids
        assert len(self.engine.requests) == requests

    def adopt(self, call: Call, parent: int | None) -> None:
        """Add the turns of a call that was committed but not received when the process died: all or none of them."""
        try:
            stored = self.store.load_session(call.session)
        except NotFound:
            assert call.session not in self.nodes
            return
        nodes = self.nodes.setdefault(call.session, {})
        unacknowledged = [turn for turn in stored.turns if turn.finish_reason != "abort" and turn.seq not in nodes]
        assert len(unacknowledged) in (0, call.n)
        for turn in unacknowledged:
            ids = turn.completion_ids.tolist()
            assert turn.parent == parent
            context = [] if parent is None else nodes[parent].ids
            prompt = context + turn.added_ids.tolist()
            nodes[turn.seq] = Node((*call.messages, turn.reply), prompt + ids, ids, parent)
            self.unsaid.remove(tuple(ids))
        if unacknowledged:
            call.received = [turn.seq for turn in unacknowledged]

    async def idle(self) -> None:
        """Return when no call is under way."""
        await self.until(lambda: not any(opened.calls for opened in self.turns.sessions))

    async def until(self, holds_now: Callable[[], bool]) -> None:
        """Let the event loop run until something holds."""
        while not holds_now():  # noqa: ASYNC110 - no event is set for it
            # Asking without a pause would take the interpreter from the threads that are waited for.
            await asyncio.sleep(0.001)

    def teardown(self) -> None:
        try:
            self.run(self.turns.abort_all())
            self.store.close()
            assert verify(self.directory).findings == ()
            with SqliteStore.open(self.directory) as self.store:
                for session in SESSIONS:
                    self.check(session)
        finally:
            self.store.close()
            self.loop.close()
            shutil.rmtree(self.root)


@pytest.mark.parametrize(
    ("examples", "steps"), [(3, 20), pytest.param(300, 60, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_record_equals_the_replies_that_clients_received(renderer: Renderer, examples: int, steps: int) -> None:
    texts = [REPLIES[number % len(REPLIES)].format(number) for number in range(8 * steps)]
    Machine.renderer = renderer
    Machine.replies = {tuple(renderer.tokenizer.encode_plain(text)): text for text in texts}
    Machine.steps = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        # Not to explain: that traces every line that is run.
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(Machine, settings=profile)
    print(sum(Machine.steps.values()), "steps:", dict(Machine.steps.most_common()))
