"""The gateway over NeMo-RL's generation handle, with its `BatchedDataDict` replaced; see also test_trainer_live.py."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import httpx2
import pytest
import torch

from tests.training import live
from tests.waiting import PATIENCE
from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.training.nemo_rl import PolicyGateway

CONFIG = {"max_new_tokens": 12, "temperature": 0.7, "top_p": 1.0, "top_k": None}
CONFIG |= {"vllm_cfg": {"max_model_len": 300, "logprobs_mode": "processed_logprobs"}}


class Generation:
    """`generate_async` of NeMo-RL's `VllmGeneration`."""

    def __init__(self) -> None:
        self.ledger = live.Ledger()

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        prompt = data["input_ids"][0].tolist()
        call = self.ledger.sample(prompt, 12, "s")
        made = {"output_ids": torch.tensor([prompt + call.ids])}
        made |= {"logprobs": torch.tensor([[0.0] * len(prompt) + call.logprobs])}
        made |= {"unpadded_sequence_lengths": torch.tensor([len(prompt + call.ids)])}
        yield 0, made | {"truncated": torch.tensor([call.finish == "length"])}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyGateway]:
    module = ModuleType("nemo_rl.distributed.batched_data_dict")
    module.BatchedDataDict = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with PolicyGateway(MODEL, CONFIG) as gateway:
        yield gateway


def ask(gateway: PolicyGateway, **fields: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "temperature": 0.7, "max_tokens": 12, **fields}
    return httpx2.post(f"{gateway.url}/sessions/s/v1/chat/completions", json=body, timeout=PATIENCE)


@pytest.mark.parametrize("text", [None, "many " * 20])
def test_tokens_sampled_by_the_handle_are_recorded(gateway: PolicyGateway, text: str | None) -> None:
    gateway.generation = generation = Generation()
    generation.ledger.text = text
    ask(gateway).raise_for_status()
    with Client(gateway.url) as client:
        (path,) = client.session("s").trajectories()
    (call,) = generation.ledger.calls
    assert path.token_ids.tolist() == call.prompt + call.ids
    assert path.logprobs[path.loss_mask].tolist() == call.logprobs
    assert path.finish_reasons == (call.finish,)


@pytest.mark.parametrize("asked", [{"temperature": 1.0}, {"max_tokens": 5}, {"top_p": 0.9}])
def test_call_that_the_handle_does_not_support_is_refused(gateway: PolicyGateway, asked: dict[str, Any]) -> None:
    gateway.generation = Generation()
    refused = ask(gateway, **asked)
    assert refused.status_code == 400
    assert "request the same values" in refused.text
    assert gateway.generation.ledger.calls == []


def test_calls_before_the_handle_exists_can_be_retried(gateway: PolicyGateway) -> None:
    refused = ask(gateway)
    assert (refused.status_code, "assign NeMo-RL's policy_generation before" in refused.text) == (503, True)
