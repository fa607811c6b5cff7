"""Completions that a real server aborts, compared with uninterrupted completions.

Each call is aborted after a uniformly drawn number of tokens. Greedy completions must equal those of the undisturbed
server. At temperature 1, their lengths must have the distribution of undisturbed completions. The lengths of
completions that are discarded and drawn again must not: this shows that the test would notice.

`TOKENTAPE_RESUME_CALLS` is the number of calls, 200 if not set. Figures are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shlex
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from real import MODEL, Opening, load_forward, served
from starlette.types import ASGIApp
from tests.gateway.scripted import run_turn

from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._sglang import SglangEngine
from tokentape.engines._vllm import VllmEngine
from tokentape.errors import EngineAborted
from tokentape.gateway._app import create_app
from tokentape.gateway._completion_checks import check_stop_strings
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._limits import OnAbort
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds, Turn

VLLM = os.environ.get("TOKENTAPE_VLLM_BIN")
SGLANG = os.environ.get("TOKENTAPE_SGLANG_SERVER")
CALLS = int(os.environ.get("TOKENTAPE_RESUME_CALLS", "200"))
LONGEST = 200
TIE = 1e-4
"""A different order of additions may swap two ids with log-probabilities closer than this."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the demonstration model, built"),
]

VLLM_COMMAND = f"serve {MODEL} --dtype float32 --enforce-eager --max-model-len 1024 --host 127.0.0.1 --port"
SGLANG_OPTIONS = (
    f"--model-path {MODEL} --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 "
    "--context-length 1024 --max-total-tokens 8192 --max-running-requests 8 --mem-fraction-static 0.3 "
    "--disable-overlap-schedule --host 127.0.0.1 --port"
)


@dataclass
class Server:
    """A server under test."""

    url: str
    open: Callable[[], Awaitable[Any]]
    pauses: bool
    """Abort calls by pausing the server, one at a time; else by their ids, several at a time."""

    @property
    def at_once(self) -> int:
        return 1 if self.pauses else 8

    async def post(self, path: str) -> None:
        request = urllib.request.Request(self.url + path, data=b"{}", headers={"content-type": "application/json"})
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=120).close())


@pytest.fixture(scope="module", params=["vllm generate", "vllm completions, paused", "sglang"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, renderer: Renderer
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    vocab = renderer.tokenizer.vocab_size
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if request.param == "sglang":
        if SGLANG is None:
            pytest.skip("needs a command that starts an SGLang server: TOKENTAPE_SGLANG_SERVER")
        with served(lambda port: [*shlex.split(f"{SGLANG} {SGLANG_OPTIONS}"), str(port)], log, settings) as url:
            yield Server(url, lambda: SglangEngine.open(url, vocab_size=vocab), pauses=False)
        return
    if VLLM is None:
        pytest.skip("needs the vllm executable of an environment: TOKENTAPE_VLLM_BIN")
    more = ["--enable-scale-out"] if request.param == "vllm generate" else []
    settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with served(lambda port: [VLLM, *shlex.split(VLLM_COMMAND), str(port), *more], log, settings) as url:
        yield Server(url, lambda: VllmEngine.open(url, vocab_size=vocab), pauses=not more)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@dataclass
class Aborting:
    """An engine that aborts each call after `after` tokens, drawn for each call."""

    engine: Any
    server: Server
    after: Callable[[str], float] = lambda session: math.inf
    info: EngineInfo = field(init=False)
    aborts: int = 0
    aborting: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.info = self.engine.info

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        most, count = self.after(params.session_id or ""), 0
        aborting: asyncio.Task[None] | None = None
        async for delta in self.engine.sample(prompt_ids, params, stream=True, request_id=request_id):
            count += len(delta.token_ids)
            yield delta
            if count >= most and aborting is None and delta.finish_reason is None:
                aborting = asyncio.create_task(self._abort(request_id))
                self.aborting.add(aborting)
            self.aborts += delta.finish_reason == "abort"
        if aborting is not None:
            await aborting

    async def _abort(self, request_id: str) -> None:
        if self.server.pauses:
            await self.server.post("/pause?mode=abort&clear_cache=false")
            await self.server.post("/resume")
        else:
            self.engine.interrupt(request_id)

    async def check(self) -> None:
        await self.engine.check()

    async def close(self) -> None:
        # A reply that ended by itself may leave its task between pause and resume: the server would stay paused.
        await asyncio.gather(*self.aborting)
        await self.engine.close()


@dataclass(frozen=True)
class Asked:
    text: str
    sampling: SamplingParams


async def ask_all(turns: Turns, asked: Sequence[Asked], at_once: int, name: str) -> list[Turn]:
    """Return the turns that answer each of `asked`, in separate sessions. Aborted calls are repeated."""
    room = asyncio.Semaphore(at_once)

    async def take_turn(index: int) -> Turn:
        message = {"role": "user", "content": asked[index].text}
        for attempt in range(1000):
            session = f"{name}-{index}-{attempt}"
            request = TurnRequest(session, (message,), (), {}, asked[index].sampling, stream=True)
            try:
                async with room:
                    (turn,) = [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
                    return turn
            except EngineAborted:
                continue
        raise AssertionError("aborted again and again")

    return list(await asyncio.gather(*(take_turn(index) for index in range(len(asked)))))


def run(
    server: Server,
    renderer: Renderer,
    folder: Path,
    body: Callable[[Callable[..., Awaitable[list[Turn]]], Aborting], Awaitable[Any]],
) -> Any:
    """Return the result of `body`. It gets a function that calls a gateway over the server, and the engine."""

    async def main() -> Any:
        engine = Aborting(await server.open(), server)
        store = SqliteStore.open(folder)
        names = iter(range(100))

        async def ask(
            asked: Sequence[Asked], on_abort: OnAbort = "resume", at_once: int = server.at_once
        ) -> list[Turn]:
            return await ask_all(Turns(engine, renderer, store, on_abort=on_abort), asked, at_once, f"s{next(names)}")

        try:
            return await body(ask, engine)
        finally:
            await engine.close()
            store.close()

    return asyncio.run(main())


def questions(count: int, sampling: SamplingParams) -> list[Asked]:
    draw = random.Random(0)
    return [
        Asked(
            draw.choice(("add {} and {}", "hello {} there {}", "why {} is {}?")).format(
                draw.randrange(99), draw.randrange(99)
            ),
            sampling,
        )
        for _ in range(count)
    ]


def different(turn: Turn, whole: Turn, forward: Callable[[np.ndarray], np.ndarray]) -> str:
    """Return `same`, `tie` if the first difference is between equally likely ids, or `different`."""
    actual_ids, expected_ids = turn.completion_ids.tolist(), whole.completion_ids.tolist()
    if (actual_ids, turn.finish_reason, turn.stop) == (expected_ids, whole.finish_reason, whole.stop):
        return "same"
    at = next(
        (n for n, (actual, other) in enumerate(zip(actual_ids, expected_ids, strict=False)) if actual != other), None
    )
    if at is None:
        return "different"
    row = forward(np.concatenate([whole.added_ids, whole.completion_ids]))[len(whole.added_ids) + at - 1]
    return "tie" if abs(row[actual_ids[at]] - row[expected_ids[at]]) < TIE else "different"


def test_no_stop_of_a_real_server_is_refused(server: Server, renderer: Renderer) -> None:
    """At a high temperature, the model spells strings in unusual tokens and ends completions inside characters."""
    tokenizer, draw = renderer.tokenizer, random.Random(5)

    async def body() -> tuple[int, int]:
        engine = await server.open()
        texts, limit = ["the answer is", "a"], asyncio.Semaphore(8)

        async def call(index: int) -> bool:
            prompt = np.array([draw.randrange(tokenizer.vocab_size) for _ in range(12)], np.int32)
            text = draw.choice(texts)
            at = draw.randrange(len(text))
            stops = (text[at : at + draw.randrange(1, 6)], draw.choice([" ", "\n", "e", "the", ".", '"']))
            params = SamplingParams(
                60, temperature=draw.choice([1.0, 1.5]), stop_strings=stops, min_tokens=draw.choice([0, 0, 5, 20])
            )
            async with limit:
                deltas = [
                    delta async for delta in engine.sample(prompt, params, stream=False, request_id=f"stops-{index}")
                ]
            ids = [token_id for delta in deltas for token_id in delta.token_ids]
            texts.append(tokenizer.decode(ids) or "a")
            stop, late = deltas[-1].stop, engine.info.late_stops
            check_stop_strings(tokenizer, ids, stop, stops, params.min_tokens, late)
            return stop is not None

        try:
            return CALLS, sum(await asyncio.gather(*map(call, range(CALLS))))
        finally:
            await engine.close()

    calls, stopped = asyncio.run(body())
    print(f"\n{calls} calls, {stopped} ended at a stop string")
    assert calls / 4 < stopped < calls


def test_greedy_completions_equal_the_uninterrupted_ones(server: Server, renderer: Renderer, tmp_path: Path) -> None:
    forward = load_forward()
    asked = questions(CALLS, SamplingParams(max_tokens=LONGEST, temperature=0))
    draw = random.Random(1)

    async def body(ask: Callable[..., Awaitable[list[Turn]]], engine: Aborting) -> list[tuple[Turn, Turn]]:
        plain = await ask(asked, at_once=8)
        # A third with a stop string from the expected text, a third with fewer tokens.
        for index, turn in enumerate(plain):
            text, sampling = renderer.tokenizer.decode(turn.completion_ids), asked[index].sampling
            if index % 3 == 1:
                at = draw.randrange(len(text) // 3, len(text) - 5)
                sampling = replace(sampling, stop_strings=(text[at : at + 5],), min_tokens=draw.randrange(5))
            elif index % 3 == 2:
                sampling = replace(sampling, max_tokens=draw.randrange(2, len(turn.completion_ids)))
            asked[index] = replace(asked[index], sampling=sampling)
        plain = await ask(asked, at_once=8)
        lengths = [len(turn.completion_ids) for turn in plain]
        seen: set[str] = set()

        def after(session: str) -> float:
            # Only its first call, so that the position of the abort in the reply is known.
            if session in seen:
                return math.inf
            seen.add(session)
            return draw.randrange(lengths[int(session.split("-")[1])])

        engine.after = after
        return list(zip(await ask(asked), plain, strict=True))

    pairs = run(server, renderer, tmp_path, body)
    verdicts = [different(turn, whole, forward) for turn, whole in pairs]
    seams = [turn.resumes[0].start / len(turn.completion_ids) for turn, _ in pairs if turn.resumes]
    worst = 0.0
    for turn, _ in pairs:
        start = len(turn.added_ids)
        rows = forward(np.concatenate([turn.added_ids, turn.completion_ids]))[start - 1 : -1]
        scored = rows[np.arange(len(turn.completion_ids)), turn.completion_ids]
        if turn.engine.split()[2] == "raw_logprobs":
            worst = max(worst, float(np.abs(scored - turn.logprobs).max()))
    print(
        f"\n{pairs[0][0].engine}: {len(pairs)} calls, {len(seams)} resumed, at the quartiles "
        f"{np.quantile(seams, [0.25, 0.5, 0.75]).round(2)} of the reply; same {verdicts.count('same')}, "
        f"ties {verdicts.count('tie')}, different {verdicts.count('different')}; logprob error {worst:.1e}"
    )
    assert "different" not in verdicts
    assert verdicts.count("tie") <= len(pairs) // 20
    assert len(seams) > len(pairs) // 3
    assert worst < 1e-4


def distance(values: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """Return Kolmogorov and Smirnov's D of two samples, and the probability of a larger D under equal distributions."""
    points = np.unique([*values, *other])
    below = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (values, other)]
    d = float(np.abs(below[0] - below[1]).max())
    size = math.sqrt(len(values) * len(other) / (len(values) + len(other)))
    t = (size + 0.12 + 0.11 / size) * d
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101))
    return d, min(max(tail, 0.0), 1.0)


def test_lengths_follow_the_uninterrupted_distribution_unlike_resampled_ones(
    server: Server, renderer: Renderer, tmp_path: Path
) -> None:
    sampling = SamplingParams(max_tokens=LONGEST, temperature=1)
    draw = random.Random(2)

    async def body(ask: Callable[..., Awaitable[list[Turn]]], engine: Aborting) -> list[list[int]]:
        plain = await ask(questions(2 * CALLS, sampling), at_once=8)
        engine.after = lambda session: draw.randrange(80)
        # Several at once, also where a pause interrupts all of them: it takes effect many tokens after it is requested,
        # when the call for which it was requested may have ended.
        resumed = await ask(questions(CALLS, sampling), at_once=8)
        resampled = await ask(questions(CALLS, sampling), "resample", at_once=8)
        assert not any(turn.sampling.get("aborted") for turn in resumed)
        assert sum(len(turn.resumes) for turn in resumed) > CALLS // 4
        return [[len(turn.completion_ids) for turn in turns] for turns in (plain, resumed, resampled)]

    plain, resumed, resampled = run(server, renderer, tmp_path, body)
    (same, p_same), (other, p_other) = distance(plain, resumed), distance(plain, resampled)
    print(
        f"\nlengths: undisturbed {np.mean(plain):.1f} ({len(plain)} calls); resumed {np.mean(resumed):.1f}, "
        f"D {same:.3f}, p {p_same:.3f}; resampled {np.mean(resampled):.1f}, D {other:.3f}, p {p_other:.1e}"
    )
    assert p_same > 0.001
    assert p_other < 0.001


def test_stream_continues_across_pauses_of_the_server(server: Server, renderer: Renderer, tmp_path: Path) -> None:
    if not server.pauses:
        pytest.skip("needs a server that is paused")
    with ExitStack() as opened:
        store = SqliteStore.open(tmp_path)

        async def opening() -> ASGIApp:
            return create_app(Turns(await server.open(), renderer, store), model_id="m")

        url = opened.enter_context(running(Opening(opening)))

        async def talk(name: str, pauses: int) -> str:
            text = ""
            async with AsyncOpenAI(base_url=f"{url}/sessions/{name}/v1", api_key="none", max_retries=0) as client:
                # A long reply, so that it has not ended when the server pauses.
                stream = await client.chat.completions.create(
                    model="m",
                    temperature=0,
                    stream=True,
                    messages=[{"role": "user", "content": "add 31 and 7"}],
                    max_tokens=400,
                    extra_body={"min_tokens": 300},
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if pauses:
                        pauses -= 1
                        await server.post("/pause?mode=abort")
                        await server.post("/resume")
            return text

        expected = asyncio.run(talk("whole", 0))
        assert asyncio.run(talk("cut", 3)) == expected
        whole, cut = (store.load_session(name).turns[0] for name in ("whole", "cut"))
        assert cut.completion_ids.tolist() == whole.completion_ids.tolist()
        assert cut.resumes
