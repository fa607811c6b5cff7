"""Make samples and batches for trainers from recorded sessions.

`exports` has a function for each trainer. `trl`, `verl`, `slime`, `skyrl`, `verifiers`, `tinker`, `agent_lightning`,
`nemo_rl` and `openenv` run agents during training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names

if TYPE_CHECKING:
    from tokentape._supports import kept_ids
    from tokentape.training._align import align, pieces
    from tokentape.training._collate import Batch, group_advantages, media_arrays, packed, padded, to_torch, with_column
    from tokentape.training._conversation import conversation_sample
    from tokentape.training._logprob_check import Forward, check_logprobs, forward_pass
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
        read_samples,
        to_dataset,
        write_samples,
    )
    from tokentape.training._sft import sft_sample
    from tokentape.training._stop_rule import StopRule, tensorboard_tracker, wandb_tracker
    from tokentape.training._supports import renormalized_logprobs
    from tokentape.training._tokenizer import (
        Auxiliary,
        TrainingTokenizer,
        codebook,
        enlarge_model,
        mean_of_pieces,
        normal,
        pieces_of,
        token_adapt,
    )
    from tokentape.training._trainers import with_distributions

__all__ = [
    "Assembled", "Auxiliary", "Batch", "DropRetries", "Forward", "KeepVerdicts", "MaxLength", "Sample", "StopRule",
    "TrainingTokenizer", "align", "assemble", "check_logprobs", "codebook", "conversation_sample", "enlarge_model",
    "forward_pass", "group_advantages", "kept_ids", "longest_branch", "mean_of_pieces", "media_arrays", "normal",
    "one_per_leaf", "one_per_turn", "packed", "padded", "pieces", "pieces_of", "prove", "read_samples",
    "renormalized_logprobs", "sft_sample", "tensorboard_tracker", "to_dataset", "to_torch", "token_adapt",
    "wandb_tracker", "with_column", "with_distributions", "write_samples",
]  # fmt: skip

__getattr__ = lazy_names(__name__)
