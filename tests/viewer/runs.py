"""A run to summarize: drift, forks, aborts, truncation, rewards and a trainer's logprobs over weight versions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.records import SETUP, make_turn
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.types import Reward, SessionInfo, Turn, TurnColumn

SESSIONS = 12
WORDS = ("Let", "me", "look", "up", "what", "pears", "cost", "here")


async def record_run(
    store: SqliteStore, renderer: Renderer, sessions: int = SESSIONS, groups: int = 4, per_version: int = 5
) -> None:
    """Record sessions of three turns, of tasks `t0`, `t1` and so on; later sessions have more reward and drift."""
    encode, rng = renderer.tokenizer.encode_plain, np.random.default_rng(3)
    await store.write(SETUP)
    for n in range(sessions):
        name = f"s{n:02}"
        turns: list[Turn] = []
        for seq in range(3):
            words = [word for word in WORDS if rng.random() < 0.8] or ["No"]
            whole = 0.9 - 0.4 * n / sessions
            ids = [i for word in words for part in ([word] if rng.random() < whole else word) for i in encode(part)]
            changes: dict[str, Any] = {"weight_version": f"step-{(n + seq) // per_version}"}
            if seq == 1 and n % 4 == 1:
                changes |= {"finish_reason": "abort", "abort_cause": "client_left", "stop": None}
            elif seq == 2 and n % 3 == 0:
                changes |= {"finish_reason": "length", "stop": None}
            if seq == 2 and n % 4 == 1:
                changes |= {"fork": "sibling"}
            parent = None if seq == 0 else turns[0 if n % 4 == 1 else seq - 1]
            logprobs = -rng.exponential(1.0, len(ids)).astype(np.float32)
            more: dict[str, Any] = {
                "completion_ids": np.array(ids, np.int32),
                "logprobs": logprobs,
                "created_at": 100.0 * n + 7 * seq,
            }
            added: dict[str, Any] = {"added_ids": np.array(encode("hi"), np.int32)}
            added["added_provenance"] = np.full(len(added["added_ids"]), 4, np.uint8)
            turns.append(make_turn(name, seq, parent, **added, **more, **changes))
        columns = [
            TurnColumn(
                name,
                turn.seq,
                "trainer_logprobs",
                turn.logprobs + np.float32(0.05 * (turn.seq + n % 3) * (1 + 2 * n / sessions)),
                1.0,
            )
            for turn in turns[: n % 4]
        ]
        rewards = [Reward(name, None, float(rng.random() < 0.2 + 0.6 * n / sessions), 9.0)] if n % 5 else []
        await store.write(
            SessionInfo(name, 1.0 + n, {"task": f"t{n * groups // sessions}"}), *turns, *columns, *rewards
        )


def corrupt(directory: Path, session_id: str) -> None:
    """Overwrite the ids of a session's turns."""
    with closing(sqlite3.connect(directory / "tokentape.db")) as database, database:
        database.execute("UPDATE turns SET completion_ids = zeroblob(8) WHERE session_id = ?", (session_id,))
