"""The how-to's code, on the tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokentape.demo import MODEL
from tokentape.training.trl import Policy, serving

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-with-trl.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def block(name: str) -> str:
    pattern = rf"<!-- executed by [\w/.]+: {name} -->\n```python\n(.*?)```"
    (code,) = re.findall(pattern, PAGE.read_text("utf-8"), re.DOTALL)
    return str(code)


@pytest.mark.slow
def test_grpo_example_runs_as_written(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = block("grpo.py").replace("path/to/model", str(model_dir))
    code = code.replace("bf16=False,", "bf16=False,\n            report_to=[],")
    ran: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), ran)
    log = [line for line in ran["trainer"].state.log_history if "reward" in line]
    assert len(log) == 2
    assert max(float(line["sampling/sampling_logp_difference/max"]) for line in log) < 1e-3


@pytest.fixture
def policy(model_dir: Path) -> Any:
    with serving(model_dir, threads=1) as policy:
        yield policy


class GRPO:
    """As much of a trainer as a rollout function looks at."""

    def __init__(self) -> None:
        self.temperature = 1.0
        self.num_generations = 1
        self.state = SimpleNamespace(global_step=0)
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").train()
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


def test_the_environment_runs_through_the_gateway(policy: Policy) -> None:
    ran: dict[str, Any] = {"policy": policy}
    exec(compile(block("environment.py"), str(PAGE), "exec", dont_inherit=True), ran)
    trainer = GRPO()
    fields = ran["rollouts"](
        [[{"role": "user", "content": "Now.", "tokentape_row": '{"goal": 3}'}]],
        trainer,
    )
    assert len(fields["completion_ids"]) == 1
    assert fields["reward"][0] >= 0.0


def test_worker_and_transfer_are_created_as_documented(policy: Policy) -> None:
    ran: dict[str, Any] = {"policy": policy, "agent": None, "rows": [{"prompt": "a"}]}
    exec(compile(block("async.py"), str(PAGE), "exec"), ran)
    assert ran["worker"].rollout_buffer.empty()
    ran["transfer"].init_weight_transfer()
