"""Share state between the gateways on one record: which of them are alive, and whether sampling is paused."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from sqlalchemy import Connection, delete, insert, select, update

from tokentape.store import _schema as schema


@dataclass(frozen=True, slots=True)
class GateState:
    position: int = 0
    """The newest change's position, which grows with every change."""
    closed: bool = False
    abort: bool = False
    """Whether to abort the calls in flight."""
    weight_version: str | None = None
    """The name of the current weights, if known."""
    adapter_versions: Mapping[str, str] = field(default_factory=dict)
    """The current version of each adapter, if known."""


@dataclass(frozen=True, slots=True)
class GatewayState:
    """A gateway's state as it last reported it."""

    gateway_id: str
    beat: int
    """The heartbeat, which grows while the gateway runs."""
    heard: int
    """The position of the newest gate change that the gateway has applied."""
    under_way: int
    """The number of the gateway's calls in flight at the engine."""


def gate_state(connection: Connection) -> GateState:
    rows = connection.execute(_GATE).all()
    if not rows:
        return GateState()
    adapters = {row.key.removeprefix(_ADAPTER): row.value for row in rows if row.key is not None}
    return GateState(rows[0].position, bool(rows[0].closed), bool(rows[0].abort), rows[0].weight_version, adapters)


def change_gate(
    connection: Connection,
    *,
    closed: bool,
    abort: bool = False,
    weight_version: str | None = None,
    adapter: str | None = None,
) -> None:
    """Close or open the gate for all gateways. With `adapter`, `weight_version` is the adapter's version."""
    if adapter is not None and weight_version is not None:
        key = _ADAPTER + adapter
        connection.execute(delete(schema.meta).where(schema.meta.c.key == key))
        connection.execute(insert(schema.meta), {"key": key, "value": weight_version})
        weight_version = None
    change = {"closed": int(closed), "abort": int(abort), "weight_version": weight_version, "created_at": time.time()}
    connection.execute(insert(schema.gate_changes), change)


def gateways(connection: Connection) -> list[GatewayState]:
    return [GatewayState(*row) for row in connection.execute(select(schema.gateways))]


def tell(connection: Connection, state: GatewayState) -> None:
    """Replace the recorded state of a gateway."""
    own = schema.gateways.c.gateway_id == state.gateway_id
    if not connection.execute(update(schema.gateways).where(own).values(asdict(state))).rowcount:
        connection.execute(insert(schema.gateways), asdict(state))


def leave(connection: Connection, gateway_id: str, beat: int | None = None) -> None:
    """Delete a gateway's state. With `beat`, delete it only if that is still its last heartbeat."""
    gone = delete(schema.gateways).where(schema.gateways.c.gateway_id == gateway_id)
    connection.execute(gone if beat is None else gone.where(schema.gateways.c.beat == beat))


_ADAPTER = "version of adapter "
"""The prefix of keys in `meta` for an adapter's current version."""

_CHANGES = schema.gate_changes.c
_NEWEST_FIRST = _CHANGES.position.desc()
_VERSION = select(_CHANGES.weight_version).where(_CHANGES.weight_version.is_not(None)).order_by(_NEWEST_FIRST).limit(1)
_NEWEST = (
    select(_CHANGES.position, _CHANGES.closed, _CHANGES.abort, _VERSION.scalar_subquery().label("weight_version"))
    .order_by(_NEWEST_FIRST)
    .limit(1)
    .subquery()
)
_GATE = select(_NEWEST, schema.meta).join_from(
    _NEWEST, schema.meta, schema.meta.c.key.startswith(_ADAPTER), isouter=True
)
"""The newest change, with a row for each adapter that has a version."""
