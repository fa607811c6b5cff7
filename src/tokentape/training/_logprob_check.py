"""Compare recorded logprobs with a trainer's logprobs, and check that the trainer has the sampled ids.

The report has three channels, each with its own limit: *numeric*, the same ids in the same context with other logprobs;
*id drift*, the same text with other ids, because it was retokenized; *text drift*, another text, because the messages
were rendered again. Tokens after the first different id have another context, so they are not in the numeric channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape._session.arrow import read_rows as read_table_rows
from tokentape.audit._id_rows import read_ids, read_logprobs
from tokentape.audit._mismatch import LOOK_TOP, NOT_FINITE, Attribution, Mismatch
from tokentape.audit._statistics import Numbers, NumbersTally
from tokentape.audit._tokendiff.retokenizing import Channel, Pairing, pair_ids, retokenized
from tokentape.audit._tokendiff.retokenizing import TokenDrift as Drift
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._scoring import Scores
from tokentape.errors import InvalidRequest
from tokentape.types import Logprobs, TokenIds, Trajectory

Forward: TypeAlias = Callable[[TokenIds], Logprobs]
"""Map ids to the logprob of each id given the ids before it; NaN for the first id. Shape [tokens]."""


_ROUNDING = 1e-4
"""Logprobs up to this many nats above 0 are explained by float32 rounding."""

NOTHING_COMPARED = "no token was compared"
"""A failure that says nothing about the trainer."""

_ANY_SIZE = 2**31
"""Stands for an unknown vocabulary size. With it, logprobs normalized over the vocabulary can't be compared."""


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A trainer's ids and logprobs for one trajectory."""

    token_ids: TokenIds | None
    """The trainer's ids; None if they are the recorded ids."""
    logprobs: Logprobs | None
    """The trainer's logprobs, one per id; the first is ignored. None to compute them with `forward`."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A token with a large difference between the trainer's logprob and the recorded one."""

    session_id: str
    leaf: int
    turn: int
    """The `seq` of the turn that sampled the token."""
    position: int
    """Index of the token in the trajectory."""
    token_id: int
    text: str | None
    """Text of the token; None without a tokenizer."""
    recorded: float
    trainer: float
    channel: Channel
    drift_class: str | None
    """Kind of the last changed stretch of ids up to this token; None if no id changed."""


@dataclass(frozen=True, slots=True)
class LogprobLimits:
    """Limits for `LogprobReport.failures`."""

    mean: float = 0.02
    """Maximum of the mean absolute logprob difference in the numeric channel, in nats."""
    delta: float | None = None
    """Maximum absolute difference in the numeric channel, in nats. No limit by default: low precision has outliers."""
    k3: float = 0.01
    drift: float = 0.0
    """Maximum share of trained tokens with id drift, and maximum share with text drift."""
    missing: int = 0
    """Maximum number of trajectories that only the record or only the trainer's file has, or that the file cuts."""


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """The result of `check_logprobs`."""

    sequences: int
    without_trainer: int
    """Number of recorded trajectories that the trainer's rows lack."""
    unknown: int
    """Number of trainer's rows that match no recorded trajectory."""
    cut: int
    """Number of trainer's rows that end before the last trained token."""
    cut_tokens: int
    """Number of trained tokens after the ends of those rows."""
    numeric: Numbers
    """Logprob differences of tokens with the recorded id and the recorded context."""
    id_drift: Drift
    text_drift: Drift
    after_drift: Numbers
    """Logprob differences of tokens that both sides have, after the first difference in ids."""
    if_retokenized: Drift | None
    """Drift that decoding and retokenizing each trajectory would cause; None without a tokenizer."""
    outliers: tuple[Outlier, ...]
    not_comparable: Mapping[str, int]
    """Number of tokens that were not compared, by reason: their recorded logprobs are of another distribution than the
    trainer's logprobs. Logprobs in a trainer's file are assumed to be of the recorded distribution."""
    above_zero: int
    """Number of logprobs above 0 on either side, which are not probabilities."""
    causes: tuple[Attribution, ...]
    """Causes of numeric differences beyond rounding. Empty unless `forward` can return alternatives."""

    @property
    def compared(self) -> int:
        """Number of tokens with a logprob on both sides."""
        return self.numeric.tokens + self.numeric.not_finite + self.after_drift.tokens + self.after_drift.not_finite

    def failures(self, limits: LogprobLimits) -> list[tuple[str, str]]:
        """Return (channel, message) for each exceeded limit. Channel `rows`: trajectories missing or cut on a side."""
        failures: list[tuple[str, str]] = []
        numbers = self.numeric
        if self.without_trainer + self.unknown + self.cut > limits.missing:
            sides = f"{self.without_trainer} only in the record, {self.unknown} only in the trainer's file"
            if self.cut:
                sides += f", {self.cut} cut in the trainer's file, without {self.cut_tokens} trained tokens"
            failures.append(("rows", f"{sides}; limit {limits.missing}"))
        if self.above_zero:
            failures.append(("numeric", f"{self.above_zero} logprobs are above 0, so they are not log-probabilities"))
        if not self.compared:
            failures.append(("numeric", NOTHING_COMPARED))
        if numbers.not_finite:
            failures.append(("numeric", f"the trainer has no finite logprob for {numbers.not_finite} tokens"))
        for name, value, limit in (
            ("mean difference", numbers.mean, limits.mean),
            ("largest difference", numbers.max, limits.delta),
            ("k3", numbers.k3, limits.k3),
        ):
            if limit is not None and value > limit:
                failures.append(("numeric", f"{name} {value:.3g}, limit {limit:g}"))
        drifts: tuple[tuple[Channel, Drift], ...] = (("id drift", self.id_drift), ("text drift", self.text_drift))
        for channel, drift in drifts:
            # With limit 0, drift in tokens that are not trained fails too.
            if drift.changed_sequences and (drift.share > limits.drift or not limits.drift):
                counts = f"{drift.changed_tokens} of {drift.tokens} trained tokens changed"
                where = f"in {drift.changed_sequences} of {drift.sequences} sequences"
                failures.append((channel, f"{counts}, {where}; limit {limits.drift:g}"))
        return failures


def check_logprobs(
    trajectories: Iterable[Trajectory],
    *,
    rows: Mapping[tuple[str, int], TrainerRow] | None = None,
    forward: Forward | None = None,
    tokenizer: Tokenizer | None = None,
    outliers: int = 10,
    precision: str = "float32",
    adapter: str | None = None,
) -> LogprobReport:
    """Compare the recorded logprobs of trained tokens with a trainer's logprobs.

    `rows` has the trainer's rows by session id and leaf; a trajectory without a row is counted, but not compared.
    Without `rows`, the trainer's ids are taken to be the recorded ids. `forward` computes logprobs that the rows lack.
    `outliers` is the number of tokens to list. If differences exceed rounding in `precision`, their causes are looked
    for, provided that `forward` comes from `forward_pass`. `adapter` is the name of the LoRA adapter that `forward`
    includes; without it, turns sampled with an adapter are not compared.

    Raises `InvalidRequest` if logprobs are missing and there is no `forward`, if a row has different numbers of
    logprobs and ids, or if ids differ and there is no tokenizer to classify the difference.
    """
    vocab_size = forward.vocab_size if isinstance(forward, ModelForward) else _ANY_SIZE
    tally = _Tally(outliers, tokenizer, forward, Mismatch(precision, vocab_size, adapter))
    seen = set()
    absent = 0
    for trajectory in trajectories:
        key = (trajectory.session_id, trajectory.leaf)
        row = TrainerRow(None, None) if rows is None else rows.get(key)
        if row is None:
            absent += 1
        else:
            seen.add(key)
            tally.add(trajectory, row)
    return tally.report(absent, 0 if rows is None else len(rows.keys() - seen))


class ModelForward:
    """A `Forward` that computes a model's logprobs in float32, and can return alternatives. Made by `forward_pass`."""

    def __init__(self, model: Any, folder: Path, chunk: int) -> None:
        from tokentape.engines._forward import ForwardPass
        from tokentape.engines._loading import known_ids, load_tokenizer

        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._folder = folder
        has_tokens = (folder / "tokenizer.json").is_file()
        excluded = ~known_ids(load_tokenizer(folder), model) if has_tokens else None
        self._pass = ForwardPass(model, chunk=chunk, excluded=excluded)

    def __call__(self, ids: TokenIds) -> Logprobs:
        """Return the logprob of each id given the ids before it, NaN for the first id. Shape [tokens]."""
        return np.concatenate([np.full(min(len(ids), 1), np.nan, np.float32), self.scores(ids, 1).logprobs])

    def scores(self, ids: TokenIds, start: int, top: int = 0) -> Scores:
        """Score `ids[start:]`, with `top` alternatives each. Raises `InvalidRequest` for ids without an embedding."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InvalidRequest(
                f"the ids range from {ids.min()} to {ids.max()}, but the model in {self._folder} has only "
                f"{self.vocab_size} embedding rows: use the model that the sessions were sampled with"
            )
        return self._pass.score(ids, start, top)


def forward_pass(
    folder: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    chunk: int = 1024,
    adapter: str | Path | None = None,
) -> ModelForward:
    """Load a model folder and return its forward pass. Logprobs are normalized over all rows of the output layer.

    A sequence is processed in chunks of `chunk` tokens with a KV cache, which bounds the memory for logits. `adapter`
    is the folder of a LoRA adapter to merge into the weights. Needs torch and transformers. Raises `EngineError` if the
    model or the adapter can't be loaded.
    """
    from tokentape.engines._adapters import merged
    from tokentape.engines._loading import load_model

    model = load_model(Path(folder), dtype=dtype, device=device)
    return ModelForward(model if adapter is None else merged(model, Path(adapter), dtype=dtype), Path(folder), chunk)


def read_rows(source: str | Path) -> dict[tuple[str, int], TrainerRow]:
    """Read a trainer's rows from Parquet or JSON lines (`.jsonl`).

    The columns `session_id` and `leaf` identify the trajectory of a row. `token_ids` and `trainer_logprobs` are the
    trainer's values; one of the two may be missing. Other columns, such as `logprobs`, are ignored.

    Raises `InvalidRequest` if a row lacks `session_id`, `leaf` or both values, repeats a session id and leaf, or has
    values that are no ids or no numbers.
    """
    rows: dict[tuple[str, int], TrainerRow] = {}
    for number, row in enumerate(read_table_rows(Path(source), _COLUMNS), 1):
        ids, logprobs = row.get("token_ids"), row.get("trainer_logprobs")
        if "session_id" not in row or "leaf" not in row or (ids is None and logprobs is None):
            raise InvalidRequest(
                f"{source}, row {number}: expected session_id, leaf, and token_ids or trainer_logprobs, but found "
                f"{', '.join(sorted(name for name, value in row.items() if value is not None)) or 'nothing'}"
            )
        where = f"{source}, row {number}"
        key = (row["session_id"], _leaf(row["leaf"], where))
        if key in rows:
            raise InvalidRequest(f"{where}: session {key[0]!r}, leaf {key[1]} already has a row")
        token_ids = None if ids is None else read_ids(ids, f"{where}: token_ids")
        tokens = logprobs if token_ids is None else token_ids
        values, problem = read_logprobs(logprobs, len(tokens) if isinstance(tokens, Sized) else 0, 0)
        if problem:
            raise InvalidRequest(f"{where}: trainer_logprobs: {problem}")
        rows[key] = TrainerRow(token_ids, values)
    return rows


def _leaf(value: Any, where: str) -> int:
    with suppress(TypeError, ValueError, OverflowError):
        if (leaf := int(value)) == float(value):
            return leaf
    raise InvalidRequest(f"{where}: expected leaf to be a branch's last turn, an integer; found {value!r}")


_COLUMNS = ("session_id", "leaf", "token_ids", "trainer_logprobs")


class _Tally:
    def __init__(self, outliers: int, tokenizer: Tokenizer | None, forward: Forward | None, mismatch: Mismatch) -> None:
        self._limit, self._tokenizer, self._forward, self._mismatch = outliers, tokenizer, forward, mismatch
        self._numeric, self._after_drift = NumbersTally(), NumbersTally()
        self._drifts = {"id drift": Drift(), "text drift": Drift()}
        self._retokenized = None if tokenizer is None else Drift()
        self._outliers: list[tuple[float, Outlier]] = []
        """The tokens with the largest differences."""
        self._above_zero = self._sequences = self._cut = self._cut_tokens = 0

    def add(self, trajectory: Trajectory, row: TrainerRow) -> None:
        self._sequences += 1
        ids = trajectory.token_ids if row.token_ids is None else row.token_ids
        trained = trajectory.loss_mask.copy()
        trained[:1] = False
        if row.logprobs is not None and len(row.logprobs) != len(ids):
            raise InvalidRequest(
                f"session {trajectory.session_id!r}, leaf {trajectory.leaf}: the trainer has {len(row.logprobs)} "
                f"logprobs for {len(ids)} ids"
            )
        if row.logprobs is None:
            self._given()
        pairing = self._compare(trajectory, ids)
        # Cut rows and drift count for all trained tokens, also where logprobs are of another distribution.
        self._count_rows(trajectory, trained, pairing)
        self._above_zero += int((trajectory.logprobs[trained] > _ROUNDING).sum())
        positions = np.flatnonzero(trained & (pairing.partner >= 0))
        finite = np.isfinite(trajectory.logprobs[positions])
        if not finite.all():
            self._mismatch.not_comparable[NOT_FINITE] += int((~finite).sum())
        positions = positions[finite]
        if row.logprobs is None:
            logprobs, comparable = self._rescaled(trajectory, ids, positions, pairing)
            positions = positions[comparable[positions]]
            trainer = logprobs[positions].astype(np.float64)
        else:
            trainer = row.logprobs[pairing.partner[positions]].astype(np.float64)
        differences = trainer - trajectory.logprobs[positions]
        self._above_zero += int((trainer > _ROUNDING).sum())
        before = positions < pairing.first
        self._numeric.add(differences[before])
        self._after_drift.add(differences[~before])
        size = np.where(np.isfinite(differences), np.abs(differences), np.inf)
        for n in np.argsort(-size, kind="stable")[: self._limit].tolist():
            outlier = self._outlier(trajectory, pairing, int(positions[n]), float(trainer[n]))
            self._outliers.append((float(size[n]), outlier))
        self._outliers = nlargest(self._limit, self._outliers, key=itemgetter(0))

    def _count_rows(self, trajectory: Trajectory, trained: npt.NDArray[np.bool_], pairing: Pairing) -> None:
        """Count the cut and the changed tokens among the trained ones, and those that retokenizing would change."""
        end = max([change.end for change in pairing.changes], default=0)
        last = max(np.flatnonzero(pairing.partner >= 0), default=-1) + 1
        cut_tokens = int(trained[max(end, last) :].sum())
        self._cut += bool(cut_tokens)
        self._cut_tokens += cut_tokens
        for channel in self._drifts:
            drifted = pairing if pairing.channel == channel else None
            self._drifts[channel] = self._drifts[channel].added(trained, drifted)
        if self._tokenizer is not None and self._retokenized is not None:
            retokenized_pairing = pair_ids(
                trajectory.token_ids, retokenized(self._tokenizer, trajectory.token_ids), self._tokenizer
            )
            self._retokenized = self._retokenized.added(
                trained, None if retokenized_pairing.channel == "numeric" else retokenized_pairing
            )

    def report(self, absent: int, unknown: int) -> LogprobReport:
        for doubt in self._mismatch.doubts():
            ids = doubt.trajectory.token_ids[: doubt.end]
            self._mismatch.look(doubt, self._scores(ids, doubt.start, LOOK_TOP))
        return LogprobReport(
            sequences=self._sequences,
            without_trainer=absent,
            unknown=unknown,
            cut=self._cut,
            cut_tokens=self._cut_tokens,
            numeric=self._numeric.numbers(),
            id_drift=self._drifts["id drift"],
            text_drift=self._drifts["text drift"],
            after_drift=self._after_drift.numbers(),
            if_retokenized=self._retokenized,
            outliers=tuple(outlier for _, outlier in self._outliers),
            not_comparable=dict(self._mismatch.not_comparable),
            above_zero=self._above_zero,
            causes=self._mismatch.causes(),
        )

    def _given(self) -> Forward:
        if self._forward is None:
            raise InvalidRequest("trainer_logprobs are missing: pass a model to compute them")
        return self._forward

    def _scores(self, ids: TokenIds, start: int, top: int) -> Scores:
        forward = self._given()
        if isinstance(forward, ModelForward):
            return forward.scores(ids, start, top)
        return Scores(forward(ids)[start:], np.empty((len(ids) - start, 0), np.float32))

    def _rescaled(
        self, trajectory: Trajectory, ids: TokenIds, positions: npt.NDArray[np.int64], pairing: Pairing
    ) -> tuple[Logprobs, npt.NDArray[np.bool_]]:
        """Score the trainer's ids, and convert the scores at recorded `positions` to the recorded distribution.

        Also return a mask of the tokens for which this is possible. Causes are looked for only before the first
        different id.
        """
        scores = self._scores(ids, 1, self._mismatch.top_for(trajectory))
        if ids is not trajectory.token_ids:
            scores = _at_partners(scores, pairing.partner)
        mask = np.zeros(len(trajectory.token_ids), bool)
        mask[positions] = True
        return self._mismatch.add(trajectory, mask, 1, scores, before=pairing.first)

    def _compare(self, trajectory: Trajectory, ids: TokenIds) -> Pairing:
        if self._tokenizer is not None:
            return pair_ids(trajectory.token_ids, ids, self._tokenizer)
        if not np.array_equal(trajectory.token_ids[: len(ids)], ids):
            raise InvalidRequest(
                f"session {trajectory.session_id!r}, leaf {trajectory.leaf}: the trainer's ids differ from the "
                "recorded ids: pass the model folder, so that the differences can be classified"
            )
        places = np.arange(len(trajectory.token_ids))
        return Pairing("numeric", np.where(places < len(ids), places, -1), len(places))

    def _outlier(self, trajectory: Trajectory, pairing: Pairing, position: int, trainer: float) -> Outlier:
        kinds = [change.kind for change in pairing.changes if change.start <= position]
        token_id = int(trajectory.token_ids[position])
        return Outlier(
            session_id=trajectory.session_id,
            leaf=trajectory.leaf,
            turn=trajectory.turns[int(np.searchsorted(trajectory.completion_ends, position, "right"))],
            position=position,
            token_id=token_id,
            text=None if self._tokenizer is None else self._tokenizer.decode([token_id]),
            recorded=float(trajectory.logprobs[position]),
            trainer=trainer,
            channel="numeric" if position < pairing.first else pairing.channel,
            drift_class=kinds[-1] if kinds else None,
        )


def _at_partners(scores: Scores, partner: npt.NDArray[np.int64]) -> Scores:
    """Return the scores of a trainer's ids, which begin at its second id, at the recorded tokens from the second on."""
    partners = partner[1:]
    if not len(scores.logprobs):
        return Scores(np.full(len(partners), np.nan, np.float32), np.empty((len(partners), 0), np.float32))
    places = np.maximum(partners - 1, 0)
    # The first id of a sequence has no logprob.
    return Scores(np.where(partners > 0, scores.logprobs[places], np.float32(np.nan)), scores.top[places])
