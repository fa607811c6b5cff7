"""Numbers of examples in property tests: few in `make test`, many in `make test-slow`."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int, least: int = 5) -> int:
    """Return `number` in a search. With fixed examples, return a tenth of it, but at least `least`."""
    return number if settings.get_current_profile_name() != "same" else max(number // 10, least)
