"""The thread of the embedded engine: it alone touches the model, and batches requests continuously.

Between two decoding steps requests join the batch (as many as fit a prefill of bounded size, so that a long
prompt delays the running ones by one prefill at most) and leave it (finished, or no longer wanted by anyone).
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokentape.engines.base import SampleDelta, SamplingParams
from tokentape.engines.kv import NO_PREFIX, Batch, Ids, Prefix, PrefixCache
from tokentape.engines.sampling import choose, penalise, penalises
from tokentape.engines.stopping import StopStrings
from tokentape.errors import EngineContractError, EngineError
from tokentape.types import FinishReason

_PREFILL_TOKENS = 2048
"""Columns times rows of one prefill; a single longer prompt is still taken whole."""


@dataclass(slots=True, eq=False)
class Request:
    """One call of `sample` on its way through the worker."""

    request_id: str
    prompt_ids: Ids
    params: SamplingParams
    limit: int
    """Tokens to sample at most: `max_tokens`, or what the context has room for."""
    stops: StopStrings | None
    stream: bool
    send: Callable[[SampleDelta | EngineError], None]
    """Called on the worker's thread."""
    random: random.Random
    cancelled: bool = False
    """Set by the caller's thread; the worker looks at it between steps."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    sent: int = 0
    finished: bool = False
    one_version: bool = True
    """False once the weights changed under it: its keys and values are a mixture."""


class Worker:
    """Owns the model and everything that is computed with it.

    Args:
        model: a causal language model of `transformers`, in evaluation mode.
        samplable: bool [embedding rows]; False for ids that the tokenizer does not know.
        max_batch: rows that decode together; further requests wait.
        prefix_cache_bytes: bound of the keys and values kept of finished requests; 0 keeps none.
        weight_version: what the first deltas report.
        on_finish: called on the worker's thread with each request that ended.

    """

    def __init__(
        self,
        model: Any,
        *,
        samplable: Tensor,
        max_batch: int,
        prefix_cache_bytes: int,
        weight_version: str,
        on_finish: Callable[[Request, FinishReason], None],
    ) -> None:
        self._batch = Batch(model)
        self._forbidden = ~samplable
        self._max_batch = max_batch
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self._weight_version = weight_version
        self._on_finish = on_finish
        self._inbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
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

    def swap_model(self, model: Any, weight_version: str) -> Future[None]:
        """Replace the model between two steps. Running requests go on, with the keys and values they have.

        The future raises `EngineError` where the new tensors have other names or shapes.
        """
        done: Future[None] = Future()

        def swap() -> None:
            if _shapes(model) != _shapes(self._batch.model):
                done.set_exception(EngineError("the new weights have other tensors than the running model"))
                return
            for request in self._running:
                self._flush(request)
                request.one_version = False
            if self._prefixes is not None:
                self._prefixes.clear()
            self._batch.model = model
            self._weight_version = weight_version
            done.set_result(None)

        self._inbox.put(swap)
        return done

    def stop(self) -> None:
        """Abort all requests and wait for the thread to end."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_in():
                    self._retire()
                    self._admit()
                    self._decode()
        finally:
            for request in [*self._running, *self._waiting]:
                self._finish(request, "abort", None)

    def _take_in(self) -> bool:
        """Empty the inbox, waiting for something where there is nothing else to do. False to end."""
        try:
            while True:
                item = self._inbox.get(block=not self._running and not self._waiting)
                if item is None:
                    return False
                if isinstance(item, Request):
                    self._waiting.append(item)
                else:
                    item()
        except queue.Empty:
            return True

    def _admit(self) -> None:
        """Prefill one group of waiting requests, in order of arrival, and sample their first tokens."""
        joining: list[Request] = []
        prefixes: list[Prefix] = []
        widest = 0
        while self._waiting and len(self._running) + len(joining) < self._max_batch:
            request = self._waiting[0]
            if request.cancelled:
                self._finish(self._waiting.popleft(), "abort", None)
                continue
            prefix = self._prefixes.longest(request.prompt_ids) if self._prefixes is not None else NO_PREFIX
            widest = max(widest, len(request.prompt_ids) - prefix.length)
            if joining and widest * (len(joining) + 1) > _PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
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
        raw = logits.log_softmax(-1)
        allowed = logits.masked_fill(self._forbidden, -math.inf)
        for row, request in enumerate(requests):
            if not penalises(request.params):
                continue
            prompt = torch.from_numpy(request.prompt_ids).to(logits.device)
            sampled = torch.tensor(request.ids, dtype=torch.int64, device=logits.device)
            allowed[row] = penalise(allowed[row], prompt, sampled, request.params)
        params = [request.params for request in requests]
        ids = choose(allowed, params, [request.random.random() for request in requests])
        logprobs = raw.gather(-1, ids.unsqueeze(-1)).squeeze(-1).tolist()
        alternatives = self._alternatives(raw, params)
        for row, (request, token_id) in enumerate(zip(requests, ids.tolist(), strict=True)):
            if not math.isfinite(logprobs[row]):
                self._fail(request, EngineContractError("the model's logits are not finite; nothing was sampled"))
                continue
            self._accept(request, token_id, logprobs[row], alternatives[row])

    def _alternatives(self, raw: Tensor, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, float], ...]]:
        """Per row the `top_logprobs` most likely (id, logprob) pairs, best first."""
        most = max(p.top_logprobs for p in params)
        if not most:
            return [()] * len(params)
        samplable = raw.masked_fill(self._forbidden, -math.inf)
        values, ids = (tensor.tolist() for tensor in samplable.topk(min(most, samplable.shape[-1])))
        return [tuple(zip(ids[row], values[row], strict=True))[: p.top_logprobs] for row, p in enumerate(params)]

    def _accept(self, request: Request, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        request.ids.append(token_id)
        request.logprobs.append(logprob)
        if request.params.top_logprobs:
            request.top_logprobs.append(top)
        stop = request.stops.push(token_id) if request.stops is not None else None
        if token_id in request.params.stop_token_ids:
            self._finish(request, "stop", token_id)
        elif stop is not None:
            self._finish(request, "stop", stop)
        elif len(request.ids) >= request.limit:
            self._finish(request, "length", None)
        elif request.stream:
            self._flush(request)

    def _flush(
        self, request: Request, finish_reason: FinishReason | None = None, stop: int | str | None = None
    ) -> None:
        """Send what was sampled since the last delta. A delta is of one weight version."""
        start, request.sent = request.sent, len(request.ids)
        if start == request.sent and finish_reason is None:
            return
        request.send(
            SampleDelta(
                token_ids=tuple(request.ids[start:]),
                logprobs=tuple(request.logprobs[start:]),
                finish_reason=finish_reason,
                stop=stop,
                top_logprobs=tuple(request.top_logprobs[start:]),
                weight_version=self._weight_version,
            )
        )

    def _finish(self, request: Request, finish_reason: FinishReason, stop: int | str | None) -> None:
        request.finished = True
        self._on_finish(request, finish_reason)
        self._flush(request, finish_reason, stop)

    def _fail(self, request: Request, error: EngineError) -> None:
        request.finished = True
        request.one_version = False
        request.send(error)

    def _fail_all(self, error: Exception, also: Sequence[Request] = ()) -> None:
        """Give up the whole batch: after an error in the model nobody knows what its tensors hold."""
        for request in {*self._running, *also}:
            if not request.finished:
                self._fail(request, EngineError(f"the model failed: {type(error).__name__}: {error}"))
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
                self._finish(request, "abort", None)
            if request.one_version and self._prefixes is not None:
                computed = [*request.prompt_ids.tolist(), *request.ids[:-1]]
                self._prefixes.put(np.array(computed, dtype=np.int64), self._batch.row(row))
        staying = [row for row in range(len(self._running)) if row not in leaving]
        self._running = [self._running[row] for row in staying]
        self._batch.keep(staying)


def _shapes(model: Any) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
