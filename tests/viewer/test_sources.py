"""Sessions for the viewer, from a store and from files: listing, order and details."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.records import SETUP, bits, make_chain, make_turn
from tokentape._session.arrow import write_parquet
from tokentape._session.jsonl import write_jsonl
from tokentape.errors import InvalidRequest, NotFound
from tokentape.store import SqliteStore
from tokentape.store._listing import Listing
from tokentape.types import Reward, SessionInfo, TurnColumn
from tokentape.viewer import _views as views
from tokentape.viewer._source import FileSource, StoreSource, ViewerSource


def fill(store: SqliteStore) -> None:
    """Write `forked` of alice with branches 0-1 and 0-2, `long` of four turns, `aborted` of one turn, `Zoë` empty."""
    first, second = make_chain("forked", 2)
    other = make_turn("forked", 2, first, fork="branched")
    cut = make_turn("aborted", 0, finish_reason="abort", abort_cause="client_left")
    records = [
        *(SessionInfo("forked", 1.0, {"task": "Sums"}, "alice"), SETUP, first, second, other),
        *(Reward("forked", None, 0.5, 2.0), Reward("forked", None, 0.25, 3.0), Reward("forked", 1, -1.0, 3.0)),
        *(SessionInfo("long", 2.0, {}, "bob"), *make_chain("long", 4), Reward("long", None, 1.0, 4.0, leaf=3)),
        *(SessionInfo("aborted", 3.0, {}, "bob"), cut),
        SessionInfo("Zoë", 4.0, {"name": "Ünal"}, "alice"),
    ]
    asyncio.run(store.write(*records))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    """A filled record that tests only read."""
    with SqliteStore.open(tmp_path_factory.mktemp("record")) as store:
        fill(store)
        yield store


@pytest.fixture(scope="module")
def stored(store: SqliteStore) -> StoreSource:
    return StoreSource(store, "store")


@pytest.fixture(scope="module", params=["parquet", "jsonl"])
def filed(request: pytest.FixtureRequest, store: SqliteStore, tmp_path_factory: pytest.TempPathFactory) -> FileSource:
    """Write the sessions with trajectories to a file."""
    path = tmp_path_factory.mktemp("file") / f"all.{request.param}"
    views = map(StoreSource(store, "").load, ("forked", "long"))
    exported = [trajectory for view in views for trajectory in view.exported()]
    write_parquet(exported, path) if request.param == "parquet" else write_jsonl(exported, path)
    return FileSource(path)


def names(source: ViewerSource, listing: Listing) -> list[str]:
    return [session.info.session_id for session in source.page(listing).sessions]


def test_newest_sessions_come_first_with_their_counts(stored: StoreSource) -> None:
    page = stored.page(Listing())
    assert page.total == 4
    assert [session.info.session_id for session in page.sessions] == ["Zoë", "aborted", "long", "forked"]
    counted = {
        session.info.session_id: (
            session.turns,
            session.forks,
            session.aborted,
            session.tokens,
            session.sampled_tokens,
            session.reward,
        )
        for session in page.sessions
    }
    assert counted == {
        "Zoë": (0, 0, 0, 0, 0, None),
        "aborted": (1, 0, 1, 8, 4, None),
        "long": (4, 0, 0, 32, 16, 1.0),
        "forked": (3, 1, 0, 24, 12, 0.25),
    }


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (Listing(sort="turns"), ["long", "forked", "aborted", "Zoë"]),
        (Listing(sort="turns", descending=False), ["Zoë", "aborted", "forked", "long"]),
        (Listing(sort="tokens"), ["long", "forked", "aborted", "Zoë"]),
        (Listing(sort="sampled", limit=1, offset=1), ["forked"]),
        (Listing(sort="forks", limit=1), ["forked"]),
        (Listing(sort="aborted", limit=1), ["aborted"]),
        (Listing(sort="session", descending=False), ["Zoë", "aborted", "forked", "long"]),
        # Those without a reward come last either way.
        (Listing(sort="reward", limit=2), ["long", "forked"]),
        (Listing(sort="reward", descending=False, limit=2), ["forked", "long"]),
        (Listing(search="FORK"), ["forked"]),
        (Listing(search="sums"), ["forked"]),
        (Listing(search="Ünal"), ["Zoë"]),
        (Listing(search='"name": "Ünal"'), []),
        (Listing(search='"name":"Ünal"'), ["Zoë"]),
        (Listing(search="100%"), []),
        (Listing(search="_"), []),
        (Listing(fork="any"), ["forked"]),
        (Listing(fork="branched"), ["forked"]),
        (Listing(fork="sibling"), []),
        (Listing(fork="none"), ["Zoë", "aborted", "long"]),
        (Listing(reward_min=0.5), ["long"]),
        (Listing(reward_max=0.5), ["forked"]),
        (Listing(owner="alice"), ["Zoë", "forked"]),
        (Listing(session_ids=["long", "nothing"]), ["long"]),
        (Listing(since=2.0, until=4.0), ["aborted", "long"]),
        (Listing(weights="step-1"), ["aborted", "long", "forked"]),
        (Listing(weights="step-2"), []),
        (Listing(metadata=[("task", "sums")]), ["forked"]),
        (Listing(metadata=[("task", "sum")]), []),
        (Listing(metadata=[("name", "Ünal"), ("task", "Sums")]), []),
        (Listing(metadata=[("name", "Ünal")]), ["Zoë"]),
        (Listing(limit=2, offset=3), ["forked"]),
    ],
)
def test_sessions_are_filtered_and_sorted(stored: StoreSource, listing: Listing, expected: list[str]) -> None:
    assert names(stored, listing) == expected


def test_page_contains_the_total_number_of_sessions(stored: StoreSource) -> None:
    assert stored.page(Listing(owner="bob", limit=1)).total == 2


def test_file_lists_the_same_sessions_with_trajectories_as_a_store(filed: FileSource) -> None:
    assert names(filed, Listing()) == ["long", "forked"]
    session = filed.page(Listing(search="fork")).sessions[0]
    assert (session.turns, session.forks, session.tokens, session.sampled_tokens, session.reward) == (
        3,
        1,
        24,
        12,
        0.25,
    )
    assert session.info.metadata == {"task": "Sums"}


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (Listing(sort="turns", descending=False), ["forked", "long"]),
        (Listing(sort="reward"), ["long", "forked"]),
        (Listing(sort="session", descending=False), ["forked", "long"]),
        (Listing(fork="any"), ["forked"]),
        (Listing(fork="none"), ["long"]),
        (Listing(fork="branched"), ["forked"]),
        (Listing(fork="sibling"), []),
        (Listing(search="SUMS"), ["forked"]),
        (Listing(weights="step-1"), ["long", "forked"]),
        (Listing(metadata=[("task", "Sums")]), ["forked"]),
        (Listing(metadata=[("task", "Sum")]), []),
        (Listing(reward_min=0.5), ["long"]),
        # A file has no times.
        (Listing(since=0.0), []),
        (Listing(until=1e12), []),
        (Listing(limit=1, offset=1), ["forked"]),
    ],
)
def test_file_is_filtered_and_sorted_like_a_store(filed: FileSource, listing: Listing, expected: list[str]) -> None:
    assert names(filed, listing) == expected


def test_a_file_shows_the_trajectories_bit_for_bit(filed: FileSource, store: SqliteStore) -> None:
    shown = filed.load("forked").trajectories
    assert bits(shown) == bits(tuple(StoreSource(store, "").load("forked").exported()))


def test_file_shows_tokens_that_were_not_sampled(store: SqliteStore, tmp_path: Path) -> None:
    path = tmp_path / "sft.parquet"
    (trajectory,) = store.load_session("long").trajectories()
    write_parquet(
        [replace(trajectory, logprobs=np.where(trajectory.loss_mask, np.float32(np.nan), trajectory.logprobs))], path
    )
    view = FileSource(path).load("long")
    about, arrays = views.trajectory(view, view.trajectories[0], None)
    assert [turn["mean_logprob"] for turn in about["turns"]] == [None] * 4
    assert np.isnan(arrays["logprobs"][trajectory.loss_mask]).all()


def test_file_shows_the_tree_of_its_paths(filed: FileSource, store: SqliteStore) -> None:
    expected = StoreSource(store, "").load("forked").turns
    unknown = dict.fromkeys(("stop", "abort_cause", "engine", "created_at", "digest"))
    assert filed.load("forked").turns == tuple(replace(node, **unknown) for node in expected)


def test_a_file_shows_the_lineage_of_its_branches(filed: FileSource, store: SqliteStore) -> None:
    expected = StoreSource(store, "").load("forked").edges
    assert expected
    assert filed.load("forked").edges == expected


def test_unknown_sessions_are_not_found(stored: StoreSource, filed: FileSource) -> None:
    for source in (stored, filed):
        with pytest.raises(NotFound):
            source.version("nothing")
        with pytest.raises(NotFound):
            source.load("nothing")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.txt"])
def test_files_without_trajectories_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("hello\n")
    with pytest.raises(InvalidRequest):
        FileSource(path)


def test_version_changes_with_every_shown_value(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        fill(store)
        check_versions(StoreSource(store, "store"), store)


def check_versions(stored: StoreSource, store: SqliteStore) -> None:
    seen = [stored.version("long")]
    last = store.load_session("long").turns[-1]
    column = TurnColumn("long", 0, "advantage", np.zeros(4, np.float32), 1.0)
    for record in (make_turn("long", 4, last), Reward("long", None, 0.5, 9.0), column):
        asyncio.run(store.write(record))
        seen.append(stored.version("long"))
    assert len({*seen}) == 4
    assert {owner for owner, _ in seen} == {"bob"}
