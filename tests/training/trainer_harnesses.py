"""Run by an interpreter that has a trainer: NeMo-Gym and OpenEnv between agents and trainers; see trainer_live.py."""

from __future__ import annotations

import ast
import asyncio
import pickle
import queue
import re
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.training import live, trainer_paths
from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.engines import FunctionEngine, SampleDelta, SamplingParams
from tokentape.gateway import serving
from tokentape.gateway._serve import running
from tokentape.testing._rows import Row

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-live.md"


def nemo_gym() -> dict[str, Any]:
    """Gym's model server over the gateway, what NeMo-RL makes of its output; only the engine's handle is replaced."""
    import aiohttp
    import torch
    from nemo_gym import server_utils
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from responses_api_models.vllm_model.app import VLLMModelConfig

    from tokentape.training.nemo_rl import PolicyGateway

    ledger, budget = live.LEDGER[-1], 24
    # It would read the command line.
    server_utils.get_global_config_dict = lambda **_: {}

    class Generation:
        """`VllmGeneration.generate_async`, one prompt at a time."""

        async def generate_async(self, data: Any, greedy: bool = False) -> Any:
            prompt = data["input_ids"][0].tolist()
            assert data["input_lengths"].tolist() == [len(prompt)]
            call = ledger.sample(prompt, budget, ledger.task_of(prompt))
            whole = prompt + call.ids
            made = {
                "output_ids": torch.tensor([whole]),
                "logprobs": torch.tensor([[0.0] * len(prompt) + call.logprobs]),
                "generation_lengths": torch.tensor([len(call.ids)]),
                "unpadded_sequence_lengths": torch.tensor([len(whole)]),
                "truncated": torch.tensor([call.finish == "length"]),
            }
            yield 0, BatchedDataDict(made)

    async def agent(session: aiohttp.ClientSession, url: str, number: int) -> list[Any]:
        """What Gym's agents do: all items so far go back, with the cookies of the model server."""
        items: list[Any] = []
        output: list[Any] = []
        texts = [f"Task {number}.", "Go on.", "And?"]
        for turn, text in enumerate(texts):
            # Too long for the budget: at the end of session 2, inside session 3.
            ledger.text = "many " * budget if (number, turn) in ((2, 2), (3, 0)) else None
            items.append({"role": "user", "content": text})
            body = {"input": items, "temperature": 1.0, "top_p": 1.0, "max_output_tokens": budget}
            async with session.post(f"{url}/v1/responses", json=body) as answer:
                assert answer.status == 200, await answer.text()
                made = (await answer.json())["output"]
            items += made
            output += made
            if number == 1 and turn == 1:
                # Starts over: another branch.
                del items[1:]
        return output

    config = {"max_new_tokens": budget, "temperature": 1.0, "top_p": 1.0, "top_k": None}
    config["vllm_cfg"] = {"max_model_len": 500, "logprobs_mode": "processed_logprobs"}
    with PolicyGateway(MODEL, config) as gateway:
        gateway.generation = Generation()
        model_config = VLLMModelConfig(
            host="127.0.0.1",
            port=0,
            entrypoint="",
            name="policy_model",
            base_url=gateway.url,
            api_key="none",
            model="policy",
            return_token_id_information=True,
            request_prompt_and_generation_token_ids=True,
            uses_reasoning_parser=True,
        )
        server_client = server_utils.ServerClient.model_construct(global_config_dict={})
        model = from_page("SessionModel")(config=model_config, server_client=server_client)

        async def rollouts(url: str) -> list[list[Any]]:
            outputs = []
            for number in range(5):
                async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                    outputs.append(await agent(session, url, number))
            return outputs

        with running(model.setup_webserver()) as url:
            outputs = asyncio.run(rollouts(url))

    name = "_postprocess_nemo_gym_to_nemo_rl_result"
    helpers = ("_is_trainable_output_item", "_detect_invalid_tool_call_and_malformed_thinking")
    postprocess = trainer_paths.taken(
        "nemo_rl.environments.nemo_gym",
        *(name, *helpers, "_without_initial_image_sources"),
        torch=torch,
        DEFAULT_INVALID_TOOL_CALL_PATTERNS=[],
        DEFAULT_THINKING_TAGS=[],
        Any=Any,
        extract_input_image_sources_from_responses_messages=lambda messages: [],
    )[name]
    tokenizer = SimpleNamespace(batch_decode=lambda ids: [""] * len(ids))
    sessions: dict[str, list[Any]] = {}
    failed = ""
    for number, output in enumerate(outputs):
        result = {"response": {"output": output}, "responses_create_params": {"input": []}}
        try:
            log = postprocess(SimpleNamespace(cfg={}), {}, result, tokenizer)["message_log"]
        except AssertionError as error:
            failed = str(error).split("!")[0]
            continue
        logs = [{**message, "token_ids": message["token_ids"].tolist()} for message in log]
        for message in logs:
            if "generation_logprobs" in message:
                message["generation_logprobs"] = message["generation_logprobs"].tolist()
        length = len(logs[0]["token_ids"])
        datum = {"message_log": logs, "length": length, "total_reward": live.REWARDS[number], "truncated": False}
        sessions[str(number)] = [datum]
    rows = []
    for given in trainer_paths.nemo_rl(sessions):
        # Each prompt is another one here, so there is nothing to compare; test_trainer_paths.py has groups.
        rows.append(Row(given["token_ids"], given["weights"], given["logprobs"], reward=given["reward"]))
    rewards = {name: live.REWARDS[int(name)] for name in sessions}
    return {"rows": rows, "rewards": rewards, "failed": failed}


def from_page(name: str) -> Any:
    """The class that the page has the reader write."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"class {name}" in code]
    module = ast.parse(code)
    module.body = [one for one in module.body if not isinstance(one, ast.If)]
    known: dict[str, Any] = {"__name__": "page"}
    exec(compile(module, "page", "exec"), known)
    return known[name]


NUMBERS = count()


async def in_order(base_url: str, api_key: str, task: Any) -> float | None:
    return await live.agent(base_url, api_key, {"number": next(NUMBERS)})


def openenv() -> dict[str, Any]:
    """The loop of TRL's `HarnessRolloutWorker`, without its process, over a gateway; only vLLM is replaced."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    from tokentape.training.openenv import GatewaySessions

    ledger, tokenizer = live.LEDGER[-1], AutoTokenizer.from_pretrained(MODEL)
    # For turns that TRL samples itself. Here it samples none, and it knows the templates of a few models only.
    tokenizer.response_schema = {}

    async def sample(prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        call = ledger.sample(prompt_ids, params.max_tokens, ledger.task_of(prompt_ids))
        return SampleDelta(tuple(call.ids), tuple(call.logprobs), call.finish, weight_version=call.version)

    names = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids"})
    about = {"logprobs_mode": "processed_logprobs", "sampling": names}
    with serving(FunctionEngine(sample, vocab_size=4000, max_context=500, **about), MODEL) as url:
        in_an_environment(url)
        ledger.calls.clear()
        sessions = GatewaySessions(url, "tests.training.trainer_harnesses.in_order")
        # The worker's process gets it pickled.
        assert pickle.loads(pickle.dumps(sessions)) == sessions
        PartialState()  # As the worker's process does.
        samples: queue.Queue[Any] = queue.Queue()
        loop = HarnessRolloutWorker._loop_cls(
            harness_session_factory=sessions,
            model_name=str(MODEL),
            dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Go."}]}]),
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[],
            rollout_buffer=samples,
            model_version_value=SimpleNamespace(value=7),
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=queue.Queue(),
            num_generations=6,
            max_inflight_tasks=1,
        )
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        made = [samples.get(timeout=300) for _ in range(6)]
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join()
    rows = []
    for one in made:
        arrays = (one.input_ids.tolist(), one.completion_mask.tolist(), one.old_log_probs.tolist())
        rows.append(Row(*arrays, [one.advantage] * len(one.input_ids), reward=one.metrics["reward"]))
    rewards = {str(n): reward for n, reward in enumerate(live.REWARDS)}
    return {"rows": rows, "rewards": rewards, "failed": f"{len(rows)} of 6 rollouts"}


def in_an_environment(url: str) -> None:
    """OpenEnv's own tool loop in a session of its adapter for environments, as an agent."""
    from openenv.core.client_types import StepResult
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import (
        HarnessRunLimits,
        MCPHarnessAdapter,
        ResourceSessionFactory,
        StepEnvSessionAdapter,
        VerifyResult,
    )

    from tokentape.training.openenv import HarnessAgent

    ledger, steps = live.LEDGER[-1], []

    class Counter:
        def reset(self, **_: Any) -> Any:
            return StepResult(observation=0)

        def step(self, number: int) -> Any:
            steps.append(number)
            ledger.text = "Done."
            return StepResult(observation=number, reward=0.5)

        def state(self) -> None:
            return None

    class Factory(ResourceSessionFactory):
        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Any:
            return StepEnvSessionAdapter(
                Counter(),
                tool_specs=[Tool(name="add", description="Add.", input_schema={"type": "object", "properties": {}})],
                action_builder=lambda name, arguments: arguments["number"],
                initial_messages_builder=lambda result, _: [{"role": "user", "content": f"Task {task['number']}."}],
                verify_builder=lambda transcript, final, last, state: VerifyResult(env_reward=last.reward),
            )

    ledger.text = '<tool_call>\n{"name": "add", "arguments": {"number":  2}}\n</tool_call>'
    agent = HarnessAgent(Factory(), MCPHarnessAdapter(), HarnessRunLimits(sampling={"max_tokens": 60}))
    with Client(url) as client:
        session = client.session()
        assert asyncio.run(agent(session.base_url, "none", {"number": 8})) == 0.5
        (path,) = session.trajectories()
    assert steps == [2]
    # The second prompt goes on from what was sampled, spaces of the arguments included.
    first, second = ledger.calls
    assert second.prompt[: len(first.prompt + first.ids)] == first.prompt + first.ids
    assert path.verdict == "exact"
    assert path.token_ids.tolist() == second.prompt + second.ids
    ledger.text = None
