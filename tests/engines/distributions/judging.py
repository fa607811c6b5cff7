"""Compare the collected data with a plain forward pass, chi-square and the trainers' formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.audit.planted import distribution, forward, load
from tests.engines.distributions.collecting import COLUMN, MODEL, Cell, prompts

from tokentape.audit._rescaling import Rule
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest
from tokentape.training import exports
from tokentape.training._samples import Sample, assemble
from tokentape.types import TokenDistribution

PLANTS = ("trainer-temperature", "raw-as-processed", "support-dropped")
"""Ways to misread the record."""


def planted(cell: Cell, plant: str | None) -> Cell:
    """Return the cell as a reader with this error sees it."""

    def wrong(of: TokenDistribution | None, sampled: TokenDistribution | None) -> TokenDistribution | None:
        if plant == "raw-as-processed":
            return sampled
        if plant == "support-dropped" and of is not None:
            return replace(of, truncation=False)
        return of

    changed = [
        replace(trajectory, logprobs_of=tuple(map(wrong, trajectory.logprobs_of, trajectory.sampled_from)))
        for trajectory in cell.trajectories
    ]
    return replace(cell, trajectories=changed)


def rule_of(of: TokenDistribution, sampling: Any) -> Rule:
    """Return the rule for a distribution and the sampling parameters of a turn."""
    assert not of.penalties
    assert not of.grammar
    assert of.temperature
    if not of.truncation:
        return Rule(of.temperature)
    return Rule(of.temperature, sampling.get("min_p", 0.0), sampling.get("top_k", 0), sampling.get("top_p", 1.0))


def recorded_apart(cell: Cell, model: Any) -> tuple[int, float]:
    """(a): return the number of tokens and the largest difference."""
    tokens, largest = 0, 0.0
    for trajectory in cell.trajectories:
        own = forward(model, trajectory.token_ids)
        for turn, of, start, end in zip(
            trajectory.turns,
            trajectory.logprobs_of,
            trajectory.completion_starts,
            trajectory.completion_ends,
            strict=True,
        ):
            assert of is not None
            rows = distribution(own[start - 1 : end - 1], rule_of(of, cell.sampling[trajectory.session_id][turn]))
            expected = rows[np.arange(end - start), trajectory.token_ids[start:end]]
            apart = np.abs(trajectory.logprobs[start:end] - expected)
            tokens += int(end - start)
            largest = max(largest, float(apart.max(initial=0.0)))
    return tokens, largest


def scored_apart(cell: Cell, model: Any) -> float:
    """(d)."""
    largest = 0.0
    for trajectory in cell.trajectories:
        at = np.flatnonzero(trajectory.loss_mask)
        expected = forward(model, trajectory.token_ids)[at - 1, trajectory.token_ids[at]]
        largest = max(largest, float(np.abs(trajectory.columns[COLUMN][at] - expected).max()))
    return largest


def drawn_p(cell: Cell, model: Any, contexts: Sequence[np.ndarray]) -> tuple[str, list[float]]:
    """(b): return what the draws are compared with, and p for each prompt."""
    of, sampled = cell.trajectories[0].logprobs_of[0], cell.trajectories[0].sampled_from[0]
    p_values = []
    for context, drawn in zip(contexts, cell.drawn, strict=True):
        counts = np.array([count for count, _ in drawn.values()], np.float64)
        likely = np.exp([logprob for _, logprob in drawn.values()])
        if of != sampled:
            assert sampled is not None
            rule = rule_of(sampled, {"top_p": cell.top_p})
            likely = np.exp(distribution(forward(model, context)[-1:], rule)[0][list(drawn)])
        p_values.append(chi_square(counts, likely))
    return "exp(recorded)" if of == sampled else "forward pass", p_values


def chi_square(counts: np.ndarray, likely: np.ndarray) -> float:
    """Return p of the counts under their probabilities. Undrawn ids have the rest. Bins below 5 are pooled."""
    total = counts.sum()
    expected = total * likely
    small = expected < 5
    rest = total - expected.sum()
    bins = [*zip(counts[~small], expected[~small], strict=True)]
    pooled = (counts[small].sum(), expected[small].sum() + max(rest, 0.0))
    if pooled[1] >= 5 or not bins:
        bins.append(pooled)
    else:
        # Too few for a separate bin.
        bins[-1] = (bins[-1][0] + pooled[0], bins[-1][1] + pooled[1])
    statistic = sum(
        (seen - expected_count) ** 2 / expected_count for seen, expected_count in bins if expected_count > 0
    )
    statistic += sum(1e9 for seen, expected_count in bins if expected_count <= 0 < seen)
    if rest < -1e-3 * total:
        return 0.0
    if len(bins) == 1:
        return 1.0
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


SETTINGS_NAMED = ("--logprobs-mode", "top_p 1", "sample at 1", "temperature 1")
"""A refusal must name one of these."""

Exported = Callable[[Sample], tuple[np.ndarray, "np.ndarray | float | None"]]
"""Maps a sample to the trainer's numbers, one per trained token, and the temperatures that it receives, if any."""


def _verl(sample: Sample) -> tuple[np.ndarray, Any]:
    fields = exports.verl_agent_loop_output(sample)
    mask = np.array(fields["response_mask"], bool)
    return np.array(fields["response_logprobs"])[mask], fields["extra_fields"]["temperature"]


def _slime(sample: Sample) -> tuple[np.ndarray, Any]:
    fields = exports.slime_sample(sample, 0, 0)
    return np.array(fields["rollout_log_probs"])[np.array(fields["loss_mask"], bool)], None


def _trl(sample: Sample) -> tuple[np.ndarray, Any]:
    fields = exports.trl_rollouts([sample])
    return np.array(fields["logprobs"][0])[np.array(fields["env_mask"][0], bool)], None


def _prime_rl(sample: Sample) -> tuple[np.ndarray, Any]:
    sample = replace(sample, columns={**sample.columns, "advantages": np.zeros(len(sample.token_ids), np.float32)})
    fields = exports.prime_rl_training_sample(sample, "env")
    mask = np.array(fields["mask"], bool)
    return np.array(fields["logprobs"])[mask], np.array(fields["temperatures"])[mask]


def _skyrl(sample: Sample) -> tuple[np.ndarray, Any]:
    fields = exports.skyrl_generator_output([replace(sample, reward=0.0)])
    return np.array(fields["rollout_logprobs"][0])[np.array(fields["loss_masks"][0], bool)], None


def _nemo_rl(sample: Sample) -> tuple[np.ndarray, Any]:
    log = exports.nemo_rl_datum(replace(sample, reward=0.0), 0)["message_log"]
    return np.concatenate([message["generation_logprobs"] for message in log if "generation_logprobs" in message]), None


def _verifiers(sample: Sample) -> tuple[np.ndarray, Any]:
    return np.concatenate([node["logprobs"] for node in exports.verifiers_nodes([sample])]), None


def _tinker(sample: Sample) -> tuple[np.ndarray, Any]:
    sample = replace(sample, columns={**sample.columns, "advantages": np.zeros(len(sample.token_ids), np.float32)})
    inputs = exports.tinker_datum(sample)["loss_fn_inputs"]
    # The loss does not divide.
    return np.asarray(inputs["logprobs"])[sample.loss_mask[1:]], 1.0


TRAINERS: dict[str, Exported] = {
    "TRL": _trl,
    "verl": _verl,
    "slime, Miles": _slime,
    "prime-rl": _prime_rl,
    "SkyRL": _skyrl,
    "NeMo-RL": _nemo_rl,
    "verifiers": _verifiers,
    "Tinker": _tinker,
}


def trainer_apart(cell: Cell, model: Any, exported: Exported, scale: float) -> float | str:
    """(c): return the largest difference from `log_softmax(logits / temperature)`, or the export's refusal."""
    largest = 0.0
    for sample in assemble(cell.trajectories).samples:
        try:
            values, temperature = exported(sample)
        except InvalidRequest as error:
            return str(error)
        at = np.flatnonzero(sample.loss_mask)
        divisor = cell.temperature if temperature is None else temperature
        with torch.inference_mode():
            logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, at - 1]
            heated = logits / (torch.as_tensor(divisor, dtype=torch.float32).reshape(-1, 1) * scale)
            sampled_ids = torch.from_numpy(sample.token_ids[at].astype(np.int64))[:, None]
            computed = heated.log_softmax(-1).gather(1, sampled_ids)[:, 0].numpy()
        largest = max(largest, float(np.abs(values - computed).max()))
    return largest


def must_work(cell: Cell, trainer: str) -> bool:
    """Return whether the trainer computes exactly the sampled distribution, and this engine records it."""
    if cell.engine.endswith("-raw") and cell.temperature != 1.0:
        return False
    if trainer == "Tinker" and cell.temperature != 1.0:
        return False
    # Trainers do not compute numbers after truncation. SGLang and raw modes record those before it.
    return cell.top_p == 1.0 or cell.engine.startswith("sglang") or cell.engine.endswith("-raw")


def judge(cells: Sequence[Cell], renderer: Renderer, plant: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each cell, and the deviations."""
    model, contexts = load(MODEL), prompts(renderer)
    rows, off = [], []
    for cell in cells:
        read = planted(cell, plant)
        where = f"{cell.engine}, temperature {cell.temperature}, top_p {cell.top_p}"
        tokens, apart = recorded_apart(read, model)
        against, p = drawn_p(read, model, contexts)
        scale = 0.8 if plant == "trainer-temperature" else 1.0
        trainers = {name: trainer_apart(read, model, exported, scale) for name, exported in TRAINERS.items()}
        scored = scored_apart(read, model)
        drawn = sum(count for counts in cell.drawn for count, _ in counts.values())
        rows.append(
            {
                "engine": cell.engine,
                "temperature": cell.temperature,
                "top_p": cell.top_p,
                "tokens": tokens,
                "recorded": apart,
                "draws": drawn,
                "against": against,
                "p": p,
                "trainers": trainers,
                "scored": scored,
            }
        )
        if not apart <= 1e-4:
            off.append(f"(a) {where}: recorded are off by {apart:.2g}")
        off += [f"(b) {where}: prompt {n} has p = {value:.2g}" for n, value in enumerate(p) if not value > 0.001]
        for name, result in trainers.items():
            if isinstance(result, str):
                if must_work(cell, name) or not any(setting in result for setting in SETTINGS_NAMED):
                    off.append(f"(c) {where}: {name} is refused: {result}")
            elif not result <= 1e-3:
                off.append(f"(c) {where}: {name} is off by {result:.2g}")
        if not scored <= 1e-4:
            off.append(f"(d) {where}: scores are off by {scored:.2g}")
    return rows, off


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows as a table in Markdown."""
    yield "| engine | T | top-p | tokens | (a) recorded | draws | (b) least p, against | (c) trainers | (d) scores |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        numbers = [result for result in row["trainers"].values() if not isinstance(result, str)]
        refused = [name for name, result in row["trainers"].items() if isinstance(result, str)]
        works = f"{len(numbers)}: {max(numbers):.1e}" if numbers else ""
        refuses = "" if not refused else "all refuse" if not numbers else f"{', '.join(refused)} refuses"
        yield (
            f"| {row['engine']} | {row['temperature']:g} | {row['top_p']:g} "
            f"| {row['tokens']} | {row['recorded']:.1e} | {row['draws']} | {min(row['p']):.3f}, {row['against']} | "
            f"{'; '.join(text for text in (works, refuses) if text)} | {row['scored']:.1e} |"
        )
