"""The viewer: token-level trajectories on a page, from a running gateway or from files, and in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.viewer._notebook import shown_with

__all__ = ["shown_with"]

__getattr__ = lazy_names(__name__)
