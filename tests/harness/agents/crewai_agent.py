from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from files import BASE_URL, QUESTION, STREAM, read_file, write_file

agent = Agent(
    role="clerk",
    goal="Keep the files.",
    backstory="You work with files.",
    tools=[tool("read_file")(read_file), tool("write_file")(write_file)],
    llm=LLM(model="openai/m", base_url=BASE_URL, api_key="none", stream=STREAM),
)
print(Crew(agents=[agent], tasks=[Task(description=QUESTION, expected_output="the sum", agent=agent)]).kickoff().raw)
