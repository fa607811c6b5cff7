"""Tokentape: train on exactly the tokens your model sampled."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentape.version import __version__

if TYPE_CHECKING:
    from tokentape.audit.lock import check
    from tokentape.chat.renderer import Renderer
    from tokentape.client import AsyncClient, Client
    from tokentape.errors import TokentapeError
    from tokentape.types import Provenance, Trajectory

__all__ = ["AsyncClient", "Client", "Provenance", "Renderer", "TokentapeError", "Trajectory", "__version__", "check"]

_HOME = {
    "AsyncClient": "tokentape.client",
    "Client": "tokentape.client",
    "Provenance": "tokentape.types",
    "Renderer": "tokentape.chat.renderer",
    "TokentapeError": "tokentape.errors",
    "Trajectory": "tokentape.types",
    "check": "tokentape.audit.lock",
}


def __getattr__(name: str) -> Any:
    """Import a public name where it lives when it is first used, so that `import tokentape` costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
