"""A run to sum up: drift, forks, aborts, truncation, rewards and a trainer's logprobs over versions of the weights.

    python -m tests.viewer.runs docs/img/run.png

takes the picture of the documentation, of a made-up run of 640 sessions.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.records import SETUP, make_turn
from tokentape.chat._renderer import Renderer
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.types import Reward, SessionInfo, Turn, TurnColumn
from tokentape.viewer._app import create_app
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._routes import Viewer
from tokentape.viewer._source import StoreSource

SESSIONS = 12
WORDS = ("Let", "me", "look", "up", "what", "pears", "cost", "here")


async def record_run(
    store: SqliteStore, renderer: Renderer, sessions: int = SESSIONS, groups: int = 4, per_version: int = 5
) -> None:
    """Record sessions of three turns, of tasks `t0`, `t1` and so on; with more reward and drift the later they are."""
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
                one.seq,
                "trainer_logprobs",
                one.logprobs + np.float32(0.05 * (one.seq + n % 3) * (1 + 2 * n / sessions)),
                1.0,
            )
            for one in turns[: n % 4]
        ]
        rewards = [Reward(name, None, float(rng.random() < 0.2 + 0.6 * n / sessions), 9.0)] if n % 5 else []
        await store.write(
            SessionInfo(name, 1.0 + n, {"task": f"t{n * groups // sessions}"}), *turns, *columns, *rewards
        )


def corrupt(directory: Path, session_id: str) -> None:
    """Write other ids over those of a session's turns."""
    with closing(sqlite3.connect(directory / "tokentape.db")) as database, database:
        database.execute("UPDATE turns SET completion_ids = zeroblob(8) WHERE session_id = ?", (session_id,))


def take_picture(path: Path) -> None:
    """Save a picture of the page of a made-up run."""
    from playwright.sync_api import sync_playwright

    renderer = Renderer.load(Path(__file__).parents[2] / "src/tokentape/demo/model")
    with tempfile.TemporaryDirectory() as folder, SqliteStore.open(Path(folder)) as store:
        asyncio.run(record_run(store, renderer, 640, 160, 20))
        viewer = Viewer(StoreSource(store, "run"), RecordReader(renderer.tokenizer, renderer))
        with running(create_app(viewer)) as url, sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1200, "height": 820}, locale="en-US", timezone_id="UTC")
            page.goto(f"{url}/view#/run")
            page.get_by_text("640 sessions ·").wait_for(timeout=600_000)
            # The newest weights have begun no session yet.
            page.keyboard.press("ArrowLeft")
            page.keyboard.press("ArrowLeft")
            page.screenshot(path=path)
            browser.close()


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]))
