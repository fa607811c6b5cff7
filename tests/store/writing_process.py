"""A process that writes turns until it is stopped, and prints acknowledged turns on stdout.

    python -m tests.store.writing_process DIRECTORY

It continues eight sessions. A line `SESSION SEQ` is written after each acknowledgement,
`failed ERROR` after the first write that failed, `still ERROR` after a retry, then `healthy` or `broken`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.records import SETUP, make_turn
from tokentape.errors import StoreError
from tokentape.store import SqliteStore
from tokentape.types import SessionInfo, Turn

SESSIONS = [f"s{number}" for number in range(8)]


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def continue_session(store: SqliteStore, session_id: str, parent: Turn | None) -> None:
    while True:
        turn = make_turn(session_id, 0 if parent is None else parent.seq + 1, parent, tokens=300)
        await store.write(turn)
        say(f"{session_id} {turn.seq}")
        parent = turn


async def write_all(store: SqliteStore) -> None:
    known = {summary.info.session_id for summary in store.sessions()}
    await store.write(SETUP, *(SessionInfo(name, 1.0) for name in SESSIONS if name not in known))
    newest = [(store.load_session(name).turns or (None,))[-1] for name in SESSIONS]
    try:
        await asyncio.gather(*map(continue_session, [store] * len(SESSIONS), SESSIONS, newest))
    except StoreError as error:
        say(f"failed {error}")
    try:
        await store.write(SessionInfo("another", 1.0))
    except StoreError as error:
        say(f"still {error}")
    say("healthy" if store.healthy else "broken")


if __name__ == "__main__":
    opened = SqliteStore.open(sys.argv[1])
    asyncio.run(write_all(opened))
    os._exit(0)
