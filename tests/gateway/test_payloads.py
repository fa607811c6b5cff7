"""Rows per token, from an engine through turns and forks to what a trainer reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gateway.scripted import ScriptedEngine, run_turn
from tokentape._session.arrow import write_parquet
from tokentape._session.files import read_trajectories
from tokentape._session.jsonl import read_jsonl, write_jsonl
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import Payload, SampleDelta, SamplingParams
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds, Trajectory, Turn


def routed(ids: np.ndarray) -> np.ndarray:
    """The row of each token: its position, and a hash of all tokens before it."""
    return np.stack([np.arange(len(ids)), np.cumsum(ids) % 30_011], axis=1).astype(np.int32)[:, None]


class RoutingEngine(ScriptedEngine):
    """Reports the experts of each token but the last, from the requested position."""

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        sampled: list[int] = []
        async for delta in super().sample(prompt_ids, params, stream=stream, request_id=request_id):
            sampled += delta.token_ids
            if delta.finish_reason is not None and params.payloads_from is not None:
                ids = np.concatenate([prompt_ids, np.array(sampled[:-1], np.int32)])
                rows = routed(ids)[params.payloads_from :]
                yield replace(delta, payloads=(Payload("routed_experts", params.payloads_from, rows),))
            else:
                yield delta


REPLIES = ["one<|im_end|>", "two<|im_end|>", "three", "four<|im_end|>", "five<|im_end|>", "six<|im_end|>"]
HONOURED = frozenset({"temperature", "stop_token_ids", "payloads_from"})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def forked_session(engine: ScriptedEngine, renderer: Renderer, store: SqliteStore, *, payloads: bool) -> None:
    """A root, a separate branch, a reply in two choices, a reply cut short and continued, an edited history."""
    turns = Turns(engine, renderer, store, payloads=payloads)

    async def say(*messages: Any, n: int = 1) -> list[Turn]:
        request = TurnRequest("s", messages, (), {}, SamplingParams(max_tokens=0), n=n)
        return [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]

    async def main() -> None:
        (first,) = await say(user("a"))
        _, cut = await say(user("a"), first.reply, user("b"), n=2)
        await say(user("a"), first.reply, user("b"), cut.reply, user("c"))
        await say(user("a"), first.reply, user("instead of b"))
        await say(user("edited a"), first.reply, user("b"))

    asyncio.run(main())


def assert_rows(trajectories: list[Trajectory]) -> None:
    """Each token has the row that the engine reported in this branch; only the last one has none."""
    for trajectory in trajectories:
        payload = trajectory.payloads["routed_experts"]
        expected = routed(trajectory.token_ids)
        expected[-1] = 0
        np.testing.assert_array_equal(payload.rows, expected)
        assert payload.known.tolist() == [True] * (len(trajectory.token_ids) - 1) + [False]


def test_every_token_of_every_branch_has_its_own_row_in_store_and_exports(
    renderer: Renderer, store: SqliteStore, tmp_path: Path
) -> None:
    engine = RoutingEngine(renderer, REPLIES, sampling=HONOURED)
    forked_session(engine, renderer, store, payloads=True)
    stored = store.load_session("s", per_token=True)
    assert [turn.fork for turn in stored.turns] == [None, None, "sibling", None, "branched", "edited_history"]
    recorded = stored.trajectories()
    assert len(recorded) == 4
    assert_rows(recorded)
    write_parquet(recorded, tmp_path / "t.parquet")
    assert_rows(read_trajectories(tmp_path / "t.parquet"))
    write_jsonl(recorded, tmp_path / "t.jsonl")
    assert_rows(list(read_jsonl(tmp_path / "t.jsonl")))


def test_only_the_last_rows_of_a_parent_are_fetched_twice(renderer: Renderer, store: SqliteStore) -> None:
    engine = RoutingEngine(renderer, REPLIES, sampling=HONOURED)
    forked_session(engine, renderer, store, payloads=True)
    stored = store.load_session("s", per_token=True)
    tree = stored.tree()
    for turn, (_, params), payload in zip(stored.turns, engine.requests, stored.payloads, strict=True):
        context = len(tree.context_before(turn.seq)) - len(turn.added_ids)
        assert params.payloads_from == max(context - 1, 0)
        assert (payload.turn, payload.start) == (turn.seq, -1 if context else 0)
        assert len(payload.rows) == len(turn.added_ids) + len(turn.completion_ids) - (0 if context else 1)
        assert "payloads_from" not in turn.sampling


def test_rows_are_requested_only_if_configured(renderer: Renderer, store: SqliteStore) -> None:
    engine = RoutingEngine(renderer, REPLIES, sampling=HONOURED)
    forked_session(engine, renderer, store, payloads=False)
    assert {params.payloads_from for _, params in engine.requests} == {None}
    assert store.load_session("s", per_token=True).payloads == ()


def test_engine_without_rows_gets_no_row_requests_and_a_log_line(
    renderer: Renderer, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RoutingEngine(renderer, REPLIES, sampling=HONOURED - {"payloads_from"})
    forked_session(engine, renderer, store, payloads=True)
    assert {params.payloads_from for _, params in engine.requests} == {None}
    assert "none are recorded" in caplog.text
