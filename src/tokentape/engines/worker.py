"""The own loop of the embedded engine: its thread alone touches the model, and batches requests continuously.

Between two decoding steps requests join the batch (as many as fit a prefill of bounded size, so that a long
prompt delays the running ones by one prefill at most) and leave it (finished, or no longer wanted by anyone).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokentape.engines.kv import NO_PREFIX, Batch, Prefix, PrefixCache
from tokentape.engines.requests import End, Inbox, Request, Sampler, shapes
from tokentape.errors import EngineError

_PREFILL_TOKENS = 2048
"""Columns times rows of one prefill; a single longer prompt is still taken whole."""


class Worker:
    """Owns the model and everything that is computed with it. A `Runner`.

    Args:
        model: a causal language model of `transformers`, in evaluation mode.
        sampler: chooses the tokens.
        max_batch: rows that decode together; further requests wait.
        prefix_cache_bytes: bound of the keys and values kept of finished requests; 0 keeps none.

    """

    def __init__(self, model: Any, sampler: Sampler, *, max_batch: int, prefix_cache_bytes: int) -> None:
        self._batch = Batch(model)
        self._sampler = sampler
        self._max_batch = max_batch
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self._inbox = Inbox()
        self._running: list[Request] = []
        self._thread = threading.Thread(target=self._run, name="tokentape-transformers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still being worked on."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Let a request join the batch as soon as there is room."""
        self._inbox.put(request)

    def abandon(self, request: Request) -> None:
        """Take a request out before the next step."""
        request.cancelled = True

    def swap_model(self, model: Any, weight_version: str) -> Future[None]:
        """Replace the model between two steps. Running requests go on, with the keys and values they have.

        The future raises `EngineError` where the new tensors have other names or shapes.
        """
        done: Future[None] = Future()

        def swap() -> None:
            if shapes(model) != shapes(self._batch.model):
                done.set_exception(EngineError("the new weights have other tensors than the running model"))
                return
            for request in self._running:
                self._sampler.flush(request)
                request.one_version = False
            if self._prefixes is not None:
                self._prefixes.clear()
            self._batch.model = model
            self._sampler.weight_version = weight_version
            done.set_result(None)

        self._inbox.put(swap)
        return done

    def stop(self) -> None:
        """Abort all requests and wait for the thread to end."""
        self._inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    self._inbox.take_in(wait=not self._running)
                    if self._inbox.closed:
                        break
                    self._retire()
                    self._admit()
                    self._decode()
        finally:
            for request in [*self._running, *self._inbox.waiting]:
                self._sampler.finish(request, End("abort"))

    def _admit(self) -> None:
        """Prefill one group of waiting requests, in order of arrival, and sample their first tokens."""
        waiting = self._inbox.waiting
        joining: list[Request] = []
        prefixes: list[Prefix] = []
        widest = 0
        while waiting and len(self._running) + len(joining) < self._max_batch:
            request = waiting[0]
            if request.cancelled:
                self._sampler.finish(waiting.popleft(), End("abort"))
                continue
            prefix = self._prefixes.longest(request.prompt_ids) if self._prefixes is not None else NO_PREFIX
            widest = max(widest, len(request.prompt_ids) - prefix.length)
            if joining and widest * (len(joining) + 1) > _PREFILL_TOKENS:
                break
            joining.append(waiting.popleft())
            prefixes.append(prefix)
        if not joining:
            return
        try:
            logits = self._batch.prefill([request.prompt_ids for request in joining], prefixes)
            self._running += joining
            self._sample(joining, logits)
        except Exception as error:
            self._fail_all(error, also=joining)
        self._retire()

    def _decode(self) -> None:
        """Sample one more token for every row."""
        if not self._running:
            return
        try:
            self._sample(self._running, self._batch.decode([request.ids[-1] for request in self._running]))
        except Exception as error:
            self._fail_all(error)
        self._retire()

    def _sample(self, requests: Sequence[Request], logits: Tensor) -> None:
        self._sampler.step(requests, logits)
        for request in requests:
            self._sampler.tell(request)

    def _fail_all(self, error: Exception, also: Sequence[Request] = ()) -> None:
        """Give up the whole batch: after an error in the model nobody knows what its tensors hold."""
        for request in {*self._running, *also}:
            if not request.finished:
                self._sampler.fail(request, EngineError(f"the model failed: {type(error).__name__}: {error}"))
        self._running.clear()
        self._batch.clear()

    def _retire(self) -> None:
        """Take finished and cancelled requests out of the batch."""
        leaving = {row for row, request in enumerate(self._running) if request.finished or request.cancelled}
        if not leaving:
            return
        for row in sorted(leaving):
            request = self._running[row]
            if not request.finished:
                self._sampler.finish(request, End("abort"))
            if request.one_version and self._prefixes is not None:
                computed = [*request.prompt_ids.tolist(), *request.ids[:-1]]
                self._prefixes.put(np.array(computed, dtype=np.int64), self._batch.row(row))
        staying = [row for row in range(len(self._running)) if row not in leaving]
        self._running = [self._running[row] for row in staying]
        self._batch.keep(staying)
