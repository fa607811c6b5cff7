"""The gateway in a trainer's process: a rollout's view of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.training import live
from tokentape.demo import MODEL
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.training._live import Rollout, imported, live_gateway


@pytest.fixture
def ledger() -> Iterator[live.Ledger]:
    live.LEDGER.append(live.Ledger())
    yield live.LEDGER[-1]
    live.LEDGER.clear()


def rollout_of(ledger: live.Ledger, number: int) -> Rollout:
    async def sample(handle: live.Ledger, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        call = handle.sample(prompt_ids, params.max_tokens, str(params.session_id))
        return SampleDelta(tuple(call.ids), tuple(call.logprobs), call.finish)

    async def run() -> Rollout:
        names = frozenset({"stop_token_ids"})
        about: Any = {"name": "ledger", "sampling": names, "logprobs_mode": "processed_logprobs"}
        gateway = await live_gateway(MODEL, sample, max_context=500, **about)
        return await gateway.run(live.agent, {"number": number}, group="g", handle=ledger)

    return asyncio.run(run())


def test_samples_contain_role_and_lineage(ledger: live.Ledger) -> None:
    samples = rollout_of(ledger, live.KINDS.index("forked")).samples
    # The second turn of the fork is a side call: a branch continues without it.
    lineages = {
        sample.turns: (sample.role, [(edge.kind, edge.turn, edge.parent) for edge in sample.lineage])
        for sample in samples
    }
    assert lineages == {(0, 1, 3): ("main", []), (0, 2): ("side_call", [("side_call", 2, 0)])}


@pytest.mark.parametrize("name", ["tests.training.live.nothing", "no_such_package.agent", "agent"])
def test_invalid_agent_name_error_describes_the_expected_form(name: str) -> None:
    assert imported("tests.training.live.agent", "agent") is live.agent
    with pytest.raises(InvalidRequest, match=rf"stop_rule '{name}' can't be imported .*expected package") as refused:
        imported(name, "stop_rule")
    assert refused.value.param == "stop_rule"
