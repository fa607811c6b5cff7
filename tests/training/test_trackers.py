"""Numbers reach the trackers' clients. The files are read back with the trackers' readers, where installed."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from tests.session.trajectory_cases import make_trajectory
from tokentape.errors import InvalidRequest
from tokentape.training import StopRule, tensorboard_tracker, wandb_tracker

NUMBERS = [{"forked": 0.5, "log_ratio": 0.25}, {"forked": 0.75, "log_ratio": 0.125}]


@pytest.mark.parametrize(
    ("module", "tracker"), [("wandb", wandb_tracker), ("tensorboard.summary", tensorboard_tracker)]
)
def test_missing_client_error_contains_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, tracker: object
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    with pytest.raises(InvalidRequest, match=rf"tokentape\[{module.split('.')[0]}\]"):
        tracker(tmp_path)  # type: ignore[operator]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tensorboard_tracker(tmp_path)
    for numbers in NUMBERS:
        track(numbers)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    for name in NUMBERS[0]:
        events = read.Tensors(f"tokentape/{name}")
        assert [(event.step, event.tensor_proto.float_val[0]) for event in events] == [
            (n, numbers[name]) for n, numbers in enumerate(NUMBERS)
        ]


def wandb_history(file: Path) -> list[dict[str, str]]:
    """Return the rows of an offline run: records of a LevelDB log, in blocks of 32 KiB, after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, rows, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_until_the_trainer_opens_one_and_after_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rule = StopRule(window=1, tracker=wandb_tracker(tmp_path / "own", project="p", name="n"))
    assert not (tmp_path / "own").exists()
    rule.add([make_trajectory()])
    trainer = wandb.init(mode="offline", dir=str(tmp_path / "trainer"))
    assert wandb.run is trainer
    rule.add([make_trajectory()])
    trainer.log({"loss": 1.0})
    wandb.finish()
    rule.add([make_trajectory()])
    wandb.teardown()
    read = {
        name: wandb_history(*(tmp_path / name / "wandb").glob("offline-run-*/*.wandb")) for name in ("own", "trainer")
    }
    forked = rule.numbers()["forked"]
    assert [float(row["tokentape/forked"]) for row in read["own"]] == [forked, forked]
    assert [(float(row["tokentape/forked"]), float(row["loss"])) for row in read["trainer"]] == [(forked, 1.0)]
