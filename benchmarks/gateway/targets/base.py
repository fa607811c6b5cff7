"""Interface of a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.gateway.http import Connection
from benchmarks.gateway.processes import Process


@dataclass(frozen=True)
class Site:
    """Addresses and folders for a target."""

    completions: str
    """Base URL of the mock vLLM server without /inference/v1/generate."""
    generate: str
    """The same with /inference/v1/generate."""
    folder: Path
    """Empty folder of the target."""
    model: Path
    """Folder with tokenizer and chat template."""

    @property
    def log(self) -> Path:
        """File for its output, outside of its record."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Session:
    """How to send the calls of a session."""

    path: str
    headers: dict[str, str]


class Target(Protocol):
    """A measured program."""

    name: str
    kind: str
    """`floor`; `capture`: records what a server reports as sampled; `exact`: sends token ids from the second
    turn on; `proxy`: records nothing; `several`: several gateways on one record, measured with many clients only."""
    streams: bool
    stores: bool
    """Whether its record is on disk."""

    def missing(self) -> str | None:
        """Return why it can't be measured, or None."""
        ...

    def version(self) -> str:
        """Return the version of the program."""
        ...

    def start(self, site: Site) -> tuple[str, Process | None]:
        """Start it and return its process when it responds, and its base URL, or several joined by spaces."""
        ...

    async def session(self, connection: Connection, name: str) -> Session:
        """Create a session."""
        ...
