"""What each trainer makes of our exports, as rows for the conformance kit.

An adapter reads the exported fields as the trainer reads them, as far as its loss depends on them: which tokens it
trains, how it weighs sessions that became several samples, what it takes as the group, where it looks for truncation.
Values that a trainer has no field for stay None. docs/how-to/train.md names the versions.

`python -m tests.training.data_paths [NAME ...]` prints what the kit finds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.testing.golden import PAD, VOCAB_SIZE
from tokentape.testing.samples import Row, check_samples
from tokentape.training import _samples as files
from tokentape.training import exports
from tokentape.training._collate import Batch, group_advantages, packed, padded
from tokentape.training._samples import Sample
from tokentape.training._trainers import token_temperatures
from tokentape.training.trl._asynchronous import _rollout_sample

Samples = Sequence[Sample]


def after_prompt(prompt: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [0] * len(prompt) + list(values)


def only(values: Any) -> float:
    """Return the common temperature of a row's trained tokens."""
    (value,) = {round(float(temperature), 6) for temperature in values}
    return value


def trl(samples: Samples) -> Iterator[Row]:
    """TRL calls a completion truncated if it does not end with an end-of-turn token."""
    made = exports.trl_rollouts(samples)
    for n, (prompt, ids) in enumerate(zip(made["prompt_ids"], made["completion_ids"], strict=True)):
        yield Row(
            prompt + ids,
            after_prompt(prompt, made["env_mask"][n]),
            after_prompt(prompt, made["logprobs"][n]),
            truncated=ids[-1] != PAD,
        )


def trl_asynchronous(samples: Samples) -> Iterator[Row]:
    for sample in group_advantages(samples):
        made = _rollout_sample(sample, {}, 0, {})
        yield Row(
            made.input_ids,
            made.completion_mask,
            made.old_log_probs,
            np.full(len(made.input_ids), made.advantage),
        )


def verl_agent_loop(samples: Samples) -> Iterator[Row]:
    """The trainer with padding: `AgentLoopOutput` alone."""
    for sample in samples:
        made = exports.verl_agent_loop_output(sample)
        prompt = made["prompt_ids"]
        yield Row(
            prompt + made["response_ids"],
            after_prompt(prompt, made["response_mask"]),
            after_prompt(prompt, made["response_logprobs"]),
            reward=made["reward_score"],
            temperature=made["extra_fields"]["temperature"],
        )


def verl_transfer_queue(samples: Samples) -> Iterator[Row]:
    """The default trainer since 0.9: it counts weight steps and separates several outputs of a session."""
    sessions = [item.session_id for item in samples]
    for row, sample in zip(verl_agent_loop(samples), samples, strict=True):
        extra = exports.verl_agent_loop_output(sample)["extra_fields"]
        if sessions.count(sample.session_id) > 1:
            _ = extra["reward_extra_info"]
        versions = {str(int(extra["min_global_steps"])), str(int(extra["max_global_steps"]))}
        yield Row(row.token_ids, row.weights, row.logprobs, reward=row.reward, weight_versions=versions)


def verl_batch(samples: Samples) -> Iterator[Row]:
    """`DataProto`, with the advantages that verl's GRPO computes from rewards and `uid`."""
    made = exports.verl_data_proto(samples, pad_id=PAD, vocab_size=VOCAB_SIZE)
    tensors, uid = made["tensors"], made["non_tensors"]["uid"]
    rewards = tensors["rm_scores"].sum(1)
    for n in range(len(samples)):
        prompt, mask = tensors["prompts"][n], tensors["response_mask"][n]
        advantage = rewards[n] - rewards[uid == uid[n]].mean()
        yield Row(
            tensors["input_ids"][n],
            after_prompt(prompt, mask),
            after_prompt(prompt, tensors["rollout_log_probs"][n]),
            after_prompt(prompt, mask * advantage),
            rewards[n],
            position_ids=tensors["position_ids"][n],
        )


def verl_batch_with_advantages(samples: Samples) -> Iterator[Row]:
    """`DataProto`, with precomputed advantages."""
    made = exports.verl_data_proto(group_advantages(samples), pad_id=PAD, vocab_size=VOCAB_SIZE)["tensors"]
    for n in range(len(samples)):
        prompt = made["prompts"][n]
        yield Row(
            made["input_ids"][n],
            after_prompt(prompt, made["response_mask"][n]),
            after_prompt(prompt, made["rollout_log_probs"][n]),
            after_prompt(prompt, made["advantages"][n]),
            made["rm_scores"][n].sum(),
        )


def slime(samples: Samples) -> Iterator[Row]:
    """Weigh each sample by the trained tokens of its rollout. A sample without a rollout id is a rollout."""
    return _slime([exports.slime_sample(sample, n, 0) for n, sample in enumerate(samples)])


def miles(samples: Samples) -> Iterator[Row]:
    """Read the fields as slime does."""
    return _slime([exports.slime_sample(sample, n, 0) for n, sample in enumerate(samples)])


def _slime(made: Sequence[dict[str, Any]]) -> Iterator[Row]:
    trained: dict[Any, int] = defaultdict(int)
    for fields in made:
        trained[fields.get("rollout_id", fields["index"])] += sum(fields["loss_mask"])
    for fields in made:
        prompt = fields["tokens"][: -fields["response_length"]]
        yield Row(
            fields["tokens"],
            np.array(after_prompt(prompt, fields["loss_mask"])) / trained[fields.get("rollout_id", fields["index"])],
            after_prompt(prompt, fields["rollout_log_probs"]),
            reward=fields["reward"],
            truncated=fields["status"] == "truncated",
            weight_versions=set(fields["weight_versions"]),
        )


def prime_rl(samples: Samples) -> Iterator[Row]:
    for sample in group_advantages(samples):
        made = exports.prime_rl_training_sample(sample, "env")
        temperature = only(np.array(made["temperatures"])[made["mask"]])
        yield Row(made["token_ids"], made["mask"], made["logprobs"], made["advantages"], temperature=temperature)


def verifiers(samples: Samples) -> Iterator[Row]:
    """A branch per leaf; a sampled node is trained in the first branch that holds it."""
    for session in dict.fromkeys(sample.session_id for sample in samples):
        nodes = exports.verifiers_nodes(
            [sample for sample in group_advantages(samples) if sample.session_id == session]
        )
        parents = {node["parent"] for node in nodes}
        seen: set[int] = set()
        for leaf in [n for n in range(len(nodes)) if n not in parents]:
            path, at = [], leaf
            while at is not None:
                path, at = [at, *path], nodes[at]["parent"]
            values: dict[str, list[Any]] = defaultdict(list)
            for n in path:
                node = nodes[n]
                values["token_ids"] += node["token_ids"]
                values["weights"] += [on and n not in seen for on in node["mask"]]
                for name, key in (("logprobs", "logprobs"), ("advantages", "advantages")):
                    numbers = iter(node.get(key, ()))
                    values[name] += [next(numbers) if on else 0.0 for on in node["mask"]]
            seen.update(path)
            yield Row(**values)


def skyrl(samples: Samples) -> Iterator[Row]:
    """Its check of a generator's output needs a response per prompt, or the last step of each trajectory marked."""
    made = exports.skyrl_generator_output(samples)
    prompts = len({sample.session_id for sample in samples})
    if made["is_last_step"] is None and len(made["response_ids"]) != prompts:
        raise AssertionError(f"mismatch between prompts ({prompts}) and responses ({len(made['response_ids'])})")
    for n, (prompt, ids) in enumerate(zip(made["prompt_token_ids"], made["response_ids"], strict=True)):
        yield Row(
            prompt + ids,
            after_prompt(prompt, made["loss_masks"][n]),
            after_prompt(prompt, made["rollout_logprobs"][n]),
            reward=made["rewards"][n],
            truncated=made["stop_reasons"] is not None and made["stop_reasons"][n] == "length",
        )


def nemo_rl(samples: Samples) -> Iterator[Row]:
    """Samples with the same first `length` ids are a group."""
    made = [exports.nemo_rl_datum(sample, n) for n, sample in enumerate(samples)]
    ids = [np.concatenate([message["token_ids"] for message in datum["message_log"]]) for datum in made]
    prompts = [tuple(own[: datum["length"]]) for own, datum in zip(ids, made, strict=True)]
    for n, datum in enumerate(made):
        alike = [other["total_reward"] for other, prompt in zip(made, prompts, strict=True) if prompt == prompts[n]]
        log = datum["message_log"]
        trained = [np.full(len(message["token_ids"]), message["role"] == "assistant") for message in log]
        logprobs = [message.get("generation_logprobs", np.zeros(len(message["token_ids"]))) for message in log]
        yield Row(
            ids[n],
            np.concatenate(trained),
            np.concatenate(logprobs),
            np.full(len(ids[n]), datum["total_reward"] - np.mean(alike)),
            datum["total_reward"],
            truncated=bool(datum.get("truncated", False)),
        )


def tinker(samples: Samples) -> Iterator[Row]:
    """Targets are the ids shifted by 1. An advantage of 0 gives no loss."""
    for sample in group_advantages(samples):
        made = exports.tinker_datum(sample)
        inputs = {name: values.tolist() for name, values in made["loss_fn_inputs"].items()}
        assert made["tokens"][1:] == inputs["target_tokens"][:-1]
        yield Row(
            [made["tokens"][0], *inputs["target_tokens"]],
            [0, *(value != 0 for value in inputs["advantages"])],
            [0.0, *inputs["logprobs"]],
            [0.0, *inputs["advantages"]],
        )


def tinker_cross_entropy(samples: Samples) -> Iterator[Row]:
    """Read only targets and weights."""
    for sample in samples:
        made = exports.tinker_datum(sample, advantages=None)
        inputs = made["loss_fn_inputs"]
        yield Row([made["tokens"][0], *inputs["target_tokens"].tolist()], [0, *inputs["weights"].tolist()])


def agent_lightning(samples: Samples) -> Iterator[Row]:
    for sample in samples:
        for triplet in exports.agent_lightning_triplets(sample):
            prompt, response = triplet["prompt"]["token_ids"], triplet["response"]
            yield Row(
                prompt + response["token_ids"],
                after_prompt(prompt, [1] * len(response["token_ids"])),
                after_prompt(prompt, response["logprobs"]),
                reward=triplet["reward"],
            )


def of_samples(samples: Samples) -> Iterator[Row]:
    """Read samples as a hand-written training loop does."""
    for sample in samples:
        temperatures = token_temperatures(sample)
        versions = [""] * len(sample.token_ids)
        for start, end, version in sample.weight_spans:
            versions[start:end] = [version] * (end - start)
        yield Row(
            sample.token_ids,
            sample.loss_mask,
            sample.logprobs,
            sample.columns.get("advantages"),
            sample.reward,
            truncated=sample.truncated,
            weight_versions=versions,
            temperature=only(temperatures[sample.loss_mask]),
        )


def through_file(name: str, advantages: bool = True) -> Any:
    def rows(samples: Samples) -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            files.write_samples(group_advantages(samples) if advantages else samples, Path(folder) / name)
            yield from of_samples(list(files.read_samples(Path(folder) / name)))

    return rows


def in_batch(make: Callable[[Samples], Batch]) -> Callable[[Samples], Iterator[Row]]:
    def rows(samples: Samples) -> Iterator[Row]:
        batch = make(group_advantages(samples))
        of_segments = batch.places if len(batch.places) != len(batch.input_ids) else None
        for n, (row, start, end) in enumerate(batch.places.tolist()):
            # A padded row is returned with its padding.
            at = np.s_[row] if of_segments is None else np.s_[row, start:end]
            yield Row(
                batch.input_ids[at],
                batch.loss_mask[at],
                batch.logprobs[at],
                batch.columns["advantages"][at],
                batch.rewards[n],
                truncated=bool(batch.truncated[n]),
                weight_versions=np.array([*batch.versions, ""])[batch.weight_versions[at]],
                temperature=only(batch.temperatures[at][batch.loss_mask[at]]),
                position_ids=batch.position_ids[at],
            )

    return rows


def shifted(samples: Samples) -> Iterator[Row]:
    """Return the values that `logits[:, :-1]` predict, after the first id."""
    batch = padded(group_advantages(samples), pad_id=PAD, vocab_size=VOCAB_SIZE)
    made = batch.shifted()
    for n in range(len(samples)):
        yield Row(
            [batch.input_ids[n, 0], *made["target_ids"][n]],
            [0, *made["loss_mask"][n]],
            np.append(np.float32(0), made["logprobs"][n]),
            [0, *made["advantages"][n]],
            batch.rewards[n],
            truncated=bool(batch.truncated[n]),
            temperature=only(made["temperatures"][n][made["loss_mask"][n]]),
        )


PATHS: dict[str, Callable[[Samples], Iterator[Row]]] = {
    "TRL rollout_func": trl,
    "TRL asynchronous": trl_asynchronous,
    "verl AgentLoopOutput": verl_agent_loop,
    "verl transfer queue": verl_transfer_queue,
    "verl DataProto": verl_batch,
    "verl DataProto with advantages": verl_batch_with_advantages,
    "slime": slime,
    "Miles": miles,
    "prime-rl": prime_rl,
    "verifiers": verifiers,
    "SkyRL": skyrl,
    "NeMo-RL": nemo_rl,
    "Tinker": tinker,
    "Tinker cross_entropy": tinker_cross_entropy,
    "Agent Lightning": agent_lightning,
    "Parquet": through_file("samples.parquet"),
    "Parquet without advantages": through_file("samples.parquet", False),
    "JSON lines": through_file("samples.jsonl"),
    "padded right": in_batch(lambda samples: padded(samples, pad_id=PAD, vocab_size=VOCAB_SIZE)),
    "padded left": in_batch(lambda samples: padded(samples, pad_id=PAD, vocab_size=VOCAB_SIZE, side="left")),
    "packed in one row": in_batch(lambda samples: packed(samples, pad_id=PAD, vocab_size=VOCAB_SIZE)),
    "packed in rows": in_batch(lambda samples: packed(samples, pad_id=PAD, vocab_size=VOCAB_SIZE, length=40)),
    "padded and shifted": shifted,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PATHS:
        print(f"{name}\n\n{check_samples(PATHS[name])}\n")
