from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Run
from tests.records import UNCHANGED, bits, make_turn
from tokentape._session.arrow import ExtraNames
from tokentape._session.files import read_trajectories
from tokentape._session.flatten import trajectories
from tokentape._session.jsonl import read_jsonl
from tokentape._session.lineage import lineage
from tokentape._session.tree import Session
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE
from tokentape.store import SqliteStore
from tokentape.types import Event, SessionInfo, Trajectory, TurnColumn, TurnPayload


@pytest.fixture
def recorded(data_dir: Path) -> list[Trajectory]:
    with SqliteStore.open(data_dir, read_only=True) as store:
        return [
            trajectory
            for stored in store.iter_sessions()
            for tree in [Session(stored.info, stored.turns)]
            for trajectory in trajectories(tree, stored.rewards, edges=lineage(tree))
        ]


def test_parquet_holds_every_branch(run: Run, data_dir: Path, recorded: list[Trajectory], tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.parquet")
    assert (done.exit_code, done.stdout) == (0, "")
    assert len(recorded) == 3
    assert bits(read_trajectories(tmp_path / "t.parquet")) == bits(recorded)


def test_a_file_named_jsonl_is_jsonl(run: Run, data_dir: Path, recorded: list[Trajectory], tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.jsonl").exit_code == 0
    assert bits(list(read_jsonl(tmp_path / "t.jsonl"))) == bits(recorded)


def test_the_format_can_be_named(run: Run, data_dir: Path, tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.txt", "--format", "jsonl").exit_code == 0
    assert len(list(read_jsonl(tmp_path / "t.txt"))) == 3


def test_only_branches_of_requested_roles_are_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    for roles, count in (("main", 3), ("main,subagent", 3)):
        assert run("export", data_dir, "-o", tmp_path / "t.jsonl", "--roles", roles).exit_code == 0
        assert [trajectory.role for trajectory in read_jsonl(tmp_path / "t.jsonl")] == ["main"] * count
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--roles", "side_call")
    assert (done.exit_code, "left out by --roles: 3 x 'main'" in done.stderr) == (3, True)
    assert "unknown role 'sub'" in run("export", data_dir, "-o", tmp_path / "t.jsonl", "--roles", "sub").stderr


def test_columns_and_payloads_are_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir) as store:
        values, rows = np.arange(4, dtype=np.float32), np.ones((8, 2), np.uint8)
        records = TurnColumn("forked", 0, "advantages", values, 1.0), TurnPayload("forked", 0, "experts", 0, rows)
        asyncio.run(store.write(*records))
        expected = [
            trajectory
            for stored in store.iter_sessions(per_token=True)
            for trajectory in stored.trajectories(edges=lineage(stored.tree()))
        ]
    for name, read in (("t.parquet", read_trajectories), ("t.jsonl", read_jsonl)):
        assert run("export", data_dir, "-o", tmp_path / name).exit_code == 0
        assert bits(list(read(tmp_path / name))) == bits(expected)
    assert [list(trajectory.columns) for trajectory in expected] == [["advantages"], ["advantages"], []]


def test_column_added_during_the_export_is_left_out(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SqliteStore.open(data_dir) as store:
        asyncio.run(store.write(TurnColumn("plain", 0, "late", np.zeros(4, np.float32), 1.0)))
    monkeypatch.setattr(SqliteStore, "extra_names", lambda self, session_ids: ExtraNames())
    assert run("export", data_dir, "-o", tmp_path / "t.parquet").exit_code == 0
    assert [dict(trajectory.columns) for trajectory in read_trajectories(tmp_path / "t.parquet")] == [{}, {}, {}]


def test_only_requested_verdicts_are_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    def leaves(verdict: str) -> list[tuple[str, int]]:
        done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", verdict)
        assert done.exit_code == (0 if verdict != "closed" else 3)
        return [(trajectory.session_id, trajectory.leaf) for trajectory in read_jsonl(tmp_path / "t.jsonl")]

    assert leaves("exact") == [("forked", 1), ("plain", 1)]
    assert leaves("forked:branched") == [("forked", 2)]
    assert leaves("closed") == []
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", "good")
    assert (done.exit_code, done.stderr.startswith("error: unknown verdict")) == (2, True)


def test_sessions_removed_by_a_verdict_filter_are_named(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", "exact")
    assert "left out by --verdict: 1 x 'forked: branched'" in done.stderr
    report = json.loads(run("export", data_dir, "-o", tmp_path / "t.jsonl", "--verdict", "exact", "--json").stdout)
    assert report["other_verdicts"]["forked: branched"] == 1


def test_empty_export_names_a_filter_for_the_omitted_sessions(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir) as store:
        turn = make_turn("doubtful", 0, engine="fake 1.0 raw_logprobs model-unverified")
        asyncio.run(store.write(SessionInfo("doubtful", 3.0), turn))
    arguments = "export", data_dir, "-o", tmp_path / "t.jsonl", "--session", "doubtful"
    done = run(*arguments, "--verdict", "exact")
    assert done.exit_code == 3
    assert "left out by --verdict: 1 x 'exact, model unverified'" in done.stderr
    assert "to export these: --verdict 'exact,model unverified'" in done.stderr
    assert run(*arguments, "--verdict", "exact,model unverified").exit_code == 0
    assert len(list(read_jsonl(tmp_path / "t.jsonl"))) == 1


def test_sessions_that_a_trainer_refuses_can_be_left_out(run: Run, data_dir: Path, tmp_path: Path) -> None:
    truncated = replace(UNCHANGED, truncation=True)
    with SqliteStore.open(data_dir) as store:
        turn = make_turn("cut", 0, sampled_from=truncated, logprobs_of=truncated)
        asyncio.run(store.write(SessionInfo("cut", 3.0), turn))
    arguments = "export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "slime"
    done = run(*arguments)
    assert done.exit_code == 2
    assert "session 'cut'" in done.stderr
    assert "--skip-refused" in done.stderr
    assert not (tmp_path / "t.jsonl").exists()
    done = run(*arguments, "--skip-refused")
    assert done.exit_code == 0
    assert "left out by --skip-refused: session 'cut'" in done.stderr
    assert "left out by --skip-refused: sessions 1 of 3" in done.stderr
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 3
    counts = json.loads(run(*arguments, "--skip-refused", "--json").stdout)
    assert (counts["trajectories"], list(counts["refused"])) == (3, ["cut"])
    done = run("export", data_dir, "-o", tmp_path / "t.parquet", "--skip-refused")
    assert (done.exit_code, "--skip-refused works only with" in done.stderr) == (2, True)


def test_only_requested_sessions_are_written(run: Run, data_dir: Path, tmp_path: Path) -> None:
    assert run("export", data_dir, "-o", tmp_path / "t.parquet", "--session", "plain").exit_code == 0
    assert [trajectory.session_id for trajectory in read_trajectories(tmp_path / "t.parquet")] == ["plain"]


def test_unknown_session_leaves_the_existing_file(run: Run, data_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "t.parquet"
    target.parent.mkdir()
    target.write_text("yesterday's")
    done = run("export", data_dir, "-o", target, "--session", "plain", "--session", "nobody")
    assert (done.exit_code, done.stderr) == (2, "error: there is no session 'nobody'\n")
    assert [path.name for path in target.parent.iterdir()] == ["t.parquet"]
    assert target.read_text() == "yesterday's"


def test_json_counts_written_rows(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.parquet", "--json")
    assert json.loads(done.stdout) == {
        "file": str(tmp_path / "t.parquet"),
        "format": "parquet",
        "sessions": 2,
        "trajectories": 3,
        "tokens": 48,
        "trained_tokens": 20,
        "other_verdicts": {},
        "other_roles": {},
    }


TRAINERS = ["verl", "slime", "miles", "skyrl", "nemo-rl", "prime-rl", "tinker", "agent-lightning", "trl"]


def trained(trainer: str, row: dict[str, Any]) -> int:
    """Return the number of trained tokens in a trainer's row."""
    match trainer:
        case "verl":
            return sum(row["response_mask"])
        case "slime" | "miles":
            return sum(row["loss_mask"])
        case "skyrl":
            return sum(row["loss_masks"])
        case "nemo-rl":
            return sum(len(message["token_ids"]) for message in row["message_log"] if message["role"] == "assistant")
        case "prime-rl":
            return sum(row["mask"])
        case "tinker":
            return sum(logprob != 0 for logprob in row["loss_fn_inputs"]["logprobs"])
        case "agent-lightning":
            return len(row["response"]["token_ids"])
    return sum(row["env_mask"])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_s_rows_train_each_sampled_token_once(run: Run, data_dir: Path, tmp_path: Path, trainer: str) -> None:
    arguments = "-o", tmp_path / "t.jsonl", "--format", trainer, "--group", "task", "--session", "forked"
    done = run("export", data_dir, *arguments)
    assert (done.exit_code, done.stderr.split(": ")[0]) == (0, str(tmp_path / "t.jsonl")), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert sum(trained(trainer, row) for row in rows) == 12
    done = run("export", data_dir, "-o", tmp_path / "t.parquet", *arguments[2:])
    assert done.exit_code == 0, done.stderr
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    for row, written in zip(table, rows, strict=True):
        plain = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in written.items()}
        if trainer != "nemo-rl":  # Messages without logprobs have null there.
            assert row == plain


def test_atif_is_a_document_per_branch(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "atif")
    assert done.exit_code == 0, done.stderr
    documents = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [document["trajectory_id"] for document in documents] == ["forked/1", "forked/2", "plain/1"]
    assert [document["session_id"] for document in documents] == ["forked", "forked", "plain"]


def test_atif_copies_only_steps_of_earlier_documents(run: Run, data_dir: Path, tmp_path: Path) -> None:
    for more, copied, trained in ((), 2, 20), (("--verdict", "forked:branched"), 0, 8):
        done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "atif", "--json", *more)
        documents = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
        (forked,) = (document for document in documents if document["trajectory_id"] == "forked/2")
        assert sum("is_copied_context" in step for step in forked["steps"]) == copied
        assert json.loads(done.stdout)["trained_tokens"] == trained


def test_a_trainer_s_count_is_of_the_rows(run: Run, data_dir: Path, tmp_path: Path) -> None:
    arguments = "--format", "slime", "--session", "forked", "--verdict", "forked:branched", "--json"
    counts = json.loads(run("export", data_dir, "-o", tmp_path / "t.jsonl", *arguments).stdout)
    (row,) = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert counts["trained_tokens"] == sum(row["loss_mask"]) == 8
    assert (counts["trajectories"], counts["tokens"]) == (1, len(row["tokens"]))


def test_missing_trainer_inputs_leave_no_file(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "skyrl")
    assert (done.exit_code, "session 'plain' has no reward" in done.stderr) == (2, True)
    assert "Pass --skip-refused" in done.stderr
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "jsonl", "--group", "task")
    assert (done.exit_code, "--group works only with" in done.stderr) == (2, True)
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize("checked", [True, False])
def test_pending_checks_are_awaited_and_reported(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    monkeypatch.setattr("tokentape.cli.export._PATIENCE", 0.0)
    events = [Event("plain", 1, BRIDGE_DUE, {}, 1.0), Event("plain", 1, BRIDGE_CHECKED, {"outcome": "same"}, 2.0)]
    with SqliteStore.open(data_dir) as store:
        asyncio.run(store.write(*events[: 1 + checked]))
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--wait-checks")
    assert (done.exit_code, "1 bridges are still unchecked" in done.stderr) == (0, not checked)
    verdicts = {trajectory.session_id: trajectory.verdict for trajectory in read_jsonl(tmp_path / "t.jsonl")}
    assert verdicts["plain"] == ("exact" if checked else "exact, bridge unchecked")


def test_export_works_beside_a_writer(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(data_dir):
        assert run("export", data_dir, "-o", tmp_path / "t.parquet").exit_code == 0


def test_unknown_file_extension_is_refused_with_the_known_ones(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.csv")
    assert (done.exit_code, "does not end with .jsonl or .parquet" in done.stderr) == (2, True)
    assert not (tmp_path / "t.csv").exists()
    assert run("export", data_dir, "-o", tmp_path / "t.csv", "--format", "jsonl").exit_code == 0


def test_missing_group_key_error_explains_where_to_set_it(run: Run, data_dir: Path, tmp_path: Path) -> None:
    done = run("export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "trl", "--group", "quiz")
    assert done.exit_code == 2
    assert "client.session(ID, metadata={'quiz': ...})" in done.stderr
    assert "its keys: task. " in done.stderr
    assert "Pass --skip-refused to leave out such sessions" in done.stderr


def test_sessions_without_the_group_key_can_be_left_out(run: Run, data_dir: Path, tmp_path: Path) -> None:
    arguments = "export", data_dir, "-o", tmp_path / "t.jsonl", "--format", "slime", "--group", "task"
    assert run(*arguments).exit_code == 2
    done = run(*arguments, "--skip-refused")
    assert done.exit_code == 0, done.stderr
    assert "the metadata of session 'plain' has no 'task' to name its group; its keys: none" in done.stderr
    assert "left out by --skip-refused: sessions 1 of 2" in done.stderr
    assert "without --group" not in done.stderr
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2
    assert list(json.loads(run(*arguments, "--skip-refused", "--json").stdout)["refused"]) == ["plain"]


@pytest.mark.parametrize(("trainer", "warns"), [("verl", True), ("slime", True), ("trl", False)])
def test_rows_without_groups_give_a_warning(
    run: Run, data_dir: Path, tmp_path: Path, trainer: str, warns: bool
) -> None:
    arguments = "export", data_dir, "-o", tmp_path / "t.jsonl", "--format", trainer, "--session", "forked"
    assert ("without --group each session is its own group" in run(*arguments).stderr) == warns


@pytest.mark.parametrize(
    ("file_format", "name", "message"),
    [
        ("atif", "t.parquet", "--format atif writes JSON lines, so its name must not end with .parquet: rename "),
        ("jsonl", "t.parquet", "--format jsonl writes JSON lines, so its name must not end with .parquet: rename "),
        ("parquet", "t.jsonl", "--format parquet writes Parquet, so its name must not end with .jsonl: rename "),
    ],
)
def test_a_name_of_another_format_is_refused(
    run: Run, data_dir: Path, tmp_path: Path, file_format: str, name: str, message: str
) -> None:
    done = run("export", data_dir, "-o", tmp_path / name, "--format", file_format)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / name).exists()


def test_a_file_without_a_name_is_refused(run: Run, data_dir: Path) -> None:
    done = run("export", data_dir, "-o", "")
    assert (done.exit_code, "'.' is a folder; expected the name of a file" in done.stderr) == (2, True), done.stderr
