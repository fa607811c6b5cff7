"""State shared by the gateways on one record: which of them are alive, and whether sampling is paused."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select, update

from tokentape.store import _schema as schema


@dataclass(frozen=True, slots=True)
class GateState:
    position: int = 0
    """Of the change that made it so. Grows with every change."""
    closed: bool = False
    abort: bool = False
    """Whether calls under way are to be ended at once."""
    weight_version: str | None = None
    """The weights that sample now, if known."""


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The state that a gateway has last written of itself."""

    gateway_id: str
    beat: int
    """Grows as long as it lives."""
    heard: int
    """Position of the gate change that it goes by."""
    under_way: int
    """Calls of its that the engine is sampling."""


def gate_state(connection: Connection) -> GateState:
    row = connection.execute(_GATE).one_or_none()
    if row is None:
        return GateState()
    return GateState(row.position, bool(row.closed), bool(row.abort), row.weight_version)


def change_gate(connection: Connection, *, closed: bool, abort: bool = False, weight_version: str | None = None) -> int:
    """Close or open the gate for all gateways. Return 0, the number of bytes that count as written."""
    change = {"closed": int(closed), "abort": int(abort), "weight_version": weight_version, "created_at": time.time()}
    connection.execute(insert(schema.gate_changes), change)
    return 0


def gateways(connection: Connection) -> list[GatewayState]:
    return [GatewayState(*row) for row in connection.execute(select(schema.gateways))]


def tell(connection: Connection, state: GatewayState) -> int:
    """Write the state of a gateway over its earlier one. Return 0."""
    own = schema.gateways.c.gateway_id == state.gateway_id
    if not connection.execute(update(schema.gateways).where(own).values(asdict(state))).rowcount:
        connection.execute(insert(schema.gateways), asdict(state))
    return 0


def leave(connection: Connection, gateway_id: str, beat: int | None = None) -> int:
    """Delete a gateway's state; with `beat` only if that is still its last heartbeat. Return 0."""
    gone = delete(schema.gateways).where(schema.gateways.c.gateway_id == gateway_id)
    connection.execute(gone if beat is None else gone.where(schema.gateways.c.beat == beat))
    return 0


_CHANGES = schema.gate_changes.c
_NEWEST_FIRST = _CHANGES.position.desc()
_VERSION = select(_CHANGES.weight_version).where(_CHANGES.weight_version.is_not(None)).order_by(_NEWEST_FIRST).limit(1)
_GATE = (
    select(_CHANGES.position, _CHANGES.closed, _CHANGES.abort, _VERSION.scalar_subquery().label("weight_version"))
    .order_by(_NEWEST_FIRST)
    .limit(1)
)
