"""Run agents for TRL's asynchronous GRPO, while the trainer updates the weights.

`AsyncGRPOTrainer` needs a rollout worker, which puts scored samples on a queue, and a weight transfer, which copies the
trainer's weights to the engine. `GatewayWorker` makes one sample per branch of a session; the loss uses the recorded
logprobs as those of the old policy. `GatewayTransfer` makes new calls wait in the gateway during a transfer. The record
states which weight version sampled each token.
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
from tokentape.training._collate import group_advantages
from tokentape.training._live import Rollout
from tokentape.training._samples import MaxLength, Sample, Select
from tokentape.training._stop_rule import StopRule
from tokentape.training._trainers import check_exportable, temperature
from tokentape.training.trl._agents import Agent, Row, run_agent
from tokentape.training.trl._serving import Policy

if TYPE_CHECKING:
    import torch

_GROUP = "group"
_VERSION = "version"
"""Keys in the metadata of sessions."""


class GatewayWorker:
    """A `rollout_worker` of TRL's `AsyncGRPOTrainer` that runs agents through a gateway.

    >>> AsyncGRPOTrainer(                                                           # doctest: +SKIP
    ...     model_dir, recorded_reward, AsyncGRPOConfig(..., token_budget=4096), dataset,
    ...     rollout_worker=GatewayWorker(policy.client, agent, dataset, num_generations=8),
    ...     weight_transfer=PolicyTransfer(policy),
    ... )

    The reward of a session is what its agent returned or set with `session.reward`. Advantages are computed over the
    sessions of a row. The trainer's reward functions are not called. The `model_version` of a sample is the oldest
    weight version that sampled one of its tokens.

    Args:
        client: A client of the gateway.
        agent: The agent; it runs `num_generations` times per row.
        dataset: The rows. The worker repeats them in order until the training ends.
        num_generations: Sessions per row, which form a group. At least 2.
        concurrency: Number of agents that run at once. With a higher number, samples are older when they are trained.
        failures: If an agent raises an exception, `raise` ends the training, and `skip` leaves out its session.
        select: Which trajectories to keep; see `assemble`.
        max_length: Maximum length of a sample; see `assemble`.
        stop_rule: Ends the training or warns if the sampled tokens exceed the limits of the rule.

    """

    def __init__(
        self,
        client: Client,
        agent: Agent,
        dataset: Sequence[Row],
        *,
        num_generations: int,
        concurrency: int = 16,
        failures: Literal["raise", "skip"] = "raise",
        select: Sequence[Select] = (),
        max_length: MaxLength | None = None,
        stop_rule: StopRule | None = None,
    ) -> None:
        if num_generations < 2 or len(dataset) < 1:
            raise InvalidRequest(
                f"num_generations is {num_generations} and the dataset has {len(dataset)} rows: expected at least 2 "
                "generations, because the sessions of a row are compared with each other, and at least 1 row"
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(256)
        """Scored samples. When it is full, agents wait."""
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
        """Start running agents. The trainer calls this method after its first weight transfer."""
        self._heard = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Start no more sessions, and wait until the running agents have finished."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Set the version for new sessions: the number of weight transfers that the trainer has made."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `TokentapeError` if a rollout failed, or if no rollout has ended for `stale_after_s` seconds."""
        if self._failure is not None:
            raise TokentapeError(f"rollouts have stopped: {self._failure}") from self._failure
        silent = time.monotonic() - self._heard
        if silent > stale_after_s and not self._stopped.is_set():
            raise TokentapeError(
                f"no agent has finished for {silent:.0f} s; raise heartbeat_stale_after_s if agents take longer"
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
        """Run an agent. The last agent of a group to finish puts the samples of the whole group on the queue."""
        try:
            metadata = {_GROUP: str(group), _VERSION: self._version}
            rollout = run_agent(
                self._client, self._agent, row, metadata, select=self._select, max_length=self._max_length, group=_GROUP
            )
            if self._stop_rule is not None:
                self._stop_rule.add(rollout.samples if rollout.error is None else ())
            with self._lock:
                rollouts.append(rollout)
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
                # The queue is full because the trainer is busy, so this is no stale worker.
                self._heard = time.monotonic()

    def _scored(self, group: int, row: Row, rollouts: Sequence[Rollout]) -> list[Any]:
        for rollout in rollouts:
            if rollout.error is not None and self._failures == "raise":
                raise TokentapeError(
                    f"the agent of session {rollout.session_id!r} raised {rollout.error!r}: fix the agent, or "
                    "leave out such sessions with failures='skip'"
                ) from rollout.error
        succeeded = [rollout for rollout in rollouts if rollout.error is None]
        samples = [sample for rollout in succeeded for sample in rollout.samples if sample.reward is not None]
        self.metrics_queue.put(
            {
                "rollout/samples_per_rollout": (sum(len(rollout.samples) for rollout in rollouts), len(rollouts)),
                "rollout/without_sample": float(len(rollouts) - sum(bool(rollout.samples) for rollout in succeeded)),
            }
        )
        spread = float(np.std([sample.reward or 0.0 for sample in samples])) if samples else 0.0
        return [
            _rollout_sample(sample, row, group, {"reward": float(sample.reward or 0.0), "reward_std": spread})
            for sample in group_advantages(samples, epsilon=1e-8)
        ]


def _rollout_sample(sample: Sample, row: Row, group: int, metrics: dict[str, float]) -> Any:
    """Return TRL's `RolloutSample`: arrays over the whole sequence, and one advantage."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    check_exportable([sample])
    temperature([sample], "trl")
    versions = {version for _, _, version in sample.weight_spans}
    # If an engine names its weights with other texts than numbers, use the version at the start of the session.
    numbers = map(int, versions) if all(map(str.isdecimal, versions)) else [sample.metadata[_VERSION]]
    return RolloutSample(
        prompt=row.get("prompt", []),
        completion=[],
        input_ids=sample.token_ids.astype(np.int64),
        completion_mask=sample.loss_mask.astype(np.int64),
        old_log_probs=sample.logprobs,
        advantage=float(sample.columns["advantages"][sample.loss_mask][0]),
        model_version=min(numbers),
        group_id=group,
        metrics=metrics,
    )


class GatewayTransfer:
    """Wrap a `weight_transfer`, for example TRL's transfer to vLLM, and pause the gateway during each transfer.

    New calls wait in the gateway instead of failing. Turns are recorded with the number of the transfer as their weight
    version. If the gateway requires keys, `client` needs an admin key.
    """

    def __init__(self, client: Client, transfer: Any) -> None:
        self._client, self._transfer = client, transfer
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Set up the wrapped transfer."""
        self._transfer.init_weight_transfer()

    def pause(self) -> None:
        """Make new calls wait in the gateway, then pause the server. The server decides about calls in flight."""
        self._client.pause(timeout=0.0)
        with _resumed_on_failure(self._client):
            self._transfer.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        with _resumed_on_failure(self._client):
            self._transfer.send_weights(iterator)

    def resume(self) -> None:
        """Resume the server, then the gateway with the new weight version."""
        with _resumed_on_failure(self._client):
            self._transfer.resume()
        self._version += 1
        self._client.resume(str(self._version))

    def destroy(self) -> None:
        """Destroy the wrapped transfer."""
        self._transfer.destroy()


class PolicyTransfer(GatewayTransfer):
    """A `weight_transfer` for TRL's `AsyncGRPOTrainer` that loads the weights into the embedded engine of `serving`.

    Calls in flight continue, and the new weights sample their remaining tokens. TRL sends only the trained tensors.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.client, _EngineTransfer(policy))


class _EngineTransfer:
    """Loads weights into the embedded engine, which needs no setup, pause or teardown."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version = policy, 0
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._policy.load(iterator, str(self._version + 1), partial=True)
        self._version += 1


@contextmanager
def _resumed_on_failure(client: Client) -> Iterator[None]:
    """Resume the gateway if the body raises. Otherwise, agents would wait in it forever, and `stop` for the agents."""
    try:
        yield
    except BaseException:
        client.resume()
        raise
