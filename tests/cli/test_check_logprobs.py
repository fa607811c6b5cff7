from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tokentape
from tests.cli.conftest import Run
from tests.test_client import talk
from tokentape._session.arrow import write_parquet
from tokentape._session.jsonl import write_jsonl
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.types import TokenDistribution, Trajectory

EXACT = ("--max-delta", "1e-4", "--max-mean", "1e-4", "--max-k3", "1e-6")


@pytest.fixture
def recorded(gateway_url: str) -> list[Trajectory]:
    with tokentape.Client(gateway_url) as client:
        session = client.session("s")
        talk(session.base_url)
        return session.trajectories()


@pytest.fixture
def export(recorded: list[Trajectory], tmp_path: Path) -> Path:
    write_parquet(recorded, tmp_path / "record.parquet")
    return tmp_path / "record.parquet"


@pytest.fixture
def perturbed(model_dir: Path, tmp_path: Path) -> Path:
    """Return a model folder with slightly changed weights."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "perturbed"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {
            name: tensor + 0.05 * tensor.std() * torch.randn_like(tensor) if tensor.ndim == 2 else tensor
            for name, tensor in weights.items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def test_sampling_model_is_clean(run: Run, export: Path, model_dir: Path) -> None:
    done = run("check-logprobs", export, "--model", model_dir, *EXACT)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "numeric     tokens 24" in done.stdout
    assert "\nretokenizing would change " in done.stdout


def test_json_lines_and_json(run: Run, recorded: list[Trajectory], model_dir: Path, tmp_path: Path) -> None:
    write_jsonl(recorded, tmp_path / "record.jsonl")
    done = run("check-logprobs", tmp_path / "record.jsonl", "--model", model_dir, "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"], report["failures"]) == (0, True, {})
    assert report["numeric"]["tokens"] == int(recorded[0].loss_mask.sum())


def test_a_perturbed_model_is_exit_code_1_in_the_numeric_channel(run: Run, export: Path, perturbed: Path) -> None:
    done = run("check-logprobs", export, "--model", perturbed, "--json", *EXACT)
    assert done.exit_code == 1
    assert set(json.loads(done.stdout)["failures"]) == {"numeric"}


def test_a_retokenized_batch_is_exit_code_1_in_the_id_channel(
    run: Run, recorded: list[Trajectory], export: Path, model_dir: Path, tmp_path: Path
) -> None:
    from tests.training.test_logprob_check import resegmented
    from tokentape.chat._tokenizer import Tokenizer

    ids, _ = resegmented(Tokenizer.load(model_dir), recorded[0])
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps({"session_id": "s", "leaf": recorded[0].leaf, "token_ids": ids.tolist()}))
    done = run("check-logprobs", export, "--model", model_dir, "--batch", batch, *EXACT)
    assert done.exit_code == 1
    assert done.stderr.startswith("id drift: 1 of 24 trained tokens changed")
    assert len(done.stderr.splitlines()) == 1
    assert run("check-logprobs", export, "--model", model_dir, "--batch", batch, "--max-drift", "0.1").exit_code == 0


def test_a_data_directory_and_a_trainer_s_logprobs_need_no_model(run: Run, data_dir: Path, tmp_path: Path) -> None:
    from tokentape.store import SqliteStore

    with SqliteStore.open(data_dir, read_only=True) as store:
        rows = [
            {
                "session_id": trajectory.session_id,
                "leaf": trajectory.leaf,
                "trainer_logprobs": trajectory.logprobs.tolist(),
            }
            for stored in store.iter_sessions()
            for trajectory in stored.trajectories()
        ]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("\n".join(map(json.dumps, rows)))
    done = run("check-logprobs", data_dir, "--batch", batch, *EXACT)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "sequences 3," in done.stdout


def test_effect_of_rerendering_is_reported_without_failing(
    run: Run, renderer: Renderer, store: SqliteStore, model_dir: Path, tmp_path: Path
) -> None:
    from tests.training.scripted_sessions import THOUGHT, played, user

    played(renderer, store, [(user("Pears?"), THOUGHT + "Yes.<|im_end|>"), (user("And?"), "No.<|im_end|>")])
    made_up = ("--max-mean", "99", "--max-k3", "99")
    done = run("check-logprobs", tmp_path / "data", "--model", model_dir, "--rerender", *made_up)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "\nrendering again, of 1 conversations, 0 more refused:\n  id drift    0 of " in done.stdout
    assert " of 1 sequences, reasoning 1\n  after text drift: tokens 7, mean " in done.stdout
    report = json.loads(run("check-logprobs", tmp_path / "data", "--model", model_dir, "--rerender", "--json").stdout)
    assert report["if_rerendered"]["text_drift"]["kinds"] == {"reasoning": 1}


def test_export_has_no_messages_to_rerender(run: Run, export: Path, model_dir: Path) -> None:
    done = run("check-logprobs", export, "--model", model_dir, "--rerender")
    assert done.exit_code == 2
    assert "has no messages" in done.stderr


def test_nothing_to_compare_with_is_exit_code_2(run: Run, export: Path) -> None:
    done = run("check-logprobs", export)
    assert done.exit_code == 2
    assert "nothing to compare with" in done.stderr


@pytest.mark.parametrize(("rows", "extra"), [(1, 0), (2, 0), (3, 1)])
def test_rows_missing_on_a_side_fail(run: Run, data_dir: Path, tmp_path: Path, rows: int, extra: int) -> None:
    with SqliteStore.open(data_dir, read_only=True) as store:
        all_rows = [
            {
                "session_id": trajectory.session_id,
                "leaf": trajectory.leaf,
                "trainer_logprobs": trajectory.logprobs.tolist(),
            }
            for stored in store.iter_sessions()
            for trajectory in stored.trajectories()
        ]
    batch = tmp_path / "batch.jsonl"
    unknown = [{**all_rows[0], "leaf": 99}] * extra
    batch.write_text("\n".join(map(json.dumps, all_rows[:rows] + unknown)))
    done = run("check-logprobs", data_dir, "--batch", batch, *EXACT)
    assert (done.exit_code, done.stderr.startswith(f"rows: {3 - rows} only in the record, {extra} only in")) == (
        1,
        True,
    )
    assert run("check-logprobs", data_dir, "--batch", batch, *EXACT, "--max-missing", 2).exit_code == 0


def test_a_logprob_above_zero_is_a_finding(run: Run, recorded: list[Trajectory], export: Path, tmp_path: Path) -> None:
    logprobs = recorded[0].logprobs.tolist()
    logprobs[int(recorded[0].completion_starts[0])] = 0.357
    batch = tmp_path / "batch.jsonl"
    batch.write_text(json.dumps({"session_id": "s", "leaf": recorded[0].leaf, "trainer_logprobs": logprobs}))
    loose = ("--max-mean", 9, "--max-k3", 9)
    done = run("check-logprobs", export, "--batch", batch, *loose)
    assert (done.exit_code, done.stderr) == (1, "numeric: 1 logprobs are above 0, so they are not log-probabilities\n")


def test_wrong_batch_of_a_truncated_record_is_exit_code_1(
    run: Run, recorded: list[Trajectory], model_dir: Path, tmp_path: Path
) -> None:
    """Regression: it was 3, because no logprob can be compared."""
    of = TokenDistribution(False, 1.0, True, False)
    record, batch = tmp_path / "cut.jsonl", tmp_path / "batch.jsonl"
    write_jsonl([replace(recorded[0], logprobs_of=(of,) * len(recorded[0].turns))], record)
    ids = recorded[0].token_ids.tolist()
    for batch_ids, code, channel in ((ids, 3, "numeric"), (ids[:-3], 1, "rows"), ([5] * len(ids), 1, "text drift")):
        batch.write_text(json.dumps({"session_id": "s", "leaf": recorded[0].leaf, "token_ids": batch_ids}))
        done = run("check-logprobs", record, "--model", model_dir, "--batch", batch, "--max-drift", 0.01)
        assert (done.exit_code, f"{channel}: " in done.stderr) == (code, True)
