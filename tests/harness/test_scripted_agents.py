"""Unmodified agents on a scripted model with tools are recorded exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.scripted_agents import AGENTS, ANSWER, FILES, SUM, AgentRun, program_of, run_agent
from tokentape.chat._renderer import Renderer

pytestmark = pytest.mark.harness


def _installed(name: str) -> Any:
    """Return a parameter that is skipped if the agent is not installed."""
    agent = AGENTS[name]
    missing = program_of(agent.arguments[0], agent.package) is None
    reason = f"needs {agent.package}: TOKENTAPE_CLI_AGENTS or TOKENTAPE_HARNESS_PYTHON (make test-harnesses)"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


def check_record(run: AgentRun) -> None:
    """Every call of the engine is one turn: its prompt is the context, its ids are the completion, bit for bit."""
    recorded, after = [], list[list[int]]()
    for turn in run.turns:
        context = ([] if turn.parent is None else after[turn.parent]) + turn.added_ids.tolist()
        recorded.append((context, turn.completion_ids.tolist()))
        after.append(context + turn.completion_ids.tolist())
        assert turn.finish_reason == "stop"
        assert np.all(turn.logprobs == -0.5)
    assert sorted(recorded) == sorted(run.engine.sampled)


@pytest.mark.parametrize("name", [_installed(name) for name in AGENTS])
def test_a_session_of_an_agent_is_recorded_exactly(name: str, renderer: Renderer, tmp_path: Path) -> None:
    agent = AGENTS[name]
    run = run_agent(agent, renderer, tmp_path)
    for branch in run.branches:
        print(f"\n{name}: {len(branch.turns)} turns, {len(branch.token_ids)} tokens, {branch.verdict}, {branch.role}")
    check_record(run)
    shown = "".join(renderer.tokenizer.decode(prompt) for prompt, _ in run.engine.sampled)
    assert all(text.strip() in shown for text in FILES.values())
    assert (tmp_path / "folder" / "sum.txt").read_text("utf-8") == SUM
    assert ANSWER in run.output
    assert [path for path, status in run.statuses if status != 200] == []
    assert run.ignored == agent.ignored
    assert {edge.kind for branch in run.branches for edge in branch.lineage} == agent.edges
    assert sorted(branch.role for branch in run.branches) == sorted(agent.roles)
    verdicts = ["exact", *(f"forked: {cause}" for cause in agent.forks)]
    assert sorted(branch.verdict for branch in run.branches) == sorted(verdicts)


PINS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64}


@pytest.mark.parametrize("name", [_installed(name) for name in ("claude", "codex", "opencode")])
def test_every_turn_of_an_agent_is_at_the_pins(name: str, renderer: Renderer, tmp_path: Path) -> None:
    run = run_agent(AGENTS[name], renderer, tmp_path, pins=PINS)
    print(f"\n{name}: {len(run.turns)} turns, asked {[turn.sampling.get('asked') for turn in run.turns]}")
    for turn in run.turns:
        assert {name: turn.sampling[name] for name in PINS} == PINS
    assert all(params.temperature == 0.7 for _, params in run.engine.requests)
