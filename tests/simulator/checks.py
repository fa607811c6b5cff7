"""Compare a record with the ledger of what clients received, and with what the engine sampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.simulator.engine import Sampled
from tests.simulator.ledger import Ledger
from tests.simulator.world import World
from tokentape.store import StoredSession, verify
from tokentape.types import Turn

Recorded = dict[str, StoredSession]
_Turns = set[tuple[str, int]]


def check(ledger: Ledger, recorded: Recorded) -> Iterator[str]:
    """Yield the faults of a record."""
    # It costs as much as half of the rest, and loading checks the digests too.
    if ledger.world.rng.random() < 0.25:
        yield from (f"verify: {finding}" for finding in verify(ledger.world.directory).findings)
    trajectories = {name: stored.trajectories() for name, stored in recorded.items()}
    shown = {(name, seq) for name, found in trajectories.items() for trajectory in found for seq in trajectory.turns}
    yield from _trained(recorded, trajectories)
    yield from _sampled(ledger, recorded)
    yield from _acknowledged(ledger, recorded, shown)
    yield from _unread(ledger.world, recorded, shown)
    yield from _answers(ledger, recorded)
    yield from _value_faults(ledger, recorded, trajectories)


def _trained(recorded: Recorded, trajectories: dict[str, list[Any]]) -> Iterator[str]:
    """Each sampled token is trained once, and no trajectory is the beginning of another."""
    for name, found in trajectories.items():
        turns = {seq for trajectory in found for seq in trajectory.turns}
        sizes = sum(len(recorded[name].turns[seq].completion_ids) for seq in turns)
        trained = sum(int(trajectory.loss_mask.sum()) for trajectory in found)
        if trained != sizes:
            yield f"{name}: {trained} tokens are trained, and its turns have {sizes}"
        inner = {seq for trajectory in found for seq in trajectory.turns[:-1]}
        yield from (f"{name}: leaf {trajectory.leaf} is continued" for trajectory in found if trajectory.leaf in inner)


def _sampled(ledger: Ledger, recorded: Recorded) -> Iterator[str]:
    """Each turn is what the engine sampled from its context, and nothing deleted comes back."""
    for name, stored in recorded.items():
        deleted = [
            removal
            for removal in ledger.removals
            if removal.session == name and not removal.drops and 0 <= removal.done < math.inf
        ]
        since = max((removal.sent for removal in deleted), default=0.0)
        # A turn without tokens was aborted before the engine was called.
        for turn in (turn for turn in stored.turns if len(turn.completion_ids)):
            calls = [call for call in ledger.world.sampled if _sampled_by(call, context_of(stored, turn.seq), turn)]
            if not calls:
                yield f"{name} turn {turn.seq}: not what the engine sampled"
            elif max(call.began for call in calls) < since:
                yield f"{name} turn {turn.seq} was sampled before the session was deleted"


def _sampled_by(call: Sampled, context: list[int], turn: Turn) -> bool:
    """Return whether a call of the engine, or the last of several after aborts, gave a completion and its weights."""
    prompt, completion = call.prompt, turn.completion_ids.tolist()
    before = len(prompt) - len(context)
    if before < 0 or prompt[: len(context)] != context or prompt[len(context) :] != completion[:before]:
        return False
    tokens = [*zip(completion[before:], turn.logprobs.tolist()[before:], strict=True)]
    if call.tokens[: len(tokens)] != tokens:
        return False
    changes = dict(turn.weight_changes)
    version, versions = turn.weight_version, []
    for at in range(len(completion)):
        version = changes.get(at, version)
        versions.append(version)
    pairs = zip(versions[before:], call.weights, strict=False)
    return all(
        recorded_version == sampled or (recorded_version == "unknown" and not known)
        for recorded_version, (sampled, known) in pairs
    )


def _acknowledged(ledger: Ledger, recorded: Recorded, shown: _Turns) -> Iterator[str]:
    """Yield received turns that are in no trajectory, unless deleted, or exported before they were dropped."""
    read_out = {key: ids for snapshot in ledger.snapshots if snapshot.confirmed for key, ids in snapshot.turns.items()}
    for reply in ledger.received:
        where = f"{reply.session} turn {reply.turn}"
        if ledger.removed(reply.session, reply.first_sent, drops=False):
            continue
        if reply.session not in recorded and ledger.removed(reply.session, drops=True):
            if read_out.get((reply.session, reply.turn)) != reply.ids:
                yield f"{where} was acknowledged, and dropped before it was read out"
            continue
        turns = recorded[reply.session].turns if reply.session in recorded else ()
        if reply.turn >= len(turns):
            yield f"{where} was acknowledged and is lost"
        elif (
            turns[reply.turn].completion_ids.tolist() != reply.ids
            or context_of(recorded[reply.session], reply.turn) != reply.prompt
        ):
            yield f"{where} is not what was acknowledged"
        elif (reply.session, reply.turn) not in shown:
            yield f"{where} was acknowledged and is in no trajectory"
    for contents in ledger.snapshots:
        yield from (f"{name} was dropped and is there again" for name in sorted(contents.dropped & recorded.keys()))


def _unread(world: World, recorded: Recorded, shown: _Turns) -> Iterator[str]:
    """Turns that no client received are not trained; a continued turn was read, regardless of its mark."""
    handed, left = world.handed(), world.left()
    # A client left while the last process sent it: that one could mark it.
    could = {
        (name, seq)
        for name, stored in recorded.items()
        for answer in stored.answers
        if any(answer.reply_id in reply_ids for reply_ids in left)
        for seq in answer.turns
    }
    read = handed | (world.forgiven - could)
    for name, stored in recorded.items():
        for turn in reversed(stored.turns):
            if (name, turn.seq) in read and turn.parent is not None:
                read.add((name, turn.parent))
    unread = shown - read - _continued(recorded)
    yield from (f"{session} turn {seq} was handed to no client and is trained" for session, seq in sorted(unread))


def _answers(ledger: Ledger, recorded: Recorded) -> Iterator[str]:
    """A call with a key has one reply over all its attempts."""
    for name, stored in recorded.items():
        keys = Counter(answer.key for answer in stored.answers if answer.key is not None)
        yield from (f"{name}: {count} answers to one key {key}" for key, count in keys.items() if count > 1)
    replies: dict[str, dict[tuple[Any, ...], str]] = defaultdict(dict)
    for exchange in ledger.world.exchanges:
        if exchange.key is not None and (found := exchange.replies):
            which = tuple((about["session_id"], about["turn"], tuple(ids)) for about, _, ids in found)
            replies[exchange.key][which] = found[0][0]["session_id"]
    for key, different in replies.items():
        if len(different) > 1 and not any(map(ledger.removed, different.values())):
            yield f"key {key} has {len(different)} replies"


def _value_faults(ledger: Ledger, recorded: Recorded, trajectories: dict[str, list[Any]]) -> Iterator[str]:
    """Rewards and columns are those that were given, in the record or in the snapshot that was read out last."""
    for name, found in trajectories.items():
        if not ledger.removed(name):
            yield from ledger.faults_of(name, found)
    for contents in ledger.snapshots:
        for name in sorted(contents.dropped):
            if name not in recorded and not ledger.removed(name, drops=False):
                mine = [trajectory for trajectory in contents.trajectories if trajectory.session_id == name]
                yield from ledger.faults_of(name, mine)


def columns_of_leaves(recorded: Recorded, session: str) -> Iterator[str]:
    """Yield where `b` is not what `Judge.write_all_values` wrote: each trained token's place in the trajectory."""
    for trajectory in recorded[session].trajectories():
        values = trajectory.columns.get("b", [None] * len(trajectory.loss_mask))
        wrong = [
            at
            for at, trained in enumerate(trajectory.loss_mask)
            if trained and values[at] != trajectory.leaf * 4096.0 + at
        ]
        if wrong:
            yield f"{session} leaf {trajectory.leaf}: column b is wrong at tokens {wrong[:5]}"


def _continued(recorded: Recorded) -> _Turns:
    """Return the turns continued by a turn that is not aborted: their client sent their replies back."""
    return {
        (name, turn.parent)
        for name, stored in recorded.items()
        for turn in stored.turns
        if turn.parent is not None and turn.finish_reason != "abort"
    }


def context_of(stored: StoredSession, seq: int) -> list[int]:
    """Return a turn's context, walked up by hand."""
    turn = stored.turns[seq]
    ids: list[int] = turn.added_ids.tolist()
    while turn.parent is not None:
        turn = stored.turns[turn.parent]
        ids = turn.added_ids.tolist() + turn.completion_ids.tolist() + ids
    return ids
