"""Export, measure drift and audit a corpus on all machines of a Ray cluster, with Ray Data.

The work is split into pieces for actors, and the results keep the order of the pieces. In each function `actors` is the
maximum number of processes, by default one per CPU, and `cpus` the number of CPUs for each. Every machine must be able
to read the given paths. All functions raise `TokentapeError` if Ray is not installed.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from tokentape._session.arrow import ExtraNames, open_parquet, write_parquet
from tokentape._session.verdict import check_verdicts
from tokentape.audit._drift.meter import DriftTally, RowDrift, RowMeter
from tokentape.audit._drift.report import DriftReport
from tokentape.audit._id_rows import Columns, iter_rows, parquet_rows
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, open_backend
from tokentape.audit._skew.corpus import Compared, Range, compare_corpus, compare_range
from tokentape.audit._skew.findings import AuditReport
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import Conflict, InvalidRequest, NotFound, TokentapeError
from tokentape.store import StoredSession, open_record
from tokentape.store._reads import ExportCounts, exported

Paths: TypeAlias = str | Path | Iterable[str | Path]


def require_ray() -> None:
    """Raise `TokentapeError` with the install command if Ray is not installed."""
    if find_spec("ray") is None:
        raise TokentapeError("Ray is not installed; run: pip install 'tokentape[ray]'")


def export(
    location: str | Path,
    folder: str | Path,
    *,
    sessions: Collection[str] | None = None,
    verdicts: Sequence[str] | None = None,
    sessions_per_file: int = 1000,
    actors: int | None = None,
    cpus: float = 1.0,
) -> ExportCounts:
    """Write the trajectories of a record to Parquet files in a new folder that every machine can write to.

    Read in the order of their names, the files have the rows and columns that `tokentape export` writes to one file.
    The folder gets its name when it is complete. `sessions` and `verdicts` select what is written; None means all.

    Raises `Conflict` if `folder` exists, `InvalidRequest` for an unknown verdict, `NotFound` for an unknown session,
    and the errors of `open_record`.
    """
    check_verdicts(verdicts or ())
    target = Path(folder).resolve()
    if target.exists():
        raise Conflict(f"{target} already exists; choose a new folder")
    location = location if "://" in str(location) else Path(location).resolve()
    with open_record(location, read_only=True) as store:
        extra = store.extra_names(sessions)
        ids = list(store.session_ids() if sessions is None else dict.fromkeys(sessions))
    # For a record without sessions, write a valid file without rows.
    starts = range(0, max(len(ids), 1), sessions_per_file)
    pieces = [(f"part-{n:05}.parquet", ids[start : start + sessions_per_file]) for n, start in enumerate(starts)]
    part, counts = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}"), ExportCounts()
    part.mkdir(parents=True)
    try:
        opened = partial(_exporting, location, part, extra, verdicts, sessions is not None)
        for piece_counts in _in_order(pieces, opened, actors, cpus):
            counts.add(piece_counts)
        for unfinished in part.glob(".*"):
            unfinished.unlink()
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return counts


def _exporting(
    location: str | Path, folder: Path, extra: ExtraNames, verdicts: Sequence[str] | None, selected: bool
) -> Callable[[tuple[str, list[str]]], ExportCounts]:
    store = open_record(location, read_only=True)

    def sessions(ids: Iterable[str]) -> Iterator[StoredSession]:
        for session_id in ids:
            try:
                yield store.load_session(session_id, per_token=True)
            except NotFound:
                if selected:  # otherwise it was deleted after the sessions were listed
                    raise

    def write(piece: tuple[str, list[str]]) -> ExportCounts:
        (name, ids), counts = piece, ExportCounts()
        # If Ray loses an actor, a second actor may process the same piece.
        beginning = folder / f".{name}.{secrets.token_hex(4)}"
        write_parquet(exported(sessions(ids), extra, verdicts, counts, store=store), beginning, extra)
        os.replace(beginning, folder / name)
        return counts

    return write


def drift(
    paths: Paths, tokenizer: str | Path, *, columns: Columns | None = None, actors: int | None = None, cpus: float = 1.0
) -> DriftReport:
    """Measure drift like `measure_drift`, in files of ids (see `iter_rows`) or folders of Parquet files.

    `tokenizer` is a model folder; `columns` names the columns of files from other programs. Raises `InvalidRequest` if
    there are no files, or if a file has no ids or ids of a different model, and `TokenizerUnusable`.
    """
    sha256, tally = Tokenizer.load(tokenizer).sha256, DriftTally()
    opened = partial(_measuring, Path(tokenizer).resolve(), sha256, columns or Columns())
    for rows in _in_order(list(_drift_pieces(paths)), opened, actors, cpus):
        for row in rows:
            tally.add(row)
    return tally.report(sha256)


def _measuring(folder: Path, sha256: str, columns: Columns) -> Callable[[tuple[Path, int | None]], list[RowDrift]]:
    tokenizer = Tokenizer.load(folder)
    if tokenizer.sha256 != sha256:
        reason = f"the tokenizer in {folder} differs on one of the machines; copy the same folder to all"
        raise InvalidRequest(f"{reason} (expected SHA-256 {sha256})", "tokenizer")
    meter = RowMeter(tokenizer)

    def measure(piece: tuple[Path, int | None]) -> list[RowDrift]:
        path, group = piece
        rows = iter_rows(path, columns) if group is None else parquet_rows(path, columns, group)
        return list(meter.measure(rows))

    return measure


def _drift_pieces(paths: Paths) -> Iterator[tuple[Path, int | None]]:
    """Yield each file; for Parquet, each file and row group number."""
    for path in map(Path.resolve, _listed(paths)):
        files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
        if not files:
            raise InvalidRequest(
                f"no Parquet files in {path}; pass Parquet files with ids, or folders of them", "paths"
            )
        for file in files:
            if file.suffix == ".parquet":
                with open_parquet(file) as opened:
                    groups = opened.num_row_groups
                yield from ((file, number) for number in range(groups))
            else:
                yield file, None


def audit_corpus(
    a: str | Path | Backend,
    b: str | Path | Backend,
    paths: Paths,
    *,
    actors: int | None = None,
    cpus: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Compare two backends like `audit`, on the corpus of text files in `paths`.

    The report equals the report of `audit`, except for the seconds. Raises `InvalidRequest` for an unknown name, a
    backend that is a server, or a corpus without text, and `TokenizerUnusable` for a backend that can't be read.
    """

    def compare_ranges(names: tuple[str, str], ranges: Sequence[Range]) -> Iterator[Compared]:
        return _in_order(ranges, partial(_comparing, *names), actors, cpus)

    compare = partial(compare_corpus, elsewhere=compare_ranges)
    return audit(_absolute(a), _absolute(b), corpus=_listed(paths), progress=progress, compare=compare)


def _comparing(a: str, b: str) -> Callable[[Range], Compared]:
    return partial(compare_range, open_backend(a), open_backend(b))


def _absolute(side: str | Path | Backend) -> str | Backend:
    """Return the side with an absolute path, because actors have a different working directory."""
    if not isinstance(side, str | Path):
        return side
    prefix, colon, rest = str(side).rpartition(":")
    path, *detail = rest.partition("#")
    return "".join([prefix, colon, str(Path(path).resolve()), *detail]) if Path(path).exists() else str(side)


def _listed(paths: Paths) -> list[Path]:
    return [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]


def _in_order(
    pieces: Sequence[Any], opened: Callable[[], Callable[[Any], Any]], actors: int | None, cpus: float
) -> Iterator[Any]:
    """Yield the result of each piece, in order, from the functions that `opened` returns in each actor."""
    require_ray()
    import ray.data

    if not pieces:
        return
    rows = [{"number": number, "piece": pickle.dumps(piece)} for number, piece in enumerate(pieces)]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        _Actor,
        fn_constructor_args=[pickle.dumps(opened)],
        # Ray starts only as many actors as it has CPUs for.
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(actors or 1024, len(rows))),
        num_cpus=cpus,
    )
    early, following = dict[int, Any](), 0
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, TokentapeError):
            raise result
        early[row["number"]] = result
        while following in early:
            yield early.pop(following)
            following += 1


class _Actor:
    def __init__(self, opened: bytes) -> None:
        self._work = pickle.loads(opened)()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result = self._work(pickle.loads(row["piece"]))
        except TokentapeError as error:
            result = error  # returned, because Ray would wrap a raised error
        return {"number": row["number"], "result": pickle.dumps(result)}
