"""The thread of the embedded engine, the only one that samples with the model, with continuous batching.

Between two decoding steps, waiting requests join the batch, and finished or cancelled ones leave it. The size of a
prefill is limited, so that new requests delay the running ones by at most one prefill.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokentape.engines._adapters import Adapters
from tokentape.engines._kv import NO_PREFIX, DecodeBatch, Prefix, PrefixCache
from tokentape.engines._requests import Request, TokenSampler
from tokentape.errors import EngineError

_PREFILL_TOKENS = 2048
"""Limit on rows times columns in one prefill. A single longer prompt is still computed in one pass."""


class Worker:
    """Owns the model, its batch and its prefix cache, and runs all requests on one thread.

    At most `max_batch` rows decode together; further requests wait. `prefix_cache_bytes` limits the memory for the keys
    and values of finished requests; 0 keeps none.
    """

    def __init__(
        self, model: Any, sampler: TokenSampler, adapters: Adapters, *, max_batch: int, prefix_cache_bytes: int
    ) -> None:
        self._batch = DecodeBatch(model)
        self._adapters = adapters
        self._sampler = sampler
        self._max_batch = max_batch
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self._inbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        """Requests, and functions to call between two steps. None ends the thread."""
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._thread = threading.Thread(target=self._run, name="tokentape-transformers", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running and processes requests."""
        return self._thread.is_alive()

    @property
    def adapters(self) -> Collection[str]:
        """The names of the adapters."""
        return self._adapters.current.keys()

    def submit(self, request: Request) -> None:
        """Queue a request. It joins the batch as soon as there is room."""
        self._inbox.put(request)

    def swap_model(self, model: Any, weight_version: str) -> Future[None]:
        """Replace the model between two steps. Running requests continue and keep their keys and values.

        The future raises `EngineError` if tensor names or shapes differ, or if adapters are loaded.
        """

        def swap() -> None:
            if self._adapters.current:
                raise EngineError("weights can't be updated while adapters are loaded: open a new engine instead")
            if _shapes(model) != _shapes(self._batch.model):
                raise EngineError("the new weights have different tensor names or shapes: open a new engine instead")
            for request in self._running:
                self._sampler.flush(request)
                request.one_version = False
            if self._prefixes is not None:
                self._prefixes.clear()
            self._batch.model = model
            self._sampler.weight_version = weight_version

        return self._between_steps(swap)

    def load_adapter(self, name: str, folder: Path, version: str) -> Future[None]:
        """Load an adapter version between two steps; see `Adapters.load`. Running calls keep their version."""

        def load() -> None:
            used = [request.adapter.key for request in (*self._running, *self._waiting) if request.adapter is not None]
            self._adapters.load(name, folder, version, used)

        return self._between_steps(load)

    def _between_steps(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except Exception as error:  # the thread continues
                done.set_exception(error)
            else:
                done.set_result(None)

        self._inbox.put(run)
        return done

    def stop(self) -> None:
        """Abort all requests and wait for the thread to end."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    self._retire()
                    self._admit()
                    self._decode()
        finally:
            for request in [*self._running, *self._waiting]:
                self._sampler.finish(request, "abort")

    def _receive(self) -> bool:
        """Call functions and queue requests that arrived; wait if idle. Return False if the thread should end."""
        while True:
            try:
                item = self._inbox.get(block=not self._running and not self._waiting)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Request):
                item.adapter = self._adapters.current.get(item.params.adapter or "")
                self._waiting.append(item)
            else:
                item()

    def _admit(self) -> None:
        """Prefill one group of waiting requests, in order of arrival, and sample their first tokens."""
        waiting = self._waiting
        joining: list[Request] = []
        prefixes: list[Prefix] = []
        widest = 0
        while waiting and len(self._running) + len(joining) < self._max_batch:
            request = waiting[0]
            if request.cancelled:
                self._sampler.finish(waiting.popleft(), "abort")
                continue
            prefix = self._known_prefix(request)
            widest = max(widest, len(request.prompt_ids) - prefix.length)
            if joining and (request.images or widest * (len(joining) + 1) > _PREFILL_TOKENS):
                break
            joining.append(waiting.popleft())
            prefixes.append(prefix)
            if request.images:
                break
        if joining:
            contexts = [request.prompt_ids for request in joining]
            self._step(joining, lambda: self._batch.prefill(contexts, prefixes, joining[0].images))

    def _known_prefix(self, request: Request) -> Prefix:
        """Return the cached prefix of a request's prompt. A prefix that cuts an image is not used.

        It ends before the first token with experts to report, because experts are not cached.
        """
        prefix = (
            self._prefixes.longest(request.prefix_key, request.adapter) if self._prefixes is not None else NO_PREFIX
        )
        if request.experts is not None and request.experts.start < prefix.length:
            prefix = replace(prefix, length=request.experts.start)
        cuts_image = request.images and request.images["mm_token_type_ids"][prefix.length :].any()
        return NO_PREFIX if cuts_image else prefix

    def _decode(self) -> None:
        """Sample one more token for every row."""
        if self._running:
            last_ids = [request.ids[-1] for request in self._running]
            self._step(self._running, lambda: self._batch.decode(last_ids))

    def _step(self, requests: list[Request], forward: Callable[[], Tensor]) -> None:
        """Compute the logits of these requests with `forward`, and sample one token for each.

        An error in the model fails the whole batch, because its tensors may be invalid.
        """
        try:
            self._batch.reads_experts = any(request.experts for request in requests)
            self._batch.adapters = self._adapters.of([request.adapter for request in requests])
            logits = forward()
            experts = [None] * len(requests) if self._batch.experts is None else self._batch.experts
            for request, rows in zip(requests, experts, strict=True):
                if request.experts is not None and rows is not None:
                    tokens = len(request.prompt_ids) + len(request.ids)
                    # Earlier columns are padding.
                    computed = min(len(rows), tokens)
                    request.experts.append(tokens - computed, rows[-computed:])
            if requests is not self._running:
                self._running += requests
            self._sampler.step(requests, logits)
            for request in requests:
                self._sampler.update(request)
        except Exception as error:
            for request in {*self._running, *requests}:
                if not request.finished:
                    self._sampler.fail(request, EngineError(f"the model failed: {type(error).__name__}: {error}"))
            self._running.clear()
            self._batch.clear()
        self._retire()

    def _retire(self) -> None:
        """Remove finished and cancelled requests from the batch."""
        leaving = {row for row, request in enumerate(self._running) if request.finished or request.cancelled}
        if not leaving:
            return
        for row in sorted(leaving):
            request = self._running[row]
            if not request.finished:
                self._sampler.finish(request, "abort")
            if request.one_version and self._prefixes is not None:
                computed = [*request.prefix_key.tolist(), *request.ids[:-1]]
                self._prefixes.put(np.array(computed, dtype=np.int64), self._batch.row(row), request.adapter)
        staying = [row for row in range(len(self._running)) if row not in leaving]
        self._running = [self._running[row] for row in staying]
        self._batch.keep(staying)


def _shapes(model: Any) -> dict[str, torch.Size]:
    """Return the shape of each tensor in a model, by name. Models with equal shapes can be swapped."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
