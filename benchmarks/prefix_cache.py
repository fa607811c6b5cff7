"""Measure what other contexts than the sampled ones cost a server's prefix cache, as vLLM reports it.

    TOKENTAPE_VLLM_BIN=.../bin/vllm python benchmarks/prefix_cache.py --out docs/experiments/data/prefix-cache.json

Plays the 16 sessions of the recorded demo again, on a vLLM server with the shipped model. All sampled ids are made
canonical first. Then the chosen share of them is split into two tokens that spell the same. So the drift is known, and
it is not the model's own. The context of each later turn is sent in one of four ways:

- exact: what was sampled, and the bridges between;
- retokenized: each completion decoded and encoded again;
- rerendered, reasoning dropped: the conversation rendered by the model's template;
- rerendered, reasoning kept: by the same template without the condition that drops it.

After each measured request the same prompt is sent with the sampled ids, less the last, because a server that sampled
them has them in its cache. Without this, a retokenized context looks as good as the exact one. A salt keeps the
sessions of each way apart. Two replicas are simulated by two salts, between which a router chooses: by session, or at
random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.drift import Resplit

from tokentape.audit import retokenized, with_objects
from tokentape.chat import Renderer
from tokentape.demo import MODEL
from tokentape.demo.findings import RECORDED
from tokentape.store import SqliteStore, StoredSession

DOSES = (0.0, 0.001, 0.01, 0.04)
WAYS = ("exact", "retokenized", "rerendered, reasoning kept", "rerendered, reasoning dropped")
BLOCK = 32
"""Tokens per block: the smallest that vLLM's CPU attention has."""


@dataclass(frozen=True, slots=True)
class Call:
    """One turn: what a server is sent, and what it then samples."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


def conversations(
    stored: Sequence[StoredSession], renderer: Renderer, keeping: Renderer, dose: float
) -> dict[str, list[list[Call]]]:
    """Return the calls of each session in each way, with planted drift."""
    resplit = Resplit(renderer.tokenizer, dose)
    found: dict[str, list[list[Call]]] = {way: [] for way in WAYS}
    for one in stored:
        context: list[int] = []
        through_text: list[int] = []
        messages: list[Any] = []
        calls: dict[str, list[Call]] = {way: [] for way in WAYS}
        for turn in one.turns:
            messages += [with_objects(message) for message in turn.messages]
            added = turn.added_ids.tolist()
            canonical = retokenized(renderer.tokenizer, turn.completion_ids).tolist()
            sampled = tuple(resplit.split(canonical))
            prompts = {
                "exact": [*context, *added],
                "retokenized": [*through_text, *added],
                "rerendered, reasoning kept": keeping.render(messages, keeping.setup(one.setups[turn.setup].tools)).ids,
                "rerendered, reasoning dropped": renderer.render(messages, one.setups[turn.setup]).ids,
            }
            for way, prompt in prompts.items():
                calls[way].append(Call(tuple(map(int, prompt)), sampled))
            context += [*added, *sampled]
            through_text += [*added, *canonical]
            messages.append(with_objects(turn.reply))
        for way, own in calls.items():
            found[way].append(own)
    return found


class Server:
    """A vLLM server. Requests that were sent before in the same order have the same answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._salts = 0

    def salt(self) -> str:
        """Return a salt of its own for a session, or for a session on one of two replicas."""
        self._salts += 1
        return f"{time.time_ns()}-{self._salts}"

    def cached(self, ids: Sequence[int], salt: str) -> int:
        """Send a prompt and return how many of its tokens were in the cache."""
        body = {"model": "demo", "prompt": list(ids), "max_tokens": 1, "temperature": 0, "cache_salt": salt}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            usage = json.load(answer)["usage"]
        if usage["prompt_tokens"] != len(ids):
            raise RuntimeError(f"sent {len(ids)} tokens, the server counted {usage['prompt_tokens']}")
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids two sequences begin with in common."""
    return next(
        (n for n, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other))
    )


def measure(server: Server, sessions: Sequence[Sequence[Call]], replicas: str) -> list[dict[str, int]]:
    """Return a row per later turn: its prompt, what was cached of it, and what the common prefix predicts."""
    rng = random.Random(0)
    rows = []
    for number, calls in enumerate(sessions):
        salts = [server.salt() for _ in range(2)]
        held: list[list[tuple[int, ...]]] = [[], []]
        for at, call in enumerate(calls):
            replica = rng.randrange(2) if replicas == "random" else 0
            cached = server.cached(call.prompt, salts[replica])
            # vLLM computes at least the last token.
            shared = max((common_prefix(call.prompt, known) for known in held[replica]), default=0)
            predicted = min(shared, len(call.prompt) - 1) // BLOCK * BLOCK
            if at:
                rows.append({"session": number, "prompt": len(call.prompt), "cached": cached, "predicted": predicted})
            after = call.prompt + call.sampled[:-1]
            server.cached(after, salts[replica])
            held[replica] += [call.prompt, after]
    return rows


def summary(rows: Sequence[dict[str, int]], exact: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Return totals, and computed tokens relative to the exact contexts with a bootstrap interval over sessions."""

    def computed(of: Sequence[dict[str, int]], sessions: Any) -> float:
        by_session = np.bincount(
            [row["session"] for row in of], [row["prompt"] - row["cached"] for row in of], minlength=count
        )
        return float(by_session[sessions].sum())

    count = 1 + max(row["session"] for row in exact)
    draws = np.random.default_rng(0).integers(0, count, (2000, count))
    times = [computed(rows, draw) / computed(exact, draw) for draw in draws]
    everyone = np.arange(count)
    return {
        "turns": len(rows),
        "prompt_tokens": sum(row["prompt"] for row in rows),
        "cached_tokens": sum(row["cached"] for row in rows),
        "computed_times_exact": round(computed(rows, everyone) / computed(exact, everyone), 3),
        "interval": [round(float(x), 3) for x in np.quantile(times, (0.025, 0.975))],
        "as_predicted": sum(row["cached"] == row["predicted"] for row in rows),
    }


@contextmanager
def serving() -> Iterator[str]:
    """Run a vLLM server with the shipped model while the context is open."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["TOKENTAPE_VLLM_BIN"], "serve", str(MODEL), "--served-model-name", "demo"]
    command += ["--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", "--max-model-len", "2048"]
    command += ["--block-size", str(BLOCK), "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _healthy(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace")[-3000:])
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(120)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", help="a running server; without, TOKENTAPE_VLLM_BIN is started")
    arguments = parser.parse_args()
    renderer = Renderer.load(MODEL)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept = folder / "keeps"
        shutil.copytree(MODEL, kept, ignore=shutil.ignore_patterns("*.safetensors"))
        template = kept / "chat_template.jinja"
        template.write_text(template.read_text("utf-8").replace(" and loop.index0 > ns.last_user", ""), "utf-8")
        shutil.copyfile(RECORDED / "tokentape.db", folder / "tokentape.db")
        with SqliteStore.open(folder, read_only=True) as store:
            stored = sorted(store.iter_sessions(), key=lambda one: one.info.session_id)
        server = Server(arguments.url or stack.enter_context(serving()))
        known: dict[str, list[dict[str, int]]] = {}
        found = []
        for dose in DOSES:
            calls = conversations(stored, renderer, Renderer.load(kept), dose)
            for replicas in ("session", "random") if dose in (0.0, 0.01) else ("session",):
                for way in WAYS:
                    # Without drift, several ways send the same ids: once is enough.
                    key = f"{replicas} {calls[way]}"
                    rows = known[key] = known.get(key) or measure(server, calls[way], replicas)
                    exact = known[f"{replicas} {calls['exact']}"]
                    row = {"dose": dose, "replicas": replicas, "way": way, **summary(rows, exact)}
                    found.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    arguments.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
