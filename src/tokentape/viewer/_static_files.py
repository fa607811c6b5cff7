"""Serve the files of the page, which ship with the package, with security headers.

The policy forbids other origins and inline scripts. Pages insert text of prompts as text only.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tokentape.errors import NotFound

FOLDER = Path(__file__).parent / "static"

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of all replies of the viewer."""

_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


def static_file(request: Request, name: str) -> Response:
    """Return a file of the page. Raises `NotFound`."""
    found = _files().get(name)
    if found is None:
        raise NotFound("there is nothing at this path")
    data, etag, media_type = found
    headers = {**SECURITY, "ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    found = {}
    for path in FOLDER.iterdir():
        if path.suffix in _MEDIA_TYPES:
            data = path.read_bytes()
            found[path.name] = data, f'"{hashlib.sha256(data).hexdigest()[:32]}"', _MEDIA_TYPES[path.suffix]
    return found
