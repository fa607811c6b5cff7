"""Read which experts a model routed each token to, so that a trainer can replay the routing.

Contexts with a common prefix share its cached keys and values. The experts recorded for one context apply to the
others if the model routes equal prefixes to the same experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tokentape.engines._base import Payload

_CHOSEN = ("top_k_index", "router_indices", "selected_experts")
"""Names in transformers 5.23 of the argument with each token's chosen experts, int64 [tokens, top k]."""


def expert_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that compute each layer's experts, in order, with the name of their argument in `_CHOSEN`."""
    names: dict[type[nn.Module], str | None] = {}
    for module in model.modules():
        if type(module) not in names:
            parameters = inspect.signature(type(module).forward).parameters
            names[type(module)] = next((name for name in _CHOSEN if name in parameters), None)
    return [(module, name) for module in model.modules() if (name := names[type(module)])]


@contextmanager
def chosen_experts(layers: list[tuple[nn.Module, str]]) -> Iterator[list[Tensor]]:
    """Collect the experts chosen in this thread's forward passes in the block, [rows * columns, top k] per layer."""
    chosen: list[Tensor] = []
    reading, own = True, get_ident()

    def collect(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy of the model made meanwhile for new weights keeps the hooks, and other threads compute scores.
        if reading and get_ident() == own:
            chosen.append(inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments[name])

    hooks = [module.register_forward_pre_hook(partial(collect, name), with_kwargs=True) for module, name in layers]
    try:
        yield chosen
    finally:
        reading = False
        for hook in hooks:
            hook.remove()


class ExpertRows:
    """The experts of one request's tokens, from the token at offset `start` on, appended as they are computed."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._rows: list[npt.NDArray[np.int16]] = []

    def append(self, first: int, rows: Tensor) -> None:
        """Append rows, [tokens, layers, top k]. The first row is for the token at offset `first` of the context."""
        rows = rows[max(self.start - first, 0) :]
        self._rows.append(rows.to("cpu", torch.int16).numpy())

    def payloads(self) -> tuple[Payload, ...]:
        """Return `SampleDelta.payloads` for the last delta."""
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, np.int16)
        return (Payload("routed_experts", self.start, rows),) if len(rows) else ()
