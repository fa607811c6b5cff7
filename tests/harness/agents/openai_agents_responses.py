import asyncio

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from shop import API_KEY, BASE_URL, STREAM, SYSTEM_PROMPT, TASK, answer, calculator, lookup

set_tracing_disabled(True)
model = OpenAIResponsesModel("shop", AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
tools = [function_tool(lookup), function_tool(calculator)]
agent = Agent(
    "shop", SYSTEM_PROMPT, model=model, tools=tools, model_settings=ModelSettings(temperature=0, max_tokens=160)
)


async def main() -> None:
    history, texts = [], []
    for prompt in TASK.prompts:
        messages = [*history, {"role": "user", "content": prompt}]
        if STREAM:
            result = Runner.run_streamed(agent, messages)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, messages)
        history = result.to_input_list()
        texts.append(result.final_output)
    answer(texts)


asyncio.run(main())
