"""kill -9 of a gateway under load, again and again, on one data directory."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tokentape.store import SqliteStore, verify

CLIENTS = 6
SERVER = Path(__file__).with_name("serving_process.py")


@dataclass
class Agent:
    """A client that continues one session, regardless of what happens to the gateway."""

    session_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    acknowledged: dict[int, str | None] = field(default_factory=dict)
    """Turn number and content of every reply that arrived whole."""
    newest: int | None = None
    sent: int = 0

    def talk(self, base_url: str, stop: threading.Event, arrived: threading.Event) -> None:
        client = openai.OpenAI(base_url=f"{base_url}/sessions/{self.session_id}/v1", api_key="none", max_retries=0)
        while not stop.is_set():
            question = {"role": "user", "content": f"question {len(self.messages)}"}
            self.sent += 1
            try:
                reply = client.chat.completions.create(
                    model="tiny", messages=[*self.messages, question], max_tokens=4, temperature=1.0, seed=self.sent
                )
            except openai.OpenAIError:
                return
            self.newest = reply.choices[0].model_extra["tokentape"]["turn"]
            self.acknowledged[self.newest] = reply.choices[0].message.content
            arrived.set()
            # Contexts stay short: the point is many commits, not long ones.
            self.messages += [question, reply.choices[0].message.model_dump(exclude_none=True)]


@contextmanager
def gateway(model: Path, data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(model), str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "the gateway did not start"
        yield process, url
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20])
def test_acknowledged_turns_survive_and_sessions_continue(tmp_path: Path, model_dir: Path, rounds: int) -> None:
    """Every reply that arrived is in the record, and at most the one that was on its way to each agent besides.

    A reply's last byte leaves after its commit, so a kill in between leaves a turn that did not arrive.
    """
    rng = random.Random(rounds)
    agents = [Agent(f"agent-{n}") for n in range(CLIENTS)]
    for _ in range(rounds):
        before = {agent.session_id: agent.newest for agent in agents}
        with gateway(model_dir, tmp_path) as (process, url):
            stop, arrived = threading.Event(), threading.Event()
            threads = [threading.Thread(target=agent.talk, args=(url, stop, arrived)) for agent in agents]
            for thread in threads:
                thread.start()
            while not arrived.wait(0.1) and any(thread.is_alive() for thread in threads):
                pass
            time.sleep(rng.uniform(0.0, 1.5))
            process.kill()
            stop.set()
            for thread in threads:
                thread.join()
        assert verify(tmp_path).findings == ()
        with SqliteStore.open(tmp_path, read_only=True) as store:
            recorded = {stored.info.session_id: stored.turns for stored in store.iter_sessions()}
        for agent in agents:
            turns = recorded.get(agent.session_id, ())
            for seq, content in agent.acknowledged.items():
                assert turns[seq].reply["content"] == content
            # One request of each agent may have been under way at each kill.
            assert len(turns) <= agent.sent
            later = [
                turn for turn in turns if turn.seq in agent.acknowledged and turn.seq > (before[agent.session_id] or 0)
            ]
            if later and before[agent.session_id] is not None:
                assert later[0].parent == before[agent.session_id], "the session did not go on where it was"
    assert sum(len(agent.acknowledged) for agent in agents) > 5 * rounds
