"""Run agents as a trainer's rollouts, through a gateway in the trainer's process, with a session for each rollout."""

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
"""Does one task: `async def agent(base_url, api_key, task)`. It passes the first two to any OpenAI or Anthropic client,
and returns the reward, or None to have the trainer compute it."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The result of one agent's run."""

    session_id: str
    samples: tuple[Sample, ...]
    """Samples of the session: several if it branched, none if no model call was completed."""
    error: Exception | None
    """What the agent raised."""
    replies: Mapping[int, Message] = field(default_factory=dict)
    """The replies that the agent got, by turn."""


@dataclass(frozen=True)
class LiveGateway:
    """A gateway with an engine in this process, for agents on this machine. Made by `live_gateway`."""

    client: AsyncClient
    renderer: Renderer
    store: SqliteStore
    """The gateway's record, opened for reading."""
    keeps: bool
    """Whether sessions stay in the record."""
    handles: dict[str, Any]
    """By session id, the handle that `sample` gets with the session's calls."""

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
        """Run an agent in a new session, for at most `seconds`. If it raises, the rollout has the exception.

        The gateway's `sample` gets `handle` with each call of the session. The session's metadata have `group` and
        `attempt`; `pin` and `default` are its sampling parameters. In a temporary record, it is deleted once read.
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
            # Also if the trainer cancels the rollout.
            del self.handles[session.session_id]
            if not self.keeps:
                await session.delete()
        assembled = assemble(trajectories, group=lambda _: group)
        if stop_rule is not None:
            # Samples of a failed agent are not trained.
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
    """Return this event loop's gateway for a model. It starts at the first call, and ends with the loop.

    Later calls for the model return the same gateway, so pass the same arguments; see `FunctionEngine`. The first
    argument of `sample` is the session's handle. `model_dir` is a folder, or the Hub repo id of a cached model. Raises
    as `find_model` and `serving` do.
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
        # Its own task: cancelling a rollout meanwhile must not stop the gateway that the other rollouts wait for.
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
    """Start a gateway on a different thread, and stop it when this task is cancelled, as an event loop does at its end.

    The engine is made here, because its function belongs to this event loop.
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
    """Return `target`, or import it if it is a `package.module.name`. Raises `InvalidRequest` if that fails."""
    if not isinstance(target, str):
        return target
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"{param} {target!r} can't be imported ({error}); expected package.module.name: write the full name, and "
            "make the package importable, for example with PYTHONPATH",
            param,
        ) from None


def sampling_fields(params: SamplingParams, names: Collection[str]) -> dict[str, Any]:
    """Return the parameters in `names` in the form of vLLM and SGLang, without stop strings."""
    fields = {name: getattr(params, name) for name in names if name != "stop_strings"}
    return fields | {"top_k": params.top_k or -1, "stop_token_ids": list(params.stop_token_ids)}


def vllm_fields(params: SamplingParams, names: Collection[str]) -> dict[str, Any]:
    """Return the sampling parameters of a vLLM call that returns ids and logprobs."""
    own = {"max_tokens": params.max_tokens, "skip_special_tokens": False, "logprobs": 1}
    return sampling_fields(params, names) | own


def version_between(first: object, last: object) -> str | None:
    """Return a completion's weight version, or a range such as `7-8` if it changed at an unknown token."""
    return None if last is None else str(last) if first == last else f"{first}-{last}"
