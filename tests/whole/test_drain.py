"""SIGTERM under load: acknowledged turns are in the record, and the process exits cleanly."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.cli.test_serve import serving
from tests.waiting import PATIENCE
from tests.whole.test_kill import CLIENTS, Agent
from tokentape.store import SqliteStore, verify


@pytest.mark.slow
def test_stopped_gateway_loses_no_turn(tmp_path: Path, model_dir: Path) -> None:
    agents = [Agent(f"agent-{n}") for n in range(CLIENTS)]
    stop, arrived = threading.Event(), threading.Event()
    with serving(model_dir, "--threads", 1, "--data", tmp_path, "--drain-seconds", 20) as (process, url):
        threads = [threading.Thread(target=agent.talk, args=(url, stop, arrived)) for agent in agents]
        for thread in threads:
            thread.start()
        assert process.stderr is not None
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reading.start()
        arrived.wait(PATIENCE)
        arrived.clear()
        arrived.wait(PATIENCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        stop.set()
        for thread in (*threads, reading):
            thread.join()
    assert verify(tmp_path).findings == ()
    with SqliteStore.open(tmp_path, read_only=True) as store:
        recorded = {stored.info.session_id: stored.turns for stored in store.iter_sessions()}
    for agent in agents:
        turns = recorded.get(agent.session_id, ())
        # No call is cut short: running calls finished and were answered.
        assert {turn.seq: turn.reply["content"] for turn in turns} == agent.acknowledged
    assert sum(len(agent.acknowledged) for agent in agents) >= 2
    assert "Traceback" not in "".join(lines)
