"""The agent's side of the recorded sessions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx2

from tests.store.kept.scripts import Completion, OddEngine
from tokentape.client import Client
from tokentape.gateway._keys import Keys

TEAM, OTHER, ADMIN = "team-secret-0123456789", "other-secret-0123456789", "admin-secret-0123456789"
KEYS = Keys({"team": TEAM, "other": OTHER}, {"root": ADMIN})


class Talk:
    """A session through the gateway at `url`, with the agent's messages."""

    def __init__(self, url: str, session_id: str, key: str = TEAM, messages: Sequence[Any] = ()) -> None:
        self.path = f"/sessions/{quote(session_id, safe='')}"
        self.http = httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self.client = Client(url, api_key=key)
        self.session_id = session_id
        self.messages = list(messages)

    def say(self, content: Any, *, role: str = "user", **options: Any) -> dict[str, Any]:
        self.messages.append({"role": role, "content": content})
        return self.go_on(**options)

    def go_on(self, *, headers: dict[str, str] | None = None, choice: int = 0, **options: Any) -> dict[str, Any]:
        """Request a reply to the messages and append it."""
        body = {"model": "tiny", "messages": self.messages, **options}
        answer = self.http.post(f"{self.path}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        reply = message_of_stream(answer.text) if options.get("stream") else answer.json()["choices"][choice]["message"]
        self.messages.append({key: value for key, value in reply.items() if value is not None})
        return reply

    def results(self, *texts: str, **options: Any) -> dict[str, Any]:
        calls = self.messages[-1]["tool_calls"]
        for call, text in zip(calls, texts, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return self.go_on(**options)

    def create(self, **metadata: Any) -> None:
        self.client.session(self.session_id, metadata)

    def refused(self, content: str, status: int) -> None:
        body = {"model": "tiny", "messages": [*self.messages, {"role": "user", "content": content}]}
        assert self.http.post(f"{self.path}/v1/chat/completions", json=body).status_code == status

    def turns(self) -> list[dict[str, Any]]:
        shown = self.http.get(self.path).json()
        turns: list[dict[str, Any]] = shown["turns"]
        return turns


def message_of_stream(text: str) -> dict[str, Any]:
    """Return the message from the chunks of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = part.get("id") or call["id"]
                for field, value in part["function"].items():
                    call["function"][field] += value or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


class Begin:
    """Begins sessions at a gateway and adds their completions to the engine's script."""

    def __init__(self, url: str, engine: OddEngine) -> None:
        self.url = url
        self.engine = engine

    def __call__(self, session_id: str, script: Sequence[Completion | str], key: str = TEAM) -> Talk:
        assert not self.engine.script
        self.will_say(*script)
        return Talk(self.url, session_id, key)

    def will_say(self, *script: Completion | str) -> None:
        self.engine.script += [Completion(entry) if isinstance(entry, str) else entry for entry in script]


def until(holds: Any) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise SystemExit("waited in vain")
