from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.records import SETUP, bits, make_chain, make_turn
from tests.store.conftest import Place
from tokentape._session.jsonl import json_line
from tokentape.errors import Conflict, InvalidRequest, NotFound
from tokentape.store import Store, verify
from tokentape.store._commit import Work
from tokentape.store._snapshots import Selection, Snapshot, Snapshots
from tokentape.types import Reward, SessionInfo, TurnColumn

# Custody is the same code on each: the contract of stores is tested on both.
pytestmark = pytest.mark.parametrize(
    "places", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True
)

CHAIN = make_chain("a", 3)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    """Sessions `a` (two turns), `b` (one turn) without an owner, and `theirs` of another key."""
    with place.open() as store:
        run(store.write(SessionInfo("a", 1.0, {"run": 1}), SETUP, *CHAIN[:2]))
        run(store.write(SessionInfo("b", 2.0, {"run": 2}), make_turn("b", 0)))
        run(store.write(SessionInfo("theirs", 3.0, {}, "them"), make_turn("theirs", 0)))
        yield store


@pytest.fixture
def custody(store: Store) -> Snapshots:
    return Snapshots(store)


run = asyncio.run


def take(custody: Snapshots, *session_ids: str, since: int | None = None) -> Snapshot:
    return run(custody.take(Selection(session_ids=session_ids or None, since=since), "", ""))


def advantages(value: float) -> TurnColumn:
    return TurnColumn("a", 0, "advantages", np.full(4, value, np.float32), 1.0)


def names(snapshot: Snapshot) -> list[str]:
    assert snapshot.contents is not None
    return [session["session_id"] for session in snapshot.contents["sessions"]]


# Contents


def test_snapshot_lists_its_contents(custody: Snapshots) -> None:
    taken = take(custody)
    assert (taken.snapshot_id, taken.state, taken.owner) == (1, "held", "")
    assert taken.contents is not None
    lines = [json_line(trajectory) for trajectory in custody.trajectories(1)]
    assert taken.digest == hashlib.sha256(b"".join(lines)).hexdigest()
    assert (taken.contents["trajectories"], taken.contents["tokens"], taken.contents["trained_tokens"]) == (2, 24, 12)
    assert taken.contents["verdicts"] == {"exact": 2}
    assert taken.contents["sessions"][0] == {
        "session_id": "a",
        "turns": 2,
        "leaves": [{"turn": 1, "digest": CHAIN[1].digest, "verdict": "exact", "tokens": 16}],
    }


def test_later_records_do_not_change_contents(custody: Snapshots, store: Store) -> None:
    run(store.write(advantages(1), Reward("a", None, 0.5, 1.0)))
    taken = take(custody, "a")
    before = bits(list(custody.trajectories(1)))
    run(store.write(CHAIN[2], Reward("a", None, 1.0, 2.0), Reward("a", 0, 1.0, 2.0), advantages(2)))
    run(store.write(advantages(3)))
    assert bits(list(custody.trajectories(1))) == before
    again = take(custody, "a")
    assert again.digest != taken.digest
    (now,) = custody.trajectories(2)
    assert (now.turns, now.reward, now.columns["advantages"][4]) == ((0, 1, 2), 1.0, 3.0)
    run(custody.release(1, None))
    run(store.write(advantages(4)))
    assert bits(list(custody.trajectories(2))) == bits([now])


def test_replaced_values_are_deleted_when_no_snapshot_has_them(custody: Snapshots, store: Store) -> None:
    run(store.write(advantages(1)))
    take(custody, "a")
    for value in (2, 3):
        run(store.write(advantages(value)))
    assert [column.values[0] for column in store.load_session("a", per_token=True).columns] == [1, 3]
    run(custody.release(1, None))
    run(store.write(advantages(4)))
    assert [column.values[0] for column in store.load_session("a", per_token=True).columns] == [4]


def test_snapshot_begun_by_a_killed_gateway_is_finished_on_request(
    custody: Snapshots, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Snapshots, snapshot_id: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "_read", dies)
        with pytest.raises(MemoryError):
            take(custody, "a")
    assert custody.find(1, "").digest is None
    run(store.write(CHAIN[2]))
    snapshot = run(custody.snapshot(1, ""))
    assert snapshot.contents is not None
    assert snapshot.contents["sessions"][0]["turns"] == 2


# Selection


def test_snapshot_of_a_key_has_only_its_sessions(custody: Snapshots) -> None:
    assert names(take(custody)) == ["a", "b"]
    assert names(run(custody.take(Selection(), "admin", None))) == ["a", "b", "theirs"]
    with pytest.raises(NotFound, match="theirs"):
        take(custody, "a", "theirs")
    with pytest.raises(NotFound):
        custody.find(1, "them")


def test_sessions_are_selected_by_metadata_and_by_idleness(custody: Snapshots, store: Store) -> None:
    assert names(run(custody.take(Selection(metadata={"run": 2}), "", ""))) == ["b"]
    with pytest.raises(InvalidRequest, match="no session is selected"):
        run(custody.take(Selection(metadata={"run": 3}), "", ""))
    fresh = make_turn("a", 2, CHAIN[1], created_at=4e9)
    run(store.write(fresh))
    assert names(run(custody.take(Selection(idle_seconds=60), "", ""))) == ["b"]


def test_unchanged_sessions_are_left_out_over_several_snapshots(custody: Snapshots, store: Store) -> None:
    take(custody)
    with pytest.raises(InvalidRequest):
        take(custody, since=1)
    run(store.write(CHAIN[2]))
    assert names(take(custody, since=1)) == ["a"]
    run(store.write(Reward("b", None, 1.0, 1.0)))
    assert names(take(custody, since=2)) == ["b"]
    run(store.write(advantages(1)))
    run(store.write(SessionInfo("c", 4.0), make_turn("c", 0)))
    assert names(take(custody, since=3)) == ["a", "c"]


def test_snapshot_since_that_of_another_owner_raises_not_found(custody: Snapshots) -> None:
    take(custody)
    with pytest.raises(NotFound):
        run(custody.take(Selection(since=1), "them", "them"))


# Holding, confirming, dropping


def test_held_session_can_only_be_deleted_by_force(custody: Snapshots, store: Store) -> None:
    taken = take(custody, "a")
    with pytest.raises(Conflict, match="snapshot 1"):
        run(store.delete_session("a"))
    run(store.delete_session("b"))
    run(store.delete_session("a", force=True))
    with pytest.raises(Conflict, match="'a' of snapshot 1 was deleted"):
        list(custody.trajectories(1))
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest))


def test_later_session_with_the_same_id_is_not_held(custody: Snapshots, store: Store) -> None:
    take(custody, "a")
    run(store.delete_session("a", force=True))
    run(store.write(SessionInfo("a", 9.0), make_turn("a", 0)))
    with pytest.raises(Conflict, match="was deleted"):
        list(custody.trajectories(1))
    run(store.delete_session("a"))


@pytest.mark.parametrize("ending", ["confirm", "release"])
def test_a_confirmed_or_released_session_can_be_deleted(custody: Snapshots, store: Store, ending: str) -> None:
    taken = take(custody, "a")
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest) if ending == "confirm" else custody.release(1, ""))
    run(store.delete_session("a"))


def test_another_digest_confirms_nothing(custody: Snapshots) -> None:
    take(custody, "a")
    with pytest.raises(Conflict, match="corrupt or of a different snapshot"):
        run(custody.confirm(1, "", "0" * 64))
    assert custody.find(1, "").state == "held"


def test_sessions_are_not_dropped_before_confirmation(custody: Snapshots, store: Store) -> None:
    take(custody, "a")
    with pytest.raises(Conflict, match="not confirmed"):
        run(custody.drop(1, ""))
    assert len(store.load_session("a").turns) == 2


def test_dropped_session_stays_deleted(custody: Snapshots, store: Store, place: Place) -> None:
    taken = take(custody)
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest))
    assert run(custody.drop(1, "")) == (["a", "b"], {})
    assert [summary.info.session_id for summary in store.sessions()] == ["theirs"]
    assert (custody.dropped_of("a"), custody.dropped_of("theirs")) == ("", None)
    with pytest.raises(NotFound):
        run(store.write(CHAIN[2]))
    with pytest.raises(Conflict, match="dropped after snapshot 1"):
        run(store.write(SessionInfo("a", 9.0), make_turn("a", 0)))
    with pytest.raises(Conflict, match="released"):
        list(custody.trajectories(1))
    assert verify(place.location).ok


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "later", [CHAIN[2], Reward("a", 0, 1.0, 1.0), TurnColumn("a", 0, "values", np.zeros(4, np.float32), 1.0)]
)
def test_changed_session_is_kept(custody: Snapshots, store: Store, later: object) -> None:
    taken = take(custody)
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest))
    run(store.write(later))  # type: ignore[arg-type]
    assert run(custody.drop(1, "")) == (["b"], {"a": "changed since the snapshot"})
    assert names(take(custody, since=1)) == ["a"]


def test_a_session_in_use_or_in_another_snapshot_is_kept(custody: Snapshots) -> None:
    taken = take(custody)
    take(custody, "a")
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest))
    assert run(custody.drop(1, "", in_use=["b"])) == ([], {"b": "in use", "a": "held by snapshot 2"})


def test_interrupted_drop_resumes(custody: Snapshots, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape.store._snapshots._DROPPED_AT_ONCE", 1)
    taken = take(custody)
    assert taken.digest is not None
    run(custody.confirm(1, "", taken.digest))
    calls = 0
    transact = Store.transact

    async def dies_at_the_second(self: Store, work: Work, again: Work | None = None) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        await transact(self, work, again)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "transact", dies_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            run(custody.drop(1, ""))
    assert [summary.info.session_id for summary in store.sessions()] == ["b", "theirs"]
    assert run(custody.drop(1, "")) == (["a", "b"], {})
    assert [summary.info.session_id for summary in store.sessions()] == ["theirs"]
