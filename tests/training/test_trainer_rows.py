"""Rows for trainers: where advantages come from, and that they are JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import Mock

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.training.test_experts import routed
from tests.training.test_exports import two_branches
from tests.training.test_supports import CUT, WHOLE, with_supports
from tests.training.test_trainers import alike
from tokentape.cli.export import Trainer
from tokentape.errors import InvalidRequest
from tokentape.training import exports
from tokentape.training._samples import Sample
from tokentape.training._trainer_rows import (
    WITH_ADVANTAGES,
    accepted_rows,
    iter_trainer_rows,
    trainer_rows,
    write_trainer_rows,
)


def advantages(trainer: str, samples: list[Sample]) -> list[Any]:
    rows = trainer_rows(trainer, samples)
    values = [
        row["advantages"] if "advantages" in row else row["loss_fn_inputs"]["advantages"].tolist() for row in rows
    ]
    return [sorted(set(row_values)) for row_values in values]


@pytest.mark.parametrize("trainer", WITH_ADVANTAGES)
def test_set_advantages_are_kept_and_missing_ones_are_computed(trainer: str) -> None:
    samples = two_branches()
    assert advantages(trainer, samples) == [[0, 0.5], [0, 0.5]]
    assert advantages(trainer, [replace(sample, columns={}) for sample in samples]) == [[0], [0]]


@pytest.mark.parametrize("trainer", WITH_ADVANTAGES)
def test_computed_advantages_are_not_divided_by_a_standard_deviation(trainer: str) -> None:
    samples = [replace(sample, columns={}) for sample in two_branches()]
    better = [replace(sample, session_id="better", reward=4.0) for sample in samples]
    assert advantages(trainer, samples + better) == [[-1.5, 0], [-1.5, 0], [0, 1.5], [0, 1.5]]


@pytest.mark.parametrize("trainer", WITH_ADVANTAGES)
def test_advantages_of_some_samples_only_are_refused(trainer: str) -> None:
    first, second = two_branches()
    with pytest.raises(InvalidRequest, match="1 of 2 samples have no column"):
        trainer_rows(trainer, [first, replace(second, columns={})])


@pytest.mark.parametrize("trainer", ["nemo-rl", "slime"])
def test_rows_are_built_once_if_no_session_is_refused(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"nemo-rl": "nemo_rl_datum", "slime": "slime_sample"}[trainer]
    built = Mock(wraps=getattr(exports, name))
    monkeypatch.setattr(exports, name, built)
    samples = two_branches()
    assert accepted_rows(trainer, samples)[::2] == (samples, {})
    assert built.call_count == len(samples)


def test_refused_sessions_are_named_and_skipped_in_the_numbering() -> None:
    refused, *others = (
        replace(sample, session_id=f"s{n}") for n, sample in enumerate([*two_branches(), *two_branches()])
    )
    samples = [replace(refused, reward=None), *others]
    taken, rows, why = accepted_rows("nemo-rl", samples)
    assert (taken, list(why)) == (others, ["s0"])
    assert [row["extra_env_info"]["session_id"] for row in rows] == ["s1", "s2", "s3"]
    assert [row["idx"] for row in rows] == [row["idx"] for row in trainer_rows("nemo-rl", others)]


@pytest.mark.parametrize("names", [("a", "b"), ("", "b")], ids=["named", "an empty name"])
def test_rows_of_a_group_follow_each_other(names: tuple[str, str]) -> None:
    first, second = two_branches()
    samples = [replace(sample, session_id=f"s{n}", group=names[n % 2]) for n in range(4) for sample in (first, second)]
    assert [row["group_index"] for row in trainer_rows("slime", samples)] == [0] * 4 + [1] * 4
    ids = [row["trajectory_ids"] for row in trainer_rows("skyrl", samples)]
    assert [trajectory["instance_id"] for trajectory in ids] == [names[0]] * 4 + [names[1]] * 4
    assert [trajectory["repetition_id"] for trajectory in ids] == [0, 0, 1, 1] * 2
    assert exports.verl_data_proto(samples, pad_id=0, vocab_size=100)["non_tensors"]["uid"].tolist()[0] == names[0]


def test_groups_are_not_environments_of_prime_rl() -> None:
    first, second = two_branches()
    rows = trainer_rows("prime-rl", [first, replace(second, group="all")])  # prime-rl refuses this name
    assert [row["env_name"] for row in rows] == ["tokentape", "tokentape"]


def test_a_row_is_made_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Mock(wraps=exports.verl_agent_loop_output)
    monkeypatch.setattr(exports, "verl_agent_loop_output", built)
    next(iter_trainer_rows("verl", two_branches()))
    assert built.call_count == 1


def test_trl_rows_name_their_session() -> None:
    assert [row["session_id"] for row in trainer_rows("trl", two_branches())] == ["s", "s"]


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime", "miles", "skyrl", "nemo-rl", "agent-lightning"])
def test_rows_of_several_temperatures_are_refused_if_a_run_has_one(trainer: str) -> None:
    at = [
        replace(alike("processed", temperature=value), session_id=f"at {value}", reward=0.0)
        for value in (1.0, 1.0, 0.6)
    ]
    assert trainer_rows(trainer, at[:2])
    for rows_of in (trainer_rows, accepted_rows):
        with pytest.raises(InvalidRequest, match=r"temperature 0\.6 \(.*, temperature 1 \(.*: write"):
            rows_of(trainer, at)
    assert trainer_rows("prime-rl", [replace(sample, group="g") for sample in at])


@pytest.mark.parametrize("trainer", get_args(Trainer))
def test_rows_of_several_adapters_are_refused(trainer: str) -> None:
    (first, second), tuned = two_branches(), ("tuned", "tuned")
    with pytest.raises(InvalidRequest, match=r"adapter 'tuned' \(session 's'\), the model itself \(session 's'\)"):
        trainer_rows(trainer, [first, replace(second, adapters=tuned)])
    # The second sample trains its last turn only.
    assert trainer_rows(trainer, [replace(first, adapters=tuned), replace(second, adapters=(None, "tuned"))])


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_supports_in_some_rows_are_refused(trainer: str) -> None:
    samples = [with_supports(CUT, CUT), replace(with_supports(WHOLE, WHOLE), session_id="t", payloads={})]
    with pytest.raises(InvalidRequest, match="all turns or none"):
        trainer_rows(trainer, samples)
    assert trainer_rows(trainer, samples[:1])
    assert trainer_rows(trainer, samples[1:])


def test_numbers_that_json_lacks_are_refused() -> None:
    file = io.BytesIO()
    write_trainer_rows([{"a": 1.0}], file)
    assert json.loads(file.getvalue()) == {"a": 1}
    with pytest.raises(InvalidRequest, match="not finite"):
        write_trainer_rows([{"a": float("nan")}], file)


def test_a_parquet_file_has_the_fields_of_all_rows() -> None:
    file = io.BytesIO()
    write_trainer_rows([{"a": 1.0}, {"b": {"c": 2}}], file, parquet=True)
    assert pq.read_table(file).to_pylist() == [{"a": 1.0, "b": None}, {"a": None, "b": '{"c": 2}'}]


WITH_EXPERTS = "verl", "slime", "miles", "skyrl", "nemo-rl", "prime-rl"
WITH_SUPPORTS = "slime", "miles", "skyrl", "prime-rl"
REPLAYED = [
    *((trainer, [routed(sample) for sample in two_branches()]) for trainer in WITH_EXPERTS),
    *((trainer, [replace(with_supports(CUT, CUT), reward=1.0, group="g")]) for trainer in WITH_SUPPORTS),
]


def plain(value: Any) -> Any:
    """Return a row with arrays as lists, and with bytes of four-byte numbers as lists too."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, bytes):
        return np.frombuffer(value, "<i4").tolist()
    return [plain(entry) for entry in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def with_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """Decode the bytes in a row for prime-rl."""
    for name, encoded in {"sampling_mask": ("ids", "counts"), "routed_experts": ("data",)}.items():
        for key in encoded:
            if isinstance(row.get(name), dict):
                row[name][key] = msgspec.convert(row[name][key], bytes)
    return row


@pytest.mark.parametrize("parquet", [False, True], ids=["jsonl", "parquet"])
@pytest.mark.parametrize(("trainer", "samples"), REPLAYED, ids=lambda value: value if isinstance(value, str) else "")
def test_files_have_the_supports_and_experts_of_the_export(
    trainer: str, samples: list[Sample], *, parquet: bool
) -> None:
    rows = trainer_rows(trainer, samples)
    replayed = {"sampling_mask", "routed_experts", "rollout_routed_experts", "rollout_top_p_token_ids"}
    replayed |= {"rollout_sample_support", "rollout_expert_indices", "rollout_sampling_mask"}
    assert replayed & {*rows[0], *rows[0].get("message_log", [{}])[0]}
    file = io.BytesIO()
    write_trainer_rows(rows, file, parquet=parquet)
    file.seek(0)
    if parquet:
        read = pq.read_table(file).to_pylist()
        objects = [name for name, value in rows[0].items() if isinstance(value, dict)]
        read = [row | {name: json.loads(row[name]) for name in objects} for row in read]
        for message in (message for row in read for message in row.get("message_log", ())):
            for name in [name for name, value in message.items() if value is None]:
                del message[name]
    else:
        read = [json.loads(line) for line in file]
    assert [plain(with_bytes(row)) for row in read] == [plain(row) for row in rows]


class SamplingMask(msgspec.Struct, array_like=True):
    """The fields of prime-rl's class."""

    ids: bytes
    counts: bytes
    logprobs: bytes | None = None


class RoutedExperts(msgspec.Struct, array_like=True):
    """The fields of prime-rl's class."""

    data: bytes
    shape: list[int]
    dtype: str


@pytest.mark.parametrize(
    ("sample", "name", "kind"),
    [
        (with_supports(CUT, CUT), "sampling_mask", SamplingMask),
        (routed(two_branches()[0]), "routed_experts", RoutedExperts),
    ],
    ids=["supports", "experts"],
)
def test_prime_rl_s_classes_are_made_from_a_file_as_the_page_says(sample: Sample, name: str, kind: Any) -> None:
    sample = replace(sample, columns={"advantages": np.ones(len(sample.token_ids), np.float32)})
    file = io.BytesIO()
    write_trainer_rows(trainer_rows("prime-rl", [sample]), file)
    row = json.loads(file.getvalue())
    made = exports.prime_rl_training_sample(sample, "g", sampling_mask=SamplingMask, experts=RoutedExperts)
    assert msgspec.convert(list(row[name].values()), kind) == made[name]


def test_miles_has_its_own_field_for_supports() -> None:
    sample = replace(with_supports(CUT, CUT), reward=1.0)
    _, first, between, last = sample.token_ids.tolist()
    (row,) = trainer_rows("miles", [sample])
    assert row["rollout_sampling_mask"] == {"ids": [first, 90, between, last], "offsets": [0, 2, 3, 4]}
    assert "rollout_top_p_token_ids" not in row


@pytest.mark.parametrize(("trainer", "name"), [("slime", "slime"), ("miles", "Miles")])
def test_a_refusal_names_the_trainer(trainer: str, name: str) -> None:
    sample = replace(two_branches()[0], logprobs_of=None)
    with pytest.raises(InvalidRequest, match=f"^{name} computes"):
        trainer_rows(trainer, [sample])
