"""`tokentape archive`: move old sessions to Parquet files, on disk or in object storage."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from tokentape.cli.arguments import AdminKey, AsJson, GatewayUrl, StoreLocation, age, flag, option
from tokentape.cli.output import print_json, working
from tokentape.client import Client
from tokentape.store._archive import SnapshotClient, archive_sessions
from tokentape.store._location import open_existing, open_record, served_model, shown
from tokentape.store._snapshots import Selection


def archive(
    store: StoreLocation,
    to: Annotated[str, option("Folder or URL: s3://bucket/runs, gs://..., file:///...", "TARGET")],
    older_than: Annotated[str, option("Only sessions with no turn for this long: 30d, 12h, 90m, 0s.", "AGE")] = "30d",
    delete: Annotated[
        bool, flag("Afterwards delete them from the record. Their ids can't be used again.", "--delete")
    ] = False,
    url: GatewayUrl = None,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Archive old sessions as Parquet files with hashes.

    The files are read back and compared before anything is deleted. If the command is interrupted, run it again. The
    exit code is 1 if `--delete` kept a session.
    `show`, `view`, `export`, `verify`, `drift`, `compare` and `check-logprobs` can read an archive.
    """
    seconds = age(older_than, "--older-than")
    if to.startswith("memory:"):
        raise typer.BadParameter(
            f"{to!r} is memory of this command, which ends with it; expected a folder or the URL of a storage",
            param_hint="--to",
        )
    with (
        ExitStack() as stack,
        open_existing(store) if url is None else open_record(store, read_only=True) as opened,
        working("selecting sessions") as status,
    ):
        taker: Any = SnapshotClient(opened)
        if url is not None:
            taker = _GatewaySnapshots(stack.enter_context(Client(url, api_key=api_key, max_retries=0)))
        done = archive_sessions(
            opened,
            taker,
            to,
            idle_seconds=seconds,
            delete=delete,
            model=served_model(store, opened),
            progress=lambda what: status.update(what),
        )
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{shown(to)}: archived {done.sessions} sessions, deleted {len(done.deleted)}")
        for session_id, reason in done.kept:
            typer.echo(f"kept {session_id}: {reason}", err=True)
    raise typer.Exit(1 if done.kept else 0)


class _GatewaySnapshots:
    """A `SnapshotClient` that uses the gateway that has the record open."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def take(self, selection: Selection, owner: str) -> int:
        # With this owner, the snapshot is found and released after an interruption, also before the client has its id.
        taken = self._client.take_snapshot(since=selection.since, idle_seconds=selection.idle_seconds, owner=owner)
        return taken.snapshot_id

    def drop(self, snapshot_id: int, digest: str) -> tuple[list[str], dict[str, str]]:
        snapshot = self._client.snapshot(snapshot_id)
        snapshot.confirm(digest)
        report = snapshot.drop()
        return list(report.dropped), {session.session_id: session.reason for session in report.kept}

    def release(self, snapshot_id: int) -> None:
        self._client.snapshot(snapshot_id).release()
