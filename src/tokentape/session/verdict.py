"""What a trainer gates a branch on: one word, and for a fork why."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokentape.engines.base import CAPTURED
from tokentape.errors import InvalidRequest
from tokentape.types import Provenance, Turn

VERDICTS = ("exact", "forked", "closed", "captured", "captured with drift")
"""The words that a verdict begins with."""


def verdict(path: Sequence[Turn]) -> str:
    """`forked: WHY` (the last fork), `closed`, or `exact`, of the turns from a root to a leaf.

    With a context that the server made, `captured` in place of `exact`; `captured with drift` if the path begins where
    the server made another context than the session had, which is told before anything else.

    Every path is exact in its ids. A fork says that the agent's history did not simply go on; closed, that a turn
    before the last was ended by us and not by the model. A path that is both is forked.
    """
    forks = [turn.fork for turn in path if turn.fork is not None]
    if "drift" in forks:
        return "captured with drift"
    if forks:
        return f"forked: {forks[-1]}"
    if any((turn.added_provenance == Provenance.CLOSE).any() for turn in path):
        return "closed"
    return "captured" if any(turn.engine.endswith(f" {CAPTURED}") for turn in path) else "exact"


def check_verdicts(wanted: Collection[str]) -> None:
    """Raise `InvalidRequest` for a filter that can match nothing: each is one of `VERDICTS` or `forked:WHY`."""
    for one in wanted:
        word, colon, why = one.partition(":")
        if word not in VERDICTS or (colon and (word != "forked" or not why.strip())):
            raise InvalidRequest(
                f"a verdict is {', '.join(VERDICTS)} or forked:WHY, and none of those is given", "verdict"
            )


def wanted_verdict(verdict: str, wanted: Collection[str]) -> bool:
    """Whether one of the verdicts `wanted` is this one. `forked` matches every fork, `forked:sibling` that cause.

    >>> wanted_verdict("forked: sibling", ["exact", "forked"])
    True
    """
    word, _, why = verdict.partition(": ")
    for one in wanted:
        wanted_word, colon, wanted_why = one.partition(":")
        if wanted_word == word and (not colon or wanted_why.strip() == why):
            return True
    return False
