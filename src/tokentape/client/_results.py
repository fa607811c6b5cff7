"""A gateway's answers as typed objects. Unknown fields, from newer gateways, are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokentape.types import LineageEdge, Resume, TokenDistribution


@dataclass(frozen=True)
class SessionEntry:
    """A session in a list of sessions."""

    session_id: str
    created_at: float
    """Seconds since 1970."""
    metadata: dict[str, Any]
    turns: int
    tokens: int
    """Tokens of all turns, each counted once."""
    sampled_tokens: int


@dataclass(frozen=True)
class TurnState:
    """A turn without its text and ids."""

    seq: int
    """The turn's number in its session, from 0."""
    parent: int | None
    fork: str | None
    """Why the turn began a new branch; None if it continued one or is the first."""
    finish_reason: str
    """Why sampling ended; `stop` also where clients see `tool_calls`."""
    added_tokens: int
    """Prompt tokens that the turn added to its parent's context."""
    sampled_tokens: int
    weight_version: str | None
    created_at: float
    digest: str
    weight_changes: Sequence[Any] = ()
    """Where in the completion the weights changed."""
    abort_cause: str | None = None
    engine: str | None = None
    sampled_from: TokenDistribution | None = None
    """The distribution that the tokens were sampled from; None if it is not known."""
    logprobs_of: TokenDistribution | None = None
    """The distribution that the recorded log-probabilities are of; None if it is not known."""
    resumes: Sequence[Resume] = ()
    adapter: str | None = None
    parse_problem: str | None = None
    """Why the reply was recorded as plain text, if it could not be parsed."""


@dataclass(frozen=True)
class LeafState:
    """The last turn of a branch, with the verdict of the trajectory that ends there."""

    turn: int
    verdict: str
    tokens: int
    reward: float | None
    role: str = ""
    """`main`, `subagent` or `side_call`; empty from gateways that don't report roles."""


@dataclass(frozen=True)
class AbortedTurn:
    """A turn that was aborted, so no trajectory contains it."""

    turn: int
    parent: int | None
    cause: str | None
    added_tokens: int
    sampled_tokens: int


@dataclass(frozen=True)
class RewardState:
    """A reward of a session, of one turn, or of the path that ends with a leaf."""

    turn: int | None
    leaf: int | None
    value: float
    created_at: float


@dataclass(frozen=True)
class SessionState:
    """A session's tree of turns, without their text and ids."""

    session_id: str
    created_at: float
    metadata: dict[str, Any]
    api_key: str | None
    """A key that opens this session and no other; None if the gateway has no keys."""
    turns: Sequence[TurnState]
    leaves: Sequence[LeafState]
    aborted: Sequence[AbortedTurn]
    rewards: Sequence[RewardState]
    columns: Sequence[str]
    """Names of the values per token that `annotate` and `score` attached."""
    payloads: Sequence[str]
    """Names of per-token data from the engine besides logprobs, such as routed experts."""
    lineage: Sequence[LineageEdge] = ()
    """Where the session's branches come from."""


@dataclass(frozen=True)
class EngineState:
    """The engine of a gateway, and whether calls may start."""

    engine: str
    """The engine's name, version and logprobs mode."""
    model: str
    max_context: int | None
    vocab_size: int
    sampling: Sequence[str]
    """Sampling parameters that the engine honors."""
    paused: bool
    calls_under_way: int
    weight_version: str | None
    adapter_versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of adapters that `resume` has named, by adapter."""
    gateways: int = 1
    """Gateways that serve the same record."""
    replicas: Mapping[str, Any] = field(default_factory=dict)
    """Engine replicas by URL, and whether each one takes calls."""
    idle: bool | None = None
    """In the answer to a pause: whether no call is under way any more."""


@dataclass(frozen=True)
class SnapshotManifest:
    """A snapshot: its digest and counts. Lists of snapshots leave out `sessions`."""

    snapshot_id: int
    created_at: float
    since: int | None
    state: str
    """`open`, `confirmed` or `released`."""
    digest: str | None
    """SHA-256 of the contents as JSON lines."""
    schema_version: int
    trajectories: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    verdicts: dict[str, int] | None = None
    columns: Sequence[str] | None = None
    payloads: Sequence[str] | None = None
    sessions: Sequence[dict[str, Any]] | None = None
    """By session: its id, turns and leaves."""


@dataclass(frozen=True)
class KeptSession:
    """A session that was not deleted, and why."""

    session_id: str
    reason: str


@dataclass(frozen=True)
class DropReport:
    """The result of dropping a snapshot's sessions: the deleted ones and the kept ones."""

    dropped: Sequence[str]
    kept: Sequence[KeptSession]
