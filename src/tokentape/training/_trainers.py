"""What each trainer takes recorded logprobs for, and whether a sample's are that.

All of them compute `log_softmax(logits / temperature)` over the whole vocabulary, without penalties and truncation, and
compare it with the recorded number. So that one has to be of the same distribution: raw logprobs are at temperature 1
only, processed ones with neither penalties nor truncation, scaled ones without penalties. Some also compute it over the
ids that truncation kept, where these are recorded (`Trainer.supports`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokentape._session.comparable import HELP, has_supports, not_comparable
from tokentape.audit._served import CheckResult
from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample
from tokentape.types import TokenDistribution


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer divides its logits by."""

    name: str
    version: str
    """In which its code was read: release or commit."""
    setting: str | None
    """Its own setting of the one temperature of a batch. None: see `per_token`."""
    supports: bool = False
    """It takes the ids that truncation kept, and computes truncated logprobs over these."""
    per_token: bool = False
    """It takes a temperature per token. Without that and a `setting` it divides by nothing."""

    @property
    def formula(self) -> str:
        """What it computes."""
        if self.per_token:
            return "log_softmax(logits / T), T given per token"
        return "log_softmax(logits)" if self.setting is None else f"log_softmax(logits / T), T = {self.setting}"


TRAINERS: Mapping[str, Trainer] = {
    one.name.lower().replace(" ", "-"): one
    for one in (
        Trainer("TRL", "1.16.0", "temperature of the trainer's config"),
        Trainer("verl", "0.9.1", "actor_rollout_ref.rollout.temperature"),
        Trainer("slime", "624b824a8", "--rollout-temperature", supports=True),
        Trainer("Miles", "31f1ca961", "--rollout-temperature", supports=True),
        Trainer("prime-rl", "559b44772", None, supports=True, per_token=True),
        Trainer("verifiers", "0.4.1.dev86", "temperature of the sampling arguments"),
        Trainer("SkyRL", "a9564572", "generator.sampling_params.temperature", supports=True),
        # Given top_k or top_p it truncates too; they have to stay neutral there.
        Trainer("NeMo-RL", "7ea279ab", "policy.generation.temperature"),
        Trainer("Tinker", "0.38.0", None),
        Trainer("Agent Lightning", "0.3.0", "actor_rollout_ref.rollout.temperature"),
    )
}
"""By the name that `tokentape doctor --trainer` takes."""

_OWN = Trainer("a loop over samples", "", None, supports=True, per_token=True)


def temperature(samples: Sequence[Sample], trainer: str) -> float:
    """Return the one temperature that the recorded logprobs of all `samples` are at: what the trainer has to divide by.

    Only turns with a trained token count; 1.0 if there are none. Raises `InvalidRequest` if the logprobs of one are not
    what the trainer computes, if turns were sampled at several temperatures, and for Tinker unless that is 1.
    """
    found = {one for sample in samples for _, _, one in turn_temperatures(sample, trainer)}
    about = TRAINERS[trainer]
    if len(found) > 1:
        raise InvalidRequest(
            f"{about.name} divides by one temperature, {about.setting}; turns were sampled at "
            f"{', '.join(f'{one:g}' for one in sorted(found))}: leave samples out, or sample all at one",
            "samples",
        )
    (own,) = found or {1.0}
    if about.setting is None and not about.per_token and own != 1.0:
        raise InvalidRequest(
            f"{about.name} computes {about.formula}; turns were sampled at temperature {own:g}: sample at 1", "samples"
        )
    return own


def turn_temperatures(sample: Sample, trainer: str = "own") -> list[tuple[int, int, float]]:
    """Return for each turn with a trained token its first and end offset and the temperature of its logprobs.

    Raises `InvalidRequest` if they are not those of `log_softmax(logits / temperature)`, with what to change.
    """
    about = TRAINERS.get(trainer, _OWN)
    found = []
    turns = zip(sample.completions(), sample.sampled_from, sample.logprobs_of, strict=True)
    for (turn, start, end), sampled, recorded in turns:
        if not sample.loss_mask[start:end].any():
            continue
        wrong = not_comparable(sampled, recorded, about.supports and has_supports(sample, start, end))
        if wrong:
            raise InvalidRequest(
                f"{about.name} computes {about.formula}; the logprobs of turn "
                f"{turn} of session {sample.session_id!r} are {wrong}",
                "samples",
            )
        assert recorded is not None
        assert recorded.temperature is not None
        found.append((start, end, recorded.temperature))
    return found


def token_temperatures(sample: Sample, trainer: str = "own") -> npt.NDArray[np.float32]:
    """Return what to divide the logits by that predict each token, 1.0 for tokens that are not trained.

    Then `log_softmax` gives what is recorded, float32 [tokens]. Raises as `turn_temperatures`.
    """
    out = np.ones(len(sample.token_ids), np.float32)
    for start, end, value in turn_temperatures(sample, trainer):
        out[start:end] = value
    return out


def with_distributions(
    sample: Sample, *, sampled_from: TokenDistribution, logprobs_of: TokenDistribution | None = None
) -> Sample:
    """Return the sample with what you know of the turns of which nothing is recorded.

    `logprobs_of` is `sampled_from` if None. What is recorded stays. Of a record made with an older release, at
    temperature 1 without penalties and truncation:

    >>> plain = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
    >>> samples = [with_distributions(one, sampled_from=plain) for one in samples]        # doctest: +SKIP
    """
    return replace(
        sample,
        sampled_from=tuple(one or sampled_from for one in sample.sampled_from),
        logprobs_of=tuple(one or logprobs_of or sampled_from for one in sample.logprobs_of),
    )


def served(trainer: str, logprobs_mode: str) -> CheckResult:
    """Check whether a trainer can use logprobs with this `EngineInfo.logprobs_mode`.

    `ok`: at any temperature. `warn`: at temperature 1 only, although the trainer takes others. `fail`: never.
    """
    about = TRAINERS[trainer]
    found = f"{about.name} {about.version} computes {about.formula}; recorded are {logprobs_mode}"
    one = about.setting is None and not about.per_token
    rest = " at temperature 1" if one else ""
    match logprobs_mode:
        case "processed_logprobs":
            return CheckResult(
                "trainer", "ok", f"{found}: the same{rest} with top_p 1, top_k 0, min_p 0 and no penalties"
            )
        case "scaled_logprobs":
            return CheckResult("trainer", "ok", f"{found}: the same{rest} without penalties")
        case "raw_logprobs" | "penalised_logprobs":
            found = f"{found}: the same at temperature 1 only"
            advice = "" if one else f"Else {HELP['raw']}."
            return CheckResult("trainer", "ok" if one else "warn", found, advice)
    advice = "Sample with vLLM, SGLang or the embedded engine."
    return CheckResult("trainer", "fail", f"{found}: what they are is not known", advice)


def served_line(logprobs_mode: str) -> str:
    """Return in one line which trainers can use what an engine records: what a gateway says when it starts."""
    by_status: dict[str, list[str]] = {}
    for name, about in TRAINERS.items():
        by_status.setdefault(served(name, logprobs_mode).status, []).append(about.name)
    words = {"ok": "right for", "warn": "right at temperature 1 only for", "fail": "not for"}
    parts = [f"{words[status]} {', '.join(by_status[status])}" for status in words if status in by_status]
    return f"the engine reports {logprobs_mode}, {'; '.join(parts)}"
