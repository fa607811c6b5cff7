"""Key-value tensors of the embedded engine: the running batch, and a cache of finished requests.

A batch is padded on the left, so that the next token of every row is in the same new column. The attention mask hides
the padding and position ids count only real tokens, so a row has the same results as without the batch. Models that
support images give image patches three-dimensional positions, and shift the positions of later tokens.

The experts to which a model routed each token can be read too, so that a trainer can replay the routing. Contexts with
a common prefix share its cached keys and values. The experts recorded for one context apply to the others if the model
routes equal prefixes to the same experts.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicLayer

from tokentape.engines._base import Payload, common_prefix

LayerTensors: TypeAlias = list[tuple[Tensor, Tensor]]
"""One request's keys and values, one pair per layer, each [heads, tokens, head size]."""

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached keys and values of the first `length` tokens of a context."""

    length: int
    layers: LayerTensors
    """The tensors, which may contain more than `length` tokens."""


NO_PREFIX = Prefix(0, [])


class DecodeBatch:
    """The key-value tensors of the rows that decode together, and their padding mask."""

    def __init__(self, model: Any) -> None:
        self.model = model
        """The model to compute with. A replacement has tensors of the same shapes, with new values."""
        self.reads_experts = False
        """Whether the next forward passes set `experts`."""
        self.experts: Tensor | None = None
        """The experts chosen in the last forward pass, int64 [rows, columns, layers, top k], if it collected them."""
        self.adapters: tuple[Any, list[str]] | None = None
        """The model with adapters for the next forward pass, and each row's `Adapter.key`; None for the base model."""
        self._device = model.device
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._forward_options: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits else {}
        self._cache_name = cache_name(model)
        self._expert_layers: tuple[Any, list[Any]] = None, []
        """A model and its `expert_layers`, cached because finding them for each token takes too long."""
        self._cache = _empty_cache()
        self._mask = torch.zeros((0, 0), dtype=torch.int64, device=self._device)
        self._shifts = torch.zeros((0, 1), dtype=torch.int64, device=self._device)
        """For each row, the position of the next token minus the number of tokens so far."""

    def __len__(self) -> int:
        return int(self._mask.shape[0])

    def prefill(
        self, contexts: Sequence[Ids], prefixes: Sequence[Prefix], images: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Compute new rows together, append them to the batch, and return their logits, float32 [new rows, vocab].

        All rows compute as many columns as the row that needs the most, so that no row has padding between its tokens.
        The other rows may recompute part of their prefix.

        Args:
            contexts: one array of ids per new row.
            prefixes: the cached prefix of each row, which is shorter than its context.
            images: `Request.images`, if the row has images. It must be the only new row, and its prefix must contain
                all images or none.

        """
        lengths = [len(context) for context in contexts]
        width = max(lengths)
        fresh = max(len(context) - prefix.length for context, prefix in zip(contexts, prefixes, strict=True))
        reused = width - fresh
        ids = np.zeros((len(contexts), fresh), dtype=np.int64)
        mask = np.zeros((len(contexts), width), dtype=np.int64)
        for row, context in enumerate(contexts):
            tail = context[-fresh:]
            ids[row, fresh - len(tail) :] = tail
            mask[row, width - len(context) :] = 1
        cache = _empty_cache()
        if reused:
            for index, (keys, values) in enumerate(_stacked(prefixes, lengths, fresh)):
                cache.update(keys, values, index)
        mask_tensor = torch.from_numpy(mask).to(self._device)
        new_ids = torch.from_numpy(ids).to(self._device)
        shifts = mask_tensor.new_zeros((len(contexts), 1))
        if images:
            positions, shifts, seen = self._place(contexts[0], images, reused)
        else:
            positions, seen = (mask_tensor.cumsum(-1) - 1).clamp(min=0)[:, reused:], {}
        logits = self._forward(new_ids, mask_tensor, positions, cache, seen)
        self._append(cache, mask_tensor, shifts)
        return logits

    def _place(
        self, context: Ids, images: Mapping[str, Tensor], reused: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the positions for a row with images, int64 [3, 1, fresh], its shift, and the images to compute."""
        inputs = {name: values.to(self._device) for name, values in images.items()}
        kinds = inputs.pop("mm_token_type_ids")[None]
        ids = torch.from_numpy(context).to(self._device)[None]
        positions, shift = self.model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=inputs["image_grid_thw"]
        )
        all_cached = not kinds[0, reused:].any()
        return positions[:, :, reused:], shift.reshape(1, 1), {} if all_cached else inputs

    def decode(self, last_ids: Sequence[int]) -> Tensor:
        """Append each row's last sampled id. Return the logits for the next token, float32 [rows, vocab]."""
        ids = torch.tensor(last_ids, dtype=torch.int64, device=self._device).unsqueeze(-1)
        positions = self._mask.sum(-1, keepdim=True) + self._shifts
        self._mask = pad(self._mask, (0, 1), value=1)
        return self._forward(ids, self._mask, positions, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, without the columns that are padding in all of them."""
        if not rows:
            self.clear()
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        mask = self._mask[index]
        start = int(mask.shape[1] - mask.sum(-1).max())
        self._mask, self._shifts = mask[:, start:], self._shifts[index]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index, :, start:], layer.values[index, :, start:]

    def clear(self) -> None:
        """Drop all rows."""
        self._cache = _empty_cache()
        self._mask, self._shifts = self._mask.new_zeros((0, 0)), self._shifts.new_zeros((0, 1))

    def row(self, row: int) -> LayerTensors:
        """Return a copy of one row's keys and values, without padding."""
        start = int(self._mask.shape[1] - self._mask[row].sum())
        return [
            (layer.keys[row, :, start:].clone(), layer.values[row, :, start:].clone()) for layer in self._cache.layers
        ]

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, images: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        model, keys = (self.model, None) if self.adapters is None else self.adapters
        if images and keys is not None:
            # peft chooses adapters by row, but the inputs of an image encoder are patches. This row is alone.
            (key,), keys = keys, None
            if key in model.peft_config:
                model.set_adapter(key)  # which unfreezes it
                model.requires_grad_(False)
            else:
                model = self.model
        options = self._forward_options | {self._cache_name: cache} | ({} if keys is None else {"adapter_names": keys})
        if self.reads_experts and self._expert_layers[0] is not model:
            self._expert_layers = model, expert_layers(model)
        with chosen_experts(self._expert_layers[1] if self.reads_experts else []) as chosen:
            output = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **options, **(images or {})
            )
        self.experts = torch.stack(chosen, 1).reshape(*ids.shape, len(chosen), -1) if chosen else None
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _append(self, cache: Any, mask: Tensor, shifts: Tensor) -> None:
        if not len(self):
            self._cache, self._mask, self._shifts = cache, mask, shifts
            return
        self._shifts = torch.cat([self._shifts, shifts])
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_widened(self._mask, width), _widened(mask, width)])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widened(old.keys, width, -2), _widened(new.keys, width, -2)])
            old.values = torch.cat([_widened(old.values, width, -2), _widened(new.values, width, -2)])


def cache_name(model: Any) -> str:
    """Return the name of the model's cache argument and output, which transformers 5.24 renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _empty_cache() -> Any:
    return Cache(layer_class_to_replicate=DynamicLayer)


def _widened(tensor: Tensor, width: int, dim: int = -1) -> Tensor:
    """Pad dimension `dim` with zeros on the left."""
    missing = width - tensor.shape[dim]
    return pad(tensor, (0, 0) * (-1 - dim) + (missing, 0)) if missing else tensor


def _stacked(prefixes: Sequence[Prefix], lengths: Sequence[int], fresh: int) -> LayerTensors:
    """Stack the rows' cached prefixes into tensors, [rows, heads, reused columns, head size]."""
    reused = max(lengths) - fresh
    template = next(prefix.layers for prefix in prefixes if prefix.length)

    def stack(layer: int, which: int) -> Tensor:
        heads, _, size = template[layer][which].shape
        out = template[layer][which].new_zeros((len(prefixes), heads, reused, size))
        for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
            count = max(length - fresh, 0)
            if count:
                out[row, :, reused - count :] = prefix.layers[layer][which][:, :count]
        return out

    return [(stack(layer, 0), stack(layer, 1)) for layer in range(len(template))]


class PrefixCache:
    """Keys and values of finished requests. The least recently used are dropped first.

    Any common prefix is reused, so that a session's next turn computes only its new tokens.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[Hashable, bytes], tuple[Ids, LayerTensors]] = OrderedDict()

    def put(self, ids: Ids, layers: LayerTensors, weights: Hashable = None) -> None:
        """Store the keys and values of a finished request. `layers` has exactly the tokens in `ids`.

        Only lookups with equal `weights`, for example the same adapter, return them.
        """
        size = _size(layers)
        if size > self._max_bytes:
            return
        for key, (stored, _) in list(self._entries.items()):
            if key[0] != weights:
                continue
            common = common_prefix(stored, ids)
            if common == len(ids):
                self._entries.move_to_end(key)
                return
            if common == len(stored):
                self._drop(key)
        self._entries[weights, ids.tobytes()] = (ids, layers)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def longest(self, context: Ids, weights: Hashable = None) -> Prefix:
        """Return the longest cached prefix of `context`, excluding its last token."""
        entries = [(key, stored) for key, (stored, _) in self._entries.items() if key[0] == weights]
        lengths = {key: common_prefix(stored, context[:-1]) for key, stored in entries}
        best = max(lengths, key=lambda key: lengths[key], default=None)
        if best is None or not lengths[best]:
            return NO_PREFIX
        self._entries.move_to_end(best)
        return Prefix(lengths[best], self._entries[best][1])

    def clear(self) -> None:
        """Drop all entries, for example after a weight update."""
        self._entries.clear()
        self._bytes = 0

    def _drop(self, key: tuple[Hashable, bytes]) -> None:
        _, layers = self._entries.pop(key)
        self._bytes -= _size(layers)


def _size(layers: LayerTensors) -> int:
    return sum(tensor.nbytes for pair in layers for tensor in pair)


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
