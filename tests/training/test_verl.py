"""verl's agent loop over a server manager that keeps a ledger, with a class that has the fields of verl 0.9.1's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.training import live
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.testing._rows import Row
from tokentape.training.verl import AgentLoop

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@dataclass(kw_only=True)
class AgentLoopOutput:
    """verl/experimental/agent_loop/agent_loop.py of 0.9.1."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Any = None
    mm_processor_output: Any = None


class Config(dict[str, Any]):
    """The used parts of OmegaConf."""

    __getattr__ = dict.__getitem__


class Servers:
    """`LLMServerClient.generate` of verl/workers/rollout/llm_server.py, and `TokenOutput` of replica.py."""

    def __init__(self, ledger: live.Ledger) -> None:
        self.ledger = ledger
        self.asked: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        call = self.ledger.sample(prompt_ids, sampling_params["max_tokens"], request_id)
        steps = {"min_global_steps": int(call.version), "max_global_steps": int(call.version)}
        output = {"token_ids": call.ids, "log_probs": call.logprobs, "stop_reason": "completed", "extra_fields": steps}
        return SimpleNamespace(**output | self.changes)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    module = ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopOutput = AgentLoopOutput  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    live.LEDGER.append(live.Ledger())
    yield Servers(live.LEDGER[-1])
    live.LEDGER.clear()


def loop_of(servers: Servers, *, use_v1: bool = True, **options: Any) -> AgentLoop:
    rollout = Config(
        name="vllm",
        prompt_length=200,
        response_length=300,
        max_model_len=None,
        logprobs_mode="processed_logprobs",
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    )
    config = Config(actor_rollout_ref=Config(rollout=rollout | options.pop("rollout", {}), model=Config()))
    config.actor_rollout_ref["rollout"] = Config(config.actor_rollout_ref.rollout)
    config["trainer"] = Config(use_v1=use_v1)
    return AgentLoop(
        SimpleNamespace(config=config),
        servers,
        SimpleNamespace(name_or_path=str(MODEL)),
        agent="tests.training.live.agent",
        name="tokentape",
        processor=None,
        **options,
    )


def ran(loop: AgentLoop, number: int, sampling: dict[str, Any] = SAMPLING) -> Any:
    return asyncio.run(loop.run(dict(sampling), uid="u", session_id=number, number=number, raw_prompt=[]))


def row_of(output: Any) -> Row:
    before = len(output.prompt_ids)
    return Row(
        [*output.prompt_ids, *output.response_ids],
        [*[0] * before, *output.response_mask],
        [*[0.0] * before, *output.response_logprobs],
        reward=output.reward_score,
        truncated=output.extra_fields["truncated"],
        temperature=output.extra_fields["temperature"],
        weight_versions={str(output.extra_fields[f"{name}_global_steps"]) for name in ("min", "max")},
    )


def test_verl_gets_the_tokens_that_its_servers_sampled(servers: Servers) -> None:
    async def all_kinds() -> list[list[Any]]:
        loops = [loop_of(servers) for _ in live.KINDS]
        runs = [loop.run(dict(SAMPLING), uid="u", session_id=n, number=n) for n, loop in enumerate(loops)]
        # In sequence: one of them changes the weights.
        return [await run for run in runs]

    outputs = asyncio.run(all_kinds())
    names = [made[0].extra_fields["session_id"] for made in outputs]
    golden = live.golden_of(servers.ledger.calls, dict(zip(names, live.REWARDS, strict=True)))
    rows = [row_of(output) for made in outputs for output in made]
    assert [len(made) for made in outputs] == [1, 2, 1, 1, 1]
    assert live.checked(golden, rows)[::2] == (set(), set())
    assert {output.extra_fields["group"] for made in outputs for output in made} == {"u"}


def test_agent_settings_do_not_change_verl_s_sampling(servers: Servers) -> None:
    ran(loop_of(servers), 0, SAMPLING | {"temperature": 0.6})
    assert {request["temperature"] for request in servers.asked} == {0.6}
    assert all(request["logprobs"] and request["top_k"] == -1 for request in servers.asked)


def test_an_agent_that_raises_or_takes_too_long_fails_its_rollout(servers: Servers) -> None:
    with pytest.raises(RuntimeError, match="the agent failed"):
        ran(loop_of(servers), 5)
    with pytest.raises(TimeoutError):
        ran(loop_of(servers, seconds=0.0), 8)


def test_agent_without_calls_gives_no_output_and_verl_computes_a_missing_reward(servers: Servers) -> None:
    assert ran(loop_of(servers), 6) == []
    (output,) = ran(loop_of(servers), 7)
    assert output.reward_score is None
    assert output.extra_fields["reward_extra_info"] == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", [{"temperature": 0}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 20}])
def test_validation_with_separate_settings_has_no_logprobs(servers: Servers, setting: dict[str, float]) -> None:
    (output,) = ran(loop_of(servers, rollout={"logprobs_mode": "raw_logprobs"}), 0, SAMPLING | setting)
    assert output.response_logprobs is None
    assert output.reward_score == 1.0


def test_training_with_logprobs_that_verl_does_not_compute_is_refused(servers: Servers) -> None:
    with pytest.raises(InvalidRequest, match="after truncation"):
        ran(loop_of(servers, rollout={"top_p": 0.7}), 0, SAMPLING | {"top_p": 0.7})


def test_old_trainer_gets_a_single_output(servers: Servers) -> None:
    assert ran(loop_of(servers, use_v1=False), 0).reward_score == 1.0
    with pytest.raises(InvalidRequest, match="2 branches"):
        ran(loop_of(servers, use_v1=False), 1)


def test_both_weight_versions_of_a_call_are_named(servers: Servers) -> None:
    servers.changes = {"extra_fields": {"min_global_steps": 3, "max_global_steps": 5}}
    (output,) = ran(loop_of(servers), 0)
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 5)


def test_logprobs_of_an_unknown_distribution_are_refused(servers: Servers) -> None:
    with pytest.raises(InvalidRequest, match="a distribution that is not known"):
        ran(loop_of(servers, rollout={"name": "trtllm"}), 0)
