from shop import API_KEY, BASE_URL, SYSTEM_PROMPT, TASK, answer, calculator, lookup
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(
    client_args={"base_url": BASE_URL, "api_key": API_KEY},
    model_id="shop",
    params={"temperature": 0, "max_tokens": 160},
)
agent = Agent(model=model, tools=[tool(lookup), tool(calculator)], system_prompt=SYSTEM_PROMPT, callback_handler=None)
answer([str(agent(prompt)).strip() for prompt in TASK.prompts])
