"""Behavior of every store, with any database."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.postgres import Server
from tests.records import (
    SETUP,
    bits,
    finite,
    make_chain,
    make_setup,
    make_turn,
    sessions,
    setups,
    trees,
    turn_columns,
    turn_payloads,
)
from tests.searching import examples
from tests.store.conftest import Place, Places, counted
from tokentape._session.arrow import ExtraNames
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE, BRIDGE_SKIPPED
from tokentape.errors import (
    Conflict,
    InvalidRequest,
    InvariantViolation,
    NotFound,
    StoreError,
)
from tokentape.store import Record, Store, verify
from tokentape.types import Event, Provenance, Reward, SessionInfo, TurnColumn, TurnPayload


def write(store: Store, *records: Record) -> None:
    asyncio.run(store.write(*records))


def session(session_id: str) -> SessionInfo:
    return SessionInfo(session_id, 1.0)


# Reading back


def check_everything_reads_back(data: st.DataObject, places: Places) -> None:
    place = places.new()
    info = data.draw(sessions)
    setup = data.draw(setups())
    turns = data.draw(trees(info.session_id, setup.digest))
    seqs = st.sampled_from([turn.seq for turn in turns])
    at = st.tuples(seqs, st.none()) | st.tuples(st.none(), seqs) | st.just((None, None))
    rewards = [
        Reward(info.session_id, turn, value, created_at, leaf)
        for (turn, leaf), value, created_at in data.draw(st.lists(st.tuples(at, finite, finite), max_size=3))
    ]
    bodies = st.dictionaries(st.text(max_size=5), st.none() | st.integers(-9, 9) | st.text(max_size=5), max_size=3)
    events = [
        Event(info.session_id, turn, kind, body, created_at)
        for turn, kind, body, created_at in data.draw(
            st.lists(st.tuples(st.none() | seqs, st.sampled_from(["one", "two"]), bodies, finite), max_size=3)
        )
    ]
    columns = [data.draw(turn_columns(turn)) for turn in turns]
    payloads = [data.draw(turn_payloads(turn)) for turn in turns if len(turn.added_ids) + len(turn.completion_ids)]
    with place.open(synchronous="NORMAL") as store:
        write(store, info, setup, *turns, *rewards, *events, *columns, *payloads)
    with place.open(read_only=True) as store:
        stored = store.load_session(info.session_id, per_token=True)
        assert store.load_session(info.session_id).columns == store.load_session(info.session_id).payloads == ()
        assert store.extra_names() == store.extra_names([info.session_id])
    assert bits(stored.columns) == bits(columns)
    assert bits(stored.payloads) == bits(payloads)
    assert bits(stored.info) == bits(info)
    assert bits(dict(stored.setups)) == bits({setup.digest: setup})
    assert bits(stored.turns) == bits(turns)
    assert bits(stored.rewards) == bits(rewards)
    assert bits(stored.events) == bits(events)
    assert verify(place.location).ok


_many = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_many
@given(data=st.data())
def test_everything_written_reads_back_bit_for_bit_from_sqlite(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_everything_reads_back(data, Places(tmp_path_factory.mktemp("store"), None))


@settings(_many, max_examples=examples(8, least=2))
@given(data=st.data())
def test_everything_written_reads_back_bit_for_bit_from_postgres(postgres: Server, data: st.DataObject) -> None:
    places = Places(Path(), postgres)
    check_everything_reads_back(data, places)
    postgres.drop(places.made[0])


def test_a_session_reads_back_while_the_store_is_open(store: Store) -> None:
    turns = make_chain("s", 3)
    write(store, session("s"), SETUP, *turns)
    assert bits(store.load_session("s").turns) == bits(turns)


def test_arrays_are_views_of_the_read_bytes(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0))
    ids = store.load_session("s").turns[0].completion_ids
    assert ids.base is not None
    assert not ids.flags.writeable


def test_common_parts_of_turns_are_read_once(store: Store) -> None:
    write(store, SETUP, session("s"), *make_chain("s", 2, sampling={"temperature": 0.5}))
    first, second = store.load_session("s").turns
    for name in ("setup", "engine", "weight_version", "sampling"):
        assert getattr(first, name) is getattr(second, name)


def test_session_is_read_with_only_its_setups(store: Store) -> None:
    other = make_setup("other")
    write(store, session("s"), SETUP, other, make_turn("s", 0), session("t"), make_turn("t", 0, setup=other.digest))
    assert set(store.load_session("s").setups) == {SETUP.digest}
    assert set(store.load_session("t").setups) == {other.digest}


def test_a_setup_written_twice_is_kept_once(store: Store) -> None:
    write(store, SETUP, session("s"), SETUP, make_turn("s", 0))
    write(store, SETUP)
    assert bits(store.load_session("s").setups[SETUP.digest]) == bits(SETUP)


def test_keys_of_tools_and_messages_keep_their_order(store: Store) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "b a", "arguments": {"z": 1, "a": 2}}}
    setup = dataclasses.replace(SETUP, tools=(tool,), template_kwargs={"z": 1, "a": 2})
    reply = {"role": "assistant", "content": "", "tool_calls": [tool]}
    write(store, setup, session("s"), make_turn("s", 0, setup=setup.digest, messages=(reply,), reply=reply))
    stored = store.load_session("s")
    stored_setup = stored.setups[setup.digest]
    for read, written in (
        (stored_setup.tools, setup.tools),
        (stored_setup.template_kwargs, setup.template_kwargs),
        (stored.turns[0].messages, (reply,)),
        (stored.turns[0].reply, reply),
    ):
        assert json.dumps(read) == json.dumps(written)


def test_unknown_session_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.load_session("s")


def test_empty_write_does_nothing(store: Store) -> None:
    write(store)
    assert store.sessions() == []


# Columns and payloads


def column(turn: int, values: object, name: str = "advantages") -> TurnColumn:
    return TurnColumn("s", turn, name, np.array(values, np.float32), 1.0)


def payload(turn: int, rows: int, start: int = 0, name: str = "experts", dtype: str = "uint8") -> TurnPayload:
    return TurnPayload("s", turn, name, start, np.zeros((rows, 2), dtype))


def test_new_values_replace_old_ones_of_the_same_name_and_turn(store: Store, place: Place) -> None:
    write(store, session("s"), SETUP, *make_chain("s", 2))
    write(store, column(0, [1] * 4), column(1, [2] * 4), column(0, [3] * 8, "values"))
    write(store, column(0, [4] * 8))
    columns = store.load_session("s", per_token=True).columns
    assert [(column.turn, column.name, column.values[0]) for column in columns] == [
        (1, "advantages", 2),
        (0, "values", 3),
        (0, "advantages", 4),
    ]
    assert store.extra_names(["s"]) == ExtraNames(("advantages", "values"), ())
    assert verify(place.location).ok


def test_values_of_wrong_length_for_their_turn_are_refused(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0))
    for values in [[], [1] * 3, [1] * 5, [1] * 9, [1, 2, 3, np.inf], [np.nan] * 4]:
        with pytest.raises(InvariantViolation, match="advantages"):
            write(store, column(0, values))
        assert store.load_session("s", per_token=True).columns == ()


def test_rows_unlike_their_turn_or_session_are_refused(store: Store) -> None:
    write(store, session("s"), SETUP, *make_chain("s", 3), payload(2, 8, start=-1))
    for record in [
        payload(0, 9),
        payload(0, 1, start=8),
        payload(0, 8, start=-1),
        payload(1, 8, start=-2),
        payload(0, 0),
        payload(0, 2, dtype="complex64"),
        payload(1, 2, dtype="int16"),
        dataclasses.replace(payload(1, 2), rows=np.zeros((2, 3), np.uint8)),
    ]:
        with pytest.raises(InvariantViolation, match="experts"):
            write(store, record)


def test_rows_of_another_name_may_be_of_another_kind(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0), payload(0, 8), payload(0, 3, 2, "hidden", "float16"))
    (trajectory,) = store.load_session("s", per_token=True).trajectories()
    assert {name: (rows.rows.dtype, int(rows.known.sum())) for name, rows in trajectory.payloads.items()} == {
        "experts": (np.uint8, 8),
        "hidden": (np.float16, 3),
    }


def test_columns_and_payloads_of_unknown_turns_raise_not_found(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0))
    for record in (column(1, [1] * 4), payload(1, 2)):
        with pytest.raises(NotFound):
            write(store, record)


# Listings


def test_due_turns_were_not_checked(store: Store) -> None:
    write(store, SETUP, session("s"), *make_chain("s", 2), session("other"), *make_chain("other", 2))
    due = [Event(name, turn, BRIDGE_DUE, {}, 1.0) for name, turn in (("s", 0), ("s", 1), ("other", 0))]
    write(store, *due, Event("s", 1, BRIDGE_SKIPPED, {}, 1.0), Event("s", 0, BRIDGE_CHECKED, {}, 2.0))
    assert (store.checks_due(), store.checks_due(["s"]), store.checks_due(["unknown"])) == (2, 1, 0)


def test_listings_count_turns_and_unique_tokens(store: Store) -> None:
    write(store, session("s"), session("empty"), SETUP, *make_chain("s", 3, tokens=5))
    first, second = store.sessions()
    assert (first.info.session_id, first.turns, first.tokens, first.sampled_tokens) == ("s", 3, 30, 15)
    assert (second.info.session_id, second.turns, second.tokens, second.sampled_tokens) == ("empty", 0, 0, 0)


def test_pages_follow_the_order_of_creation_even_around_deletions(store: Store) -> None:
    for name in "dacb":
        write(store, session(name))
    page = store.sessions(limit=2)
    assert [summary.info.session_id for summary in page] == ["d", "a"]
    asyncio.run(store.delete_session("a"))
    rest = store.sessions(limit=2, after=page[-1].position)
    assert [summary.info.session_id for summary in rest] == ["c", "b"]


def test_position_is_not_reused(store: Store) -> None:
    write(store, session("a"))
    before = store.sessions()[0].position
    asyncio.run(store.delete_session("a"))
    write(store, session("a"))
    assert store.sessions()[0].position > before


def test_iteration_yields_every_session_across_pages(store: Store) -> None:
    names = [f"s{number}" for number in range(120)]
    write(store, *map(session, names))
    assert [stored.info.session_id for stored in store.iter_sessions()] == names


def test_sessions_loaded_together_equal_those_loaded_alone(store: Store) -> None:
    names = [f"s{9 - number}" for number in range(10)]
    for name in names:
        records = [session(name), SETUP, *make_chain(name, 3, tokens=30_000 if name == "s4" else 8)]
        records += [Reward(name, 1, 0.5, 1.0), Reward(name, None, 1.0, 2.0), Event(name, 2, BRIDGE_DUE, {}, 1.0)]
        write(store, *records, TurnColumn(name, 0, "a", np.ones(records[2].completion_ids.size, np.float32), 1.0))
    write(store, session("empty"))
    statements: list[str] = []
    with counted(statements):
        loaded = list(store.iter_sessions(per_token=True, together=True))
    assert bits(loaded) == bits([store.load_session(name, per_token=True) for name in [*names, "empty"]])
    assert len(statements) < 40  # eight for each of three lots
    assert [bool(session.columns) for session in store.iter_sessions(together=True)] == [False] * 11


def test_an_unknown_session_is_looked_up_with_one_statement(store: Store) -> None:
    statements: list[str] = []
    with counted(statements), pytest.raises(NotFound):
        store.load_session("unknown")
    assert sum("FROM" in statement for statement in statements) == 1


def test_iteration_skips_a_session_deleted_meanwhile(store: Store) -> None:
    write(store, session("a"), session("b"), session("c"))
    iterator = store.iter_sessions()
    assert next(iterator).info.session_id == "a"
    asyncio.run(store.delete_session("b"))
    assert [stored.info.session_id for stored in iterator] == ["c"]


# Refusals


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_turn_that_is_not_the_next_conflicts(store: Store, number: int) -> None:
    turns = make_chain("s", 2)
    write(store, session("s"), SETUP, *turns)
    with pytest.raises(Conflict):
        write(store, make_turn("s", number, turns[0] if number else None, engine="another"))
    assert bits(store.load_session("s").turns) == bits(turns)


def test_existing_session_id_conflicts(store: Store) -> None:
    write(store, SessionInfo("s", 1.0, {"first": True}))
    with pytest.raises(Conflict):
        write(store, SessionInfo("s", 2.0))
    assert store.load_session("s").info.metadata == {"first": True}


def test_writes_for_unknown_sessions_raise_not_found(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0))
    for record in [
        make_turn("gone", 0),
        make_turn("gone", 4),
        Reward("gone", None, 1.0, 1.0),
        Reward("s", 1, 1.0, 1.0),
    ]:
        with pytest.raises(NotFound):
            write(store, record)


def test_turn_with_an_unknown_setup_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        write(store, session("s"), make_turn("s", 0))
    with pytest.raises(NotFound):
        store.load_session("s")


def test_a_turn_that_breaks_a_rule_is_refused(store: Store) -> None:
    for changes in [
        {"logprobs": np.zeros(3, np.float32)},
        {"added_provenance": np.full(3, Provenance.USER, np.uint8)},
        {"added_provenance": np.full(4, Provenance.SAMPLED, np.uint8)},
        {"added_provenance": np.zeros(4, np.uint8)},
        {"added_ids": np.empty(0, np.int32), "added_provenance": np.empty(0, np.uint8)},
        {"completion_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32)},
    ]:
        with pytest.raises(InvariantViolation):
            write(store, session("s"), SETUP, make_turn("s", 0, **changes))
        assert store.sessions() == []


def test_a_turn_chained_to_another_past_is_refused(store: Store) -> None:
    write(store, session("s"), SETUP, make_turn("s", 0))
    with pytest.raises(InvariantViolation):
        write(store, make_turn("s", 1, make_turn("s", 0, engine="another")))


def test_a_turn_whose_parent_is_itself_is_refused(store: Store) -> None:
    with pytest.raises(InvariantViolation):
        write(store, session("s"), SETUP, make_turn("s", 0, make_turn("s", 0)))


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_name_that_is_invalid_in_a_text_column_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequest):
        write(store, session(name))


def test_nan_reward_is_refused(store: Store) -> None:
    write(store, session("s"))
    with pytest.raises(InvalidRequest):
        write(store, Reward("s", None, float("nan"), 1.0))


def test_failed_call_records_nothing(store: Store) -> None:
    with pytest.raises(Conflict):
        write(store, session("s"), SETUP, make_turn("s", 0), session("s"))
    assert store.sessions() == []


# Deletion


def test_deletion_removes_turns_and_rewards_and_keeps_other_sessions(store: Store, place: Place) -> None:
    for name in "ab":
        write(
            store, session(name), SETUP, *make_chain(name, 3), Reward(name, 1, 1.0, 1.0), Reward(name, None, 1.0, 1.0)
        )
        write(store, dataclasses.replace(column(0, [1] * 4), session_id=name))
        write(store, dataclasses.replace(payload(0, 2), session_id=name))
    asyncio.run(store.delete_session("a"))
    assert [summary.info.session_id for summary in store.sessions()] == ["b"]
    assert len(store.load_session("b").rewards) == 2
    assert verify(place.location).ok
    write(store, session("a"))
    assert store.load_session("a").turns == ()
    assert store.load_session("a").rewards == ()
    assert store.extra_names(["a"]) == ExtraNames()


def test_deletion_of_an_unknown_session_raises_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        asyncio.run(store.delete_session("s"))


def test_a_turn_in_flight_does_not_resurrect_a_deleted_session(store: Store) -> None:
    root, child = make_chain("s", 2)
    write(store, session("s"), SETUP, root)
    asyncio.run(store.delete_session("s"))
    with pytest.raises(NotFound):
        write(store, child)
    write(store, session("s"), make_turn("s", 0, engine="another"))
    with pytest.raises(InvariantViolation):
        write(store, child)


# Opening and closing


def test_closed_store_refuses_calls_and_is_unhealthy(place: Place) -> None:
    store = place.open()
    assert store.healthy
    store.close()
    store.close()
    assert not store.healthy
    with pytest.raises(StoreError, match="closed"):
        write(store, session("s"))
    with pytest.raises(StoreError, match="closed"):
        store.sessions()


def test_closing_writes_queued_calls(place: Place) -> None:
    async def queue_and_close() -> None:
        store = place.open()
        writes = [asyncio.ensure_future(store.write(session(f"s{number}"))) for number in range(50)]
        await asyncio.sleep(0)
        store.close()
        await asyncio.gather(*writes)

    asyncio.run(queue_and_close())
    with place.open() as store:
        assert len(store.sessions()) == 50


def test_reader_opens_beside_the_writer_and_sees_its_writes(store: Store, place: Place) -> None:
    with place.open(read_only=True) as reader:
        write(store, session("s"), SETUP, make_turn("s", 0))
        assert len(reader.load_session("s").turns) == 1
        with pytest.raises(StoreError, match="read-only"):
            write(reader, session("t"))
        assert reader.healthy
    write(store, session("t"))


def test_reader_sees_a_consistent_state_of_a_session_during_writes(store: Store) -> None:
    turns = make_chain("s", 60)
    write(store, session("s"), SETUP)

    async def write_and_read() -> None:
        async def write_all() -> None:
            for turn in turns:
                await store.write(turn, Reward("s", turn.seq, 1.0, time.time()))

        writing = asyncio.ensure_future(write_all())
        while not writing.done():
            stored = await asyncio.to_thread(store.load_session, "s")
            assert len(stored.turns) == len(stored.rewards)
        await writing

    asyncio.run(write_and_read())
    assert len(store.load_session("s").turns) == 60
