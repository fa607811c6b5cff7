"""Collate samples into batches, padded on either side or packed, as numpy arrays or torch tensors.

Per-token arrays of a batch are not shifted: at [row, t] are the id, the mask, the logprob and the columns of the *same*
token. A causal model's logits at t - 1 predict the token at t. So either pass `labels` to a model that shifts them, as
transformers models do, or use `shifted()`, whose arrays match `logits[:, :-1]`.

The loss mask comes from the samples, never from a comparison with the padding id, which may also end sequences.
Advantages and other per-token numbers are columns of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tokentape._session.payloads import blank_rows
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample, each
from tokentape.training._supports import refuse_supports_with_full_logprobs
from tokentape.training._trainers import token_temperatures
from tokentape.types import MediaSpan, TokenRows, TokenValues

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of a token without loss, which torch's cross entropy ignores."""

NO_VERSION = -1
"""Value in `weight_versions` for a token that was not sampled."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of samples. Per-token arrays have shape [rows, length]."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    """1 for tokens, 0 for padding."""
    position_ids: npt.NDArray[np.int64]
    """The token's position in its sample, from 0; 0 for padding."""
    segment_ids: npt.NDArray[np.int32]
    """Number of the token's sample in the row, from 1; 0 for padding. Tokens attend only to their own sample."""
    loss_mask: npt.NDArray[np.bool_]
    """Tokens that carry loss."""
    labels: npt.NDArray[np.int64]
    """The ids where `loss_mask` is True, else -100. Not shifted."""
    logprobs: npt.NDArray[np.float32]
    """Recorded logprob of a sampled token; 0.0 for other tokens, NaN for a trained token that was not sampled."""
    temperatures: npt.NDArray[np.float32]
    """Divide the logits that predict the token by this: then `log_softmax`, over the token's support if the batch has
    one, gives the distribution of `logprobs`. 1.0 for tokens without loss, NaN if unknown."""
    weight_versions: npt.NDArray[np.int32]
    """Index in `versions` of the weights that sampled the token; -1 for tokens that were not sampled."""
    versions: tuple[str, ...]
    places: npt.NDArray[np.int64]
    """Row, start and end (exclusive) of each sample, shape [samples, 3]."""
    cu_seqlens: npt.NDArray[np.int32]
    """Sequence starts in the flattened [rows * length], and the end, for attention kernels with variable lengths. Runs
    of padding count as sequences."""
    rewards: npt.NDArray[np.float64]
    """Reward of each sample, NaN if it has no reward."""
    truncated: npt.NDArray[np.bool_]
    """For each sample, True if its last turn is known to have ended because it reached its token budget."""
    groups: tuple[str | None, ...]
    """Group of each sample."""
    columns: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Per-token columns by name; 0.0 for padding."""
    payloads: dict[str, TokenRows] = field(default_factory=dict)
    """Payloads by name: `rows` of shape [rows, length, ...] and `known` of shape [rows, length]."""
    media: tuple[tuple[MediaSpan, ...], ...] = ()
    """Images of each sample; their offsets count from the sample's start."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name: fields, columns, and payloads as `NAME` and `NAME_known`.

        Payloads with rows of unequal length, such as `supports`, are left out.
        """
        dense = {name: payload for name, payload in self.payloads.items() if payload.rows.dtype != object}
        own = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return {
            **{name: value for name, value in own.items() if isinstance(value, np.ndarray)},
            **self.columns,
            **{name: payload.rows for name, payload in dense.items()},
            **{f"{name}_known": payload.known for name, payload in dense.items()},
        }

    def shifted(self) -> dict[str, npt.NDArray[Any]]:
        """Return arrays of shape [rows, length - 1]. Index t has the token at t + 1, which `logits[:, t]` predict.

        These are `target_ids`, `loss_mask`, `logprobs`, `temperatures`, `weight_versions` and the columns. The
        importance ratio is `exp(log_softmax(logits[:, :-1] / temperatures).gather(target_ids) - logprobs)` where
        `loss_mask` is True; with supports, use `renormalized_logprobs` instead of `log_softmax`. The first token of a
        sample has no loss, so no loss depends on the previous sample in a packed row.
        """
        names = ("loss_mask", "logprobs", "temperatures", "weight_versions")
        arrays = {"target_ids": self.input_ids, **{name: getattr(self, name) for name in names}, **self.columns}
        return {name: values[:, 1:] for name, values in arrays.items()}


def to_torch(arrays: dict[str, npt.NDArray[Any]], device: str | torch.device | None = None) -> dict[str, torch.Tensor]:
    """Return `batch.arrays()` or `batch.shifted()` as tensors, which share memory with the arrays on the CPU."""
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    return {name: tensor if device is None else tensor.to(device) for name, tensor in tensors.items()}


def padded(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    vocab_size: int,
    side: Literal["right", "left"] = "right",
    length: int | None = None,
    multiple: int = 1,
    check_logprobs: bool = True,
) -> Batch:
    """Pad samples to one row each.

    Rows have exactly `length` tokens; by default they are as long as the longest sample, rounded up to a multiple of
    `multiple`. `vocab_size` is the number of rows in the model's embedding. Set `check_logprobs` to False if the loss
    does not use logprobs.

    Raises `InvalidRequest` if `samples` is empty; for an id outside the vocabulary; for a sample longer than `length`
    (`assemble(..., max_length=...)` cuts or drops these); if the first token of a sample carries loss; for a trained
    token without a value in a column; for a column or payload with the name of another array; for recorded logprobs
    that `log_softmax(logits / temperature)` can't produce, or of which some trained tokens have none; and for logprobs
    over the whole vocabulary with recorded supports.
    """
    samples = _checked(samples, pad_id, vocab_size)
    if side not in ("right", "left"):
        raise InvalidRequest(f"side is {side!r}: expected right or left", "side")
    lengths = [len(sample.token_ids) for sample in samples]
    size = _row_length(max(lengths), length, multiple)
    starts = [size - own if side == "left" else 0 for own in lengths]
    places = np.stack([np.arange(len(samples)), starts, np.add(starts, lengths)], axis=1)
    return _fill(samples, places, len(samples), size, pad_id, check_logprobs)


def packed(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    vocab_size: int,
    length: int | None = None,
    multiple: int = 1,
    check_logprobs: bool = True,
) -> Batch:
    """Pack samples into one row, or with `length` into rows of that many tokens, by first fit.

    Attention must not cross samples: pass `cu_seqlens` to a kernel, or build a mask from `segment_ids`. Models of
    transformers 5 find boundaries from `position_ids`, which restart at each sample, but only with `use_cache=False`
    and without an attention mask; with flash attention they take one row. Raises the errors of `padded`.
    """
    samples = _checked(samples, pad_id, vocab_size)
    sizes = [len(sample.token_ids) for sample in samples]
    size = _row_length(sum(sizes) if length is None else max(sizes), length, multiple)
    places = np.zeros((len(samples), 3), np.int64)
    used: list[int] = []
    # First fit, longest sample first. A single row keeps the order.
    order = range(len(samples)) if length is None else sorted(range(len(samples)), key=lambda n: -sizes[n])
    for n in order:
        row = next((row for row, filled in enumerate(used) if filled + sizes[n] <= size), len(used))
        if row == len(used):
            used.append(0)
        places[n] = row, used[row], used[row] + sizes[n]
        used[row] += sizes[n]
    return _fill(samples, places, len(used), size, pad_id, check_logprobs)


def _row_length(longest: int, length: int | None, multiple: int) -> int:
    if multiple < 1:
        raise InvalidRequest(f"multiple is {multiple}: expected at least 1", "multiple")
    if length is None:
        return -(-longest // multiple) * multiple
    if length % multiple:
        raise InvalidRequest(f"length is {length}: expected a multiple of {multiple}", "length")
    if longest > length:
        raise InvalidRequest(
            f"a sample has {longest} tokens, rows have {length}; pass max_length=MaxLength({length}, ...) to assemble, "
            "which cuts or drops such samples",
            "length",
        )
    return length


def _checked(samples: Iterable[Sample], pad_id: int, vocab_size: int) -> Sequence[Sample]:
    samples = list(each(samples, Sample))
    if not samples:
        raise InvalidRequest("there are no samples: a batch needs at least 1", "samples")
    if not 0 <= pad_id < vocab_size:
        raise InvalidRequest(f"padding id {pad_id} is outside the vocabulary: expected 0 to {vocab_size - 1}", "pad_id")
    names = set(samples[0].columns)
    taken = {attribute.name for attribute in fields(Batch)} | {"target_ids"}
    for n, sample in enumerate(samples):
        ids, where = sample.token_ids, f"sample {n} (session {sample.session_id!r}, leaf {sample.leaf})"
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            position = int(outside[0])
            raise InvalidRequest(
                f"{where} has id {int(ids[position])} at {position}: expected 0 to {vocab_size - 1}", "samples"
            )
        if not ids.size or sample.loss_mask[0]:
            raise InvalidRequest(
                f"{where} begins with a trained token, which no logits predict; put a context token before it",
                "samples",
            )
        if set(sample.columns) != names:
            raise InvalidRequest(
                f"{where} has columns {sorted(sample.columns)}, the first sample {sorted(names)}; set the same in all",
                "samples",
            )
        if clash := taken & {*sample.columns, *sample.payloads} | sample.columns.keys() & sample.payloads.keys():
            raise InvalidRequest(
                f"{where} has a column or payload named {min(clash)!r}, as another array of the batch; rename it",
                "samples",
            )
        for name in sample.columns:
            column_of(sample, name)
    return samples


def _temperatures(sample: Sample, check: bool) -> npt.NDArray[np.float32]:
    # Samples for supervised fine-tuning have no logprobs.
    if check and not np.isnan(sample.logprobs[sample.loss_mask]).all():
        refuse_supports_with_full_logprobs(sample)
        return token_temperatures(sample)
    return np.where(sample.loss_mask, np.float32(np.nan), np.float32(1))


def _fill(
    samples: Sequence[Sample], places: npt.NDArray[np.int64], rows: int, length: int, pad_id: int, check: bool
) -> Batch:
    shape = (rows, length)
    padding: dict[str, tuple[type[np.generic], int]] = {
        "input_ids": (np.int64, pad_id),
        "attention_mask": (np.int64, 0),
        "position_ids": (np.int64, 0),
        "segment_ids": (np.int32, 0),
        "loss_mask": (np.bool_, 0),
        "logprobs": (np.float32, 0),
        "temperatures": (np.float32, 1),
        "weight_versions": (np.int32, NO_VERSION),
    }
    arrays: dict[str, Any] = {name: np.full(shape, value, dtype) for name, (dtype, value) in padding.items()}
    columns = {name: np.zeros(shape, np.float32) for name in sorted(samples[0].columns)}
    payloads = _empty_payloads(samples, shape)
    versions: dict[str, int] = {}
    segments = [0] * rows
    order = sorted(range(len(samples)), key=lambda n: (places[n][0], places[n][1]))
    boundaries = [0]
    for n in order:
        sample = samples[n]
        row, start, end = map(int, places[n])
        segments[row] += 1
        cells = np.s_[row, start:end]
        values: dict[str, Any] = {
            "input_ids": sample.token_ids,
            "attention_mask": 1,
            "position_ids": np.arange(end - start),
            "segment_ids": segments[row],
            "loss_mask": sample.loss_mask,
            "logprobs": sample.logprobs,
            "temperatures": _temperatures(sample, check),
        }
        for name, value in values.items():
            arrays[name][cells] = value
        for name, value in sample.columns.items():
            columns[name][cells] = value
        for a, b, version in sample.weight_spans:
            arrays["weight_versions"][row, start + a : start + b] = versions.setdefault(version, len(versions))
        for name, payload in sample.payloads.items():
            payloads[name].rows[cells] = payload.rows
            payloads[name].known[cells] = payload.known
        boundaries += [row * length + start, row * length + end]
    return Batch(
        **arrays,
        labels=np.where(arrays["loss_mask"], arrays["input_ids"], IGNORED),
        versions=tuple(versions),
        places=places,
        cu_seqlens=np.unique(np.array([*boundaries, *range(0, rows * length + 1, length)], np.int32)),
        rewards=np.array([np.nan if sample.reward is None else sample.reward for sample in samples]),
        truncated=np.array([sample.truncated is True for sample in samples]),
        groups=tuple(sample.group for sample in samples),
        columns=columns,
        payloads=payloads,
        media=tuple(sample.media for sample in samples),
    )


def _empty_payloads(samples: Sequence[Sample], shape: tuple[int, int]) -> dict[str, TokenRows]:
    payloads: dict[str, TokenRows] = {}
    for sample in samples:
        for name, payload in sample.payloads.items():
            kind = payload.rows.dtype, payload.rows.shape[1:]
            if name not in payloads:
                payloads[name] = TokenRows(blank_rows((*shape, *kind[1]), kind[0]), np.zeros(shape, np.bool_))
            elif (payloads[name].rows.dtype, payloads[name].rows.shape[2:]) != kind:
                raise InvalidRequest(f"dtypes or shapes of payload {name!r} differ between samples", "samples")
    return payloads


def with_column(sample: Sample, name: str, values: npt.ArrayLike) -> Sample:
    """Return the sample with a named column. Pass one number for all trained tokens, one per turn or one per token.

    One number, or one per turn, applies to trained tokens only; other tokens get 0. Raises `InvalidRequest` for any
    other number of values.

    >>> with_column(sample, "advantages", 0.5)                                      # doctest: +SKIP
    """
    numbers = np.asarray(values, np.float32)
    tokens, turns = len(sample.token_ids), len(sample.turns)
    if numbers.shape == (tokens,):
        column = numbers
    elif numbers.shape in ((), (turns,)):
        column = np.zeros(tokens, np.float32)
        for (_, start, end), value in zip(sample.completions(), np.broadcast_to(numbers, (turns,)), strict=True):
            column[start:end] = value
        column[~sample.loss_mask] = 0
    else:
        raise InvalidRequest(
            f"values of shape {numbers.shape} for a sample of {tokens} tokens and {turns} turns; expected one number, "
            "one per turn or one per token",
            "values",
        )
    return replace(sample, columns={**sample.columns, name: column})


def group_advantages(
    samples: Iterable[Sample], *, name: str = "advantages", scale: bool = True, epsilon: float = 1e-6
) -> list[Sample]:
    """Return samples with the GRPO advantage as a column: reward minus group mean, divided by the standard deviation.

    Both are over sessions: a session with several samples counts once, with the mean of their rewards. The deviation is
    that of `numpy.std`; that of `torch.std` divides by one session less. `epsilon` is added to it. `scale` False omits
    the division (Dr. GRPO). Raises `InvalidRequest` for a sample without a reward or a group.
    """
    rewards: dict[str, dict[str, list[float]]] = {}
    samples = list(each(samples, Sample))
    for sample in samples:
        rewards.setdefault(_group_of(sample), {}).setdefault(sample.session_id, []).append(reward_of(sample))
    center: dict[str, tuple[float, float]] = {}
    for group, sessions in rewards.items():
        of_sessions = [np.mean(of_session) for of_session in sessions.values()]
        if not all(abs(reward) < 1e150 for reward in of_sessions):  # NaN too
            raise InvalidRequest(f"group {group!r} has a reward that is not finite or not below 1e150", "samples")
        center[group] = float(np.mean(of_sessions)), float(np.std(of_sessions)) + epsilon if scale else 1.0
    out = []
    for sample in samples:
        mean, divisor = center[_group_of(sample)]
        out.append(with_column(sample, name, (reward_of(sample) - mean) / divisor))
    return out


def _group_of(sample: Sample) -> str:
    if sample.group is None:
        raise InvalidRequest(
            f"a sample of session {sample.session_id!r} has no group: pass the metadata key that names it as --group, "
            "or in Python as `group` of `assemble`"
        )
    return sample.group


def column_of(sample: Sample, name: str) -> TokenValues:
    """Return a column. Raises `InvalidRequest` if it does not exist or has no value for a trained token."""
    where = f"session {sample.session_id!r}, leaf {sample.leaf}"
    if name not in sample.columns:
        raise InvalidRequest(f"{where}: there is no column {name!r}; add it with `with_column`", "samples")
    missing = np.flatnonzero(sample.loss_mask & ~np.isfinite(sample.columns[name]))
    if missing.size:
        raise InvalidRequest(
            f"{where}: column {name!r} has no value for {missing.size} trained tokens, the first at {int(missing[0])}; "
            "annotate them, or leave the sample out",
            "samples",
        )
    return sample.columns[name]


def reward_of(sample: Sample) -> float:
    """Return a sample's reward. Raises `InvalidRequest` if it has no reward."""
    if sample.reward is None:
        raise InvalidRequest(
            f"session {sample.session_id!r} has no reward; set one, or leave the session out", "samples"
        )
    return sample.reward


IMAGE_TYPE = 1
"""Value in `mm_token_type_ids` for image placeholders; text and padding are 0."""


def media_arrays(batch: Batch, load: Callable[[str], bytes]) -> dict[str, npt.NDArray[Any]]:
    """Process the images of a batch again, and return them in the order of their placeholders.

        inputs = to_torch(media_arrays(batch, session.media))
        logits = model(input_ids, attention_mask=attention_mask, **inputs).logits

    Don't pass `position_ids`: the model computes its own from these arrays, in more than one dimension. `load` returns
    the bytes of an image, or of its processor settings, for a SHA-256; for example, pass `media` of a client's session.
    Needs the extra `images`.

    Returns `mm_token_type_ids`, int64 [rows, length], and if there are images `pixel_values`, float32 [patches of all
    images, values of a patch], and `image_grid_thw`, int64 [images, 3].

    Raises `InvalidRequest` for a row with several samples, because a vision model numbers positions per row, if `load`
    returns bytes with another hash, and if an image's token count or position now differs from the record, because the
    libraries have changed. If they have changed, a warning is logged in any case.
    """
    if len(np.unique(batch.places[:, 0])) < len(batch.places):
        raise InvalidRequest("samples with images can't be packed, since models number positions per row; use `padded`")

    def recorded(sha256: str) -> bytes:
        data = load(sha256)
        if (found := hashlib.sha256(data).hexdigest()) != sha256:
            raise InvalidRequest(f"`load` returned bytes with the SHA-256 {found} for {sha256}: pass the recorded ones")
        return data

    @cache
    def processor(settings: str) -> QwenImageProcessor:
        return QwenImageProcessor.from_settings(recorded(settings))

    @cache
    def processed(sha256: str, settings: str) -> dict[str, npt.NDArray[Any]]:
        return processor(settings).arrays([recorded(sha256)])

    types = np.zeros(batch.input_ids.shape, np.int64)
    images: list[dict[str, npt.NDArray[Any]]] = []
    for sample in np.argsort(batch.places[:, 0]).tolist():
        row, start, _ = batch.places[sample].tolist()
        for span in batch.media[sample]:
            here = slice(start + span.start, start + span.start + span.length)
            arrays = processed(span.sha256, span.settings)
            length = processor(span.settings).lengths(arrays["image_grid_thw"])[0]
            if length != span.length or (batch.input_ids[row, here] != processor(span.settings).placeholder_id).any():
                raise InvalidRequest(
                    f"image {span.sha256} has {length} tokens, the record has {span.length}: install the versions of "
                    "transformers and Pillow that its settings name"
                )
            types[row, here] = IMAGE_TYPE
            images.append(arrays)
    joined = {name: np.concatenate([image[name] for image in images]) for name in images[0]} if images else {}
    return {**joined, "mm_token_type_ids": types}
