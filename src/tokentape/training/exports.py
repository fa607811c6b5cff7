"""Samples in the shapes that other trainers take: plain dictionaries and arrays, so that none of them is imported.

Where a trainer splits a sequence in prompt and response, the prompt ends where the first turn begins to be sampled,
and the response is all the rest. A mask is 1 for tokens that this sample trains, so a turn that another sample trains
is context here too. `decode` makes the text that some formats have room for; without it that stays empty, and no
trainer needs it.

Which fields a trainer has was read in its code; docs/how-to/train.md says in which version, and what was tried on it.
Logprobs are handed on only where they are what the trainer itself computes (`training.trainers`): every function here
raises `InvalidRequest` otherwise, and says which setting helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tokentape.errors import InvalidRequest
from tokentape.training.collate import padded
from tokentape.training.samples import Sample, reward_of
from tokentape.training.trainers import temperature, token_temperatures
from tokentape.types import Provenance

Decode = Callable[[Sequence[int]], str]


def trl_rollouts(samples: Sequence[Sample]) -> dict[str, Any]:
    """What a TRL `rollout_func` returns: lists of `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`.

    TRL wants as many as it asked for, in its order of prompts, each prompt's generations together. Whatever else is put
    into the dictionary, rewards for example, reaches the reward functions.
    """
    temperature(samples, "trl")
    splits = [_split(sample) for sample in samples]
    return {
        "prompt_ids": [sample.token_ids[:at].tolist() for sample, at in zip(samples, splits, strict=True)],
        "completion_ids": [sample.token_ids[at:].tolist() for sample, at in zip(samples, splits, strict=True)],
        "logprobs": [sample.logprobs[at:].tolist() for sample, at in zip(samples, splits, strict=True)],
        "env_mask": [_ints(sample.loss_mask[at:]) for sample, at in zip(samples, splits, strict=True)],
    }


def verl_agent_loop_output(sample: Sample, experts: str | None = None) -> dict[str, Any]:
    """The fields of verl's `AgentLoopOutput`, for an agent loop of your own that returns `AgentLoopOutput(**fields)`.

    `experts` names a payload to hand on as `routed_experts`, int16 [tokens, layers, top_k].
    """
    at = _split(sample)
    divisor = temperature([sample], "verl")
    fields = {
        "prompt_ids": sample.token_ids[:at].tolist(),
        "response_ids": sample.token_ids[at:].tolist(),
        "response_mask": _ints(sample.loss_mask[at:]),
        "response_logprobs": sample.logprobs[at:].tolist(),
        "reward_score": sample.reward,
        "num_turns": len(sample.turns),
        "metrics": {},
        "extra_fields": {
            "session_id": sample.session_id,
            "leaf": sample.leaf,
            "verdict": sample.verdict,
            "temperature": divisor,
        },
    }
    if experts is not None:
        fields["routed_experts"] = sample.payloads[experts].rows.astype(np.int16)
    return fields


def verl_data_proto(samples: Sequence[Sample], *, pad_id: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Arguments of verl's `DataProto.from_dict` once `tensors` are torch's: prompts padded left, responses right.

    `rm_scores` has the reward at the last token of the response; `uid` is the group, which GRPO's advantages go by;
    `meta_info` has the temperature that logits are divided by.
    """
    divisor = temperature(samples, "verl")
    splits = [_split(sample) for sample in samples]
    # For its checks: ids in the vocabulary, the same columns in all samples.
    batch = padded(samples, pad_id=pad_id, vocab_size=vocab_size)
    wide, long = max(splits), max(len(sample.token_ids) - at for sample, at in zip(samples, splits, strict=True))

    def both(dtype: type[np.generic], fill: float, of: Callable[[Sample], Any]) -> Any:
        out = np.full((len(samples), wide + long), fill, dtype)
        for row, (sample, at) in enumerate(zip(samples, splits, strict=True)):
            out[row, wide - at : wide + len(sample.token_ids) - at] = of(sample)
        return out

    input_ids = both(np.int64, pad_id, lambda sample: sample.token_ids)
    rm_scores = np.zeros((len(samples), long), np.float32)
    for row, (sample, at) in enumerate(zip(samples, splits, strict=True)):
        rm_scores[row, len(sample.token_ids) - at - 1] = sample.reward or 0.0
    tensors = {
        "prompts": input_ids[:, :wide],
        "responses": input_ids[:, wide:],
        "input_ids": input_ids,
        "attention_mask": both(np.int64, 0, lambda sample: 1),
        "position_ids": both(np.int64, 0, lambda sample: np.arange(len(sample.token_ids))),
        "response_mask": both(np.int64, 0, lambda sample: sample.loss_mask)[:, wide:],
        "rollout_log_probs": both(np.float32, 0, lambda sample: sample.logprobs)[:, wide:],
        "rm_scores": rm_scores,
    }
    names = {"uid": np.array([sample.group or sample.session_id for sample in samples], object)}
    if "advantages" in batch.columns:
        tensors["advantages"] = both(np.float32, 0, lambda sample: sample.columns["advantages"])[:, wide:]
    return {"tensors": tensors, "non_tensors": names, "meta_info": {"temperature": divisor}}


def slime_sample(sample: Sample, index: int, group_index: int, decode: Decode | None = None) -> dict[str, Any]:
    """Arguments of slime's and Miles' `Sample.from_dict`.

    `group_index` is a number there, so it is given and not read off the sample's group.
    """
    at = _split(sample)
    temperature([sample], "slime")
    response = sample.token_ids[at:].tolist()
    return {
        "group_index": group_index,
        "index": index,
        "tokens": sample.token_ids.tolist(),
        "response": "" if decode is None else decode(response),
        "response_length": len(response),
        "reward": sample.reward,
        "loss_mask": _ints(sample.loss_mask[at:]),
        "rollout_log_probs": sample.logprobs[at:].tolist(),
        "weight_versions": [version for _, _, version in sample.weight_spans],
        "status": "completed",
        "metadata": {**sample.metadata, "session_id": sample.session_id},
    }


def prime_rl_training_sample(sample: Sample, env_name: str, *, advantages: str = "advantages") -> dict[str, Any]:
    """The fields of prime-rl's `TrainingSample`, all aligned with `token_ids`; `temperatures` are those of the turns.

    Raises `InvalidRequest` if the sample has no such column.
    """
    return {
        "token_ids": sample.token_ids.tolist(),
        "mask": sample.loss_mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "temperatures": token_temperatures(sample, "prime-rl").tolist(),
        "env_name": env_name,
        "advantages": _column(sample, advantages),
    }


def verifiers_nodes(samples: Sequence[Sample], decode: Decode | None = None) -> list[dict[str, Any]]:
    """The nodes of a verifiers `Trace` from all samples of a session: two per turn, what it added and what it sampled.

    A turn that several samples share is one node, its mask True if any of them trains it. `logprobs` and `advantages`
    are there for True tokens only. A node's message has its text, not the parts of one: ids are what is trained on.

    Raises `InvalidRequest` for samples of several sessions.
    """
    if len({sample.session_id for sample in samples}) > 1:
        raise InvalidRequest("a trace is of one session, the samples are of several", "samples")
    temperature(samples, "verifiers")
    nodes: list[dict[str, Any]] = []
    found: dict[int, int] = {}
    for sample in samples:
        parent: int | None = None
        before = 0
        for turn, start, end in _turns(sample):
            if turn not in found:
                nodes.append(_node(sample, before, start, parent, "user", decode))
                nodes.append(_node(sample, start, end, len(nodes) - 1, "assistant", decode))
                found[turn] = len(nodes) - 1
            elif sample.loss_mask[start:end].any():
                nodes[found[turn]] = _node(sample, start, end, nodes[found[turn]]["parent"], "assistant", decode)
            parent, before = found[turn], end
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
        node["advantages"] = sample.columns["advantages"][start:end][mask].tolist()
    return node


def skyrl_generator_output(samples: Sequence[Sample], *, per_token: str | None = None) -> dict[str, Any]:
    """SkyRL's `GeneratorOutput`: `prompt_token_ids`, `response_ids`, `rewards`, `loss_masks`, `rollout_logprobs`.

    Rewards are one number per sample, or with `per_token` the named column. Raises `InvalidRequest` for a sample
    without reward, or without that column.
    """
    temperature(samples, "skyrl")
    splits = [_split(sample) for sample in samples]
    pairs = list(zip(samples, splits, strict=True))
    rewards = [reward_of(one) if per_token is None else _column(one, per_token)[at:] for one, at in pairs]
    return {
        "prompt_token_ids": [sample.token_ids[:at].tolist() for sample, at in pairs],
        "response_ids": [sample.token_ids[at:].tolist() for sample, at in pairs],
        "rewards": rewards,
        "loss_masks": [_ints(sample.loss_mask[at:]) for sample, at in pairs],
        "stop_reasons": None,
        "rollout_metrics": None,
        "rollout_logprobs": [sample.logprobs[at:].tolist() for sample, at in pairs],
        "trajectory_ids": None,
        "is_last_step": None,
    }


def nemo_rl_datum(sample: Sample, idx: int, decode: Decode | None = None) -> dict[str, Any]:
    """NeMo-RL's `DatumSpec` with its `message_log`, arrays in place of torch's tensors.

    There the role decides: only what is trained here is an `assistant` message, with `generation_logprobs`; all else is
    `user` before the first turn and `environment` after it. `total_reward` is what its rollouts add.
    """
    temperature([sample], "nemo-rl")
    log: list[dict[str, Any]] = []
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), len(sample.token_ids)]
    for start, end in pairwise(bounds):
        ids, trained = sample.token_ids[start:end].astype(np.int64), bool(sample.loss_mask[start])
        role = "assistant" if trained else "environment" if log else "user"
        log.append({"role": role, "content": "" if decode is None else decode(ids.tolist()), "token_ids": ids})
        if trained:
            log[-1]["generation_logprobs"] = sample.logprobs[start:end]
    return {
        "message_log": log,
        "length": len(sample.token_ids),
        "extra_env_info": {"session_id": sample.session_id},
        "loss_multiplier": 1.0,
        "idx": idx,
        "total_reward": reward_of(sample),
    }


def tinker_datum(sample: Sample, *, advantages: str | None = "advantages") -> dict[str, Any]:
    """What a Tinker `Datum` is made of: `tokens` for `ModelInput.from_ints`, and arrays `loss_fn_inputs`.

    Targets are the ids moved by one. With a column of `advantages` the inputs of its losses `importance_sampling` and
    `ppo`, where an advantage of 0 stands for no loss; with None those of `cross_entropy`, where `weights` do.
    """
    targets = sample.token_ids[1:].astype(np.int64)
    mask = sample.loss_mask[1:]
    if advantages is None:
        inputs: dict[str, Any] = {"target_tokens": targets, "weights": mask.astype(np.float32)}
    else:
        temperature([sample], "tinker")
        values = np.array(_column(sample, advantages)[1:], np.float32)
        inputs = {
            "target_tokens": targets,
            "logprobs": np.where(mask, sample.logprobs[1:], np.float32(0)),
            "advantages": np.where(mask, values, np.float32(0)),
        }
    return {"tokens": sample.token_ids[:-1].tolist(), "loss_fn_inputs": inputs}


def agent_lightning_triplets(sample: Sample) -> list[dict[str, Any]]:
    """Agent Lightning's `Triplet`s: one per trained turn, its whole context as prompt.

    A turn's reward is its own; the last turn without one has the sample's.
    """
    temperature([sample], "agent-lightning")
    triplets: list[dict[str, Any]] = []
    trained = [n for n, (_, start, end) in enumerate(_turns(sample)) if sample.loss_mask[start:end].any()]
    for n, (turn, start, end) in enumerate(_turns(sample)):
        if n not in trained:
            continue
        own = float(sample.turn_rewards[n])
        triplets.append(
            {
                "prompt": {"token_ids": sample.token_ids[:start].tolist()},
                "response": {
                    "token_ids": sample.token_ids[start:end].tolist(),
                    "logprobs": sample.logprobs[start:end].tolist(),
                },
                "reward": own if not np.isnan(own) else sample.reward if n == trained[-1] else None,
                "metadata": {"session_id": sample.session_id, "turn": turn},
            }
        )
    return triplets


def _turns(sample: Sample) -> Iterable[tuple[int, int, int]]:
    return zip(sample.turns, sample.completion_starts.tolist(), sample.completion_ends.tolist(), strict=True)


def _split(sample: Sample) -> int:
    """Where the response begins: at the first sampled token, or the first that is trained."""
    sampled = np.flatnonzero((sample.provenance == Provenance.SAMPLED) | sample.loss_mask)
    return int(sampled[0])


def _ints(mask: Any) -> list[int]:
    return [int(one) for one in mask.tolist()]


def _column(sample: Sample, name: str) -> list[float]:
    if name not in sample.columns:
        raise InvalidRequest(f"a sample of session {sample.session_id!r} has no column {name!r}; see `with_column`")
    values: list[float] = sample.columns[name].tolist()
    return values
