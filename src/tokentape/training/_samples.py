"""Make samples from trajectories: decide which tokens are trained, and in which sequence.

The trajectories of a session share prefixes. Each sampled token carries loss in at most one sample of a session; in the
other samples it is context. Masks are decided after `select`, `split` and `max_length`: if the trajectory that trained
a shared turn was removed, the next trajectory with this turn trains it. The steps are plain functions, so you can write
your own. Where possible, a sample's arrays are views of its trajectory's arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, cast

import numpy as np

from tokentape._canonical import canonical_json
from tokentape._session.arrow import trajectories_table
from tokentape._session.fields import FIELDS, FileField, Layout
from tokentape._session.files import iter_file, write_file
from tokentape._session.lineage import check_roles
from tokentape._session.verdict import check_verdicts, wanted_verdict
from tokentape.errors import InvalidRequest
from tokentape.types import Provenance, TokenRows, TokenValues, Trajectory

if TYPE_CHECKING:
    import datasets


_Item = TypeVar("_Item", bound=Trajectory)


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Trajectory):
    """A trajectory, or a prefix of one, with its final loss mask.

    `loss_mask` is True for tokens that this sample trains. `logprobs` are NaN for trained tokens that were not sampled
    in this session, as in samples of supervised fine-tuning.
    """

    group: str | None = None
    """Samples in the same group are compared with each other (GRPO). None if `assemble` was called without `group`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample before its mask is decided: a prefix of a trajectory."""

    trajectory: Trajectory
    turns: int
    """Number of turns in the prefix."""
    trains: range
    """The turns that may carry loss, by position in the path."""


Select: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Trajectory]]
"""Select the trajectories of one session to keep."""

Split: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Piece]]
"""Split the trajectories of one session into pieces. If several pieces may train a turn, the first one does."""


def longest_branch(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Keep only the trajectory with the most tokens, the first one on a tie."""
    return [max(trajectories, key=lambda trajectory: len(trajectory.token_ids))] if trajectories else []


@dataclass(frozen=True, slots=True)
class KeepVerdicts:
    """Keep only trajectories with one of these verdicts: `exact`, `closed`, `forked`, or a cause: `forked:sibling`.

    Raises `InvalidRequest` for an unknown verdict.
    """

    wanted: Sequence[str]

    def __post_init__(self) -> None:
        check_verdicts(self.wanted)

    def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the trajectories with one of the verdicts."""
        return [trajectory for trajectory in trajectories if wanted_verdict(trajectory.verdict, self.wanted)]


@dataclass(frozen=True, slots=True)
class DropRetries:
    """Among turns with the same context, keep one and its continuations.

    Such siblings come from an agent that retried a call, or from calls with several choices: don't use this step to
    compare all answers. Contexts are the same if the turns have the same parent and add the same ids to it.
    """

    keep: Literal["first", "last", "continued"] = "last"
    """The turn committed `first` or `last`; `continued`: all turns that were continued, or the last if none was."""

    def __post_init__(self) -> None:
        if self.keep not in ("first", "last", "continued"):
            raise InvalidRequest(f"keep is {self.keep!r}: expected first, last or continued", "keep")

    def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the trajectories that contain no removed turn."""
        siblings: dict[tuple[int | None, bytes], set[int]] = {}
        continued: set[int] = set()
        for trajectory in trajectories:
            continued.update(trajectory.turns[:-1])
            before = 0
            starts = trajectory.completion_starts.tolist()
            for n, (turn, start) in enumerate(zip(trajectory.turns, starts, strict=True)):
                parent = trajectory.turns[n - 1] if n else None
                siblings.setdefault((parent, trajectory.token_ids[before:start].tobytes()), set()).add(turn)
                before = int(trajectory.completion_ends[n])
        kept_turns = {turn for alike in siblings.values() for turn in self._of(alike, continued)}
        return [trajectory for trajectory in trajectories if kept_turns.issuperset(trajectory.turns)]

    def _of(self, alike: set[int], continued: set[int]) -> set[int]:
        if self.keep == "first":
            return {min(alike)}
        return (alike & continued if self.keep == "continued" else set()) or {max(alike)}


def one_per_leaf(trajectories: Sequence[Trajectory]) -> Sequence[Piece]:
    """Return one sample per trajectory. A shared turn is trained in the first trajectory that has it."""
    return [Piece(trajectory, len(trajectory.turns), range(len(trajectory.turns))) for trajectory in trajectories]


def one_per_turn(trajectories: Sequence[Trajectory]) -> Sequence[Piece]:
    """Return one sample per turn: its context, and its completion as the only trained tokens.

    For trainers with one action per sequence. The total length is quadratic in the number of turns of a path. `reward`
    is still the whole path's reward; the action's reward is the last of `turn_rewards`.
    """
    first: dict[int, Piece] = {}
    for trajectory in trajectories:
        for n, turn in enumerate(trajectory.turns):
            first.setdefault(turn, Piece(trajectory, n + 1, range(n, n + 1)))
    return [first[turn] for turn in sorted(first)]


@dataclass(frozen=True, slots=True)
class MaxLength:
    """The largest number of tokens of a sample."""

    tokens: int
    how: Literal["cut", "drop"] = "drop"
    """`drop` removes a longer sample. `cut` removes its last tokens: the sample may end within a turn, but never with
    tokens that were not sampled."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.how not in ("cut", "drop"):
            raise InvalidRequest(
                f"tokens must be at least 1 and how 'cut' or 'drop'; found {self.tokens} and {self.how!r}"
            )


@dataclass(frozen=True, slots=True)
class AssemblyReport:
    """Count trajectories and samples. Reports from several calls can be added with `+`."""

    sessions: int = 0
    trajectories: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens of all samples."""
    trained_tokens: int = 0
    """Tokens with loss in all samples."""
    not_selected: int = 0
    """Trajectories that `select` removed."""
    too_long: int = 0
    """Samples that `MaxLength` dropped."""
    cut: int = 0
    """Samples that `MaxLength` cut."""
    cut_tokens: int = 0
    """Tokens cut off from samples."""
    cut_trained_tokens: int = 0
    """Those of `cut_tokens` that had loss."""
    nothing_to_train: int = 0
    """Samples that were removed because no token has loss: other samples train them, or they were cut off."""

    def __add__(self, other: AssemblyReport) -> AssemblyReport:
        return AssemblyReport(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Assembled:
    """Samples, and a report about what was removed."""

    samples: list[Sample] = field(default_factory=list)
    report: AssemblyReport = field(default_factory=AssemblyReport)


def assemble(
    trajectories: Iterable[Trajectory],
    *,
    select: Sequence[Select] = (),
    split: Split = one_per_leaf,
    max_length: MaxLength | None = None,
    group: str | Callable[[Trajectory], str] | None = None,
    roles: Sequence[str] | None = None,
) -> Assembled:
    """Make samples from trajectories, session by session, in the order in which the sessions come.

    Pass all trajectories of a session in one call, otherwise a token may be trained twice. Get them from
    `StoredSession.trajectories()`, `ClientSession.trajectories()`, a snapshot or `read_trajectories(...)`. `group` is
    the key of the group name in a session's metadata, or a function that returns the name. `roles` selects branches by
    role: `main`, `subagent`, `side_call`.

    >>> assembled = assemble(read_trajectories("rollouts.parquet"), group="task")                # doctest: +SKIP
    >>> assembled.report.trained_tokens                                                          # doctest: +SKIP
    18211

    Raises `InvalidRequest` for a session without the group's key in its metadata, with `roles` for trajectories without
    a role, and for trajectories that contradict themselves or others of their session.
    """
    if not isinstance(select, list | tuple):
        raise InvalidRequest(f"select is {select!r}: expected a list of functions, such as [longest_branch]", "select")
    if not isinstance(max_length, MaxLength | None):
        raise InvalidRequest(f"max_length is {max_length!r}: expected MaxLength(tokens, 'cut' or 'drop')", "max_length")
    if roles is not None:
        check_roles(roles)
        select = [partial(_with_roles, roles), *select]
    sessions: dict[str, list[Trajectory]] = {}
    for trajectory in each(trajectories, Trajectory, "`read_trajectories(PATH)`"):
        sessions.setdefault(trajectory.session_id, []).append(trajectory)
    parts = [_of_session(of_session, select, split, max_length, group) for of_session in sessions.values()]
    return Assembled(
        [sample for part in parts for sample in part.samples], sum((part.report for part in parts), AssemblyReport())
    )


def each(items: Iterable[_Item], kind: type[_Item], source: str = "`assemble(...).samples`") -> Iterator[_Item]:
    """Yield the items. Raises `InvalidRequest` unless each is a `kind`; `source` names what returns them."""
    for item in items if isinstance(items, Iterable) else [items]:
        if not isinstance(item, kind):
            raise InvalidRequest(f"found {type(item).__name__}, expected {kind.__name__} objects, as from {source}")
        yield item


def _with_roles(roles: Sequence[str], trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    silent = next((trajectory for trajectory in trajectories if not trajectory.role), None)
    if silent is not None:
        raise InvalidRequest(
            f"the trajectories of session {silent.session_id!r} have no roles: read them with `tokentape export` or a "
            "client's session, or pass `edges` to `StoredSession.trajectories`",
            "roles",
        )
    return [trajectory for trajectory in trajectories if trajectory.role in roles]


def _check_consistent(trajectories: Sequence[Trajectory]) -> None:
    """Raise `InvalidRequest` unless the sampled tokens are the completions, and a turn is the same on all branches.

    Two runs may have used one session id. Taken for one session, only the first run would be trained.
    """
    contents: dict[int, bytes] = {}
    for trajectory in trajectories:
        name = f"session {trajectory.session_id!r}, leaf {trajectory.leaf}"
        sampled = trajectory.provenance == Provenance.SAMPLED
        in_completion = np.zeros(len(sampled), bool)
        before = 0
        for turn, start, end in trajectory.completions():
            in_completion[start:end] = True
            content = trajectory.token_ids[before:end].tobytes()
            if contents.setdefault(turn, content) != content:
                raise InvalidRequest(
                    f"{name}: turn {turn} has other tokens than in another trajectory of this session; are these two "
                    "runs with the same session id? Assemble them separately",
                    "trajectories",
                )
            before = end
        differs = sampled != in_completion
        if sampled.any() and differs.any():  # texts for supervised fine-tuning have completions that were not sampled
            raise InvalidRequest(
                f"{name}: completion_starts and completion_ends do not fit the provenance of token "
                f"{int(differs.argmax())}; export it again",
                "trajectories",
            )


def _of_session(
    trajectories: Sequence[Trajectory],
    select: Sequence[Select],
    split: Split,
    max_length: MaxLength | None,
    group: str | Callable[[Trajectory], str] | None,
) -> Assembled:
    _check_consistent(trajectories)
    selected = trajectories
    for step in select:
        selected = step(selected)
    pieces = list(split(selected))
    counts = Counter(sessions=1, trajectories=len(trajectories), not_selected=len(trajectories) - len(selected))
    limit = max_length.tokens if max_length is not None else None
    owners = _owners(trajectories)
    trained: set[int] = set()
    samples = []
    for piece in pieces:
        if max_length is not None and max_length.how == "drop" and _length(piece) > max_length.tokens:
            counts["too_long"] += 1
            continue
        path = piece.trajectory.turns
        mine = [n for n in piece.trains if path[n] not in trained]
        trained.update(path[n] for n in mine)
        whole = _length(piece)
        length = whole if limit is None else _length(piece, limit)
        starts, ends = piece.trajectory.completion_starts, piece.trajectory.completion_ends
        trained_tokens = sum(max(min(int(ends[n]), length) - int(starts[n]), 0) for n in mine)
        if length < whole:
            lost = sum(int(ends[n]) - int(starts[n]) for n in mine) - trained_tokens
            counts.update(cut=1, cut_tokens=whole - length, cut_trained_tokens=lost)
        if not trained_tokens:
            counts["nothing_to_train"] += 1
            continue
        counts.update(samples=1, tokens=length, trained_tokens=trained_tokens)
        samples.append(_sample(piece, mine, length, owners, group_name(piece.trajectory, group)))
    return Assembled(samples, AssemblyReport(**counts))


def _length(piece: Piece, limit: int | None = None) -> int:
    """Return a piece's length up to and including its last sampled token. `limit` is the most tokens to count."""
    starts, ends = piece.trajectory.completion_starts[: piece.turns], piece.trajectory.completion_ends[: piece.turns]
    if limit is not None:
        ends = np.minimum(ends[starts < limit], limit)
    return int(ends[-1]) if len(ends) else 0


def _owners(trajectories: Sequence[Trajectory]) -> dict[int, Trajectory]:
    """Return the trajectory that trains each turn. In it, a missing column value is NaN."""
    owners: dict[int, Trajectory] = {}
    for trajectory in trajectories:
        for n, start in enumerate(trajectory.completion_starts.tolist()):
            if start < len(trajectory.loss_mask) and trajectory.loss_mask[start]:
                owners.setdefault(trajectory.turns[n], trajectory)
    return owners


def _sample(
    piece: Piece, mine: Sequence[int], length: int, owners: Mapping[int, Trajectory], group: str | None
) -> Sample:
    whole = piece.trajectory
    # A completion can be empty.
    turns = int(((whole.completion_starts < length) | (whole.completion_ends == length))[: piece.turns].sum())
    loss_mask = np.zeros(length, np.bool_)
    for n in mine:
        loss_mask[whole.completion_starts[n] : whole.completion_ends[n]] = True
    limits = {"token": length, "turn": turns}
    values = {
        field.name: value[: limits.get(field.per)] if field.per else value
        for field in FIELDS
        for value in [getattr(whole, field.name)]
    }
    return Sample(
        **values
        | {
            "leaf": whole.turns[turns - 1],
            "loss_mask": loss_mask,
            "completion_ends": np.minimum(whole.completion_ends[:turns], length),
            "finish_reasons": tuple(
                reason if end <= length else "length"
                for reason, end in zip(whole.finish_reasons, whole.completion_ends[:turns], strict=False)
            ),
            "weight_spans": tuple((a, min(b, length), version) for a, b, version in whole.weight_spans if a < length),
            # A sample ends with a sampled token, so an image is never cut.
            "media": tuple(span for span in whole.media if span.start < length),
        },
        columns=_columns(whole, mine, length, owners),
        payloads={
            name: TokenRows(payload.rows[:length], payload.known[:length]) for name, payload in whole.payloads.items()
        },
        group=group,
    )


def _columns(
    whole: Trajectory, mine: Sequence[int], length: int, owners: Mapping[int, Trajectory]
) -> dict[str, TokenValues]:
    """Return columns with NaN for missing values in the turns that the sample trains.

    `whole` has zeros for turns that it does not train; the turn's owner has the values, or NaN.
    """
    others = [owners[whole.turns[n]] for n in mine if whole.turns[n] in owners]
    names = sorted({name for trajectory in [whole, *others] for name in trajectory.columns})
    columns = {}
    for name in names:
        values = whole.columns.get(name)
        own = np.zeros(len(whole.token_ids), np.float32) if values is None else values
        for n in mine:
            owner = owners.get(whole.turns[n])
            if owner is whole and values is not None:
                continue
            own = own.copy() if own is values else own
            start, end = int(whole.completion_starts[n]), int(whole.completion_ends[n])
            recorded = None if owner is None else owner.columns.get(name)
            if recorded is not None:
                # The path before a turn is the same in all trajectories with the turn, so offsets agree.
                own[start:end] = recorded[start:end]
            elif values is None or owner is not None or not values[start:end].any():
                own[start:end] = np.nan
        columns[name] = own[:length]
    return columns


def group_name(trajectory: Trajectory, group: str | Callable[[Trajectory], str] | None) -> str | None:
    """Return the name of a trajectory's group. Raises `InvalidRequest` if its session's metadata lacks the key."""
    if not isinstance(group, str):
        return None if group is None else group(trajectory)
    value = trajectory.metadata.get(group)
    if value is None:  # null would make one group of all sessions without a name
        raise InvalidRequest(
            f"the metadata of session {trajectory.session_id!r} has no {group!r} to name its group; its keys: "
            f"{', '.join(key for key in trajectory.metadata if key != group) or 'none'}. Set it when you create the "
            f"session: client.session(ID, metadata={{{group!r}: ...}})",
            "group",
        )
    return value if isinstance(value, str) else canonical_json(value)


SAMPLES = Layout(Sample, (FileField("group", "string", nullable=True),), "samples_version", 1)
"""The layout of sample files: Parquet or JSON lines of trajectories with their final mask and the column `group`.

They can also be read as trajectories. `tokentape.samples_version` in a Parquet file's metadata, and `samples_version`
in a line, is the version of the fields that only samples have: it changes if such a field changes or is removed.
"""


def write_samples(samples: Iterable[Sample], path: str | Path) -> int:
    """Write samples to a file, as JSON lines if its name ends with `.jsonl`, else as Parquet. Return their number.

    For Parquet all samples are in memory; JSON lines are written one by one.
    """
    return write_file(each(samples, Sample), path, SAMPLES)


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Yield the samples in a file, bit for bit. Raises `InvalidRequest` for an unknown format or version."""
    return cast("Iterator[Sample]", iter_file(path, SAMPLES))


def to_dataset(samples: Iterable[Sample]) -> datasets.Dataset:
    """Return a Hugging Face dataset in memory, with one row per sample. Needs `datasets`."""
    import datasets

    return datasets.Dataset(
        datasets.table.InMemoryTable(trajectories_table(list(each(samples, Sample)), layout=SAMPLES))
    )
