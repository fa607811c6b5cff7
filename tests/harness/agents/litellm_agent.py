import json

import litellm
from shop import API_KEY, BASE_URL, STREAM, SYSTEM_PROMPT, TASK, answer, calculator, lookup

from tokentape.demo.tasks import TOOLS

tools = {"lookup": lookup, "calculator": calculator}
messages, texts = [{"role": "system", "content": SYSTEM_PROMPT}], []
for prompt in TASK.prompts:
    messages.append({"role": "user", "content": prompt})
    while True:
        options = {
            "model": "openai/shop",
            "api_base": BASE_URL,
            "api_key": API_KEY,
            "temperature": 0,
            "max_tokens": 160,
        }
        reply = litellm.completion(**options, messages=messages, tools=TOOLS, stream=STREAM)
        if STREAM:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = tools[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    texts.append(message.content)
answer(texts)
