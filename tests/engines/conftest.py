"""A randomly initialised Qwen3 with a byte-level tokenizer, small enough to build for every test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forwards import Forwards
from tests.waiting import PATIENCE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = ["the model samples tokens, the record keeps them; überall Ünïcödé 🙂 日本語 for (int i = 0; i < n; i++)"]
EMBEDDING_ROWS = 320
"""More than the tokenizer has ids, as in many published models."""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def make_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a model folder; keywords change its config."""

    def make(*, seed: int = 0, **config: object) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        settings = {
            "vocab_size": EMBEDDING_ROWS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            # Far from uniform, so that a wrong position or mask shows in the logprobs.
            "initializer_range": 0.2,
        }
        folder = tmp_path_factory.mktemp("model")
        # A model this small only waits for a second thread, and long if other processes are busy.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**(settings | config))).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="session")
def untrained_dir(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def model(untrained_dir: Path) -> Any:
    """Return the plain model, the slow reference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(untrained_dir).eval().requires_grad_(False)


@pytest.fixture
def forwards() -> Iterator[Forwards]:
    """Record and hold the engine's forward passes. Patches the class, because the engine's model is private."""
    from transformers import Qwen3ForCausalLM

    shapes = Forwards()
    original = Qwen3ForCausalLM.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "logits_to_keep" in kwargs:  # not a reference pass
            shapes.append(tuple(kwargs["input_ids"].shape))
            assert shapes.go_on.wait(PATIENCE)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, "__call__", counted)
        yield shapes
