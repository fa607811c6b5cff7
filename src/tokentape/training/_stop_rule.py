"""Halt a training run, or warn, if its last samples exceed limits; log their shares to trackers."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest, TrainingStopped
from tokentape.types import Trajectory

_log = logging.getLogger("tokentape.training")

Tracker: TypeAlias = Callable[[Mapping[str, float]], None]
"""A function that is called with numbers by name, such as those of `StopRule.numbers`."""

_SHARES: Mapping[str, Callable[[Trajectory], bool]] = {
    "unchecked_bridges": lambda sample: "bridge unchecked" in sample.verdict or "bridge differs" in sample.verdict,
    "forked": lambda sample: sample.verdict.startswith("forked"),
    "truncated": lambda sample: "length" in sample.finish_reasons,
    "not_exact": lambda sample: sample.verdict != "exact",
}


class StopRule:
    """Limits on the last `window` samples. Pass it to an adapter, or call `add` in your own loop.

    >>> rule = StopRule(forked=0.2, truncated=0.3)                                  # doctest: +SKIP
    >>> rule.add(assemble(session.trajectories()).samples)                          # doctest: +SKIP

    Once the window is full, the limits are checked at each sample. Samples without loss don't count. None means no
    limit. Several threads may share a rule.

    Args:
        unchecked_bridges: largest share of samples with a bridge (ids added after a turn) that is unchecked or differs.
        forked: largest share of samples with a verdict that begins with `forked`.
        truncated: largest share of samples with a turn that reached its token budget.
        not_exact: largest share of samples with a verdict other than `exact`.
        log_ratio: largest mean of |log importance ratio|, in nats per trained token; see `add_logprobs`.
        window: number of samples, and of `add_logprobs` calls, to look back at.
        action: `halt` raises `TrainingStopped`, also in all later calls. `warn` logs each limit that is exceeded.
        tracker: called with `numbers()` at each `add`; see `wandb_tracker` and `tensorboard_tracker`. Its first
            exception is logged, later ones are ignored.

    """

    def __init__(
        self,
        *,
        unchecked_bridges: float | None = None,
        forked: float | None = None,
        truncated: float | None = None,
        not_exact: float | None = None,
        log_ratio: float | None = None,
        window: int = 100,
        action: Literal["halt", "warn"] = "halt",
        tracker: Tracker | None = None,
    ) -> None:
        if window < 1 or action not in ("halt", "warn"):
            raise InvalidRequest(f"window {window}, action {action!r}: expected at least 1, and halt or warn")
        limits = (unchecked_bridges, forked, truncated, not_exact, log_ratio)
        self._limits = dict(zip((*_SHARES, "log_ratio"), limits, strict=True))
        for name, limit in self._limits.items():
            highest = 1.0 if name in _SHARES else sys.float_info.max
            if limit is not None and not 0 <= limit <= highest:
                expected = "a share from 0 to 1" if name in _SHARES else "a finite number of nats, at least 0"
                raise InvalidRequest(f"{name} is {limit}: expected {expected}", name)
        self._seen: deque[tuple[bool, ...]] = deque(maxlen=window)
        self._ratios: deque[tuple[float, int]] = deque(maxlen=window)
        self._action, self._tracker = action, tracker
        self._tracker_failed = False
        self._exceeded: dict[str, str] = {}
        self._lock = RLock()

    def add(self, samples: Iterable[Trajectory]) -> None:
        """Add samples that will be trained. Raises `TrainingStopped` if a limit is, or was earlier, exceeded."""
        with self._lock:
            for sample in samples:
                if sample.loss_mask.any():
                    self._seen.append(tuple(test(sample) for test in _SHARES.values()))
                    if len(self._seen) == self._seen.maxlen:
                        self._judge(set(_SHARES))
            self._track()
            self._halt()

    def add_logprobs(self, trainer: npt.ArrayLike, recorded: npt.ArrayLike) -> None:
        """Add the trainer's and the recorded logprobs of trained tokens, as arrays or torch tensors.

        The limit is on the mean of |log ratio|, because the mean ratio is 1 for any pair of distributions. Raises as
        `add` does, and `InvalidRequest` if the shapes differ.
        """
        ours, theirs = _array(recorded), _array(trainer)
        if ours.shape != theirs.shape:
            raise InvalidRequest(
                f"trainer's logprobs have shape {theirs.shape}, recorded logprobs {ours.shape}: pass equal shapes",
                "trainer",
            )
        apart = np.abs(theirs - ours)
        with self._lock:
            # NaN must exceed the limit.
            self._ratios.append((float(np.nan_to_num(apart, nan=np.inf).sum()), apart.size))
            if len(self._ratios) == self._ratios.maxlen:
                self._judge({"log_ratio"})
            self._halt()

    def numbers(self) -> dict[str, float]:
        """Return the shares and the mean |log ratio| over the window; those without data yet are left out."""
        with self._lock:
            seen, ratios = [*self._seen], [*self._ratios]
        shares = {name: sum(row[n] for row in seen) / len(seen) for n, name in enumerate(_SHARES) if seen}
        tokens = sum(count for _, count in ratios)
        return shares | ({"log_ratio": sum(total for total, _ in ratios) / tokens} if tokens else {})

    def _track(self) -> None:
        numbers = self.numbers()
        try:
            if self._tracker is not None and numbers:
                self._tracker(numbers)
        except Exception:
            if not self._tracker_failed:
                _log.exception("a stop rule's tracker failed; it is still called, but further failures are not logged")
            self._tracker_failed = True

    def _judge(self, names: set[str]) -> None:
        numbers = self.numbers()
        for name in sorted(names & numbers.keys()):
            limit = self._limits[name]
            if limit is None or numbers[name] <= limit:
                if self._action == "warn":
                    self._exceeded.pop(name, None)
            elif name not in self._exceeded:
                self._exceeded[name] = f"{name} is {numbers[name]:.3g}, the limit is {limit:g}"
                _log.warning("stop rule: %s", self._exceeded[name])

    def _halt(self) -> None:
        if self._exceeded and self._action == "halt":
            raise TrainingStopped(
                f"{'; '.join(self._exceeded.values())} (over the last {self._seen.maxlen}); look at the sessions with "
                "`tokentape view`, and create a new StopRule to continue"
            )


def _array(logprobs: Any) -> npt.NDArray[np.float64]:
    """Return logprobs as float64. A tensor may be on a GPU, require gradients, or be bfloat16, which NumPy lacks."""
    return np.asarray(logprobs.detach().cpu().double() if hasattr(logprobs, "detach") else logprobs, np.float64)


def wandb_tracker(directory: Path | str = ".", **options: Any) -> Tracker:
    """Return a function that logs numbers by name to the open `wandb` run, such as the trainer's.

    If no run is open, it opens a new run in offline mode, with `options` (`project`, `name`), in `directory`/wandb;
    `wandb sync` uploads it. Raises `InvalidRequest` if the package is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise InvalidRequest("wandb_tracker needs the package wandb; run: pip install 'tokentape[wandb]'") from None
    own: Any = None

    def track(numbers: Mapping[str, float]) -> None:
        nonlocal own
        opened = wandb.run
        if opened is None and own is None:
            own = wandb.init(mode="offline", dir=str(directory), reinit="create_new", **options)
            # With `create_new`, `wandb.run` stays None, but the trainer's `wandb.init` would return an active run.
            wandb.setup().remove_active_run(own)
        # The trainer's run counts steps itself, so the numbers belong to its next step.
        metrics = {f"tokentape/{name}": value for name, value in numbers.items()}
        (opened or own).log(metrics, commit=opened is None)

    return track


def tensorboard_tracker(directory: Path | str) -> Tracker:
    """Return a function that writes numbers by name to an event file in `directory`, one step per call.

    Raises `InvalidRequest` if the package is not installed.
    """
    try:
        from tensorboard.summary import Writer
    except ModuleNotFoundError:
        raise InvalidRequest("tensorboard_tracker needs TensorBoard: pip install 'tokentape[tensorboard]'") from None
    writer, steps = Writer(str(directory)), count()

    def track(numbers: Mapping[str, float]) -> None:
        step = next(steps)
        for name, value in numbers.items():
            writer.add_scalar(f"tokentape/{name}", value, step)
        writer.flush()

    return track
