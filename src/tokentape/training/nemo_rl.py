"""NeMo-RL with NeMo-Gym: run a gateway in the trainer's process for Gym's agents. For NeMo-RL 7ea279abf, Gym 07d6b0d07.

In a copy of `run_grpo_nemo_gym.py`, wrap `setup` and the training, using that script's `tokenizer` and `config`:

    with PolicyGateway(tokenizer.name_or_path, config.policy["generation"]) as gateway:
        ...                                 # pass `gateway.url` to `setup` in Gym's configuration
        gateway.generation = policy_generation
        grpo_train(...)

Gym's model server needs a class that gives each rollout its own session; see docs/how-to/train-live.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Self

from tokentape._hub import find_model
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._function import FunctionEngine
from tokentape.errors import EngineUnavailable, InvalidRequest
from tokentape.gateway._serving import serving

__all__ = ["PolicyGateway"]


class PolicyGateway:
    """Runs a gateway on the loopback interface that samples with NeMo-RL's generation handle, such as `VllmGeneration`.

    The handle samples with the trainer's own parameters and token budget. Calls that ask for other values are refused.
    """

    def __init__(
        self, model_dir: Path | str, generation_config: Mapping[str, Any], *, directory: Path | str | None = None
    ) -> None:
        self.generation: Any = None
        """NeMo-RL's `policy_generation`. Set it before the first rollout."""
        self.url = ""
        """The gateway's URL while the context is open."""
        self._config, self._directory = generation_config, directory
        self._model_dir = find_model(Path(model_dir), weights=False)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        renderer, vllm = Renderer.load(self._model_dir), self._config.get("vllm_cfg") or {}
        self._room = int(vllm["max_model_len"])
        engine = FunctionEngine(
            self._sample,
            vocab_size=renderer.tokenizer.vocab_size,
            max_context=self._room,
            # vLLM's own default.
            logprobs_mode=vllm.get("logprobs_mode") or "raw_logprobs",
            sampling=frozenset({"temperature", "top_p", "top_k", "stop_token_ids"}),
            name="nemo-rl:vllm",
        )
        self.url = self._stack.enter_context(
            serving(engine, self._model_dir, directory=self._directory, renderer=renderer)
        )
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        import torch
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        if self.generation is None:
            raise EngineUnavailable("`generation` is not set: assign NeMo-RL's policy_generation before any rollout")
        budget = min(self._config["max_new_tokens"], self._room - len(prompt_ids))
        theirs = (self._config["temperature"], self._config["top_p"], self._config["top_k"] or -1, budget)
        requested = (params.temperature, params.top_p, params.top_k or -1, min(params.max_tokens, budget))
        if theirs != requested:
            raise InvalidRequest(
                f"NeMo-RL samples with temperature, top_p, top_k and token budget {theirs} whatever a call asks for; "
                f"this call asks for {requested}: request the same values"
            )
        data = {"input_ids": torch.tensor([prompt_ids]), "input_lengths": torch.tensor([len(prompt_ids)])}
        async with aclosing(self.generation.generate_async(BatchedDataDict(data))) as results:
            _, output = await anext(results)
        end = int(output["unpadded_sequence_lengths"][0])
        return SampleDelta(
            tuple(output["output_ids"][0, len(prompt_ids) : end].tolist()),
            tuple(output["logprobs"][0, len(prompt_ids) : end].tolist()),
            "length" if bool(output["truncated"][0]) else "stop",
        )
