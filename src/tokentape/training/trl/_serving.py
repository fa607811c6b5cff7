"""A gateway in this process over the embedded engine, with the weights of the model that is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, ref

from tokentape import gateway
from tokentape.client import Client
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import EngineUnavailable

if TYPE_CHECKING:
    import torch


class Policy:
    """A gateway with the embedded engine. Made by `serving`."""

    def __init__(self, client: Client, engine: TransformersEngine) -> None:
        self.client = client
        self.engine = engine
        self._synced: tuple[ReferenceType[Any], int] | None = None

    def sync(self, trainer: Any) -> None:
        """Sample with the weights that a trainer of `transformers` has now, under its global step as their version.

        Adapters of PEFT are merged for that, and unmerged afterwards. Does nothing if that trainer's weights
        of that step are in place.
        """
        now = (ref(trainer), trainer.state.global_step)
        if self._synced != now:
            with _whole(trainer.accelerator.unwrap_model(trainer.model)) as tensors:
                self.push(tensors, str(now[1]))
            self._synced = now

    def push(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        wait: float | None = 60.0,
    ) -> None:
        """Sample with copies of these tensors from now on: of a state dict, or pairs of its names and tensors.

        New calls are held back meanwhile. Those under way are waited for, `wait` seconds at most; with None they go on,
        and the record says which of their tokens are of which version.

        Raises `EngineUnavailable` if calls are still under way then, and `EngineError` for tensors that don't fit; the
        weights are the old ones then.
        """
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        idle = self.client.pause(timeout=wait or 0.0)
        new_version: str | None = None
        try:
            if wait is not None and not idle:
                raise EngineUnavailable(f"calls are still under way after {wait:g} s; the weights were not changed")
            self.load(pairs, version)
            new_version = version
        finally:
            self.client.resume(new_version)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: str, *, partial: bool = False) -> None:
        """Load the tensors as `push` does, without pausing the gateway or setting its version.

        With `partial` tensors may be missing; those stay.
        """
        self._synced = None
        # On a thread of its own: notebooks have an event loop in this one.
        with ThreadPoolExecutor(1) as apart:
            apart.submit(asyncio.run, self.engine.push_weights(tensors, version, partial=partial)).result()


@contextmanager
def serving(
    model_dir: Path | str,
    *,
    directory: Path | str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
    threads: int | None = None,
    max_batch: int = 32,
) -> Iterator[Policy]:
    """Run a gateway on this machine's loopback for as long as the context lasts.

    The embedded engine has its own copy of the weights, first those of the folder, then what is pushed: so sampling and
    training never wait for each other, and what is recorded as one version was sampled by that version.

    Args:
        model_dir: model, tokenizer and template, as `save_pretrained` writes them.
        directory: where sessions are recorded; a temporary one, gone afterwards, if None.
        dtype: of the engine's copy. With another one than the trainer's, logprobs differ by as much as it rounds.
        device: a torch device.
        threads: torch's CPU threads, of the whole process; torch's own choice if None.
        max_batch: calls that are sampled together.

    Raises:
        TokenizerUnusable, EngineError: the folder can't be served; see `TransformersEngine.open`.

    """
    engine = TransformersEngine.open(model_dir, dtype=dtype, device=device, threads=threads, max_batch=max_batch)
    with gateway.serving(engine, model_dir, directory=directory) as url, Client(url, timeout=600.0) as client:
        yield Policy(client, engine)


@contextmanager
def _whole(model: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    """A model's weights by the names that they have without adapters, adapters merged into them."""
    if not hasattr(model, "merge_adapter"):
        yield model.state_dict()
        return
    # Unmerging subtracts what merging added, which rounds; the weights are put back as they were.
    before = [(value, value.detach().clone()) for name, value in model.named_parameters() if ".base_layer." in name]
    model.merge_adapter()
    try:
        yield {
            _without_adapters(name): value
            for name, value in model.state_dict().items()
            if model.prefix not in name and "original_module" not in name
        }
    finally:
        model.unmerge_adapter()
        for value, original in before:
            value.data.copy_(original)


def _without_adapters(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace("modules_to_save.default.", "")
