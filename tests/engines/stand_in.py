"""A fake vLLM that serves a real language model of a tokenizer: its ids and likelihoods are true.

The model counts which ids follow which in the repository's documentation, rendered as conversations by the chat
template, and repeats recent context, as every language model does. Training takes a second.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.engines import fake_vllm

from tokentape.chat._renderer import Renderer
from tokentape.types import Message

ROOT = Path(__file__).parents[2]
DATE = "2026-11-22"
MAX_MODEL_LEN = 4096

_DISCOUNT = 0.75
_COPIED = 0.3
"""The weight of repeating: the id that last followed an id follows it again."""


@cache
def paragraphs() -> tuple[str, ...]:
    """Return the long paragraphs of the documentation."""
    texts: dict[str, None] = {}
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            text = re.sub(r"\s+", " ", paragraph)
            if len(text) > 200:
                texts[text] = None
    return tuple(texts)


def rendered(renderer: Renderer, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = renderer.render(messages, date=DATE).ids.tolist()
    return ids


class LanguageModel:
    """Counts of ids, pairs and triples with absolute discounting, and a memory of recent context."""

    def __init__(self, renderer: Renderer) -> None:
        self.vocab_size = renderer.tokenizer.vocab_size
        self._counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
        texts = paragraphs()
        for before, text in zip(texts[::2], texts[1::2], strict=False):
            ids = rendered(
                renderer,
                [
                    {"role": "user", "content": before[:120]},
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": before[-120:]},
                ],
            )
            for order, counts in enumerate(self._counts, 1):
                counts.update(tuple(ids[at : at + order]) for at in range(len(ids) - order + 1))
        self._totals: list[Counter[tuple[int, ...]]] = [Counter() for _ in self._counts]
        self._kinds: list[Counter[tuple[int, ...]]] = [Counter() for _ in self._counts]
        for counts, totals, kinds in zip(self._counts, self._totals, self._kinds, strict=True):
            for ids_seen, count in counts.items():
                totals[ids_seen[:-1]] += count
                kinds[ids_seen[:-1]] += 1

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id except the first, after its prefix."""
        logprobs, followed = [], dict[int, int]()
        for at in range(1, len(ids)):
            probability = self._probability(ids[max(0, at - 2) : at], ids[at])
            if ids[at - 1] in followed:
                copied = followed[ids[at - 1]] == ids[at]
                probability = (1 - _COPIED) * probability + _COPIED * copied
            followed[ids[at - 1]] = ids[at]
            logprobs.append(math.log(probability))
        return logprobs

    def _probability(self, before: Sequence[int], token_id: int) -> float:
        probability = 1 / self.vocab_size
        for order, counts in enumerate(self._counts):
            context = tuple(before[len(before) - order :])
            total = self._totals[order][context]
            if len(context) == order and total:
                kept = max(counts[(*context, token_id)] - _DISCOUNT, 0) / total
                probability = kept + _DISCOUNT * self._kinds[order][context] / total * probability
        return probability


@cache
def language_model(renderer: Renderer) -> LanguageModel:
    """Return the model of a renderer, made once."""
    return LanguageModel(renderer)


class StandIn:
    """A vLLM server of `renderer`'s tokenizer and template, with the model `model`. Its attributes may change later.

    Without a `model` it returns no likelihoods, and with `tokenizes` off it has no `/tokenize` and `/detokenize`.
    Unless `refuses` is off, it refuses ids beyond its vocabulary, as the real server does.
    """

    def __init__(
        self,
        renderer: Renderer,
        model: LanguageModel | None = None,
        *,
        name: str = "m",
        root: str | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        tokenizes: bool = True,
        refuses: bool = True,
        owner: str = "vllm",
    ) -> None:
        self.renderer = renderer
        self.model = model
        self.name = name
        self.root = root
        self.max_model_len = max_model_len
        self.tokenizes = tokenizes
        self.refuses = refuses
        self.owner = owner
        self.weight_version: str | None = None
        self.scored = 0
        """Number of scored prompts."""
        self.app = Starlette(routes=[Route("/{path:path}", self.handle, methods=["GET", "POST"])])

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        received = await request.body()
        body = json.loads(received) if received else {}
        match request.url.path:
            case "/version":
                return JSONResponse({"version": "0.33.0"})
            case "/health":
                return Response()
            case "/v1/models":
                card = {"id": self.name, "root": self.root, "parent": None, "max_model_len": self.max_model_len}
                card["owned_by"] = self.owner
                return JSONResponse({"data": [card]})
            case "/tokenize" if self.tokenizes:
                return JSONResponse({"tokens": self._tokens(body)})
            case "/detokenize" if self.tokenizes:
                known = [token_id for token_id in body["tokens"] if token_id < self.renderer.tokenizer.vocab_size]
                return JSONResponse({"prompt": self.renderer.tokenizer.decode(known)})
            case "/v1/completions":
                return self._completion(body)
        return JSONResponse({"detail": "Not Found"}, 404)

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return rendered(self.renderer, body["messages"])
        return self.renderer.tokenizer.encode_plain(body["prompt"])

    def _completion(self, body: dict[str, Any]) -> Response:
        if self.refuses and max(body["prompt"]) >= self.renderer.tokenizer.vocab_size:
            return JSONResponse({"error": {"message": "out of vocabulary", "code": 400}}, 400)
        if "prompt_logprobs" in body:
            self.scored += 1
            rows = None
            if self.model is not None:
                ids = body["prompt"]
                scored = zip(ids[1:], self.model.logprobs(ids), strict=True)
                rows = [None, *({str(token_id): {"logprob": logprob, "rank": 1}} for token_id, logprob in scored)]
            return JSONResponse({"choices": [{"index": 0, "text": "", "prompt_logprobs": rows}]})
        if self.weight_version is None:
            return fake_vllm.plain_answer(body)
        events = fake_vllm.sampled_events(body)
        last = events[-2]["choices"][0]
        tokens = events[-1]["usage"]["completion_tokens"]
        last["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": tokens}]
        return fake_vllm.streaming(fake_vllm.sse(events)) if body["stream"] else JSONResponse(fake_vllm.whole(events))
