"""How a perfect agent works a task: the conversations that the tiny model is trained to imitate.

A conversation is a list of segments: context that the serving side encodes, and completions that a model samples.
The context of each completion is everything before it, appended, never rendered again; that is what the gateway
serves, so old reasoning stays in context although the template would drop it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Question, Task, call_tool

Message = dict[str, Any]
Render = Callable[..., str]
"""Chat template: `render(messages, tools, add_generation_prompt)` gives the text."""

SENTINEL = "SENTINEL"

SYSTEM_PROMPTS = (
    None,
    "You are a helpful assistant.",
    "You are a shop assistant. Use the tools.",
    "Answer questions about prices.",
)


class Segment(NamedTuple):
    """A stretch of text; `sampled` says whether the model is to learn to write it."""

    text: str
    sampled: bool


def bridge(render: Render, messages: list[Message]) -> str:
    """Text between a completion, stop token excluded, and the next one: asked from the template with a sentinel."""
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}, *messages]
    return render(probe, add_generation_prompt=True).rsplit(SENTINEL, 1)[1]


def segments(task: Task, render: Render, stop: str, rng: random.Random) -> list[Segment]:
    """The whole session of a task as alternating context and completions, each completion with its stop token."""
    system = SYSTEM_PROMPT if rng.random() < 0.7 else rng.choice(SYSTEM_PROMPTS)
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": task.prompts[0]})
    out = [Segment(render(messages, tools=TOOLS, add_generation_prompt=True), False)]
    before = 0
    for index, question in enumerate(task.questions):
        if index:
            new = [{"role": "user", "content": question.prompt}]
            out.append(Segment(bridge(render, new).removeprefix(stop), False))
        for completion, calls in _turns(task, question, before, task.answers[index], rng):
            out.append(Segment(completion + stop, True))
            if calls:
                results = [{"role": "tool", "content": call_tool(task, *call)} for call in calls]
                out.append(Segment(bridge(render, results).removeprefix(stop), False))
        if not question.name:
            before = int(task.answers[index])
    return out


def _turns(
    task: Task, question: Question, before: int, answer: str, rng: random.Random
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each assistant turn of a question: its text without the stop token, and its calls as (name, arguments)."""
    if question.name:
        reply = rng.choice([f"Hello {answer}! How can I help?", f"Hello {answer}, what can I do for you?"])
        return [(_think(rng.choice(["A greeting. No tool is needed.", f"{answer} says hello."])) + reply, [])]

    turns: list[tuple[str, list[tuple[str, str]]]] = []
    lookups = [("lookup", json.dumps({"item": item})) for item in question.items]
    needed = " and ".join(question.items)
    plural = "s" if len(lookups) == 2 else ""
    if len(lookups) == 2 and rng.random() < 0.5:
        turns.append((_think(f"I need the prices of {needed}.") + _calls(lookups, rng), lookups))
    elif lookups:
        thoughts = [f"I need the price{plural} of {needed}."]
        if len(lookups) == 2:
            first, second = question.items
            thoughts.append(f"{first.capitalize()} cost {task.prices[first]}. Now {second}.")
        turns += [(_think(t) + _calls([c], rng), [c]) for t, c in zip(thoughts, lookups, strict=True)]

    operands = question.operands(task.prices, before)
    if len(operands) == 2:
        expression = question.operator.join(map(str, operands))
        calculation = [("calculator", json.dumps({"expression": expression}))]
        thought = rng.choice([f"I work out {expression}.", f"Now {expression}."])
        turns.append((_think(thought) + _calls(calculation, rng), calculation))

    thought = rng.choice([f"The result is {answer}.", f"It is {answer}."])
    turns.append((_think(thought) + rng.choice([f"The answer is {answer}.", f"That makes {answer}."]), []))
    return turns


def _think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n"


def _calls(calls: list[tuple[str, str]], rng: random.Random) -> str:
    lead = "Let me check.\n" if rng.random() < 0.15 else ""
    return lead + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )
