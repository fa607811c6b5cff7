"""Which model folder the ids of a file or a data directory are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokentape.errors import InvalidRequest

if TYPE_CHECKING:
    from tokentape.chat.tokenizer import Tokenizer


def open_tokenizer(named: Path | None, *records: Path) -> tuple[Path, Tokenizer]:
    """The folder and tokenizer that are `named`, or else that one of the data directories `records` was served with.

    Raises `InvalidRequest` if nothing names one, or if the folder's tokenizer has changed since.
    """
    from tokentape.chat.tokenizer import Tokenizer
    from tokentape.store.served_model import read_served_model

    if named is not None:
        return named, Tokenizer.load(named)
    for record in records:
        served = read_served_model(record) if record.is_dir() else None
        if served is None:
            continue
        tokenizer = Tokenizer.load(served.folder)
        if tokenizer.sha256 != served.tokenizer_sha256:
            raise InvalidRequest(
                f"{record} was recorded with another tokenizer than is in {served.folder} now; name the right folder "
                "with --tokenizer"
            )
        return Path(served.folder), tokenizer
    raise InvalidRequest("nothing says which tokenizer the ids are of; name its model folder with --tokenizer")
