from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.models.openai.like import OpenAILike
from files import BASE_URL, QUESTION, STREAM, read_file, write_file

kind = OpenAIChat if STREAM else OpenAILike
agent = Agent(
    model=kind(id="m", base_url=BASE_URL, api_key="none"),
    description="You help with files.",
    tools=[read_file, write_file],
    telemetry=False,
)
if STREAM:
    print("".join(event.content or "" for event in agent.run(QUESTION, stream=True) if event.event == "RunContent"))
else:
    print(agent.run(QUESTION).content)
