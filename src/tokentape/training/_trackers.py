"""Log the numbers of a run to experiment trackers, with their own clients and without a network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tokentape.errors import InvalidRequest
from tokentape.training._stop_rule import Tracker

_PREFIX = "tokentape/"


def wandb_tracker(directory: Path | str = ".", **options: Any) -> Tracker:
    """Return a function that logs numbers by name to the open `wandb` run, such as the trainer's.

    Without an open run, it opens a new one in offline mode, with `options` (`project`, `name`) and in
    `directory`/wandb; `wandb sync` uploads it. Raises `InvalidRequest` without the package.
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
            # With `create_new`, `wandb.run` stays None, but the trainer's `wandb.init` would return an active run.
            wandb.setup().remove_active_run(own)
        # The trainer's run counts steps itself, so the numbers belong to its next step.
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
