"""Run by an interpreter that has a trainer: adapters inside the trainer's own entry of rollouts, over a ledger.

Writes, as JSON, the kit's findings in the trainer's rows, the planted errors that it would miss, and the result of an
agent that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import re
import sys
import typing
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

from tests.training import live
from tests.training.trainer_harnesses import nemo_gym
from tests.training.trainer_paths import of_slime, taken
from tests.training.trainer_trl import openenv, trl, trl_async
from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.gateway._serve import running
from tokentape.testing._rows import Row, place
from tokentape.training.slime import generating


def verl() -> dict[str, Any]:
    """`AgentLoopWorkerTQ._run_prompt`: it makes the loops, runs them and puts what they return into its queue."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop
    from verl.trainer.ppo.v1 import agent_loop_tq
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    ledger, put, statuses = live.LEDGER[-1], [], []

    class Servers(LLMServerClient):
        """Its own client, with the server's actor replaced."""

        async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
            async def remote(**asked: Any) -> TokenOutput:
                call = ledger.sample(asked["prompt_ids"], asked["sampling_params"]["max_tokens"], request_id)
                steps = {"global_steps": int(call.version)}
                return TokenOutput(
                    token_ids=call.ids,
                    log_probs=call.logprobs,
                    stop_reason="aborted" if call.finish == "abort" else "completed",
                    extra_fields=steps,
                )

            return "server", SimpleNamespace(generate=SimpleNamespace(remote=remote))

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    async def put_batch(**batch_call: Any) -> None:
        put.append(batch_call)

    async def put_single(**single_call: Any) -> None:
        statuses.append(single_call["tag"]["status"])

    agent_loop_tq.tq.async_kv_batch_put, agent_loop_tq.tq.async_kv_put = put_batch, put_single
    rollout = {"name": "vllm", "n": 5, "prompt_length": 200, "response_length": 300, "max_model_len": None}
    rollout |= {"logprobs_mode": "processed_logprobs", "full_determinism": False, "agent": {}}
    rollout |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout, "model": {}}, "trainer": {"use_v1": True}, "data": {}}
    )
    agent_loop._agent_loop_registry["tokentape"] = OmegaConf.create(
        {
            "name": "tokentape",
            "_target_": "tokentape.training.verl.AgentLoop",
            "agent": "tests.training.trainer_live.by_session",
        }
    )
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.config, worker.rollout_config, worker.llm_client = config, config.actor_rollout_ref.rollout, Servers(config)
    worker.tokenizer, worker.processor = SimpleNamespace(name_or_path=str(MODEL)), None
    worker.hf_model_type, worker.dataset_cls, worker.tools = None, None, []
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    def prompt(offset: int, n: int) -> Any:
        row = {"uid": f"u{offset}", "raw_prompt": [], "agent_name": "tokentape", "global_steps": 9}
        about = {"step": 9, "sample_index": 0, "rollout_n": 0, "validate": False}
        return worker._run_prompt({**row, "__rollout_n__": n, "offset": offset}, sampling, about)

    async def both() -> None:
        await prompt(0, 5)
        await prompt(5, 1)

    asyncio.run(both())
    fields = [(field, tag) for call in put for field, tag in zip(call["fields"], call["tags"], strict=True)]
    advantages = verl_advantages([field for field, _ in fields], [key for call in put for key in call["keys"]])
    rows = []
    rewards: dict[str, float] = {}
    for n, (field, tag) in enumerate(fields):
        before = [0] * len(field["prompts"])
        extra = field["extra_fields"]
        extra = extra.data if hasattr(extra, "data") else extra
        rewards[extra["session_id"]] = float(field["rm_scores"].sum())
        rows.append(
            Row(
                field["input_ids"].tolist(),
                before + field["loss_mask"].tolist(),
                before + field["rollout_log_probs"].tolist(),
                before + advantages[n, : len(field["loss_mask"])].tolist(),
                reward=rewards[extra["session_id"]],
                weight_versions={str(tag[f"{name}_global_steps"]) for name in ("min", "max")},
            )
        )
    return {"rows": rows, "rewards": rewards, "failed": statuses[-1]}


def verl_advantages(fields: list[Any], keys: list[str]) -> Any:
    """Return the trainer's advantages for the rewards of a batch from its queue."""
    import numpy as np
    from torch.nn.utils.rnn import pad_sequence
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    names = {"response_mask": "loss_mask", "token_level_rewards": "rm_scores"}
    tensors = {
        name: pad_sequence([field[column] for field in fields], batch_first=True) for name, column in names.items()
    }
    groups = np.array([key.rsplit("_", 2)[0] for key in keys], object)
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": groups})
    return compute_advantage_for_multi_trajectories(batch, batch_keys=keys, adv_estimator="grpo").batch["advantages"]


async def by_session(base_url: str, api_key: str, task: Any) -> float | None:
    """The agent of the ledger, by verl's number of the session. They wait for each other: one changes the weights."""
    async with LOCK:
        return await live.agent(base_url, api_key, {"number": task["offset"] + int(task["session_id"])})


LOCK = asyncio.Lock()


async def post(url: str, payload: Any, max_retries: int = 60, action: str = "post", headers: Any = None) -> Any:
    """`post` of both trainers, and SGLang's `/generate`."""
    limit = payload["sampling_params"]["max_new_tokens"]
    call = live.LEDGER[-1].sample(payload["input_ids"], limit, headers["X-SMG-Routing-Key"])
    end = {"type": call.finish} | ({"matched": call.ids[-1]} if call.finish == "stop" else {})
    pairs = [(logprob, token_id, None) for logprob, token_id in zip(call.logprobs, call.ids, strict=True)]
    about = {"finish_reason": end, "output_token_logprobs": pairs, "weight_version": call.version}
    return {"text": "", "meta_info": about}


SLIME_ARGS = dict[str, Any](
    hf_checkpoint=str(MODEL),
    sglang_router_ip="127.0.0.1",
    sglang_router_port=3000,
    partial_rollout=False,
    router_policy="consistent_hashing",
    rollout_max_context_len=None,
    rollout_stop_token_ids=None,
    custom_generate_function_path="tests.training.trainer_live.slime_generate",
    mask_offpolicy_in_partial_rollout=False,
    group_rm=False,
    custom_rm_path=None,
    reward_key=None,
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=False,
    n_samples_per_prompt=6,
    rollout_batch_size=1,
    use_dynamic_global_batch_size=False,
)


def slime() -> dict[str, Any]:
    """`generate_and_rm_group`, then what the trainer makes of the group; only HTTP to the router is replaced."""
    import numpy as np
    import torch
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils
    from slime.utils.types import Sample

    from tokentape.training.slime import normalized_rewards

    http_utils.post = post
    args = SimpleNamespace(**SLIME_ARGS)
    state = SimpleNamespace(aborted=False, semaphore=asyncio.Semaphore(8), dp_rank_context=np.errstate)
    sglang_rollout.GenerateState = lambda args: state

    async def no_hooks(args: Any, sample: Any, evaluation: bool = False) -> Any:
        return sample

    sglang_rollout.apply_rollout_sample_hooks = no_hooks
    group = [Sample(group_index=0, index=n, prompt="p", metadata={"number": n}) for n in range(6)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 80}
    made = asyncio.run(sglang_rollout.generate_and_rm_group(args, group, sampling))
    taken("slime.observability.rollout_data_utils", "validate_rollout_id_annotated", Sample=Sample)[
        "validate_rollout_id_annotated"
    ]([made])
    functions = taken(
        "slime.ray.rollout",
        "_convert_samples_to_train_data",
        "_post_process_rewards",
        Sample=Sample,
        torch=torch,
        get_source=lambda sample: None,
    )
    manager = SimpleNamespace(args=args, custom_convert_samples_to_train_data_func=None)
    manager.custom_reward_post_process_func = normalized_rewards
    manager._post_process_rewards = lambda batch_samples: functions["_post_process_rewards"](manager, batch_samples)
    flat = [sample for samples in made for sample in samples]
    data = functions["_convert_samples_to_train_data"](manager, flat)
    rows, rewards = slime_rows(data, flat)
    # One sample each: then its own normalization and ours are the same.
    single = [samples[0] for samples in made]
    args.n_samples_per_prompt = len(single)
    for scaled in (False, True):
        args.grpo_std_normalization = scaled
        for first in single:
            first.remove_sample = False
        ours = normalized_rewards(args, single)
        manager.custom_reward_post_process_func = None
        theirs = functions["_post_process_rewards"](manager, single)
        assert np.allclose(ours, theirs, atol=1e-5), (ours, theirs)
    return {"rows": rows, "rewards": rewards, "failed": flat[-1].status.value}


def miles() -> dict[str, Any]:
    """`generate_and_rm_group`, then what the trainer makes of the group; only HTTP to the router is replaced."""
    from miles.ray.rollout.rollout_data_conversion import validate_compact_rollout_ids
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.rollout.filter_hub.dynamic_sampling_filters import check_no_aborted
    from miles.utils import http_utils
    from miles.utils.types import Sample

    from tokentape.training.slime import normalized_rewards

    http_utils.post = post
    args = SimpleNamespace(**SLIME_ARGS)
    # These modules import SGLang.
    inputs = ModuleType("miles.rollout.base_types")
    sys.modules[inputs.__name__] = inputs
    names = ("GenerateFnInput", "GenerateFnOutput")
    for name, made in taken(inputs.__name__, *names, __name__=inputs.__name__, Any=Any).items():
        setattr(inputs, name, dataclass(made) if name in names else made)
    load = taken(
        "miles.rollout.inference_rollout.compatibility",
        *("load_generate_function", "_is_legacy_generate_fn"),
        inspect=inspect,
        load_function=lambda path: path and slime_generate,
    )["load_generate_function"]
    common = taken(
        "miles.rollout.inference_rollout.inference_rollout_common",
        *("generate_and_rm", "generate_and_rm_group"),
        asyncio=asyncio,
        deepcopy=deepcopy,
        logger=logging.getLogger("miles"),
        Sample=Sample,
        load_generate_function=load,
        GenerateFnInput=inputs.GenerateFnInput,
        TrajectoryLifecycle=lambda: SimpleNamespace(sink=None),
        policy_uses_routing_key=lambda args: False,
        batched_async_rm=lambda args, samples, **options: asyncio.sleep(0),
    )
    function = load("tests.training.trainer_live.slime_generate")
    state = SimpleNamespace(
        args=args, aborted=False, generate_function=function, generate_fn_semaphore=asyncio.Semaphore(8)
    )
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 80}
    group = [Sample(group_index=0, index=n, prompt="p", metadata={"number": n}) for n in range(6)]
    made = asyncio.run(common["generate_and_rm_group"](state, group, sampling))
    validate_compact_rollout_ids([made])
    # A group with a rollout that failed can be left out,
    assert not check_no_aborted(args, made).keep
    assert check_no_aborted(args, made[:5]).keep
    flat = [item for samples in made for item in samples]
    for item in flat:
        item.validate()
    # or the rollout, by our function.
    rows, rewards = slime_rows(convert_samples_to_train_data(args, flat, {}, None, normalized_rewards), flat)
    data = convert_samples_to_train_data(args, flat, {}, None, None)
    # In its mean, that rollout counts with reward 0; a forked rollout counts once.
    mean = sum(live.REWARDS) / 6
    for sample, reward in zip(flat[:-1], data["rewards"], strict=False):
        assert abs(reward - (sample.reward - mean)) < 1e-6, (sample.index, reward)
    return {"rows": rows, "rewards": rewards, "failed": flat[-1].status.value}


def slime_rows(data: dict[str, Any], samples: list[Any]) -> tuple[list[Row], dict[str, float]]:
    """Rows of train data, and rewards by session. Rows of rollouts that failed train nothing."""
    rows, rewards = [], {}
    for n, row in enumerate(of_slime(data, samples)):
        if any(row["weights"]):
            row["advantages"] = [row["reward"]] * len(row["token_ids"])
            rewards[samples[n].metadata["session_id"]] = data["raw_reward"][n]
            row |= {"reward": data["raw_reward"][n], "weight_versions": set(row["weight_versions"])}
            rows.append(Row(**row))
    return rows, rewards


async def slime_agent(base_url: str, api_key: str, task: Any) -> float | None:
    async with LOCK:
        return await live.agent(base_url, api_key, task["metadata"])


slime_generate = generating(slime_agent)


def skyrl() -> dict[str, Any]:
    """What its trainer checks and merges, of a generator's output; only the inference client is replaced."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it before Python 3.12.
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID
    from skyrl.train.generators.utils import merge_stepwise_output
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from tokentape.training.skyrl import AgentGenerator

    ledger = live.LEDGER[-1]
    sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_generate_length=80)
    engine = SimpleNamespace(engine_init_kwargs={})
    cfg = SimpleNamespace(sampling_params=sampling, inference_engine=engine, step_wise_trajectories=True)
    tokenizer = SimpleNamespace(name_or_path=str(MODEL))
    client = live.SkyRlClient(ledger)
    generator = AgentGenerator(live.sequential_agent(), cfg, client, tokenizer, max_seq_len=500)
    batch = {
        "prompts": [[]] * 6,
        "env_classes": [""] * 6,
        "env_extras": [{"number": n} for n in range(6)],
        "sampling_params": None,
        "trajectory_ids": [*(TrajectoryID("a", n) for n in range(5)), TrajectoryID("b", 0)],
        "batch_metadata": BatchMetadata(global_step=1, training_phase="train"),
    }
    output = asyncio.run(generator.generate(batch))
    validate_generator_output(6, output, step_wise=True)
    validate_generator_output(6, merge_stepwise_output(output), step_wise=True)
    rows, rewards = live.skyrl_rows(output, ledger)
    row_advantages = skyrl_advantages(output)
    trained = [n for n, mask in enumerate(output["loss_masks"]) if any(mask)]
    for at, n in enumerate(trained):
        before = [0.0] * len(output["prompt_token_ids"][n])
        rows[at] = replace(rows[at], advantages=[*before, *row_advantages[n]])
    return {"rows": rows, "rewards": rewards, "failed": output["stop_reasons"][-1]}


def skyrl_advantages(output: dict[str, Any]) -> list[list[float]]:
    """What its trainer's `compute_advantages_and_returns` makes of the rewards, by row and token."""
    import numpy as np
    import torch
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    scores = [
        [0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    prompts, responses, masks, logprobs = (output[name] for name in columns)
    _, _, response_mask, rewards, _, _, _ = convert_prompts_responses_to_batch_tensors(
        2, prompts, responses, scores, masks, logprobs
    )

    class Data(dict[str, Any]):
        metadata: ClassVar = {
            "is_last_step": output["is_last_step"],
            "uids": [trajectory_id.instance_id for trajectory_id in output["trajectory_ids"]],
            "avg_response_length": 0.0,
        }

        def to(self, device: str) -> Any:
            return self

    algorithm = SimpleNamespace(advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=False)
    cfg = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=True), trainer=SimpleNamespace(algorithm=algorithm)
    )
    known = {"np": np, "torch": torch, "ppo_utils": ppo_utils, "logger": logging.getLogger("skyrl")}
    name = "compute_advantages_and_returns"
    trainer = SimpleNamespace(cfg=cfg, all_metrics={})
    data = Data(rewards=rewards, response_mask=response_mask, values=None)
    taken("skyrl.train.trainer", name, **known)[name](trainer, data)
    ends = [int(mask.sum()) for mask in response_mask]
    padded = data["advantages"].tolist()
    # Responses are at the left of their columns or at the right; either way their mask says where.
    return [
        [value for value, on in zip(row, mask, strict=True) if on][:end]
        for row, mask, end in zip(padded, response_mask.tolist(), ends, strict=True)
    ]


def verifiers() -> dict[str, Any]:
    """`Agent.run` of verifiers, and what prime-rl's orchestrator makes of the traces; only the model is replaced."""
    import msgspec
    import torch
    import verifiers.v1 as vf

    from tokentape.training.verifiers import AgentHarness

    ledger, lock = live.LEDGER[-1], asyncio.Lock()

    class Harness(AgentHarness, vf.Harness[vf.HarnessConfig]):
        @staticmethod
        async def agent(base_url: str, api_key: str, task: Any) -> float | None:
            async with lock:
                return await live.agent(base_url, api_key, task)

    class Data(vf.TaskData):
        number: int

    plugin = ModuleType("tokentape_agent")
    plugin.__all__, plugin.Harness = ["Harness"], Harness  # type: ignore[attr-defined]
    plugin.__spec__ = ModuleSpec(plugin.__name__, None)
    sys.modules[plugin.__name__] = plugin

    async def rollouts() -> list[Any]:
        async with live.vllm_server(ledger) as url:
            client = vf.TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=str(MODEL))
            config = vf.AgentConfig(
                harness=vf.HarnessConfig(id=plugin.__name__),
                runtime=vf.SubprocessConfig(),
                model=str(MODEL),
                client=client,
                sampling=vf.SamplingConfig(temperature=1.0, top_p=1.0, extra_body={"cache_salt": "7"}),
            )
            async with vf.Agent(config) as agent:
                tasks = [vf.Task(Data(prompt="p", number=n)) for n in range(7)]
                return list(await asyncio.gather(*(agent.run(task) for task in tasks)))

    traces = asyncio.run(rollouts())
    assert [trace.ok for trace in traces] == [True] * 5 + [False, True], [trace.errors for trace in traces]
    assert [trace.num_turns for trace in traces] == [3, 4, 3, 3, 3, 0, 0]
    assert re.fullmatch(r"Reply \d+ of (many )*words\.", traces[0].last_reply), traces[0].last_reply
    assert {body["cache_salt"] for body in ledger.bodies} == {"7"}
    structs = ("EncodedTensor", "RoutedExperts", "TrainingSample")
    sample_class = taken("prime_rl.transports.rollouts.types", *structs, msgspec=msgspec)["TrainingSample"]
    samples_of = taken(
        "prime_rl.orchestrator.trajectories",
        *("trace_to_samples", "iter_trainable_branches", "_loss_weights", "_encode_routed_experts"),
        TrainingSample=sample_class,
        get_logger=lambda: logging.getLogger("prime_rl"),
    )["trace_to_samples"]
    # The orchestrator of that commit asks every branch for images, where this verifiers has none any more.
    vf.Branch.multi_modal_data = None
    score_group = taken("prime_rl.orchestrator.algo.grpo", "score_group", torch=torch, **prime_rl_algo())["score_group"]
    episodes = [SimpleNamespace(traces=[trace]) for trace in traces[:5]]
    asyncio.run(score_group(SimpleNamespace(length_penalty=None), episodes))
    rows, rewards = [], {}
    for trace in traces[:5]:
        rewards[trace.id] = trace.reward
        for sample in samples_of(trace, env_name="e"):
            rows.append(
                Row(
                    [*map(int, sample.token_ids)],
                    [*map(float, sample.mask)],
                    [*map(float, sample.logprobs)],
                    [*map(float, sample.advantages)],
                    reward=trace.reward,
                    truncated=trace.is_truncated,
                )
            )
    return {"rows": rows, "rewards": rewards, "failed": traces[5].last_error.type}


def prime_rl_algo() -> dict[str, Any]:
    """What its algorithms import."""
    import verifiers.v1 as vf

    known = {
        "iter_trainable_traces": lambda episodes: [(episode, trace) for episode in episodes for trace in episode.traces]
    }
    return known | taken("prime_rl.orchestrator.algo.routing", "assign_advantages", vf=vf)


def tinker_cookbook() -> dict[str, Any]:
    """The cookbook's rollouts of groups, its advantages and its data; only Tinker's sampling client is replaced."""
    import tinker
    from tinker_cookbook.completers import TinkerTokenCompleter
    from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
    from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
    from tinker_cookbook.rl.rollouts import do_group_rollout_and_filter_constant_reward
    from tinker_cookbook.rl.types import EnvGroupBuilder

    from tokentape.training.tinker import AgentRollouts

    class Rollouts(AgentRollouts, RolloutStrategy):
        agent = "tests.training.trainer_live.by_number"
        model_dir, max_context = MODEL, 500

        async def execute(self, env_group_builder: Any, policy: Any) -> Any:
            assert isinstance(policy, TinkerTokenCompleter)
            return await super().execute(env_group_builder, policy)

    class Tasks(EnvGroupBuilder):
        def __init__(self, *numbers: int) -> None:
            self.numbers = numbers

        async def make_envs(self) -> Any:
            return [SimpleNamespace(number=n) for n in self.numbers]

    async def groups() -> list[Any]:
        asked = {"max_tokens": 80, "temperature": 1.0, "do_remove_constant_reward_groups": True}
        return [
            await do_group_rollout_and_filter_constant_reward(
                live.TinkerClient(live.LEDGER[-1]), Tasks(*numbers), **asked, strategy=Rollouts()
            )
            for numbers in (range(5), [5, 7])
        ]

    # It has no finish reason for an aborted call.
    assert typing.get_args(tinker.StopReason) == ("length", "stop")
    group, failed = asyncio.run(groups())
    assert group.get_total_rewards() == [*live.REWARDS]
    (advantages,) = compute_advantages([group])
    centered = [reward - sum(live.REWARDS) / 5 for reward in live.REWARDS]
    assert max(abs(advantage - other) for advantage, other in zip(advantages.tolist(), centered, strict=True)) < 1e-6
    rows = []
    for datum, about in zip(*assemble_training_data([group], [advantages]), strict=True):
        inputs = {name: values.to_torch().tolist() for name, values in datum.loss_fn_inputs.items()}
        number = about["traj_idx"]
        rows.append(
            Row(
                [datum.model_input.to_ints()[0], *inputs["target_tokens"]],
                [0.0, *inputs["mask"]],
                [0.0, *inputs["logprobs"]],
                [0.0, *inputs["advantages"]],
                reward=live.REWARDS[number],
                truncated=group.trajectories_G[number].stop_reason == "max_tokens",
            )
        )
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": rows, "rewards": rewards, "failed": "skipped" if failed is None else "trained"}


async def by_number(base_url: str, api_key: str, task: Any) -> float | None:
    async with LOCK:
        return await live.agent(base_url, api_key, task)


def agent_lightning() -> dict[str, Any]:
    """Its server with the proxy, its manager of rollouts and its adapter to verl; only vLLM is replaced."""
    import numpy as np
    import torch
    from agentlightning.server.app import create_app
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager
    from agentlightning.verl.rollout_adapter import RolloutAdapter
    from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage

    from tokentape.training.agent_lightning import AgentRollout

    class Rollout(AgentRollout):
        model_dir, max_context = MODEL, 500

        @staticmethod
        async def agent(base_url: str, api_key: str, task: Any) -> float | None:
            return await live.agent(base_url, api_key, {"number": task["NUMBER"]})

    proxy = {"model_name": "policy", "train": {"temperature": 1.0}, "val": {"temperature": 1.0}}
    with running(create_app({"key": "secret", "default_proxy": proxy})) as url:
        manager = AglRolloutManager(agl_base_url=url, agl_key="secret", model="policy", step=3)
        enqueued = manager._create_rollouts({"number": [*range(6)]}, is_train=True)

        async def rollouts() -> None:
            async with live.vllm_server(live.LEDGER[-1]) as server:
                await asyncio.to_thread(manager.register_model, [f"{server}/v1"])
                for rollout in enqueued:
                    # As its local controller does, which starts a process for each.
                    at = f"rollout/{rollout.rollout_id}/attempt/0"
                    os.environ |= {"AGL_OPENAI_BASE_URL": f"{url}/proxy/{at}/mode/train/openai/v1", "AGL_KEY": "secret"}
                    os.environ |= {"AGL_EVENT_URL": f"{url}/api/{at.replace('rollout/', 'rollouts/')}/events"}
                    os.environ["NUMBER"] = str(rollout.input["number"])
                    try:
                        await Rollout().run()
                        states = ["running", "succeeded"]
                    except RuntimeError:
                        states = ["running", "failed"]
                    for state in states:
                        patch = {"status": {"state": state, "last_attempt_id": "0"}}
                        path = f"/api/rollouts/{rollout.rollout_id}"
                        (await asyncio.to_thread(manager.client.patch, path, json=patch)).raise_for_status()

        asyncio.run(rollouts())
        made = [
            manager._build_completed_rollout(rollout, manager._get_rollout(rollout.rollout_id)) for rollout in enqueued
        ]
    assert [rollout.final_reward for rollout in made] == [*live.REWARDS, None]
    adapter = RolloutAdapter(
        max_prompt_length=400,
        max_response_length=400,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    batch, _ = adapter.get_train_data_batch(made[:5])
    # Its rewards are bfloat16, and so would the advantages be.
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"].float()
    # They are of the same row of its data, generated several times; here each has a different number.
    batch.non_tensor_batch["uid"] = np.array(["g"] * len(batch), object)
    batch, _ = compute_rollout_level_advantage(batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=5)
    names = [rollout.rollout_id for rollout in made]
    rows = []
    for n, name in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        tensors = {key: values[n].float() for key, values in batch.batch.items()}
        zeros = torch.zeros(400)
        real = tensors["attention_mask"].bool()
        columns = {"weights": "response_mask", "logprobs": "rollout_log_probs", "advantages": "advantages"}
        arrays = {field: torch.cat([zeros, tensors[key]])[real].tolist() for field, key in columns.items()}
        rows.append(Row(tensors["input_ids"][real].int().tolist(), **arrays, reward=live.REWARDS[names.index(name)]))
        assert float(tensors["token_level_scores"].sum()) == torch.tensor(rows[-1].reward).bfloat16()
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": rows, "rewards": rewards, "failed": made[5].rollout_state.value}


def art() -> dict[str, Any]:
    """What it makes of the replies that its rollouts read, ids included; it has no adapter."""
    from openai.types.chat.chat_completion import Choice

    ids = ("_ids", "_logprobs", "choice_completion_logprobs", "has_completion_logprobs")
    known = taken(
        "art.preprocessing.dynamo_tokens",
        *ids,
        math=math,
        cast=cast,
        Any=Any,
        COMPLETION_LOGPROBS_KEYS=("compact_logprobs", "art_completion_logprobs"),
    )
    vllm = ("_normalize_token_ids", "attach_vllm_token_metadata_to_choice", "choice_vllm_token_metadata")
    known = taken("art.preprocessing.vllm_tokens", *vllm, **known)
    known |= {"Choice": Choice, "align_choice_routes_to_tokenized_result": lambda **arguments: (None, None)}
    made = ("assemble_vllm_training_sequences", "_tokenized_result_from_vllm_choices", "_choice_logprobs")
    known = taken(
        "art.preprocessing.tokenize", *made, "_choice_extra_logprobs", **known, TokenizedResult=SimpleNamespace
    )
    rows = []
    with live.ledger_gateway() as url, Client(url) as client:
        for number, reward in enumerate(live.REWARDS):
            replies: list[dict[str, Any]] = []
            asyncio.run(live.agent(client.session().base_url, "none", {"number": number}, replies))
            choices = [Choice.model_validate(reply["choices"][0]) for reply in replies]
            for choice, reply in zip(choices, replies, strict=True):
                known["attach_vllm_token_metadata_to_choice"](choice=choice, response_payload=reply)
            sequences = known["assemble_vllm_training_sequences"](
                tokenizer=None,
                histories=[SimpleNamespace(messages_and_choices=choices)],
                advantage=1.0,
                allow_training_without_logprobs=False,
                trajectory=None,
            )
            for sequence in sequences:
                logprobs = [0.0 if math.isnan(value) else value for value in sequence.logprobs]
                rows.append(Row(sequence.token_ids, sequence.assistant_mask, logprobs, reward=reward))
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": rows, "rewards": rewards, "failed": ""}


ALL = (verl, slime, miles, skyrl, verifiers, tinker_cookbook, agent_lightning, art, nemo_gym, trl, trl_async, openenv)
TRAINERS: dict[str, Callable[[], dict[str, Any]]] = {trainer.__name__: trainer for trainer in ALL}


NO_ABORTS = {"tinker_cookbook", "nemo_gym"}
"""Trainers whose engine can't report that a call was aborted. All others continue with a prompt that ends with
the sampled tokens."""


def main() -> None:
    logging.disable()
    ledger = live.Ledger(aborts=sys.argv[1] not in NO_ABORTS)
    live.LEDGER.append(ledger)
    live.CLIENTS.update(live.THREE)
    try:
        made = TRAINERS[sys.argv[1]]()
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print("\nnull")
        return
    golden, rows = live.golden_of(ledger.calls, made["rewards"]), made["rows"]
    kinds, noticed, unnoticed = live.checked(golden, rows)
    # Rows by kind of session, and whether the call with changed weights was resumed.
    number_of = {call.session: int(ledger.task_of(call.prompt)) for call in ledger.calls}
    counted = Counter(number_of[row.session.name] for row in place(golden, rows)[0] if row.trained)
    resumed = any(call.earlier for call in ledger.calls)
    result = {"sessions": {kind: counted[n] for n, kind in enumerate(live.KINDS)}, "resumed": resumed}
    result |= {"failed": made["failed"], "found": sorted(kinds), "noticed": noticed, "unnoticed": sorted(unnoticed)}
    print("\n" + json.dumps(result | {"versions": any(row.weight_versions is not None for row in rows)}))


if __name__ == "__main__":
    main()
