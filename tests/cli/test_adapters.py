"""`score` and `check-logprobs` on sessions of LoRA adapters: each adapter's turns only with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Run
from tests.engines.adapters import forward_with, record, write_adapter
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.engines._base import SamplingParams
from tokentape.engines._transformers import TransformersEngine
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model

pytest.importorskip("peft")
pytestmark = [
    # peft 0.21 with transformers 5.24.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),
]

EXACT = ("--max-delta", "1e-4", "--max-mean", "1e-4", "--max-k3", "1e-6")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write adapters `a` and `b`, and a record with a session of each adapter and of the model."""
    folder = tmp_path_factory.mktemp("runs")
    adapters = {name: folder / name for name in "ab"}
    for seed, path in enumerate(adapters.values()):
        write_adapter(path, seed)

    async def opened(renderer: Renderer) -> TransformersEngine:
        return TransformersEngine.open(MODEL, threads=1, adapters=adapters)

    params = SamplingParams(max_tokens=8, temperature=1.0)
    record(opened, folder / "record", ["a", "b", None], "What is {} + 2?", params)
    renderer = Renderer.load(MODEL)
    served = ServedModel(str(MODEL), renderer.tokenizer.sha256, renderer.fingerprint)
    write_served_model(folder / "record", served)
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "record", tmp_path / "record"))


@pytest.mark.parametrize(("adapter", "session"), [("a", "s0"), ("b", "s1"), (None, "s2")])
def test_scores_use_the_sampling_adapter_and_other_turns_are_named(
    run: Run, runs: Path, copied: Path, tmp_path: Path, adapter: str | None, session: str
) -> None:
    option = [] if adapter is None else ["--adapter", f"{adapter}={runs / adapter}"]
    done = run("score", copied, *option)
    assert done.exit_code == 0, done.output
    sources = {name: f"adapter {name!r}" for name in "ab"} | {None: "the model without an adapter"}
    for name, other in sources.items():
        message = f"not scored: 2 turns: sampled with {other}, but scored with {sources[adapter]}"
        assert (message in done.stdout) == (name != adapter)
    added = {} if adapter is None else write_adapter(tmp_path / "again", "ab".index(adapter))
    forward = forward_with(added)
    with SqliteStore.open(copied, read_only=True) as store:
        for stored in store.iter_sessions(per_token=True):
            (trajectory,) = stored.trajectories()
            assert trajectory.adapters == ({"s0": "a", "s1": "b", "s2": None}[trajectory.session_id],) * 2
            if trajectory.session_id != session:
                assert not trajectory.columns
                continue
            at = np.flatnonzero(trajectory.loss_mask)
            expected = forward(trajectory.token_ids)[at - 1, trajectory.token_ids[at]]
            np.testing.assert_allclose(trajectory.columns["sampler_logprobs"][at], expected, atol=2e-5)


def test_a_teacher_scores_every_turn(run: Run, copied: Path) -> None:
    done = run("score", copied, "--teacher")
    assert (done.exit_code, "of 6 turns in 3 sessions" in done.stdout) == (0, True), done.output


def test_logprobs_are_checked_with_the_sampling_adapter(run: Run, runs: Path, tmp_path: Path) -> None:
    assert run("export", runs / "record", "-o", tmp_path / "t.parquet").exit_code == 0
    for location in (runs / "record", tmp_path / "t.parquet"):
        bare = run("check-logprobs", location, "--model", MODEL, *EXACT)
        assert bare.exit_code == 0, bare.output
        for name in "ab":
            message = f"tokens: sampled with adapter {name!r}, but scored with the model without an adapter"
            assert message in bare.stdout
        own = run("check-logprobs", location, "--model", MODEL, "--adapter", f"a={runs / 'a'}", *EXACT)
        assert own.exit_code == 0, own.output
        assert "sampled with adapter 'a'" not in own.stdout
        assert "sampled with the model without an adapter, but scored with adapter 'a'" in own.stdout
        swapped = run("check-logprobs", location, "--model", MODEL, "--adapter", f"a={runs / 'b'}", *EXACT)
        assert (swapped.exit_code, "cause: weights" in swapped.stdout) == (1, True), swapped.output


def test_an_adapter_needs_a_name_a_folder_and_a_model(run: Run, runs: Path, copied: Path) -> None:
    for value in (str(runs / "a"), "a=nowhere"):
        refused = run("score", copied, "--adapter", value)
        assert (refused.exit_code, "NAME=FOLDER" in refused.stderr) == (2, True)
    url = ("--engine", "vllm", "--engine-url", "http://127.0.0.1:1")
    refused = run("score", copied, *url, "--adapter", f"a={runs / 'a'}")
    assert refused.exit_code != 0
    assert "a server can't score with a LoRA adapter" in " ".join(refused.stderr.split())
