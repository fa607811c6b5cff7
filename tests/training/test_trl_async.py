"""TRL's asynchronous trainer over the gateway: several versions of the weights, several branches of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from tests.training.data_paths import trl_asynchronous
from tests.training.trl_runs import ShopAgent
from tests.waiting import PATIENCE
from tokentape.client import Client, ClientSession
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.testing.samples import check_samples
from tokentape.training._collate import group_advantages
from tokentape.training._samples import Sample, assemble
from tokentape.training.trl import GatewayWorker, PolicyTransfer, Row, recorded_reward, serving
from tokentape.training.trl._asynchronous import _rollout_sample
from tokentape.types import MediaSpan

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:You are importing from 'trl.experimental'")


@pytest.fixture
def client(gateway_url: str) -> Iterator[Client]:
    with Client(gateway_url) as client:
        yield client


def ask(session: ClientSession, text: str) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "seed": 1}
    httpx2.post(f"{session.base_url}/chat/completions", json=body, timeout=PATIENCE).raise_for_status()


class Numbered:
    """Rewards 0, 1, 0, 1... and the number of branches of the row."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, session: ClientSession, row: Row) -> float:
        self.runs += 1
        reward = float(self.runs % 2)
        for number in range(row["branches"]):
            ask(session, f"Number {number}?")
        return reward


def taken(worker: GatewayWorker, number: int) -> list[Any]:
    worker.start()
    try:
        return [worker.rollout_buffer.get(timeout=PATIENCE) for _ in range(number)]
    finally:
        worker.stop()


def test_each_branch_is_a_sample_with_the_session_s_advantage(client: Client) -> None:
    worker = GatewayWorker(client, Numbered(), [{"branches": 2}], num_generations=2, concurrency=1)
    samples = taken(worker, 4)
    assert [sample.group_id for sample in samples] == [0] * 4
    assert [round(sample.advantage, 3) for sample in samples] == [1, 1, -1, -1]
    paths = [
        path for summary in list(client.sessions())[:2] for path in client.session(summary.session_id).trajectories()
    ]
    for sample, path in zip(samples, paths, strict=True):
        np.testing.assert_array_equal(sample.input_ids, path.token_ids)
        np.testing.assert_array_equal(sample.completion_mask, path.loss_mask)
        np.testing.assert_array_equal(sample.old_log_probs, path.logprobs)
        assert sample.old_log_probs.dtype == np.float32
        assert sample.model_version == 0


def test_rows_repeat_and_each_repetition_is_a_group(client: Client) -> None:
    rows = [{"branches": 1, "prompt": "a"}, {"branches": 1, "prompt": "b"}]
    worker = GatewayWorker(client, Numbered(), rows, num_generations=2, concurrency=1)
    samples = taken(worker, 6)
    assert [sample.group_id for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.prompt for sample in samples] == ["a", "a", "b", "b", "a", "a"]


class Sometimes:
    def __call__(self, session: ClientSession, row: Row) -> float:
        ask(session, "Once?")
        if row["fails"]:
            raise RuntimeError("tool broke")
        return 1.0


def test_an_agent_that_fails_ends_the_rollouts_or_is_skipped(client: Client) -> None:
    rows = [{"fails": True}, {"fails": False}]
    worker = GatewayWorker(client, Sometimes(), rows, num_generations=2, concurrency=1)
    worker.start()
    while worker._thread.is_alive():
        time.sleep(0.01)
    with pytest.raises(TokentapeError, match=r"the agent of session .* raised"):
        worker.check_health(60.0)
    worker.stop()
    skipping = GatewayWorker(client, Sometimes(), rows, num_generations=2, concurrency=1, failures="skip")
    assert [sample.group_id for sample in taken(skipping, 4)] == [1, 1, 3, 3]


def test_agents_without_calls_are_reported(client: Client) -> None:
    worker = GatewayWorker(client, Sometimes(), [{"fails": False}], num_generations=2)
    worker.check_health(60.0)
    with pytest.raises(TokentapeError, match=r"no agent has finished for 0 s; raise heartbeat_stale_after_s"):
        worker.check_health(0.0)


def test_weights_named_by_the_engine_count_from_session_start(gateway_url: str) -> None:
    with Client(gateway_url) as client:
        worker = GatewayWorker(client, Numbered(), [{"branches": 1}], num_generations=2)
        worker.update_model_version(5)
        (sample, _) = taken(worker, 2)
        # The embedded engine's default is "0".
        assert sample.model_version == 0
        named = replace(single_sample(client), weight_spans=((0, 1, "default"),), metadata={"version": 5})
        assert _rollout_sample(named, {}, 0, {}).model_version == 5


def test_sample_with_images_is_refused(gateway_url: str) -> None:
    with Client(gateway_url) as client:
        sample = replace(single_sample(client), media=(MediaSpan(0, 1, "hash", "hash"),))
    with pytest.raises(InvalidRequest, match="has 1 images"):
        _rollout_sample(sample, {}, 0, {})


def single_sample(client: Client) -> Sample:
    session = client.session(metadata={"group": "0"})
    ask(session, "Once?")
    session.reward(1.0)
    return group_advantages(assemble(session.trajectories(), group="group").samples)[0]


def test_group_of_a_single_session_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="num_generations is 1 and the dataset has 1 rows"):
        GatewayWorker(client, Sometimes(), [{}], num_generations=1)


def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float | None, **tree: Any) -> Any:
    """Compute attention as TRL's GPU-only kernel does: each segment attends to its own path."""
    query, key, value = (tensor[0] for tensor in (query, key, value))
    heads = query.shape[0] // key.shape[0]
    out = torch.empty_like(query)
    starts, paths = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    for n in range(len(starts) - 1):
        path = tree["tree_kv_index"][paths[n] : paths[n + 1]]
        segment = slice(starts[n], starts[n + 1])
        seen = torch.ones(starts[n + 1] - starts[n], len(path), dtype=torch.bool)
        seen = seen.tril(seen.shape[1] - seen.shape[0])
        of_path = (tensor[:, path].repeat_interleave(heads, 0) for tensor in (key, value))
        out[:, segment] = torch.nn.functional.scaled_dot_product_attention(
            query[:, segment], *of_path, attn_mask=seen, scale=scaling
        )
    return out.transpose(0, 1)[None], None


@pytest.mark.slow
def test_trl_s_asynchronous_trainer_trains_on_the_recorded_ids(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(packing, "tree_attention", attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    rows = [{"task": number, "prompt": ""} for number in range(4)]
    args = AsyncGRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=3,
        learning_rate=1e-3,
        token_budget=-1,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    with serving(model_dir, threads=1) as policy:
        worker = GatewayWorker(policy.client, ShopAgent(), rows, num_generations=2, concurrency=4)
        trainer = AsyncGRPOTrainer(
            str(model_dir),
            recorded_reward,
            args=args,
            train_dataset=_dataset(rows),
            rollout_worker=worker,
            weight_transfer=PolicyTransfer(policy),
        )
        trainer.train()
        versions = {
            version
            for summary in policy.client.sessions()
            for path in policy.client.session(summary.session_id).trajectories()
            for _, _, version in path.weight_spans
        }
        assert policy.client.engine().weight_version == "4"
    log = [line for line in trainer.state.log_history if "ratio" in line]
    # The first step trains the weights that sampled; later samples may be of older weights, which the ratio shows.
    assert log[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert abs(log[0]["kl"]) < 1e-6
    assert len(log) == 3
    assert "1" in versions
    assert versions <= {"1", "2", "3", "4"}


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def test_conformance_kit_passes_and_raw_logprobs_at_1_4_are_refused() -> None:
    report = check_samples(trl_asynchronous)
    assert [name for name, finding_list in report.goldens.items() if finding_list] == []
    assert "--logprobs-mode processed_logprobs" in report.refused["sampled at 1.4, recorded at 1"]
    assert all(all(caught.values()) for caught in report.planted.values())
