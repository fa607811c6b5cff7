"""Record sessions with an engine through `tokentape serve`, draw one-token completions, and score the recorded ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from openai import OpenAI
from tests.engines.real import MODEL, served

import tokentape
from tokentape.audit._scoring import open_and_score, recorded_sessions
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SamplingParams
from tokentape.engines._transformers import TransformersEngine
from tokentape.store import open_record
from tokentape.types import Trajectory

CONTEXT = 1024
TEMPERATURES = (0.6, 1.0, 1.4)
TOP_PS = (1.0, 0.9)
COLUMN = "sampler_logprobs"
QUESTIONS = ("What do pears cost?", "What is 3 plus 4?", "Which is cheaper, plums or figs?", "Name two fruits.")

VLLM = (
    f"{{bin}} serve {MODEL} --served-model-name demo --dtype float32 --enforce-eager --enable-scale-out "
    f"--max-model-len {CONTEXT} --max-num-seqs 512 --block-size 32 --host 127.0.0.1 --logprobs-mode {{mode}} --port"
)
SGLANG = (
    f"{{bin}} --model-path {MODEL} --served-model-name demo --device cpu --attention-backend torch_native "
    f"--sampling-backend pytorch --dtype float32 --context-length {CONTEXT} --max-total-tokens 32768 "
    "--max-running-requests 64 --mem-fraction-static 0.3 --disable-overlap-schedule --host 127.0.0.1 --port"
)
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Cell:
    """The data collected from an engine at a setting."""

    engine: str
    temperature: float
    top_p: float
    trajectories: list[Trajectory]
    sampling: dict[str, dict[int, Any]]
    """Sampling parameters by session and turn."""
    drawn: list[dict[int, tuple[int, float]]] = field(default_factory=list)
    """Per prompt, by id: the number of draws and the reported log-probability."""


def prompts(renderer: Renderer) -> list[np.ndarray]:
    """Return five contexts: three within conversations, where few tokens are likely, two of noise, where many are."""
    asked = [renderer.render([{"role": "user", "content": question}]).ids for question in QUESTIONS[:3]]
    begun = [renderer.tokenizer.encode_plain(text) for text in ("<think>look up", "The", "I think that it")]
    noise = [np.random.default_rng(seed).integers(100, 3900, 30) for seed in range(2)]
    return [np.concatenate(pair).astype(np.int32) for pair in zip(asked, begun, strict=True)] + [
        ids.astype(np.int32) for ids in noise
    ]


def settings() -> Iterator[tuple[float, float]]:
    for temperature in TEMPERATURES:
        for top_p in TOP_PS:
            yield temperature, top_p


@contextlib.contextmanager
def engine_server(name: str, logs: Path, urls: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the address of a server, a running one if it is in `urls`; None for the embedded engine."""
    if name in urls:
        yield urls[name]
        return
    if name.startswith("embedded"):
        yield None
        return
    if name.startswith("vllm"):
        mode = "raw_logprobs" if name.endswith("raw") else "processed_logprobs"
        command = VLLM.format(bin=os.environ["TOKENTAPE_VLLM_BIN"], mode=mode)
    else:
        command = SGLANG.format(bin=os.environ["TOKENTAPE_SGLANG_SERVER"])
    with served(lambda port: [*shlex.split(command), str(port)], logs / f"{name}.log", SETTINGS, within=900) as url:
        yield url


def collect(
    name: str, folder: Path, renderer: Renderer, sessions: int, draws: int, urls: Mapping[str, str]
) -> list[Cell]:
    """Record, draw and score with one engine."""
    kind = name.split("-")[0]
    data = folder / name
    with engine_server(name, folder, urls) as url:
        command = [sys.executable, "-m", "tokentape", "serve", str(MODEL), "--data", str(data)]
        if url is None:
            mode = name.split("-")[1] if "-" in name else "processed"
            command += ["--logprobs-mode", mode]
        else:
            command += ["--engine", kind, "--engine-url", url, "--unverified-model"]
        log = folder / f"{name}-gateway.log"
        with (
            served(lambda port: [*command, "--port", str(port)], log, {}, within=300) as gateway,
            ThreadPoolExecutor(4) as pool,
        ):
            list(pool.map(lambda job: converse(gateway, *job), jobs(sessions)))
        with open_record(data) as store:
            asyncio.run(score(store, "transformers" if url is None else kind, url))
            cells = [cell_of(store, name, *setting) for setting in settings()]
        with drawing(name, url) as drawn:
            for cell in cells:
                cell.drawn = [draw(drawn, prompt, cell, draws) for prompt in prompts(renderer)]
                print(f"{name}, temperature {cell.temperature}, top_p {cell.top_p}", file=sys.stderr, flush=True)
    return cells


def jobs(sessions: int) -> list[tuple[float, float, int]]:
    return [(temperature, top_p, number) for temperature, top_p in settings() for number in range(sessions)]


def converse(url: str, temperature: float, top_p: float, number: int) -> None:
    """Run two turns of an agent, of up to 40 tokens each."""
    with tokentape.Client(url) as client:
        session = client.session(f"{temperature}-{top_p}-{number}")
    with OpenAI(base_url=session.base_url, api_key="none", max_retries=3, timeout=300) as agent:
        messages: list[Any] = []
        for turn in range(2):
            messages.append({"role": "user", "content": QUESTIONS[(number + turn) % len(QUESTIONS)]})
            reply = agent.chat.completions.create(
                model="any", messages=messages, max_tokens=40, temperature=temperature, top_p=top_p
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})


async def score(store: Any, kind: str, url: str | None) -> None:
    await open_and_score(
        recorded_sessions(store, COLUMN),
        lambda columns: store.write(*columns),
        kind,
        MODEL,
        url,
        column=COLUMN,
        precision=None,
    )


def cell_of(store: Any, name: str, temperature: float, top_p: float) -> Cell:
    cell = Cell(name, temperature, top_p, [], {})
    for stored in store.iter_sessions(per_token=True):
        if stored.info.session_id.rsplit("-", 1)[0] == f"{temperature}-{top_p}":
            cell.trajectories += stored.trajectories()
            cell.sampling[stored.info.session_id] = {turn.seq: dict(turn.sampling) for turn in stored.turns}
    return cell


Draws: TypeAlias = Callable[[np.ndarray, Cell, int], Iterator[list[tuple[int, float]]]]
"""A prompt, a setting and a number to batches of (id, log-probability)."""


def draw(drawn: Draws, prompt: np.ndarray, cell: Cell, draws: int) -> dict[int, tuple[int, float]]:
    """Draw one-token completions of a prompt. Return, by id, their number and the reported log-probability."""
    counts: Counter[int] = Counter()
    logprob_by_id: dict[int, float] = {}
    for batch in drawn(prompt, cell, draws):
        for token_id, logprob in batch:
            counts[token_id] += 1
            if abs(logprob_by_id.setdefault(token_id, logprob) - logprob) > 1e-4:
                raise AssertionError(
                    f"{cell.engine}: {logprob} and {logprob_by_id[token_id]} of one token in one context"
                )
    return {token_id: (count, logprob_by_id[token_id]) for token_id, count in counts.items()}


@contextlib.contextmanager
def drawing(name: str, url: str | None) -> Iterator[Draws]:
    """Yield a function that draws from an engine, which stays open for all draws."""
    kind, _, mode = name.partition("-")
    if url is not None:
        yield lambda prompt, cell, draws: server_draws(kind, url, prompt, cell, draws)
        return
    reported: Any = f"{mode or 'processed'}_logprobs"
    engine = TransformersEngine.open(MODEL, threads=1, max_batch=512, logprobs_mode=reported)
    try:
        yield lambda prompt, cell, draws: embedded_draws(engine, prompt, cell, draws)
    finally:
        asyncio.run(engine.close())


def embedded_draws(
    engine: TransformersEngine, prompt: np.ndarray, cell: Cell, draws: int
) -> Iterator[list[tuple[int, float]]]:
    params = SamplingParams(1, cell.temperature, top_p=cell.top_p)

    async def draw_once() -> tuple[int, float]:
        async for delta in engine.sample(prompt, params, stream=False, request_id="draw"):
            return delta.token_ids[0], delta.logprobs[0]
        raise AssertionError

    async def several(count: int) -> list[tuple[int, float]]:
        return list(await asyncio.gather(*(draw_once() for _ in range(count))))

    for start in range(0, draws, 512):
        yield asyncio.run(several(min(512, draws - start)))


def server_draws(kind: str, url: str, prompt: np.ndarray, cell: Cell, draws: int) -> Iterator[list[tuple[int, float]]]:
    left = draws
    while left:
        several = min(left, 2000)
        left -= several
        same = {"temperature": cell.temperature, "top_p": cell.top_p, "n": several, "ignore_eos": True}
        if kind == "vllm":
            body = {"model": "demo", "prompt": prompt.tolist(), "add_special_tokens": False, "max_tokens": 1}
            body |= same | {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
            body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
            choices = post(f"{url}/v1/completions", body)["choices"]
            logprobs = [choice["logprobs"] for choice in choices]
            yield [
                (int(choice_logprobs["tokens"][0].removeprefix("token_id:")), choice_logprobs["token_logprobs"][0])
                for choice_logprobs in logprobs
            ]
        else:
            sampling = same | {"max_new_tokens": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body = {"input_ids": prompt.tolist(), "sampling_params": sampling, "return_logprob": True}
            replies = post(f"{url}/generate", body | {"logprob_start_len": -1})
            entries = [reply["meta_info"]["output_token_logprobs"][0] for reply in replies]
            yield [(entry[1], entry[0]) for entry in entries]


def post(url: str, body: Any) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as reply:
        return json.loads(reply.read())
