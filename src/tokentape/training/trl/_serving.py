"""Run a gateway in the trainer's process, with the embedded engine and the trainer's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from tokentape import gateway
from tokentape.client import Client
from tokentape.engines._base import Dtype
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import EngineUnavailable

if TYPE_CHECKING:
    import torch


class Policy:
    """A gateway with the embedded engine, made by `serving`."""

    def __init__(self, client: Client, engine: TransformersEngine) -> None:
        self.client = client
        self.engine = engine
        self._synced: tuple[ReferenceType[Any], int] | None = None

    def sync(self, trainer: Any) -> None:
        """Copy the current weights of a `transformers` trainer to the engine. The version is the trainer's global step.

        PEFT adapters are merged for the copy and unmerged afterwards. Does nothing if the engine already has this
        trainer's weights of this step.
        """
        current = (ref(trainer), trainer.state.global_step)
        if self._synced != current:
            with _merged(trainer.accelerator.unwrap_model(trainer.model)) as tensors:
                self.push(tensors, str(current[1]))
            self._synced = current

    def push(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: str,
        *,
        wait: float | None = 60.0,
    ) -> None:
        """Copy the tensors of a state dict, or (name, tensor) pairs, to the engine as the weights named `version`.

        New calls wait until the weights are loaded. Calls in flight get up to `wait` seconds to finish. With None, they
        continue with the new weights, and the record states which version sampled each token.

        Raises `EngineUnavailable` if calls are still in flight after `wait` seconds, and `EngineError` if the tensors
        don't fit the model. In both cases the engine keeps the old weights.
        """
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        idle = self.client.pause(timeout=wait or 0.0)
        new_version: str | None = None
        try:
            if wait is not None and not idle:
                raise EngineUnavailable(
                    f"calls are still in flight after {wait:g} s, so the weights were not changed: pass a longer "
                    "`wait`, or None to change the weights during the calls"
                )
            self.load(pairs, version)
            new_version = version
        finally:
            self.client.resume(new_version)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: str, *, partial: bool = False) -> None:
        """Load tensors into the engine, as `push` does, but without pausing the gateway or setting its version.

        With `partial`, weights whose tensors are missing stay as they are.
        """
        self._synced = None
        # In a new thread, because in notebooks an event loop already runs in this thread.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, self.engine.push_weights(tensors, version, partial=partial)).result()


@contextmanager
def serving(
    model_dir: Path | str,
    *,
    directory: Path | str | None = None,
    dtype: Dtype = "float32",
    device: str = "cpu",
    threads: int | None = None,
    max_batch: int = 32,
) -> Iterator[Policy]:
    """Run a gateway with the embedded engine on 127.0.0.1 until the context ends.

    The engine has its own copy of the weights: at first the weights in `model_dir`, later the weights that you push.
    So sampling and training never wait for each other, and the recorded weight version is the one that sampled.

    Args:
        model_dir: Folder with model, tokenizer and chat template, as `save_pretrained` writes it.
        directory: Where to record sessions. With None, a temporary directory that is deleted at the end.
        dtype: Precision of the engine's weights. If the trainer uses another dtype, logprobs differ by rounding.
        device: The torch device of the engine.
        threads: Number of torch CPU threads for the whole process. With None, torch chooses.
        max_batch: Maximum number of calls that are sampled together.

    Raises:
        TokenizerUnusable, EngineError: The folder can't be served; see `TransformersEngine.open`.

    """
    engine = TransformersEngine.open(model_dir, dtype=dtype, device=device, threads=threads, max_batch=max_batch)
    with gateway.serving(engine, model_dir, directory=directory) as url, Client(url, timeout=600.0) as client:
        yield Policy(client, engine)


@contextmanager
def _merged(model: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    """Merge adapters, and yield the weights under the names that they have in the base model."""
    if not hasattr(model, "merge_adapter"):
        yield model.state_dict()
        return
    # Unmerging subtracts the adapters again, which rounds. So restore the original weights afterwards.
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
