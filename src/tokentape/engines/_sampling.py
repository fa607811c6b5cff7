"""Sample token ids from logits: pure functions over a batch, with one row per request.

The steps have vLLM's order: penalties, temperature, min-p, top-k, top-p. Each step starts from the previous step's
distribution. Rows never influence each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokentape.engines._base import SamplingParams
from tokentape.engines._distributions import is_greedy, truncates


def penalise(logits: Tensor, prompt_ids: Tensor, completion_ids: Tensor, params: SamplingParams) -> Tensor:
    """Apply the repetition, frequency and presence penalties to one row of logits, float32 [vocab].

    The repetition penalty (Keskar et al. 2019, arXiv:1909.05858) counts tokens of the prompt and the completion, both
    int64 [tokens]. The other two (OpenAI's definition) count only those of the completion.
    """
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[prompt_ids] = True
        seen[completion_ids] = True
        factor = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if params.frequency_penalty or params.presence_penalty:
        counts = torch.bincount(completion_ids, minlength=logits.shape[-1])
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def distribution(logits: Tensor, params: Sequence[SamplingParams], *, truncate: bool = True) -> Tensor:
    """Return the probabilities to sample each row from, after temperature, min-p, top-k and top-p.

    Args:
        logits: float32 [rows, vocab], after penalties; -inf for an id that must not be sampled.
        params: one per row. Greedy rows use temperature 1.
        truncate: whether to apply min-p, top-k and top-p.

    Returns:
        float64 [rows, vocab], not normalized; 0 for an id that is ruled out. Among equally likely ids, lower ids are
        kept first.

    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(-1)

    temperature = column([1.0 if is_greedy(p) else p.temperature for p in params])
    probabilities = (logits.double() / temperature).softmax(-1)
    cut = [(row, p) for row, p in enumerate(params) if truncates(p)] if truncate else []
    rows = [row for row, p in cut if p.min_p]
    if rows:
        floor = column([params[i].min_p for i in rows]) * probabilities[rows].amax(-1, keepdim=True)
        probabilities[rows] = probabilities[rows].where(probabilities[rows] >= floor, 0.0)
    rows = [row for row, p in cut if p.top_k or p.top_p < 1.0]
    if rows:
        top_k = column([params[i].top_k or logits.shape[-1] for i in rows])
        top_p = column([params[i].top_p if params[i].top_p < 1.0 else float("inf") for i in rows])
        probabilities[rows] = _truncated(probabilities[rows], top_k, top_p)
    return probabilities


def _truncated(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep only the `top_k` most likely ids, then only the smallest set with `top_p` of their probability."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(ordered.shape[-1], device=ordered.device) < top_k
    ordered = ordered.where(keep, 0.0)
    before = ordered.cumsum(-1) - ordered
    keep &= before < top_p * ordered.sum(-1, keepdim=True)
    return probabilities.where(torch.zeros_like(keep).scatter(-1, order, keep), 0.0)


def draw(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw an id for each row by inverting its cumulative distribution, in id order, at a uniform number in [0, 1).

    `probabilities` are float64 [rows, vocab], not necessarily normalized. Return int64 [rows], never an id with
    probability 0. If a request has its own random stream, its seed is reproducible in any batch and on any device.
    """
    cumulative = probabilities.cumsum(-1)
    # A factor below 1 keeps the float64 product below the total, so the search never passes the last likely id.
    targets = torch.tensor(uniforms, dtype=torch.float64, device=cumulative.device).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # Only a row of NaN runs past the end. Its caller sees the NaN logprob; other rows must not be affected.
    return drawn.clamp(max=probabilities.shape[-1] - 1)


def choose(
    logits: Tensor, probabilities: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Return one id per row, int64 [rows]: the most likely id for greedy rows, a drawn id for the others.

    `logits` and `probabilities` are the argument and the result of `distribution`; `uniforms` as in `draw`.
    """
    likeliest = logits.argmax(-1)
    drawn = [i for i, p in enumerate(params) if not is_greedy(p)]
    if drawn:
        likeliest[drawn] = draw(probabilities[drawn], [uniforms[i] for i in drawn])
    return likeliest
