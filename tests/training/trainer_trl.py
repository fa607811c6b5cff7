"""Run by an interpreter that has TRL: its trainers over a gateway whose engine keeps a ledger; see trainer_live.py."""

from __future__ import annotations

import asyncio
import queue
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from tests.training import live
from tests.waiting import PATIENCE
from tokentape.client import Client, ClientSession
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.testing._rows import Row

NUMBERS = count()
"""Numbers of the sessions of a process, in the order of `live.KINDS`."""


async def in_order(base_url: str, api_key: str, task: Any) -> float | None:
    """The agent of the ledger. It fails from the sixth session on."""
    # A separate process has not set this.
    live.CLIENTS.update(live.THREE)
    return await live.agent(base_url, api_key, {"number": min(next(NUMBERS), 5)})


async def in_session(session: ClientSession, row: Any) -> float | None:
    return await in_order(session.base_url, session.api_key, row)


def trl() -> dict[str, Any]:
    """Return the inputs of `GRPOTrainer`'s loss. Only vLLM is replaced. The trainer takes one sequence per rollout."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tokentape.training.trl import GatewayRollouts, carry_rows, correct_by_recorded_logprobs, recorded_reward

    numbers, batches, calls = iter([0, 2, 3, 4, 5]), [], []

    async def agent(session: ClientSession, row: Any) -> float | None:
        return await live.agent(session.base_url, session.api_key, {"number": next(numbers)})

    with live.ledger_gateway() as url, Client(url) as client, tempfile.TemporaryDirectory() as output:
        rollouts = GatewayRollouts(client, agent, concurrency=1, failures="mask")

        def kept(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
            calls.append(rollouts(prompts, trainer))
            return dict(calls[-1])

        settings: dict[str, Any] = {"per_device_train_batch_size": 5, "num_generations": 5, "max_steps": 1}
        settings |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
        trainer = GRPOTrainer(
            str(MODEL),
            recorded_reward,
            args=GRPOConfig(output, gradient_checkpointing=False, scale_rewards="none", **settings),
            train_dataset=carry_rows(Dataset.from_dict({"task": [0]})),
            rollout_func=kept,
        )
        correct_by_recorded_logprobs(trainer)
        loss = trainer.compute_loss

        def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            batches.append(inputs)
            return loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        trainer.train()
        numbers, failed = iter([1]), ""
        try:
            rollouts([[{"role": "user", "content": "Go."}]], trainer)
        except InvalidRequest as error:
            failed = str(error).split(",")[0].split("' ")[-1]
    (batch,), (fields,) = batches, calls
    scored = zip(fields["prompt_ids"], fields["completion_ids"], fields["reward"], strict=True)
    reward_of = {(*prompt, *completion): reward for prompt, completion, reward in scored}
    rows = []
    for n, mask in enumerate(batch["completion_mask"]):
        prompt = batch["prompt_ids"][n][batch["prompt_mask"][n].bool()].tolist()
        long = int(mask.sum())
        columns = {"weights": mask * batch["tool_mask"][n], "logprobs": batch["sampling_per_token_logps"][n]}
        arrays = {name: [0.0] * len(prompt) + values[:long].tolist() for name, values in columns.items()}
        ids = prompt + batch["completion_ids"][n][:long].tolist()
        if any(arrays["weights"]):
            advantages = [float(batch["advantages"][n])] * len(ids)
            rows.append(Row(ids, **arrays, advantages=advantages, reward=reward_of[tuple(ids)]))
    names = {str(n): live.REWARDS[n] for n in (0, 2, 3, 4)}
    return {"rows": rows, "rewards": names, "failed": failed}


def trl_async() -> dict[str, Any]:
    """Return the rows that `AsyncGRPOTrainer` packs from our worker's samples. Only vLLM is replaced."""
    import trl.experimental.async_grpo  # noqa: F401 - fails here where TRL is missing

    from tokentape.training.trl import GatewayWorker

    with live.ledger_gateway() as url, Client(url) as client:
        worker = GatewayWorker(client, in_session, [{}], num_generations=6, concurrency=1, failures="skip")
        worker.start()
        made = six_of(worker)
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": packed_rows(made), "rewards": rewards, "failed": ""}


def six_of(worker: Any) -> list[Any]:
    """Yield the samples of TRL's worker while it is healthy, as its trainer takes them. Ends the worker."""
    made: list[Any] = []
    try:
        while len(made) < 6:
            worker.check_health(PATIENCE)
            with suppress(queue.Empty):
                made.append(worker.rollout_buffer.get(timeout=1.0))
    finally:
        worker.stop()
    return made


def packed_rows(samples: Sequence[Any]) -> list[Row]:
    """The terms of the loss of TRL's `TreeRow`, by sample."""
    from trl.experimental.async_grpo.packing import TreeRow

    packer, names = TreeRow(), ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    for item in samples:
        packer.add({name: getattr(item, name) for name in names})
    terms = {name: values.tolist() for name, values in packer.pack().items()}
    rows = []
    for n, item in enumerate(samples):
        arrays = {name: [0.0] * len(item.input_ids) for name in ("weights", "logprobs", "advantages")}
        for term, sample in enumerate(terms["segment_id"]):
            if sample == n:
                # A token is predicted at the one before it.
                at = terms["position_ids"][terms["token_index"][term]] + 1
                arrays["weights"][at] = 1.0
                arrays["logprobs"][at] = terms["old_log_probs"][term]
                arrays["advantages"][at] = terms["advantages"][term]
        rows.append(Row(item.input_ids.tolist(), **arrays, reward=item.metrics["reward"]))
    return rows


def openenv() -> dict[str, Any]:
    """TRL's `HarnessRolloutWorker` with the process that it spawns, over a gateway; only vLLM is replaced."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer

    with warnings.catch_warnings(action="ignore"):
        from trl.experimental.async_grpo import async_rollout_worker
        from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    from tokentape.training.openenv import GatewaySessions

    PartialState()  # As a trainer does.
    async_rollout_worker.is_vllm_available = lambda: True
    ledger, tokenizer = live.LEDGER[-1], AutoTokenizer.from_pretrained(MODEL)
    # For turns that TRL samples itself. Here it samples none, and it knows the templates of a few models only.
    tokenizer.response_schema = {}
    with live.ledger_gateway() as url:
        in_an_environment(url)
        ledger.calls.clear()
        worker = HarnessRolloutWorker(
            harness_session_factory=GatewaySessions(url, "tests.training.trainer_trl.in_order"),
            model_name=str(MODEL),
            dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}]}]),
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[],
            num_generations=6,
            max_inflight_tasks=1,
        )
        worker.update_model_version(7)
        worker.start()
        made = six_of(worker)
    assert {sample.model_version for sample in made} == {7}
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": packed_rows(made), "rewards": rewards, "failed": ""}


def in_an_environment(url: str) -> None:
    """OpenEnv's own tool loop in a session of its adapter for environments, as an agent."""
    from openenv.core.client_types import StepResult
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import (
        HarnessRunLimits,
        MCPHarnessAdapter,
        ResourceSessionFactory,
        StepEnvSessionAdapter,
        VerifyResult,
    )

    from tokentape.training.openenv import HarnessAgent

    ledger, steps = live.LEDGER[-1], []

    class Counter:
        def reset(self, **_: Any) -> Any:
            return StepResult(observation=0)

        def step(self, number: int) -> Any:
            steps.append(number)
            ledger.text = "Done."
            return StepResult(observation=number, reward=0.5)

        def state(self) -> None:
            return None

    class Factory(ResourceSessionFactory):
        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Any:
            return StepEnvSessionAdapter(
                Counter(),
                tool_specs=[Tool(name="add", description="Add.", input_schema={"type": "object", "properties": {}})],
                action_builder=lambda name, arguments: arguments["number"],
                initial_messages_builder=lambda result, _: [{"role": "user", "content": f"Task {task['number']}."}],
                verify_builder=lambda transcript, final, last, state: VerifyResult(env_reward=last.reward),
            )

    ledger.text = '<tool_call>\n{"name": "add", "arguments": {"number":  2}}\n</tool_call>'
    agent = HarnessAgent(Factory(), MCPHarnessAdapter(), HarnessRunLimits(sampling={"max_tokens": 60}))
    with Client(url) as client:
        session = client.session()
        assert asyncio.run(agent(session.base_url, "none", {"number": 8})) == 0.5
        (path,) = session.trajectories()
    assert steps == [2]
    # The second prompt continues the sampled tokens, spaces of the arguments included.
    first, second = ledger.calls
    assert second.prompt[: len(first.prompt + first.ids)] == first.prompt + first.ids
    assert path.verdict == "exact"
    assert path.token_ids.tolist() == second.prompt + second.ids
    ledger.text = None
