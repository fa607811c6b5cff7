"""Golden sessions: sampled turns, and the values that a loss function must get for them.

The expected values are computed from the turns by walking from each leaf to its root, without the code that makes
samples. The sessions expose common errors: the token that ends a turn is also the padding id, prompts contain sampled
ids, so that a mask can't be made from ids, and the logprobs need full float32 precision and go below -10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sin
from typing import Any

import numpy as np

from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.types import FinishReason, Provenance, Reward, SessionInfo, TokenDistribution, Trajectory, Turn

VOCAB_SIZE = 128
PAD = 2
"""The padding id, which also ends every turn with finish reason `stop`."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token."""

    session: str
    turn: int
    offset: int
    id: int
    version: str
    temperature: float

    def logprob(self, temperature: float | None = None) -> float:
        """Return the token's logprob under the golden model, by default at the temperature it was sampled at."""
        return _logprob(self.id, 11 * ord(self.session) + 7 * self.turn + self.offset, temperature or self.temperature)


@cache
def _logprob(token_id: int, place: int, temperature: float) -> float:
    logits = [6 * sin(1.7 * n * n + place) / temperature for n in range(VOCAB_SIZE)]
    return logits[token_id] - log(sum(map(exp, logits)))


@dataclass(frozen=True, slots=True)
class GoldenTurn:
    """A turn: the ids that it added to its parent's context, and the tokens that it sampled."""

    parent: int | None
    added: tuple[int, ...]
    sampled: tuple[Token, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class GoldenSession:
    """A recorded session. Without `logprob_temperature`, its logprobs are for the sampling temperature."""

    name: str
    group: str
    reward: float | None
    turns: tuple[GoldenTurn, ...]
    logprob_temperature: float | None

    def tokens(self) -> list[Token]:
        """Return all tokens to train, each one once."""
        return [token for turn in self.turns if turn.finish != "abort" for token in turn.sampled]

    def paths(self) -> list[list[int | Token]]:
        """Return each root-to-leaf path without aborted turns: a `Token` if it was sampled, an id if it was not."""
        seqs = [seq for seq, turn in enumerate(self.turns) if turn.finish != "abort"]
        leaves = [seq for seq in seqs if all(self.turns[child].parent != seq for child in seqs)]
        paths: list[list[int | Token]] = []
        for leaf in leaves:
            path: list[int | Token] = []
            ancestor: int | None = leaf
            while ancestor is not None:
                path[:0] = [*self.turns[ancestor].added, *self.turns[ancestor].sampled]
                ancestor = self.turns[ancestor].parent
            paths.append(path)
        return paths

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories that Tokentape makes from the session."""
        session = Session(SessionInfo(self.name, 0.0, {"group": self.group}), map(self._turn, range(len(self.turns))))
        return trajectories(session, [] if self.reward is None else [Reward(self.name, None, self.reward, 0.0)])

    def _turn(self, seq: int) -> Turn:
        turn = self.turns[seq]
        versions = [token.version for token in turn.sampled]
        temperature = turn.sampled[0].temperature
        codes = [Provenance.CLOSE if token_id == PAD else Provenance.TEMPLATE for token_id in turn.added]
        sibling = any(earlier.parent == turn.parent and earlier.finish != "abort" for earlier in self.turns[:seq])
        return Turn(
            session_id=self.name,
            seq=seq,
            parent=turn.parent,
            setup="",
            messages=({"role": "user", "content": f"{seq}"},),
            reply={"role": "assistant", "content": f"{seq}"},
            added_ids=np.array(turn.added, np.int32),
            added_provenance=np.array(codes, np.uint8),
            completion_ids=np.array([token.id for token in turn.sampled], np.int32),
            logprobs=np.array([token.logprob(self.logprob_temperature) for token in turn.sampled], np.float32),
            finish_reason=turn.finish,
            stop=PAD if turn.finish == "stop" else None,
            fork="sibling" if sibling else None,
            sampling={"temperature": temperature},
            engine=f"golden 1 {'processed' if self.logprob_temperature is None else 'raw'}_logprobs",
            weight_version=versions[0],
            created_at=0.0,
            digest="",
            weight_changes=tuple((n, versions[n]) for n in range(1, len(versions)) if versions[n] != versions[n - 1]),
            abort_cause="engine_unavailable" if turn.finish == "abort" else None,
            sampled_from=TokenDistribution(False, temperature, False, False),
            logprobs_of=TokenDistribution(False, self.logprob_temperature or temperature, False, False),
        )


@dataclass(frozen=True, slots=True)
class Golden:
    """The sessions of one batch. A data pipeline may refuse a `refusable` batch with `InvalidRequest`."""

    name: str
    sessions: tuple[GoldenSession, ...]
    refusable: bool = False

    def advantages(self, counted: Iterable[str] | None = None) -> dict[str, float]:
        """Return reward minus group mean, by session. The mean is over the sessions in `counted`, by default all."""
        rewards = {session.name: session.reward for session in self.sessions if session.reward is not None}
        groups = {session.name: session.group for session in self.sessions}
        names = [name for name in counted or rewards if name in rewards]
        by_group = {group: [rewards[name] for name in names if groups[name] == group] for group in groups.values()}
        means = {group: sum(values) / max(1, len(values)) for group, values in by_group.items()}
        return {name: reward - means[groups[name]] for name, reward in rewards.items()}


def _session(
    name: str,
    reward: float | None,
    parents: Sequence[int | None],
    *,
    group: int = 0,
    ends: Mapping[int, FinishReason] | None = None,
    new_weights: tuple[int, int] = (99, 0),
    temperature: float = 1.0,
    logprob_temperature: float | None = None,
) -> GoldenSession:
    """Make a session with one turn per parent. The weight version is 7 before turn and offset `new_weights`, then 8."""
    turns: list[GoldenTurn] = []
    number = ord(name) - ord("a")
    for seq, parent in enumerate(parents):
        finish: FinishReason = (ends or {}).get(seq, "stop")
        # The first id occurs in no other turn, so it identifies the turn.
        place = 8 * number + seq
        ids = [64 + place, *(3 + (7 * place + 11 * n) % 40 for n in range(3 + place % 3)), *[PAD] * (finish == "stop")]
        versions = ["8" if (seq, n) >= new_weights else "7" for n in range(len(ids))]
        sampled = [Token(name, seq, n, ids[n], versions[n], temperature) for n in range(len(ids))]
        close = [] if parent is None or turns[parent].finish == "stop" else [PAD]
        added = [50, 10, 51 + group, 12] if parent is None else [*close, 55, 10 + seq, 56]
        turns.append(GoldenTurn(parent, tuple(added), tuple(sampled), finish))
    return GoldenSession(name, f"g{group}", reward, tuple(turns), logprob_temperature)


def _with_short_session(name: str, parents: Sequence[int | None] = (None, 0, 1), **changed: Any) -> Golden:
    both = {key: value for key, value in changed.items() if key in ("temperature", "logprob_temperature")}
    sessions = _session("a", 1.0, parents, **changed), _session("b", 0.3, [None], **both)
    return Golden(name, sessions, refusable="temperature" in changed)


GOLDEN = (
    _with_short_session("exact"),
    _with_short_session("forked", (None, 0, 0, 2)),
    _with_short_session("truncated at the end", ends={2: "length"}),
    _with_short_session("truncated in the middle", ends={0: "length"}),
    _with_short_session("aborted", (None, 0, 0, 2), ends={1: "abort"}),
    _with_short_session("two weight versions", new_weights=(1, 2)),
    Golden(
        "groups of unequal branches",
        (
            _session("a", 1.0, (None, 0, 0, 0, 3)),
            _session("b", 0.0, (None, 0, 1)),
            _session("c", 0.35, (None, 0, None)),
            _session("d", 0.0, (None,), group=1),
            _session("e", 0.75, (None, None, 1), group=1),
        ),
    ),
    Golden(
        "no reward",
        (_session("a", 1.0, (None, 0, 1)), _session("b", None, (None, 0)), _session("c", 0.3, (None,))),
        refusable=True,
    ),
    _with_short_session("sampled at 1.4, recorded at 1.4", temperature=1.4),
    _with_short_session("sampled at 1.4, recorded at 1", temperature=1.4, logprob_temperature=1.0),
)
