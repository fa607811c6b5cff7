"""`tokentape show`: list the sessions of a record, or show one of them token by token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.arguments import AsJson, StoreLocation, TokenizerFolder

if TYPE_CHECKING:
    from tokentape.chat._tokenizer import Tokenizer
    from tokentape.store import Store


def show(
    location: StoreLocation,
    session: Annotated[str | None, typer.Argument(metavar="SESSION", help="Id of a session.")] = None,
    leaf: Annotated[
        int | None, typer.Option(metavar="N", help="The branch that ends with turn N. Default: the newest.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids under each text.")] = False,
    lanes: Annotated[
        bool,
        typer.Option("--lanes", help="Under each text: where tokens begin, loss, logprobs, and what would drift."),
    ] = False,
    tokenizer: TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show who wrote which tokens of a session.

    Without a session, list the sessions.
    """
    from tokentape.chat._tokenizer import Tokenizer
    from tokentape.cli.model_folder import served_tokenizer
    from tokentape.cli.source import open_source

    with open_source(location) as source:
        assert source.store is not None
        if session is None:
            _list(source.store, as_json)
            return
        loaded = None if tokenizer is None or as_json else Tokenizer.load(tokenizer)
        if tokenizer is None and not as_json:
            found = served_tokenizer(source)
            if isinstance(found, str):
                typer.echo(f"{found}: showing ids only; name the model folder with --tokenizer to see text", err=True)
            else:
                loaded = found[1]
        _show(source.store, session, leaf, ids, lanes, as_json, loaded)


def _list(store: Store, as_json: bool) -> None:
    after = 0
    while page := store.sessions(after=after):
        for one in page:
            counts = {"turns": one.turns, "tokens": one.tokens, "sampled_tokens": one.sampled_tokens}
            if as_json:
                typer.echo(json.dumps({"session_id": one.info.session_id, **counts, "metadata": one.info.metadata}))
            else:
                typer.echo(
                    f"{one.info.session_id}  {one.turns} turns, {one.tokens} tokens, {one.sampled_tokens} sampled"
                )
        after = page[-1].position


def _show(
    store: Store, session_id: str, leaf: int | None, ids: bool, lanes: bool, as_json: bool, tokenizer: Tokenizer | None
) -> None:
    from rich.console import Console

    from tokentape._session.jsonl import trajectory_to_json
    from tokentape.cli.transcript import transcript
    from tokentape.errors import NotFound
    from tokentape.store._lineage import lineage_of

    stored = store.load_session(session_id, per_token=as_json)
    session = stored.tree()
    edges = lineage_of(store.load_session, stored)
    branches = {one.leaf: one for one in stored.trajectories(unread=True, edges=edges)}
    if not branches:
        raise NotFound(f"session {session_id!r} has no turns yet")
    chosen = branches.get(max(branches) if leaf is None else leaf)
    if chosen is None:
        raise NotFound(f"session {session_id!r} has no leaf {leaf}; it has {', '.join(map(str, branches))}")
    if as_json:
        typer.echo(json.dumps(trajectory_to_json(chosen)))
        return
    console = Console(highlight=False)
    lines = transcript(
        session,
        list(branches),
        chosen,
        tokenizer,
        with_ids=ids or tokenizer is None,
        lanes_width=console.width if lanes else None,
    )
    for line in lines:
        console.print(line, soft_wrap=True)
