"""Metrics of a training step: the difference between the trainer's batch and the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from paths import Given

from tokentape.audit import logprob_numbers
from tokentape.types import Logprobs

SEQUENCE_RATIO_LIMIT = 3.0
"""By default for vLLM, TRL drops sequences with an importance ratio above this."""


def importance(trainers: Sequence[Logprobs], samplers: Sequence[Logprobs]) -> dict[str, float]:
    """Return statistics of the importance ratios, trainer over sampler, of trained tokens with sampled text.

    Both arguments are logprobs: an array per sequence over its trained tokens, NaN where the sampler did not sample
    this text. With the weights that sampled, the sampled ids and no rounding, every ratio is 1.
    """
    apart = [
        trainer.astype(np.float64) - sampler.astype(np.float64)
        for trainer, sampler in zip(trainers, samplers, strict=True)
    ]
    trained = sum(map(len, apart))
    apart = [one[np.isfinite(one)] for one in apart]
    together = np.concatenate(apart)
    ratios = np.exp(np.minimum(together, 50))
    sums = np.array([one.sum() for one in apart])
    found = logprob_numbers(apart)
    return {
        "ratio_mean": float(ratios.mean()),
        "ratio_max": float(ratios.max()),
        "ess_tokens": found.ess_tokens,
        "ess_sequences": found.ess_sequences,
        "k3": found.k3,
        "sequences_masked": float((sums > np.log(SEQUENCE_RATIO_LIMIT)).mean()),
        "not_sampled": 1 - len(together) / trained,
    }


def drift(given: Sequence[Given]) -> dict[str, float]:
    """Return the shares of sampled tokens with other ids or other text at the trainer, and of such sessions."""
    sampled = sum(one.sampled for one in given)
    return {
        "other_ids": sum(one.other_ids for one in given) / sampled,
        "other_text": sum(one.other_text for one in given) / sampled,
        "changed_sessions": float(np.mean([one.other_ids + one.other_text > 0 for one in given])),
    }
