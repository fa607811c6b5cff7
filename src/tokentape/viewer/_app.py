"""Serve the viewer without a gateway, for a data directory or a file of trajectories."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TokentapeError, Unauthorized
from tokentape.store._base import Store
from tokentape.store._location import served_model, shown
from tokentape.viewer._comparing import RecordReader, reader_of
from tokentape.viewer._routes import Viewer, Visit, Visitor, routes
from tokentape.viewer._source import FileSource, StoreSource
from tokentape.viewer._views import SECURITY


def create_app(viewer: Viewer, middleware: Sequence[Middleware] = ()) -> Starlette:
    """Return an application that serves only the viewer. It also answers the errors that `middleware` raises."""
    handlers: dict[Any, Any] = {TokentapeError: _error, HTTPException: _error}
    return Starlette(
        routes=routes(viewer),
        exception_handlers=handlers,
        middleware=[Middleware(ExceptionMiddleware, handlers=handlers), *middleware],
    )


def store_viewer(store: Store, location: str, model: Path | None = None) -> Viewer:
    """Return a viewer of the record at `location`, open as `store`. `model` replaces the model served last."""
    source = StoreSource(store, PurePath(shown(location)).name)
    return Viewer(source, reader_of(served_model(location, store), model))


def file_viewer(path: Path, model: Path | None = None) -> Viewer:
    """Return a viewer of a file of trajectories, with the tokenizer in `model`. Raises `InvalidRequest`."""
    reader = RecordReader(why_none="a file of trajectories does not name its tokenizer")
    return Viewer(FileSource(path), reader if model is None else RecordReader(Tokenizer.load(model)))


def key_visit(key: str) -> Visit:
    """Return an access check that lets requests with this key see everything."""

    def visit(request: Request) -> Visitor:
        sent_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent_key.encode(), key.encode()):
            raise Unauthorized("wrong key: use the key that `tokentape view` printed")
        return Visitor()

    return visit


async def _error(request: Request, error: Exception) -> Response:
    message, code, status = "this path does not exist, or does not support this method", "not_found", 404
    if isinstance(error, TokentapeError):
        message, code, status = str(error), error.code, error.status
    elif isinstance(error, HTTPException):
        status = error.status_code
    body = msgspec.json.encode({"error": {"message": message, "code": code}})
    return Response(body, status, SECURITY, "application/json")
