from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from shop import API_KEY, BASE_URL, SYSTEM_PROMPT, TASK, answer, calculator, lookup

client = AsyncAnthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=API_KEY)
agent = Agent(
    AnthropicModel("shop", provider=AnthropicProvider(anthropic_client=client)),
    system_prompt=SYSTEM_PROMPT,
    tools=[lookup, calculator],
    model_settings={"temperature": 0, "max_tokens": 160},
)
history, texts = [], []
for prompt in TASK.prompts:
    result = agent.run_sync(prompt, message_history=history)
    history = result.all_messages()
    texts.append(result.output)
answer(texts)
