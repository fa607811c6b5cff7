"""Flatten session trees to trajectories: each root-to-leaf path as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokentape._session.lineage import roles
from tokentape._session.media import path_media
from tokentape._session.payloads import blank_rows
from tokentape._session.tree import Session
from tokentape._session.verdict import bridge_states, verdict
from tokentape.types import (
    Event,
    LineageEdge,
    Provenance,
    Reward,
    TokenRows,
    TokenValues,
    Trajectory,
    Turn,
    TurnColumn,
    TurnPayload,
)

_SAMPLED = int(Provenance.SAMPLED)


def trajectories(
    session: Session,
    rewards: Iterable[Reward] = (),
    columns: Iterable[TurnColumn] = (),
    payloads: Iterable[TurnPayload] = (),
    events: Iterable[Event] = (),
    *,
    unread: bool = False,
    edges: Sequence[LineageEdge] | None = None,
) -> list[Trajectory]:
    """Return one trajectory per leaf, in commit order.

    Every sampled token has `loss_mask` True in exactly one trajectory, the first that contains it; in the others it is
    context. Turns that no client read are left out unless `unread` is True; their verdicts then contain `unread`.

    Rewards, columns, payloads and events are in order of arrival: if a turn has several, the last one is used. Each
    branch that contains a turn has the turn's columns and payloads. `edges` come from `lineage`.
    """
    data = _TurnData(rewards, columns, payloads, events)
    data.roles = {} if edges is None else roles(session, edges)
    data.edges = {edge.turn: edge for edge in edges or ()}
    trained: set[int] = set()
    out = []
    for leaf in session.leaves(unread=unread):
        path = session.path(leaf)
        out.append(_flatten(session, path, trained, data))
        trained.update(turn.seq for turn in path)
    return out


def trained_turns(session: Session, leaf: int) -> list[Turn]:
    """Return the turns that the branch to `leaf` trains, root first: those that no branch to an earlier leaf has."""
    earlier = {turn.seq for other in session.leaves() if other < leaf for turn in session.path(other)}
    return [turn for turn in session.path(leaf) if turn.seq not in earlier]


class _TurnData:
    """A session's rewards, columns, payloads, bridge checks, roles and edges, by turn."""

    roles: Mapping[int, str]
    edges: Mapping[int, LineageEdge]

    def __init__(
        self,
        rewards: Iterable[Reward],
        columns: Iterable[TurnColumn],
        payloads: Iterable[TurnPayload],
        events: Iterable[Event],
    ) -> None:
        self.bridges = bridge_states(events)
        self.rewards = {
            (None, reward.leaf) if reward.leaf is not None else (reward.turn, None): reward.value for reward in rewards
        }
        """Rewards by (turn, leaf). A reward for the whole session has the key (None, None)."""
        self.columns: dict[int, dict[str, TokenValues]] = {}
        self.payloads: dict[int, dict[str, TurnPayload]] = {}
        for column in columns:
            self.columns.setdefault(column.turn, {})[column.name] = column.values
        for payload in payloads:
            self.payloads.setdefault(payload.turn, {})[payload.name] = payload


def _flatten(session: Session, path: Sequence[Turn], trained: set[int], data: _TurnData) -> Trajectory:
    sizes = [size for turn in path for size in (turn.added_ids.size, turn.completion_ids.size)]
    ends = np.cumsum(sizes, dtype=np.int32).reshape(-1, 2)
    sampled = np.repeat([False, True] * len(path), sizes)
    provenance = np.full(len(sampled), _SAMPLED, np.uint8)
    provenance[~sampled] = np.concatenate([turn.added_provenance for turn in path])
    logprobs = np.zeros(len(sampled), np.float32)
    logprobs[sampled] = np.concatenate([turn.logprobs for turn in path])
    loss_mask = np.repeat([[False, turn.seq not in trained] for turn in path], sizes) if trained else sampled
    leaf = path[-1].seq
    return Trajectory(
        session_id=session.info.session_id,
        leaf=leaf,
        token_ids=np.concatenate([ids for turn in path for ids in (turn.added_ids, turn.completion_ids)]),
        provenance=provenance,
        loss_mask=loss_mask,
        logprobs=logprobs,
        turns=tuple(turn.seq for turn in path),
        completion_starts=ends[:, 0],
        completion_ends=ends[:, 1],
        weight_versions=tuple(turn.weight_version for turn in path),
        reward=data.rewards.get((None, leaf), data.rewards.get((None, None))),
        verdict=verdict(path, data.bridges, unread=session.is_unread(leaf)),
        metadata=session.info.metadata,
        turn_rewards=np.array([data.rewards.get((turn.seq, None), np.nan) for turn in path], np.float64),
        weight_spans=_weight_spans(path, ends[:, 0].tolist()),
        columns=_columns(path, ends[:, 1], loss_mask, data.columns),
        payloads=_payloads(path, ends[:, 1], data.payloads),
        media=tuple(path_media(path)),
        sampled_from=tuple(turn.sampled_from for turn in path),
        logprobs_of=tuple(turn.logprobs_of for turn in path),
        # Older turns keep None because snapshot digests were computed over lines without finish reasons.
        finish_reasons=tuple(turn.finish_reason if turn.sampled_from else None for turn in path),
        adapters=tuple(turn.adapter for turn in path),
        role=data.roles.get(leaf, ""),
        lineage=tuple(data.edges[turn.seq] for turn in path if turn.seq in data.edges),
    )


def _weight_spans(path: Sequence[Turn], starts: Sequence[int]) -> tuple[tuple[int, int, str], ...]:
    spans = []
    for turn, start in zip(path, starts, strict=True):
        if not turn.weight_changes:
            if len(turn.completion_ids):
                spans.append((start, start + len(turn.completion_ids), turn.weight_version))
            continue
        changes = [(0, turn.weight_version), *turn.weight_changes]
        ends = [offset for offset, _ in turn.weight_changes] + [len(turn.completion_ids)]
        spans += [
            (start + offset, start + end, version)
            for (offset, version), end in zip(changes, ends, strict=True)
            if offset < end
        ]
    return tuple(spans)


def _columns(
    path: Sequence[Turn],
    ends: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.bool_],
    values_by_turn: Mapping[int, Mapping[str, TokenValues]],
) -> dict[str, TokenValues]:
    if not values_by_turn:
        return {}
    names = sorted({name for turn in path for name in values_by_turn.get(turn.seq, ())})
    # A missing value must not train as if it were zero, and a context token must not turn a masked sum into NaN.
    columns = {name: np.where(loss_mask, np.float32(np.nan), np.float32(0)) for name in names}
    for turn, end in zip(path, ends.tolist(), strict=True):
        for name, values in values_by_turn.get(turn.seq, {}).items():
            columns[name][end - len(values) : end] = values
    return columns


def _payloads(
    path: Sequence[Turn], ends: npt.NDArray[np.int32], payloads_by_turn: Mapping[int, Mapping[str, TurnPayload]]
) -> dict[str, TokenRows]:
    if not payloads_by_turn:
        return {}
    out: dict[str, TokenRows] = {}
    tokens = int(ends[-1])
    for turn, start in zip(path, [0, *ends[:-1].tolist()], strict=True):
        for name, payload in sorted(payloads_by_turn.get(turn.seq, {}).items()):
            if name not in out:
                empty = blank_rows((tokens, *payload.rows.shape[1:]), payload.rows.dtype)
                out[name] = TokenRows(empty, np.zeros(tokens, bool))
            filled, position, rows = out[name], start + payload.start, payload.rows
            if payload.start < 0 and filled.known[position]:
                # Keep the parent's own row: its logprobs belong to that row.
                position, rows = position + 1, rows[1:]
            filled.rows[position : position + len(rows)] = rows
            filled.known[position : position + len(rows)] = True
    return out
