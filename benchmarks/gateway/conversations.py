"""Conversations of the benchmark: sessions that grow by a tool call and its result, with real text and ids."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

import tokentape

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a part of a file of the repository.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "offset": {"type": "integer"}},
                "required": ["path", "offset"],
            },
        },
    }
]
SYSTEM = "You are a careful engineer. Read what you need, then answer."
MESSAGE_TOKENS = 500
"""Tokens per message of the initial history."""
OVERHEAD = 5
"""Approximate number of tokens that a template adds around a message."""


class Text:
    """Text cut from Tokentape's own source, and the tokenizer that counts its tokens."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        files = sorted(Path(tokentape.__file__).parent.rglob("*.py"))
        self._text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        self._spans = self._tokenizer.encode(self._text, add_special_tokens=False).offsets

    def piece(self, tokens: int, chance: random.Random) -> str:
        """Return a random piece of about this many tokens."""
        start = chance.randrange(len(self._spans) - tokens)
        return self._text[self._spans[start][0] : self._spans[start + tokens - 1][1]]

    def replies(self, count: int, tokens: int = 64) -> list[dict[str, Any]]:
        """Return completions with a few words and a tool call, as sampled ids and as messages."""
        chance = random.Random(1)
        replies = []
        for n in range(count):
            arguments = {"path": f"src/module_{n}.py", "offset": 100 * n}
            call = json.dumps({"name": "read_file", "arguments": arguments})
            tail = f"\n<tool_call>\n{call}\n</tool_call><|im_end|>"
            room = tokens - len(self.ids(tail))
            content = self.piece(room, chance).replace("<", "(").strip()
            function = {"name": "read_file", "arguments": json.dumps(arguments)}
            replies.append(
                {
                    "ids": self.ids(content + tail),
                    "text": content + tail,
                    "content": content,
                    "tool_calls": [{"id": f"call_{n}", "type": "function", "function": function}],
                }
            )
        return replies

    def ids(self, text: str) -> list[int]:
        """Return the token ids, including control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@dataclass
class Conversation:
    """One session; keeps its messages as JSON and only appends to it."""

    text: Text
    history: int
    """Approximate number of tokens of the first request."""
    result: int = 64
    """Tokens of a tool's result."""
    seed: int = 0
    messages: list[bytes] = field(default_factory=list)
    tokens: int = 0
    """Approximate number of tokens in the context of the next request."""

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed} {self.history}")
        self._add({"role": "system", "content": SYSTEM}, 12)
        role = "user"
        while self.tokens < self.history - OVERHEAD or role == "assistant":
            size = max(min(MESSAGE_TOKENS, self.history - self.tokens - 2 * OVERHEAD), 8)
            self._add({"role": role, "content": self.text.piece(size, self._chance)}, size)
            role = "assistant" if role == "user" else "user"

    def body(self, *, stream: bool = False) -> bytes:
        """Return the next request."""
        more = b',"stream":true' if stream else b""
        head = b'{"model":"m","max_tokens":256' + more + b',"tools":' + _TOOLS + b',"messages":['
        return head + b",".join(self.messages) + b"]}"

    def answered(self, message: dict[str, Any], sampled: int = 64) -> None:
        """Append a reply and the result of the tool that it calls."""
        calls = message.get("tool_calls") or []
        kept = {"role": "assistant", "content": message.get("content")}
        if calls:
            kept["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        self._add(kept, sampled)
        called = calls[0]["id"] if calls else "call_0"
        result = self.text.piece(self.result, self._chance)
        self._add({"role": "tool", "tool_call_id": called, "content": result}, self.result + OVERHEAD)

    def _add(self, message: dict[str, Any], tokens: int) -> None:
        self.messages.append(json.dumps(message).encode())
        self.tokens += tokens + OVERHEAD


_TOOLS = json.dumps(TOOLS).encode()
