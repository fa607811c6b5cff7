"""Tokentape: train on exactly the tokens your model sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape.lazy import lazy_names
from tokentape.version import __version__

if TYPE_CHECKING:
    from tokentape.audit.lock import check
    from tokentape.chat.renderer import Renderer
    from tokentape.client import AsyncClient, Client
    from tokentape.errors import TokentapeError
    from tokentape.types import Provenance, Trajectory

__all__ = ["AsyncClient", "Client", "Provenance", "Renderer", "TokentapeError", "Trajectory", "__version__", "check"]

__getattr__ = lazy_names(
    __name__,
    {
        "tokentape.audit.lock": "check",
        "tokentape.chat.renderer": "Renderer",
        "tokentape.client": "AsyncClient Client",
        "tokentape.errors": "TokentapeError",
        "tokentape.types": "Provenance Trajectory",
    },
)
