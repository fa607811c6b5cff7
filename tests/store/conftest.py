"""Each kind of place for a record, to test the same contract on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from tests.postgres import Server
from tokentape.store import Store, open_record


def open_databases() -> list[Path]:
    """Return the open SQLite databases of this process, one entry per descriptor. Skip the test without /proc."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("needs /proc")
    paths = []
    for descriptor in descriptors.iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            paths.append(descriptor.readlink())
    return sorted(path for path in paths if "tokentape.db" in path.name)


@dataclass(frozen=True)
class Place:
    """The place of a record."""

    location: str | Path

    def open(self, **options: Any) -> Store:
        return open_record(self.location, **options)


@dataclass
class Places:
    """Makes places of a kind."""

    directory: Path
    server: Server | None
    made: list[str] = field(default_factory=list)
    count: int = 0

    def new(self) -> Place:
        self.count += 1
        if self.server is None:
            return Place(self.directory / str(self.count))
        self.made.append(self.server.new_place())
        return Place(self.made[-1])


@contextmanager
def counted(statements: list[str]) -> Iterator[None]:
    """Add the statements that are executed in the context."""

    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture(params=["sqlite", "postgres"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    server: Server | None = request.getfixturevalue("postgres") if request.param == "postgres" else None
    places = Places(tmp_path, server)
    yield places
    for url in places.made:
        assert server is not None
        server.drop(url)


@pytest.fixture
def place(places: Places) -> Place:
    return places.new()


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with place.open() as store:
        yield store
