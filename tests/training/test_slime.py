"""slime's and Miles' generate function over a router that keeps a ledger; `Sample` as slime 624b824a8 has it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import pytest

from tests.training import live
from tests.waiting import PATIENCE
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.testing._rows import Row
from tokentape.training.slime import generating, normalized_rewards

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 80, "stop": None, "no_stop_trim": True}


@dataclass
class Sample:
    """slime/utils/types.py; Miles has the same fields."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: Any = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    """The fields that the test's agent reads."""

    def get_reward_value(self, args: Any) -> Any:
        return self.reward


@dataclass
class Input:
    """`GenerateFnInput` of miles/rollout/base_types.py."""

    args: Any
    sample: Any
    sampling_params: Any
    evaluation: bool
    state: Any


@dataclass
class GenerateFnOutput:
    """miles/rollout/base_types.py."""

    samples: Any


class Router:
    """`post` of slime/utils/http_utils.py, and SGLang's `/generate`."""

    def __init__(self, ledger: live.Ledger) -> None:
        self.ledger = ledger
        self.asked: list[dict[str, Any]] = []
        self.state = SimpleNamespace(aborted=False)
        """`GenerateState` of slime/rollout/sglang_rollout.py."""
        self.abort: dict[str, int] | None = None
        """Fields of an abort other than its type."""

    async def post(self, url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
        self.asked.append({"url": url, **payload["sampling_params"]})
        if self.abort is not None:
            self.state.aborted = not self.abort
            return {"meta_info": {"finish_reason": {"type": "abort", **self.abort}}}
        sampling = payload["sampling_params"]
        call = self.ledger.sample(payload["input_ids"], sampling["max_new_tokens"], headers["X-SMG-Routing-Key"])
        end = {"type": call.finish} | ({"matched": call.ids[-1]} if call.finish == "stop" else {})
        pairs = [(logprob, token_id, None) for logprob, token_id in zip(call.logprobs, call.ids, strict=True)]
        about = {"finish_reason": end, "output_token_logprobs": pairs, "weight_version": call.version}
        return {"text": "", "meta_info": about}


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    router = Router(live.Ledger())
    for name, stub in {"utils.http_utils": "post", "rollout.sglang_rollout": "GenerateState"}.items():
        module = ModuleType(f"slime.{name}")
        setattr(module, stub, router.post if stub == "post" else lambda args: router.state)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Sample, "__module__", "slime.utils.types")
    live.LEDGER.append(router.ledger)
    yield router
    live.LEDGER.clear()


ARGS = SimpleNamespace(
    hf_checkpoint=str(MODEL),
    sglang_router_ip="127.0.0.1",
    sglang_router_port=3000,
    router_policy="consistent_hashing",
    rollout_max_context_len=None,
    rollout_stop_token_ids=None,
    partial_rollout=False,
)


def ran(numbers: Any, sampling: dict[str, Any] = SAMPLING, **options: Any) -> list[list[Any]]:
    evaluation = options.pop("evaluation", False)
    generate = generating("tests.training.live.agent", **options)

    async def each() -> list[list[Any]]:
        samples = [Sample(4, n, prompt="p", label="l", metadata={"own": 1}, number=n) for n in numbers]
        return [await generate(ARGS, sample, dict(sampling), evaluation=evaluation) for sample in samples]

    return asyncio.run(each())


def row_of(sample: Any) -> Row:
    before = [0] * (len(sample.tokens) - sample.response_length)
    return Row(
        sample.tokens,
        [*before, *sample.loss_mask],
        [*before, *sample.rollout_log_probs],
        reward=sample.reward,
        truncated=sample.status.value == "truncated",
        weight_versions=set(sample.weight_versions),
    )


def test_slime_gets_the_tokens_that_its_router_sampled(router: Router) -> None:
    made = ran(range(5))
    names = [samples[0].metadata["session_id"] for samples in made]
    golden = live.golden_of(router.ledger.calls, dict(zip(names, live.REWARDS, strict=True)))
    assert [len(samples) for samples in made] == [1, 2, 1, 1, 1]
    assert live.findings_of(golden, [row_of(sample) for samples in made for sample in samples]) == set()
    for n, samples in enumerate(made):
        assert {(sample.group_index, sample.index, sample.rollout_id) for sample in samples} == {(4, n, n)}
        assert {(sample.prompt, sample.label, sample.metadata["own"]) for sample in samples} == {("p", "l", 1)}
        assert all(sample.response.endswith("<|im_end|>") or sample.status.value == "truncated" for sample in samples)


def test_slime_passes_the_evaluation_flag_and_miles_its_whole_input() -> None:
    names = list(inspect.signature(generating("tests.training.live.agent")).parameters)
    # Miles takes a function of three or more parameters for the older interface.
    assert names == ["call_args", "evaluation"]


@pytest.mark.parametrize(
    ("number", "why"), [(5, "the agent failed"), (6, "completed no model call"), (8, "took too long")]
)
def test_failed_rollout_is_a_sample_without_loss(router: Router, number: int, why: str) -> None:
    ((sample,),) = ran([number], **({"seconds": 0.0} if number == 8 else {}))
    assert sample.status.value == "aborted"
    assert sample.remove_sample
    assert (sample.loss_mask, sample.reward, sample.response_length) == ([0], 0.0, 1)
    assert why in sample.metadata["abort_reason"]


@pytest.mark.parametrize("why", [{}, {"status_code": 500}])
def test_calls_aborted_by_slime_or_an_error_are_not_retried(router: Router, why: Any) -> None:
    router.abort = why
    ((sample,),) = ran([0])
    assert sample.status.value == "aborted"
    assert len(router.asked) == 1


def test_aborted_call_response_forbids_client_retries(router: Router) -> None:
    router.abort = {}
    replies: list[str] = []

    async def agent(base_url: str, api_key: str, task: Any) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            replies.append((await client.post(f"{base_url}/chat/completions", json=body)).headers["x-should-retry"])

    asyncio.run(generating(agent)(ARGS, Sample(), dict(SAMPLING)))
    assert replies == ["false"]


def test_no_call_is_sent_after_slime_has_enough_samples(router: Router) -> None:
    class State:
        aborted = property(lambda self: len(router.asked) > 1)

    router.state = State()  # type: ignore[assignment]
    ((sample,),) = ran([0])
    assert sample.status.value == "aborted"
    assert len(router.asked) == 2


def test_call_aborted_for_new_weights_continues_with_them(router: Router) -> None:
    router.ledger.aborts = True
    ((sample,),) = ran([4])
    (_, call, _) = router.ledger.calls
    golden = live.golden_of(router.ledger.calls, {call.session: live.REWARDS[4]})
    assert (call.earlier, call.version, sample.weight_versions) == (("7", "7"), "8", ["7", "7", "8", "8"])
    assert live.findings_of(golden, [row_of(sample)]) == set()


def test_version_spans_match_those_of_sglang(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    post = router.post

    async def with_spans(*arguments: Any, **more: Any) -> Any:
        reply = await post(*arguments, **more)
        ids = len(reply["meta_info"]["output_token_logprobs"])
        spans = [{"version": "5", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": ids}]
        reply["meta_info"]["weight_versions"] = spans
        return reply

    monkeypatch.setattr(sys.modules["slime.utils.http_utils"], "post", with_spans)
    ((sample,),) = ran([0])
    assert sample.weight_versions == ["5", "7"] * 3


def test_miles_reports_whether_its_rollout_has_ended(router: Router) -> None:
    router.state.aborted = True
    sample = Sample(4, 0, prompt="p", number=0)
    arguments = {"args": ARGS, "sample": sample, "sampling_params": dict(SAMPLING), "evaluation": False}
    generate = generating("tests.training.live.agent")
    for aborted, status in ((False, "completed"), (True, "aborted")):
        made = asyncio.run(generate(Input(**arguments, state=SimpleNamespace(aborted=aborted))))
        assert isinstance(made, GenerateFnOutput)
        assert [item.status.value for item in made.samples] == [status]


def test_evaluation_gives_a_sample_at_any_temperature(router: Router) -> None:
    ((sample,),) = ran([1], SAMPLING | {"temperature": 0.0}, evaluation=True)
    assert (sample.reward, sample.rollout_log_probs) == (0.0, None)
    assert {request["temperature"] for request in router.asked} == {0.0}


@pytest.mark.parametrize(
    ("args", "sampling", "message"),
    [
        ({"partial_rollout": True}, {}, "--partial-rollout"),
        ({"lora_rank": 8}, {}, "LoRA"),
        ({}, {"custom_params": {"return_top_p_token_ids": True}}, "--rollout-top-p 1.0"),
    ],
)
def test_settings_that_would_train_wrongly_are_refused(args: Any, sampling: Any, message: str) -> None:
    generate = generating("tests.training.live.agent")
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(generate(SimpleNamespace(**vars(ARGS) | args), Sample(), SAMPLING | sampling))


def test_rewards_are_normalized_with_each_rollout_counted_once() -> None:
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)
    samples = [Sample(0, 0, 0, reward=1.0), Sample(0, 0, 0, reward=1.0), Sample(0, 1, 1, reward=0.0)]
    samples += [Sample(1, 2, 2, reward=0.5), Sample(1, 3, 3, reward=0.0, remove_sample=True)]
    assert normalized_rewards(args, samples) == ([1.0, 1.0, 0.0, 0.5, 0.0], [0.5, 0.5, -0.5, 0.0, 0.0])
    args.grpo_std_normalization = True
    assert normalized_rewards(args, samples)[1][:3] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)], abs=1e-5)
    samples[1].reward = 0.25
    with pytest.raises(InvalidRequest, match=r"rollout 0 have rewards 1 and 0.25"):
        normalized_rewards(args, samples)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True)
    with pytest.raises(InvalidRequest, match="the reward of rollout 7 is nan: set a finite number"):
        normalized_rewards(args, [Sample(0, 7, 7, reward=float("nan"))])
