"""List sessions page by page, filtered and sorted, and find sessions that have changed."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import ColumnElement, Connection, Row, Table, case, exists, func, or_, select
from sqlalchemy.sql.expression import ScalarSelect

from tokentape._canonical import canonical_json
from tokentape.errors import InvalidRequest
from tokentape.store import _schema as schema
from tokentape.store._reads import Extent
from tokentape.store._rows import decode
from tokentape.types import SessionInfo

SortKey: TypeAlias = Literal["created", "session", "turns", "tokens", "sampled", "reward", "forks", "aborted"]

ANY_FORK = "any"
NO_FORK = "none"

_BYTES_PER_ID = 4


@dataclass(frozen=True, slots=True)
class Listing:
    owner: str | None = None
    """Only sessions that belong to this API key; None for all."""
    search: str = ""
    """Only sessions with this text in their id or metadata, ignoring case."""
    fork: str = ""
    """Only sessions with this fork cause, `any` fork, or `none`; empty for all sessions."""
    reward_min: float | None = None
    reward_max: float | None = None
    since: float | None = None
    """Only sessions created at this time, in Unix seconds, or later."""
    until: float | None = None
    """Only sessions created before this time."""
    weights: str = ""
    """Only sessions with a turn that began with this weight version."""
    metadata: Sequence[tuple[str, str]] = ()
    """Only sessions with these (key, value) pairs in their metadata, at any depth. Values are text or JSON; case is
    ignored within the limits of `metadata_spellings`."""
    session_ids: Sequence[str] | None = None
    """Only these sessions, at most a few hundred."""
    sort: SortKey = "created"
    descending: bool = True
    offset: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class SessionSummary:
    info: SessionInfo
    position: int
    """The rank in order of creation, the cursor for the next page. It grows, is never reused, and may have gaps."""
    turns: int
    tokens: int
    """Unique tokens: each added or sampled token counts once, however many contexts contain it."""
    sampled_tokens: int
    forks: int = 0
    aborted: int | None = None
    """The number of aborted turns; None if read from a file, which does not contain it."""
    reward: float | None = None
    """The session's newest reward, else the newest reward for any of its paths."""
    last_at: float | None = None
    """The last turn's time, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class ListedPage:
    total: int
    """The number of sessions on all pages."""
    sessions: tuple[SessionSummary, ...]


def list_page(connection: Connection, listing: Listing) -> ListedPage:
    """Return one page. The cost grows with the page if sorted by creation, and with the record otherwise."""
    table = schema.sessions
    conditions = _conditions(listing)
    total = connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one()
    key = _SORT_KEYS[listing.sort]
    order = key.desc().nulls_last() if listing.descending else key.asc().nulls_last()
    position = table.c.position.desc() if listing.descending else table.c.position
    ordered = [position] if listing.sort == "created" else [order, position]
    chosen = select(table.c.position).where(*conditions).order_by(*ordered).limit(listing.limit).offset(listing.offset)
    positions = list(connection.execute(chosen).scalars())
    chosen_sessions = {summary.position: summary for summary in summaries(connection, table.c.position.in_(positions))}
    return ListedPage(total, tuple(chosen_sessions[position] for position in positions))


def summaries(connection: Connection, condition: ColumnElement[bool]) -> list[SessionSummary]:
    """Return the sessions that match, in order of creation."""
    statement = select(
        schema.sessions,
        _TURNS.label("turns"),
        _FORKS.label("forks"),
        _ABORTED.label("aborted"),
        _ADDED_BYTES.label("added_bytes"),
        _SAMPLED_BYTES.label("sampled_bytes"),
        of_turns(func.max(schema.turns.c.created_at)).label("last_at"),
        _REWARD.label("reward"),
    )
    return [
        SessionSummary(
            info=decode(schema.sessions, row),
            tokens=(row.added_bytes + row.sampled_bytes) // _BYTES_PER_ID,
            sampled_tokens=row.sampled_bytes // _BYTES_PER_ID,
            **{name: getattr(row, name) for name in ("position", "turns", "forks", "aborted", "reward", "last_at")},
        )
        for row in connection.execute(statement.where(condition).order_by(schema.sessions.c.position))
    ]


def extents(connection: Connection, listing: Listing) -> dict[str, tuple[str, Extent]]:
    """Map session ids, newest first, to (owner, extent). This costs a few look-ups per session."""
    statement = select(schema.sessions, *EXTENT_COLUMNS).where(*_conditions(listing))
    newest_first = statement.order_by(schema.sessions.c.position.desc()).limit(listing.limit).offset(listing.offset)
    return {row.session_id: (row.owner, extent_of(row)) for row in connection.execute(newest_first)}


def extent_of(row: Row[Any]) -> Extent:
    """Return the extent in a row with `EXTENT_COLUMNS` or a row from `schema.snapshot_sessions`."""
    return Extent(row.position, row.turns, row.last_reward, row.last_column, row.last_event)


def _conditions(listing: Listing) -> list[ColumnElement[bool]]:
    sessions, turns = schema.sessions.c, schema.turns.c
    limits: tuple[tuple[Any, ColumnElement[Any], Any], ...] = (
        (listing.owner, sessions.owner, operator.eq),
        (listing.reward_min, _REWARD, operator.ge),
        (listing.reward_max, _REWARD, operator.le),
        (listing.since, sessions.created_at, operator.ge),
        (listing.until, sessions.created_at, operator.lt),
    )
    conditions = [compare(column, limit) for limit, column, compare in limits if limit is not None]
    if listing.session_ids is not None:
        conditions.append(sessions.session_id.in_(listing.session_ids))
    if listing.search:
        # Metadata is stored as ASCII JSON; a quote in the search text may be one of the JSON's quotes.
        spelled = json.dumps(listing.search)[1:-1].replace('\\"', '"')
        conditions.append(
            or_(
                sessions.session_id.icontains(listing.search, autoescape=True),
                sessions.metadata.icontains(spelled, autoescape=True),
            )
        )
    if listing.fork:
        forked = exists().where(
            turns.session_id == sessions.session_id,
            turns.fork.is_not(None) if listing.fork in (ANY_FORK, NO_FORK) else turns.fork == listing.fork,
        )
        conditions.append(~forked if listing.fork == NO_FORK else forked)
    if listing.weights:
        conditions.append(
            exists().where(turns.session_id == sessions.session_id, turns.weight_version == listing.weights)
        )
    for key, value in listing.metadata:
        spellings = metadata_spellings(key, value)
        conditions.append(or_(*(sessions.metadata.icontains(spelling, autoescape=True) for spelling in spellings)))
    return conditions


def metadata_spellings(key: str, value: str) -> list[str]:
    """Return texts of which metadata with this key and value, at any depth, contains one in its canonical JSON.

    Quotes inside JSON strings are escaped, so no string looks like a key. Letters outside ASCII are escaped, so their
    case matters, except in values that are all lower case, all upper case, or capitalized.
    """
    values = {json.dumps(spelling) for spelling in (value, value.lower(), value.upper(), value.capitalize())} | {value}
    with suppress(ValueError, RecursionError, InvalidRequest):
        values.add(canonical_json(json.loads(value)))
    return [f"{before}{json.dumps(key)}:{spelling}{after}" for spelling in values for before in "{," for after in ",}"]


def _of_session(value: ColumnElement[Any], table: Table) -> ScalarSelect[Any]:
    own = table.c.session_id == schema.sessions.c.session_id
    return select(value).where(own).correlate(schema.sessions).scalar_subquery()


def of_turns(value: ColumnElement[Any]) -> ScalarSelect[Any]:
    return _of_session(value, schema.turns)


def _bytes_of(ids: ColumnElement[Any]) -> ScalarSelect[Any]:
    return of_turns(func.coalesce(func.sum(func.length(ids)), 0))


def _newest_reward(scope: str) -> ScalarSelect[Any]:
    rewards = schema.rewards.c
    of_session = select(rewards.value).where(rewards.session_id == schema.sessions.c.session_id, rewards.scope == scope)
    return of_session.order_by(rewards.position.desc()).limit(1).correlate(schema.sessions).scalar_subquery()


_TURNS = of_turns(func.count())
_FORKS = of_turns(func.count(schema.turns.c.fork))
_ABORTED = of_turns(func.count(case((schema.turns.c.finish_reason == "abort", 1))))
_ADDED_BYTES = _bytes_of(schema.turns.c.added_ids)
_SAMPLED_BYTES = _bytes_of(schema.turns.c.completion_ids)
TOKENS = (_ADDED_BYTES + _SAMPLED_BYTES) // _BYTES_PER_ID
EXTENT_COLUMNS = (
    _TURNS.label("turns"),
    *(
        _of_session(func.coalesce(func.max(table.c.position), 0), table).label(name)
        for name, table in (
            ("last_reward", schema.rewards),
            ("last_column", schema.token_columns),
            ("last_event", schema.events),
        )
    ),
)
"""The columns to select with a session to get its current extent."""
_REWARD = func.coalesce(_newest_reward("session"), _newest_reward("trajectory"))

_SORT_KEYS: dict[SortKey, ColumnElement[Any]] = {
    "created": schema.sessions.c.position,
    "session": schema.sessions.c.session_id,
    "turns": _TURNS,
    "tokens": _ADDED_BYTES + _SAMPLED_BYTES,
    "sampled": _SAMPLED_BYTES,
    "reward": _REWARD,
    "forks": _FORKS,
    "aborted": _ABORTED,
}
