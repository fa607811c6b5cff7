"""Mixtures of experts for tests: some route randomly, and each can replay recorded routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def write_mixture(
    folder: Path, kind: str = "Qwen3Moe", *, rows: int = 320, layers: int = 2, context: int = 4096
) -> Path:
    """Write a randomly initialized mixture of 8 experts per layer, of which each token takes 2."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=context,
        initializer_range=0.2,
        sliding_window=None,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def _route(logits: Any, chosen: Any) -> tuple[Any, Any, Any]:
    """Return a router's forward: gates are of the clean logits, however the experts were chosen."""
    scores = logits.float().softmax(-1).gather(-1, chosen)
    return logits, (scores / scores.sum(-1, keepdim=True)).to(logits.dtype), chosen


def route_by_chance(model: Any, seed: int) -> None:
    """Add noise to the choice of experts, as other kernels and batches do on a cluster."""
    noise = torch.Generator().manual_seed(seed)
    for router in routers(model):
        router.register_forward_hook(
            lambda router, _, out: _route(
                out[0],
                (out[0] + torch.randn(out[0].shape, generator=noise).to(out[0].device)).topk(router.top_k).indices,
            )
        )


@contextmanager
def routed_as(model: Any, rows: Any) -> Iterator[None]:
    """Route the tokens of a forward pass by `rows`, integers [tokens, layers, top k]."""
    chosen = torch.as_tensor(rows).long()

    def replay(layer: int) -> Any:
        return lambda _, __, out: _route(out[0], chosen[:, layer])

    hooks = [router.register_forward_hook(replay(layer)) for layer, router in enumerate(routers(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def replayed(model: Any, ids: Any, rows: Any = None) -> Any:
    """Return the logprobs of `ids[1:]` with routing by `rows`, or by the model."""
    ids = torch.as_tensor(ids).long()
    with torch.no_grad(), nullcontext() if rows is None else routed_as(model, rows[: len(ids) - 1]):
        logits = model(ids[None, :-1]).logits[0]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
