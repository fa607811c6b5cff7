from typing import Any

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from shop import API_KEY, BASE_URL, TASK, answer


class DryEnvironment(LocalEnvironment):
    """What a tiny model takes for a command is not run."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        return {"output": "total 0\n", "returncode": 0, "exception_info": ""}


config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = LitellmModel(
    model_name="openai/shop",
    model_kwargs={"api_base": BASE_URL, "api_key": API_KEY, "temperature": 0, "max_tokens": 60},
    cost_tracking="ignore_errors",
    **{name: value for name, value in config["model"].items() if name.endswith("template")},
)
prompts = {name: value for name, value in config["agent"].items() if name.endswith("template")}
agent = DefaultAgent(model, DryEnvironment(), **prompts, step_limit=4, max_consecutive_format_errors=0)
answer([agent.run(prompt)["exit_status"] for prompt in TASK.prompts[:1]])
