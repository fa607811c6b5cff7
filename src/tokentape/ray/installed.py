"""Ray is an extra: what is said where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from tokentape.errors import TokentapeError


def require_ray() -> None:
    """Raise `TokentapeError` with the command that installs Ray unless it is there."""
    if find_spec("ray") is None:
        raise TokentapeError("Ray is not installed; run: pip install 'tokentape[ray]'")
