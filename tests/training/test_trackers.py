"""Numbers reach the trackers' own clients. The files are read back with their own readers, where they are installed."""

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
def test_a_missing_client_is_named_with_the_command_that_installs_it(
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
        assert [(one.step, one.tensor_proto.float_val[0]) for one in events] == [
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
        if kind in (1, 4):  # a whole record, or the last part of one
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                rows.append({one.key or "/".join(one.nested_key): one.value_json for one in record.history.item})
    return rows


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_and_adds_to_one_that_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track = wandb_tracker(tmp_path, project="p", name="n")
    rule = StopRule(window=1, tracker=track)
    rule.add([make_trajectory()])
    again = wandb_tracker(tmp_path)
    again({"log_ratio": 0.5})
    wandb.run.log({"loss": 1.0})
    wandb.finish()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows = wandb_history(file)
    assert len(rows) == 2
    assert float(rows[0]["tokentape/forked"]) == rule.numbers()["forked"]
    assert (float(rows[1]["tokentape/log_ratio"]), float(rows[1]["loss"])) == (0.5, 1.0)
