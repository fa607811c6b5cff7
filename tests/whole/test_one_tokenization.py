"""A message is tokenized once, when it is new: counted at the tokenizer itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.conftest import SharedEngine
from tokentape.chat._sections import Sections
from tokentape.chat._tokenizer import Tokenizer
from tokentape.client import Client
from tokentape.demo.tasks import SYSTEM_PROMPT, TOOLS
from tokentape.engines._transformers import FinishedSample, TransformersEngine

TURNS = 8


class CountingTokenizer:
    """A tokenizer of `tokenizers` that records how much it encodes."""

    def __init__(self, inner: Any, encoded: list[int]) -> None:
        self._inner = inner
        self._encoded = encoded

    def encode(self, text: str, **options: Any) -> Any:
        self._encoded.append(len(text))
        return self._inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("encode"), name
        return getattr(self._inner, name)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each `encode` call, of both the renderer's and the engine's tokenizer."""
    from tokentape.engines import _loading as loading

    calls: list[int] = []
    twin, plain, load = Tokenizer._twin, Tokenizer._plain.func, loading.load_tokenizer

    def counting_twin(self: Tokenizer, start: int) -> Any:
        made = twin(self, start)
        encoder: Any = CountingTokenizer(made.encoder, calls)
        return replace(made, encoder=encoder, sections=Sections(encoder, frozenset(made.names.values())))

    monkeypatch.setattr(Tokenizer, "_twin", counting_twin)
    monkeypatch.setattr(Tokenizer, "_plain", property(lambda self: CountingTokenizer(plain(self), calls)))
    monkeypatch.setattr(loading, "load_tokenizer", lambda folder: CountingTokenizer(load(folder), calls))
    return calls


@pytest.fixture
def engine(model_dir: Path, encoded: list[int]) -> Iterator[SharedEngine]:
    finished: list[FinishedSample] = []
    opened = TransformersEngine.open(model_dir, max_context=4096, on_finish=finished.append)
    yield SharedEngine(opened, finished)
    asyncio.run(opened.close())


def new_messages(turn: int) -> list[Any]:
    """A user's next message; every third time the results of two calls and a message. The same length each time."""
    user = {"role": "user", "content": f"What is {turn:02d} plus {turn + 40:02d}?"}
    if turn % 3 != 2:
        return [user]
    results = [{"role": "tool", "tool_call_id": f"call_{turn:02d}_{n}", "content": f"{turn:02d}{n}"} for n in (1, 2)]
    return [*results, user]


def encoded_per_turn(gateway_url: str, encoded: list[int], max_tokens: int) -> list[list[int]]:
    """Characters of each call of `encode` in each turn of one session."""
    per_turn: list[list[int]] = []
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
    with Client(gateway_url) as client:
        session = client.session("counted")
    with OpenAI(base_url=session.base_url, api_key="none") as openai:
        for turn in range(TURNS):
            messages += new_messages(turn)
            encoded.clear()
            reply = openai.chat.completions.create(
                model="tiny",
                messages=messages,
                tools=TOOLS,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=0.0,
                stop=["\n\n\n"],
            )
            per_turn.append(list(encoded))
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))

    return per_turn


def test_turn_encodes_only_its_new_messages(gateway_url: str, engine: SharedEngine, encoded: list[int]) -> None:
    per_turn = encoded_per_turn(gateway_url, encoded, max_tokens=40)
    assert [call.finish_reason for call in engine.finished] == ["stop"] * TURNS
    assert [len(calls) for calls in per_turn] == [1] * TURNS
    # Turns that add the same encode the same, however long the history has become.
    for first in (1, 2):
        assert len({per_turn[turn][0] for turn in range(first, TURNS, 3)}) == 1
    contexts = [len(call.prompt_ids) for call in engine.finished]
    assert all(later > earlier + 40 for earlier, later in pairwise(contexts))
    assert per_turn[1][0] < per_turn[2][0] < 100


def test_closing_a_cut_turn_encodes_only_a_few_more_characters(
    gateway_url: str, engine: SharedEngine, encoded: list[int]
) -> None:
    per_turn = encoded_per_turn(gateway_url, encoded, max_tokens=5)
    assert [call.finish_reason for call in engine.finished] == ["length"] * TURNS
    assert len(per_turn[0]) == 1
    for first in (1, 2):
        [(messages, close)] = {tuple(per_turn[turn]) for turn in range(first, TURNS, 3)}
        assert close < 10 < messages < 100
