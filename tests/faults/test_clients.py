"""Faults of clients: they disconnect, retry, send twice at once, change the history, delete running sessions."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from tests.faults.conftest import QUESTION, Gateway, Serve, goes_on, joined, say, wait_for_turns
from tests.faults.invariant import Received
from tests.faults.upstream import Plan, Upstream
from tests.searching import examples
from tests.waiting import PATIENCE, calls_of
from tokentape.engines._base import Timeouts
from tokentape.gateway._events import InFlightCall
from tokentape.gateway._limits import Limits


class Leaver:
    """A client on a bare socket that disconnects in a chosen way."""

    def __init__(self, gateway: Gateway, body: dict[str, Any], session: str = "s") -> None:
        where = urlsplit(gateway.url)
        data = self.encode(body)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=PATIENCE)
        self._socket.sendall(
            f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )

    @staticmethod
    def encode(body: dict[str, Any]) -> bytes:
        return json.dumps({"return_token_ids": True, **body}).encode()

    def read_tokens(self, count: int) -> None:
        """Read a stream until it has delivered this many ids, in any number of chunks."""
        seen = b""
        while sum(ids.count(b",") + 1 for ids in re.findall(rb'"token_ids":\[([^\]]+)\]', seen)) < count:
            piece = self._socket.recv(1 << 16)
            assert piece, f"the stream ended: {seen!r}"
            seen += piece

    def leave(self, how: str) -> None:
        if how == "reset":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


@pytest.mark.parametrize("how", ["reset", "close"])
def test_client_disconnect_mid_stream(gateway: Gateway, upstream: Upstream, how: str) -> None:
    """Row 13: the engine's call is aborted, and its sampled ids are kept out of every trajectory."""
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(events=4, then="stall")]
    client = Leaver(gateway, {"messages": [*history, QUESTION], "stream": True})
    client.read_tokens(4)
    client.leave(how)
    assert upstream.left.acquire(timeout=PATIENCE), "the engine went on for nobody"
    orphan = wait_for_turns(gateway, 2)[1]
    assert (orphan.finish_reason, orphan.abort_cause, len(orphan.completion_ids)) == ("abort", "client_left", 4)
    assert goes_on(gateway, history).seq == 2


@pytest.mark.parametrize("how", ["reset", "close"])
def test_client_disconnect_while_waiting(gateway: Gateway, upstream: Upstream, how: str) -> None:
    """Row 14: without a retry in the grace period, the call is aborted and not recorded as received."""
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(events=0, then="stall")]
    client = Leaver(gateway, {"messages": [*history, QUESTION]})
    assert upstream.stalled.acquire(timeout=PATIENCE)
    client.leave(how)
    assert upstream.left.acquire(timeout=PATIENCE), "the engine went on for nobody"
    assert [turn.abort_cause for turn in wait_for_turns(gateway, 2)] == [None, "client_left"]
    assert goes_on(gateway, history).seq == 2


def test_reply_ready_after_a_client_disconnect(
    serve: Serve, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 14: sampled to the end after the client left, and not committed, because no client received it."""
    gateway = serve(limits=Limits(retry_grace=0.5))
    gate = threading.Event()
    upstream.plans = [Plan(gate=gate)]
    left = calls_of(monkeypatch, InFlightCall, "_leave")
    client = Leaver(gateway, {"messages": [QUESTION]})
    assert upstream.called.acquire(timeout=PATIENCE)
    client.leave("close")
    assert left.acquire(timeout=PATIENCE)
    gate.set()
    (orphan,) = wait_for_turns(gateway, 1)
    assert (orphan.finish_reason, orphan.abort_cause) == ("abort", "client_left")
    assert len(orphan.completion_ids) > 4
    gateway.ask()
    gateway.check()


def test_client_disconnect_while_its_turn_is_recorded(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 14: too late to abort. The next turn waits for the record, and a retry is answered with it."""
    gateway.ask(session="before")
    writing, gate = threading.Event(), threading.Event()
    write = gateway.store.write

    async def slow(*records: Any) -> None:
        writing.set()
        while not gate.is_set():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.005)
        await write(*records)

    monkeypatch.setattr(gateway.store, "write", slow)
    body = {"messages": [QUESTION], "stream": True}
    left = calls_of(monkeypatch, InFlightCall, "_leave")
    client = Leaver(gateway, body)
    client.read_tokens(4)
    assert writing.wait(PATIENCE)
    client.leave("close")
    assert left.acquire(timeout=PATIENCE)
    threading.Timer(0.2, gate.set).start()
    gateway.ask([{**QUESTION, "content": "another question"}])
    headers = {"x-stainless-retry-count": "1"}
    url = f"{gateway.url}/sessions/s/v1/chat/completions"
    again = httpx2.post(url, content=Leaver.encode(body), headers=headers)
    assert again.headers["x-tokentape-replayed"] == "true"
    assert again.text.endswith("data: [DONE]\n\n")
    assert len(upstream.bodies) == 3
    # The recorded turn was acknowledged, but this client has not noted it.
    gateway.check(unacknowledged=1)


@pytest.mark.parametrize("stream", [False, True])
def test_official_client_that_times_out_and_retries(
    serve: Serve, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Row 15: one generation serves the call and its retry; the agent's next turn continues it."""
    # The engine may take longer than the client waits.
    patient = Timeouts(PATIENCE, first_token=PATIENCE, between_tokens=PATIENCE, total=PATIENCE)
    gateway = serve(limits=Limits(retry_grace=PATIENCE), timeouts=patient)
    gate = threading.Event()
    upstream.plans = [Plan(gate=gate)]
    joined_by = calls_of(monkeypatch, InFlightCall, "follow")

    def open_gate_to_the_retry() -> None:
        assert joined_by.acquire(timeout=PATIENCE)
        assert joined_by.acquire(timeout=PATIENCE)
        gate.set()

    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_gate_to_the_retry)
        reply = say(gateway.client(max_retries=9, timeout=2.0), [QUESTION], stream=stream)
        gateway.received += joined(reply) if stream else Received.of(reply)
        opening.result()
    assert len(upstream.bodies) == 1
    assert [turn.finish_reason for turn in gateway.check()["s"].turns] == ["stop"]
    goes_on(gateway, [QUESTION, {"role": "assistant", "content": gateway.received[-1].content}])


def test_retry_after_a_lost_reply(gateway: Gateway, upstream: Upstream) -> None:
    """Row 15: the reply was recorded and never read; the retry is answered with it, before and after a restart."""
    body = {"messages": [QUESTION], "return_token_ids": True}
    url = "/sessions/s/v1/chat/completions"
    lost = httpx2.post(gateway.url + url, json=body).json()
    again = httpx2.post(gateway.url + url, json=body, headers={"x-stainless-retry-count": "1"}).json()
    gateway.stop()
    gateway.start()
    late = httpx2.post(gateway.url + url, json=body, headers={"x-stainless-retry-count": "2"}).json()
    assert lost == again == late
    assert len(upstream.bodies) == 1
    choice = late["choices"][0]
    gateway.received = [Received("s", 0, late["prompt_token_ids"], choice["token_ids"], choice["message"]["content"])]
    gateway.check()


def test_two_turns_at_once(gateway: Gateway, upstream: Upstream) -> None:
    """Row 16: eight at once, streamed and not. Each is recorded, as the first one or as its sibling."""
    history = [QUESTION, gateway.ask()]
    gate = threading.Event()
    upstream.plans = [Plan(gate=gate) for _ in range(8)]

    async def call_all() -> list[list[Received]]:
        base_url = f"{gateway.url}/sessions/s/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            async def call(number: int) -> list[Received]:
                stream = bool(number % 2)
                reply = await say(client, [*history, QUESTION], stream=stream)  # type: ignore[arg-type]
                return joined([chunk async for chunk in reply]) if stream else Received.of(reply)

            calls = [asyncio.create_task(call(number)) for number in range(8)]
            for _ in range(9):
                assert await asyncio.to_thread(upstream.called.acquire, timeout=PATIENCE)
            gate.set()
            return list(await asyncio.gather(*calls))

    replies = asyncio.run(call_all())
    gateway.received += [choice for reply in replies for choice in reply]
    assert sorted(choice.turn for choice in gateway.received) == list(range(9))
    turns = gateway.check()["s"].turns
    assert [turn.parent for turn in turns] == [None] + [0] * 8
    assert [turn.fork for turn in turns] == [None, None] + ["sibling"] * 7
    shown = httpx2.get(f"{gateway.url}/sessions/s").json()["leaves"]
    assert [leaf["verdict"] for leaf in shown] == ["exact"] + ["forked: sibling"] * 7


Edit = st.sampled_from(["go on", "roll back", "edit user", "edit assistant", "compact", "new system"])
SESSIONS = count()


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(Edit, st.integers(0, 9)), min_size=1, max_size=6))
def test_history_that_is_edited(gateway: Gateway, edits: list[tuple[str, int]]) -> None:
    """Row 17: any edit is served, starts a branch that names its cause, and leaves the old branches as they were."""
    session = f"edited-{next(SESSIONS)}"
    messages: list[Any] = [{"role": "system", "content": "You help."}]
    known: set[str] = set()
    digests: list[str] = []
    for number, (edit, where) in enumerate(edits):
        messages = [*edited(messages, edit, where, number), {"role": "user", "content": f"question {where % 3}"}]
        continues = any(json.dumps(messages[:end]) in known for end in range(1, len(messages)))
        messages = [*messages, gateway.ask(messages, session)]
        known.add(json.dumps(messages))
        *earlier, newest = gateway.check()[session].turns
        assert [turn.digest for turn in earlier] == digests, "an old branch was changed"
        digests.append(newest.digest)
        assert (newest.parent is not None) == continues
        siblings = [turn for turn in earlier if turn.parent == newest.parent]
        assert (newest.fork is not None) == bool(siblings), "a branch without a cause, or a cause without a branch"


def edited(messages: list[Any], edit: str, where: int, number: int) -> list[Any]:
    """A history of system message, questions and replies after an agent has changed it; it ends before a question."""
    turns = len(messages) // 2
    if not turns or edit == "go on":
        return messages
    at = where % turns
    match edit:
        case "roll back":
            return messages[: 1 + 2 * at]
        case "edit user":
            question = {"role": "user", "content": f"edited {number}"}
            return [*messages[: 1 + 2 * at], question, *messages[2 + 2 * at :]]
        case "edit assistant":
            reply = {"role": "assistant", "content": f"edited {number}"}
            return [*messages[: 2 + 2 * at], reply, *messages[3 + 2 * at :]]
        case "compact":
            return [messages[0], {"role": "user", "content": f"So far: {turns} questions."}, messages[-1]]
        case _:
            return [{"role": "system", "content": f"You help {number}."}, *messages[1:]]


@pytest.mark.parametrize("stream", [False, True])
def test_session_deleted_during_a_turn(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    """Row 18: the turn fails, and its commit does not bring the session back."""
    gateway.ask()
    gate = threading.Event()
    upstream.plans = [Plan(gate=gate)]
    upstream.called.acquire(timeout=PATIENCE)
    failed: list[openai.APIError] = []
    caller = threading.Thread(target=lambda: failed.append(gateway.refused([QUESTION], stream=stream)))
    caller.start()
    assert upstream.called.acquire(timeout=PATIENCE)
    assert httpx2.delete(f"{gateway.url}/sessions/s").status_code == 204
    gate.set()
    caller.join(PATIENCE)
    assert failed[0].code == "not_found"
    gateway.received.clear()
    assert gateway.check() == {}
    assert httpx2.get(f"{gateway.url}/sessions/s").status_code == 404
    # The id is free again; the new session has none of the old data.
    gateway.ask()
    assert [turn.seq for turn in gateway.check()["s"].turns] == [0]
