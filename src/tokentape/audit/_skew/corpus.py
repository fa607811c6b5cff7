"""Encode the user's corpus (texts, and fields of JSON lines or Parquet) with both backends in parallel processes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from tokentape._batches import batched
from tokentape._session.arrow import open_parquet
from tokentape.audit._skew.backends import Backend, SkewChat, open_backend
from tokentape.audit._skew.findings import CorpusStatistics, Differing
from tokentape.errors import InvalidRequest, NothingToMeasure

RANGE_BYTES = 4 << 20
PIECE_CHARACTERS = 1 << 14
"""Plain text is compared in pieces of about this length, which end at line ends."""

MOST_KEPT = 2000
"""The maximum number of differing documents that are kept for explanation; the others are only counted."""

MOST_CONVERSATIONS = 2000
_SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".py", ".rst", ".csv")
_RECORDS = (".jsonl", ".ndjson", ".parquet")
_FIELDS = ("text", "content", "prompt", "completion", "response", "instruction", "input", "output")
_SMALL = 1 << 20
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 19


@dataclass(frozen=True, slots=True)
class Range:
    """The lines of a file that begin in the byte range from `start` to `end`, or a Parquet row group."""

    path: Path
    start: int
    end: int
    row_group: int | None = None


Compared: TypeAlias = tuple[Counter[str], list[Differing]]
"""Counts over one range, by the names of fields of `CorpusStatistics`, and the differing documents that were kept."""


CompareRanges: TypeAlias = Callable[[tuple[str, str], Sequence[Range]], Iterator[Compared]]
"""Compares ranges with two backends, which it opens by name, and yields the results in order."""


def compare_corpus(
    a: Backend,
    b: Backend,
    paths: Sequence[Path],
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    elsewhere: CompareRanges | None = None,
) -> tuple[CorpusStatistics, list[Differing]]:
    """Encode every document of files and folders with both backends; return what was compared and what differs.

    Ranges are compared by `elsewhere` if it is passed, else in `workers` processes. Backends that can't be opened in
    other processes (servers) are used in this process. Raises `NothingToMeasure` if there is no text.
    """
    files = [path.absolute() for path in corpus_files(paths)]
    ranges = list(ranges_of(files))
    total = sum(file_range.end - file_range.start for file_range in ranges)
    workers = workers or os.cpu_count() or 1
    names = (a.reopened_as, b.reopened_as) if a.reopened_as and b.reopened_as else None
    if elsewhere is not None and names is None:
        raise InvalidRequest(
            "one side is a server, which all actors would call at once; compare with `tokentape audit` instead"
        )
    if names is None or (elsewhere is None and (workers == 1 or total <= _SMALL)):
        results: Iterable[Compared] = (compare_range(a, b, file_range) for file_range in ranges)
    else:
        results = elsewhere(names, ranges) if elsewhere else _in_processes(names, ranges, workers)
    began = time.monotonic()
    counts: Counter[str] = Counter(documents=0, characters=0, bytes=0, tokens=0, differing=0)
    examples: list[Differing] = []
    for range_counts, differing in results:
        counts.update(range_counts)
        examples += differing[: MOST_KEPT - len(examples)]
        megabytes = counts["bytes"] / 1e6
        progress(f"corpus: {megabytes:.1f} of {total / 1e6:.1f} MB, {megabytes / (time.monotonic() - began):.1f} MB/s")
    if not counts["documents"]:
        raise NothingToMeasure("the corpus contains no text: records need a field such as `text` or `messages`")
    return CorpusStatistics(files=len(files), seconds=time.monotonic() - began, **counts), examples


def conversations_of(files: Iterable[Path]) -> Iterator[SkewChat]:
    """Yield the first `MOST_CONVERSATIONS` records that have `messages`, each with its `tools` if it has any."""
    ranges = ranges_of(path for path in files if path.suffix in _RECORDS)
    records = ((part.path.name, record) for part in ranges for record in _records(part, ("messages", "tools")))
    chats = ((name, row) for name, row in records if isinstance(row, dict) and _is_conversation(row.get("messages")))
    for number, (name, chat) in enumerate(islice(chats, MOST_CONVERSATIONS), 1):
        messages, tools = chat["messages"], chat.get("tools")
        tools = tuple(tools) if isinstance(tools, list) else ()
        yield SkewChat(tuple(messages), tools, messages[-1]["role"] != "assistant", f"{name} conversation {number}")


def _is_conversation(messages: Any) -> bool:
    whole = isinstance(messages, list) and bool(messages)
    return whole and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


def _records(file_range: Range, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the records of a range. From Parquet, read only `columns`."""
    if file_range.row_group is None:
        yield from (_json_record(line) for line in _lines(file_range) if line.strip())
        return
    with open_parquet(file_range.path) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        groups = [file_range.row_group]
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=present) if present else ():
            yield from batch.to_pylist()


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths`, and all files with a text suffix in the folders among them and below.

    Raises `InvalidRequest` for a path that does not exist, and `NothingToMeasure` if there are no files.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in _SUFFIXES)
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidRequest(f"there is no file or folder {path}; pass the path of a corpus")
    if not files:
        raise NothingToMeasure(f"no text files in the corpus; expected suffixes such as {', '.join(_SUFFIXES[:4])}")
    return files


def ranges_of(files: Iterable[Path]) -> Iterator[Range]:
    """Yield the ranges of files. Raises `InvalidRequest` for a .parquet file that is not Parquet."""
    for path in files:
        if path.suffix == ".parquet":
            start = 0
            with open_parquet(path) as file:
                for number in range(file.num_row_groups):
                    end = start + file.metadata.row_group(number).total_byte_size
                    yield Range(path, start, end, number)
                    start = end
            continue
        size = path.stat().st_size
        for start in range(0, size, RANGE_BYTES):
            yield Range(path, start, min(start + RANGE_BYTES, size))


def _in_processes(names: tuple[str, str], ranges: Sequence[Range], workers: int) -> Iterator[Compared]:
    # Forked processes would share the parent's threads of `tokenizers`, which then refuse to run.
    workers = min(workers, len(ranges))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_open_backends, initargs=names) as pool:
        for finished in as_completed([pool.submit(_compare_opened, file_range) for file_range in ranges]):
            yield finished.result()


def _compare_opened(file_range: Range) -> Compared:
    return compare_range(_opened[0], _opened[1], file_range)


_opened: list[Backend] = []


def _open_backends(a: str, b: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _opened[:] = [open_backend(a), open_backend(b)]


def compare_range(a: Backend, b: Backend, file_range: Range) -> Compared:
    counts: Counter[str] = Counter(bytes=file_range.end - file_range.start)
    examples: list[Differing] = []
    for batch in batched(documents_of(file_range), _BATCH_CHARACTERS, len):
        ours, theirs = a.encode(batch), b.encode(batch)
        rows = zip(batch, ours, theirs, strict=True)
        differing = [Differing(text, file_range.path.name, x, y) for text, x, y in rows if x != y]
        counts.update(documents=len(batch), characters=sum(map(len, batch)), tokens=sum(map(len, ours)))
        counts["differing"] += len(differing)
        examples += differing[: MOST_KEPT - len(examples)]
    return counts, examples


def documents_of(file_range: Range) -> Iterator[str]:
    """Yield the texts of a range: string fields of records, or pieces of several lines (invalid UTF-8 as U+FFFD)."""
    if file_range.path.suffix in _RECORDS:
        for record in _records(file_range, (*_FIELDS, "messages")):
            yield from _texts_of(record)
        return
    lines = (line.decode("utf-8", "replace") for line in _lines(file_range))
    yield from map("".join, batched(lines, PIECE_CHARACTERS, len))


def _lines(file_range: Range) -> Iterator[bytes]:
    with file_range.path.open("rb") as file:
        if file_range.start:
            file.seek(file_range.start - 1)
            file.readline()  # a line belongs to the range that it begins in
        while file.tell() < file_range.end and (line := file.readline()):
            yield line


def _json_record(line: bytes) -> Any:
    try:
        record = json.loads(line)
        if b"\\u" in line:  # an escape may be half of a surrogate pair, which is invalid text
            record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
    except ValueError:
        raise InvalidRequest("a line of the corpus is not JSON; expected JSON lines in a .jsonl file") from None
    return record


def _texts_of(record: Any) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict):
        for name in _FIELDS:
            if isinstance(record.get(name), str):
                yield record[name]
        messages = record.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and isinstance(message.get("content"), str):
                yield message["content"]
