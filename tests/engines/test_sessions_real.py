"""Whole sessions through the gateway on real servers of inference engines, compared with the servers' logs.

The servers log every request and its ids without Tokentape. Log-probabilities are compared with the model's forward
pass. The tests of an engine share its server and run in the order of this file: the last one kills it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import AsyncOpenAI
from real import MODEL, Opening, free_port, load_forward, served
from starlette.types import ASGIApp

from tokentape._session.invariants import check_turn
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.demo.agent import solve
from tokentape.demo.tasks import is_solved, sample_tasks
from tokentape.engines._base import ChatServer, Engine, Timeouts
from tokentape.engines._kinds import open_engine
from tokentape.engines._pool import EnginePool
from tokentape.engines._vllm_chat import VllmChatServer
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession, verify

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
SGLANG = os.environ.get("TOKENTAPE_SGLANG_SERVER")
CONTEXT = 2048
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32, between the engines' kernels and the plain forward pass."""

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and completion of a call."""


@dataclass
class Kind:
    """The command of an engine's server and its supported features."""

    name: str
    command: str
    settings: dict[str, str]
    sessions: int
    at_once: int
    seeded: bool
    """Calls may have a seed."""
    finished_in_log: Callable[[str], list[Pair]]
    """Reads prompt and completion of calls from the server's log."""
    prompts_in_log: Callable[[str], list[tuple[int, ...]]]


def ids(text: str) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in text.split(",") if token_id.strip())


VLLM_PROMPT = re.compile(r"Request (\S+) details: prompt: .*?, prompt_token_ids: \[([0-9, ]*)\], prompt_embeds")
VLLM_OUTPUT = re.compile(r"Generated response (\S+) details: output_token_ids: \[([0-9, ]*)\]")


def vllm_prompts(log: str) -> list[tuple[int, ...]]:
    return [ids(prompt) for _, prompt in VLLM_PROMPT.findall(log)]


def vllm_finished(log: str) -> list[Pair]:
    """Only for calls without streaming: no other completions are logged."""
    prompts = dict(VLLM_PROMPT.findall(log))
    return [(ids(prompts[name]), ids(output)) for name, output in VLLM_OUTPUT.findall(log)]


def sglang_finished(log: str) -> list[Pair]:
    calls = []
    for line in log.splitlines():
        if '"request.finished"' in line:
            entry = json.loads(line[line.index("{") :])
            if entry["obj"]["input_ids"] is None:
                continue  # The server's health check.
            calls.append((tuple(entry["obj"]["input_ids"]), tuple(entry["out"]["output_ids"])))
    return calls


KINDS = {
    "vllm": Kind(
        name="vllm",
        command=f"{VLLM} serve {MODEL} --served-model-name demo --dtype float32 --enforce-eager --enable-scale-out "
        f"--max-model-len {CONTEXT} --enable-log-requests --enable-log-outputs --enable-auto-tool-choice "
        "--tool-call-parser hermes --reasoning-parser qwen3 --host 127.0.0.1 --port",
        settings={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_LOGGING_LEVEL": "DEBUG",
        },
        sessions=100,
        at_once=16,
        seeded=True,
        finished_in_log=vllm_finished,
        prompts_in_log=vllm_prompts,
    ),
    "sglang": Kind(
        name="sglang",
        command=f"{SGLANG} --model-path {MODEL} --served-model-name demo --device cpu --attention-backend torch_native "
        f"--sampling-backend pytorch --dtype float32 --context-length {CONTEXT} --max-total-tokens 16384 "
        "--max-running-requests 8 --mem-fraction-static 0.3 --disable-overlap-schedule --log-requests "
        "--log-requests-level 3 --log-requests-format json --host 127.0.0.1 --port",
        settings={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        sessions=100,
        at_once=8,
        seeded=False,
        finished_in_log=sglang_finished,
        prompts_in_log=lambda log: [prompt for prompt, _ in sglang_finished(log)],
    ),
}


@dataclass
class Server:
    """A server that can be killed and started again at the same address."""

    kind: Kind
    log: Path
    port: int = field(default_factory=free_port)
    url: str = ""
    _running: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        def command(port: int) -> list[str]:
            return [*shlex.split(self.kind.command), str(port)]

        self.url = self._running.enter_context(served(command, self.log, self.kind.settings, port=self.port))

    def stop(self) -> None:
        self._running.close()

    def post(self, path: str, body: dict[str, Any]) -> None:
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60):
            pass

    def name_weights(self, version: str) -> None:
        body: dict[str, Any] = {"new_version": version}
        if self.kind.name == "sglang":
            body["abort_all_requests"] = False
        self.post("/update_weight_version", body)

    def busy(self) -> bool:
        """Return whether it is sampling."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            match = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
        assert match is not None
        return float(match[1]) > 0

    def text(self) -> str:
        return self.log.read_text(errors="replace")


pytestmark = pytest.mark.engines


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm", marks=pytest.mark.skipif(VLLM is None, reason="needs vllm: TOKENTAPE_VLLM_BIN")),
        pytest.param(
            "sglang",
            marks=pytest.mark.skipif(SGLANG is None, reason="needs a command that starts one: TOKENTAPE_SGLANG_SERVER"),
        ),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running_server = Server(KINDS[request.param], tmp_path_factory.mktemp("server") / "log")
    running_server.start()
    try:
        yield running_server
    finally:
        running_server.stop()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@pytest.fixture(scope="module")
def forward() -> Callable[[np.ndarray], np.ndarray]:
    return load_forward()


def gateway(server: Server, renderer: Renderer, data: Path, *, pool: bool = False, capture: bool = False) -> Opening:
    """Run a gateway over the server that records to `data`."""
    vocab_size = renderer.tokenizer.vocab_size

    async def opening() -> ASGIApp:
        chat: ChatServer | None = None
        opener = partial(open_engine, server.kind.name, server.url, vocab_size=vocab_size, timeouts=Timeouts(connect=5))
        engine: Engine
        if capture:
            engine = chat = await VllmChatServer.open(server.url, vocab_size=vocab_size)
        elif pool:
            engine = await EnginePool.open({"only": opener}, recheck_seconds=0.5)
        else:
            engine = await opener()
        limits = Limits(retry_grace=0.0, pause_patience=60.0)
        turns = Turns(engine, renderer, SqliteStore.open(data), limits=limits, capture=chat)
        return create_app(turns, model_id="demo")

    return Opening(opening)


class Seedless:
    """An OpenAI client without the seed, for engines that support none."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self.chat = self
        self.completions = self

    async def create(self, *, seed: int, **request: Any) -> Any:
        return await self._client.chat.completions.create(**request)


async def run_agents(base_url: str, kind: Kind) -> int:
    """Run the engine's number of sessions, half of them greedily, half streamed. Return the number of solved tasks."""
    tasks = [task for task in sample_tasks(0, 4 * kind.sessions, "heldout") if len(task.questions) > 1]
    assert len(tasks) >= kind.sessions
    at_once = asyncio.Semaphore(kind.at_once)

    async def run(number: int) -> bool:
        task = tasks[number]
        async with (
            at_once,
            AsyncOpenAI(base_url=f"{base_url}/sessions/{number:03}/v1", api_key="none", timeout=300) as client,
        ):
            talk = await solve(
                client if kind.seeded else Seedless(client),  # type: ignore[arg-type]
                task,
                temperature=0.0 if 2 * number < kind.sessions else 1.0,
                seed=1000 * number,
                stream=number % 2 == 1,
            )
        return is_solved(task, talk.final_text)

    return sum(await asyncio.gather(*(run(number) for number in range(kind.sessions))))


def recorded(data: Path) -> list[StoredSession]:
    with SqliteStore.open(data, read_only=True) as store:
        return list(store.iter_sessions())


def largest_difference(sessions: list[StoredSession], forward: Callable[[np.ndarray], np.ndarray]) -> float:
    """Return the largest difference of a recorded log-probability from the model's."""
    largest = 0.0
    for session in sessions:
        for trajectory in session.trajectories():
            expected = forward(trajectory.token_ids)
            at = np.flatnonzero(trajectory.loss_mask)
            own = expected[at - 1, trajectory.token_ids[at]]
            largest = max(largest, float(np.abs(own - trajectory.logprobs[at]).max(initial=0.0)))
    return largest


def test_calls_of_many_tool_sessions_match_the_engine_s_log(
    server: Server, renderer: Renderer, tmp_path: Path, forward: Callable[[np.ndarray], np.ndarray]
) -> None:
    kind, before = server.kind, len(server.text())
    started = time.monotonic()
    with running(gateway(server, renderer, tmp_path)) as base_url:
        solved = asyncio.run(run_agents(base_url, kind))
    seconds = time.monotonic() - started
    sessions = recorded(tmp_path)
    assert len(sessions) == kind.sessions
    calls: list[Pair] = []
    whole: list[Pair] = []
    for number, session in enumerate(sessions):
        tree = session.tree()
        for turn in session.turns:
            prompt = tree.context_before(turn.seq)
            context = prompt[: len(prompt) - len(turn.added_ids)]
            if turn.parent is not None:
                np.testing.assert_array_equal(context, tree.context_after(turn.parent))
            check_turn(turn, context, prompt)
            call = tuple(prompt.tolist()), tuple(turn.completion_ids.tolist())
            calls.append(call)
            if int(session.info.session_id) % 2 == 0:
                whole.append(call)
        # Greedy sessions have a reservation: `other logprobs`.
        assert {trajectory.verdict.partition(",")[0] for trajectory in session.trajectories()} <= {"exact", "closed"}, (
            number
        )
    log = server.text()[before:]
    prompts = Counter(kind.prompts_in_log(log))
    assert not Counter(prompt for prompt, _ in calls) - prompts
    finished = Counter(kind.finished_in_log(log))
    streams_logged = kind.name == "sglang"
    assert not Counter(calls if streams_logged else whole) - finished
    difference = largest_difference(sessions, forward)
    assert difference < TOLERANCE
    assert not verify(tmp_path).findings
    tokens = sum(len(completion) for _, completion in calls)
    print(
        f"\n{kind.name}: {len(sessions)} sessions, {len(calls)} turns, {tokens} sampled tokens, {solved} solved, "
        f"{len(calls if streams_logged else whole)} completions in the server's log, largest difference of a "
        f"log-probability {difference:.1e}, {seconds:.0f} s"
    )


def test_abandoned_call_is_aborted_in_the_engine_and_recorded_as_aborted(
    server: Server, renderer: Renderer, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    if server.kind.name == "sglang":
        # Without stop ids, the model's EOS does not end it.
        body["stop_token_ids"] = []
    with running(gateway(server, renderer, tmp_path)) as base_url:
        with httpx2.stream("POST", f"{base_url}/sessions/left/v1/completions", json=body, timeout=60) as reply:
            for _ in zip(range(5), reply.iter_lines(), strict=False):
                pass
        left = time.monotonic()
        with httpx2.Client(base_url=base_url, timeout=60) as http:
            while http.get("/engine").json()["calls_under_way"]:
                time.sleep(0.01)
        if server.kind.name == "vllm":
            while server.busy():
                time.sleep(0.02)
        seconds = time.monotonic() - left
    (session,) = recorded(tmp_path)
    (turn,) = session.turns
    assert (turn.finish_reason, turn.abort_cause) == ("abort", "client_left")
    assert 0 < len(turn.completion_ids) < 1500
    assert session.trajectories() == []
    print(f"\n{server.kind.name}: idle {seconds:.2f} s after leaving, {len(turn.completion_ids)} tokens kept")


def chat(base_url: str, session_id: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "max_tokens": 60, "temperature": 0}
    reply = httpx2.post(f"{base_url}/sessions/{session_id}/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
FOLLOWING = {"role": "user", "content": "And plus 7?"}


def test_paused_gateway_holds_calls_and_continues_with_new_weights(
    server: Server, renderer: Renderer, tmp_path: Path
) -> None:
    with running(gateway(server, renderer, tmp_path)) as base_url, httpx2.Client(base_url=base_url, timeout=60) as http:
        http.post("/engine/resume", json={"weight_version": "before"})
        first = chat(base_url, "paused", [QUESTION])
        assert http.post("/engine/pause", json={"timeout": 30}).json()["idle"] is True
        logged = len(server.kind.prompts_in_log(server.text()))
        replies: list[dict[str, Any]] = []
        history = [QUESTION, first, FOLLOWING]
        asking = threading.Thread(target=lambda: replies.append(chat(base_url, "paused", history)))
        asking.start()
        time.sleep(1.5)
        assert not replies
        assert len(server.kind.prompts_in_log(server.text())) == logged
        http.post("/engine/resume", json={"weight_version": "after"})
        asking.join()
        assert replies
    (session,) = recorded(tmp_path)
    assert [turn.parent for turn in session.turns] == [None, 0]
    if server.kind.name == "vllm":
        # The server has no name for the weights, so the gateway's names count.
        assert [turn.weight_version for turn in session.turns] == ["before", "after"]


def test_weight_names_within_a_turn_change_at_the_right_token(
    server: Server, renderer: Renderer, tmp_path: Path
) -> None:
    """The change lies between the tokens received at the renaming and those received shortly after."""
    most = 900 if server.kind.name == "vllm" else 400
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": most, "ignore_eos": True, "stream": True}
    body |= {"temperature": 1.0, "return_token_ids": True}
    server.name_weights("old")
    came, asked_at, answered, renamed_at = 0, 0, 0, 0.0
    renaming: threading.Thread | None = None
    with (
        running(gateway(server, renderer, tmp_path)) as base_url,
        httpx2.stream("POST", f"{base_url}/sessions/w/v1/completions", json=body, timeout=120) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                came += len(choice.get("token_ids") or ())
            if came >= most // 3 and renaming is None:
                asked_at = came
                renaming = threading.Thread(target=server.name_weights, args=["new"])
                renaming.start()
            if renaming is not None and not renaming.is_alive():
                renamed_at = renamed_at or time.monotonic()
                # Tokens sampled by then have arrived a second later.
                if not answered and time.monotonic() > renamed_at + 1:
                    answered = came
    assert renaming is not None
    renaming.join()
    answered = answered or came
    (session,) = recorded(tmp_path)
    (turn,) = session.turns
    assert turn.weight_version == "old"
    ((at, version),) = turn.weight_changes
    assert version == "new"
    print(f"\n{server.kind.name}: renamed between tokens {asked_at} and {answered}, recorded at {at}")
    assert asked_at <= at <= answered
    assert turn.completion_ids.size == most


def test_a_server_that_renders_is_captured_with_its_own_prompts(
    server: Server, renderer: Renderer, tmp_path: Path, forward: Callable[[np.ndarray], np.ndarray]
) -> None:
    if server.kind.name != "vllm":
        pytest.skip("needs ids in the streams of chats, which this server lacks")
    before = len(server.text())
    with running(gateway(server, renderer, tmp_path, capture=True)) as base_url:
        solved = asyncio.run(run_agents(base_url, server.kind))
    sessions = recorded(tmp_path)
    prompts = Counter(server.kind.prompts_in_log(server.text()[before:]))
    verdicts: Counter[str] = Counter()
    drifts: list[int] = []
    calls = 0
    for session in sessions:
        tree = Session(session.info, session.turns)
        verdicts.update(trajectory.verdict for trajectory in session.trajectories())
        for turn in session.turns:
            calls += 1
            sent = tree.context_before(turn.seq)
            assert prompts[tuple(sent.tolist())]
            if turn.fork == "drift":
                broken = turn.sampling["drift"]
                assert isinstance(broken, dict)
                context = tree.context_after(broken["turn"])
                at = broken["token"]
                drifts.append(at)
                np.testing.assert_array_equal(sent[:at], context[:at])
                assert at == len(sent) or sent[at] != context[at]
    assert {verdict.partition(",")[0] for verdict in verdicts} <= {"captured", "captured with drift"}
    assert not verify(tmp_path).findings
    difference = largest_difference(sessions, forward)
    assert difference < TOLERANCE
    print(
        f"\ncaptured: {len(sessions)} sessions, {calls} turns, {solved} solved, {len(drifts)} drifted, "
        f"verdicts {dict(verdicts)}, largest difference of a log-probability {difference:.1e}"
    )


def test_session_continues_with_the_same_prefix_after_an_engine_restart(
    server: Server, renderer: Renderer, tmp_path: Path
) -> None:
    with running(gateway(server, renderer, tmp_path, pool=True)) as base_url:
        first = chat(base_url, "s", [QUESTION])
        server.stop()
        body = {"model": "m", "messages": [QUESTION, first, FOLLOWING], "max_tokens": 5}
        refused = httpx2.post(f"{base_url}/sessions/s/v1/chat/completions", json=body, timeout=60)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        server.start()
        deadline = time.monotonic() + 30
        while httpx2.get(f"{base_url}/readyz", timeout=30).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        before = len(server.text())
        chat(base_url, "s", [QUESTION, first, FOLLOWING])
    (session,) = recorded(tmp_path)
    assert [(turn.parent, turn.fork) for turn in session.turns] == [(None, None), (0, None)]
    tree = session.tree()
    sent = tuple(tree.context_before(1).tolist())
    assert sent[: len(tree.context_after(0))] == tuple(tree.context_after(0).tolist())
    assert sent in server.kind.prompts_in_log(server.text()[before:])
