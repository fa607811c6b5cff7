"""Recorded log-probabilities of each engine, compared with a forward pass, draws and trainers; and misreadings."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.audit.planted import distribution, forward, load, recorded, sampled
from tests.engines.distributions.__main__ import main
from tests.engines.distributions.collecting import COLUMN, MODEL, Cell, prompts
from tests.engines.distributions.judging import chi_square, judge

from tokentape.audit._rescaling import RAW, Rule
from tokentape.chat._renderer import Renderer
from tokentape.types import TokenDistribution

OWN = TokenDistribution(False, 1.0, False, False)


@pytest.fixture(scope="module")
def plain_renderer() -> Renderer:
    return Renderer.load(MODEL)


def cell(renderer: Renderer, engine: str, rule: Rule, *, raw: bool) -> Cell:
    """Return the numbers of a correct engine: raw, or those that tokens were sampled with."""
    model = load(MODEL)
    reported = RAW if raw else rule
    of = OWN if raw else TokenDistribution(False, rule.temperature, rule.truncates, False)
    trajectories = []
    for trajectory in recorded(sampled(MODEL, renderer, rule, count=2), model, reported, of):
        own = np.zeros(len(trajectory.token_ids), np.float32)
        at = np.flatnonzero(trajectory.loss_mask)
        own[at] = forward(model, trajectory.token_ids)[at - 1, trajectory.token_ids[at]]
        trajectories.append(replace(trajectory, columns={COLUMN: own}))
    draws = []
    for prompt in prompts(renderer):
        rows = forward(model, prompt)[-1:]
        likely, reported_logprobs = np.exp(distribution(rows, rule)[0]), distribution(rows, reported)[0]
        ids, counts = np.unique(np.random.default_rng(0).choice(len(likely), 2000, p=likely), return_counts=True)
        draws.append(
            {
                int(token_id): (int(count), float(reported_logprobs[token_id]))
                for token_id, count in zip(ids, counts, strict=True)
            }
        )
    sampling = {trajectory.session_id: {0: {"top_p": rule.top_p}} for trajectory in trajectories}
    return Cell(engine, rule.temperature, rule.top_p, trajectories, sampling, draws)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("engine", "rule", "raw", "plant", "letters"),
    [
        ("embedded", Rule(1.4), False, None, set()),
        ("embedded", Rule(0.6, top_p=0.9), False, None, set()),
        ("vllm-raw", Rule(1.4), True, None, set()),
        ("embedded", Rule(1.4), False, "trainer-temperature", {"(c)"}),
        ("vllm-raw", Rule(1.4), True, "raw-as-processed", {"(a)", "(b)", "(c)"}),
        ("embedded", Rule(1.0, top_p=0.9), False, "support-dropped", {"(a)", "(c)"}),
    ],
)
def test_correct_engine_passes_and_misread_logprobs_fail(
    plain_renderer: Renderer, engine: str, rule: Rule, raw: bool, plant: str | None, letters: set[str]
) -> None:
    rows, off = judge([cell(plain_renderer, engine, rule, raw=raw)], plain_renderer, plant)
    assert {entry[:3] for entry in off} == letters, off
    assert rows[0]["tokens"] > 40


def test_draws_of_another_distribution_are_unlikely() -> None:
    likely = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.random.default_rng(0).multinomial(20_000, likely).astype(np.float64)
    assert chi_square(counts, likely) > 0.001
    assert chi_square(counts, np.array([0.52, 0.28, 0.15, 0.05])) < 0.001
    # Undrawn ids are detected, and probabilities can't sum to more than 1.
    assert chi_square(counts, likely * 0.95) < 0.001
    assert chi_square(counts, likely * 1.05) == 0.0


@pytest.mark.slow
def test_embedded_engine_matches_its_declared_distributions(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = ["--engines", "embedded,embedded-raw", "--sessions", "1", "--draws", "500", "--keep", str(tmp_path)]
    assert main([*small, "--out", str(out)]) == 0, out.read_text()
    for plant in ("trainer-temperature", "raw-as-processed", "support-dropped"):
        assert main(["--engines", "embedded,embedded-raw", "--judge", str(tmp_path), "--plant", plant]) == 1


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "needed"),
    [("vllm", "TOKENTAPE_VLLM_BIN"), ("vllm-raw", "TOKENTAPE_VLLM_BIN"), ("sglang", "TOKENTAPE_SGLANG_SERVER")],
)
def test_real_server_matches_its_declared_distributions(tmp_path: Path, engine: str, needed: str) -> None:
    if needed not in os.environ:
        pytest.skip(f"needs {needed}")
    out = tmp_path / "out.json"
    draws = os.environ.get("TOKENTAPE_DRAWS", "2000")
    assert main(["--engines", engine, "--draws", draws, "--out", str(out)]) == 0, json.loads(out.read_text())["off"]
