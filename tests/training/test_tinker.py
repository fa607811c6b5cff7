"""The cookbook's strategy over a sampling client that keeps a ledger, called as by tinker-cookbook 0.6.1."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.training import live
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.testing._rows import Row
from tokentape.training.tinker import AgentRollouts


class ModelInput(list[int]):
    def to_ints(self) -> list[int]:
        return list(self)

    @classmethod
    def from_ints(cls, ids: list[int]) -> ModelInput:
        return cls(ids)


@dataclass
class Transition:
    ob: ModelInput
    ac: tuple[list[int], list[float]]
    reward: float
    episode_done: bool
    metrics: dict[str, float] = field(default_factory=dict)


class StopReason(StrEnum):
    MAX_TOKENS = "max_tokens"
    COMPLETED = "completed"


class Rollouts(AgentRollouts):
    model_dir, max_context = MODEL, 500


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[live.Ledger]:
    batches: dict[str, dict[str, Any]] = {
        "tinker": {"ModelInput": ModelInput},
        "tinker_cookbook": {},
        "tinker_cookbook.completers": {"TokensWithLogprobs": lambda ids, logprobs: (ids, logprobs)},
        "tinker_cookbook.rl": {},
        "tinker_cookbook.rl.rollout_strategy": {"RolloutResult": SimpleNamespace},
        "tinker_cookbook.rl.types": {
            "StopReason": StopReason,
            "Transition": Transition,
            "Trajectory": lambda transitions, final, stop_reason: SimpleNamespace(
                transitions=transitions, stop_reason=stop_reason
            ),
        },
    }
    for name, names in batches.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    live.LEDGER.append(live.Ledger())
    yield live.LEDGER[-1]
    live.LEDGER.clear()


def trajectories_of(
    ledger: live.Ledger, *numbers: int, temperature: float = 1.0, strategy: AgentRollouts | None = None
) -> list[Any]:
    lock, client = asyncio.Lock(), live.TinkerClient(ledger)

    async def agent(base_url: str, api_key: str, task: Any) -> float | None:
        async with lock:
            return await live.agent(base_url, api_key, task)

    class Policy:
        max_tokens = 80

        async def __call__(self, prompt: ModelInput, stop: list[int], *, max_tokens: int) -> Any:
            sampled = await client.sample(prompt, 1, SimpleNamespace(max_tokens=min(max_tokens, self.max_tokens)))
            return sampled.sequences[0]

    async def make_envs() -> list[Any]:
        return [SimpleNamespace(number=n) for n in numbers]

    policy, strategy = Policy(), strategy or Rollouts()
    policy.temperature, strategy.agent = temperature, agent  # type: ignore[attr-defined,misc]
    return list(asyncio.run(strategy.execute(SimpleNamespace(make_envs=make_envs), policy)).trajectories)


def rows_of(trajectory: Any) -> Iterator[Row]:
    """Return a row per datum. An observation that continues no earlier transition begins a new datum."""
    row: Row | None = None
    reward = sum(transition.reward for transition in trajectory.transitions)
    about: dict[str, Any] = {"reward": reward, "truncated": trajectory.stop_reason == "max_tokens"}
    for transition in trajectory.transitions:
        if row is None or transition.ob[: len(row.token_ids)] != row.token_ids:
            if row is not None:
                yield row
            row = Row([], [], [], **about)
        ids, logprobs = transition.ac
        added = transition.ob[len(row.token_ids) :]
        row.token_ids.extend([*added, *ids])
        row.weights.extend([0] * len(added) + [1] * len(ids))
        row.logprobs.extend([0.0] * len(added) + logprobs)
    if row is not None:
        yield row


def test_transitions_equal_the_tokens_that_the_client_sampled(ledger: live.Ledger) -> None:
    made = trajectories_of(ledger, *range(len(live.KINDS)))
    assert [len(trajectory.transitions) for trajectory in made] == [3, 4, 3, 3, 3]
    assert [trajectory.transitions[-1].episode_done for trajectory in made] == [True] * 5
    golden = live.golden_of(ledger.calls, {str(n): reward for n, reward in enumerate(live.REWARDS)})
    assert live.checked(golden, [row for trajectory in made for row in rows_of(trajectory)])[::2] == (set(), set())


@pytest.mark.parametrize(("number", "error"), [(5, "the agent failed"), (6, "completed no model call")])
def test_an_agent_that_fails_fails_its_group(ledger: live.Ledger, number: int, error: str) -> None:
    with pytest.raises((RuntimeError, InvalidRequest), match=error):
        trajectories_of(ledger, 7, number)


def test_another_temperature_is_refused(ledger: live.Ledger) -> None:
    with pytest.raises(InvalidRequest, match="sample at 1"):
        trajectories_of(ledger, 7, temperature=0.7)
