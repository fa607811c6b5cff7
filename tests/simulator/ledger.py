"""The ledger of the simulated clients: what each received. The record must agree with it at the end."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.simulator.world import World


@dataclass
class Received:
    """One choice of a reply that a client has received whole."""

    call: tuple[str, str]
    """The agent, and which of its calls."""
    session: str
    turn: int
    prompt: list[int]
    ids: list[int]
    first_sent: float
    """When the call was sent first."""
    at: float
    first: bool
    """It came to the first attempt."""


@dataclass
class Removal:
    """A session that a client had deleted, or dropped with a snapshot."""

    session: str
    sent: float
    drops: bool = False
    done: float = math.inf
    """When it ended: infinity until it is set; minus infinity if nothing was removed."""


@dataclass
class Contents:
    """A snapshot, as its consumer has read it."""

    snapshot_id: int
    body: bytes
    sessions: tuple[str, ...] = ()
    """Of some it has no trajectory: their turns were aborted or are unread."""
    since: Contents | None = None
    confirmed: bool = False
    held: bool = True
    dropped: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        self.trajectories = [SimpleNamespace(**line, columns={"a": line.get("column_a", ())}) for line in lines]
        self.turns = {
            (trajectory.session_id, seq): trajectory.token_ids[start:end]
            for trajectory in self.trajectories
            for seq, start, end in zip(
                trajectory.turns, trajectory.completion_starts, trajectory.completion_ends, strict=True
            )
        }

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


_Place = tuple[str, str, int | None]
"""Session, the kind of target (`session`, `leaf` or `turn`) and its number."""


@dataclass
class Ledger:
    world: World
    calls: int = 0
    """Requests for a turn that clients sent."""
    received: list[Received] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    snapshots: list[Contents] = field(default_factory=list)
    rewards: dict[_Place, set[float | None]] = field(default_factory=dict)
    """The values that each may have; several if it is unknown whether one was recorded."""
    columns: dict[tuple[str, int], set[float | None]] = field(default_factory=dict)
    """The first values of column `a` of turns."""
    valued: set[str] = field(default_factory=set)
    """Sessions whose leaves got column `b` at the end."""
    changes: Counter[str] = field(default_factory=Counter)
    """By session how often a reward or column began or ended to be given."""

    def __post_init__(self) -> None:
        self.faults = self.world.faulty

    def removed(self, session: str, since: float = -math.inf, *, drops: bool | None = None) -> bool:
        """Return whether a client may have removed a session at this time or later."""
        return any(
            removal.session == session and removal.done >= max(since, 0.0) and drops in (None, removal.drops)
            for removal in self.removals
        )

    def reward_of(self, session: str, leaf: int) -> set[float | None]:
        """Return the rewards that a trajectory may have."""
        own = self.rewards.get((session, "leaf", leaf), {None})
        others = self.rewards.get((session, "session", None), {None}) if None in own else set()
        return (own - {None}) | others

    def faults_of(self, session: str, trajectories: Iterable[Any]) -> Iterator[str]:
        """Yield the rewards and turn columns of a session that differ from those sent."""
        for trajectory in trajectories:
            if trajectory.reward not in self.reward_of(session, trajectory.leaf):
                yield f"{session}: the reward of leaf {trajectory.leaf} is {trajectory.reward}"
            values = np.full(len(trajectory.token_ids), np.nan)
            if len(column := trajectory.columns.get("a", ())):
                values = np.array(column, np.float64)
            places = zip(
                trajectory.turns,
                trajectory.turn_rewards,
                trajectory.completion_starts,
                trajectory.completion_ends,
                strict=True,
            )
            for seq, reward, start, end in places:
                expected = None if reward is None or reward != reward else reward
                if expected not in self.rewards.get((session, "turn", seq), {None}):
                    yield f"{session}: the reward of turn {seq} is {expected}"
                allowed = self.columns.get((session, seq), {None})
                if not any(_is_column(values[start:end], first) for first in allowed):
                    yield f"{session}: the values of turn {seq} are {values[start:end].tolist()}"

    def missing_in(self, contents: Contents, before: Iterable[Received]) -> Iterator[str]:
        """Yield the turns that a client had received before a snapshot, and that it and those before it don't have."""
        turns, at = dict[tuple[str, int], list[int]](), contents
        while at is not None:
            turns, at = at.turns | turns, at.since
        for trajectory in before:
            if (
                trajectory.first
                and not self.removed(trajectory.session)
                and turns.get((trajectory.session, trajectory.turn)) != trajectory.ids
            ):
                yield f"{trajectory.session} turn {trajectory.turn} is not in snapshot {contents.snapshot_id}"


def _is_column(values: Any, first: float | None) -> bool:
    """Return whether these are the values that begin so; without a first one, that none was given."""
    if first is None:
        return not np.nan_to_num(values).any()
    return bool((values == first + np.arange(len(values))).all())


def prompt_faults(world: World, messages: list[dict[str, Any]], prompt: list[int], *, whole: bool) -> Iterator[str]:
    """Yield where a prompt is not the messages that the client sent, in their order and nothing else.

    Only a `whole` history still has its reasoning: what is rendered anew has what the template keeps.
    """
    start = world.encode("<|im_start|>")[0]
    ends = [at for at, token_id in enumerate(prompt) if token_id == start] + [len(prompt)]
    parts = [world.renderer.tokenizer.decode(prompt[at + 1 : end]) for at, end in pairwise(ends)]
    if len(parts) != len(messages) + 1:
        yield f"{len(messages)} messages were sent, and the prompt has {len(parts) - 1}"
    for message, part in zip(messages, parts, strict=False):
        role, _, text = part.partition("\n")
        # A line for each piece of reasoning, and of the text around it.
        lines = [*message["content"].split("\n")]
        lines += message.get("reasoning_content", "").split("\n") if whole else ()
        same = all(line.strip() in text for line in lines)
        if message["role"] == "user":
            same = text == f"{message['content']}<|im_end|>\n"
        if role != message["role"] or not same:
            yield f"the prompt has {part!r} where {message} was sent"
