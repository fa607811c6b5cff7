"""A gateway with the vLLM engine between the official client and a planned upstream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.faults import upstream as planned
from tests.faults.invariant import Received, invariant
from tests.faults.upstream import Upstream
from tests.waiting import until
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import Timeouts
from tokentape.engines._vllm import VllmEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._keys import Keys
from tokentape.gateway._limits import Limits
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession
from tokentape.types import Turn

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}


@dataclass
class Gateway:
    """A gateway on a data directory, and every reply that its clients received."""

    renderer: Renderer
    upstream: Upstream
    directory: Path
    limits: Limits = field(default_factory=lambda: Limits(retry_grace=0.2))
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(5.0, first_token=5.0, between_tokens=5.0, total=20.0))
    keys: Keys = field(default_factory=Keys)
    received: list[Received] = field(default_factory=list)
    opened: ExitStack = field(default_factory=ExitStack)

    def start(self) -> Gateway:
        self.store = self.opened.enter_context(SqliteStore.open(self.directory))
        self.url = self.opened.enter_context(running(_Late(self)))
        return self

    def stop(self) -> None:
        self.opened.close()

    def client(self, session: str | None = "s", **more: Any) -> OpenAI:
        """The official client, without retries by default."""
        base_url = self.url + ("" if session is None else f"/sessions/{session}") + "/v1"
        return self.opened.enter_context(OpenAI(**{"base_url": base_url, "api_key": "none", "max_retries": 0, **more}))

    def ask(self, messages: list[Any] | None = None, session: str = "s", **more: Any) -> dict[str, Any]:
        """Take a turn and note that it was acknowledged. Returns the messages with which an agent continues."""
        messages = messages or [QUESTION]
        reply = say(self.client(session), messages, **more)
        self.received += Received.of(reply)
        return {"role": "assistant", "content": reply.choices[0].message.content}

    def refused(self, messages: list[Any] | None = None, session: str = "s", **more: Any) -> openai.APIError:
        """Take a turn that must fail, before or within the stream, and return what the client raised."""
        try:
            reply = say(self.client(session), messages or [QUESTION], **more)
            chunks = list(reply) if more.get("stream") else reply
        except openai.APIError as error:
            return error
        raise AssertionError(f"answered as if nothing were wrong: {chunks}")

    def check(self, unacknowledged: int = 0) -> dict[str, StoredSession]:
        """Check the invariant while the gateway runs."""
        return invariant(self.directory, self.received, unacknowledged=unacknowledged)


class _Late:
    """The application, made inside the event loop that serves it: an engine's connections belong to their loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            own = self._gateway
            vocab_size = own.renderer.tokenizer.vocab_size
            engine = await VllmEngine.open(
                own.upstream.url, vocab_size=vocab_size, timeouts=own.timeouts, verify_prompt=True
            )
            turns = Turns(engine, own.renderer, own.store, limits=own.limits)
            self._app = create_app(turns, model_id="m", keys=own.keys)
        await self._app(scope, receive, send)


def say(client: OpenAI, messages: list[Any], **more: Any) -> Any:
    """One call that requests token ids."""
    extra = {"return_token_ids": True, **more.pop("extra_body", {})}
    return client.chat.completions.create(model="m", messages=messages, extra_body=extra, **more)


def joined(chunks: Any) -> list[Received]:
    """The choices of a stream that have their finish chunk."""
    prompt_ids: list[int] = []
    ids: dict[int, list[int]] = {}
    content: dict[int, str] = {}
    received = []
    for chunk in chunks:
        prompt_ids = (chunk.model_extra or {}).get("prompt_token_ids", prompt_ids)
        for part in chunk.choices:
            more = part.model_extra or {}
            ids.setdefault(part.index, []).extend(more.get("token_ids", []))
            content[part.index] = content.get(part.index, "") + (part.delta.content or "")
            if part.finish_reason:
                at = more["tokentape"]
                received.append(
                    Received(at["session_id"], at["turn"], prompt_ids, ids[part.index], content[part.index])
                )
    return received


def wait_for_turns(gateway: Gateway, count: int, session: str = "s") -> tuple[Turn, ...]:
    """Wait until the session has this many turns: aborted turns are recorded after the client disconnects."""

    def turns() -> tuple[Turn, ...]:
        stored = gateway.check().get(session)
        return () if stored is None else stored.turns

    until(lambda: len(turns()) >= count)
    return turns()


def goes_on(gateway: Gateway, history: list[Any]) -> Turn:
    """Take the next turn; it continues the last acknowledged one, regardless of events in between."""
    parent = gateway.received[-1].turn
    gateway.ask([*history, {"role": "user", "content": "And pears?"}])
    turn = gateway.check()["s"].turns[gateway.received[-1].turn]
    assert (turn.parent, turn.fork) == (parent, None)
    return turn


Serve = Callable[..., Gateway]


@pytest.fixture
def upstream(renderer: Renderer) -> Iterator[Upstream]:
    with planned.running(renderer) as server:
        yield server


@pytest.fixture
def serve(renderer: Renderer, upstream: Upstream, tmp_path: Path) -> Iterator[Serve]:
    """Start a gateway on `tmp_path / "data"` with the given settings."""
    with ExitStack() as stopped:

        def start(**settings: Any) -> Gateway:
            gateway = Gateway(settings.pop("renderer", renderer), upstream, tmp_path / "data", **settings)
            stopped.callback(gateway.stop)
            return gateway.start()

        yield start


@pytest.fixture
def gateway(serve: Serve) -> Gateway:
    return serve()
