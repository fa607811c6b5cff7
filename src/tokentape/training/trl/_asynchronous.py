"""TRL's asynchronous GRPO: a worker that rolls out all the time, and weights that change under it.

`AsyncGRPOTrainer` asks for two things. A rollout worker puts scored samples on a queue: here every branch of a session
becomes one, with the recorded logprobs, which that trainer's loss takes as those of the old policy. A weight transfer
brings the trainer's weights to where it is sampled: here the gateway holds new calls back meanwhile, calls under way go
on, and the record says which tokens are of which version.
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

    Rewards are what agents return or give to their sessions; advantages are relative to the row's other sessions. The
    trainer's own reward functions are not called. A sample's version is the oldest that sampled any token of it.

    Args:
        client: of the gateway.
        agent: run once for each of a row's generations.
        dataset: rows, gone through again and again in their order.
        num_generations: sessions per row that are compared with each other.
        concurrency: agents that run at once. With more, samples are older when they are trained.
        failures: `raise` ends the training when an agent raised; `skip` leaves its session out.
        select: which trajectories stay; see `assemble`.
        max_length: of a sample; see `assemble`.
        stop_rule: ends the training, or warns, when what agents sampled passes its limits.

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
                f"{num_generations} generations of {len(dataset)} rows: expected 2 or more of 1 or more, since a "
                "session is compared with others of its row"
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
        """Begin. The trainer calls it once its first weights are in place."""
        self._heard = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Begin no more sessions, and wait for those under way."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """The trainer's count of its weight transfers."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise `TokentapeError` if rollouts have failed, or none has ended for so many seconds."""
        if self._failure is not None:
            raise TokentapeError(f"rollouts ended: {self._failure}") from self._failure
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
        """Run an agent; the last one of its group puts the samples of all on the queue."""
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
                # The trainer is busy, not the agents silent.
                self._heard = time.monotonic()

    def _scored(self, group: int, row: Row, rollouts: Sequence[Rollout]) -> list[Any]:
        for rollout in rollouts:
            if rollout.error is not None and self._failures == "raise":
                raise TokentapeError(f"the agent of session {rollout.session_id!r} raised") from rollout.error
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
    """TRL's `RolloutSample`: arrays over the whole sequence, and one advantage."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    temperature([sample], "trl")
    versions = {version for _, _, version in sample.weight_spans}
    # Some engines name their weights themselves; then what counts is what was there when the session began.
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
    """Wrap a `weight_transfer`, TRL's own to a vLLM server for example, and tell the gateway before the server of it.

    New calls wait in the gateway instead of failing, and turns are recorded under the version that the trainer counts.
    The gateway's client needs an admin key if there are keys.
    """

    def __init__(self, client: Client, transfer: Any) -> None:
        self._client, self._transfer = client, transfer
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Set up the wrapped transfer."""
        self._transfer.init_weight_transfer()

    def pause(self) -> None:
        """Hold new calls back, then pause the server. Calls under way are the server's to decide."""
        self._client.pause(timeout=0.0)
        with _opened_on_failure(self._client):
            self._transfer.pause()

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        with _opened_on_failure(self._client):
            self._transfer.send_weights(iterator)

    def resume(self) -> None:
        """Let the server go on, then the gateway, under the version that the trainer counts."""
        with _opened_on_failure(self._client):
            self._transfer.resume()
        self._version += 1
        self._client.resume(str(self._version))

    def destroy(self) -> None:
        """Take down the wrapped transfer."""
        self._transfer.destroy()


class PolicyTransfer(GatewayTransfer):
    """A `weight_transfer` of TRL's `AsyncGRPOTrainer` into the embedded engine of `serving`.

    Calls under way go on; the new weights sample from the next token on. TRL sends only tensors that are trained.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.client, _EngineTransfer(policy))


class _EngineTransfer:
    """The embedded engine's part: there is nothing to set up, pause or take down."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version = policy, 0
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._policy.load(iterator, str(self._version + 1), partial=True)
        self._version += 1


@contextmanager
def _opened_on_failure(client: Client) -> Iterator[None]:
    """Agents that wait at the gateway would be waited for when the trainer ends."""
    try:
        yield
    except BaseException:
        client.resume()
        raise
