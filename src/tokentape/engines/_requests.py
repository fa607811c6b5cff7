"""Calls to the embedded engine, and the sampling step that turns their logits into tokens.

A step chooses the next token, records it with its logprob, checks whether the completion has ended and sends the token.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokentape._supports import pack
from tokentape.engines._adapters import Adapter
from tokentape.engines._base import LogprobsMode, SampleDelta, SamplingParams
from tokentape.engines._distributions import penalises, truncates
from tokentape.engines._grammar import Constraint
from tokentape.engines._kv import ExpertRows, Ids
from tokentape.engines._sampling import choose, distribution, penalise
from tokentape.errors import EngineContractError, EngineError
from tokentape.types import FinishReason


class StopStrings:
    """Finds stop strings in a completion's text, in which control tokens are spelled out.

    Only the last few ids are decoded for each token. Sampling ends at the first match, so a match ends in the newest
    token. A token has at least one byte, so a stop string of n bytes lies within the last n tokens. A few more tokens
    are decoded because decoding may change the start of the text (it drops a space, or cuts a character).

        >>> stops = StopStrings(tokenizer, ["\\n\\n"])
        >>> [stops.push(token_id) for token_id in tokenizer.encode("one\\n\\ntwo").ids]
        [None, '\\n\\n', None]
    """

    _MARGIN = 4

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        longest = max(len(string.encode()) for string in self._strings)
        self._window: deque[int] = deque(maxlen=longest + self._MARGIN)

    def push(self, token_id: int) -> str | None:
        """Add the next sampled id, and return the stop string that it completes; the earliest if there are several."""
        self._window.append(token_id)
        text = self._tokenizer.decode(list(self._window), skip_special_tokens=False)
        matches = [string for string in self._strings if string in text]
        return min(matches, key=text.find, default=None)


@dataclass(slots=True, eq=False)
class Request:
    """A call to `sample`."""

    request_id: str
    prompt_ids: Ids
    prefix_key: Ids
    """The prompt ids, with image placeholders replaced by a negative number that is unique to the image. Contexts
    share cached keys and values for the common prefix of their keys."""
    params: SamplingParams
    limit: int
    """Maximum number of tokens to sample: `max_tokens`, or fewer if the context has less room."""
    stops: StopStrings | None
    stream: bool
    send: Callable[[SampleDelta | EngineError], None]
    """Called on the worker's thread."""
    random: random.Random
    cancelled: bool = False
    """Set by the caller's thread. The worker then removes the request from the batch before its next step."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    end: FinishReason | None = None
    """Set when the completion's last token is sampled. `TokenSampler.update` sends it."""
    stop: int | str | None = None
    """The stop id or stop string that ended the completion."""
    sent: int = 0
    finished: bool = False
    """Whether the end was sent. No more tokens are sampled then."""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """The model's inputs for the prompt's images: `pixel_values`, `image_grid_thw` and `mm_token_type_ids`, int64
    [prompt tokens], 1 for placeholder ids of an image."""
    constraint: Constraint | None = None
    """The grammar that the completion must follow."""
    experts: ExpertRows | None = None
    """The experts that each token was routed to, if the call requests them."""
    adapter: Adapter | None = None
    """Set by the worker: the adapter version used for the whole call."""
    one_version: bool = True
    """Whether all keys and values come from a single weight version. Also False after an error."""


@dataclass(slots=True, eq=False, kw_only=True)
class TokenSampler:
    """Chooses tokens from logits, records them with each request, and sends them to the callers."""

    forbidden: Tensor
    """bool [embedding rows]; True for ids that must not be sampled."""
    weight_version: str
    on_finish: Callable[[Request, FinishReason], None]
    """Called with each request that ended without an error, and its finish reason."""
    logprobs_mode: LogprobsMode

    def step(self, requests: Sequence[Request], logits: Tensor) -> Tensor:
        """Sample and record one id for each unfinished request. Return the ids, int64 [requests].

        `logits` are the model's own, float32 [requests, embedding rows]. A logprob that is not finite fails only its
        own request.
        """
        constraints = [(row, request.constraint) for row, request in enumerate(requests) if request.constraint]
        if constraints:
            logits = logits.clone()
        for row, constraint in constraints:
            mask = torch.from_numpy(constraint.allowed(logits.shape[-1])).to(logits.device)
            logits[row].masked_fill_(~mask, -math.inf)
        allowed = logits.masked_fill(self.forbidden, -math.inf)
        for row, request in enumerate(requests):
            if not penalises(request.params):
                continue
            prompt = torch.from_numpy(request.prompt_ids).to(logits.device)
            sampled = torch.tensor(request.ids, dtype=torch.int64, device=logits.device)
            allowed[row] = penalise(allowed[row], prompt, sampled, request.params)
        params = [request.params for request in requests]
        probabilities = distribution(allowed, params)
        ids = choose(allowed, probabilities, params, [request.random.random() for request in requests])
        if self.logprobs_mode == "raw_logprobs":
            # Not computed from probabilities: at high temperatures, ids with probability 0 in float64 can be drawn.
            reported = logits.log_softmax(-1)
            logprobs = reported.gather(-1, ids.unsqueeze(-1))
        else:
            whole = self.logprobs_mode == "scaled_logprobs" and any(map(truncates, params))
            weights = distribution(allowed, params, truncate=False) if whole else probabilities
            total = weights.sum(-1, keepdim=True)
            logprobs = (weights.gather(-1, ids.unsqueeze(-1)) / total).log()
            # The logarithm over the whole vocabulary is slow, so take it only if needed.
            reported = (weights / total).log() if any(p.top_logprobs for p in params) else weights
        alternatives = self._alternatives(reported, params)
        chosen = zip(requests, ids.tolist(), logprobs.squeeze(-1).tolist(), alternatives, probabilities, strict=True)
        for request, token_id, logprob, top, row in chosen:
            if math.isfinite(logprob):
                if request.params.supports and truncates(request.params):
                    request.supports.append(pack(row.nonzero().squeeze(-1).cpu().numpy(), request.params.supports))
                _record(request, token_id, logprob, top)
            else:
                problem = (request.constraint and request.constraint.problem) or "the model's logits are not finite"
                self.fail(request, EngineContractError(f"{problem}; nothing was sampled"))
        return ids

    def update(self, request: Request) -> None:
        """Send the caller the last delta if the request has ended, or the new tokens if it is streamed."""
        if request.finished:
            return
        if request.end is not None:
            self.finish(request, request.end)
        elif request.stream:
            self.flush(request)

    def flush(self, request: Request, end: FinishReason | None = None) -> None:
        """Send the tokens sampled since the last delta. Call it before a weight update: a delta has one version."""
        start, request.sent = request.sent, len(request.ids)
        if start == request.sent and end is None:
            return
        request.send(
            SampleDelta(
                token_ids=tuple(request.ids[start:]),
                logprobs=tuple(request.logprobs[start:]),
                finish_reason=end,
                stop=request.stop if end == "stop" else None,
                top_logprobs=tuple(request.top_logprobs[start:]),
                supports=tuple(request.supports[start:]),
                weight_version=self.weight_version if request.adapter is None else request.adapter.version,
                payloads=request.experts.payloads() if end is not None and request.experts is not None else (),
            )
        )

    def finish(self, request: Request, end: FinishReason) -> None:
        """Send a request's last delta and end it."""
        request.finished = True
        self.on_finish(request, end)
        self.flush(request, end)

    def fail(self, request: Request, error: EngineError) -> None:
        """End a request with an error."""
        request.finished = True
        request.one_version = False
        request.send(error)

    def _alternatives(self, logprobs: Tensor, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, float], ...]]:
        """Return each row's `top_logprobs` most likely (id, logprob) pairs, best first, without forbidden ids."""
        most = max(p.top_logprobs for p in params)
        if not most:
            return [()] * len(params)
        samplable = logprobs.masked_fill(self.forbidden, -math.inf)
        values, ids = (tensor.tolist() for tensor in samplable.topk(min(most, samplable.shape[-1])))
        return [
            tuple(pair for pair in zip(ids[row], values[row], strict=True) if pair[1] > -math.inf)[: p.top_logprobs]
            for row, p in enumerate(params)
        ]


def _record(request: Request, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
    request.ids.append(token_id)
    request.logprobs.append(logprob)
    if request.params.top_logprobs:
        request.top_logprobs.append(top)
    stop = request.stops.push(token_id) if request.stops is not None else None
    if token_id in request.params.stop_token_ids:
        request.end, request.stop = "stop", token_id
    elif stop is not None:
        request.end, request.stop = "stop", stop
    elif len(request.ids) >= request.limit:
        request.end = "length"
    elif request.constraint is not None:
        request.constraint.push(token_id)
