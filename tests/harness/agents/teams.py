"""Teams of AutoGen and Agno: `teams.py PLAN`, a JSON list of address, kind, system prompts, task, messages."""

import asyncio
import json
import sys
from pathlib import Path

from agno.agent import Agent
from agno.models.openai import OpenAILike
from agno.team import Team
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}
NAMES = ("writer", "critic", "editor")


async def autogen(base_url: str, kind: str, systems: list[str], task: str, messages: int) -> None:
    model = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key="none", model_info=INFO)
    members = [
        AssistantAgent(name, model, description=f"The {name}.", system_message=system)
        for name, system in zip(NAMES, systems, strict=True)
    ]
    limit = MaxMessageTermination(messages)
    if kind == "round robin":
        team = RoundRobinGroupChat(members, termination_condition=limit)
    else:
        team = SelectorGroupChat(members, model, termination_condition=limit, allow_repeated_speaker=True)
    await team.run(task=task)


def agno(base_url: str, systems: list[str], task: str) -> None:
    def model() -> OpenAILike:
        return OpenAILike(id="m", base_url=base_url, api_key="none")

    named = zip(NAMES, systems[1:], strict=False)
    members = [Agent(name=name, id=name, model=model(), system_message=system) for name, system in named]
    Team(members=members, model=model(), instructions=systems[0], telemetry=False).run(task)


for base_url, kind, systems, task, messages in json.loads(Path(sys.argv[1]).read_text()):
    if kind == "agno":
        agno(base_url, systems, task)
    else:
        asyncio.run(autogen(base_url, kind, systems, task, messages))
