"""What a run of the demo shows, all of it found in its record, its file and the engine's own log. Needs no torch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokentape._session.files import read_trajectories, write_trajectories
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.demo.drift import RetokenizationDrift, retokenization_drift, turns_unlike_engine
from tokentape.errors import Conflict
from tokentape.store import SqliteStore, StoredSession, verify
from tokentape.store._served_model import ServedModel, write_served_model

RECORDED = Path(__file__).parent / "recorded"
"""A run that `scripts/record_demo.py` recorded: its database, and hashes of the calls in the engine's log."""


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions that sampled in one way."""

    temperature: float
    sessions: int
    streamed: int
    solved: int
    drift: RetokenizationDrift


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What was run and what was found, all of it computed from the record, the file and the engine's own log."""

    directory: Path
    trajectories_file: Path
    groups: tuple[Group, ...]
    turns: int
    tokens: int
    """Each added or sampled token once, however many contexts it was part of."""
    trajectories: int
    turns_unlike_engine: int
    """Recorded turns, as the file has them, that the engine did not sample exactly so."""
    findings: int
    """Of `verify`."""
    seconds: float
    """From the first request to the last reply."""

    @property
    def exact(self) -> bool:
        """Whether the record is what was sampled."""
        return not self.turns_unlike_engine and not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            **asdict(self),
            "directory": str(self.directory),
            "trajectories_file": str(self.trajectories_file),
            "exact": self.exact,
        }


def new_directory() -> Path:
    """A directory under runs/demo that is not there yet, named after the time."""
    return Path("runs/demo") / time.strftime("%Y%m%d-%H%M%S")


def refuse_used(directory: Path) -> None:
    """Raise `Conflict` if the directory holds anything."""
    if directory.exists() and any(directory.iterdir()):
        raise Conflict(f"{directory} is not empty; name a new directory")


def replay(directory: Path) -> DemoReport:
    """Copy the recorded run to `directory`, and look at it as at one that was just made. Raises `Conflict`."""
    refuse_used(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Without the permissions of the file that was installed, which may be read-only.
    shutil.copyfile(RECORDED / "tokentape.db", directory / "tokentape.db")
    renderer = Renderer.load(MODEL)
    write_served_model(directory, ServedModel(str(MODEL), renderer.tokenizer.sha256, renderer.fingerprint))
    made = json.loads((RECORDED / "engine.json").read_text(encoding="utf-8"))
    return examine(directory, renderer, made["calls"], made["seconds"])


def examine(directory: Path, renderer: Renderer, calls: Iterable[str], seconds: float) -> DemoReport:
    """Write the trajectories of a run to a file, and report what is in the record.

    `calls` are the `call_digest` of each call in the engine's own log.
    """
    file = directory / "trajectories.jsonl"
    with SqliteStore.open(directory, read_only=True) as record:
        stored = sorted(record.iter_sessions(), key=lambda one: one.info.session_id)
    write_trajectories((row for one in stored for row in one.trajectories()), file)
    written = read_trajectories(file)
    return DemoReport(
        directory=directory,
        trajectories_file=file,
        groups=_groups(renderer, stored),
        turns=sum(len(one.turns) for one in stored),
        tokens=sum(t.added_ids.size + t.completion_ids.size for one in stored for t in one.turns),
        trajectories=len(written),
        turns_unlike_engine=turns_unlike_engine(written, calls),
        findings=len(verify(directory).findings),
        seconds=seconds,
    )


def _groups(renderer: Renderer, stored: list[StoredSession]) -> tuple[Group, ...]:
    groups = []
    for temperature in sorted({one.info.metadata["temperature"] for one in stored}):
        own = [one for one in stored if one.info.metadata["temperature"] == temperature]
        groups.append(
            Group(
                temperature=temperature,
                sessions=len(own),
                streamed=sum(one.info.metadata["stream"] for one in own),
                solved=sum(any(reward.value > 0 for reward in one.rewards) for one in own),
                drift=retokenization_drift(renderer, own),
            )
        )
    return tuple(groups)
