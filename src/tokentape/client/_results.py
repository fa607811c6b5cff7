"""A gateway's responses as typed objects. Unknown fields, from newer gateways, are ignored."""

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
    """Unix seconds."""
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
    """Why the turn started a new branch; None if it continued a branch or is the first turn."""
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
    """The distribution that the recorded log-probabilities belong to; None if it is not known."""
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
    """A turn that was aborted. No trajectory contains it."""

    turn: int
    parent: int | None
    cause: str | None
    added_tokens: int
    sampled_tokens: int


@dataclass(frozen=True)
class RewardState:
    """A reward for a session, a turn, or the path to a leaf."""

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
    """A key for this session only; None if the gateway has no keys."""
    turns: Sequence[TurnState]
    leaves: Sequence[LeafState]
    aborted: Sequence[AbortedTurn]
    rewards: Sequence[RewardState]
    columns: Sequence[str]
    """Names of the per-token values that `annotate` and `score` attached."""
    payloads: Sequence[str]
    """Names of per-token data from the engine besides logprobs, such as routed experts."""
    lineage: Sequence[LineageEdge] = ()
    """Where the session's branches come from."""


@dataclass(frozen=True)
class EngineState:
    """A gateway's engine, and whether calls may start."""

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
    """Adapter versions set by `resume`, by adapter."""
    gateways: int = 1
    """Number of gateways that serve the same record."""
    replicas: Mapping[str, Any] = field(default_factory=dict)
    """Whether each engine replica accepts calls, by URL."""
    idle: bool | None = None
    """In the response to a pause, whether all calls have ended."""


@dataclass(frozen=True)
class SnapshotManifest:
    """A snapshot: its digest and counts. Lists of snapshots omit `sessions`."""

    snapshot_id: int
    created_at: float
    since: int | None
    state: str
    """`held`, `confirmed` or `released`."""
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
    """The id, turns and leaves of each session."""


@dataclass(frozen=True)
class KeptSession:
    """A session that was not deleted, and why."""

    session_id: str
    reason: str


@dataclass(frozen=True)
class DropReport:
    """The result of dropping a snapshot's sessions: which were deleted and which were kept."""

    dropped: Sequence[str]
    kept: Sequence[KeptSession]
