"""`tokentape delete`: permanently delete sessions of a record by metadata, owner and age."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from tokentape.cli.arguments import AdminKey, AsJson, GatewayUrl, StoreLocation, age, flag, option
from tokentape.cli.output import print_json
from tokentape.client import Client, ClientSession
from tokentape.errors import Conflict, NotFound
from tokentape.store import Store
from tokentape.store._location import open_existing, open_record


def delete(
    store: StoreLocation,
    where: Annotated[
        list[str] | None, option("Only sessions with this value in their metadata; may be repeated.", "KEY=VALUE")
    ] = None,
    owner: Annotated[
        str | None, option("Only sessions created with the API key of this name; '' if created without key.", "NAME")
    ] = None,
    older_than: Annotated[
        str | None, option("Only sessions with no turn for this long: 30d, 12h, 90m, 0s.", "AGE")
    ] = None,
    yes: Annotated[bool, flag("Delete the sessions. Without it they are only listed.", "--yes")] = False,
    url: GatewayUrl = None,
    api_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Permanently delete the sessions that match all conditions; without --yes, list them.

    Copies in archives, backups and exports stay. Exits with 1 if a session was kept because it is in a snapshot.
    """
    if not where and older_than is None and owner is None:
        raise typer.BadParameter("there is no condition; pass --where KEY=VALUE, --owner NAME or --older-than AGE.")
    for condition in where or ():
        if "=" not in condition:
            raise typer.BadParameter(f"{condition!r} has no '='; expected KEY=VALUE.", param_hint="--where")
    newest = None if older_than is None else time.time() - age(older_than, "--older-than")
    kept: dict[str, str] = {}
    deleted = []
    with ExitStack() as stack:
        writes = url is None and yes
        record = stack.enter_context(open_existing(store) if writes else open_record(store, read_only=True))
        client = None if url is None else stack.enter_context(Client(url, api_key=api_key, max_retries=0))
        selected = list(_selected(record, where or (), newest, owner))
        for session_id in selected if yes else ():
            try:
                if client is None:
                    asyncio.run(record.delete_session(session_id))
                else:
                    ClientSession(client, session_id).delete()
                deleted.append(session_id)
            except Conflict as error:
                kept[session_id] = str(error)
            except NotFound:
                pass  # deleted in the meantime
    if as_json:
        print_json({"selected": selected, "deleted": deleted, "kept": kept})
    else:
        for session_id in selected:
            typer.echo(f"kept {session_id}: {kept[session_id]}" if session_id in kept else session_id)
        hint = "; pass --yes to delete them" if selected and not yes else ""
        typer.echo(f"selected {len(selected)}, deleted {len(deleted)}{hint}", err=True)
    raise typer.Exit(1 if kept else 0)


def _selected(record: Store, where: Sequence[str], newest: float | None, owner: str | None) -> Iterator[str]:
    """Yield the ids of sessions with this metadata that belong to `owner` and have no turn after `newest`."""
    pairs, after = [condition.partition("=") for condition in where], 0
    while page := record.sessions(limit=1000, after=after, owner=owner):
        for session in page:
            metadata: Mapping[str, Any] = session.info.metadata
            # Compare with the text, or with the JSON of other types: a user may be "7" or 7.
            same = (key in metadata and value in (metadata[key], json.dumps(metadata[key])) for key, _, value in pairs)
            if all(same) and (newest is None or (session.last_at or session.info.created_at) <= newest):
                yield session.info.session_id
        after = page[-1].position
