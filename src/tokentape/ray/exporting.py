"""A large record as a folder of Parquet files, each written by an actor that reads the record for itself."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokentape.errors import Conflict, NotFound
from tokentape.ray.work import in_order
from tokentape.session.arrow import ExtraNames, write_parquet
from tokentape.session.verdict import check_verdicts
from tokentape.store import Store, StoredSession
from tokentape.store.exporting import ExportCounts, exported
from tokentape.store.location import open_store

SESSIONS_PER_FILE = 1000


@dataclass(frozen=True, slots=True)
class ExportFile:
    """What goes into one file."""

    name: str
    session_ids: tuple[str, ...]


def export(
    location: str | Path,
    folder: str | Path,
    *,
    sessions: Collection[str] | None = None,
    verdicts: Sequence[str] | None = None,
    sessions_per_file: int = SESSIONS_PER_FILE,
    actors: int | None = None,
    cpus: float = 1.0,
) -> ExportCounts:
    """Write the trajectories of a record to Parquet files, on all machines of a Ray cluster.

    The files, read in the order of their names, hold the rows that `tokentape export` writes to one, with the same
    columns. The folder appears under its name once it is complete.

    Args:
        location: a PostgreSQL URL, a data directory or an archive; to be reached from every machine.
        folder: where the files go, a new folder that every machine can write to.
        sessions: only these; all if None.
        verdicts: only trajectories with these; all if None.
        sessions_per_file: how many sessions one file holds.
        actors: at most so many processes; as many as there are CPUs if None.
        cpus: of each.

    Raises:
        Conflict: there is something at `folder` already.
        InvalidRequest: there is no such verdict.
        NotFound: there is no such session among those that are named.
        StoreError: or a kind of it; as `open_store`.

    Example:
        >>> export("postgresql://tokentape@db.internal/tokentape", "exports/2026-11")      # doctest: +SKIP
        ExportCounts(sessions=120000, trajectories=131072, tokens=2147483648, trained_tokens=536870912)

    """
    check_verdicts(verdicts or ())
    target = Path(folder).resolve()
    if target.exists():
        raise Conflict(f"there is a {target} already; name a new folder")
    if isinstance(location, Path) or "://" not in location:
        location = Path(location).resolve()
    with open_store(location, read_only=True) as store:
        extra = store.extra_names(sessions)
        ids = list(_ids(store)) if sessions is None else list(dict.fromkeys(sessions))
    pieces = [
        ExportFile(f"part-{number:05}.parquet", tuple(ids[start : start + sessions_per_file]))
        for number, start in enumerate(range(0, len(ids), sessions_per_file))
    ]
    part = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        counts = ExportCounts()
        opened = partial(_writing, location, part, extra, verdicts, sessions is not None)
        # A record without sessions gives a file without rows, which readers can open.
        for one in in_order(pieces or [ExportFile("part-00000.parquet", ())], opened, actors=actors, cpus=cpus):
            counts.add(one)
        for left in part.glob(".*"):
            left.unlink()
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return counts


def _ids(store: Store) -> Iterator[str]:
    """All sessions in the order of `iter_sessions`."""
    after = 0
    while page := store.sessions(limit=1000, after=after):
        yield from (one.info.session_id for one in page)
        after = page[-1].position


def _writing(
    location: str | Path, folder: Path, extra: ExtraNames, verdicts: Sequence[str] | None, named: bool
) -> Callable[[ExportFile], ExportCounts]:
    store = open_store(location, read_only=True)

    def sessions(piece: ExportFile) -> Iterator[StoredSession]:
        for session_id in piece.session_ids:
            try:
                yield store.load_session(session_id, per_token=True)
            except NotFound:
                if named:
                    raise
                # Deleted since the list was made.

    def write(piece: ExportFile) -> ExportCounts:
        counts = ExportCounts()
        # Ray may have a piece begun again elsewhere, if it lost sight of an actor.
        beginning = folder / f".{piece.name}.{secrets.token_hex(4)}"
        write_parquet(exported(sessions(piece), extra, verdicts, counts), beginning, extra)
        os.replace(beginning, folder / piece.name)
        return counts

    return write
