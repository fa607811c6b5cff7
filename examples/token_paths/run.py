"""One training run: GRPO with a choice of token path, correction, template and starting policy.

The loss is that of TRL's `GRPOTrainer` with its defaults (`dapo`, no KL term, one optimizer step per batch), written
out so that a run takes seconds. tests/docs/test_token_paths_loss.py compares loss and gradient with TRL's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import policy
import torch
from measures import drift, importance
from paths import PATHS, Given, Rollout
from rollouts import play
from transformers import Qwen3ForCausalLM

from tokentape.chat import Renderer

CORRECTIONS = {"none": None, "token_truncate": "token", "sequence_mask": "sequence"}
"""TRL's `vllm_importance_sampling_mode`, and what a ratio is of."""
RATIO_LIMIT = 3.0
"""TRL's default `vllm_importance_sampling_clip_max`; there is no lower limit by default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run."""

    path: str
    """A key of `PATHS`."""
    seed: int = 0
    correction: str = "none"
    """A key of `CORRECTIONS`. `none`: the trainer recomputes the old logprobs on its own sequence, so every ratio in
    the loss is 1, whatever was sampled."""
    template: str = "drops"
    """What the template does with the reasoning of earlier turns when messages are rendered: `drops` or `keeps`."""
    dropout: float = 0.0
    """BPE dropout in the training of the starting policy."""
    learning_rate: float = 5e-4
    steps: int = 12
    groups: int = 8
    """Tasks per step."""
    group_size: int = 8
    """Sessions per task."""
    heldout: int = 128
    """Held-out tasks, each run once before and once after training."""

    @property
    def name(self) -> str:
        """Name of the run's file."""
        arm = f"{self.path}_{self.template}_{self.correction}_dropout{self.dropout:g}_lr{self.learning_rate:g}"
        return f"{arm}_seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a step as tensors, [sequences, tokens]; padding is on the right."""

    ids: torch.Tensor
    trained: torch.Tensor
    """Bool."""
    samplers: torch.Tensor
    """Logprobs of the sampler, NaN where it did not sample this text."""
    advantages: torch.Tensor
    """[sequences]."""

    @classmethod
    def of(cls, given: Sequence[Given], rewards: Sequence[float], group_size: int) -> Batch:
        """Return the batch, with advantages as TRL computes them: less the group's mean, over its deviation."""
        pad = torch.nn.utils.rnn.pad_sequence
        grouped = torch.tensor(rewards).view(-1, group_size)
        apart = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        return cls(
            pad([torch.from_numpy(one.token_ids.astype(np.int64)) for one in given], batch_first=True),
            pad([torch.from_numpy(one.loss_mask) for one in given], batch_first=True),
            pad([torch.from_numpy(one.logprobs) for one in given], batch_first=True),
            apart.flatten(),
        )


def loss_of(model: Any, batch: Batch, correction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the trainer's logprobs of the sequences from the second token on."""
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    own = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    mask = batch.trained[:, 1:]
    # The old logprobs are these: the ratio is 1, and its gradient is that of the logprob.
    loss = -torch.exp(own - own.detach()) * batch.advantages[:, None]
    level = CORRECTIONS[correction]
    if level is not None:
        apart = torch.nan_to_num((own.detach() - batch.samplers[:, 1:]) * mask, nan=0.0)
        if level == "sequence":
            ratio = apart.sum(1, keepdim=True).exp()
            loss = loss * ratio.masked_fill(ratio > RATIO_LIMIT, 0.0)
        else:
            loss = loss * apart.exp().clamp(max=RATIO_LIMIT)
    return (loss * mask).sum() / mask.sum().clamp(min=1), own.detach()


def run(settings: Settings, policies: Path, file: Path) -> None:
    """Train once; write a line for the settings, one per step, and one for held-out tasks before and after."""
    torch.set_num_threads(1)
    folder = policy.make(policies, settings.dropout)
    renderer = _renderer(folder)
    rendering = renderer if settings.template == "drops" else _renderer(policy.with_kept_reasoning(folder))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    heldout = policy.draw_tasks(2_000 + settings.seed, settings.heldout, "heldout")
    tasks = policy.draw_tasks(1_000 + settings.seed, settings.steps * settings.groups, "train")
    began = time.process_time()
    lines: list[dict[str, Any]] = [{"kind": "settings", **asdict(settings), "policy": policy.digest(folder)}]

    def examine(kind: str) -> None:
        rollouts = play(model, renderer, heldout, 10**6 + settings.seed)
        lines.append({"kind": kind, "step": len(lines) - 1, **_of_policy(renderer, rollouts, reference)})

    examine("before")
    for step in range(settings.steps):
        chosen = tasks[step * settings.groups : (step + 1) * settings.groups]
        rollouts = play(
            model,
            renderer,
            [task for task in chosen for _ in range(settings.group_size)],
            settings.seed * 1000 + step,
        )
        given = [PATHS[settings.path](rendering, one) for one in rollouts]
        batch = Batch.of(given, [float(np.mean(one.right)) for one in rollouts], settings.group_size)
        loss, own = loss_of(model, batch, settings.correction)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lines.append(
            {"kind": "step", "step": step + 1, "grad_norm": float(norm)}
            | _of_policy(renderer, rollouts, reference)
            | drift(given)
            | importance(*_trained(batch, own))
        )
    examine("after")
    lines[0]["cpu_seconds"] = round(time.process_time() - began, 1)
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    part.rename(file)


@cache
def _renderer(folder: Path) -> Renderer:
    return Renderer.load(folder)


def _trained(batch: Batch, own: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the logprobs of trainer and sampler of the trained tokens of each sequence."""
    masks = batch.trained[:, 1:]
    sides = own, batch.samplers[:, 1:]
    trainers, samplers = ([row[mask].numpy() for row, mask in zip(side, masks, strict=True)] for side in sides)
    return trainers, samplers


def _of_policy(renderer: Renderer, rollouts: Sequence[Rollout], reference: Any) -> dict[str, float]:
    """Return what the policy does, whatever the trainer gets."""
    return {
        "right": float(np.mean([all(one.right) for one in rollouts])),
        "reward": float(np.mean([one.right for one in rollouts])),
        "sampled": float(np.mean([one.sampled for one in rollouts])),
        "noncanonical": drift([PATHS["retokenized"](renderer, one) for one in rollouts])["other_ids"],
        "kl": _kl_to(reference, [PATHS["recorded"](renderer, one) for one in rollouts[::4]]),
    }


@torch.no_grad()
def _kl_to(reference: Any, sessions: Sequence[Given]) -> float:
    """Estimate KL(policy || reference) in nats per sampled token from the policy's samples.

    The estimate is the mean of k3 = exp(d) - 1 - d with d = reference - policy, which has less variance than the mean
    of -d.
    """
    batch = Batch.of(sessions, [0.0] * len(sessions), len(sessions))
    _, own = loss_of(reference, batch, "none")
    apart = (own - batch.samplers[:, 1:])[batch.trained[:, 1:]].double()
    return float((torch.expm1(apart) - apart).mean())
