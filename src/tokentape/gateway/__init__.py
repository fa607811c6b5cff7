"""The gateway: an ASGI application that agents and trainers talk to, one module per wire API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape.lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.gateway.app import create_app
    from tokentape.gateway.keys import Keys
    from tokentape.gateway.limits import Limits
    from tokentape.gateway.serve import running
    from tokentape.gateway.turns import Turns

__all__ = ["Keys", "Limits", "Turns", "create_app", "running"]

__getattr__ = lazy_names(
    __name__,
    {
        "tokentape.gateway.app": "create_app",
        "tokentape.gateway.keys": "Keys",
        "tokentape.gateway.limits": "Limits",
        "tokentape.gateway.serve": "running",
        "tokentape.gateway.turns": "Turns",
    },
)
