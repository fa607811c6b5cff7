"""GRPO on truncated samples, with and without the recorded supports.

    python examples/token_paths/truncation.py --out runs/truncation        # 20 runs; complete ones are skipped
    python examples/token_paths/truncation.py --out runs/truncation --table

Sessions are sampled with top-p, and their logprobs are those over the ids that it kept. The arm `supports` computes the
trainer's logprobs over the same ids; `whole` computes them over the whole vocabulary, as a trainer without supports
does. Both have the same start, tasks and random numbers. The loss is GRPO's with its clipping: the recorded logprobs
are the old ones, as with a rollout engine's logprobs in verl, TRL or prime-rl.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import policy
import torch
from paths import PATHS, Rollout
from rollouts import play
from run import Batch
from transformers import Qwen3ForCausalLM

from tokentape._supports import pack
from tokentape.chat import Renderer
from tokentape.engines import SamplingParams
from tokentape.engines._sampling import distribution, draw
from tokentape.training import kept_ids, renormalized_logprobs

SEEDS = 5
TOP_P = (0.9, 0.6)
T_QUANTILE = 2.776
"""Of 97.5 %, with as many degrees of freedom as seeds less one."""
CLIP = 0.2
STEPS, GROUPS, GROUP_SIZE, HELDOUT = 10, 5, 8, 128
LEARNING_RATE = 5e-4
VOCABULARY_SIZE = 4096
"""The most ids to record of a support: more than the vocabulary has."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run."""

    arm: str
    """`supports` or `whole`."""
    top_p: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file."""
        return f"{self.arm}_top-p{self.top_p:g}_seed{self.seed}"


class Truncating:
    """Chooses ids as the embedded engine does with top-p, and keeps their supports; see `rollouts.Choose`."""

    def __init__(self, top_p: float) -> None:
        self._params = SamplingParams(1, top_p=top_p)
        self.steps: list[list[bytes]] = []
        """Supports of each step, by row."""

    def __call__(self, logits: torch.Tensor, numbers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose an id per row."""
        shares = distribution(logits, [self._params] * len(logits))
        ids = draw(shares, numbers.tolist())
        self.steps.append([pack(row.nonzero()[:, 0].numpy(), VOCABULARY_SIZE) for row in shares])
        return ids, (shares.gather(1, ids[:, None])[:, 0] / shares.sum(-1)).log().float()

    def of(self, rollouts: list[Rollout]) -> list[list[bytes]]:
        """Return the supports of the sampled tokens of each session."""
        found: list[list[bytes]] = [[] for _ in rollouts]
        begin = 0
        for turn in range(policy.ROUNDS):
            lengths = [len(one.turns[turn].completion_ids) for one in rollouts]
            for row, length in enumerate(lengths):
                found[row] += [self.steps[begin + step][row] for step in range(length)]
            begin += max(lengths)
        return found


def loss_of(model: Any, batch: Batch, supports: Any, arm: str) -> tuple[torch.Tensor, dict[str, float]]:
    """Return GRPO's clipped loss, and numbers about the batch. `supports` [sequences, tokens - 1] are bytes."""
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    mask, ids = batch.trained[:, 1:], batch.ids[:, 1:]
    over_kept = renormalized_logprobs(logits, ids, supports)
    whole = torch.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0]
    own = over_kept if arm == "supports" else whole
    ratio = torch.where(mask, (own - batch.samplers[:, 1:]).exp(), 1.0)
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    with torch.no_grad():
        shares = logits.softmax(-1)[mask]
        numbers = {
            "apart": float((over_kept - batch.samplers[:, 1:])[mask].abs().max()),
            "ratio": float(ratio[mask].mean()),
            "kept_mass": float((whole - over_kept)[mask].exp().mean()),
            "clipped": float((gain < ratio * advantages)[mask].float().mean()),
            "entropy": float(-(shares * shares.clamp(min=1e-12).log()).sum(-1).mean()),
        }
    return -(gain * mask).sum() / mask.sum(), numbers


def run(settings: Settings, policies: Path, file: Path) -> None:
    """Train once; write a line for the settings, one per step, and one for held-out tasks before and after."""
    folder = policy.make(policies)
    renderer = Renderer.load(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    heldout = policy.draw_tasks(2_000 + settings.seed, HELDOUT, "heldout")
    tasks = policy.draw_tasks(1_000 + settings.seed, STEPS * GROUPS, "train")
    began = time.process_time()
    lines: list[dict[str, Any]] = [{"kind": "settings", **asdict(settings), "policy": policy.digest(folder)}]

    def examine(kind: str) -> None:
        rollouts = play(model, renderer, heldout, 10**6 + settings.seed, choose=Truncating(settings.top_p))
        lines.append({"kind": kind, "right": float(np.mean([all(one.right) for one in rollouts]))})

    examine("before")
    for step in range(STEPS):
        chosen = [task for task in tasks[step * GROUPS : (step + 1) * GROUPS] for _ in range(GROUP_SIZE)]
        truncating = Truncating(settings.top_p)
        rollouts = play(model, renderer, chosen, settings.seed * 1000 + step, choose=truncating)
        given = [PATHS["recorded"](renderer, one) for one in rollouts]
        rewards = [float(np.mean(one.right)) for one in rollouts]
        batch = Batch.of(given, rewards, GROUP_SIZE)
        supports = np.full(batch.ids.shape, b"", object)
        for row, (one, kept) in enumerate(zip(given, truncating.of(rollouts), strict=True)):
            supports[row, np.flatnonzero(one.loss_mask)] = np.array(kept, object)
        loss, numbers = loss_of(model, batch, supports[:, 1:], settings.arm)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sizes = [len(ids) for one in supports.ravel() if (ids := kept_ids(one)) is not None]
        lines.append(
            {"kind": "step", "step": step + 1, "reward": float(np.mean(rewards)), "grad_norm": float(norm), **numbers}
            | {"kept": float(np.mean(sizes))}
        )
    examine("after")
    lines[0]["cpu_seconds"] = round(time.process_time() - began, 1)
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    part.rename(file)


def table(folder: Path) -> str:
    """Return a table for each top-p with all runs: means over seeds, and paired differences with 95 % t intervals."""

    def interval(values: Any) -> str:
        values = np.asarray(values)
        half = T_QUANTILE * values.std(ddof=1) / len(values) ** 0.5
        return f"{values.mean():.3f} ± {half:.3f}"

    rows = ["| top-p | measure | with supports | without | difference |", "|---|---|---|---|---|"]
    for top_p in TOP_P:
        found: dict[str, dict[str, list[float]]] = {"supports": {}, "whole": {}}
        runs = [{arm: folder / f"{Settings(arm, top_p, seed).name}.jsonl" for arm in found} for seed in range(SEEDS)]
        if not all(file.exists() for files in runs for file in files.values()):
            continue
        for files in runs:
            for arm, file in files.items():
                lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
                steps = [line for line in lines if line["kind"] == "step"]
                values = {
                    f"held-out tasks right, {line['kind']}": line["right"]
                    for line in lines
                    if line["kind"] in ("before", "after")
                }
                for name in ("ratio", "kept_mass", "clipped", "entropy", "grad_norm"):
                    values[f"{name}, mean over steps"] = float(np.mean([step[name] for step in steps]))
                values["entropy, last step"] = steps[-1]["entropy"]
                values["apart, largest"] = max(step["apart"] for step in steps)
                for name, value in values.items():
                    found[arm].setdefault(name, []).append(value)
        for name, ours in found["supports"].items():
            theirs = found["whole"][name]
            apart = np.subtract(theirs, ours)
            if name == "apart, largest":
                rows.append(f"| {top_p:g} | {name} | {max(ours):.1e} | {max(theirs):.1e} | |")
            else:
                rows.append(f"| {top_p:g} | {name} | {interval(ours)} | {interval(theirs)} | {interval(apart)} |")
    return "\n".join(rows)


def main() -> None:
    """Parse the command line and run what is not complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/truncation"))
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        for settings in (
            Settings(arm, p, seed) for p in TOP_P for seed in range(SEEDS) for arm in ("supports", "whole")
        ):
            file = arguments.out / f"{settings.name}.jsonl"
            if not file.exists():
                run(settings, arguments.out / "policies", file)
                print(settings.name, flush=True)
    print(table(arguments.out))


if __name__ == "__main__":
    main()
