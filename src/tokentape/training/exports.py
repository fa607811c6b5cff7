"""Convert samples to the formats of trainers, as plain dictionaries and arrays, without importing the trainers.

If a format has a prompt and a response, the prompt ends before the first sampled token, and the response is the rest.
A mask is 1 for tokens that this sample trains; a turn that a different sample trains is context. Some formats also have
the decoded text: `decode` makes it. Without `decode` it is empty; no trainer needs it.

A sample is truncated if its last turn ended with `length`. If the finish reason is unknown, it counts as finished.

The fields follow each trainer's source code; docs/how-to/train.md lists the versions and the tests with them. All
functions raise `InvalidRequest`, naming the setting to change, if the recorded logprobs belong to a different
distribution than the trainer computes (see `_trainers`), if a trained token has no logprob or a reward is not finite,
and for samples with images, because exports have no pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tokentape._canonical import digest_of
from tokentape.errors import InvalidRequest
from tokentape.training import _supports as replays
from tokentape.training._collate import column_of, padded, reward_of, to_torch
from tokentape.training._samples import Sample
from tokentape.training._trainers import check_exportable, temperature, token_temperatures
from tokentape.types import Provenance

Decode = Callable[[Sequence[int]], str]


def group_or_session(sample: Sample) -> str:
    """Return the sample's group, or its session if it has none. A group's name can be empty."""
    return sample.session_id if sample.group is None else sample.group


def trl_rollouts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the result of a TRL `rollout_func`: lists of `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`.

    TRL expects one entry per requested generation, in the order of its prompts. You can add other keys, such as
    rewards; TRL passes them to the reward functions.
    """
    _temperature(samples, "trl")
    return _columns(samples, ("prompt_ids", "completion_ids", "logprobs", "env_mask"))


def verl_agent_loop_output(
    sample: Sample,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    global_steps: int | None = None,
    logprobs: bool = True,
) -> dict[str, Any]:
    """Return the fields of verl's `AgentLoopOutput`, for your own agent loop that returns `AgentLoopOutput(**fields)`.

    Take `prompt_length` and `response_length` from verl's rollout config: a longer response is cut, as in verl's own
    loops, and a longer prompt is refused. verl's default trainer expects weight versions to be its step numbers, `7` or
    a range `7-9`; other versions are replaced by `global_steps`. With `logprobs` False, verl computes the logprobs, and
    the recorded ones are not checked. Recorded experts become `routed_experts`.
    """
    split, end = _within(sample, prompt_length, response_length)
    divisor = _temperature([sample], "verl" if logprobs else None)
    versions = [version for start, _, version in sample.weight_spans if start < end and sample.loss_mask[start]]
    steps: list[int | None] = [step for version in versions for step in _steps(version) or [global_steps]]
    known_steps = [] if None in steps else [step for step in steps if step is not None]
    prompt, response, recorded, mask = _lists(sample, split, end)
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": mask,
        "response_logprobs": recorded if logprobs else None,
        "reward_score": sample.reward,
        "num_turns": len(sample.turns),
        "metrics": {},
        "extra_fields": {
            "session_id": sample.session_id,
            "group": sample.group,
            "leaf": sample.leaf,
            "verdict": sample.verdict,
            "temperature": divisor,
            "truncated": bool(sample.truncated) or end < len(sample.token_ids),
            "reward_extra_info": {},
            "min_global_steps": min(known_steps, default=None),
            "max_global_steps": max(known_steps, default=None),
        },
    }
    return fields | replays.experts_field("routed_experts", replays.routed_experts(sample), end)


def _steps(version: str) -> Sequence[int | None]:
    """Return the verl steps in a version such as `7` or `7-9`; an empty list for any other version."""
    parts = version.split("-")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else []


def verl_data_proto(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    vocab_size: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the arguments of verl's `DataProto.from_dict`, except that `tensors` are arrays: convert them to torch.

    Prompts are padded on the left, responses on the right, to the longest or to `prompt_length` and `response_length`;
    a longer response is cut, a longer prompt is refused. `rm_scores` has the reward at the response's last token,
    `uid` is the group for GRPO's advantages, and `meta_info` has the temperature to divide logits by. verl's
    `compute_advantage` counts every sample of a `uid`; its `compute_advantage_for_multi_trajectories`, which needs
    `batch_key`, counts every session once.

    Raises `InvalidRequest` for a sample without a reward, unless the samples have a column `advantages`; then
    `rm_scores` are left out.
    """
    divisor = _temperature(samples, "verl")
    splits = [_within(sample, prompt_length, response_length) for sample in samples]
    # `padded` checks that ids are in the vocabulary, and that all samples have the same columns.
    batch = padded(samples, pad_id=pad_id, vocab_size=vocab_size)
    wide = prompt_length or max(split for split, _ in splits)
    long = response_length or max(end - split for split, end in splits)

    def joined(dtype: type[np.generic], fill: float, of: Callable[[Sample], Any]) -> Any:
        out = np.full((len(samples), wide + long), fill, dtype)
        for row, (sample, (split, end)) in enumerate(zip(samples, splits, strict=True)):
            out[row, wide - split : wide + end - split] = np.broadcast_to(of(sample), len(sample.token_ids))[:end]
        return out

    input_ids = joined(np.int64, pad_id, lambda sample: sample.token_ids)
    tensors = {
        "prompts": input_ids[:, :wide],
        "responses": input_ids[:, wide:],
        "input_ids": input_ids,
        "attention_mask": joined(np.int64, 0, lambda sample: 1),
        "position_ids": joined(np.int64, 0, lambda sample: np.arange(len(sample.token_ids))),
        "response_mask": joined(np.int64, 0, lambda sample: sample.loss_mask)[:, wide:],
        "rollout_log_probs": joined(np.float32, 0, lambda sample: sample.logprobs)[:, wide:],
    }
    uids = [group_or_session(sample) for sample in samples]
    # verl's keys consist of a prompt, a session and an output.
    numbers = {name: n for n, name in enumerate(dict.fromkeys(sample.session_id for sample in samples))}
    keys = [f"{uids[n]}_{numbers[sample.session_id]}_{n}" for n, sample in enumerate(samples)]
    names = {"uid": np.array(uids, object), "batch_key": np.array(keys, object)}
    if "advantages" in batch.columns:
        tensors["advantages"] = joined(np.float32, 0, lambda sample: sample.columns["advantages"])[:, wide:]
    if "advantages" not in batch.columns or all(sample.reward is not None for sample in samples):
        tensors["rm_scores"] = np.zeros((len(samples), long), np.float32)
        for row, (sample, (split, end)) in enumerate(zip(samples, splits, strict=True)):
            tensors["rm_scores"][row, end - split - 1] = reward_of(sample)
    return {"tensors": tensors, "non_tensors": names, "meta_info": {"temperature": divisor}}


def slime_sample(
    sample: Sample,
    index: int,
    group_index: int,
    decode: Decode | None = None,
    *,
    logprobs: bool = True,
    sampling_mask: Callable[..., Any] | None = None,
    expert_layers: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of slime's and Miles' `Sample.from_dict`.

    `group_index` is a number in slime, so pass it; it is not computed from the sample's group. `rollout_id`, a number
    from a hash of the session id, is the same for all samples of a session, so the loss counts them as one rollout. If
    prompts have different numbers of samples, slime normalizes rewards over all of them as one group; to avoid that,
    use `--custom-reward-post-process-path tokentape.training.slime.normalized_rewards`. With `logprobs` False, for
    evaluation, the recorded logprobs are left out and not checked.

    Recorded supports become slime's `rollout_top_p_token_ids` and `rollout_top_p_token_offsets`, or with Miles' class
    `RolloutSamplingMask` as `sampling_mask`, its `rollout_sampling_mask`. Recorded experts become
    `rollout_routed_experts`; experts recorded from SGLang need `expert_layers`, the model's number of layers.
    """
    trainer = "slime" if sampling_mask is None else "miles"
    _temperature([sample], trainer if logprobs else None)
    split = _split(sample)
    prompt, response, recorded, mask = _lists(sample, split)
    return {
        "group_index": group_index,
        "index": index,
        # 52 bits, which every JSON reader keeps.
        "rollout_id": int(digest_of(sample.session_id.encode())[:13], 16),
        "tokens": prompt + response,
        "response": "" if decode is None else decode(response),
        "response_length": len(response),
        "reward": sample.reward,
        "loss_mask": mask,
        "rollout_log_probs": recorded if logprobs else None,
        "weight_versions": [version for _, _, version in sample.weight_spans],
        "status": "truncated" if sample.truncated else "completed",
        "session_id": sample.session_id,
        "metadata": {**sample.metadata, "session_id": sample.session_id},
        **(replays.slime_fields(sample, split, sampling_mask) if logprobs else {}),
        **replays.experts_field("rollout_routed_experts", replays.routed_experts(sample, expert_layers)),
    }


def prime_rl_training_sample(
    sample: Sample,
    env_name: str,
    *,
    advantages: str = "advantages",
    sampling_mask: Callable[..., Any] = dict,
    experts: Callable[..., Any] = dict,
) -> dict[str, Any]:
    """Return the fields of prime-rl's `TrainingSample`, all aligned with `token_ids`.

    Recorded supports and experts become its `sampling_mask` and `routed_experts`; pass its classes `SamplingMask` and
    `RoutedExperts` to get objects instead of dictionaries.

    Raises `InvalidRequest` if the sample does not have the column that `advantages` names.
    """
    _temperature([sample], None)
    temperatures = token_temperatures(sample, "prime-rl")
    return {
        "token_ids": sample.token_ids.tolist(),
        "mask": sample.loss_mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "temperatures": temperatures.tolist(),
        "env_name": env_name,
        "advantages": column_of(sample, advantages).tolist(),
        **replays.prime_rl_fields(sample, sampling_mask),
        **replays.prime_rl_experts(sample, experts),
    }


def verifiers_nodes(
    samples: Sequence[Sample], decode: Decode | None = None, *, logprobs: bool = True
) -> list[dict[str, Any]]:
    """Return the nodes of a verifiers `Trace` from all samples of a session.

    Each turn has two nodes, one for the ids added to the context and one for the sampled ids. A turn that several
    samples share occurs once; its mask is True if one of them trains it. `logprobs` and `advantages` cover trained
    tokens only. `content` of a message is the node's decoded text; training uses the ids. With `logprobs` False, for
    evaluation, the recorded logprobs are not checked. Raises `InvalidRequest` for samples from several sessions.
    """
    if len({sample.session_id for sample in samples}) > 1:
        raise InvalidRequest("samples of several sessions can't form one trace; pass one session at a time", "samples")
    _temperature(samples, "verifiers" if logprobs else None)
    nodes: list[dict[str, Any]] = []
    node_of_turn: dict[int, int] = {}
    for sample in samples:
        parent: int | None = None
        before = 0
        for turn, start, end in sample.completions():
            if turn not in node_of_turn:
                nodes.append(_node(sample, before, start, parent, "user", decode))
                nodes.append(_node(sample, start, end, len(nodes) - 1, "assistant", decode))
                node_of_turn[turn] = len(nodes) - 1
            elif sample.loss_mask[start:end].any():
                index = node_of_turn[turn]
                nodes[index] = _node(sample, start, end, nodes[index]["parent"], "assistant", decode)
            parent, before = node_of_turn[turn], end
    return nodes


def _node(sample: Sample, start: int, end: int, parent: int | None, role: str, decode: Decode | None) -> dict[str, Any]:
    ids, mask = sample.token_ids[start:end].tolist(), sample.loss_mask[start:end]
    node = {
        "parent": parent,
        "message": {"role": role, "content": "" if decode is None else decode(ids)},
        "sampled": role == "assistant",
        "token_ids": ids,
        "mask": mask.tolist(),
        "logprobs": sample.logprobs[start:end][mask].tolist(),
    }
    if role == "assistant" and "advantages" in sample.columns:
        node["advantages"] = column_of(sample, "advantages")[start:end][mask].tolist()
    return node


def skyrl_generator_output(
    samples: Sequence[Sample],
    *,
    per_token: str | None = None,
    trajectory_id: Callable[..., Any] = dict,
    logprobs: bool = True,
) -> dict[str, Any]:
    """Return SkyRL's `GeneratorOutput`: `prompt_token_ids`, `response_ids`, `rewards`, `loss_masks` and others.

    Rewards are one number per sample, or per token the column that `per_token` names. A session with several samples is
    a trajectory of several steps: set `generator.step_wise_trajectories`, pass SkyRL's `TrajectoryID` as
    `trajectory_id`, and pass the samples of a session together, as `assemble` returns them. SkyRL then uses the reward
    of the last step. `instance_id` is the sample's group, or its session if it has no group. Recorded supports and
    experts become `rollout_sample_support` and `rollout_expert_indices`. `stop_reasons` is None unless all are known.
    With `logprobs` False, for evaluation, the recorded logprobs are left out and not checked.

    Raises `InvalidRequest` for a sample without a reward or without that column, and for interleaved sessions.
    """
    _temperature(samples, "skyrl" if logprobs else None)
    splits = [_split(sample) for sample in samples]
    rewards = [
        reward_of(sample) if per_token is None else column_of(sample, per_token)[split:].tolist()
        for sample, split in zip(samples, splits, strict=True)
    ]
    lists = _columns(samples, ("prompt_token_ids", "response_ids", "rollout_logprobs", "loss_masks"))
    sessions = [sample.session_id for sample in samples]
    last = [session != after for session, after in zip(sessions, [*sessions[1:], None], strict=False)]
    if sum(last) > len(set(sessions)):
        raise InvalidRequest(
            "samples of several sessions are interleaved; pass the samples of each session together", "samples"
        )
    repetitions: dict[str, dict[str, int]] = {}
    groups = [group_or_session(sample) for sample in samples]
    for group, session in zip(groups, sessions, strict=True):
        repetitions.setdefault(group, {}).setdefault(session, len(repetitions[group]))
    ended = all(sample.truncated is not None for sample in samples)
    return {
        **lists,
        "rollout_logprobs": lists["rollout_logprobs"] if logprobs else None,
        "rewards": rewards,
        "stop_reasons": [sample.finish_reasons[-1] for sample in samples] if ended else None,
        "rollout_metrics": None,
        "trajectory_ids": [
            trajectory_id(instance_id=group, repetition_id=repetitions[group][session])
            for group, session in zip(groups, sessions, strict=True)
        ],
        "is_last_step": last,
        **replays.skyrl_experts(samples),
        **(replays.skyrl_fields(samples, splits) if logprobs else {}),
    }


def nemo_rl_datum(sample: Sample, idx: int, decode: Decode | None = None, *, tensors: bool = True) -> dict[str, Any]:
    """Return NeMo-RL's `DatumSpec` with its `message_log`, with torch tensors, or arrays if `tensors` is False.

    NeMo-RL trains by role: trained tokens are `assistant` messages with `generation_logprobs`; other tokens are `user`
    messages in the prompt and `environment` messages after it. `length` is the prompt length, because NeMo-RL groups
    samples by their prompts. `total_reward` and `truncated` are the fields that its rollouts add. Recorded experts
    become `routed_experts` of each message, -1 for the last token, which NeMo-RL routes itself.
    """
    _temperature([sample], "nemo-rl")
    log: list[dict[str, Any]] = []
    experts = replays.all_experts(sample, -1)
    split = _split(sample)
    edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    bounds = sorted({0, split, *edges.tolist(), len(sample.token_ids)})
    for start, end in pairwise(bounds):
        ids, trained = sample.token_ids[start:end].astype(np.int64), bool(sample.loss_mask[start])
        role = "assistant" if trained else "environment" if start >= split else "user"
        fields: dict[str, Any] = {"token_ids": ids} | replays.experts_field("routed_experts", experts, end, start)
        fields |= {"generation_logprobs": sample.logprobs[start:end]} if trained else {}
        text = "" if decode is None else decode(ids.tolist())
        log.append({"role": role, "content": text, **(to_torch(fields) if tensors else fields)})
    return {
        "message_log": log,
        "length": split,
        "extra_env_info": {"session_id": sample.session_id},
        "loss_multiplier": 1.0,
        "idx": idx,
        "total_reward": reward_of(sample),
        "truncated": bool(sample.truncated),
    }


def tinker_datum(sample: Sample, *, advantages: str | None = "advantages") -> dict[str, Any]:
    """Return the parts of a Tinker `Datum`: `tokens` for `ModelInput.from_ints`, and arrays `loss_fn_inputs`.

    Targets are the ids shifted by one. The arrays fit the losses `importance_sampling` and `ppo`, where an advantage of
    0 means no loss; if `advantages` is None, they fit `cross_entropy`, with `weights`.
    """
    _temperature([sample], None if advantages is None else "tinker")
    mask = sample.loss_mask
    values: dict[str, Any]
    if advantages is None:
        values = {"weights": mask.astype(np.float32)}
    else:
        recorded = {"logprobs": sample.logprobs, "advantages": column_of(sample, advantages)}
        values = {name: np.where(mask, array, np.float32(0)) for name, array in recorded.items()}
    inputs = {"target_tokens": sample.token_ids.astype(np.int64), **values}
    shifted = {name: array[1:] for name, array in inputs.items()}
    return {"tokens": sample.token_ids[:-1].tolist(), "loss_fn_inputs": shifted}


def agent_lightning_triplets(sample: Sample) -> list[dict[str, Any]]:
    """Return Agent Lightning's `Triplet`s: one per trained turn, with its whole context as prompt.

    Each triplet has its turn's reward, except the last: it has the sample's reward, which Agent Lightning uses for all
    turns. Raises `InvalidRequest` if the last trained turn also has a reward and the two differ.
    """
    _temperature([sample], "agent-lightning")
    triplets: list[dict[str, Any]] = []
    completions = [(n, *completion) for n, completion in enumerate(sample.completions())]
    trained = [(n, turn, start, end) for n, turn, start, end in completions if sample.loss_mask[start:end].any()]
    for n, turn, start, end in trained:
        own: float | None = None if np.isnan(sample.turn_rewards[n]) else float(sample.turn_rewards[n])
        if n == trained[-1][0] and sample.reward is not None:
            if own not in (None, sample.reward):
                raise InvalidRequest(
                    f"session {sample.session_id!r} has reward {sample.reward:g}, but its last trained turn has "
                    f"{own:g}: Agent Lightning uses the last triplet's reward for all turns; set only one of the two",
                    "samples",
                )
            own = sample.reward
        ids, logprobs = sample.token_ids[start:end].tolist(), sample.logprobs[start:end].tolist()
        triplets.append(
            {
                "prompt": {"token_ids": sample.token_ids[:start].tolist()},
                # Agent Lightning 0.3 writes `logprobs`, 1.0 reads `log_probs`.
                "response": {"token_ids": ids, "logprobs": logprobs, "log_probs": logprobs},
                "reward": own,
                "metadata": {"session_id": sample.session_id, "turn": turn, "finish_reason": sample.finish_reasons[n]},
            }
        )
    return triplets


def _temperature(samples: Sequence[Sample], trainer: str | None) -> float | None:
    """Return the temperature to divide logits by; None without a trainer. Raises the errors of `check_exportable`."""
    check_exportable(samples)
    return None if trainer is None else temperature(samples, trainer)


def _lists(sample: Sample, split: int, end: int | None = None) -> tuple[list[int], list[int], list[float], list[int]]:
    """Return the prompt, the response, and the logprobs and mask of the response."""
    prompt, response = sample.token_ids[:split].tolist(), sample.token_ids[split:end].tolist()
    mask = sample.loss_mask[split:end].astype(int).tolist()
    return prompt, response, sample.logprobs[split:end].tolist(), mask


def _columns(samples: Sequence[Sample], names: tuple[str, str, str, str]) -> dict[str, Any]:
    """Return the results of `_lists` as lists over samples, with the trainer's names."""
    rows = [_lists(sample, _split(sample)) for sample in samples]
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


def _within(sample: Sample, prompt_length: int | None, response_length: int | None) -> tuple[int, int]:
    """Return the start and end of the response. Raises `InvalidRequest` if the prompt is too long: it can't be cut."""
    split, end = _split(sample), len(sample.token_ids)
    if prompt_length is not None and split > prompt_length:
        raise InvalidRequest(
            f"the prompt of session {sample.session_id!r} has {split} tokens, more than {prompt_length}, and a cut "
            "prompt is not the one that was sampled from: leave the sample out",
            "prompt_length",
        )
    return split, end if response_length is None else min(end, split + response_length)


def _split(sample: Sample) -> int:
    """Return the index of the first token that is sampled or trained, where the response begins."""
    sampled = np.flatnonzero((sample.provenance == Provenance.SAMPLED) | sample.loss_mask)
    return int(sampled[0])
