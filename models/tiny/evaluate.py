"""Measure the tiny model on held-out tasks, through the whole loop of prompting, calling tools and answering.

    python models/tiny/evaluate.py [--tasks N] [--model FOLDER]

Contexts are append-only ids: the first prompt is rendered, then every sampled id stays and only the bridge to the
next messages is encoded. Nothing that was sampled is decoded and encoded again, except to count what would change.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demonstrations import bridge
from tokenizers import Tokenizer
from train import MODEL_FOLDER, template_renderer
from transformers import Qwen3ForCausalLM
from vocabulary import END_OF_TEXT, TURN_END

from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS, Task, call_tool, is_solved, sample_tasks

TURNS_PER_PROMPT = 6
MAX_TOKENS = 128
BATCH = 50


@dataclass
class Rollout:
    """One session being played."""

    task: Task
    ids: list[int]
    asked: int = 1
    turns_left: int = TURNS_PER_PROMPT
    completions: list[list[int]] = field(default_factory=list)
    final_text: str | None = None


def roll_out(folder: Path, tasks: list[Task], temperature: float, seed: int = 0) -> list[Rollout]:
    """Play every task to its end: greedily at temperature 0, else sampling from the whole distribution."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    render = template_renderer((folder / "chat_template.jinja").read_text())

    def first_prompt(task: Task) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.prompts[0]}]
        return _encode(tokenizer, render(messages, tools=TOOLS, add_generation_prompt=True))

    rollouts = [Rollout(task, first_prompt(task)) for task in tasks]
    while playing := [rollout for rollout in rollouts if rollout.final_text is None][:BATCH]:
        for rollout, completion in zip(playing, _generate(model, tokenizer, playing, temperature), strict=True):
            _advance(rollout, completion, tokenizer, render)
    return rollouts


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _generate(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, rollouts: list[Rollout], temperature: float
) -> list[list[int]]:
    """One completion per rollout, stop token included, from a left-padded batch."""
    stop, padding = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    width = max(len(rollout.ids) for rollout in rollouts)
    prompts = torch.tensor([[padding] * (width - len(r.ids)) + r.ids for r in rollouts])
    mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in rollouts])
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    with torch.inference_mode():
        out = model.generate(
            input_ids=prompts,
            attention_mask=mask,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=stop,
            pad_token_id=padding,
            **sampling,
        )
    completions = [row[width:].tolist() for row in out]
    return [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in completions]


def _advance(rollout: Rollout, completion: list[int], tokenizer: Tokenizer, render: Any) -> None:
    """Take in a completion: answer its tool calls, ask the next prompt, or end."""
    rollout.completions.append(completion)
    rollout.ids += completion
    rollout.turns_left -= 1
    text = tokenizer.decode(completion, skip_special_tokens=False)
    if not text.endswith(TURN_END) or rollout.turns_left == 0:
        rollout.final_text = ""
        return
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, flags=re.DOTALL)
    if calls:
        new = [{"role": "tool", "content": _answer_call(rollout.task, call)} for call in calls]
    elif rollout.asked < len(rollout.task.prompts):
        new = [{"role": "user", "content": rollout.task.prompts[rollout.asked]}]
        rollout.asked += 1
        rollout.turns_left = TURNS_PER_PROMPT
    else:
        rollout.final_text = text.split("</think>")[-1].removesuffix(TURN_END)
        return
    rollout.ids += _encode(tokenizer, bridge(render, new).removeprefix(TURN_END))


def _answer_call(task: Task, text: str) -> str:
    try:
        call = json.loads(text)
        return call_tool(task, call["name"], json.dumps(call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return "error: not a tool call"


def is_canonical(tokenizer: Tokenizer, completion: list[int]) -> bool:
    """Whether encoding the decoded text gives the sampled ids back."""
    return _encode(tokenizer, tokenizer.decode(completion, skip_special_tokens=False)) == completion


def measure(folder: Path, tasks: list[Task], temperature: float) -> dict[str, float]:
    """Share of tasks solved, and of turns and sessions that decode-and-encode would change."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rollouts = roll_out(folder, tasks, temperature)
    changed = [[not is_canonical(tokenizer, ids) for ids in rollout.completions] for rollout in rollouts]
    turns = sum(map(len, changed))
    return {
        "temperature": temperature,
        "sessions": len(rollouts),
        "turns": turns,
        "solved": sum(is_solved(r.task, r.final_text or "") for r in rollouts) / len(rollouts),
        "non_canonical_turns": sum(map(sum, changed)) / turns,
        "non_canonical_sessions": sum(map(any, changed)) / len(rollouts),
        "longest_context": max(len(r.ids) for r in rollouts),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    tasks = sample_tasks(seed=0, n=arguments.tasks, split="heldout")
    for temperature in (0.0, 1.0):
        print(json.dumps(measure(arguments.model, tasks, temperature)), flush=True)


if __name__ == "__main__":
    main()
