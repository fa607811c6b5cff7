"""Compute a branch's verdict, by which trainers filter: a word, the cause of a fork, and reservations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from tokentape.engines._base import CAPTURED, UNVERIFIED
from tokentape.errors import InvalidRequest
from tokentape.types import Event, Provenance, TokenDistribution, Turn

VERDICTS = ("exact", "forked", "closed", "captured", "captured with drift")
"""A verdict begins with one of these."""

FORKS = (
    "sibling",
    "branched",
    "edited_history",
    "new_setup",
    "template_rewrites",
    "template_history",
    "other_stop",
    "drift",
)
"""The causes of forks."""

MODEL_UNVERIFIED = "model unverified"
BRIDGE_UNCHECKED = "bridge unchecked"
BRIDGE_DIFFERS = "bridge differs"
KEPT_PARTIAL = "kept partial"
UNREAD_REPLY = "unread"
OTHER_LOGPROBS = "other logprobs"
NO_SUPPORTS = "supports not known"
NOT_KNOWN = "logprobs not known"

RESERVATIONS = (
    MODEL_UNVERIFIED,
    BRIDGE_UNCHECKED,
    BRIDGE_DIFFERS,
    KEPT_PARTIAL,
    UNREAD_REPLY,
    OTHER_LOGPROBS,
    NO_SUPPORTS,
    NOT_KNOWN,
)
"""A verdict may add these after a comma: something about a turn on the path is unknown or wrong, or its logprobs are
not from the distribution from which it was sampled."""

_CLOSE = int(Provenance.CLOSE)

BRIDGE_DUE, BRIDGE_SKIPPED, BRIDGE_CHECKED = "bridge_due", "bridge_skipped", "bridge_checked"
"""Kinds of events: a turn's bridge will be, will not be, or has been compared with the template's own rendering."""


def bridge_states(events: Iterable[Event]) -> dict[int, str]:
    """Return the reservation for each turn with bridge events; "" if a check found no difference."""
    states: dict[int, str] = {}
    for event in events:
        if event.turn is None:
            continue
        if event.kind in (BRIDGE_DUE, BRIDGE_SKIPPED):
            states.setdefault(event.turn, BRIDGE_UNCHECKED)
        elif event.kind == BRIDGE_CHECKED:
            outcome = event.body.get("outcome")
            states[event.turn] = {"same": "", "differs": BRIDGE_DIFFERS}.get(str(outcome), BRIDGE_UNCHECKED)
    return states


def verdict(path: Sequence[Turn], bridges: Mapping[int, str] | None = None, *, unread: bool = False) -> str:
    """Return the verdict for a root-to-leaf path. The ids are exact on every path, whatever the verdict.

    The first word:

    - `captured with drift`: the server rendered the messages, and its prompt did not continue the session's context.
    - `forked: CAUSE`: the agent's history did not simply continue; the cause of the last fork.
    - `closed`: a turn before the last did not end with a stop token, and the gateway added one.
    - `captured`: the server rendered the messages, and each prompt continued the session's context.
    - `exact`: none of these.

    Reservations, which follow after a comma:

    - `model unverified`: a turn was sampled by a server that was not known to serve the folder's model.
    - `bridge unchecked`, `bridge differs` (with `bridges`, from `bridge_states`): a bridge on the path was not yet
      compared with the template's own rendering, or differs from it. Turns recorded before these checks have neither.
    - `kept partial`: the engine aborted a turn, and the partial completion became the reply.
    - `unread`: the last turn's client disconnected before it got the whole reply.
    - `other logprobs`, `logprobs not known`: a turn's logprobs are not from the distribution from which it was sampled,
      or the record does not contain which distribution they are from.
    - `supports not known`: the logprobs are from a truncated distribution, and the ids that truncation kept are not
      recorded for each token, so no trainer can compute these logprobs.
    """
    reservations = {bridges.get(turn.seq, "") for turn in path} if bridges else set()
    # Compare by identity: turns from a store share these objects, and hashing them takes longer.
    kinds = {(id(turn.sampled_from), id(turn.logprobs_of), id(turn.sampling)): turn for turn in path}
    for turn in kinds.values():
        reservations.add(logprobs_reservation(turn.sampled_from, turn.logprobs_of))
        if turn.sampling.get("aborted", {}).get("outcome") == "kept":
            reservations.add(KEPT_PARTIAL)
        if turn.logprobs_of and turn.logprobs_of.truncation and turn.sampling.get("supports", "all") != "all":
            reservations.add(NO_SUPPORTS)
    engines = {turn.engine for turn in path} | {resume.engine or "" for turn in path for resume in turn.resumes}
    if any(UNVERIFIED in engine.split() for engine in engines):
        reservations.add(MODEL_UNVERIFIED)
    if unread:
        reservations.add(UNREAD_REPLY)
    return ", ".join([_verdict(path), *[reservation for reservation in RESERVATIONS if reservation in reservations]])


@lru_cache(maxsize=256)
def logprobs_reservation(sampled_from: TokenDistribution | None, logprobs_of: TokenDistribution | None) -> str:
    """Return the reservation about logprobs of one distribution for tokens sampled from another, or ""."""
    if sampled_from is None or logprobs_of is None:
        return NOT_KNOWN
    return {True: "", False: OTHER_LOGPROBS, None: NOT_KNOWN}[sampled_from.same_as(logprobs_of)]


def verdict_read(verdict: str, distributions: Iterable[TokenDistribution | None]) -> str:
    """Return a stored verdict in this release's wording, given the distributions recorded for its turns.

    Verdicts that were stored before distributions were recorded get `logprobs not known`.
    """
    return verdict if any(distributions) or verdict.endswith(NOT_KNOWN) else f"{verdict}, {NOT_KNOWN}"


def verdict_written(verdict: str, distributions: Iterable[TokenDistribution | None]) -> str:
    """Return the verdict as it was stored, because digests were computed over the stored form."""
    return verdict if any(distributions) else verdict.removesuffix(f", {NOT_KNOWN}")


def _verdict(path: Sequence[Turn]) -> str:
    forks = [turn.fork for turn in path if turn.fork is not None]
    if "drift" in forks:
        return "captured with drift"
    if forks:
        return f"forked: {forks[-1]}"
    if any(_CLOSE in turn.added_provenance.tobytes() for turn in path):
        return "closed"
    return "captured" if any(turn.engine.endswith(f" {CAPTURED}") for turn in path) else "exact"


def check_verdicts(entries: Collection[str]) -> None:
    """Raise `InvalidRequest` unless `entries` are a filter that can match a verdict.

    Each entry is one of `VERDICTS`, `forked:CAUSE` with one of `FORKS`, or one of `RESERVATIONS`, but not reservations
    only.
    """
    if entries and all(entry in RESERVATIONS for entry in entries):
        raise InvalidRequest(f"{', '.join(entries)} matches nothing alone; add a verdict, such as exact", "verdict")
    for entry in entries:
        if entry in RESERVATIONS:
            continue
        word, colon, why = entry.partition(":")
        if word not in VERDICTS or (colon and (word != "forked" or not why.strip())):
            raise InvalidRequest(
                f"unknown verdict {entry!r}; expected {', '.join(VERDICTS)} or forked:CAUSE", "verdict"
            )
        if colon and why.strip() not in FORKS:
            raise InvalidRequest(
                f"unknown cause {why.strip()!r} of a fork in {entry!r}; expected {', '.join(FORKS)}", "verdict"
            )


def wanted_verdict(verdict: str, entries: Collection[str]) -> bool:
    """Return whether a verdict passes the filter `entries`. `forked` matches every fork, `forked:sibling` one cause.

    The filter must also contain all of the verdict's reservations.

    >>> wanted_verdict("forked: sibling", ["exact", "forked"])
    True
    >>> wanted_verdict("exact, model unverified", ["exact"])
    False
    >>> wanted_verdict("exact, model unverified", ["exact", "model unverified"])
    True
    """
    verdict, *reservations = verdict.split(", ")
    if not set(reservations) <= set(entries):
        return False
    word, _, why = verdict.partition(": ")
    parts = (entry.partition(":") for entry in entries)
    return any(own == word and (not colon or cause.strip() == why) for own, colon, cause in parts)
