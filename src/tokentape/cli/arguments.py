"""Arguments that several subcommands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer


def _location(value: str) -> str:
    if "://" not in value and not Path(value).is_dir():
        raise typer.BadParameter(f"directory {value!r} does not exist.")
    return value


StoreLocation: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        callback=_location,
        help="Data directory of a gateway, running or not; postgresql://user@host/database; or an archive.",
    ),
]

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
