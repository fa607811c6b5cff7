from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from shop import API_KEY, BASE_URL, STREAM, SYSTEM_PROMPT, TASK, answer, calculator, lookup

model = ChatOpenAI(model="shop", base_url=BASE_URL, api_key=API_KEY, temperature=0, streaming=STREAM, max_tokens=160)
agent = create_react_agent(model, [tool(lookup), tool(calculator)], prompt=SYSTEM_PROMPT)
messages, texts = [], []
for prompt in TASK.prompts:
    messages = agent.invoke({"messages": [*messages, ("user", prompt)]})["messages"]
    texts.append(messages[-1].text)
answer(texts)
