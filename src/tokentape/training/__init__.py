"""Samples, batches and exports of recorded sessions for trainers. Adapters are packages of their own: `trl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape.lazy import lazy_names

if TYPE_CHECKING:
    from tokentape.training.collate import Batch, packed, padded, to_torch
    from tokentape.training.files import read_samples, to_dataset, write_samples
    from tokentape.training.samples import (
        Assembled,
        DropRetries,
        KeepVerdicts,
        MaxLength,
        Sample,
        assemble,
        group_advantages,
        longest_branch,
        one_per_leaf,
        one_per_turn,
        with_column,
    )
    from tokentape.training.sft import sft_sample
    from tokentape.training.trainers import with_distributions

__all__ = [
    "Assembled",
    "Batch",
    "DropRetries",
    "KeepVerdicts",
    "MaxLength",
    "Sample",
    "assemble",
    "group_advantages",
    "longest_branch",
    "one_per_leaf",
    "one_per_turn",
    "packed",
    "padded",
    "read_samples",
    "sft_sample",
    "to_dataset",
    "to_torch",
    "with_column",
    "with_distributions",
    "write_samples",
]

__getattr__ = lazy_names(
    __name__,
    {
        "tokentape.training.collate": "Batch packed padded to_torch",
        "tokentape.training.files": "read_samples to_dataset write_samples",
        "tokentape.training.samples": "Assembled DropRetries KeepVerdicts MaxLength Sample assemble group_advantages "
        "longest_branch one_per_leaf one_per_turn with_column",
        "tokentape.training.sft": "sft_sample",
        "tokentape.training.trainers": "with_distributions",
    },
)
