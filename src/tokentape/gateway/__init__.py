"""The gateway: an ASGI application that agents and trainers talk to, one module per wire API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokentape.gateway.app import create_app
    from tokentape.gateway.keys import Keys
    from tokentape.gateway.limits import Limits
    from tokentape.gateway.serve import running
    from tokentape.gateway.turns import Turns

__all__ = ["Keys", "Limits", "Turns", "create_app", "running"]

_MODULES = {"create_app": "app", "running": "serve", **{name: name.lower() for name in ("Keys", "Limits", "Turns")}}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
