"""The input of a command: a record or a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from tokentape._session.files import iter_file
from tokentape.audit._id_rows import Columns, IdRow, iter_rows, store_rows
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.store import Store
from tokentape.store._location import is_record, open_record, served_model, shown
from tokentape.store._served_model import ServedModel, served_tokenizer
from tokentape.types import Trajectory


@dataclass(frozen=True, slots=True)
class RecordSource:
    """An open record, or a file."""

    location: str
    store: Store | None
    """None for a file."""

    @property
    def name(self) -> str:
        """The location without its password, for messages."""
        return shown(self.location)

    def served_model(self) -> ServedModel | None:
        """Return the model that was last served with the record; None if it is not known, as for a file."""
        return None if self.store is None else served_model(self.location, self.store)

    def rows(self, columns: Columns) -> Iterator[IdRow]:
        """Return the rows of ids. `columns` names the columns of other formats. Raises the errors of `iter_rows`."""
        return iter_rows(self.location, columns) if self.store is None else store_rows(self.store)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the trajectories of the record, or of a file that `export` wrote."""
        if self.store is None:
            yield from iter_file(self.location)
        for stored in () if self.store is None else self.store.iter_sessions():
            yield from stored.trajectories()


@contextmanager
def open_source(location: str) -> Iterator[RecordSource]:
    """Open a record once, because opening an archive reads all of it. Files are opened when they are read."""
    if not is_record(location):
        yield RecordSource(location, None)
        return
    with open_record(location, read_only=True) as store:
        yield RecordSource(location, store)


def refuse_columns(columns: Columns, *sources: RecordSource) -> None:
    """Raise `InvalidRequest` if `columns` names columns and no source is a file that could have them."""
    if columns != Columns() and all(source.store is not None for source in sources):
        records = " and ".join(dict.fromkeys(source.name for source in sources))
        raise InvalidRequest(f"options for columns need a file, found the record {records}; leave them out")


def open_tokenizer(folder: Path | None, *sources: RecordSource, option: str = "--tokenizer") -> tuple[Path, Tokenizer]:
    """Return `folder` and its tokenizer; by default, those of the model served with a record in `sources`.

    Prints a note if a record was served with a different tokenizer.json. Raises `InvalidRequest` if no folder is known,
    or if its tokenizer is missing or has changed. `option` is the command-line option for the folder.
    """
    if folder is not None:
        loaded = Tokenizer.load(folder)
        for source in sources:
            if (served := source.served_model()) and served.tokenizer_sha256 != loaded.sha256:
                typer.echo(f"note: {source.name} was served with a different tokenizer.json", err=True)
        return folder, loaded
    for source in sources:
        if served := source.served_model():
            own = served_tokenizer(served)
            if isinstance(own, str):
                raise InvalidRequest(f"{source.name}: {own}; pass the model folder with {option}")
            return Path(served.folder), own
    raise InvalidRequest(
        f"the tokenizer of the ids is not known, because the input names no model; pass the model folder with {option}"
    )
