"""Agents as rollouts of a trainer: a gateway in the trainer's process, and a session for each rollout."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from tokentape._hub import find_model
from tokentape.chat._renderer import Renderer
from tokentape.client import AsyncClient
from tokentape.engines._base import Engine, SampleDelta, SamplingParams
from tokentape.engines._function import FunctionEngine
from tokentape.errors import InvalidRequest
from tokentape.gateway._serving import serving_record
from tokentape.store import SqliteStore
from tokentape.store._reads import StoredSession, lineage_of
from tokentape.training._samples import Sample, assemble
from tokentape.training._stop_rule import StopRule
from tokentape.types import Message, Trajectory

Task: TypeAlias = Mapping[str, Any]
"""A row of the trainer's dataset."""

Agent: TypeAlias = Callable[[str, str, Task], Awaitable[float | None]]
"""Does one task: `async def agent(base_url, api_key, task)`. Gives both to any client of OpenAI's or Anthropic's wire
API, and returns the reward, or None where the trainer finds it."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One agent's run."""

    session_id: str
    samples: tuple[Sample, ...]
    """What of the session is trained. Several where it branched, none where nothing was sampled."""
    error: Exception | None
    """What the agent raised."""
    replies: Mapping[int, Message] = field(default_factory=dict)
    """What the agent read, by turn."""


@dataclass(frozen=True)
class LiveGateway:
    """A gateway over an engine of this process, for agents on this machine. Get it with `live_gateway`."""

    client: AsyncClient
    renderer: Renderer
    store: SqliteStore
    """Its record, to read."""
    keeps: bool
    """Whether sessions stay in the record."""
    handles: dict[str, Any]
    """By session what its calls are sampled with."""

    async def run(
        self,
        agent: Agent,
        task: Task,
        *,
        group: str,
        handle: Any,
        session_id: str | None = None,
        attempt: int | str | None = None,
        metadata: Mapping[str, Any] | None = None,
        pin: Mapping[str, Any] | None = None,
        default: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        stop_rule: StopRule | None = None,
    ) -> Rollout:
        """Run an agent in a new session, for at most so many seconds. What it raises is in the rollout.

        The gateway's `sample` gets `handle` with each call of the session. Its metadata name the group and the attempt;
        `pin` and `default` are its sampling parameters. Sessions of a temporary record are deleted once they are read.
        """
        labels = {"group": group, "attempt": attempt, **(metadata or {})}
        session = await self.client.session(session_id, metadata=labels, pin=pin, default=default)
        self.handles[session.session_id] = handle
        error: Exception | None = None
        try:
            try:
                async with asyncio.timeout(seconds):
                    reward = await agent(session.base_url, "none", task)
                if reward is not None:
                    await session.reward(float(reward))
            except Exception as raised:
                error = raised
            stored, trajectories = await asyncio.to_thread(self._read, session.session_id)
        finally:
            # Also where the trainer cancels the rollout.
            del self.handles[session.session_id]
            if not self.keeps:
                await session.delete()
        assembled = assemble(trajectories, group=lambda _: group)
        if stop_rule is not None:
            # What an agent that failed left is not trained.
            stop_rule.add(assembled.samples if error is None else ())
        replies = {turn.seq: turn.reply for turn in stored.turns}
        return Rollout(session.session_id, tuple(assembled.samples), error, replies)

    def _read(self, session_id: str) -> tuple[StoredSession, list[Trajectory]]:
        stored = self.store.load_session(session_id, per_token=True)
        return stored, stored.trajectories(edges=lineage_of(self.store.load_session, stored))


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[LiveGateway]]] = WeakKeyDictionary()
_held: set[asyncio.Task[None]] = set()


async def live_gateway(
    model_dir: Path | str,
    sample: Callable[[Any, list[int], SamplingParams], Awaitable[SampleDelta]],
    *,
    name: str,
    sampling: frozenset[str],
    max_context: int,
    logprobs_mode: str,
    directory: Path | str | None = None,
) -> LiveGateway:
    """Return the gateway of this event loop for a model. It starts at the first call, and ends with the loop.

    Later calls get the same one, so all has to be the same for a model; see `FunctionEngine`. `sample` gets the handle
    of the session first. The model is a folder or the name of one in the Hub's cache. Raises as `find_model` and
    `serving`.
    """
    folder = find_model(Path(model_dir), weights=False)
    handles: dict[str, Any] = {}

    async def with_handle(prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
        return await sample(handles[str(params.session_id)], prompt_ids, params)

    make_engine = partial(
        FunctionEngine,
        with_handle,
        max_context=max_context,
        logprobs_mode=logprobs_mode,
        sampling=sampling | {"session_id"},
        name=name,
    )
    opened = _gateways.setdefault(asyncio.get_running_loop(), {})
    ready = opened.get(str(folder))
    if ready is None or (ready.done() and ready.exception() is not None):
        ready = opened[str(folder)] = asyncio.get_running_loop().create_future()
        # Its own task: a rollout that is cancelled meanwhile must not take the gateway from the others.
        task = asyncio.create_task(_hold(ready, folder, make_engine, directory, handles))
        _held.add(task)
        task.add_done_callback(_held.discard)
    return await asyncio.shield(ready)


async def _hold(
    ready: asyncio.Future[LiveGateway],
    model_dir: Path,
    make_engine: Callable[..., Engine],
    directory: Path | str | None,
    handles: dict[str, Any],
) -> None:
    """Start a gateway, on another thread, and end it when this task is cancelled: an event loop does that at its end.

    The engine is made here, since its function belongs to this event loop.
    """
    try:
        renderer = await asyncio.to_thread(Renderer.load, model_dir)
        engine = make_engine(vocab_size=renderer.tokenizer.vocab_size)
        gateway = serving_record(engine, model_dir, directory, renderer)
        url, store = await asyncio.to_thread(gateway.__enter__)
    except Exception as error:
        ready.set_exception(error)
        return
    try:
        async with AsyncClient(url, timeout=600.0) as client:
            ready.set_result(LiveGateway(client, renderer, store, directory is not None, handles))
            await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(gateway.__exit__, None, None, None)


def imported(target: Any, param: str) -> Any:
    """Return an object, or the one that `package.module.name` names. Raises `InvalidRequest` if there is none."""
    if not isinstance(target, str):
        return target
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{param} {target!r} can't be imported ({error}); expected package.module.name: write the full name, and "
            "put the package where Python finds it, with PYTHONPATH for example",
            param,
        ) from None


def sampling_fields(params: SamplingParams, names: Collection[str]) -> dict[str, Any]:
    """Return the parameters of `names` as vLLM and SGLang take them, without stop strings."""
    fields = {name: getattr(params, name) for name in names if name != "stop_strings"}
    return fields | {"top_k": params.top_k or -1, "stop_token_ids": list(params.stop_token_ids)}


def vllm_fields(params: SamplingParams, names: Collection[str]) -> dict[str, Any]:
    """Return the sampling parameters of a call of vLLM's for ids and logprobs."""
    own = {"max_tokens": params.max_tokens, "skip_special_tokens": False, "logprobs": 1}
    return sampling_fields(params, names) | own


def version_between(first: object, last: object) -> str | None:
    """Return the version of a completion that began with one and ended with another, `7-8`: where is not known."""
    return None if last is None else str(last) if first == last else f"{first}-{last}"
