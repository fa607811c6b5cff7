"""Numbers of a run for experiment trackers, through the trackers' own clients, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tokentape.errors import InvalidRequest
from tokentape.training._stop_rule import Tracker

_PREFIX = "tokentape/"


def wandb_tracker(directory: Path | str = ".", **options: Any) -> Tracker:
    """Return a function that logs numbers by name to the run of `wandb` that is open then, such as the trainer's.

    While none is, it logs to a run of its own, which the first numbers open with `options` (`project`, `name`) in
    offline mode, in `directory`/wandb; `wandb sync` uploads it. Raises `InvalidRequest` without the package.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise InvalidRequest("Weights & Biases needs its client; run: pip install 'tokentape[wandb]'") from None
    own: Any = None

    def track(numbers: Mapping[str, float]) -> None:
        nonlocal own
        opened = wandb.run
        if opened is None and own is None:
            own = wandb.init(mode="offline", dir=str(directory), reinit="create_new", **options)
            # `create_new` leaves `wandb.run` alone, and yet the trainer's `wandb.init` would return an active run.
            wandb.setup().remove_active_run(own)
        # A run of the trainer's counts its own steps: the numbers go with its next one.
        named = {_PREFIX + name: value for name, value in numbers.items()}
        (opened or own).log(named, commit=opened is None)

    return track


def tensorboard_tracker(directory: Path | str) -> Tracker:
    """Return a function that writes numbers by name to an event file in `directory`, one step per call.

    Raises `InvalidRequest` without the package.
    """
    try:
        from tensorboard.summary import Writer
    except ModuleNotFoundError:
        raise InvalidRequest("TensorBoard needs its package; run: pip install 'tokentape[tensorboard]'") from None
    writer, steps = Writer(str(directory)), count()

    def track(numbers: Mapping[str, float]) -> None:
        step = next(steps)
        for name, value in numbers.items():
            writer.add_scalar(_PREFIX + name, value, step)
        writer.flush()

    return track
