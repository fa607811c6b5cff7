"""The SDKs of OpenAI and Anthropic: engines that fail, refused calls, lost replies, and equal prompts of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from anthropic import Anthropic
from openai import OpenAI

from tests.harness.lineage.director import Answer, Cutting, Director, Request


def run(director: Director, cutting: Cutting, gateway: str, home: Path, folder: Path, seed: int) -> None:
    """Hold conversations in which every third call goes wrong in one of five ways, each in its own session."""
    rng, wrong = director.rng, list[str]()

    def answer(request: Request) -> Answer:
        what = wrong.pop() if wrong else ""
        cutting.cut = what in ("reply", "stream")
        text = f"{director.text(2)} {director.word()}"
        # A lost reply that the SDK asks for again comes from the record, without the engine.
        return Answer(text, fails=what in ("engine", "stream of engine"), lost=what == "stream")

    director.answer = answer
    ways = ("engine", "stream of engine", "stream", "reply", "refused")
    for number in range(30):
        url = f"{gateway}/sessions/sdk-{seed}-{number}"
        clients = OpenAI(base_url=f"{url}/v1", api_key="none"), Anthropic(base_url=url, api_key="none")
        history: list[Any] = [] if number % 2 else [{"role": "system", "content": director.text(2)}]
        for turn in range(3):
            history.append({"role": "user", "content": director.text()})
            way = ways[(number + turn) % 5] if turn == number % 3 or rng.random() < 0.3 else ""
            cutting.refuse = rng.choice((429, 500, 503)) if way == "refused" else 0
            wrong += [way] if way and way != "refused" else []
            history.append({"role": "assistant", "content": _ask(clients, history, way, anthropic=bool(number % 2))})
        for sdk in clients:
            sdk.close()
    # Unrelated clients in one session that send the same messages.
    messages = [{"role": "system", "content": director.text(2)}, {"role": "user", "content": director.text()}]
    for _ in range(10):
        with OpenAI(base_url=f"{gateway}/sessions/strangers-{seed}/v1", api_key="none") as client:
            history = list(messages)
            for _ in range(2):
                reply = client.chat.completions.create(model="m", messages=history).choices[0].message.content
                history += [{"role": "assistant", "content": reply}, {"role": "user", "content": director.text()}]


def _ask(clients: tuple[OpenAI, Anthropic], history: list[Any], way: str, *, anthropic: bool) -> str:
    if "stream" in way or not anthropic:
        return _chat(clients[0], history, stream="stream" in way)
    return str(clients[1].messages.create(model="m", max_tokens=99, messages=history).content[0].text)  # type: ignore[union-attr]


def _chat(client: OpenAI, history: list[Any], *, stream: bool) -> str:
    if not stream:
        return str(client.chat.completions.create(model="m", messages=history).choices[0].message.content)
    for _ in range(3):
        try:
            # The SDK repeats no stream that has begun: an agent does that itself.
            events = client.chat.completions.create(model="m", messages=history, stream=True)
            return "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        except (openai.APIError, OSError):
            continue
        except Exception as error:
            if "peer closed connection" not in str(error) and "incomplete" not in str(error):
                raise
    raise AssertionError("no attempt worked")
