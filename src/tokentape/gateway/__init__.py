"""The gateway: an ASGI application that agents and trainers talk to, one module per wire API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.gateway._app import create_app
    from tokentape.gateway._keys import Keys
    from tokentape.gateway._limits import Limits
    from tokentape.gateway._serve import running
    from tokentape.gateway._serving import serving
    from tokentape.gateway._turns import Turns

__all__ = ["Keys", "Limits", "Turns", "create_app", "running", "serving"]

__getattr__ = lazy_names(__name__)
