"""What a trainer gates a branch on: one word, and for a fork why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from tokentape.engines._base import CAPTURED, UNVERIFIED
from tokentape.errors import InvalidRequest
from tokentape.types import Event, Provenance, TokenDistribution, Turn

VERDICTS = ("exact", "forked", "closed", "captured", "captured with drift")
"""The words that a verdict begins with."""

NOT_KNOWN = "logprobs not known"
NO_SUPPORTS = "supports not known"

RESERVATIONS = (
    "model unverified",
    "bridge unchecked",
    "bridge differs",
    "kept partial",
    "unread",
    "other logprobs",
    NO_SUPPORTS,
    NOT_KNOWN,
)
"""What may follow after a comma: what was not known when a turn of the path was sampled, or found out later; or what
its logprobs are instead of those that it was sampled with."""

BRIDGE_DUE, BRIDGE_SKIPPED, BRIDGE_CHECKED = "bridge_due", "bridge_skipped", "bridge_checked"
"""Kinds of events: the template's own rendering is to be compared with a turn's bridge; it is not; it was."""


def bridge_states(events: Iterable[Event]) -> dict[int, str]:
    """Return by turn what its events leave to say of its bridge: one of `RESERVATIONS`, or nothing."""
    states: dict[int, str] = {}
    for event in events:
        if event.turn is None:
            continue
        if event.kind in (BRIDGE_DUE, BRIDGE_SKIPPED):
            states.setdefault(event.turn, RESERVATIONS[1])
        elif event.kind == BRIDGE_CHECKED:
            found = {"same": "", "differs": RESERVATIONS[2]}.get(event.body.get("outcome", ""), RESERVATIONS[1])
            states[event.turn] = found
    return states


def verdict(path: Sequence[Turn], bridges: Mapping[int, str] | None = None, *, unread: bool = False) -> str:
    """`forked: WHY` (the last fork), `closed`, or `exact`, of the turns from a root to a leaf.

    With a context that the server made, `captured` in place of `exact`; `captured with drift` if the path begins where
    the server made another context than the session had; that verdict comes before all others.

    Every path is exact in its ids. A fork says that the agent's history did not simply go on; closed, that a turn
    before the last was ended by us and not by the model. A path that is both is forked.

    `, model unverified` follows if a turn was sampled by a server that was not known to serve the folder's model.

    `, kept partial` follows if the engine aborted a turn and it was the reply as it was: its end is no model's.

    `, unread` follows if the client of the last turn left before it had all of the reply.

    With `bridges`, from `bridge_states`: `, bridge unchecked` follows while a bridge of the path was to be compared
    with the template's own rendering and has not been; `, bridge differs` if one was and is not what the template
    writes. Nothing follows for turns recorded before there were such checks: nothing is known of them.

    `, other logprobs` follows if the logprobs of a turn are of another distribution than the one that it was sampled
    from; `, logprobs not known` if that can't be said of a turn, as of every turn recorded before it was written down.

    `, supports not known` follows if they are of a truncated distribution, and which ids it kept is not recorded for
    each token of a turn: without that no trainer computes them. Nothing follows for turns from before it was noted.
    """
    found = {bridges.get(turn.seq, "") for turn in path} if bridges else set()
    found |= {_of_logprobs(turn.sampled_from, turn.logprobs_of) for turn in path}
    if any(UNVERIFIED in engine.split() for turn in path for engine in _engines(turn)):
        found.add(RESERVATIONS[0])
    if any(turn.sampling.get("aborted", {}).get("outcome") == "kept" for turn in path):
        found.add(RESERVATIONS[3])
    if any(turn.logprobs_of and turn.logprobs_of.truncation and _lacks_supports(turn) for turn in path):
        found.add(NO_SUPPORTS)
    if unread:
        found.add(RESERVATIONS[4])
    return ", ".join([_verdict(path), *(one for one in RESERVATIONS if one in found)])


def _lacks_supports(turn: Turn) -> bool:
    return bool(turn.sampling.get("supports", "all") != "all")


def _engines(turn: Turn) -> list[str]:
    return [turn.engine, *(one.engine for one in turn.resumes if one.engine is not None)]


@lru_cache(maxsize=256)
def _of_logprobs(sampled_from: TokenDistribution | None, logprobs_of: TokenDistribution | None) -> str:
    if sampled_from is None or logprobs_of is None:
        return NOT_KNOWN
    return {True: "", False: RESERVATIONS[5], None: NOT_KNOWN}[sampled_from.same_as(logprobs_of)]


def verdict_read(verdict: str, distributions: Iterable[TokenDistribution | None]) -> str:
    """Return a trajectory's verdict as it reads today, given all that is known of the distributions of its turns.

    What was written before they were recorded does not say so.
    """
    return verdict if any(distributions) or verdict.endswith(NOT_KNOWN) else f"{verdict}, {NOT_KNOWN}"


def verdict_written(verdict: str, distributions: Iterable[TokenDistribution | None]) -> str:
    """Undo `verdict_read`: digests were computed over what was written."""
    return verdict if any(distributions) else verdict.removesuffix(f", {NOT_KNOWN}")


def _verdict(path: Sequence[Turn]) -> str:
    forks = [turn.fork for turn in path if turn.fork is not None]
    if "drift" in forks:
        return "captured with drift"
    if forks:
        return f"forked: {forks[-1]}"
    if any((turn.added_provenance == Provenance.CLOSE).any() for turn in path):
        return "closed"
    return "captured" if any(turn.engine.endswith(f" {CAPTURED}") for turn in path) else "exact"


def check_verdicts(wanted: Collection[str]) -> None:
    """Raise `InvalidRequest` for a filter that can match nothing.

    Each is one of `VERDICTS`, `forked:WHY` or, beside one of these, one of `RESERVATIONS`.
    """
    if wanted and all(one in RESERVATIONS for one in wanted):
        raise InvalidRequest(f"{', '.join(wanted)} goes with a verdict, such as exact", "verdict")
    for one in wanted:
        if one in RESERVATIONS:
            continue
        word, colon, why = one.partition(":")
        if word not in VERDICTS or (colon and (word != "forked" or not why.strip())):
            raise InvalidRequest(f"unknown verdict {one!r}; expected {', '.join(VERDICTS)} or forked:CAUSE", "verdict")


def wanted_verdict(verdict: str, wanted: Collection[str]) -> bool:
    """Whether one of the verdicts `wanted` is this one. `forked` matches every fork, `forked:sibling` that cause.

    What follows after a comma has to be wanted too.

    >>> wanted_verdict("forked: sibling", ["exact", "forked"])
    True
    >>> wanted_verdict("exact, model unverified", ["exact"])
    False
    >>> wanted_verdict("exact, model unverified", ["exact", "model unverified"])
    True
    """
    verdict, *reservations = verdict.split(", ")
    if not set(reservations) <= set(wanted):
        return False
    word, _, why = verdict.partition(": ")
    parts = (one.partition(":") for one in wanted)
    return any(own == word and (not colon or cause.strip() == why) for own, colon, cause in parts)
