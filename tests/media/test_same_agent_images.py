"""The same agent with images over the three APIs: the same ids, turn by turn."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from anthropic import Anthropic
from msgspec import structs
from openai import OpenAI

pytest.importorskip("PIL", reason="needs Pillow (the extra `images`)")

from tests.gateway.scripted import ScriptedEngine
from tests.media.tiny_vision import picture
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import PromptMedia, SampleDelta
from tokentape.gateway._app import create_app
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

A, B = picture(1, 100, 60), picture(3, 90, 90)
ROUNDS = [["What is this?", A], ["And", B, "what is this?"], ["So?"]]
REPLIES = ["A blue square.<|im_end|>", "A red one.<|im_end|>", "Two squares.<|im_end|>"]


class Seeing(ScriptedEngine):
    """A scripted engine that takes images."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, REPLIES * 2)
        self.info = replace(self.info, media=frozenset({"image"}))
        self.seen: list[tuple[list[int], list[PromptMedia]]] = []

    def sample(
        self, prompt_ids: Any, params: Any, *, media: Sequence[PromptMedia] = (), **call: Any
    ) -> AsyncGenerator[SampleDelta, None]:
        self.seen.append((prompt_ids.tolist(), list(media)))
        return super().sample(prompt_ids, params, **call)


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def over_chat(url: str) -> None:
    def part(content: str | bytes) -> Any:
        if isinstance(content, str):
            return {"type": "text", "text": content}
        return {"type": "image_url", "image_url": {"url": url_of(content)}}

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = []
        for parts in ROUNDS:
            messages.append({"role": "user", "content": [part(content) for content in parts]})
            reply = client.chat.completions.create(model="m", messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))


def over_responses(url: str) -> None:
    def part(content: str | bytes) -> Any:
        if isinstance(content, str):
            return {"type": "input_text", "text": content}
        return {"type": "input_image", "image_url": url_of(content), "detail": "auto"}

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        items: list[Any] = []
        for parts in ROUNDS:
            items.append({"role": "user", "content": [part(content) for content in parts]})
            reply = client.responses.create(model="m", input=items)
            items += [item.model_dump(exclude_none=True) for item in reply.output]


def over_messages(url: str) -> None:
    def part(content: str | bytes) -> Any:
        if isinstance(content, str):
            return {"type": "text", "text": content}
        data = base64.b64encode(content).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        messages: list[Any] = []
        for parts in ROUNDS:
            messages.append({"role": "user", "content": [part(content) for content in parts]})
            reply = client.messages.create(model="m", max_tokens=99, messages=messages)
            blocks = [block.model_dump(exclude_none=True) for block in reply.content]
            messages.append({"role": "assistant", "content": blocks})


def compare(
    renderer: Renderer, store: SqliteStore, agent: Callable[[str], None], plant: Callable[[TurnRequest], TurnRequest]
) -> None:
    """Assert that an agent has the ids and the images of the one over chat."""
    engine = Seeing(renderer)
    turns = Turns(engine, renderer, store)
    begin = turns.begin
    turns.begin = lambda request: begin(plant(request) if request.session_id == "other" else request)  # type: ignore[method-assign]
    with running(create_app(turns, model_id="m")) as url:
        over_chat(f"{url}/sessions/chat")
        agent(f"{url}/sessions/other")
        chat, other = store.load_session("chat").turns, store.load_session("other").turns
    assert [turn.parent for turn in chat] == [turn.parent for turn in other] == [None, 0, 1]
    assert engine.seen[:3] == engine.seen[3:]
    assert [len(media) for _, media in engine.seen] == [1, 2, 2] * 2
    for expected, actual in zip(chat, other, strict=True):
        assert expected.added_ids.tolist() == actual.added_ids.tolist()
        assert expected.added_provenance.tolist() == actual.added_provenance.tolist()


@pytest.mark.parametrize("agent", [over_responses, over_messages])
def test_images_have_the_same_ids_over_every_api(
    vision_renderer: Renderer, store: SqliteStore, agent: Callable[[str], None]
) -> None:
    compare(vision_renderer, store, agent, lambda request: request)


def parts_turned(request: TurnRequest) -> TurnRequest:
    """Puts the image before the text."""
    turned = [
        {**message, "content": message["content"][::-1]} if isinstance(message["content"], list) else message
        for message in request.messages
    ]
    return structs.replace(request, messages=tuple(turned))


def test_moved_image_is_found(vision_renderer: Renderer, store: SqliteStore) -> None:
    with pytest.raises(AssertionError):
        compare(vision_renderer, store, over_messages, parts_turned)
