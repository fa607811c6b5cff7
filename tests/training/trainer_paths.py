"""Run by an interpreter that has a trainer: from exports to the inputs of its loss, by the trainer's functions.

Reads `[{session: [exported, ...]}, ...]`, a batch each, from standard input, and writes the rows of each batch: a dict
with the fields of `tokentape.testing.samples.Row`. Of modules that need more than is installed, only the functions
named are executed, from their files as they are.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import sys
import typing
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Sessions = dict[str, list[Any]]


def taken(module: str, *names: str, **known: Any) -> dict[str, Any]:
    """These functions, methods and classes of a module that can't be imported, in a namespace with `known`."""
    package, *path = module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    place = Path(spec.submodule_search_locations[0], *path).with_suffix(".py")
    if not place.is_file():
        raise ImportError(f"{place} does not exist")
    source = place.read_text()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.name in names]
    for node in nodes:
        node.decorator_list = []
        if isinstance(node, ast.ClassDef):
            continue
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(nodes, []), module, "exec"), known)
    return known


def verl(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """The default trainer of 0.9: `AgentLoopWorkerTQ`, all but TransferQueue's own put."""
    import numpy as np
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo.v1 import agent_loop_tq

    put: list[dict[str, Any]] = []

    async def kept(**call: Any) -> None:
        put.append(call)

    agent_loop_tq.tq.async_kv_batch_put = kept
    worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = object.__new__(worker_class)
    worker.processor, worker.reward_loop_worker_handles, worker.distillation_enabled = None, None, False
    for n, outputs in enumerate(sessions.values()):
        made = [AgentLoopOutput.model_validate(output, extra="forbid") for output in outputs]
        asyncio.run(worker._agent_loop_postprocess(made, False, uid="u", session_id=n, global_steps=9, raw_prompt=[]))
    tags = [tag for call in put for tag in call["tags"]]
    # As its metrics read them.
    least, most = (
        np.array([tag[name] for tag in tags], dtype=int) for name in ("min_global_steps", "max_global_steps")
    )
    fields = [field for call in put for field in call["fields"]]
    for n, field in enumerate(fields):
        before = [0] * len(field["prompts"])
        row = {
            "token_ids": field["input_ids"].tolist(),
            "weights": before + field["loss_mask"].tolist(),
            "logprobs": before + field["rollout_log_probs"].tolist(),
            "weight_versions": [str(least[n]), str(most[n])],
        }
        names = list(field.keys())
        yield row | ({"reward": float(field["rm_scores"].sum())} if "rm_scores" in names else {})


def slime(sessions: Sessions) -> Iterator[dict[str, Any]]:
    import torch
    from slime.utils.types import Sample

    samples = [[Sample.from_dict(sample) for sample in session] for session in sessions.values()]
    taken("slime.observability.rollout_data_utils", "validate_rollout_id_annotated", Sample=Sample)[
        "validate_rollout_id_annotated"
    ]([samples])
    known = {"Sample": Sample, "torch": torch, "get_source": lambda sample: None}
    made = taken("slime.ray.rollout", "_convert_samples_to_train_data", "_post_process_rewards", **known)
    manager = SimpleNamespace(args=ARGUMENTS, custom_convert_samples_to_train_data_func=None)
    manager.custom_reward_post_process_func = None
    manager._post_process_rewards = lambda batch_samples: made["_post_process_rewards"](manager, batch_samples)
    flat = [sample for session in samples for sample in session]
    return of_slime(made["_convert_samples_to_train_data"](manager, flat), flat)


def miles(sessions: Sessions) -> Iterator[dict[str, Any]]:
    from miles.ray.rollout.rollout_data_conversion import validate_compact_rollout_ids
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.types import Sample

    samples = [[Sample.from_dict(sample) for sample in session] for session in sessions.values()]
    validate_compact_rollout_ids([samples])
    flat = [sample for session in samples for sample in session]
    for sample in flat:
        sample.validate()
    return of_slime(convert_samples_to_train_data(ARGUMENTS, flat, {}, None, None), flat)


ARGUMENTS = SimpleNamespace(
    advantage_estimator="", rewards_normalization=False, reward_key=None, use_dynamic_global_batch_size=False
)


def of_slime(made: dict[str, Any], samples: list[Any]) -> Iterator[dict[str, Any]]:
    for n, ids in enumerate(made["tokens"]):
        before = [0] * (len(ids) - made["response_lengths"][n])
        yield {
            "token_ids": ids,
            "weights": before
            + [mask_value / max(1, made["rollout_mask_sums"][n]) for mask_value in made["loss_masks"][n]],
            "logprobs": before + made["rollout_log_probs"][n],
            "reward": made["rewards"][n],
            "truncated": bool(made["truncated"][n]),
            "weight_versions": samples[n].weight_versions,
        }


def skyrl(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """Its check, its step-wise merging of prefixes, and its tensors."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it before Python 3.12.
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.generators.utils import merge_stepwise_output
    from skyrl.train.utils.trainer_utils import validate_generator_output

    (output,) = sessions.values()
    prompts = len({json.dumps(trajectory_id) for trajectory_id in output["trajectory_ids"]})
    validate_generator_output(prompts, output, step_wise=True)
    validate_generator_output(prompts, merge_stepwise_output(output), step_wise=True)
    rewards = [
        [0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    ids, real, _, scores, masks, logprobs, _ = convert_prompts_responses_to_batch_tensors(
        2, output["prompt_token_ids"], output["response_ids"], rewards, output["loss_masks"], output["rollout_logprobs"]
    )
    for n, row in enumerate(ids):
        before = [0.0] * (len(row) - masks.shape[1])
        assert real[n].sum() == len(output["prompt_token_ids"][n]) + len(output["response_ids"][n])
        yield {
            "token_ids": row.tolist(),
            "weights": before + masks[n].tolist(),
            "logprobs": before + logprobs[n].tolist(),
            "reward": float(scores[n].sum()),
            "truncated": output["stop_reasons"][n] == "length",
        }


def nemo_rl(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """Process a batch of rollouts as `grpo_train` does before the loss."""
    import torch
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    batch = [datum for session in sessions.values() for datum in session]
    logs = [datum["message_log"] for datum in batch]
    for log in logs:
        for message in log:
            message["token_ids"] = torch.tensor(message["token_ids"])
            if "generation_logprobs" in message:
                message["generation_logprobs"] = torch.tensor(message["generation_logprobs"])
    grpo = taken(
        "nemo_rl.algorithms.grpo",
        "extract_initial_prompt_messages",
        "add_grpo_token_loss_masks_and_generation_logprobs",
        torch=torch,
        cast=typing.cast,
        backfill_missing_routed_experts=lambda logs: None,
    )
    baselines = taken("nemo_rl.algorithms.utils", "calculate_baseline_and_std_per_prompt", torch=torch)
    lengths = torch.tensor([datum["length"] for datum in batch])
    prompts, _ = batched_message_log_to_flat_message(
        grpo["extract_initial_prompt_messages"](logs, lengths), pad_value_dict={"token_ids": 2}
    )
    rewards = torch.tensor([datum["total_reward"] for datum in batch])
    baseline, _ = baselines["calculate_baseline_and_std_per_prompt"](
        prompts["token_ids"], rewards, torch.ones_like(rewards), leave_one_out_baseline=False
    )
    grpo["add_grpo_token_loss_masks_and_generation_logprobs"](logs)
    flat, _ = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 2})
    for n, datum in enumerate(batch):
        mask = flat["token_loss_mask"][n]
        yield {
            "token_ids": flat["token_ids"][n].tolist(),
            "weights": mask.tolist(),
            "logprobs": flat["generation_logprobs"][n].tolist(),
            "advantages": (mask * (rewards[n] - baseline[n])).tolist(),
            "reward": float(rewards[n]),
            "truncated": datum["truncated"],
        }


def tinker(sessions: Sessions) -> Iterator[dict[str, Any]]:
    """Return the inputs of its request types: no more inputs than its losses take."""
    from tinker import Datum, ModelInput

    for sample in [sample for session in sessions.values() for sample in session]:
        datum = Datum(model_input=ModelInput.from_ints(sample["tokens"]), loss_fn_inputs=sample["loss_fn_inputs"])
        inputs = {name: data.tolist() for name, data in datum.loss_fn_inputs.items()}
        assert set(inputs) == {"target_tokens", "logprobs", "advantages"}
        yield {
            "token_ids": [datum.model_input.to_ints()[0], *inputs["target_tokens"]],
            "weights": [0, *(int(value != 0) for value in inputs["advantages"])],
            "logprobs": [0.0, *inputs["logprobs"]],
            "advantages": [0.0, *inputs["advantages"]],
        }


TRAINERS: dict[str, Callable[[Sessions], Iterator[dict[str, Any]]]] = {
    trainer.__name__: trainer for trainer in (verl, slime, miles, skyrl, nemo_rl, tinker)
}


def main() -> None:
    logging.disable()
    try:
        made = [list(TRAINERS[sys.argv[1]](batch)) for batch in json.load(sys.stdin)]
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        made = None
    # Some of them print while they are imported.
    print("\n" + json.dumps(made))


if __name__ == "__main__":
    main()
