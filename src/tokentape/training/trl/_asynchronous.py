"""A rollout worker and a weight transfer for TRL's asynchronous GRPO.

`AsyncGRPOTrainer` needs two things. A rollout worker puts scored samples on a queue: here every branch of a session is
a sample, with the recorded logprobs, which the trainer's loss uses as those of the old policy. A weight transfer sends
the trainer's weights to the engine: meanwhile the gateway holds back new calls, running calls continue, and the record
has the weight version of each token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tokentape.client import Client
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.training._columns import group_advantages
from tokentape.training._live import Rollout
from tokentape.training._samples import MaxLength, Sample, Select
from tokentape.training._stop_rule import StopRule
from tokentape.training._trainers import temperature
from tokentape.training.trl._agents import Agent, Row, run_agent
from tokentape.training.trl._serving import Policy

if TYPE_CHECKING:
    import torch

_GROUP = "group"
_VERSION = "version"
"""Keys of the sessions' metadata."""


class GatewayWorker:
    """A `rollout_worker` of TRL's `AsyncGRPOTrainer` that runs agents through a gateway.

    >>> AsyncGRPOTrainer(                                                           # doctest: +SKIP
    ...     model_dir, recorded_reward, AsyncGRPOConfig(..., token_budget=4096), dataset,
    ...     rollout_worker=GatewayWorker(policy.client, agent, dataset, num_generations=8),
    ...     weight_transfer=PolicyTransfer(policy),
    ... )

    Agents return rewards or give them to their sessions; advantages are relative to the row's other sessions. The
    trainer's own reward functions are not called. The version of a sample is the oldest that sampled one of its tokens.

    Args:
        client: client of the gateway.
        agent: called once for each generation of a row.
        dataset: rows, used repeatedly in their order.
        num_generations: sessions per row that are compared with each other.
        concurrency: number of agents that run at once. With more, samples are older when they are trained.
        queue_maxsize: largest number of samples that wait for the trainer; then agents wait too.
        failures: `raise` ends the training if an agent raised; `skip` leaves its session out.
        select: the trajectories to keep; see `assemble`.
        max_length: largest length of a sample; see `assemble`.
        stop_rule: ends the training, or warns, if the samples exceed its limits.

    """

    def __init__(
        self,
        client: Client,
        agent: Agent,
        dataset: Sequence[Row],
        *,
        num_generations: int,
        concurrency: int = 16,
        queue_maxsize: int = 256,
        failures: Literal["raise", "skip"] = "raise",
        select: Sequence[Select] = (),
        max_length: MaxLength | None = None,
        stop_rule: StopRule | None = None,
    ) -> None:
        if num_generations < 2 or len(dataset) < 1:
            raise InvalidRequest(
                f"{num_generations} generations of {len(dataset)} rows: expected 2 or more of 1 or more, since a "
                "session is compared with others of its row"
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._client, self._agent, self._dataset = client, agent, dataset
        self._generations, self._concurrency, self._failures = num_generations, concurrency, failures
        self._select, self._max_length, self._stop_rule = select, max_length, stop_rule
        self._version = 0
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._failure: Exception | None = None
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tokentape-rollouts", daemon=True)

    def start(self) -> None:
        """Start the agents. The trainer calls this when its first weights are in place."""
        self._heard = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Start no more sessions, and wait for the running ones."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's count of its weight transfers."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `TokentapeError` if a rollout has failed, or none has ended for `stale_after_s` seconds."""
        if self._failure is not None:
            raise TokentapeError(f"rollouts ended: {self._failure}") from self._failure
        silent = time.monotonic() - self._heard
        if silent > stale_after_s and not self._stopped.is_set():
            raise TokentapeError(
                f"no agent has come to an end for {silent:.0f} s; raise heartbeat_stale_after_s if they take so long"
            )

    def _run(self) -> None:
        free = threading.Semaphore(self._concurrency)
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="tokentape-agent") as pool:
            for group, row in enumerate(cycle(self._dataset)):
                rollouts: list[Rollout] = []
                for _ in range(self._generations):
                    while not free.acquire(timeout=0.1) and not self._stopped.is_set():
                        pass
                    if self._stopped.is_set():
                        return
                    pool.submit(self._roll_out, group, row, rollouts, free)

    def _roll_out(self, group: int, row: Row, rollouts: list[Rollout], free: threading.Semaphore) -> None:
        """Run an agent. The last one of a group puts the samples of the group on the queue."""
        try:
            metadata = {_GROUP: str(group), _VERSION: self._version}
            made = run_agent(
                self._client, self._agent, row, metadata, select=self._select, max_length=self._max_length, group=_GROUP
            )
            if self._stop_rule is not None:
                self._stop_rule.add(made.samples if made.error is None else ())
            with self._lock:
                rollouts.append(made)
                complete = len(rollouts) == self._generations
            if complete:
                for sample in self._scored(group, row, rollouts):
                    self._put(sample)
        except Exception as error:
            self._failure = self._failure or error
            self._stopped.set()
        finally:
            self._heard = time.monotonic()
            free.release()

    def _put(self, sample: Any) -> None:
        while not self._stopped.is_set():
            sample.enqueued_at = time.time()
            try:
                self.rollout_buffer.put(sample, timeout=0.1)
                return
            except queue.Full:
                # The queue is full because the trainer is busy, so the agents are not stale.
                self._heard = time.monotonic()

    def _scored(self, group: int, row: Row, rollouts: Sequence[Rollout]) -> list[Any]:
        for rollout in rollouts:
            if rollout.error is not None and self._failures == "raise":
                raise TokentapeError(f"the agent of session {rollout.session_id!r} raised") from rollout.error
        kept = [sample for one in rollouts if one.error is None for sample in one.samples if sample.reward is not None]
        self.metrics_queue.put(
            {
                "rollout/samples_per_rollout": (sum(len(one.samples) for one in rollouts), len(rollouts)),
                "rollout/without_sample": float(sum(not one.samples or one.error is not None for one in rollouts)),
            }
        )
        spread = float(np.std([sample.reward or 0.0 for sample in kept])) if kept else 0.0
        return [
            _rollout_sample(sample, row, group, {"reward": float(sample.reward or 0.0), "reward_std": spread})
            for sample in group_advantages(kept, epsilon=1e-8)
        ]


def _rollout_sample(sample: Sample, row: Row, group: int, metrics: dict[str, float]) -> Any:
    """Return TRL's `RolloutSample`: arrays over the whole sequence, and one advantage."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    temperature([sample], "trl")
    versions = {version for _, _, version in sample.weight_spans}
    # Some engines name weights themselves; then use the version at the start of the session.
    counted = map(int, versions) if all(map(str.isdecimal, versions)) else [sample.metadata[_VERSION]]
    return RolloutSample(
        prompt=row.get("prompt", []),
        completion=[],
        input_ids=sample.token_ids.astype(np.int64),
        completion_mask=sample.loss_mask.astype(np.int64),
        old_log_probs=sample.logprobs,
        advantage=float(sample.columns["advantages"][sample.loss_mask][0]),
        model_version=min(counted),
        group_id=group,
        metrics=metrics,
    )


class GatewayTransfer:
    """Wrap a `weight_transfer`, for example TRL's transfer to a vLLM server, and pause the gateway before the server.

    New calls wait in the gateway instead of failing, and turns are recorded with the version that the trainer counts.
    The client needs an admin key if the gateway has keys.
    """

    def __init__(self, client: Client, transfer: Any) -> None:
        self._client, self._transfer = client, transfer
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Set up the wrapped transfer."""
        self._transfer.init_weight_transfer()

    def pause(self) -> None:
        """Hold back new calls, then pause the server. The server decides about running calls."""
        self._client.pause(timeout=0.0)
        with _opened_on_failure(self._client):
            self._transfer.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        with _opened_on_failure(self._client):
            self._transfer.send_weights(iterator)

    def resume(self) -> None:
        """Resume the server, then the gateway, with the version that the trainer counts."""
        with _opened_on_failure(self._client):
            self._transfer.resume()
        self._version += 1
        self._client.resume(str(self._version))

    def destroy(self) -> None:
        """Take down the wrapped transfer."""
        self._transfer.destroy()


class PolicyTransfer(GatewayTransfer):
    """A `weight_transfer` of TRL's `AsyncGRPOTrainer` into the embedded engine of `serving`.

    Running calls continue with the new weights from the next token on. TRL sends only trained tensors.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.client, _EngineTransfer(policy))


class _EngineTransfer:
    """The transfer to the embedded engine, which needs no setup, pause or cleanup."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version = policy, 0
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._policy.load(iterator, str(self._version + 1), partial=True)
        self._version += 1


@contextmanager
def _opened_on_failure(client: Client) -> Iterator[None]:
    """Resume the gateway on an error. Otherwise its waiting agents would block the end of the trainer."""
    try:
        yield
    except BaseException:
        client.resume()
        raise
