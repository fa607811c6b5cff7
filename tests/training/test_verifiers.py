"""verifiers' harness over a vLLM server that keeps a ledger, called as by verifiers 0.4.1.dev86."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.training import live
from tests.training.scripted_sessions import TOOL_CALL
from tokentape.demo import MODEL
from tokentape.demo.tasks import TOOLS
from tokentape.errors import InvalidRequest
from tokentape.testing._rows import Row
from tokentape.training.verifiers import AgentHarness


class Harness(AgentHarness):
    agent = "tests.training.live.agent"


class Fields(dict[str, Any]):
    """The used parts of a pydantic model."""

    __getattr__ = dict.__getitem__

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self)

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Fields:
        return cls(values)


class Trace(SimpleNamespace):
    def record_reward(self, name: str, value: float) -> None:
        self.rewards[name] = value


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[live.Ledger]:
    package, base = ModuleType("verifiers.v1"), ModuleType("verifiers.v1.clients.base")
    package.MessageNode, package.ModelCall = Fields, Fields  # type: ignore[attr-defined]
    package.ProgramResult = lambda code, out, err: code  # type: ignore[attr-defined]
    base.build_async_openai = lambda config: AsyncOpenAI(  # type: ignore[attr-defined]
        base_url=config.base_url, api_key="EMPTY", max_retries=0
    )
    for module in (ModuleType("verifiers"), package, ModuleType("verifiers.v1.clients"), base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["verifiers"].v1 = package  # type: ignore[attr-defined]
    live.LEDGER.append(live.Ledger())
    yield live.LEDGER[-1]
    live.LEDGER.clear()


def traces_of(ledger: live.Ledger, *numbers: int, client: str = "train", **sampling: Any) -> list[Trace]:
    """Run a rollout of each number, in sequence: one of them changes the weights."""

    async def run() -> list[Trace]:
        traces = []
        async with live.vllm_server(ledger) as url:
            about = SimpleNamespace(base_url=f"{url}/v1", type=client)
            ctx = SimpleNamespace(model=str(MODEL), client=about, sampling=Fields({"temperature": 1.0} | sampling))
            for n in numbers:
                trace = Trace(id=f"trace-{n}", task=SimpleNamespace(key="k"), nodes=[], calls=[], rewards={})
                traces.append(trace)
                assert await Harness().launch(ctx, trace, None, "", "", {}, Fields(number=n)) == 0
        return traces

    return asyncio.run(run())


def rows_of(trace: Trace) -> Iterator[Row]:
    """Return a row per path. The first path trains shared nodes, as in prime-rl's samples."""
    trained: set[int] = set()
    inner = {node.parent for node in trace.nodes}
    for leaf in sorted(set(range(len(trace.nodes))) - inner):
        path = [leaf]
        while (parent := trace.nodes[path[0]].parent) is not None:
            path.insert(0, parent)
        row = Row([], [], [], reward=trace.rewards["agent"], truncated=trace.calls[-1].finish_reason == "length")
        for n in path:
            node = trace.nodes[n]
            logprobs = iter(node.logprobs)
            row.token_ids.extend(node.token_ids)
            row.weights.extend([0] * len(node.mask) if n in trained else node.mask)
            row.logprobs.extend(next(logprobs) if sampled else 0.0 for sampled in node.mask)
        trained.update(path)
        yield row


def test_trace_equals_the_tokens_that_the_server_sampled(ledger: live.Ledger) -> None:
    traces = traces_of(ledger, *range(len(live.KINDS)))
    golden = live.golden_of(ledger.calls, {item.id: item.rewards["agent"] for item in traces})
    assert live.findings_of(golden, [row for trace in traces for row in rows_of(trace)]) == set()
    assert [item.calls[-1].finish_reason for item in traces] == ["stop", "stop", "length", "stop", "stop"]
    asked = [(call.session, len(call.prompt), len(call.ids), call.finish) for call in ledger.calls]
    assert asked == [
        (trace.id, call.usage["prompt_tokens"], call.usage["completion_tokens"], call.finish_reason)
        for trace in traces
        for call in trace.calls
    ]
    assert [len(trace.calls) for trace in traces] == [3, 4, 3, 3, 3]
    for trace in traces:
        for call in trace.calls:
            assert trace.nodes[call.node].message["role"] == "assistant"
            assert len(trace.nodes[call.node].token_ids) == call.usage["completion_tokens"]


def test_taskset_rewards_read_the_messages_of_the_agent(ledger: live.Ledger) -> None:
    (trace,) = traces_of(ledger, 7)
    question, answer = (node.message for node in trace.nodes)
    assert "Task 7." in question["content"]
    assert answer["content"] == "Reply 0 of words."
    assert trace.rewards == {}


def test_tool_calls_equal_those_that_the_agent_received(ledger: live.Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    async def agent(base_url: str, api_key: str, task: Any) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: Any = {"messages": [{"role": "user", "content": "How much?"}], "tools": TOOLS, "max_tokens": 100}
            read.append((await client.chat.completions.create(model="policy", **asked)).choices[0].message)

    ledger.text = TOOL_CALL.removesuffix("<|im_end|>")
    monkeypatch.setattr(Harness, "agent", staticmethod(agent))
    (trace,) = traces_of(ledger, 0)
    (call,) = read[0].tool_calls
    assert trace.nodes[1].message == {
        "role": "assistant",
        "content": read[0].content,
        "reasoning_content": None,
        "tool_calls": [{"id": call.id, "name": "lookup", "arguments": call.function.arguments}],
    }


def test_an_agent_that_raises_fails_its_rollout(ledger: live.Ledger) -> None:
    with pytest.raises(RuntimeError, match="the agent failed"):
        traces_of(ledger, 5)


def test_evaluation_is_at_any_temperature(ledger: live.Ledger) -> None:
    (trace,) = traces_of(ledger, 7, client="eval", temperature=0.0)
    assert len(trace.calls) == 1
    assert ledger.bodies[0]["sampling_params"]["temperature"] == 0.0


def test_server_gets_the_sampling_settings_of_the_run(ledger: live.Ledger) -> None:
    traces_of(ledger, 7, temperature=0.7, top_p=0.9, extra_body={"cache_salt": "3"}, client="eval")
    (body,) = ledger.bodies
    asked = body["sampling_params"]
    assert (body["cache_salt"], asked["temperature"], asked["top_p"]) == ("3", 0.7, 0.9)


def test_truncated_sampling_is_not_trained(ledger: live.Ledger) -> None:
    with pytest.raises(InvalidRequest, match="verifiers computes"):
        traces_of(ledger, 7, top_p=0.5)
