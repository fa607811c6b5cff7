"""Run by an interpreter that has a trainer: its loss and update on a CPU, on exported samples.

Reads `{"model": folder, "gradients": folder, "batches": {name: exported}}` from standard input. Writes for each batch
the rows that the loss got, each with the log-probabilities of the trainer's own forward pass, and the loss of each
step. The gradient of the first step goes to `NAME.npz` of the folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS = 4


def verl(model_dir: str, proto: dict[str, Any]) -> Iterator[Any]:
    """`FSDPEngine` in one process on gloo with FSDP2, `ppo_loss`, and the advantages of the default trainer."""
    import torch
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class PlatformCPU(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

    # Before anything of verl's asks which platform it is on.
    os.environ.update(VERL_PLATFORM="cpu", LOCAL_RANK="0")
    PlatformRegistry.register("cpu")(PlatformCPU)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    import numpy as np
    from verl import DataProto
    from verl.trainer.config import CheckpointConfig
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    plain = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=model_dir,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=plain, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-4, lr_warmup_steps=0, total_training_steps=STEPS, weight_decay=0.0),
        CheckpointConfig(),
    )
    engine.initialize()

    tensors = {name: torch.tensor(values) for name, values in proto["tensors"].items()}
    names = {name: np.array(values, object) for name, values in proto["non_tensors"].items()}
    batch = DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info=proto["meta_info"])
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    # As its `apply_bypass_mode`: the ratio is of the policy that sampled.
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    keys = batch.non_tensor_batch["batch_key"].tolist()
    batch = compute_advantage_for_multi_trajectories(batch, batch_keys=keys, adv_estimator="grpo")
    config = ActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, ppo_mini_batch_size=len(batch), rollout_n=1)
    rows: list[dict[str, Any]] = []

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        new = no_padding_2_padding(model_output["log_probs"], data)
        for n in range(len(data)):
            prompt, response = data["attention_mask"][n].split([data["prompts"].shape[1], data["responses"].shape[1]])
            before, long = [0] * int(prompt.sum()), int(response.sum())
            inputs = {"weights": data["response_mask"], "logprobs": data["old_log_probs"]}
            inputs |= {"advantages": data["advantages"], "new": new.detach()}
            row = {name: before + values[n, :long].tolist() for name, values in inputs.items()}
            row["token_ids"] = data["prompts"][n, prompt.bool()].tolist() + data["responses"][n, :long].tolist()
            rows.append(row | {"reward": float(data["token_level_rewards"][n].sum())})
        return ppo_loss(config, model_output, data, dp_group)

    def step() -> float:
        tensordict = left_right_2_no_padding(batch.to_tensordict())
        about = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_fused_kernels": False}
        about |= {"calculate_entropy": False, "global_batch_size": len(batch), **batch.meta_info}
        tensordict_utils.assign_non_tensor(tensordict, **about)
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(tensordict, loss)
        return sum(float(loss_value) for loss_value in output["metrics"]["actor/pg_loss"].values)

    def gradient() -> dict[str, Any]:
        return {name: parameter.grad.full_tensor() for name, parameter in engine.module.named_parameters()}

    # The gradients are gone at its end.
    with engine.train_mode():
        yield from stepped(step, gradient, engine.optimizer_step, rows)


def prime_rl(model_dir: str, exported: list[dict[str, Any]]) -> Iterator[Any]:
    """`prepare_batch` and `compute_loss` with the default loss, around a forward pass of transformers."""
    import torch
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.trainer.rl import loss as losses
    from prime_rl.transports.rollouts.types import TrainingSample
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    samples = [TrainingSample(**sample) for sample in exported]
    (batches,) = prepare_batch(samples, 600, 1, build_bin_cost(None))
    scale = sum(sum(packed.loss_mask) for packed in batches)
    rows: list[dict[str, Any]] = []

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for packed in batches:
            ids = torch.tensor([packed.input_ids])
            # A packed row is several sequences, which its own models keep apart by their lengths.
            parts = ids.split(packed.sequence_lengths, dim=1)
            logits = torch.cat([model(input_ids=part).logits for part in parts], dim=1)
            scaled = logits / torch.tensor([packed.temperatures]).unsqueeze(-1)
            log_softmax = losses.selective_log_softmax(scaled, losses.shift_tensor_left(ids))
            new = losses.shift_tensor_right(log_softmax)[0].split(packed.sequence_lengths)
            columns = {name: getattr(packed, name) for name in ("inference_logprobs", "advantages", "loss_mask")}
            inputs = {name: torch.tensor(values).split(packed.sequence_lengths) for name, values in columns.items()}
            for n, part in enumerate(parts):
                arrays = {"weights": inputs["loss_mask"], "logprobs": inputs["inference_logprobs"]}
                arrays |= {"advantages": inputs["advantages"], "new": [tensor.detach() for tensor in new]}
                rows.append(
                    {"token_ids": part[0].tolist()} | {name: values[n].tolist() for name, values in arrays.items()}
                )
            unused = dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
            scales = {"rl_scale": scale, "ce_scale": 1, "ref_kl_scale": 1}
            rl_loss = losses.setup_rl_loss_fn(DefaultLossConfig())
            loss, _ = losses.compute_loss(trainer_logprobs=new, rl_loss_fn=rl_loss, **inputs, **unused, **scales)
            loss.backward()
            total += float(loss)
        return total

    def gradient() -> dict[str, Any]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    yield from stepped(step, gradient, optimizer.step, rows)


def stepped(
    step: Callable[[], float], gradient: Callable[[], Any], update: Callable[[], Any], rows: list[dict[str, Any]]
) -> Iterator[Any]:
    """The gradient and the rows of the first step, then the loss of every step."""
    losses = []
    for n in range(STEPS):
        losses.append(step())
        if n == 0:
            yield {name: tensor.numpy().copy() for name, tensor in gradient().items()}
            yield [*rows]
        update()
    yield losses


TRAINERS = {"verl": verl, "prime_rl": prime_rl}


def main() -> None:
    logging.disable()
    # Its kernels would be compiled for each shape.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    asked = json.load(sys.stdin)
    made: Any = {}
    try:
        import numpy as np

        for name, exported in asked["batches"].items():
            gradient, rows, losses = TRAINERS[sys.argv[1]](asked["model"], exported)
            np.savez(Path(asked["gradients"], f"{name}.npz"), **gradient)
            made[name] = {"rows": rows, "losses": losses}
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        made = None
    # Some of them print while they are imported.
    print("\n" + json.dumps(made))


if __name__ == "__main__":
    main()
