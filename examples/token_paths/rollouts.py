"""Sample sessions with a policy: exact ids in, exact ids out, contexts that only grow.

A session is what Tokentape records: the ids that `Renderer` writes between the sampled ones, and the sampled ones as
they were sampled. There is no server, so that a run takes seconds. Sampling uses the trainer's own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import torch
from paths import Rollout, Turn
from policy import ROUNDS, Task

from tokentape.chat import Renderer
from tokentape.chat._reply import Reply
from tokentape.types import Message, Setup

MAX_TOKENS = 24
"""Maximum of sampled tokens per reply; a right reply has about 14."""


Choose: TypeAlias = Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
"""Logits [rows, vocabulary] after temperature, and a number from 0 to 1 per row, to an id and a logprob per row."""


def from_whole_distribution(logits: torch.Tensor, numbers: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ids by the cumulative probabilities; see `Choose`."""
    distribution = torch.log_softmax(logits, -1)
    cumulative = distribution.exp().double().cumsum(-1)
    cumulative /= cumulative[:, -1:].clone()
    ids = torch.searchsorted(cumulative, torch.from_numpy(numbers[:, None].copy())).clamp(max=logits.shape[1] - 1)
    return ids[:, 0], distribution.gather(1, ids)[:, 0]


def play(
    model: Any,
    renderer: Renderer,
    tasks: Sequence[Task],
    seed: int,
    temperature: float = 1.0,
    choose: Choose = from_whole_distribution,
) -> list[Rollout]:
    """Run all tasks with a policy.

    The same tasks, seed and weights give the same sessions up to rounding. Each sampled token is drawn with its own
    random number, which depends on the seed, the session and the position only.
    """
    setup = renderer.setup()
    numbers = np.random.default_rng(seed).random((ROUNDS, len(tasks), MAX_TOKENS))
    turns: list[list[Turn]] = [[] for _ in tasks]
    contexts = [np.empty(0, np.int32) for _ in tasks]
    for number in range(ROUNDS):
        added = [
            _added(renderer, setup, task.prompts[number], own[-1] if own else None)
            for task, own in zip(tasks, turns, strict=True)
        ]
        contexts = [np.concatenate([ids, new]) for ids, new in zip(contexts, added, strict=True)]
        sampled = sample(model, contexts, renderer.stop_ids(setup), numbers[number], temperature, choose)
        for n, (completion, logprobs) in enumerate(sampled):
            parser = renderer.parser(setup, prompt_ids=contexts[n])
            parser.feed(completion.tolist())
            reply = _message(parser.finish()[1])
            question = {"role": "user", "content": tasks[n].prompts[number]}
            turns[n].append(Turn(added[n], completion, logprobs, question, reply))
            contexts[n] = np.concatenate([contexts[n], completion])
    return [
        Rollout(tuple(own), tuple(turn.reply.get("content") == task.answer(n) for n, turn in enumerate(own)))
        for task, own in zip(tasks, turns, strict=True)
    ]


def _added(renderer: Renderer, setup: Setup, prompt: str, before: Turn | None) -> Any:
    """Return the ids between the last sampled token and the next one."""
    question = {"role": "user", "content": prompt}
    if before is None:
        return renderer.render([question], setup).ids
    return renderer.bridge(before.completion_ids, before.reply, [question], setup).ids


def _message(reply: Reply) -> Message:
    """Return the message that a client gets."""
    reasoning = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {"role": "assistant", "content": reply.content, **reasoning}


@torch.no_grad()
def sample(
    model: Any,
    contexts: Sequence[Any],
    stop_ids: Any,
    numbers: Any,
    temperature: float,
    choose: Choose = from_whole_distribution,
) -> list[tuple[Any, Any]]:
    """Return ids and logprobs of a completion of each context.

    `numbers`, float [contexts, tokens] from 0 to 1, choose the tokens.
    """
    longest = max(map(len, contexts))
    ids = torch.zeros(len(contexts), longest, dtype=torch.long)
    mask = torch.zeros(len(contexts), longest + numbers.shape[1], dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, longest - len(context) :] = torch.from_numpy(context.astype(np.int64))
        mask[row, longest - len(context) : longest] = 1
    mask[:, longest:] = 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(stop_ids))
    drawn, logprobs, cache = [], [], None
    # transformers 5.24 renamed it.
    named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    alive = torch.ones(len(contexts), dtype=torch.bool)
    lengths = torch.zeros(len(contexts), dtype=torch.long)
    for step in range(numbers.shape[1]):
        end = longest + step
        found = model(
            input_ids=ids,
            attention_mask=mask[:, :end],
            position_ids=places[:, end - ids.shape[1] : end],
            use_cache=True,
            logits_to_keep=1,
            **{named: cache},
        )
        cache = found[named]
        new, own = choose(found.logits[:, -1] / temperature, numbers[:, step])
        ids = new[:, None]
        drawn.append(new)
        logprobs.append(own)
        lengths += alive
        alive &= ~torch.isin(new, stops)
        if not alive.any():
            break
    all_ids = torch.stack(drawn, 1).numpy().astype(np.int32)
    all_logprobs = torch.stack(logprobs, 1).numpy().astype(np.float32)
    return [(all_ids[row, :n], all_logprobs[row, :n]) for row, n in enumerate(lengths.tolist())]
