"""`tokentape export`: trajectories to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.arguments import AsJson, DataDirectory

if TYPE_CHECKING:
    from tokentape.store import SqliteStore, StoredSession
    from tokentape.types import Trajectory


class Format(StrEnum):
    """What to write."""

    PARQUET = "parquet"
    JSONL = "jsonl"


def export(
    data_dir: DataDirectory,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", dir_okay=False, help="File to write.")],
    file_format: Annotated[
        Format | None, typer.Option("--format", help="Default: jsonl for a file so named, else parquet.")
    ] = None,
    session: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this session; may be given several times.")
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Only these verdicts: exact, forked, forked:WHY, closed; commas between."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write trajectories to a file for a trainer.

    One row per branch of a session, with the columns that clients attached and the arrays that engines returned per
    token. May run beside a gateway. The file appears under its name once it is complete.

    Masks don't depend on --verdict: what a branch that is left out trains, no other one does.
    """
    from rich.console import Console

    from tokentape.session.arrow import ExtraNames, named_only, write_parquet
    from tokentape.session.jsonl import write_jsonl
    from tokentape.session.verdict import check_verdicts, wanted_verdict
    from tokentape.store import SqliteStore

    if file_format is None:
        file_format = Format.JSONL if output.suffix == ".jsonl" else Format.PARQUET
    wanted = None if verdict is None else [one.strip() for one in verdict.split(",")]
    check_verdicts(wanted or ())
    progress = Console(stderr=True)
    counts = {"sessions": 0, "trajectories": 0, "tokens": 0, "trained_tokens": 0}
    part = output.with_name(output.name + ".part")

    def rows(store: SqliteStore, extra: ExtraNames) -> Iterator[Trajectory]:
        for stored in _sessions(store, session):
            counts["sessions"] += 1
            status.update(f"exporting session {counts['sessions']}")
            for one in stored.trajectories():
                if wanted is not None and not wanted_verdict(one.verdict, wanted):
                    continue
                counts["tokens"] += len(one.token_ids)
                counts["trained_tokens"] += int(one.loss_mask.sum())
                # Somebody may name a new one while this runs, and a file's columns are fixed by then.
                yield named_only(one, extra)

    with SqliteStore.open(data_dir, read_only=True) as store, progress.status("exporting") as status:
        try:
            extra = store.extra_names(session or None)
            found = rows(store, extra)
            counts["trajectories"] = (
                write_jsonl(found, part) if file_format is Format.JSONL else write_parquet(found, part, extra)
            )
            os.replace(part, output)
        finally:
            part.unlink(missing_ok=True)
    if as_json:
        typer.echo(json.dumps({"file": str(output), "format": file_format, **counts}))
    else:
        typer.echo(
            f"{output}: sessions {counts['sessions']}, trajectories {counts['trajectories']}, "
            f"tokens {counts['tokens']}, with loss {counts['trained_tokens']}",
            err=True,
        )


def _sessions(store: SqliteStore, wanted: Sequence[str] | None) -> Iterator[StoredSession]:
    if not wanted:
        yield from store.iter_sessions(per_token=True)
        return
    for session_id in dict.fromkeys(wanted):
        yield store.load_session(session_id, per_token=True)
