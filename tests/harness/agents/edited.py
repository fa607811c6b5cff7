"""Conversations whose history is edited: `edited.py PLAN`, with LangGraph's checkpoints and openai-agents' sessions.

PLAN is a JSON list of conversations: the address, the framework, and steps of a kind and a text.
"""

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, set_tracing_disabled
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.prebuilt import create_react_agent
from openai import AsyncOpenAI

set_tracing_disabled(True)


@tool
def look(item: str) -> str:
    """Look something up."""
    return f"There are 3 of {item}; nobody knows why, and the list was written long ago."


def langgraph(base_url: str, steps: list[list[str]]) -> None:
    model = ChatOpenAI(model="m", base_url=base_url, api_key="none")
    agent = create_react_agent(model, [look], prompt=steps[0][1], checkpointer=MemorySaver())
    config = {"configurable": {"thread_id": "1"}}

    def messages() -> list:
        return agent.get_state(config).values["messages"]

    for kind, text in steps[1:]:
        last = (
            max((at for at, message in enumerate(messages()) if message.type == "human"), default=0)
            if kind != "ask"
            else 0
        )
        if kind == "rewind":
            # Time travel: the checkpoint before the last question.
            config = next(
                state.config
                for state in agent.get_state_history(config)
                if len(state.values.get("messages", ())) == last
            )
        elif kind == "reply":
            reply = messages()[-1]
            config = agent.update_state(config, {"messages": [AIMessage(f"{text} {reply.content[9:]}", id=reply.id)]})
            continue
        elif kind == "result":
            found = next(message for message in messages() if message.type == "tool")
            config = agent.update_state(config, {"messages": [found.model_copy(update={"content": "[cleared]"})]})
            continue
        agent.invoke({"messages": [HumanMessage(text)]}, config)
        config = (
            {"configurable": {"thread_id": "1"}}
            if kind == "ask"
            else agent.get_state({"configurable": {"thread_id": "1"}}).config
        )
        config = {"configurable": {"thread_id": "1"}}


async def openai_agents(base_url: str, steps: list[list[str]]) -> None:
    model = OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=base_url, api_key="none"))
    agent, session = Agent("clerk", instructions=steps[0][1], model=model), SQLiteSession("1")
    for kind, text in steps[1:]:
        if kind == "rewind":
            await session.pop_item()
            await session.pop_item()
        await Runner.run(agent, text, session=session)


for base_url, framework, steps in json.loads(Path(sys.argv[1]).read_text()):
    if framework == "langgraph":
        langgraph(base_url, steps)
    else:
        asyncio.run(openai_agents(base_url, steps))
