"""Run by an interpreter that has trainers installed: builds the trainers' objects from exports.

Reads `[exported, ...]` from standard input and writes the contents of the trainer's objects.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

from tests.training.trainer_paths import taken


def tinker(exported: list[Any]) -> list[Any]:
    from tinker import Datum, ModelInput

    out = []
    for sample in exported:
        datum = Datum(model_input=ModelInput.from_ints(sample["tokens"]), loss_fn_inputs=sample["loss_fn_inputs"])
        arrays = {name: data.tolist() for name, data in datum.loss_fn_inputs.items()}
        out.append({"length": datum.model_input.length, **arrays})
    return out


def verifiers(exported: list[Any]) -> list[Any]:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch

    nodes = [MessageNode.model_validate(node) for node in exported]
    parents = {node.parent for node in nodes}
    out = []
    for leaf in sorted(set(range(len(nodes))) - parents):
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = nodes[at].parent
        branch = Branch(index=0, nodes=path[::-1])
        out.append({name: getattr(branch, name) for name in ("token_ids", "sampled_mask", "logprobs", "advantages")})
    return out


def prime_rl(exported: list[Any]) -> list[Any]:
    import msgspec
    from prime_rl.transports.rollouts.types import TrainingSample

    return [
        msgspec.structs.asdict(msgspec.convert(list(sample.values()), TrainingSample)) for sample in _ordered(exported)
    ]


def _ordered(exported: list[Any]) -> list[Any]:
    """Fields by the order of an array-like struct, None where the exporter gives none."""
    from prime_rl.transports.rollouts.types import TrainingSample

    names = TrainingSample.__struct_fields__
    unknown = [name for sample in exported for name in sample if name not in names]
    if unknown:
        raise ValueError(f"TrainingSample has no {unknown}")
    return [{name: sample.get(name) for name in names} for sample in exported]


def slime(exported: list[Any]) -> list[Any]:
    from slime.utils.types import Sample

    return [_known(Sample, sample) for sample in exported]


def miles(exported: list[Any]) -> list[Any]:
    from miles.utils.types import Sample

    for sample in exported:
        Sample.from_dict(sample).validate()
    return [_known(Sample, sample) for sample in exported]


def _known(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    # Miles has no field for the session's id; its `from_dict` makes an attribute of it.
    unknown = fields.keys() - kind.__dataclass_fields__.keys() - {"session_id"}
    if unknown:
        raise ValueError(f"{kind} has no {unknown}")
    sample = kind.from_dict(fields)
    return {"tokens": sample.tokens, "trained": sample.effective_response_length}


def verl(exported: list[Any]) -> list[Any]:
    import numpy as np
    import torch
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    *outputs, proto = exported
    out: list[Any] = []
    for output in outputs:
        made = AgentLoopOutput.model_validate(output, extra="forbid").as_dict()
        out.append({name: made[name].tolist() for name in ("prompts", "responses", "response_mask", "rm_scores")})
    tensors = {name: torch.tensor(values) for name, values in proto["tensors"].items()}
    names = {name: np.array(values, object) for name, values in proto["non_tensors"].items()}
    batch = DataProto.from_dict(tensors=tensors, non_tensors=names)
    out.append({"rows": len(batch), "uid": batch.non_tensor_batch["uid"].tolist()})
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    keys = batch.non_tensor_batch["batch_key"].tolist()
    by_session = partial(compute_advantage_for_multi_trajectories, batch_keys=keys)
    for name, computes in {"advantages": by_session, "of_every_sample": compute_advantage}.items():
        values, mask = computes(batch, adv_estimator="grpo").batch["advantages"], batch.batch["response_mask"].bool()
        out[-1][name] = [row[trained][0].item() for row, trained in zip(values, mask, strict=True)]
    return out


def agent_lightning(exported: list[Any]) -> list[Any]:
    from pydantic import BaseModel, Field

    # Importing its package imports every feature.
    known = {"BaseModel": BaseModel, "Field": Field, "Any": Any, "Dict": dict, "Optional": Optional}
    triplet = taken("agentlightning.types.core", "Triplet", **known)["Triplet"]
    triplet.model_rebuild(_types_namespace=known)
    return [triplet.model_validate(fields, extra="forbid").model_dump() for fields in exported]


TRAINERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    trainer.__name__: trainer for trainer in (tinker, verifiers, prime_rl, slime, miles, verl, agent_lightning)
}


def main() -> None:
    try:
        made = TRAINERS[sys.argv[1]](json.load(sys.stdin))
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        made = None
    print("\n" + json.dumps(made, default=lambda array: array.tolist()))


if __name__ == "__main__":
    main()
