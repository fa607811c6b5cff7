"""Which model folder the ids of a file or a record are of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokentape.cli.source import Source
from tokentape.errors import InvalidRequest

if TYPE_CHECKING:
    from tokentape.chat.tokenizer import Tokenizer


def open_tokenizer(named: Path | None, *sources: Source, option: str = "--tokenizer") -> tuple[Path, Tokenizer]:
    """The folder and tokenizer that are `named`, or else that one of the records among `sources` was served with.

    Raises `InvalidRequest` if nothing names one, or if the folder's tokenizer is gone or has changed since; `option` is
    what names it.
    """
    from tokentape.chat.tokenizer import Tokenizer

    if named is not None:
        return named, Tokenizer.load(named)
    for source in sources:
        served = source.served_model()
        if served is None:
            continue
        if not (Path(served.folder) / "tokenizer.json").is_file():
            raise InvalidRequest(
                f"{source.name} was recorded with the tokenizer in {served.folder}, which is not on this machine; name "
                f"a folder that has it with {option}"
            )
        tokenizer = Tokenizer.load(served.folder)
        if tokenizer.sha256 != served.tokenizer_sha256:
            raise InvalidRequest(
                f"{source.name} was recorded with another tokenizer than is in {served.folder} now; name the right "
                f"folder with {option}"
            )
        return Path(served.folder), tokenizer
    raise InvalidRequest(
        "nothing says which tokenizer the ids are of (a file or an archive never does); name its model folder with "
        f"{option}"
    )
