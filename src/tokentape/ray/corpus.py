"""The skew audit with a corpus that is too large for one machine: its ranges are compared by actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tokentape.audit.skew.auditor import audit
from tokentape.audit.skew.backends import open_backend
from tokentape.audit.skew.backends.base import Backend
from tokentape.audit.skew.corpus import Compared, Range, compare_range, corpus_files, merged, ranges_of
from tokentape.audit.skew.findings import AuditReport, CorpusStatistics
from tokentape.audit.skew.text_probes import Differing
from tokentape.errors import InvalidRequest
from tokentape.ray.work import in_order


def audit_corpus(
    a: str | Path | Backend,
    b: str | Path | Backend,
    paths: str | Path | Iterable[str | Path],
    *,
    actors: int | None = None,
    cpus: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Compare two sides as `tokentape.audit.skew.auditor.audit` does, the corpus on all machines of a Ray cluster.

    The report is the one that `audit` gives, but for the seconds.

    Args:
        a: what `audit` takes, but no server; to be read on every machine.
        b: the same.
        paths: files and folders of text, JSON lines or Parquet; to be read on every machine.
        actors: at most so many processes; as many as there are CPUs if None.
        cpus: of each.
        progress: told what is being done.

    Raises:
        InvalidRequest: a name says nothing that there is, a side is a server, or the corpus has no text.
        TokenizerUnusable: a side can't be read.

    Example:
        >>> audit_corpus("models/train", "models/serve", "corpus/").skewed      # doctest: +SKIP
        False

    """
    named = [paths] if isinstance(paths, str | Path) else list(paths)

    def compare(
        a: Backend, b: Backend, paths: Sequence[Path], workers: int | None, progress: Callable[[str], None]
    ) -> tuple[CorpusStatistics, list[Differing]]:
        names = a.reopen(), b.reopen()
        if None in names:
            raise InvalidRequest(
                "a server is a side here, which actors would ask all at once; compare with it by `tokentape audit`"
            )
        began = time.monotonic()
        files = [path.resolve() for path in corpus_files(paths)]
        ranges = list(ranges_of(files))
        total = sum(one.end - one.start for one in ranges)
        found: list[Compared] = []
        done = 0
        opened = partial(_comparing, str(names[0]), str(names[1]))
        for one in in_order(ranges, opened, actors=actors, cpus=cpus):
            found.append(one)
            done += one.bytes
            progress(f"corpus: {done / 1e6:.1f} of {total / 1e6:.1f} MB")
        return merged(len(files), found, time.monotonic() - began)

    return audit(_absolute(a), _absolute(b), corpus=named, progress=progress, compare=compare)


def _absolute(side: str | Path | Backend) -> str | Backend:
    """An actor has another working directory."""
    if not isinstance(side, str | Path):
        return side
    prefix, colon, rest = str(side).rpartition(":")
    path, hash_sign, detail = rest.partition("#")
    return f"{prefix}{colon}{Path(path).resolve()}{hash_sign}{detail}" if Path(path).exists() else str(side)


def _comparing(a: str, b: str) -> Callable[[Range], Compared]:
    return partial(compare_range, open_backend(a), open_backend(b))
