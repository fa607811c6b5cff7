"""The task, and the small policies that training starts from.

    python examples/token_paths/policy.py --out runs/policy

A policy is a Qwen3 model of 0.2 million parameters, trained from nothing on canonical ids in a minute or two.
`--dropout` adds steps with BPE dropout, for policies that sample more noncanonical tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from tokentape.demo import MODEL as DEMO_MODEL

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")
VOCABULARY = 512
ROUNDS = 2
"""Questions per session."""
SHELVES = 2
"""Items in the first message."""
SEED, BATCH = 1, 32

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Task:
    """A list of items with amounts, and the items that are asked for."""

    stock: tuple[tuple[str, int], ...]
    asked: tuple[str, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The user messages."""
        listed = ", ".join(f"{item} {amount}" for item, amount in self.stock)
        return (f"{listed}. {self.asked[0]}?", *(f"{item}?" for item in self.asked[1:]))

    def reasoning(self, turn: int) -> str:
        """The reasoning of a right reply."""
        return f"{self.asked[turn]} {dict(self.stock)[self.asked[turn]]}"

    def answer(self, turn: int) -> str:
        """The right answer."""
        return f"{dict(self.stock)[self.asked[turn]]} {self.asked[turn]}"


SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou")


def _name(rng: random.Random, split: Split) -> str:
    """Return a made-up name; a fifth of all names occur in held-out tasks only."""
    while True:
        name = "".join(rng.sample(SYLLABLES, rng.choice((2, 2, 3))))
        if (crc32(name.encode()) % 5 == 0) == (split == "heldout"):
            return name


def draw_tasks(seed: int, count: int, split: Split) -> list[Task]:
    """Draw tasks with the names of a split."""
    rng = random.Random(f"{split} {seed}")
    tasks = []
    for _ in range(count):
        items = list(dict.fromkeys(_name(rng, split) for _ in range(SHELVES + 1)))[:SHELVES]
        tasks.append(Task(tuple((item, rng.randint(2, 40)) for item in items), tuple(rng.sample(items, ROUNDS))))
    return tasks


def train_tokenizer() -> Tokenizer:
    """Learn byte-level BPE from sessions of both splits, as a real vocabulary has seen real words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tasks = [*draw_tasks(1, 1500, "train"), *draw_tasks(1, 500, "heldout")]
    texts = [
        text
        for task in tasks
        for text in (*task.prompts, *(task.answer(n) for n in range(ROUNDS)), "system\nuser\nassistant\n")
    ]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL) - len(PLAIN),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return tokenizer


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a policy's training, with an optimizer of its own."""

    seed: int
    """Of its tasks."""
    steps: int
    learning_rate: Callable[[int], float]
    """By step."""
    wrong_order: float = 0.0
    """Share of the demonstrated answers that have name and amount in the wrong order."""
    dropout: float = 0.0
    """BPE dropout in what the model is to sample."""


STAGES = (
    Stage(0, 525, lambda step: 5e-3 * min(1, (step + 1) / 30)),
    Stage(55, 200, lambda step: 4e-3 * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / 200))),
    # What is left to learn for GRPO.
    Stage(77, 30, lambda step: 7e-3 * min(1, (step + 1) / 30, (30 - step) / 200), wrong_order=0.5),
)


LONGER = {0.06: (400, 3e-3)}
"""Steps and learning rate of the stages with this dropout; 60 steps at 1e-3 do not bring a policy to 4 %."""


def with_dropout(dropout: float) -> Stage:
    """Return a further stage, which makes a policy sample more noncanonical tokens."""
    steps, rate = LONGER.get(dropout, (60, 1e-3))
    return Stage(99, steps, lambda step: rate * (steps - step) / steps, wrong_order=0.5, dropout=dropout)


def _demonstration(task: Task, wrong_order: float, rng: random.Random) -> Iterator[tuple[str, bool]]:
    """Return the text of a session in pieces, and which of them the model is to sample."""
    for turn, prompt in enumerate(task.prompts):
        yield ("\n" if turn else "") + f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", False
        answer = task.reasoning(turn) if rng.random() >= 1 - wrong_order else task.answer(turn)
        yield f"<think>\n{task.reasoning(turn)}\n</think>\n\n{answer}<|im_end|>", True


def batches(tokenizer: Tokenizer, stage: Stage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and which of them are sampled, both [sessions, tokens], for each step."""
    spelling = Tokenizer.from_str(tokenizer.to_str())
    spelling.model.dropout = stage.dropout or None
    rng = random.Random(f"order {stage.seed}")
    for step in range(stage.steps):
        rows, masks = [], []
        for task in draw_tasks(stage.seed * 100_000 + step, BATCH, "train"):
            ids: list[int] = []
            mask: list[bool] = []
            for text, sampled in _demonstration(task, stage.wrong_order, rng):
                new = (spelling if sampled else tokenizer).encode(text, add_special_tokens=False).ids
                ids += new
                mask += [sampled] * len(new)
            rows.append(torch.tensor(ids))
            masks.append(torch.tensor(mask))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(rows, batch_first=True), pad(masks, batch_first=True)


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=80,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=20,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        )
    )
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    return model


def train(model: Any, tokenizer: Tokenizer, stage: Stage) -> None:
    """Train on the sampled tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, (ids, sampled) in enumerate(batches(tokenizer, stage)):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate(step)
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        wanted = sampled[:, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"policy: step {step}, loss {loss.item():.3f}", file=sys.stderr, flush=True)


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder; its template is the one that Tokentape's demo model has."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(DEMO_MODEL / "chat_template.jinja", folder / "chat_template.jinja")
    stop, pad = model.config.eos_token_id, model.config.pad_token_id
    texts = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts) + "\n", "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, pad]}) + "\n", "utf-8")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_kept_reasoning(folder: Path) -> Path:
    """Return a folder with the same tokenizer and a template that keeps the reasoning of all turns."""
    kept = folder.with_name(f"{folder.name}-keeps")
    if not kept.exists():
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.safetensors"))
        template = kept / "chat_template.jinja"
        text = template.read_text("utf-8")
        condition = " and loop.index0 > ns.last_user"
        if text.count(condition) != 1:
            raise RuntimeError("the template drops reasoning in another way than expected")
        template.write_text(text.replace(condition, ""), "utf-8")
    return kept


def digest(folder: Path) -> str:
    """Return the first 16 digits of the SHA-256 of a policy's weights and tokenizer."""
    files = ("model.safetensors", "tokenizer.json")
    return sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()[:16]


def make(folder: Path, dropout: float = 0.0) -> Path:
    """Return the folder of a policy, trained if it is not there.

    With `dropout`, the policy without is trained further on completions in which BPE merges are skipped at random.
    """
    done = folder / f"policy-{dropout:g}"
    if done.exists():
        return done
    tokenizer = train_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(make(folder), dtype=torch.float32) if dropout else new_model(tokenizer)
    for stage in [with_dropout(dropout)] if dropout else STAGES:
        train(model, tokenizer, stage)
    part = done.with_name(f"{done.name}.part")
    save(model, tokenizer, part)
    part.rename(done)
    return done


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path("runs/policy"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(make(arguments.out, arguments.dropout))


if __name__ == "__main__":
    main()
