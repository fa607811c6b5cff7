"""Write exports to files, with one row per sample, for users of a trainer to load."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, Any

from tokentape._session.arrow import parquet_library
from tokentape.errors import InvalidRequest
from tokentape.training import _supports as replays
from tokentape.training import exports
from tokentape.training._collate import group_advantages
from tokentape.training._samples import Sample
from tokentape.training._trainers import TRAINERS, temperature

WITH_ADVANTAGES = ("prime-rl", "tinker")
"""Trainers that need advantages instead of rewards."""


def trainer_rows(trainer: str, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the rows of `iter_trainer_rows`."""
    return list(iter_trainer_rows(trainer, samples))


def iter_trainer_rows(trainer: str, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Yield the export for `trainer`, a name in `TRAINERS`, as one row per sample; for Agent Lightning one per turn.

    Rows of a group follow each other. The lists over samples that SkyRL and TRL use are split into rows. If a trainer
    needs advantages and no sample has them, they are the reward minus the mean of its group. Raises `InvalidRequest` as
    the exports do, for a trainer that has no row format, and if only some samples have advantages.
    """
    _refuse_several_runs(trainer, samples)
    if trainer in WITH_ADVANTAGES:
        without = [sample for sample in samples if "advantages" not in sample.columns]
        if without and len(without) < len(samples):
            raise InvalidRequest(
                f"{len(without)} of {len(samples)} samples have no column 'advantages', for example one of session "
                f"{without[0].session_id!r}: attach it to all, or to none to have them computed from rewards",
                "advantages",
            )
        # Without a scale, as both trainers compute them.
        samples = group_advantages(samples, scale=False) if without else samples
    numbers = {name: number for number, name in enumerate(dict.fromkeys(map(exports.group_or_session, samples)))}
    # slime, SkyRL and TRL take neighboring rows for a group; sessions of several groups are recorded at the same time.
    samples = sorted(samples, key=lambda sample: numbers[exports.group_or_session(sample)])
    groups = [exports.group_or_session(sample) for sample in samples]
    match trainer:
        case "trl":
            # TRL takes one row per rollout: the session's id shows which rows are branches of one.
            names = ("reward", "session_id")
            named = {name: [getattr(sample, name) for sample in samples] for name in names}
            yield from _apart(exports.trl_rollouts(samples) | named)
        case "skyrl":
            yield from _apart(exports.skyrl_generator_output(samples))
        case "verl":
            yield from map(exports.verl_agent_loop_output, samples)
        case "slime" | "miles":
            # Miles reads supports from a field of its own.
            sampling_mask = dict if trainer == "miles" else None
            yield from replays.alike_in_supports(
                exports.slime_sample(sample, n, numbers[groups[n]], sampling_mask=sampling_mask)
                for n, sample in enumerate(samples)
            )
        case "nemo-rl":
            for sample, group in zip(samples, groups, strict=True):
                yield exports.nemo_rl_datum(sample, numbers[group], tensors=False)
        case "prime-rl":
            # prime-rl logs metrics per environment. With a group's name they would be metrics per prompt.
            yield from (exports.prime_rl_training_sample(sample, "tokentape") for sample in samples)
        case "tinker":
            yield from map(exports.tinker_datum, samples)
        case "agent-lightning":
            for sample in samples:
                yield from exports.agent_lightning_triplets(sample)
        case _:
            raise InvalidRequest(
                f"{trainer!r} has no row format; use its function in `tokentape.training.exports`", "trainer"
            )


def _refuse_several_runs(trainer: str, samples: Sequence[Sample]) -> None:
    """Raise `InvalidRequest` for rows of several adapters, or of several temperatures if the trainer divides by one."""
    policies = {
        f"adapter {adapter!r}" if adapter else "the model itself": sample.session_id
        for sample in samples
        for (_, start, end), adapter in zip(sample.completions(), sample.adapters, strict=False)
        if sample.loss_mask[start:end].any()
    }
    about = TRAINERS.get(trainer)
    temperatures = {}
    if about is not None and about.setting is not None:
        temperatures = {f"temperature {temperature([sample], trainer):g}": sample.session_id for sample in samples}
    for names in (policies, temperatures):
        if len(names) > 1:
            sampled = ", ".join(f"{name} (session {session!r})" for name, session in sorted(names.items()))
            raise InvalidRequest(
                f"a run of {trainer} computes logprobs of one policy at one temperature; these samples are of "
                f"{sampled}: write a file for each, with --session",
                "session",
            )


def accepted_rows(
    trainer: str, samples: Sequence[Sample]
) -> tuple[Sequence[Sample], list[dict[str, Any]], dict[str, str]]:
    """Return the accepted samples, their rows, and the reasons for refused sessions by session id.

    Sessions are exported one by one only if exporting all of them together fails.
    """
    try:
        return samples, trainer_rows(trainer, samples), {}
    except InvalidRequest:
        accepted: list[Sample] = []
        refused: dict[str, str] = {}
    for session_id, of_session in groupby(samples, lambda sample: sample.session_id):
        own = list(of_session)
        try:
            trainer_rows(trainer, own)
        except InvalidRequest as error:
            refused[session_id] = str(error)
        else:
            accepted += own
    return accepted, trainer_rows(trainer, accepted), refused


def write_trainer_rows(rows: Iterable[dict[str, Any]], file: IO[bytes], *, parquet: bool = False) -> None:
    """Write rows as JSON lines or as Parquet. Both contain bytes as base64 text; Parquet has objects as JSON text."""
    lines = map(_line, rows)
    if not parquet:
        file.writelines(f"{line}\n".encode() for line in lines)
        return
    pq = parquet_library()
    import pyarrow as pa

    plain = [
        {name: json.dumps(value) if isinstance(value, dict) else value for name, value in json.loads(line).items()}
        for line in lines
    ]
    # `from_pylist` takes only the columns of the first row.
    names = dict.fromkeys(name for row in plain for name in row)
    pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in plain]), file)


def _line(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=_plain, allow_nan=False)
    except ValueError:
        raise InvalidRequest("a row has a number that is not finite, which JSON can't represent: drop it") from None


def _plain(value: Any) -> Any:
    return b64encode(value).decode() if isinstance(value, bytes) else value.tolist()


def _apart(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    columns = {name: values for name, values in batch.items() if values is not None}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
