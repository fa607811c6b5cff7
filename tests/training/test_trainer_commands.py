"""Commands and configurations of the page of trainers, parsed by the trainers' code. Training itself needs GPUs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from tests.training.interpreters import answered
from tests.training.test_trainer_live import PAGE

SECTIONS = {
    "verl": ("verl", "verl.trainer.main_ppo"),
    "slime": ("slime and Miles", "train.py"),
    "miles": ("slime and Miles", "train.py"),
    "skyrl": ("SkyRL", "my_package.experiment"),
    "prime_rl": ("verifiers and prime-rl", "rl"),
    "agent_lightning": ("Agent Lightning", "agl-server"),
    "nemo_gym": ("NeMo-RL with NeMo-Gym", "examples/nemo_gym/my_run_grpo_nemo_gym.py"),
    "tinker_cookbook": ("Tinker cookbook", ""),
}
"""For each trainer, its section on the page and the program whose options are checked."""


def documented_options(section: str, program: str) -> dict[str, Any]:
    """Return the options of a section's program, and the section's configurations."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)

    def code(language: str) -> str:
        return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S))

    words = shlex.split(code("console").replace("\\\n", " "))
    options = words[words.index(program) + 1 :] if program else []
    return {"options": options, "toml": code("toml"), "yaml": code("yaml")}


@pytest.mark.differential
@pytest.mark.parametrize("trainer", list(SECTIONS))
def test_the_trainer_knows_the_options_of_its_section(trainer: str) -> None:
    assert answered(trainer, "trainer_commands", documented_options(*SECTIONS[trainer])) == []


def test_every_section_has_a_command() -> None:
    assert [name for name, section in SECTIONS.items() if not any(documented_options(*section).values())] == [
        "tinker_cookbook"
    ]
