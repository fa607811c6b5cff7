"""Sessions of a scripted engine through a real gateway, for tests that read their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.demo.tasks import TOOLS
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession

THOUGHT = "<think>\nI need the price of pears.\n</think>\n\n"
TOOL_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n</tool_call><|im_end|>'
ANSWER = "The answer is 12.<|im_end|>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def played(
    renderer: Renderer,
    store: SqliteStore,
    exchanges: Sequence[tuple[dict[str, Any], str]],
    *,
    split: Sequence[int] = (),
    name: str = "s",
) -> StoredSession:
    """Record a session of exchanges: each is a new message and its completion, with control tokens spelled out.

    Completions of the exchanges in `split` begin with single-letter tokens.
    """
    engine = ScriptedEngine(renderer, [completion for _, completion in exchanges])
    messages: list[dict[str, Any]] = []
    with running(create_app(Turns(engine, renderer, store), model_id="tiny")) as url:
        for n, (message, _) in enumerate(exchanges):
            messages.append(message)
            engine.split_next = n in split
            body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 100}
            answer = httpx2.post(f"{url}/sessions/{name}/v1/chat/completions", json=body).raise_for_status().json()
            reply = answer["choices"][0]["message"]
            messages.append({key: value for key, value in reply.items() if value is not None})
            if reply.get("tool_calls") and n + 1 < len(exchanges) and exchanges[n + 1][0]["role"] == "tool":
                exchanges[n + 1][0]["tool_call_id"] = reply["tool_calls"][0]["id"]
        return store.load_session(name)
