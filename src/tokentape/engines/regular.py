"""The regular path of the embedded engine: `generate` of transformers on left-padded batches.

What waits is taken together as one batch and runs to the end of its longest request; what arrives meanwhile
waits for the next. `generate` pads, masks, numbers the positions and keeps the cache. It is asked after every
step, through its own hooks, which ids to go on with (a logits processor) and which rows are over (a stopping
criterion), so that stops, limits, seeds and aborts are each request's own and tokens are streamed as they come.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tokentape.engines.requests import End, Inbox, Request, Sampler, shapes
from tokentape.errors import EngineContractError, EngineError

_JOINED = ("pixel_values", "image_grid_thw")

_PADDING = 0
"""Id in the columns that the attention mask hides; which one does not matter."""


class RegularRunner:
    """Runs requests through `model.generate`. A `Runner`.

    Args:
        model: a causal language model of `transformers`, in evaluation mode.
        sampler: chooses the tokens.
        max_batch: rows of one `generate`.

    """

    def __init__(self, model: Any, sampler: Sampler, *, max_batch: int) -> None:
        # `generate` fills in whatever it was not told from the model folder's generation_config.json.
        model.generation_config = GenerationConfig()
        self._model = model
        self._sampler = sampler
        self._max_batch = max_batch
        self._inbox = Inbox()
        self._running: list[Request] = []
        self._thread = threading.Thread(target=self._run, name="tokentape-generate", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still being worked on."""
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Let a request be in the next batch with room."""
        self._inbox.put(request)

    def abandon(self, request: Request) -> None:
        """End a request after the step that is being computed. Its row is computed as long as the batch is."""
        request.cancelled = True

    def swap_model(self, model: Any, weight_version: str) -> Future[None]:
        """Copy a model's weights into the running one between two steps, also in the middle of a batch.

        The future raises `EngineError` where the new tensors have other names or shapes.
        """
        done: Future[None] = Future()

        def swap() -> None:
            if shapes(model) != shapes(self._model):
                done.set_exception(EngineError("the new weights have other tensors than the running model"))
                return
            for request in self._running:
                if not request.finished:
                    self._sampler.flush(request)
            self._model.load_state_dict(model.state_dict())
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
            while True:
                self._inbox.take_in(wait=True)
                if self._inbox.closed:
                    break
                self._generate()
        finally:
            for request in self._inbox.waiting:
                self._sampler.finish(request, End("abort"))

    def _generate(self) -> None:
        """Run one batch of waiting requests to its end."""
        waiting = self._inbox.waiting
        while waiting and len(self._running) < self._max_batch:
            request = waiting.popleft()
            if request.cancelled:
                self._sampler.finish(request, End("abort"))
            else:
                self._running.append(request)
        if not self._running:
            return
        ids, mask = left_padded([request.prompt_ids.tolist() for request in self._running], self._model.device)
        steps = _Steps(self._running, self._sampler, self._inbox)
        try:
            self._model.generate(
                inputs=ids,
                attention_mask=mask,
                **_images(self._running, mask),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(request.limit for request in self._running),
                    pad_token_id=_PADDING,
                    use_cache=True,
                    disable_compile=True,
                ),
                logits_processor=LogitsProcessorList([_Choose(steps)]),
                stopping_criteria=StoppingCriteriaList([_Stop(steps)]),
            )
        except EngineError as error:
            self._fail_rest(error)
        except Exception as error:
            self._fail_rest(EngineError(f"the model failed: {type(error).__name__}: {error}"))
        self._running = []

    def _fail_rest(self, error: EngineError) -> None:
        for request in self._running:
            if not request.finished:
                self._sampler.fail(request, error)


class _Steps:
    """What happens in one `generate` between its forward passes."""

    def __init__(self, requests: Sequence[Request], sampler: Sampler, inbox: Inbox) -> None:
        self._requests = requests
        self._sampler = sampler
        self._inbox = inbox

    def choose(self, logits: Tensor) -> Tensor:
        """Return the ids to go on with, int64 [rows]. Rows that are over get padding, which nobody reads."""
        ids = torch.full(logits.shape[:1], _PADDING, dtype=torch.int64, device=logits.device)
        rows = [row for row, request in enumerate(self._requests) if not request.finished]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            ids[index] = self._sampler.step([self._requests[row] for row in rows], logits[index])
        return ids

    def over(self, sequences: Tensor) -> Tensor:
        """Tell the callers what came, and `generate` which rows are over, bool [rows].

        Raises:
            EngineContractError: a row goes on with another id than was sampled for it.

        """
        self._inbox.take_in(wait=False)
        for request, newest in zip(self._requests, sequences[:, -1].tolist(), strict=True):
            if request.finished:
                continue
            if newest != request.ids[-1]:
                raise EngineContractError("generate went on with another id than the one that was sampled")
            if request.end is None and (request.cancelled or self._inbox.closed):
                request.end = End("abort")
            self._sampler.tell(request)
        return torch.tensor([request.finished for request in self._requests], device=sequences.device)


class _Choose(LogitsProcessor):  # type: ignore[misc]
    """Leaves each row one possible id: the one that was chosen."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return only(self._steps.choose(scores), scores)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self._steps.over(input_ids)


def _images(requests: Sequence[Request], mask: Tensor) -> dict[str, Tensor]:
    """The images of all rows, in order, as the model takes them; `mask` is the attention mask."""
    given = [request.images for request in requests if request.images]
    if not given:
        return {}
    types = torch.zeros_like(mask)
    for row, request in enumerate(requests):
        if request.images:
            types[row, -len(request.prompt_ids) :] = request.images["mm_token_type_ids"]
    joined = {name: torch.cat([one[name] for one in given]).to(mask.device) for name in _JOINED}
    return {**joined, "mm_token_type_ids": types}


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Lay prompts into one batch with their ends aligned: ids and attention mask, both int64 [rows, longest]."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[_PADDING] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def only(ids: Tensor, scores: Tensor) -> Tensor:
    """Scores under which greedy decoding picks `ids`: 0 there, -inf elsewhere, in the shape of `scores`."""
    return torch.full_like(scores, -torch.inf).scatter(-1, ids.unsqueeze(-1), 0.0)
