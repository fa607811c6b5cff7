"""Clients of a running gateway: sessions for agents, rewards, trajectories as numpy arrays, weight sync."""

from __future__ import annotations

from tokentape.client._asynchronous import AsyncClient, AsyncClientSession
from tokentape.client._blocking import Client, ClientSession, ClientSnapshot
from tokentape.client._results import (
    AbortedTurn,
    DropReport,
    EngineState,
    KeptSession,
    LeafState,
    RewardState,
    SessionEntry,
    SessionState,
    SnapshotManifest,
    TurnState,
)

__all__ = [
    "AbortedTurn", "AsyncClient", "AsyncClientSession", "Client", "ClientSession", "ClientSnapshot", "DropReport",
    "EngineState", "KeptSession", "LeafState", "RewardState", "SessionEntry", "SessionState", "SnapshotManifest",
    "TurnState",
]  # fmt: skip
