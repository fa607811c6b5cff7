"""Train the tiny model from nothing: tokenizer, then weights, into the folder that the package ships.

    python models/tiny/train.py [--output FOLDER]

Everything is seeded. The tokenizer comes out the same everywhere; the weights do on the same machine and library
versions. Loss is on sampled tokens only. Completions are encoded with BPE dropout, so the model learns
that a text has many spellings in tokens and, at temperature 1, uses them; context is encoded as a server does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import corpus
from demonstrations import Render, segments
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from vocabulary import END_OF_TEXT, TURN_END, TURN_START, VOCABULARY_SIZE, train_tokenizer, with_dropout

from tokentape.demo.tasks import sample_tasks

SEED = 2026
DROPOUT = 0.03
POOL = 512
LEARNING_RATE = 2e-3
EMBEDDING_LEARNING_RATE = 5e-4
FIRST_TURN_STEPS, FIRST_TURN_TOKENS = 400, 3_584
SESSION_STEPS, SESSION_TOKENS = 800, 6_144
MODEL_FOLDER = Path(__file__).parents[2] / "src" / "tokentape" / "demo" / "model"
TEMPLATE = MODEL_FOLDER / "chat_template.jinja"

Conversation = tuple[list[int], list[bool]]
"""Ids, and which of them were sampled."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Ids and where the loss is, both [conversations, tokens]."""


def save_tokenizer(folder: Path) -> None:
    """Train the tokenizer and write it with the template and the configs that belong to it."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder != MODEL_FOLDER:
        shutil.copy(TEMPLATE, folder / TEMPLATE.name)
    rng = random.Random(SEED)
    render = template_renderer(TEMPLATE.read_text())
    conversations = (
        "".join(segment.text for segment in segments(task, render, TURN_END, rng))
        for task in sample_tasks(SEED, 2_000, "train")
    )
    tokenizer = train_tokenizer((*corpus(SEED), *conversations))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    )


def template_renderer(template: str) -> Render:
    """The chat template as a function, with the filters that transformers gives it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: list[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = False) -> str:
        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt
        )
        return str(rendered[0])

    return render


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 model with seeded random weights."""
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(TURN_END),
            pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        )
    )
    # Far enough apart, and then moved slowly, that rare words stay distinguishable: without this the model
    # learns that a noun comes next long before it can tell which one.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    return model


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the weights as float16, and a config that makes every loader compute in float32."""
    half = {name: tensor.half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    write_json(folder / "config.json", config)
    stops = [model.config.eos_token_id, model.config.pad_token_id]
    write_json(folder / "generation_config.json", {"eos_token_id": stops, "pad_token_id": model.config.pad_token_id})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final line end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def conversations(tokenizer: Tokenizer, render: Render) -> Iterator[Conversation]:
    """Endless whole sessions: context spelt as a server spells it, completions with BPE dropout."""
    rng = random.Random(SEED)
    spelling = with_dropout(tokenizer, DROPOUT)
    for seed in itertools.count(1):
        for task in sample_tasks(seed, POOL, "train"):
            ids: list[int] = []
            sampled: list[bool] = []
            for segment in segments(task, render, TURN_END, rng):
                new = (spelling if segment.sampled else tokenizer).encode(segment.text, add_special_tokens=False).ids
                ids += new
                sampled += [segment.sampled] * len(new)
            yield ids, sampled


def first_turns(tokenizer: Tokenizer, render: Render) -> Iterator[Conversation]:
    """The first user message of each session and the first completion, with neither system message nor tools."""
    user = tokenizer.encode(f"{TURN_START}user", add_special_tokens=False).ids[-1]
    for ids, sampled in conversations(tokenizer, render):
        start = ids.index(user) - 1
        end = sampled.index(False, sampled.index(True)) if False in sampled[sampled.index(True) :] else len(ids)
        yield ids[start:end], sampled[start:end]


def batches(source: Iterator[Conversation], tokens: int) -> Iterator[Batch]:
    """Endless batches of conversations of similar length, about `tokens` each, in random order."""
    rng = random.Random(SEED)
    while True:
        pool = sorted(itertools.islice(source, POOL), key=lambda conversation: len(conversation[0]))
        chunks: list[list[Conversation]] = [[]]
        for conversation in pool:
            if (len(chunks[-1]) + 1) * len(conversation[0]) > tokens:
                chunks.append([])
            chunks[-1].append(conversation)
        rng.shuffle(chunks)
        yield from map(_pad, chunks)


def _pad(chunk: list[Conversation]) -> Batch:
    ids = torch.zeros(len(chunk), len(chunk[-1][0]), dtype=torch.long)
    sampled = torch.zeros_like(ids, dtype=torch.bool)
    for row, (row_ids, row_sampled) in enumerate(chunk):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        sampled[row, : len(row_ids)] = torch.tensor(row_sampled)
    return ids, sampled


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the sampled tokens. Padding is on the right, so causality hides it."""
    ids, sampled = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = sampled[:, 1:]
    # Logits only where they count: the vocabulary is most of the model's arithmetic.
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rates: linear warm-up over the first 30 steps, then a cosine down to nothing."""
    return min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: Qwen3ForCausalLM, source: Iterator[Batch], steps: int) -> None:
    """Train in place on `steps` batches."""
    embedding = model.model.embed_tokens.weight
    others = [parameter for parameter in model.parameters() if parameter is not embedding]
    optimizer = torch.optim.AdamW(
        [
            {"params": [embedding], "lr": EMBEDDING_LEARNING_RATE, "weight_decay": 0.0},
            {"params": [parameter for parameter in others if parameter.ndim > 1], "weight_decay": 0.05},
            {"params": [parameter for parameter in others if parameter.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    model.train()
    started = time.monotonic()
    for step, batch in enumerate(itertools.islice(source, steps)):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    save_tokenizer(arguments.output)
    tokenizer = Tokenizer.from_file(str(arguments.output / "tokenizer.json"))
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters", file=sys.stderr)
    render = template_renderer(TEMPLATE.read_text())
    lessons = itertools.chain(
        itertools.islice(batches(first_turns(tokenizer, render), FIRST_TURN_TOKENS), FIRST_TURN_STEPS),
        itertools.islice(batches(conversations(tokenizer, render), SESSION_TOKENS), SESSION_STEPS),
    )
    train(model, lessons, FIRST_TURN_STEPS + SESSION_STEPS)
    save_model(model, arguments.output)


if __name__ == "__main__":
    main()
