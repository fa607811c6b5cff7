"""Agent frameworks, unmodified, on the embedded model through the gateway: what they do is recorded exactly.

They are run in an environment of their own (`make test-harnesses`), as programs that know the gateway's URL and a key.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.tasks import is_solved, sample_tasks
from tokentape.engines._transformers import TransformersEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Provenance, SessionInfo, Trajectory, Turn

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(
        "TOKENTAPE_HARNESS_PYTHON" not in os.environ,
        reason="needs a Python with the agent frameworks: TOKENTAPE_HARNESS_PYTHON (make test-harnesses)",
    ),
]

AGENTS = Path(__file__).parent / "agents"
SOURCE = Path(__file__).parents[2] / "src"
TASKS = (3, 9)
"""Seeds of tasks that the tiny model solves greedily, several questions and tool calls each."""


@dataclass(frozen=True, slots=True)
class Run:
    texts: Sequence[str]
    turns: Sequence[Turn]


def run_agent(name: str, gateway_url: str, store: SqliteStore, task: int, *, stream: bool) -> Run:
    """Run an agent in its own session, which it finds by its API key, and return its output and turns."""
    made = httpx2.post(f"{gateway_url}/sessions", json={}).json()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(AGENTS), str(SOURCE)]),
        "AGENT_BASE_URL": f"{gateway_url}/v1",
        "AGENT_API_KEY": made["api_key"],
        "AGENT_TASK": str(task),
        "AGENT_STREAM": "1" if stream else "0",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONWARNINGS": "ignore",
    }
    run = subprocess.run(
        [os.environ["TOKENTAPE_HARNESS_PYTHON"].split(os.pathsep)[0], str(AGENTS / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return Run(json.loads(run.stdout.splitlines()[-1]), store.load_session(made["session_id"]).turns)


def check_branches(turns: Sequence[Turn]) -> list[Trajectory]:
    """Along every branch each context is the one before, its completion and a bridge, bit for bit."""
    found = trajectories(Session(SessionInfo(turns[0].session_id, 0.0), turns))
    for trajectory in found:
        context: list[int] = []
        path = [turns[seq] for seq in trajectory.turns]
        for turn, start, end in zip(path, trajectory.completion_starts, trajectory.completion_ends, strict=True):
            context += turn.added_ids.tolist() + turn.completion_ids.tolist()
            assert trajectory.token_ids[:end].tolist() == context
            assert (trajectory.provenance[start:end] == Provenance.SAMPLED).all()
        assert np.isfinite(trajectory.logprobs).all()
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in found)
    assert trained == sum(len(turn.completion_ids) for turn in turns)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("agent", "stream"),
    [
        ("langgraph_agent", False),
        ("langgraph_agent", True),
        ("openai_agents_chat", False),
        ("openai_agents_chat", True),
        ("openai_agents_responses", False),
        ("openai_agents_responses", True),
        ("litellm_agent", False),
        ("litellm_agent", True),
        ("strands_agent", True),
        ("pydantic_ai_chat", False),
        ("pydantic_ai_chat", True),
        ("pydantic_ai_anthropic", False),
    ],
)
def test_a_tool_session_of_several_turns_is_one_exact_branch(
    agent: str, stream: bool, task: int, gateway_url: str, store: SqliteStore
) -> None:
    run = run_agent(agent, gateway_url, store, task, stream=stream)
    sample_task = sample_tasks(seed=task, n=1, split="heldout")[0]
    assert len(run.texts) == len(sample_task.prompts)
    assert is_solved(sample_task, run.texts[-1]), run.texts
    assert len(run.turns) > len(sample_task.prompts), "no tool was called"
    # They sample greedily, and the recorded number is that of temperature 1.
    assert [trajectory.verdict for trajectory in check_branches(run.turns)] == ["exact, other logprobs"]


@pytest.fixture
def roomy_gateway_url(model_dir: Path, renderer: Renderer, store: SqliteStore) -> Iterator[str]:
    """A gateway over the tiny model with room for prompts that it was not made for."""
    engine = TransformersEngine.open(model_dir, max_context=32768)
    with running(create_app(Turns(engine, renderer, store), model_id="tiny")) as url:
        yield url


@pytest.mark.parametrize("agent", ["smolagents_agent", "mini_swe_agent"])
def test_agents_with_long_prompts_are_recorded_exactly(agent: str, roomy_gateway_url: str, store: SqliteStore) -> None:
    # These two omit unparsable replies from the history, so there are forks.
    run = run_agent(agent, roomy_gateway_url, store, TASKS[0], stream=False)
    assert len(run.turns) > 2
    check_branches(run.turns)
