"""Turns with contexts rendered by a server: what is kept, and what happens if one does not extend the last turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.gateway.scripted import ScriptedEngine, run_turn
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import CAPTURED, SampleDelta, SamplingParams, StartedCompletion
from tokentape.errors import EngineContractError, EngineUnavailable, NotFound
from tokentape.gateway._app import create_app
from tokentape.gateway._choices import differs_at
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._limits import Limits
from tokentape.gateway._prompts import PromptBuilder
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Message, Provenance, TokenIds, Tool, Turn

Rerendering = Callable[[int, TokenIds], TokenIds]
"""From the number of the call and the ids of a plain rendering to those that the server uses."""

REPLIES = ["first answer<|im_end|>", "second answer<|im_end|>", "third answer<|im_end|>", "fourth<|im_end|>"]


class RenderingServer(ScriptedEngine):
    """A stateless chat server: renders all messages on each call, and lets a test change the ids."""

    def __init__(self, renderer: Renderer, replies: Sequence[str], **more: Any) -> None:
        super().__init__(renderer, replies, **more)
        self._renderer = renderer
        self.rerendering: Rerendering = lambda _, ids: ids
        self.begun: list[TokenIds] = []
        self.ended = 0
        """Calls that were read to their end or closed."""

    async def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
    ) -> StartedCompletion:
        setup = self._renderer.setup(tools, template_kwargs, "2026-01-01")
        ids = self.rerendering(len(self.begun), self._renderer.render(messages, setup).ids)
        self.begun.append(ids)
        deltas = self._named(ids, params, request_id)
        await anext(deltas)
        return StartedCompletion(ids, deltas)

    async def _named(self, ids: TokenIds, params: SamplingParams, request_id: str) -> AsyncGenerator[SampleDelta, None]:
        try:
            yield SampleDelta((), ())
            async with aclosing(self.sample(ids, params, stream=True, request_id=request_id)) as deltas:
                async for delta in deltas:
                    yield replace(delta, engine=f"{self.info} {CAPTURED}")
        finally:
            self.ended += 1


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def server(renderer: Renderer) -> RenderingServer:
    return RenderingServer(renderer, REPLIES)


@pytest.fixture
def turns(server: RenderingServer, renderer: Renderer, store: SqliteStore) -> Turns:
    return Turns(server, renderer, store, capture=server, limits=Limits(pause_patience=0.2))


def converse(turns: Turns, questions: Sequence[str], n: int = 1) -> list[Turn]:
    """The turns of a conversation in which each question follows the last reply."""

    async def main() -> list[Turn]:
        messages: list[Message] = []
        taken: list[Turn] = []
        for question in questions:
            messages.append(user(question))
            request = TurnRequest("s", tuple(messages), (), {}, SamplingParams(max_tokens=0), n=n)
            taken += [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
            messages.append(taken[-1].reply)
        return taken

    return asyncio.run(main())


def test_a_server_that_only_appends_is_captured_as_one_path(
    turns: Turns, server: RenderingServer, store: SqliteStore
) -> None:
    taken = converse(turns, ["a", "b", "c"])
    assert [(turn.parent, turn.fork) for turn in taken] == [(None, None), (0, None), (1, None)]
    stored = store.load_session("s")
    tree = stored.tree()
    for turn, sent in zip(stored.turns, server.begun, strict=True):
        assert tree.context_before(turn.seq).tolist() == sent.tolist()
    (trajectory,) = stored.trajectories()
    assert trajectory.verdict == "captured"
    assert (trajectory.provenance == Provenance.USER).sum() == 3


@pytest.mark.parametrize("at", [0, 7, -1])
def test_prompt_that_does_not_extend_the_last_turn_is_a_fork_with_its_position(
    turns: Turns, server: RenderingServer, store: SqliteStore, at: int
) -> None:
    def drifting(call: int, ids: TokenIds) -> TokenIds:
        changed = ids.copy()
        if call == 1:
            changed[at if at >= 0 else len(server.begun[0]) - 1] = 5
        return changed

    server.rerendering = drifting
    first, second, _ = converse(turns, ["a", "b", "c"])
    assert (second.parent, second.fork) == (None, "drift")
    expected = at if at >= 0 else len(first.added_ids) - 1
    assert second.sampling["drift"] == {"turn": first.seq, "token": expected}
    assert second.added_ids.tolist() == server.begun[1].tolist()
    # It is not what we would have rendered, so that nothing is known of each token but that the template wrote it.
    assert set(second.added_provenance.tolist()) == {Provenance.TEMPLATE}
    verdicts = [trajectory.verdict for trajectory in store.load_session("s").trajectories()]
    assert verdicts[0] == "captured"
    assert set(verdicts[1:]) == {"captured with drift"}


def test_a_prompt_in_which_the_template_drops_old_reasoning_drifts(renderer: Renderer, store: SqliteStore) -> None:
    thinking = "<think>\nfirst thought\n</think>\n\nfirst answer<|im_end|>"
    server = RenderingServer(renderer, [thinking, *REPLIES])
    turns = Turns(server, renderer, store, capture=server)
    first, second, third = converse(turns, ["a", "b", "c"])
    context = np.concatenate([first.added_ids, first.completion_ids])
    assert second.fork == "drift"
    assert second.sampling["drift"] == {"turn": 0, "token": differs_at(context, server.begun[1])}
    assert "first thought" not in renderer.tokenizer.decode(second.added_ids)
    # The server's ids are those that we render of the messages alone: so it is known where each is from.
    assert (second.added_provenance == Provenance.ASSISTANT).any()
    assert (third.parent, third.fork) == (1, None)


def test_choices_share_one_prompt(turns: Turns, server: RenderingServer) -> None:
    taken = converse(turns, ["a"], n=2)
    assert [(turn.parent, turn.fork) for turn in taken] == [(None, None), (None, "sibling")]
    assert len(server.begun) == 2


def test_every_choice_of_a_drifted_prompt_is_captured_with_drift(
    turns: Turns, server: RenderingServer, store: SqliteStore
) -> None:
    server.rerendering = lambda call, ids: np.where(np.arange(len(ids)) == 3, 5, ids) if call > 1 else ids
    taken = converse(turns, ["a", "b"], n=2)
    assert [(turn.parent, turn.fork) for turn in taken[2:]] == [(None, "drift")] * 2
    verdicts = [trajectory.verdict for trajectory in store.load_session("s").trajectories()]
    assert verdicts == ["captured", "forked: sibling", *["captured with drift"] * 2]


@pytest.mark.parametrize("paused", [True, False])
def test_first_call_waits_only_for_a_server_that_is_paused(
    turns: Turns, server: RenderingServer, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    monkeypatch.setattr("tokentape.gateway._turns.RETRY_SECONDS", 0)
    plain, refusals = server.begin, [EngineUnavailable("503"), EngineUnavailable("503")]
    for refusal in refusals:
        refusal.paused = paused

    async def refused(*args: Any, **more: Any) -> StartedCompletion:
        if refusals:
            raise refusals.pop()
        assert turns.gate.calls.count == 1
        return await plain(*args, **more)

    monkeypatch.setattr(server, "begin", refused)
    if paused:
        assert len(converse(turns, ["a"])) == 1
        assert refusals == []
    else:
        with pytest.raises(EngineUnavailable):
            converse(turns, ["a"])
        assert len(refusals) == 1
    assert turns.gate.calls.count == 0


@pytest.mark.parametrize("token_id", [-1, 1 << 20])
def test_prompt_with_an_id_outside_the_vocabulary_is_refused(
    turns: Turns, server: RenderingServer, store: SqliteStore, token_id: int
) -> None:
    server.rerendering = lambda _, ids: np.append(ids, np.int32(token_id))
    with pytest.raises(EngineContractError, match=f"returned id {token_id}, but the vocabulary ends at"):
        converse(turns, ["a"])
    assert server.ended == len(server.begun)
    with pytest.raises(NotFound):
        store.load_session("s")


def test_choices_from_different_prompts_are_refused(turns: Turns, server: RenderingServer, store: SqliteStore) -> None:
    server.rerendering = lambda call, ids: ids[call:]
    with pytest.raises(EngineContractError, match="the same messages to different ids"):
        converse(turns, ["a"], n=2)
    with pytest.raises(NotFound):
        store.load_session("s")


def test_prompt_ids_are_sent_unchanged(turns: Turns, server: RenderingServer) -> None:
    async def main() -> Turn:
        prompt = np.array([5, 6, 7], np.int32)
        request = TurnRequest("s", (), (), {}, SamplingParams(max_tokens=0), prompt_ids=prompt)
        (turn,) = [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
        return turn

    turn = asyncio.run(main())
    assert turn.added_ids.tolist() == [5, 6, 7]
    assert server.begun == []
    assert not turn.engine.endswith(CAPTURED)


def test_paused_gateway_sends_no_requests(turns: Turns, server: RenderingServer) -> None:
    turns.gate.close()
    with pytest.raises(EngineUnavailable, match="paused"):
        converse(turns, ["a"])
    assert server.begun == []


def test_partial_output_of_a_failed_call_is_recorded_as_aborted(
    turns: Turns, server: RenderingServer, store: SqliteStore
) -> None:
    server.fail_after, server.error = 1, EngineUnavailable("gone")
    with pytest.raises(EngineUnavailable, match="gone"):
        converse(turns, ["a"])
    (aborted,) = store.load_session("s").turns
    assert (aborted.finish_reason, len(aborted.completion_ids)) == ("abort", 1)
    assert turns.gate.calls.count == 0


def test_abandoned_call_is_aborted_at_the_server(turns: Turns, server: RenderingServer) -> None:
    server.stall_after = 1

    async def main() -> None:
        request = TurnRequest("s", (user("a"),), (), {}, SamplingParams(max_tokens=0), stream=True)
        async with aclosing(run_turn(turns, request)) as events:
            async for _ in events:
                if server.stalled.is_set():
                    break
                await asyncio.sleep(0)
        await turns.abort_all()

    asyncio.run(main())
    assert server.aborted.is_set()
    assert turns.gate.calls.count == 0


def test_started_call_is_closed_if_capturing_fails(
    turns: Turns, server: RenderingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise EngineUnavailable("injected")

    monkeypatch.setattr(PromptBuilder, "captured", fails)

    async def main() -> int:
        request = TurnRequest("s", (user("a"),), (), {}, SamplingParams(max_tokens=0))
        with pytest.raises(EngineUnavailable, match="injected"):
            await anext(run_turn(turns, request))
        return server.ended

    assert asyncio.run(main()) == 1
    assert turns.gate.calls.count == 0


@pytest.fixture
def http(turns: Turns) -> Iterator[httpx2.Client]:
    with running(create_app(turns, model_id="m")) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


def test_client_sees_no_difference_and_a_retry_is_replayed(http: httpx2.Client, server: RenderingServer) -> None:
    body = {"messages": [user("a")], "return_token_ids": True}
    replies = [
        http.post("/sessions/s/v1/chat/completions", json=body, headers={"idempotency-key": "k"}) for _ in range(2)
    ]
    first, again = [reply.json() for reply in replies]
    assert first["prompt_token_ids"] == server.begun[0].tolist()
    assert first["choices"] == again["choices"]
    assert len(server.begun) == 1
    assert http.get("/sessions/s").json()["leaves"][0]["verdict"] == "captured"


def test_prompt_shorter_than_the_context_forks_at_its_end() -> None:
    context = np.arange(5, dtype=np.int32)
    assert differs_at(context, context[:3]) == 3
    assert differs_at(context, context) == 5
    assert differs_at(context, np.arange(6, dtype=np.int32)) is None


def test_max_tokens_is_capped_to_the_context(turns: Turns, server: RenderingServer) -> None:
    server.info = replace(server.info, max_context=50)
    converse(turns, ["a"])
    assert server.requests[0][1].max_tokens == 50
