"""Count the malformed tool calls of the shipped model, with exact and with re-rendered histories.

    python benchmarks/tool_calls.py --tasks 64 --out docs/experiments/data/tool-calls.json

An agent solves the demo's tasks three times, with the same tasks and seeds, at temperature 1. The context is the exact
one (sampled ids and bridges), or each completion is decoded and encoded again, or the messages are rendered again for
each call, as a server without sessions does. A call is malformed if its status is not `ok`: bad JSON, unclosed, an
unknown tool. Differences are between shares, with a paired bootstrap interval over tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.audit import retokenized, with_objects
from tokentape.chat import Renderer
from tokentape.demo import MODEL
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool, is_solved, sample_tasks
from tokentape.engines import SamplingParams, TransformersEngine

WAYS = ("exact", "retokenized", "rerendered")
MOST_CALLS = 6
"""Calls of the model per question."""


class Agent:
    """Solves one task, in one way of building contexts."""

    def __init__(self, engine: TransformersEngine, renderer: Renderer, way: str, number: int) -> None:
        self.engine, self.renderer, self.way, self.number = engine, renderer, way, number
        self.setup = renderer.setup(TOOLS)
        self.stops = tuple(sorted(renderer.stop_ids(self.setup)))
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
        self.context = np.empty(0, np.int32)
        self.last: tuple[Any, Any] | None = None
        self.new: list[Any] = list(self.messages)
        self.calls = 0
        self.found = {"calls": 0, "malformed": 0, "later_calls": 0, "later_malformed": 0}
        """Calls that the model wrote, and those that are not `ok`; `later_`: after the first question."""

    async def solve(self, task: Task) -> dict[str, int]:
        """Ask the questions and run the tools; return the counts."""
        replies = []
        for question, prompt in enumerate(task.prompts):
            self._say({"role": "user", "content": prompt})
            text = ""
            for _ in range(MOST_CALLS):
                reply = await self._sample(later=question > 0)
                made = reply.get("tool_calls", [])
                if not made:
                    text = reply["content"]
                    break
                for call in made:
                    result = call_tool(task, call["function"]["name"], call["function"]["arguments"])
                    self._say({"role": "tool", "tool_call_id": call["id"], "content": result})
            replies.append(text)
        solved = is_solved(task, replies[-1])
        return {**self.found, "solved": int(solved)}

    def _say(self, message: Any) -> None:
        self.messages.append(message)
        self.new.append(message)

    def _prompt(self) -> Any:
        if self.last is None or self.way == "rerendered":
            return self.renderer.render([with_objects(message) for message in self.messages], self.setup).ids
        ids, reply = self.last
        bridge = self.renderer.bridge(ids, reply, self.new, self.setup).ids
        return np.concatenate([self.context, bridge])

    async def _sample(self, *, later: bool) -> Any:
        prompt = self._prompt()
        params = SamplingParams(96, seed=self.number * 1000 + self.calls, stop_token_ids=self.stops)
        self.calls += 1
        name = f"{self.way}-{self.number}-{self.calls}"
        deltas = [part async for part in self.engine.sample(prompt, params, stream=False, request_id=name)]
        ids = np.array([one for part in deltas for one in part.token_ids], np.int32)
        parser = self.renderer.parser(self.setup, prompt_ids=prompt)
        parser.feed(ids.tolist())
        parsed = parser.finish()[1]
        reply: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            reply["reasoning_content"] = parsed.reasoning
        # An unclosed call was never made: clients do not get it.
        if parsed.calls_for_client:
            reply["tool_calls"] = [
                {
                    "id": f"call_{self.calls}_{n}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for n, call in enumerate(parsed.calls_for_client)
            ]
        bad = sum(call.status != "ok" for call in parsed.tool_calls)
        for prefix in ("", "later_") if later else ("",):
            self.found[f"{prefix}calls"] += len(parsed.tool_calls)
            self.found[f"{prefix}malformed"] += bad
        if self.way == "retokenized":
            ids = retokenized(self.renderer.tokenizer, ids)
        self.context = np.concatenate([prompt, ids])
        self.last = ids, reply
        self.messages.append(reply)
        self.new = []
        return reply


async def run(count: int) -> dict[str, list[dict[str, int]]]:
    """Return the counts of each task, for each way."""
    tasks = [task for task in sample_tasks(11, count * 4, "heldout") if len(task.prompts) > 1][:count]
    renderer = Renderer.load(MODEL)
    found = {}
    for way in WAYS:
        engine = TransformersEngine.open(MODEL, threads=1, max_batch=32)
        agents = [Agent(engine, renderer, way, number) for number in range(len(tasks))]
        found[way] = list(await asyncio.gather(*(one.solve(task) for one, task in zip(agents, tasks, strict=True))))
        await engine.close()
    return found


def summary(found: dict[str, list[dict[str, int]]]) -> list[dict[str, Any]]:
    """Return a row per way: counts, share, and the difference from exact with its interval."""
    rows = []
    draws = np.random.default_rng(0).integers(0, len(found["exact"]), (4000, len(found["exact"])))
    for way, tasks in found.items():
        total = {name: sum(one[name] for one in tasks) for name in tasks[0]}
        row = {"way": way, "tasks": len(tasks), **total}
        for name, of in (("malformed", "calls"), ("later_malformed", "later_calls")):
            apart = _share(tasks, name, of, draws) - _share(found["exact"], name, of, draws)
            everyone = np.arange(len(tasks))[None]
            seen = _share(tasks, name, of, everyone) - _share(found["exact"], name, of, everyone)
            low, high = np.quantile(apart, (0.025, 0.975))
            row[f"{name}_difference"] = [round(float(one), 4) for one in (seen[0], low, high)]
        rows.append(row)
    return rows


def _share(tasks: Sequence[dict[str, int]], name: str, of: str, draws: Any) -> Any:
    part, whole = (np.array([one[key] for one in tasks]) for key in (name, of))
    return part[draws].sum(1) / np.maximum(whole[draws].sum(1), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = summary(asyncio.run(run(arguments.tasks)))
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
