"""Export what trainers replay besides ids: the ids that truncated sampling kept (supports), and routed experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokentape._supports import SUPPORTS, kept_ids, too_many
from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample

if TYPE_CHECKING:
    import torch

Kept = list[npt.NDArray[np.int32] | None]
"""For each token, the ids that truncation kept, or None for the whole vocabulary."""


def renormalized_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, supports: npt.NDArray[Any], temperatures: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return each id's log-probability normalized over its support, the ids it was drawn from, float32 with gradients.

    `logits` [..., vocabulary] predict `ids` [...]. `supports` [...] are rows of the payload `supports`; an empty row
    means the whole vocabulary. The logits are first divided by `temperatures` [...]. With a batch from `padded`:

    >>> after = batch.shifted()                                                           # doctest: +SKIP
    >>> renormalized_logprobs(logits[:, :-1], to_torch(after)["target_ids"], batch.payloads["supports"].rows[:, 1:])
    ...                                                                                   # doctest: +SKIP

    Raises `InvalidRequest` for an id that is not in its support, because then the two belong to different tokens, and
    for a support of which only the size is recorded.
    """
    import torch

    if any(too_many(support) for support in supports.ravel()):
        raise InvalidRequest(
            "only the size of a support is recorded, because the support was larger than `--supports`: leave the token "
            "out, or record with a larger `--supports`",
            "supports",
        )

    scaled = logits.float() / torch.as_tensor(temperatures, device=logits.device).unsqueeze(-1)
    scaled, targets = scaled.reshape(-1, logits.shape[-1]), ids.reshape(-1, 1)
    norms = scaled.logsumexp(-1)
    ids_by_row = {row: support for row, support in enumerate(map(kept_ids, supports.ravel())) if support is not None}
    if ids_by_row:
        table = torch.full((len(ids_by_row), max(map(len, ids_by_row.values()))), -1, dtype=torch.int64)
        for place, support in zip(table, ids_by_row.values(), strict=True):
            place[: len(support)] = torch.from_numpy(support)
        rows, table = torch.tensor(list(ids_by_row), device=ids.device), table.to(ids.device)
        if not (table == targets[rows]).any(-1).all():
            raise InvalidRequest("an id is not in its support; pass the rows of the same tokens as `ids`", "supports")
        inside = scaled[rows].gather(-1, table.clamp(min=0)).masked_fill(table < 0, -torch.inf)
        norms = norms.index_put((rows,), inside.logsumexp(-1))
    return (scaled.gather(-1, targets).squeeze(-1) - norms).reshape(ids.shape)


def refuse_supports_with_full_logprobs(sample: Sample) -> None:
    """Raise `InvalidRequest` if trained tokens have supports, but logprobs over the whole vocabulary."""
    supports = sample.payloads.get(SUPPORTS)
    if supports is None:
        return
    for (turn, start, end), recorded in zip(sample.completions(), sample.logprobs_of, strict=True):
        rows = supports.rows[start:end][sample.loss_mask[start:end]]
        if recorded is not None and recorded.truncation is False and rows.any():
            raise InvalidRequest(
                f"turn {turn} of session {sample.session_id!r} has supports, and logprobs over the whole vocabulary; "
                "both must be of the same distribution: record with --logprobs-mode processed, or leave the supports "
                "out with `replace(sample, payloads={})`",
                "samples",
            )


def token_supports(sample: Sample) -> Kept | None:
    """Return each trained token's support; None if no token has one. Raises `InvalidRequest` for a token outside it."""
    out: Kept = [None] * len(sample.token_ids)
    for (_, start, end), recorded in zip(sample.completions(), sample.logprobs_of, strict=True):
        if recorded is None or not recorded.truncation:
            continue
        for position in np.flatnonzero(sample.loss_mask[start:end]) + start:
            out[position] = support = kept_ids(sample.payloads[SUPPORTS].rows[position])
            if support is None or sample.token_ids[position] not in support:
                raise InvalidRequest(
                    f"token {position} of session {sample.session_id!r}, leaf {sample.leaf}, is not in the support "
                    "recorded for it; check the record with `tokentape verify`",
                    "samples",
                )
    return out if any(row is not None for row in out) else None


def slime_fields(sample: Sample, start: int, sampling_mask: Callable[..., Any] | None) -> dict[str, Any]:
    """Return slime's fields for a response's supports; with Miles' class `RolloutSamplingMask`, Miles' field.

    Miles needs a support for each token: a token that is not trained gets itself as its support.
    """
    supports = token_supports(sample)
    if supports is None:
        return {}
    rows: list[list[int]] = [[] if support is None else support.tolist() for support in supports[start:]]
    # To slime's loss, a token with an empty support was certain.
    if any(trained and not row for trained, row in zip(sample.loss_mask[start:], rows, strict=True)):
        raise InvalidRequest(_ALL_OR_NONE, "samples")
    if sampling_mask is not None:
        rows = [row or [int(own)] for row, own in zip(rows, sample.token_ids[start:], strict=True)]
    ids = [token_id for row in rows for token_id in row]
    offsets = np.cumsum([0, *map(len, rows)]).tolist()
    if sampling_mask is not None:
        return {"rollout_sampling_mask": sampling_mask(ids=ids, offsets=offsets)}
    return {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}


def alike_in_supports(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield slime's or Miles' rows. Raises `InvalidRequest` if only some of them have supports."""
    fields, lacking = {"rollout_sampling_mask", "rollout_top_p_token_ids"}, set()
    for row in rows:
        lacking.add(fields.isdisjoint(row))
        if len(lacking) > 1:
            raise InvalidRequest(_ALL_OR_NONE, "supports")
        yield row


_ALL_OR_NONE = (
    "slime and Miles replay supports for all turns or none; some were sampled without truncation: sample all alike"
)


def prime_rl_fields(sample: Sample, sampling_mask: Callable[..., Any]) -> dict[str, Any]:
    """Return prime-rl's field for supports: ids and a count per token, both as bytes of int32."""
    supports = token_supports(sample)
    if supports is None:
        return {}
    counts = np.array([0 if support is None else len(support) for support in supports], "<i4")
    ids = np.concatenate([support for support in supports if support is not None]).astype("<i4")
    return {"sampling_mask": sampling_mask(ids=ids.tobytes(), counts=counts.tobytes())}


def skyrl_fields(samples: Sequence[Sample], starts: Sequence[int]) -> dict[str, Any]:
    """Return SkyRL's field for supports: int32 [response, largest support], filled up with -1."""
    supports = [token_supports(sample) for sample in samples]
    wide = max((len(support) for rows in supports if rows for support in rows if support is not None), default=0)
    if not wide:
        return {}
    arrays = []
    for sample, start, rows in zip(samples, starts, supports, strict=True):
        array = np.full((len(sample.token_ids), wide), -1, np.int32)
        for position, support in enumerate(rows or ()):
            if support is not None:
                # The sampled id is first, as in SkyRL's rows.
                sampled = sample.token_ids[position]
                array[position, : len(support)] = [sampled, *support[support != sampled]]
        arrays.append(array[start:])
    return {"rollout_sample_support": arrays}


EXPERTS = "routed_experts"
"""The payload with the experts that each token was routed to when it was sampled."""


def routed_experts(sample: Sample, layers: int | None = None) -> npt.NDArray[np.int32] | None:
    """Return the experts of all tokens but the last, int32 [tokens - 1, layers, top k]; None if none are recorded.

    The last token is never fed to the model. SGLang returns the experts of all layers in one row: with `layers`, such
    rows are split by layer, else they are returned unchanged, [tokens - 1, layers * top k].

    Raises `InvalidRequest` if the experts of any of these tokens are unknown, because a trainer replays all of them.
    """
    payload = sample.payloads.get(EXPERTS)
    if payload is None:
        return None
    rows, known = payload.rows[:-1].astype(np.int32), payload.known[:-1]
    if not known.all():
        raise InvalidRequest(
            f"session {sample.session_id!r} has routed experts for {int(known.sum())} of {len(known)} tokens; a "
            "trainer needs them for all: record whole sessions with `--payloads`, or leave them out with "
            "`replace(sample, payloads={})`",
            "samples",
        )
    return rows.reshape(len(rows), layers, -1) if layers and rows.ndim == 2 else rows


def all_experts(sample: Sample, last: int) -> npt.NDArray[np.int32] | None:
    """Return `routed_experts` plus a row for the last token, filled with `last`; None if none are recorded."""
    rows = routed_experts(sample)
    return None if rows is None else np.concatenate([rows, np.full((1, *rows.shape[1:]), last, np.int32)])


def experts_field(
    name: str, rows: npt.NDArray[np.int32] | None, end: int | None = None, start: int = 0
) -> dict[str, npt.NDArray[np.int32]]:
    """Return a field with the rows of the tokens from `start` to `end`; no field if there are no rows."""
    return {} if rows is None else {name: rows[start:end]}


def prime_rl_experts(sample: Sample, make: Callable[..., Any]) -> dict[str, Any]:
    """Return prime-rl's field: the bytes of the rows of all tokens, zeros for the last."""
    rows = all_experts(sample, 0)
    if rows is None:
        return {}
    return {"routed_experts": make(data=rows.tobytes(), shape=list(rows.shape), dtype=rows.dtype.name)}


def skyrl_experts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return SkyRL's field for experts. Raises `InvalidRequest` if only some samples have them."""
    experts = [rows for rows in map(routed_experts, samples) if rows is not None]
    if experts and len(experts) < len(samples):
        raise InvalidRequest(
            f"{len(experts)} of {len(samples)} samples have routed experts; SkyRL replays them for all or none: leave "
            "them out with `replace(sample, payloads={})`",
            "samples",
        )
    return {"rollout_expert_indices": experts} if experts else {}
