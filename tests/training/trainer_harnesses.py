"""Run by an interpreter that has a trainer: NeMo-Gym between agents and NeMo-RL; see trainer_live.py."""

from __future__ import annotations

import ast
import asyncio
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.training import live, trainer_paths
from tokentape.client import Client
from tokentape.demo import MODEL
from tokentape.gateway._serve import running
from tokentape.testing._rows import Row
from tokentape.training import assemble

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-live.md"


def nemo_gym() -> dict[str, Any]:
    """Run Gym's model server over the gateway, then NeMo-RL's code. Only the engine's handle is replaced."""
    import aiohttp
    import torch
    from nemo_gym import server_utils
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

    from tokentape.training.nemo_rl import PolicyGateway

    no_call_is_aborted()
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
        """Send all items so far, with the cookies of the model server, as Gym's agents do."""
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
        model_class = from_page("SessionModel")
        assert issubclass(model_class, VLLMModel)
        model = model_class(config=model_config, server_client=server_client)

        async def rollouts(url: str) -> list[list[Any]]:
            outputs = []
            for number in range(5):
                async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                    outputs.append(await agent(session, url, number))
            return outputs

        with running(model.setup_webserver()) as url:
            outputs = asyncio.run(rollouts(url))
        both_branches_are_recorded(gateway.url)

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
    for fields in trainer_paths.nemo_rl(sessions):
        # Each prompt differs here, so there is nothing to compare; test_trainer_paths.py has groups.
        rows.append(Row(fields["token_ids"], fields["weights"], fields["logprobs"], reward=fields["reward"]))
    rewards = {name: live.REWARDS[int(name)] for name in sessions}
    return {"rows": rows, "rewards": rewards, "failed": failed}


def both_branches_are_recorded(url: str) -> None:
    """NeMo-RL refuses the session that forked. Its record is right, and can be trained without NeMo-RL."""
    with Client(url) as client:
        trajectories = [client.session(info.session_id).trajectories() for info in client.sessions()]
    (forked,) = [paths for paths in trajectories if len(paths) > 1]
    assert [path.verdict.split(":")[0] for path in forked] == ["exact", "forked"]
    rows = [Row(sample.token_ids, sample.loss_mask, sample.logprobs) for sample in assemble(forked).samples]
    golden = live.golden_of(live.LEDGER[-1].calls, {"1": live.REWARDS[1]})
    assert live.findings_of(golden, rows) == set()


def no_call_is_aborted() -> None:
    """NeMo-RL's code of vLLM: it changes weights under calls that go on, and aborts none."""
    spec = find_spec("nemo_rl")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    for path in Path(folder, "models", "generation", "vllm").glob("*.py"):
        assert not re.search(r"\.abort\(|pause_generation|finish_reason == .abort", path.read_text()), path


def from_page(name: str) -> Any:
    """Return the class that the page shows."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"class {name}" in code]
    module = ast.parse(code)
    module.body = [node for node in module.body if not isinstance(node, ast.If)]
    known: dict[str, Any] = {"__name__": "page"}
    exec(compile(module, "page", "exec"), known)
    return known[name]
