"""Samples and batches of recorded sessions for trainers.

`exports` has a function per trainer. `trl`, `verl`, `slime`, `skyrl`, `verifiers`, `tinker`, `agent_lightning`,
`nemo_rl` and `openenv` run agents live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape._supports import kept_ids
    from tokentape.training._align import align, pieces
    from tokentape.training._collate import Batch, packed, padded, to_torch
    from tokentape.training._columns import group_advantages, with_column
    from tokentape.training._embeddings import enlarge_model, pieces_of, token_adapt
    from tokentape.training._files import read_samples, to_dataset, write_samples
    from tokentape.training._logprob_check import Forward, check_logprobs, forward_pass
    from tokentape.training._media import media_arrays
    from tokentape.training._proof import prove
    from tokentape.training._samples import (
        Assembled,
        DropRetries,
        KeepVerdicts,
        MaxLength,
        Sample,
        assemble,
        longest_branch,
        one_per_leaf,
        one_per_turn,
    )
    from tokentape.training._sft import sft_sample
    from tokentape.training._stop_rule import StopRule
    from tokentape.training._supports import renormalized_logprobs
    from tokentape.training._tokenizer import TrainingTokenizer, codebook
    from tokentape.training._trackers import tensorboard_tracker, wandb_tracker
    from tokentape.training._trainers import with_distributions

__all__ = [
    "Assembled", "Batch", "DropRetries", "Forward", "KeepVerdicts", "MaxLength", "Sample", "StopRule",
    "TrainingTokenizer", "align", "assemble", "check_logprobs", "codebook", "enlarge_model", "forward_pass",
    "group_advantages", "kept_ids", "longest_branch", "media_arrays", "one_per_leaf", "one_per_turn", "packed",
    "padded", "pieces", "pieces_of", "prove", "read_samples", "renormalized_logprobs", "sft_sample",
    "tensorboard_tracker", "to_dataset", "to_torch", "token_adapt", "wandb_tracker", "with_column",
    "with_distributions", "write_samples",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "tokentape._supports": "kept_ids",
        "tokentape.training._align": "align pieces",
        "tokentape.training._collate": "Batch packed padded to_torch",
        "tokentape.training._embeddings": "enlarge_model pieces_of token_adapt",
        "tokentape.training._files": "read_samples to_dataset write_samples",
        "tokentape.training._logprob_check": "Forward check_logprobs forward_pass",
        "tokentape.training._media": "media_arrays",
        "tokentape.training._proof": "prove",
        "tokentape.training._columns": "group_advantages with_column",
        "tokentape.training._samples": "Assembled DropRetries KeepVerdicts MaxLength Sample assemble longest_branch "
        "one_per_leaf one_per_turn",
        "tokentape.training._sft": "sft_sample",
        "tokentape.training._stop_rule": "StopRule",
        "tokentape.training._supports": "renormalized_logprobs",
        "tokentape.training._tokenizer": "TrainingTokenizer codebook",
        "tokentape.training._trackers": "tensorboard_tracker wandb_tracker",
        "tokentape.training._trainers": "with_distributions",
    },
)
