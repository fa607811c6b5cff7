"""`tokentape view`: show trajectories token by token in a browser."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from starlette.middleware import Middleware

from tokentape._durable import write_durably
from tokentape.cli.arguments import existing_folder, flag, new_file, option, record_or_file
from tokentape.cli.source import open_source
from tokentape.errors import InvalidRequest
from tokentape.gateway._access import THIS_MACHINE, AllowedHosts
from tokentape.gateway._serve import serve
from tokentape.store._location import refuse_output
from tokentape.viewer._app import create_app, file_viewer, key_visit, store_viewer
from tokentape.viewer._export import export_page
from tokentape.viewer._routes import PAGE

_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Addresses that mean all interfaces, with the loopback address of the same IP version."""

_OTHER_HOSTS = "open the address that `tokentape view` printed, or pass --host to serve other machines"


def view(
    location: Annotated[str, record_or_file("a .parquet or .jsonl file of trajectories.")],
    tokenizer: Annotated[
        Path | None,
        existing_folder(
            "Model folder to decode ids with. Default: the one that the record names.", None, "--tokenizer"
        ),
    ] = None,
    host: Annotated[
        str,
        option(
            "Address to listen on. If other machines can reach it, the page asks for a key, which is printed. Key and "
            "prompts travel over plain HTTP: in networks you don't trust, forward the port with ssh instead."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 chooses a free one.", min=0, max=65535)] = 0,
    export: Annotated[
        Path | None,
        new_file(
            "Write one HTML file instead of serving: the run, the newest 500 sessions, and their tokens as long as "
            "the file is smaller than 64 MiB."
        ),
    ] = None,
    session: Annotated[str | None, option("With --export: only this session, with every comparison.", "ID")] = None,
    browser: Annotated[bool, flag("Open the page in a browser.", "--browser/--no-browser")] = True,
) -> None:
    """Look at trajectories token by token, in a browser.

    Serves the page until it is interrupted, only on this machine unless --host is set. A gateway serves the same page
    for its own record at /view.
    """
    if session is not None and export is None:
        raise InvalidRequest("--session goes with --export FILE")
    refuse_output(export, location, tokenizer)

    def ready(url: str) -> None:
        if host in _ALL_ADDRESSES:
            # A browser can't open this address: use loopback on this machine, its name on other machines.
            here, port = _ALL_ADDRESSES[host], url.rpartition(":")[2]
            url = f"http://{here}:{port}"
            typer.echo(f"from other machines: http://{socket.gethostname()}:{port}{PAGE}", err=True)
        typer.echo(f"{url}{PAGE}")
        if browser:
            # On a thread, because webbrowser waits for terminal browsers to end.
            threading.Thread(target=webbrowser.open, args=(url + PAGE,), daemon=True).start()

    with ExitStack() as opened:
        source = opened.enter_context(open_source(location))
        if source.store is None:
            viewer = file_viewer(Path(location), tokenizer)
        else:
            viewer = store_viewer(source.store, location, tokenizer)
        if viewer.reader.tokenizer is None:
            typer.echo(f"{viewer.reader.why_none}: showing ids only; pass a model folder with --tokenizer", err=True)
        if export is not None:
            page = export_page(viewer, session)
            write_durably(export, page.html)
            counts = f"{page.whole}, listed without: {page.listed - page.whole}, left out: {page.total - page.listed}"
            unreadable = f", unreadable: {page.unreadable}" if page.unreadable else ""
            typer.echo(f"wrote {export}: sessions with tokens: {counts}{unreadable}", err=True)
            return
        if host in THIS_MACHINE:
            app = create_app(viewer, [Middleware(AllowedHosts, hosts=THIS_MACHINE, advice=_OTHER_HOSTS)])
        else:
            key = secrets.token_urlsafe(24)
            typer.echo(f"key: {key}", err=True)
            app = create_app(replace(viewer, visit=key_visit(key)))
        serve(app, host=host, port=port, has_keys=host not in THIS_MACHINE, on_ready=ready)
