"""`tokentape score`: records of a directory and of a running gateway, correct and wrong weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokentape
from tests.audit.planted import load, perturbed
from tests.cli.conftest import Run
from tests.test_client import talk
from tests.vocabularies import changed_source, swap_words
from tokentape.chat._renderer import Renderer
from tokentape.demo.run import run_demo
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model


@pytest.fixture
def directory(gateway_url: str, store: SqliteStore, tmp_path: Path, model_dir: Path, renderer: Renderer) -> Path:
    """Write a record of two sessions that no gateway has open."""
    with tokentape.Client(gateway_url) as client:
        for name in ("a", "b"):
            talk(client.session(name).base_url)
    store.close()
    data = tmp_path / "data"
    write_served_model(data, ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint))
    return data


def test_record_names_the_model_and_a_second_run_has_nothing_to_do(run: Run, directory: Path) -> None:
    done = run("score", directory)
    assert done.exit_code == 0, done.output
    assert "48 tokens of 4 turns in 2 sessions scored as sampler_logprobs" in done.stdout
    assert "at temperature 1, before penalties and truncation" in done.stdout
    assert "recorded against scored: tokens 48" in done.stdout
    again = run("score", directory)
    assert (again.exit_code, "4 turns already had the column" in again.stdout) == (3, True)
    assert "not compared: no recorded logprob was checked in this run" in again.stdout
    assert json.loads(run("score", directory, "--json").stdout)["ok"] is None
    with SqliteStore.open(directory, read_only=True) as store:
        (trajectory,) = store.load_session("a", per_token=True).trajectories()
    np.testing.assert_allclose(
        trajectory.columns["sampler_logprobs"][trajectory.loss_mask],
        trajectory.logprobs[trajectory.loss_mask],
        atol=1e-4,
    )


def test_other_weights_are_named_unless_they_are_a_teachers(
    run: Run, directory: Path, model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model_dir, folder)
    perturbed(load(model_dir), 0.3).save_pretrained(folder)
    done = run("score", directory, "--model", folder, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == (1, False)
    assert [cause["causes"] for cause in report["causes"]] == [["weights"]]
    assert report["distribution"] == {"penalties": False, "temperature": 1.0, "truncation": False, "grammar": False}
    taught = run("score", directory, "--model", folder, "--teacher")
    assert taught.exit_code == 0, taught.output
    assert "scored as teacher_logprobs" in taught.stdout
    assert "recorded against scored" not in taught.stdout


def test_a_running_gateways_record_is_scored_through_it(run: Run, gateway_url: str, model_dir: Path) -> None:
    with tokentape.Client(gateway_url) as client:
        session = client.session("a")
        talk(session.base_url)
        done = run("score", gateway_url, "--model", model_dir, "--column", "own")
        assert done.exit_code == 0, done.output
        (trajectory,) = session.trajectories()
        np.testing.assert_allclose(
            trajectory.columns["own"][trajectory.loss_mask], trajectory.logprobs[trajectory.loss_mask], atol=1e-4
        )
        assert client.score("transformers", model=model_dir, column="own").had_it == 2


def test_another_vocabulary_is_refused(run: Run, directory: Path, model_dir: Path, tmp_path: Path) -> None:
    done = run("score", directory, "--model", with_tokenizer(model_dir, tmp_path / "other", swap_words))
    assert (done.exit_code, "has another vocabulary than" in done.stderr) == (2, True)


def test_a_tokenizer_with_the_same_vocabulary_is_accepted(
    run: Run, directory: Path, model_dir: Path, tmp_path: Path
) -> None:
    """Trainers write tokenizer.json again when they save a checkpoint."""

    def lowercase(spec: dict[str, Any]) -> None:
        spec["normalizer"] = {"type": "Lowercase"}

    done = run("score", directory, "--model", with_tokenizer(model_dir, tmp_path / "other", lowercase))
    assert done.exit_code == 0, done.output


def with_tokenizer(model_dir: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy the model to `folder` with a changed tokenizer."""
    shutil.copytree(model_dir, folder)
    (folder / "tokenizer.json").write_bytes(changed_source(model_dir, change))
    return folder


def test_record_sampled_in_bfloat16_is_judged_by_that_precision(run: Run, tmp_path: Path) -> None:
    run_demo(tmp_path / "data", 1, 0, dtype="bfloat16")
    done = run("score", tmp_path / "data")
    assert (done.exit_code, "precision: bfloat16" in done.stderr) == (0, True), done.output
    assert run("score", tmp_path / "data", "--again", "--precision", "float32").exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine", "vllm"),
        ("--engine-url", "http://127.0.0.1:1"),
        ("--engine", "vllm", "--engine-url", "http://127.0.0.1:1", "--device", "cpu"),
    ],
)
def test_server_address_needs_a_server(run: Run, directory: Path, arguments: tuple[str, ...]) -> None:
    assert run("score", directory, *arguments).exit_code == 2


def test_missing_record_is_not_created(run: Run, tmp_path: Path) -> None:
    done = run("score", tmp_path / "nowhere")
    assert (done.exit_code, "does not exist" in done.stderr) == (2, True), done.output
    assert not (tmp_path / "nowhere").exists()
