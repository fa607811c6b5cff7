"""Check that a sample's recorded logprobs belong to the distribution that a trainer computes.

All trainers compute `log_softmax(logits / temperature)` over the whole vocabulary, without penalties and truncation,
and compare it with the recorded logprob. Both are of the same distribution if the recorded logprobs are raw at
temperature 1, processed without penalties and truncation, or scaled without penalties. Some trainers can also compute
it over the ids that truncation kept, if these are recorded (`Trainer.supports`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokentape._session.comparable import has_supports, not_comparable
from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample, each
from tokentape.types import TokenDistribution, Trajectory

if TYPE_CHECKING:
    from tokentape.audit._served import CheckResult


@dataclass(frozen=True, slots=True)
class Trainer:
    """Describes how a trainer computes logprobs: which temperature it divides logits by, and over which ids."""

    name: str
    version: str
    """The release or commit whose source code these facts come from."""
    setting: str | None
    """The trainer's setting for a batch-wide temperature. None: see `per_token`."""
    supports: bool = False
    """Whether it accepts the ids that truncation kept, and computes truncated logprobs over them."""
    per_token: bool = False
    """Whether it accepts a temperature per token. A trainer with neither this nor a `setting` does not divide."""

    @property
    def formula(self) -> str:
        """The formula of the logprobs that it computes."""
        if self.per_token:
            return "log_softmax(logits / T), T given per token"
        return "log_softmax(logits)" if self.setting is None else f"log_softmax(logits / T), T = {self.setting}"


TRAINERS: Mapping[str, Trainer] = {
    trainer.name.lower().replace(" ", "-"): trainer
    for trainer in (
        Trainer("TRL", "1.16.0", "temperature of the trainer's config"),
        Trainer("verl", "0.9.1", "actor_rollout_ref.rollout.temperature"),
        Trainer("slime", "624b824a8", "--rollout-temperature", supports=True),
        Trainer("Miles", "31f1ca961", "--rollout-temperature", supports=True),
        Trainer("prime-rl", "559b44772", None, supports=True, per_token=True),
        Trainer("verifiers", "0.4.1.dev86", "temperature of the sampling arguments"),
        Trainer("SkyRL", "a9564572", "generator.sampling_params.temperature", supports=True),
        # With top_k or top_p in its config it truncates too, so they must stay at the values that keep all ids.
        Trainer("NeMo-RL", "7ea279ab", "policy.generation.temperature"),
        Trainer("Tinker", "0.38.0", None),
        Trainer("Agent Lightning", "0.3.0", "actor_rollout_ref.rollout.temperature"),
    )
}
"""The trainers by their names for `tokentape doctor --trainer`."""

_REMEDIES = {
    "vllm": "restart vLLM with `--logprobs-mode processed_logprobs`",
    "openai:vllm": "connect with `--engine vllm`",
    "sglang": "restart SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
    "transformers": "start the gateway with `--logprobs-mode processed`",
}
"""By engine, the setting that makes it report logprobs at the sampling temperature."""

_OWN = Trainer("a loop over samples", "", None, supports=True, per_token=True)


def temperature(samples: Sequence[Sample], trainer: str) -> float:
    """Return the temperature of the recorded logprobs in all `samples`, which the trainer has to divide by.

    Only turns with a trained token count; without any, the result is 1.0. Raises `InvalidRequest` if the trainer can't
    compute a turn's logprobs, if temperatures differ between turns, and for Tinker if the temperature is not 1.
    """
    temperatures = {value for sample in samples for _, _, value in turn_temperatures(sample, trainer)}
    about = TRAINERS[trainer]
    if len(temperatures) > 1:
        raise InvalidRequest(
            f"{about.name} divides logits by one temperature ({about.setting}), but turns were sampled at "
            f"{', '.join(f'{value:g}' for value in sorted(temperatures))}: pass samples of one temperature",
            "samples",
        )
    (own,) = temperatures or {1.0}
    if about.setting is None and not about.per_token and own != 1.0:
        raise InvalidRequest(
            f"{about.name} computes {about.formula}, but turns were sampled at temperature {own:g}; sample at 1",
            "samples",
        )
    return own


def check_exportable(samples: Sequence[Sample]) -> None:
    """Raise `InvalidRequest` if a reward is not finite, or a sample has images, because trainers get no pixels."""
    for sample in each(samples, Trajectory):
        infinite = sample.turn_rewards[np.isinf(sample.turn_rewards)].tolist()
        own = [] if sample.reward is None or np.isfinite(sample.reward) else [sample.reward]
        if wrong := [*own, *infinite]:
            raise InvalidRequest(
                f"session {sample.session_id!r} has the reward {wrong[0]}, expected a finite number: set one, or "
                "leave the session out",
                "samples",
            )
        if sample.media:
            raise InvalidRequest(
                f"session {sample.session_id!r} has {len(sample.media)} images, and exports have only their "
                "placeholder ids, not their pixels: use `training.media_arrays` in your own loop",
                "samples",
            )


def turn_temperatures(sample: Sample, trainer: str = "own") -> list[tuple[int, int, float]]:
    """Return (start, end, temperature of the logprobs) for each turn with a trained token.

    Raises `InvalidRequest`, with advice, if the logprobs are not those of `log_softmax(logits / temperature)`, or if a
    trained token has none.
    """
    about = TRAINERS.get(trainer, _OWN)
    temperatures = []
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
        if missing := int((sample.loss_mask & ~np.isfinite(sample.logprobs))[start:end].sum()):
            raise InvalidRequest(
                f"{missing} trained tokens of turn {turn} of session {sample.session_id!r} have no finite logprob: "
                "leave the sample out, or pass `logprobs=False` (`check_logprobs=False` for a batch)",
                "samples",
            )
        temperatures.append((start, end, recorded.temperature))
    return temperatures


def token_temperatures(sample: Sample, trainer: str = "own") -> npt.NDArray[np.float32]:
    """Return a temperature per token, float32 [tokens], 1.0 if untrained. Raises the errors of `turn_temperatures`."""
    out = np.ones(len(sample.token_ids), np.float32)
    for start, end, value in turn_temperatures(sample, trainer):
        out[start:end] = value
    return out


def with_distributions(
    sample: Sample, *, sampled_from: TokenDistribution, logprobs_of: TokenDistribution | None = None
) -> Sample:
    """Return the sample with distributions filled in for turns that have none recorded.

    `logprobs_of` defaults to `sampled_from`. Recorded distributions are kept. For a record from an older release,
    sampled at temperature 1 without penalties and truncation:

    >>> plain = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
    >>> samples = [with_distributions(sample, sampled_from=plain) for sample in samples]  # doctest: +SKIP
    """
    return replace(
        sample,
        sampled_from=tuple(distribution or sampled_from for distribution in sample.sampled_from),
        logprobs_of=tuple(distribution or logprobs_of or sampled_from for distribution in sample.logprobs_of),
    )


def served(trainer: str, logprobs_mode: str, engine: str = "") -> CheckResult:
    """Check whether a trainer can use logprobs that `engine` reports with this `EngineInfo.logprobs_mode`.

    `ok`: at any temperature that the trainer supports. `warn`: at temperature 1 only. `fail`: never.
    """
    from tokentape.audit._served import CheckResult  # loads an HTTP client, which exports don't need

    about = TRAINERS[trainer]
    summary = f"{about.name} {about.version} computes {about.formula}; the record has {logprobs_mode}"
    only_at_1 = about.setting is None and not about.per_token
    where = " at temperature 1" if only_at_1 else ""
    if condition := _SAME.get(logprobs_mode):
        return CheckResult("trainer", "ok", f"{summary}: the same{where} {condition}")
    if logprobs_mode in ("raw_logprobs", "penalised_logprobs"):
        advice = "" if only_at_1 else f"For other temperatures {_remedy(engine)}."
        summary = f"{summary}: the same at temperature 1 only"
        return CheckResult("trainer", "ok" if only_at_1 else "warn", summary, advice)
    advice = "Sample with vLLM, SGLang or the embedded engine."
    return CheckResult("trainer", "fail", f"{summary}: their distribution is unknown", advice)


_SAME = {
    "processed_logprobs": "with top_p 1, top_k 0, min_p 0 and no penalties",
    "scaled_logprobs": "without penalties",
}
"""By mode, the condition under which the logprobs are those that a trainer computes at its temperature."""


def _remedy(engine: str) -> str:
    other = f"{_REMEDIES[engine]}, or " if engine in _REMEDIES else ""
    return f"{other}keep all calls at temperature 1 with `tokentape serve --pin temperature=1.0`"


def served_to_all(logprobs_mode: str, engine: str) -> CheckResult:
    """Check whether every trainer can use an engine's logprobs. Return `ok`, or a warning with advice."""
    from tokentape.audit._served import CheckResult

    results = [served(name, logprobs_mode, engine) for name in TRAINERS]
    statuses = {result.status for result in results}
    says, names = f"the engine reports {logprobs_mode}", ", ".join(trainer.name for trainer in TRAINERS.values())
    if statuses == {"ok"}:
        return CheckResult("logprobs", "ok", f"{says}, right for {names}")
    if "fail" in statuses:
        return CheckResult("logprobs", "warn", f"{says}, not for {names}", results[0].advice)
    summary = f"{says}, right for every trainer if all calls have temperature 1, the default"
    return CheckResult("logprobs", "warn", summary, f"For other temperatures {_remedy(engine)}.")


def log_served(log: logging.Logger, logprobs_mode: str, engine: str) -> None:
    """Log whether trainers can use an engine's logprobs; if not all can, warn with advice."""
    check = served_to_all(logprobs_mode, engine)
    level = logging.INFO if check.status == "ok" else logging.WARNING
    log.log(level, "%s", f"{check.found}. {check.advice}" if check.advice else check.found)
