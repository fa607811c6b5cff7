"""The paged path of the embedded engine: continuous batching of transformers, with keys and values in pages.

Requests join and leave between steps, long prompts are computed in pieces, and pages of a common beginning are
shared. Its manager runs a thread of its own. Which request each row of logits belongs to comes with them through
the manager's per-request arguments: every request is given a number, its slot.

No more requests are handed to the manager than fit its pages with all they may sample. It would otherwise throw
running ones out, and after that it takes no new ones until one of the rest ends by itself, which never happens if
they are all aborted (read in transformers 5.23).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from tokentape.engines.regular import only
from tokentape.engines.requests import End, Request, Sampler
from tokentape.errors import EngineContractError, EngineError, EngineUnavailable

try:
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessor,
        ContinuousBatchingLogitsProcessorList,
    )
    from transformers.generation.continuous_batching.requests import RequestStatus
except ImportError as error:
    raise EngineError(
        f"transformers {transformers.__version__} has no continuous batching as the paged path uses it (5.23)"
    ) from error

_PAGE = 16
"""Tokens per page. Only whole pages are shared."""

_STEP_TOKENS = 512
"""Tokens of one forward pass. The attention mask takes so many rows of the cache's size, also where few are used."""


class PagedRunner:
    """Runs requests through a `ContinuousBatchingManager`. A `Runner`.

    Args:
        model: a causal language model of `transformers`, in evaluation mode.
        sampler: chooses the tokens.
        max_batch: requests that decode together.
        cache_tokens: tokens whose keys and values are held, those shared for later requests among them. The tensors
            are laid out at the start.

    """

    def __init__(self, model: Any, sampler: Sampler, *, max_batch: int, cache_tokens: int) -> None:
        self._model = model
        self._sampler = sampler
        self._max_batch = max_batch
        self._free_pages = -(-cache_tokens // _PAGE)
        self._config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=self._free_pages,
            max_batch_tokens=max(_STEP_TOKENS, max_batch),
            max_requests_per_batch=max_batch,
            max_blocks_per_request=0,
            allow_block_sharing=True,
            use_async_batching=False,
            use_cuda_graph=False,
            safety_margin=0.0,
            auto_switch_to_flash=False,
        )
        self._manager = self._open_manager()
        self._lock = threading.Lock()
        """Held to change what follows, by the callers' threads and both of ours; never during a forward pass."""
        self._slots = itertools.count()
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._slot_of: dict[Request, int] = {}
        self._stopping = False
        self._stepped = False
        """Whether the manager that runs has sampled anything."""
        self._started = threading.Event()
        # The manager's thread is a daemon because the one that starts it is.
        self._thread = threading.Thread(target=self._run, name="tokentape-paged", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._thread.start()
        self._started.wait()

    @property
    def alive(self) -> bool:
        """Whether requests are still being worked on."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, request: Request) -> None:
        """Hand a request to the manager as soon as its pages are free."""
        with self._lock:
            if self._stopping:
                self._sampler.fail(request, EngineUnavailable("the embedded engine is closed; open a new one"))
                return
            self._waiting.append(request)
            self._admit()

    def abandon(self, request: Request) -> None:
        """Take a request out before the next step."""
        with self._lock:
            request.cancelled = True
            if not request.finished:
                self._drop(request)
                self._sampler.finish(request, End("abort"))

    def swap_model(self, model: Any, weight_version: str) -> Future[None]:
        """Refuse: pages that the old weights computed would go on being shared."""
        done: Future[None] = Future()
        done.set_exception(EngineError("the paged path keeps its weights; open a new engine, or another path"))
        return done

    def stop(self) -> None:
        """Abort all requests and wait for both threads to end."""
        with self._lock:
            self._stopping = True
            manager = self._manager
        manager.stop(block=True, hard_stop=True)
        self._thread.join()

    def choose(self, slots: list[int], logits: Tensor) -> Tensor:
        """Return the ids to go on with, int64 [rows]. On the manager's thread, within a step."""
        ids = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        with self._lock:
            self._stepped = True
            # A request that was taken out while its step was being computed has a row, but no slot any more.
            rows = [row for row, slot in enumerate(slots) if slot in self._running]
            if not rows:
                return ids
            requests = [self._running[slots[row]] for row in rows]
            index = torch.tensor(rows, device=logits.device)
            ids[index] = self._sampler.step(requests, logits[index])
            for request in requests:
                # At a stop id and at the limit the manager ends it too, and then its own account is compared.
                managed = request.end is not None and not isinstance(request.end.stop, str)
                if request.cancelled and not request.finished:
                    self._sampler.finish(request, End("abort"))
                elif not managed:
                    self._sampler.tell(request)
                if request.finished:
                    self._drop(request)
        return ids

    def _open_manager(self) -> Any:
        manager = self._model.init_continuous_batching(
            # It does nothing to the logits, so what `_Choose` sees are the model's own.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=self._config,
        )
        manager.logit_processor = ContinuousBatchingLogitsProcessorList([_Choose(self)])
        manager.logit_processor.tensors_required = 1
        return manager

    def _run(self) -> None:
        """Take what the managers say of requests that ended. One that died is replaced, if it ever worked."""
        while True:
            with self._lock:
                if self._stopping:
                    break
                self._manager.start()
            self._started.set()
            while (output := self._manager.get_result(timeout=0.1)) is not None or self._manager.is_running():
                if output is not None:
                    self._take(output)
            with self._lock:
                if self._stopping or not self._stepped:
                    break
                self._fail_running()
                self._manager, self._stepped = self._open_manager(), False
                self._admit()
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._fail_running()
                for request in self._waiting:
                    self._sampler.fail(request, EngineUnavailable("the paged path's loop ended and can't begin again"))
                self._waiting.clear()
            for request in [*self._running.values(), *self._waiting]:
                self._sampler.finish(request, End("abort"))

    def _fail_running(self) -> None:
        """Fail what a manager held when it died. It has said so itself of most."""
        for request in list(self._running.values()):
            self._forget(request)
            self._sampler.fail(request, EngineError("the model failed: the paged path's loop ended"))

    def _take(self, output: Any) -> None:
        with self._lock:
            request = self._running.get(int(output.request_id))
            if request is None:
                return
            self._forget(request)
            if output.status != RequestStatus.FINISHED:
                if self._stopping:
                    self._sampler.finish(request, End("abort"))
                else:
                    self._sampler.fail(request, EngineError(f"the model failed: {output.error}"))
            elif output.prompt_ids != request.prompt_ids.tolist() or output.generated_tokens != request.ids:
                self._sampler.fail(request, EngineContractError("the manager's account of ids is not what was sampled"))
            else:
                self._sampler.tell(request)
            self._admit()

    def _admit(self) -> None:
        """Hand over waiting requests, in order of arrival, as long as there are pages for all that they may need."""
        while self._waiting and len(self._running) < self._max_batch and not self._stopping:
            request = self._waiting[0]
            if _pages(request) > self._free_pages:
                return
            slot = next(self._slots)
            taken = self._manager.add_request(
                request.prompt_ids.tolist(),
                request_id=str(slot),
                max_new_tokens=request.limit,
                eos_token_id=list(request.params.stop_token_ids) or -1,
                slot=slot,
            )
            if taken is None:  # it died, and its successor will be asked
                return
            self._waiting.popleft()
            self._free_pages -= _pages(request)
            self._running[slot], self._slot_of[request] = request, slot

    def _drop(self, request: Request) -> None:
        """Take a request out that the manager has not ended."""
        if request in self._slot_of:
            self._manager.cancel_request(str(self._slot_of[request]))
            self._forget(request)
            self._admit()
        else:
            self._waiting.remove(request)

    def _forget(self, request: Request) -> None:
        del self._running[self._slot_of.pop(request)]
        self._free_pages += _pages(request)


def _pages(request: Request) -> int:
    return -(-(len(request.prompt_ids) + request.limit) // _PAGE)


class _Choose(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Leaves each row one possible id: the one that was chosen for the request in its slot."""

    supported_kwargs: ClassVar[dict[str, type]] = {"slot": int}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, runner: PagedRunner) -> None:
        self._runner = runner

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.fill_(-1)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        slots = [future.state.logit_processor_kwargs["slot"] for future in requests_with_new_token]
        return torch.tensor(slots, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return only(self._runner.choose(tensor_arg[: len(scores)].tolist(), scores), scores)
