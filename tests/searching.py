"""How many examples property tests try: few in `make test`, many where `make test-slow` searches."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int, least: int = 5) -> int:
    """Return `number` in a search, and a tenth of it, but `least`, where the same examples are tried each time."""
    return number if settings.get_current_profile_name() != "same" else max(number // 10, least)
