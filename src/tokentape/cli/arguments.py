"""Arguments that several subcommands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

DataDirectory: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="DATA_DIR", exists=True, file_okay=False, help="Data directory of a gateway, running or not."
    ),
]

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
