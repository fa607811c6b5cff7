"""What every agent here is given: the question, the tools, where the model is. It says at the end what it answered.

The agents are run by `test_harnesses.py` in an environment where their frameworks are installed; of Tokentape they see
nothing but the shop's tasks and tools.
"""

from __future__ import annotations

import json
import os
import sys

from tokentape.demo.tasks import SYSTEM_PROMPT, Task, call_tool, sample_tasks

BASE_URL = os.environ["AGENT_BASE_URL"]
"""Up to and including `/v1`."""
API_KEY = os.environ["AGENT_API_KEY"]
TASK: Task = sample_tasks(seed=int(os.environ["AGENT_TASK"]), n=1, split="heldout")[0]
STREAM = os.environ.get("AGENT_STREAM") == "1"

__all__ = ["API_KEY", "BASE_URL", "STREAM", "SYSTEM_PROMPT", "TASK", "answer", "calculator", "lookup"]


def lookup(item: str) -> str:
    """Price of an item."""
    return call_tool(TASK, "lookup", json.dumps({"item": item}))


def calculator(expression: str) -> str:
    """Value of an expression."""
    return call_tool(TASK, "calculator", json.dumps({"expression": expression}))


def answer(texts: list[str]) -> None:
    """Tell the test the agent's reply to each question."""
    json.dump(texts, sys.stdout)
