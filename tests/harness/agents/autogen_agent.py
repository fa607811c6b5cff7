import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from files import BASE_URL, QUESTION, STREAM, read_file, write_file

info = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}
model = OpenAIChatCompletionClient(model="m", base_url=BASE_URL, api_key="none", model_info=info)
agent = AssistantAgent("agent", model, tools=[read_file, write_file], model_client_stream=STREAM, max_tool_iterations=8)
print(asyncio.run(agent.run(task=QUESTION)).messages[-1].content)
