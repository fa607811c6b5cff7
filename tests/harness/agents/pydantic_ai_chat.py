from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from shop import API_KEY, BASE_URL, STREAM, SYSTEM_PROMPT, TASK, answer, calculator, lookup

model = OpenAIChatModel("shop", provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
agent = Agent(
    model,
    system_prompt=SYSTEM_PROMPT,
    tools=[lookup, calculator],
    model_settings={"temperature": 0, "max_tokens": 160},
)
history, texts = [], []
for prompt in TASK.prompts:
    if STREAM:
        result = agent.run_stream_sync(prompt, message_history=history)
        texts.append(result.get_output())
    else:
        result = agent.run_sync(prompt, message_history=history)
        texts.append(result.output)
    history = result.all_messages()
answer(texts)
