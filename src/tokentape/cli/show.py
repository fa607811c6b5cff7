"""`tokentape show`: list the sessions of a record, or show one of them token by token."""

from __future__ import annotations

import json
from collections import Counter
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Console

from tokentape._session.jsonl import trajectory_to_json
from tokentape.audit._report import escape_for_terminal
from tokentape.chat._tokenizer import Tokenizer
from tokentape.cli.arguments import AsJson, StoreLocation, TokenizerFolder, flag, option
from tokentape.cli.source import open_source
from tokentape.cli.transcript import transcript
from tokentape.errors import NotFound, StoreCorrupt
from tokentape.store import Store
from tokentape.store._reads import lineage_of
from tokentape.store._served_model import served_tokenizer

_NEAR = 1000
"""Number of sessions that are searched for similar names."""


def show(
    location: StoreLocation,
    session: Annotated[str | None, typer.Argument(metavar="SESSION", help="Id of a session.")] = None,
    leaf: Annotated[int | None, option("The last turn of the branch to show. Default: the newest.", "N")] = None,
    ids: Annotated[bool, flag("Print the token ids under each text.", "--ids")] = False,
    lanes: Annotated[
        bool, flag("Under each text: where tokens begin, loss, logprobs, and what would drift.", "--lanes")
    ] = False,
    tokenizer: TokenizerFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show who wrote which tokens of a session.

    Without a session, list the sessions with the verdict of each branch.
    """
    with open_source(location) as source:
        store = source.store
        assert store is not None
        if session is None:
            _list(store, as_json)
            return
        try:
            stored = store.load_session(session, per_token=as_json)
        except NotFound as error:
            names = [summary.info.session_id for summary in store.sessions(limit=_NEAR)]
            near = get_close_matches(session, names, cutoff=0.5)
            raise NotFound(f"{error}; did you mean {' or '.join(map(repr, near))}?" if near else str(error)) from None
        edges = lineage_of(store.load_session, stored)
        branches = {branch.leaf: branch for branch in stored.trajectories(unread=True, edges=edges)}
        if not branches:
            aborted = [turn for turn in stored.turns if turn.finish_reason == "abort"]
            if not aborted:
                raise NotFound(f"session {session!r} has no turns yet")
            causes = ", ".join(dict.fromkeys(turn.abort_cause or "unknown" for turn in aborted))
            raise NotFound(f"session {session!r} has only aborted turns ({causes}), so it has no trajectory to show")
        chosen = branches.get(max(branches) if leaf is None else leaf)
        if chosen is None:
            raise NotFound(f"session {session!r} has no leaf {leaf}; choose from {', '.join(map(str, branches))}")
        if as_json:
            typer.echo(json.dumps(trajectory_to_json(chosen)))
            return
        loaded: Tokenizer | str | None = (
            served_tokenizer(source.served_model()) if tokenizer is None else Tokenizer.load(tokenizer)
        )
    if isinstance(loaded, str):
        typer.echo(f"{loaded}: showing ids only; pass the model folder with --tokenizer to see text", err=True)
        loaded = None
    console = Console(highlight=False)
    width = console.width if lanes else None
    for line in transcript(
        stored.tree(), list(branches), chosen, loaded, with_ids=ids or not loaded, lanes_width=width
    ):
        console.print(line, soft_wrap=True)


def _list(store: Store, as_json: bool) -> None:
    after, corrupt = 0, False
    while page := store.sessions(after=after):
        for summary in page:
            session_id = summary.info.session_id
            try:
                stored = store.load_session(session_id)
            except StoreCorrupt as error:
                typer.echo(f"error: {error}", err=True)
                corrupt = True
                continue
            verdicts = Counter(branch.verdict for branch in stored.trajectories(unread=True))
            aborted = sum(turn.finish_reason == "abort" for turn in stored.turns)
            counts = {"turns": summary.turns, "tokens": summary.tokens, "sampled_tokens": summary.sampled_tokens}
            if as_json:
                details = {"aborted_turns": aborted, "verdicts": verdicts, "metadata": summary.info.metadata}
                typer.echo(json.dumps({"session_id": session_id, **counts, **details}))
                continue
            turns = f"{summary.turns} turn{'' if summary.turns == 1 else 's'}"
            turns += f" ({aborted} aborted)" if aborted else ""
            tokens = f"{summary.tokens} tokens, {summary.sampled_tokens} sampled"
            line = f"{escape_for_terminal(session_id)}  {turns}, {tokens}"
            listed = [f"{many} x {verdict!r}" if many > 1 else repr(verdict) for verdict, many in verdicts.items()]
            typer.echo(f"{line}: {', '.join(listed)}" if listed else line)
        after = page[-1].position
    if not after:
        typer.echo("the record has no sessions", err=True)
    if corrupt:
        raise typer.Exit(1)
