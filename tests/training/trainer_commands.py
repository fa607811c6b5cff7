"""Run by an interpreter that has a trainer: its own code reads the options of the commands on the page of trainers.

Reads `{"options": [...], "toml": ..., "yaml": ...}` from standard input, and writes the options that it does not know.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def verl(page: Any) -> list[str]:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        # It raises for an unknown key.
        compose("ppo_trainer", page["options"])
    return []


def slime(page: Any) -> list[str]:
    return unknown_flags("slime", page["options"])


def miles(page: Any) -> list[str]:
    return unknown_flags("miles", page["options"])


def unknown_flags(package: str, options: list[str]) -> list[str]:
    """Its parser needs Megatron, so this reads its source. `--save` is Megatron's own."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    folder = Path(spec.submodule_search_locations[0])
    source = "".join(path.read_text() for path in folder.rglob("*arguments.py"))
    flags = [option for option in options if option.startswith("--")]
    return [flag for flag in flags if f'"{flag}"' not in source and flag != "--save"]


def skyrl(page: Any) -> list[str]:
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # pydantic needs it before Python 3.12.
    from skyrl.train.config import SkyRLTrainConfig

    made = SkyRLTrainConfig.from_cli_overrides(page["options"])
    assert made.generator.step_wise_trajectories
    assert made.generator.inference_engine.engine_init_kwargs == {"logprobs_mode": "processed_logprobs"}
    return []


def prime_rl(page: Any) -> list[str]:
    import tomllib

    import verifiers.v1 as vf
    from prime_rl.configs.rl import RLConfig

    from tokentape.training.verifiers import AgentHarness

    class Harness(AgentHarness, vf.Harness[vf.HarnessConfig]):
        pass

    class Taskset(vf.Taskset):
        pass

    # It imports both by the names that the configuration has.
    for name, kind in {"my_harness": Harness, "my_taskset": Taskset}.items():
        plugin = ModuleType(name)
        plugin.__all__, plugin.__spec__ = [kind.__name__], ModuleSpec(name, None)  # type: ignore[attr-defined]
        setattr(plugin, kind.__name__, kind)
        sys.modules[name] = plugin
    made = RLConfig.model_validate(tomllib.loads(page["toml"]))
    (source,) = made.orchestrator.train.source
    assert source.env.agent.harness.id == "my_harness"
    return []


def agent_lightning(page: Any) -> list[str]:
    from agentlightning import config, verl
    from omegaconf import OmegaConf

    def read(module: Any, name: str) -> Any:
        return OmegaConf.load(Path(module.__path__[0], name))

    files = [read(config, "server.yaml"), read(config, "controller.yaml"), read(verl, "config.yaml")]
    names = [option.split("=")[0] for option in page["options"] if "=" in option]
    return [name for name in names if all(OmegaConf.select(file, name) is None for file in files)]


def nemo_gym(page: Any) -> list[str]:
    """The model server of the page, and NeMo-RL's key for the kind of logprobs."""
    import yaml
    from responses_api_models.vllm_model.app import VLLMModelConfig

    made = yaml.safe_load(page["yaml"])
    (server,) = made["env"]["nemo_gym"]["policy_model"]["responses_api_models"].values()
    VLLMModelConfig(name="policy_model", host="127.0.0.1", port=1, **server)
    spec = find_spec("nemo_rl")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    known = Path(folder, "models/generation/vllm/config.py").read_text()
    unknown = [name for name in made["policy"]["generation"]["vllm_cfg"] if f"\n    {name}: " not in known]
    example = Path(folder).parent / "examples/nemo_gym/grpo_workplace_assistant_nemotron_nano_v2_9b.yaml"
    cluster = yaml.safe_load(example.read_text())["cluster"]
    options = [option.removeprefix("++cluster.").split("=")[0] for option in page["options"] if "++" in option]
    return unknown + [name for name in options if name not in cluster]


def tinker_cookbook(page: Any) -> list[str]:
    spec = find_spec("tinker_cookbook")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("tinker_cookbook")
    fields = Path(spec.submodule_search_locations[0], "rl", "train.py").read_text()
    return [] if "\n    rollout_error_tolerance: " in fields else ["rollout_error_tolerance"]


ALL = (verl, slime, miles, skyrl, prime_rl, agent_lightning, nemo_gym, tinker_cookbook)
TRAINERS: dict[str, Callable[[Any], list[str]]] = {trainer.__name__: trainer for trainer in ALL}


def main() -> None:
    try:
        made = TRAINERS[sys.argv[1]](json.load(sys.stdin))
    except ImportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        made = None
    print("\n" + json.dumps(made))


if __name__ == "__main__":
    main()
