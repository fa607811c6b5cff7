from shop import API_KEY, BASE_URL, TASK, answer, calculator, lookup
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def price(item: str) -> str:
    """Price of an item.

    Args:
        item: its name

    """
    return lookup(item)


@tool
def value(expression: str) -> str:
    """Value of an expression.

    Args:
        expression: what to work out

    """
    return calculator(expression)


model = OpenAIModel("shop", api_base=BASE_URL, api_key=API_KEY, temperature=0, max_tokens=60)
agent = ToolCallingAgent(model=model, tools=[price, value], max_steps=3, verbosity_level=0)
answer([str(agent.run(prompt, reset=number == 0)) for number, prompt in enumerate(TASK.prompts)])
