"""What the benchmark needs to know of a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process


@dataclass(frozen=True)
class Site:
    """Where a target runs."""

    completions: str
    """Base URL of the stand-in for vLLM without /inference/v1/generate."""
    generate: str
    """The same with it."""
    folder: Path
    """The target's own, empty."""
    model: Path
    """Folder with tokenizer and chat template."""

    @property
    def log(self) -> Path:
        """Where its output goes: not among what it keeps."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Session:
    """How a session's calls are sent."""

    path: str
    headers: dict[str, str]


class Target(Protocol):
    """A program to be measured."""

    name: str
    kind: str
    """`floor`; `capture`: keeps what a server tells that it sampled; `exact`: sends token ids from the second turn on;
    `proxy`: keeps nothing."""
    streams: bool
    stores: bool
    """It keeps its record on disk."""

    def missing(self) -> str | None:
        """Why it can't be measured here; None if it can."""
        ...

    def version(self) -> str:
        """What is measured."""
        ...

    def start(self, site: Site) -> tuple[str, Process | None]:
        """Start it; its base URL and its process, once it answers."""
        ...

    async def session(self, connection: Connection, name: str) -> Session:
        """Begin a session."""
        ...
