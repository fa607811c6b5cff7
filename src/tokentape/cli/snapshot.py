"""`tokentape snapshot`: export sessions from a running gateway, and delete them once they are stored elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from tokentape.cli.arguments import AsJson, new_file, number, option
from tokentape.cli.output import print_json
from tokentape.client import Client, SnapshotManifest
from tokentape.store._location import refuse_output

snapshot = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Freeze, export and drop sessions of a running gateway.",
)

Url: TypeAlias = Annotated[str, option("Base URL of the gateway.", None, "--url", envvar="TOKENTAPE_URL")]
Key: TypeAlias = Annotated[
    str | None, option("API key; better set in the environment.", "KEY", "--api-key", envvar="TOKENTAPE_API_KEY")
]
SnapshotId: TypeAlias = Annotated[int, typer.Argument(metavar="SNAPSHOT", help="Id of a snapshot.")]

LOCAL = "http://127.0.0.1:8800"


@snapshot.command()
def create(
    url: Url = LOCAL,
    api_key: Key = None,
    session: Annotated[list[str] | None, option("Only this session; may be repeated.", "ID")] = None,
    since: Annotated[int | None, option("Only sessions that have changed since this snapshot.", "SNAPSHOT")] = None,
    idle: Annotated[float | None, number("Only sessions without a turn for this long.", "SECONDS")] = None,
    as_json: AsJson = False,
) -> None:
    """Freeze sessions as they are, and print the snapshot's id."""
    with _client(url, api_key) as client:
        handle = client.take_snapshot(session, since=since, idle_seconds=idle)
        manifest = handle.manifest()
    if as_json:
        print_json(manifest)
        return
    typer.echo(str(handle.snapshot_id))
    typer.echo(_line(manifest), err=True)


@snapshot.command()
def show(
    snapshot_id: Annotated[
        int | None, typer.Argument(metavar="[SNAPSHOT]", help="Id of a snapshot; without one, list them.")
    ] = None,
    url: Url = LOCAL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a snapshot, or list all snapshots."""
    with _client(url, api_key) as client:
        manifests = client.snapshots() if snapshot_id is None else [client.snapshot(snapshot_id).manifest()]
    for manifest in manifests:
        print_json(manifest) if as_json else typer.echo(_line(manifest))


@snapshot.command(short_help="Write a snapshot to a file, and print its digest.")
def export(
    snapshot_id: SnapshotId,
    output: Annotated[Path, new_file("File to write.", "-o", "--output")],
    url: Url = LOCAL,
    api_key: Key = None,
) -> None:
    """Write a snapshot to a file, flush it to the disk, and print its digest.

    The format is JSON lines for a file named .jsonl, otherwise Parquet. The file gets its name when it is complete.
    """
    refuse_output(output)
    with _client(url, api_key) as client:
        typer.echo(client.snapshot(snapshot_id).save(output))


@snapshot.command(short_help="Confirm that a snapshot is stored elsewhere.")
def confirm(
    snapshot_id: SnapshotId,
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="Digest that export printed.")],
    url: Url = LOCAL,
    api_key: Key = None,
) -> None:
    """Confirm that a snapshot is stored elsewhere, so that its sessions may be deleted."""
    with _client(url, api_key) as client:
        client.snapshot(snapshot_id).confirm(digest)


@snapshot.command()
def drop(snapshot_id: SnapshotId, url: Url = LOCAL, api_key: Key = None, as_json: AsJson = False) -> None:
    """Permanently delete the sessions of a confirmed snapshot.

    Exits with 1 if some were kept because they have changed since or are still in use.
    """
    with _client(url, api_key) as client:
        report = client.snapshot(snapshot_id).drop()
    if as_json:
        print_json(report)
    else:
        for session in report.kept:
            typer.echo(f"kept {session.session_id}: {session.reason}")
        typer.echo(f"dropped {len(report.dropped)}, kept {len(report.kept)}", err=True)
    raise typer.Exit(1 if report.kept else 0)


def _client(url: str, api_key: str | None) -> Client:
    return Client(url, api_key=api_key, timeout=600, max_retries=0)


def _line(manifest: SnapshotManifest) -> str:
    counts = f"trajectories {manifest.trajectories}, tokens {manifest.tokens}, with loss {manifest.trained_tokens}"
    return f"{manifest.snapshot_id}  {manifest.state}  {counts}  {manifest.digest}"
