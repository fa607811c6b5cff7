"""Encode the user's own corpus with both backends in parallel processes.

The work is split into ranges of files. Each process reads its range, encodes it with both backends in batches, and
returns only the documents that differ.

A record of JSON lines or Parquet may have its text in the fields `text`, `content`, `prompt`... and in `messages`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from tokentape._session.arrow import open_parquet
from tokentape.audit._skew.backends import open_backend
from tokentape.audit._skew.backends.base import Backend, SkewChat
from tokentape.audit._skew.findings import CorpusStatistics
from tokentape.audit._skew.text_probes import Differing
from tokentape.errors import InvalidRequest, NothingToMeasure

RANGE_BYTES = 4 << 20

PIECE_CHARACTERS = 1 << 14
"""Plain text is compared in pieces of about this length, cut at ends of lines."""

MOST_KEPT = 2000
"""The largest number of differing documents that are kept to be explained; the others are counted."""

MOST_CONVERSATIONS = 2000

_SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".parquet", ".py", ".rst", ".csv")
_RECORDS = (".jsonl", ".ndjson", ".parquet")
_FIELDS = ("text", "content", "prompt", "completion", "response", "instruction", "input", "output")
_SMALL = 1 << 20
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Range:
    """The lines of a file that begin at offset `start` or later, and before `end`; or a row group of Parquet."""

    path: Path
    start: int
    end: int
    row_group: int | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Counts over one range, and the differing documents that were kept."""

    documents: int
    characters: int
    bytes: int
    tokens: int
    differing: int
    kept: tuple[Differing, ...]


CompareRanges: TypeAlias = Callable[[tuple[str, str], Sequence[Range]], Iterator[Compared]]
"""Compares ranges with two backends, given by the names that open them, and returns the results in order."""


def compare_corpus(
    a: Backend,
    b: Backend,
    paths: Sequence[Path],
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    elsewhere: CompareRanges | None = None,
) -> tuple[CorpusStatistics, list[Differing]]:
    """Encode every document of files and folders with both backends; return what was compared and what differs.

    Ranges are compared by `elsewhere` if it is given, else in `workers` processes. Backends that can't be opened in
    another process (servers) are used from this one.

    Raises `NothingToMeasure` if there is no text.
    """
    files = [path.absolute() for path in corpus_files(paths)]
    ranges = list(ranges_of(files))
    total = sum(one.end - one.start for one in ranges)
    names = a.reopened_as, b.reopened_as
    workers = workers or os.cpu_count() or 1
    began = time.monotonic()
    if elsewhere is not None and None in names:
        raise InvalidRequest(
            "a server is a side here, which actors would ask all at once; compare with it by `tokentape audit`"
        )
    if elsewhere is not None:
        results = elsewhere((str(names[0]), str(names[1])), ranges)
    elif workers == 1 or total <= _SMALL or None in names:
        results = (compare_range(a, b, one) for one in ranges)
    else:
        results = _in_processes((str(names[0]), str(names[1])), ranges, workers)
    found: list[Compared] = []
    done = 0
    for one in results:
        found.append(one)
        done += one.bytes
        seconds = time.monotonic() - began
        progress(f"corpus: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {done / 1e6 / seconds:.1f} MB/s")
    counted = ("documents", "characters", "bytes", "tokens", "differing")
    sums = {name: sum(getattr(one, name) for one in found) for name in counted}
    statistics = CorpusStatistics(files=len(files), seconds=time.monotonic() - began, **sums)
    if not statistics.documents:
        raise NothingToMeasure("the corpus holds no text: records need a field such as `text` or `messages`")
    return statistics, [differing for one in found for differing in one.kept][:MOST_KEPT]


def conversations_of(files: Iterable[Path]) -> Iterator[SkewChat]:
    """Yield the first `MOST_CONVERSATIONS` records that have `messages`, each with its `tools` if it has any."""
    kept = (path for path in files if path.suffix in _RECORDS)
    found = ((one.path, record) for one in ranges_of(kept) for record in _records(one, ("messages", "tools")))
    chats = ((path, one) for path, one in found if isinstance(one, dict) and _is_conversation(one.get("messages")))
    for number, (path, one) in enumerate(islice(chats, MOST_CONVERSATIONS), 1):
        messages, tools = one["messages"], one.get("tools")
        given = tuple(tools) if isinstance(tools, list) else ()
        name = f"{path.name} conversation {number}"
        yield SkewChat(tuple(messages), given, messages[-1]["role"] != "assistant", name)


def _is_conversation(messages: Any) -> bool:
    whole = isinstance(messages, list) and bool(messages)
    return whole and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)


def _records(one: Range, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the records of a range. Of Parquet, read only `columns`."""
    if one.row_group is None:
        yield from (_json_record(line) for line in _lines(one) if line.strip())
        return
    with open_parquet(one.path) as file:
        known = [name for name in columns if name in file.schema_arrow.names]
        groups = [one.row_group]
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=known) if known else ():
            yield from batch.to_pylist()


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths`, and the text files in the folders among them, by their suffix.

    Raises `InvalidRequest` for a missing path, and `NothingToMeasure` if there is no file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in _SUFFIXES)
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidRequest(f"there is no {path} to read a corpus from")
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
    with ProcessPoolExecutor(
        min(workers, len(ranges)), get_context("spawn"), initializer=_open_backends, initargs=names
    ) as pool:
        for finished in as_completed([pool.submit(_compare_opened, one) for one in ranges]):
            yield finished.result()


_opened: list[Backend] = []


def _open_backends(a: str, b: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _opened[:] = [open_backend(a), open_backend(b)]


def _compare_opened(one: Range) -> Compared:
    return compare_range(_opened[0], _opened[1], one)


def compare_range(a: Backend, b: Backend, one: Range) -> Compared:
    """Encode the documents of a range with both backends."""
    documents = characters = tokens = differing = 0
    kept: list[Differing] = []
    for batch in batches(documents_of(one)):
        documents += len(batch)
        characters += sum(map(len, batch))
        ours, theirs = a.encode(batch), b.encode(batch)
        tokens += sum(map(len, ours))
        if ours == theirs:
            continue
        for text, a_ids, b_ids in zip(batch, ours, theirs, strict=True):
            if a_ids != b_ids:
                differing += 1
                if len(kept) < MOST_KEPT:
                    kept.append(Differing(text, one.path.name, a_ids, b_ids))
    return Compared(documents, characters, one.end - one.start, tokens, differing, tuple(kept))


def documents_of(one: Range) -> Iterator[str]:
    """Yield the texts of a range: string fields of JSON lines and Parquet, and pieces of several lines of other files.

    Bytes that are not UTF-8 become U+FFFD.
    """
    if one.path.suffix in _RECORDS:
        for record in _records(one, (*_FIELDS, "messages")):
            yield from _texts_of(record)
        return
    yield from map("".join, _grouped((line.decode("utf-8", "replace") for line in _lines(one)), PIECE_CHARACTERS))


def _lines(one: Range) -> Iterator[bytes]:
    with one.path.open("rb") as file:
        if one.start:
            file.seek(one.start - 1)
            file.readline()  # a line belongs to the range that it begins in
        while file.tell() < one.end and (line := file.readline()):
            yield line


def _json_record(line: bytes) -> Any:
    try:
        record = json.loads(line)
        if b"\\u" in line:  # an escape may be half of a surrogate pair, which is no valid text
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


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in lists of about half a million characters, to be encoded at once."""
    return _grouped(documents, 1 << 19)


def _grouped(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield lists of texts. A list ends as soon as it has `characters` characters."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group
