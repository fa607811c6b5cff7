"""What the engines over HTTP share: connections to one server, what it said of itself, whether it answers, its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine

from tokentape.engines.base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines.checks import refuse_params, refuse_prompt, refuse_unhonoured
from tokentape.engines.http import HttpClient, hopeless
from tokentape.engines.scoring import Scores, refuse_unscorable, server_scores
from tokentape.errors import EngineError, EngineUnavailable
from tokentape.types import TokenIds


class RemoteEngine(ABC):
    """The parts of an `Engine` that do not depend on the kind of server."""

    _health = "/health"

    def __init__(self, http: HttpClient, info: EngineInfo) -> None:
        self._http = http
        self._info = info
        self._background: set[asyncio.Task[None]] = set()
        self._calls: set[str] = set()
        """Calls that the server can be asked to end, by its ids: the request id, a dash and a random ending."""

    @property
    def http(self) -> HttpClient:
        """The connections to the server."""
        return self._http

    @property
    def info(self) -> EngineInfo:
        """What the server said when it was opened."""
        return self._info

    @abstractmethod
    def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `Engine`.

        The delta with the finish_reason comes only when the whole reply has been checked.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown id; a parameter is out of range, here or
                by the server's own limits.
            UnsupportedParameter: this server would ignore a parameter that was set, or means something else by it.
            EngineContractError: the reply lacks ids, log-probabilities or counts, or they disagree.
            EngineUnavailable: the server can't be reached or takes no requests.
            EngineTimeout: it was silent for too long, as a paused server is.
            EngineError: it failed, or the connection broke.

        """

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]`, each given all before it; see `Scorer`. One call, of the whole of `ids`.

        Raises:
            InvalidRequest: see `Scorer.score`.
            EngineError: this server does not tell how likely a prompt is: only vLLM and SGLang do.
            EngineUnavailable: the server can't be reached or takes no requests.
            EngineTimeout: it gave no answer in time.

        """
        # vLLM samples at least one token.
        refuse_unscorable(ids, start, self._info, room=1)
        found = await server_scores(self._http, self._info, ids, start, top)
        if found is None:
            raise hopeless(
                f"{self._info.name} does not tell how likely ids are: score with vLLM, SGLang or transformers"
            )
        return found

    async def find_logprobs_mode(self) -> str:
        """Return what `EngineInfo.logprobs_mode` is now: a server that was restarted may have another one.

        Raises as `sample`.
        """
        return self._info.logprobs_mode

    def _refuse(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Raise for what no server is asked."""
        refuse_prompt(prompt_ids, self._info)
        refuse_params(params)
        refuse_unhonoured(params, self._info)

    def interrupt(self, request_id: str) -> bool:
        """Have the server end a call with `abort` and all that it has sampled; False if it can't be asked to."""
        found = [own for own in self._calls if own.rpartition("-")[0] == request_id]
        for own in found:
            self._in_background(self._tell_abort(own))
        return bool(found)

    async def _tell_abort(self, own: str) -> None:
        """Have the server end the call that has this id there. Engines that can fill `_calls`."""
        raise NotImplementedError

    async def check(self) -> None:
        """Return if the server says within `Timeouts.connect` that it is healthy, else raise `EngineUnavailable`."""
        try:
            await self._http.get(self._health, stage="connect")
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineUnavailable(f"the engine is not healthy: {error}") from None

    async def close(self) -> None:
        """Close all connections, which aborts what runs on them. May be called again."""
        await asyncio.gather(*self._background)
        await self._http.close()

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do something that no call waits for; `close` does."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
