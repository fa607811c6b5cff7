"""Decide whether recorded logprobs can be compared with the logprobs that a trainer computes."""

from __future__ import annotations

from tokentape._supports import SUPPORTS, is_known
from tokentape.types import TokenDistribution, Trajectory

HELP = {
    "raw": "record the logprobs that tokens are sampled with (vllm serve --logprobs-mode processed_logprobs; the "
    "embedded engine: tokentape serve --logprobs-mode processed), or sample at temperature 1",
    "truncated": "sample with top_p 1, top_k 0 and min_p 0, or, if the trainer supports them, record the ids that "
    "truncation keeps (tokentape serve --supports 4096), or record logprobs before truncation (at temperature 1: vllm "
    "serve --logprobs-mode raw_logprobs; the embedded engine: tokentape serve --logprobs-mode scaled)",
    "penalties": "sample without presence, frequency and repetition penalties and without min_tokens",
    "grammar": "sample without a grammar",
    "greedy": "sample at a temperature above 0",
    "unknown": "if you know the distributions, set them with `with_distributions`",
}


def not_comparable(sampled: TokenDistribution | None, recorded: TokenDistribution | None, supports: bool) -> str | None:
    """Return why recorded logprobs are not `log_softmax(logits / temperature)`, and the remedy; None if they are.

    With `supports`, the trainer computes its logprobs over only the ids that truncation kept.
    """
    if sampled is None or sampled.temperature is None or recorded is None or None in _fields(recorded):
        return f"of a distribution that is not known: {HELP['unknown']}"
    if sampled.temperature == 0:
        return f"from greedy sampling, which has no distribution: {HELP['greedy']}"
    if recorded.penalties:
        return f"after penalties: {HELP['penalties']}"
    if recorded.grammar:
        return f"after a grammar: {HELP['grammar']}"
    if recorded.truncation and not supports:
        return f"after truncation: {HELP['truncated']}"
    if recorded.temperature != sampled.temperature:
        return f"at temperature {recorded.temperature:g}, but sampled at {sampled.temperature:g}: {HELP['raw']}"
    return None


def _fields(distribution: TokenDistribution) -> tuple[bool | float | None, ...]:
    return distribution.penalties, distribution.temperature, distribution.truncation, distribution.grammar


def has_supports(trajectory: Trajectory, start: int, end: int) -> bool:
    """Return whether a support is recorded for each trained token from `start` up to `end` (exclusive)."""
    supports = trajectory.payloads.get(SUPPORTS)
    return supports is not None and all(
        is_known(row) for row in supports.rows[start:end][trajectory.loss_mask[start:end]]
    )
