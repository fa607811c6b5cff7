"""For tests of adapters: a trainer's engine that keeps a ledger of its calls, an agent, and a ledger's golden sessions.

The conformance kit compares the samples of adapters with the calls that the engine noted in the ledger.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
from aiohttp import web

from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.engines import FunctionEngine, SampleDelta, SamplingParams
from tokentape.gateway import serving
from tokentape.testing._planted import ERRORS
from tokentape.testing._rows import Row, findings, place
from tokentape.testing.golden import Golden, GoldenSession, GoldenTurn, Token
from tokentape.types import FinishReason


@dataclass(frozen=True)
class Call:
    """A completion, as the engine sampled it."""

    session: str
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    version: str
    earlier: tuple[str, ...] = ()
    """Versions of its first tokens, if it was aborted, and resumed with other weights."""


@dataclass
class Ledger:
    """A trainer's engine: samples a different sentence for each call, and records it."""

    renderer: Renderer = field(default_factory=lambda: Renderer.load(MODEL))
    version: int = 7
    text: str | None = None
    """Replaces its sentences."""
    calls: list[Call] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of requests over HTTP."""
    aborts: bool = False
    """Whether weights change within a call. The call is then aborted, and the gateway resumes it."""

    def sample(self, prompt: Sequence[int], max_tokens: int, session: str) -> Call:
        if self.calls and self.calls[-1].finish == "abort":
            return self._resumed(prompt, max_tokens, session)
        call = self._noted(prompt, max_tokens, session)
        if self.changes_weights(prompt):
            self.version += 1
            if self.aborts:
                part = {"ids": call.ids[:2], "logprobs": call.logprobs[:2]}
                call = self.calls[-1] = replace(call, **part, finish="abort")
        return call

    def changes_weights(self, prompt: Sequence[int]) -> bool:
        """Return whether the weights change at the end of this call of the two-version task."""
        text = self.renderer.tokenizer.decode(prompt)
        return "Task 4." in text and "And?" not in text and ("Go on." in text) == self.aborts

    def _noted(self, prompt: Sequence[int], max_tokens: int, session: str) -> Call:
        number = len(self.calls)
        text = self.text or f"Reply {number} of {'many ' * (number % 4)}words."
        ids = self.renderer.tokenizer.encode_plain(text + "<|im_end|>")
        finish: FinishReason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        # With no short decimal form, and exact in float32.
        logprobs = [float(np.float32(-0.3 - np.sin(17.0 * number + 3.1 * at) ** 2)) for at in range(len(ids))]
        call = Call(session, list(prompt), ids, logprobs, finish, str(self.version))
        self.calls.append(call)
        return call

    def _resumed(self, prompt: Sequence[int], max_tokens: int, session: str) -> Call:
        """Sample the rest of an aborted call. The ledger has it as a single call."""
        before = self.calls.pop()
        assert (session, list(prompt)) == (before.session, before.prompt + before.ids)
        done = len(before.ids)
        whole = self._noted(before.prompt, max_tokens + done, session)
        self.calls[-1] = replace(whole, earlier=(before.version,) * done)
        return replace(whole, prompt=list(prompt), ids=whole.ids[done:], logprobs=whole.logprobs[done:])

    def task_of(self, prompt: Sequence[int]) -> str:
        """Return the task's number in a prompt, for engines that get no session id."""
        match = re.search(r"Task (\d+)", self.renderer.tokenizer.decode(prompt))
        assert match is not None
        return match[1]


LEDGER: list[Ledger] = []
"""The last one is under test."""

KINDS = ("exact", "forked", "truncated at the end", "truncated inside", "two versions")
REWARDS = (1.0, 0.0, 0.375, 0.75, 0.5)


async def agent(base_url: str, api_key: str, task: Any, replies: list[dict[str, Any]] | None = None) -> float | None:
    """Run a session of the kind that the task's number names, and return the reward of that number.

    `replies` collects the responses, with token ids and log-probabilities. From number 5 on, the agent raises after a
    turn, makes no call, returns no reward, or never ends.
    """
    number = int(task["number"])
    client_of = CLIENTS.get(number) if replies is None else None

    async with httpx2.AsyncClient(timeout=PATIENCE, headers={"authorization": f"Bearer {api_key}"}) as client:

        async def ask(messages: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
            body = {"model": "any", "messages": messages, "max_tokens": 60, **more}
            if client_of is not None:
                content = await client_of(base_url, api_key, body)
                return [*messages, {"role": "assistant", "content": content}]
            if replies is not None:
                body |= {"return_token_ids": True, "logprobs": True}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            whole = answer.raise_for_status().json()
            reply = whole["choices"][0]["message"]
            if replies is not None:
                replies.append(whole)
            return [*messages, {"role": "assistant", "content": reply["content"]}]

        def user_message(text: str) -> dict[str, Any]:
            return {"role": "user", "content": text}

        if number == 6:
            return 0.25
        first = await ask([user_message(f"Task {number}.")], **({"max_tokens": 3} if number == 3 else {}))
        if number == 5:
            raise RuntimeError("the agent failed")
        if number == 7:
            return None
        if number == 8:
            await asyncio.Event().wait()
        second = await ask([*first, user_message("Go on.")])
        if number == 1:
            await ask([*first, user_message("Another way.")])
        await ask([*second, user_message("And?")], **({"max_tokens": 2} if number == 2 else {}))
    return REWARDS[number]


async def with_openai(base_url: str, api_key: str, body: dict[str, Any]) -> str:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return str((await client.chat.completions.create(**body)).choices[0].message.content)


async def with_anthropic(base_url: str, api_key: str, body: dict[str, Any]) -> str:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        return "".join(block.text for block in (await client.messages.create(**body)).content)


_CHILD = """import json, sys, urllib.request
asked = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"content-type": "application/json"})
sys.stdout.write(json.dumps(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]))
"""


async def in_a_child_process(base_url: str, api_key: str, body: dict[str, Any]) -> str:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", _CHILD, f"{base_url}/chat/completions"]
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    written, _ = await child.communicate(json.dumps(body).encode())
    assert child.returncode == 0
    return str(json.loads(written))


CLIENTS: dict[int, Callable[[str, str, dict[str, Any]], Awaitable[str]]] = {}
"""By task number, the client that `agent` uses instead of its own."""

THREE = {1: with_openai, 2: with_anthropic, 3: in_a_child_process}


@dataclass(frozen=True, slots=True)
class NotedToken(Token):
    """A token of the ledger."""

    recorded_logprob: float = 0.0

    def logprob(self, temperature: float | None = None) -> float:
        return self.recorded_logprob * self.temperature / (temperature or self.temperature)


def golden_of(calls: Sequence[Call], rewards: dict[str, float], temperature: float = 1.0) -> Golden:
    """Build the sessions of a ledger from the prompts that continue earlier calls. `rewards` are by session."""
    sessions = []
    for name, reward in rewards.items():
        turns: list[GoldenTurn] = []
        whole: list[list[int]] = []
        for call in (candidate for candidate in calls if candidate.session == name):
            before = [n for n, ids in enumerate(whole) if call.prompt[: len(ids)] == ids]
            parent = max(before, key=lambda n: len(whole[n])) if before else None
            added = call.prompt[0 if parent is None else len(whole[parent]) :]
            versions = [*call.earlier, *[call.version] * (len(call.ids) - len(call.earlier))]
            sampled = [
                NotedToken(name, len(turns), n, token_id, version, temperature, logprob)
                for n, (token_id, version, logprob) in enumerate(zip(call.ids, versions, call.logprobs, strict=True))
            ]
            turns.append(GoldenTurn(parent, tuple(added), tuple(sampled), call.finish))
            whole.append([*call.prompt, *call.ids])
        sessions.append(GoldenSession(name, "g", reward, tuple(turns), None))
    return Golden("live", tuple(sessions))


class SkyRlClient:
    """`RemoteInferenceClient.generate` of skyrl/backends/skyrl_train/inference_servers, and its `weight_version`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.asked: list[dict[str, Any]] = []

    @property
    def weight_version(self) -> int:
        return self.ledger.version

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.asked.append(batch["sampling_params"])
        (prompt,), (session,) = batch["prompt_token_ids"], batch["session_ids"]
        call = self.ledger.sample(prompt, batch["sampling_params"]["max_tokens"], session)
        return {"response_ids": [call.ids], "response_logprobs": [call.logprobs], "stop_reasons": [call.finish]}


class TinkerClient:
    """`SamplingClient.sample` as tinker-cookbook 0.6.1 calls it.

    It gets no session id, so the task's number in the prompt names the session.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        ids = prompt.to_ints()
        call = self.ledger.sample(ids, sampling_params.max_tokens, self.ledger.task_of(ids))
        about = {"stop_reason": call.finish, "sequence_id": None}
        sequence = SimpleNamespace(tokens=call.ids, logprobs=call.logprobs, **about)
        return SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0)


def sequential_agent() -> Any:
    """Return an agent that runs one at a time, for trainers that run several: a session changes the weights of all."""
    lock = asyncio.Lock()

    async def locked(base_url: str, api_key: str, task: Any) -> float | None:
        async with lock:
            return await agent(base_url, api_key, task["env_extras"])

    return locked


def skyrl_rows(output: dict[str, Any], ledger: Ledger) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of a `GeneratorOutput`, and the rewards by the session of each row's first tokens."""
    rows, rewards = [], {}
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons")
    for prompt, response, mask, logprobs, reward, reason in zip(*(output[name] for name in columns), strict=True):
        if not any(mask):
            continue
        before = [0] * len(prompt)
        row = Row([*prompt, *response], [*before, *mask], [*before, *logprobs], reward=reward)
        rows.append(replace(row, truncated=reason == "length"))
        first = next(
            call for call in ledger.calls if row.token_ids[: len(call.prompt + call.ids)] == call.prompt + call.ids
        )
        rewards[first.session] = reward
    return rows, rewards


def findings_of(golden: Golden, rows: Sequence[Row]) -> set[str]:
    return {finding.kind for finding in findings(golden, rows)}


def checked(golden: Golden, rows: Sequence[Row]) -> tuple[set[str], int, set[str]]:
    """Return the findings in the rows, the number of planted errors that were noticed, and the names of the others.

    Planted errors without effect count as neither.
    """
    kinds = findings_of(golden, rows)
    placed, _ = place(golden, rows)
    trained = [row for row in placed if row.trained]
    noticed, unnoticed = 0, set()
    for error in ERRORS:
        wrong = error.plant(golden, trained)
        changed = any(
            repr(_plain(changed_row)) != repr(_plain(other.row))
            for changed_row, other in zip(wrong, trained, strict=True)
        )
        if changed and error.kind not in findings_of(golden, wrong):
            unnoticed.add(error.name)
        elif changed:
            noticed += 1
    return kinds, noticed, unnoticed


def _plain(row: Row) -> Any:
    return replace(
        row, **{name: np.asarray(getattr(row, name)).tolist() for name in ("token_ids", "weights", "logprobs")}
    )


@contextmanager
def ledger_gateway() -> Iterator[str]:
    """Run a gateway over the ledger's engine and yield its URL."""
    ledger = LEDGER[-1]

    async def sample(prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        call = ledger.sample(prompt_ids, params.max_tokens, ledger.task_of(prompt_ids))
        return SampleDelta(tuple(call.ids), tuple(call.logprobs), call.finish, weight_version=call.version)

    names = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids"})
    about: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "sampling": names}
    with serving(FunctionEngine(sample, vocab_size=4000, max_context=500, **about), MODEL) as url:
        yield url


@asynccontextmanager
async def vllm_server(ledger: Ledger) -> AsyncIterator[str]:
    """VLLM's `/v1/models`, `/v1/completions` and `/inference/v1/generate` over a ledger; yields the URL."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": str(MODEL), "max_model_len": 500}]})

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        limit = asked["sampling_params"]["max_tokens"]
        call = ledger.sample(asked["token_ids"], limit, request.headers["X-Session-ID"])
        spans = [{"version": call.version, "start": 0, "end": len(call.ids)}]
        logprobs = {"content": [{"logprob": logprob} for logprob in call.logprobs]}
        choice = {"token_ids": call.ids, "logprobs": logprobs, "finish_reason": call.finish, "weight_versions": spans}
        ledger.bodies.append(asked)
        return web.json_response({"choices": [choice]})

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        call = ledger.sample(asked["prompt"], asked["max_tokens"], ledger.task_of(asked["prompt"]))
        ledger.bodies.append(asked)
        ids = {"prompt_token_ids": call.prompt, "token_ids": call.ids} if asked.get("return_token_ids") else {}
        choice = {"index": 0, "text": "", "finish_reason": call.finish, "stop_reason": None, **ids}
        if asked.get("logprobs"):
            choice["logprobs"] = {"token_logprobs": call.logprobs}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/inference/v1/generate", generate)])
    app.add_routes([web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
