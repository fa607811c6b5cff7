"""llama.cpp's `llama-server` over HTTP, through its native route `/completion`.

docs/engines.md describes the route. Three facts explain most of this module:

- Streams omit the ids of tokens that end within a character. So this engine never streams, and requests `PIECE` tokens
  at a time instead. Each piece is a whole reply with all ids, and the server keeps the context cached for the next one.
- Whole replies omit the log-probabilities of those tokens. They are requested one by one afterwards.
- The server does not accept stop ids. It stops at the ids that the model file marks as end-of-generation. For other
  stop ids this engine cuts the pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from tokentape.engines._base import BEFORE_GRAMMAR, DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams, common_prefix
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import served_cards
from tokentape.engines._remote import RemoteEngine
from tokentape.engines._replies import ReceivedTokens, decode, joined
from tokentape.engines._server_errors import safe_name
from tokentape.engines._tokenizing import TokenizeApi
from tokentape.errors import EngineContractError
from tokentape.types import FinishReason, TokenIds

PIECE = 32
"""Tokens per reply. Each request sends the context again, so small pieces cost bytes; large pieces arrive late."""

_SEEDS = 1 << 31

# A logit bias that exceeds any logit.
_CERTAIN = 1e6

# Number of alternatives to request to find a missing log-probability. If it is not among them, request all.
_LIKELY = 256

# In llama.cpp these penalties also count prompt tokens. In other engines they count only completion tokens.
_DIFFERENT_PENALTIES = frozenset({"presence_penalty", "frequency_penalty"})


class LlamaCppEngine(RemoteEngine):
    """An engine for llama.cpp's llama-server. Open it with `open`.

    A completion also ends at every id that the model file marks as end-of-generation, because switching that off would
    change the distribution. A stream yields a delta for every `PIECE` tokens. With `stop_strings` or a `json_schema`,
    which the server applies only within one reply, it yields a single delta.
    """

    own_path = "/props"
    tokenize_api = TokenizeApi(
        text="content",
        special="add_special",
        controls="parse_special",
        takes_model=False,
        decoded="content",
        template="/apply-template",
    )

    def __init__(self, http: HttpClient, info: EngineInfo, *, slots: int, plain_id: int) -> None:
        super().__init__(http, info)
        self._plain_id = plain_id
        self._slots = _Slots(slots)

    @classmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        props = decode(await http.get("/props"), _Props, "llama-server")
        card = (await served_cards(http))[0]
        rows = 0 if card.meta is None else card.meta.n_vocab
        if rows < vocab_size:
            raise EngineContractError(
                f"the engine's model has {rows} ids, expected at least {vocab_size}; was it converted "
                "from this tokenizer?"
            )
        tokenized = await http.post("/tokenize", msgspec.json.encode({"content": "a", "add_special": False}), {})
        plain = decode(tokenized, _LlamaCppTokens, "llama-server").tokens
        info = EngineInfo(
            name="llamacpp",
            version=props.build_info,
            model=card.id,
            vocab_size=vocab_size,
            max_context=props.default_generation_settings.n_ctx,
            logprobs_mode="raw_logprobs",
            sampling=DISTRIBUTION - _DIFFERENT_PENALTIES | {"json_schema"},
            capabilities=(BEFORE_GRAMMAR,),
            prompt_penalties=frozenset({"repetition_penalty"}),
        )
        engine = cls(http, info, slots=props.total_slots, plain_id=plain[-1] if plain else 0)
        await engine._probe(rows)
        return engine

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """See `RemoteEngine.sample`.

        Equal seeds return equal completions, streamed or not. Calls wait for one of the server's slots, because more
        calls than slots would evict each other's contexts between two pieces. `request_id` is not sent.
        """
        self._refuse(prompt_ids, params)
        completion = ReceivedTokens(params, self.info.vocab_size, own_stops=True)
        context: list[int] = np.asarray(prompt_ids).tolist()
        budget = min(params.max_tokens, self.info.max_context - len(context))
        async with self._slots.taken(context) as slot:
            deltas: list[SampleDelta] = []
            while True:
                remaining = budget - completion.tokens
                # The server applies a schema and stop strings only within one reply.
                piece = remaining if params.stop_strings or params.json_schema else min(remaining, PIECE)
                delta = await self._piece(context, params, completion, piece, slot.number)
                context += delta.token_ids
                slot.context = context
                if delta.finish_reason == "length" and completion.tokens < budget:
                    delta = replace(delta, finish_reason=None)
                if stream and delta.finish_reason is None:
                    yield delta
                else:
                    deltas.append(delta)
                if delta.finish_reason is not None:
                    break
        yield joined(deltas)

    async def _piece(
        self, context: list[int], params: SamplingParams, completion: ReceivedTokens, tokens: int, slot: int
    ) -> SampleDelta:
        """Sample up to `tokens` more tokens of a completion. The finish_reason is `length` if it reaches `tokens`."""
        reply = await self._complete(context, params, tokens, slot, after=completion.tokens)
        if (reply.tokens_evaluated, reply.tokens_predicted) != (len(context), len(reply.tokens)):
            raise EngineContractError(
                f"the engine counts {reply.tokens_evaluated} prompt and {reply.tokens_predicted} completion tokens, "
                f"but it was sent {len(context)} ids and returned {len(reply.tokens)}: does it obey return_tokens?"
            )
        ids, reason, matched = _cut(reply, params.stop_token_ids)
        completion.check_ids(ids)
        scored = [
            await self._score([*context, *ids[:n]], ids[n], params.top_logprobs) if row is None else row
            for n, row in enumerate(_aligned(reply.tokens, reply.completion_probabilities)[: len(ids)])
        ]
        delta = completion.delta(ids, [row.logprob for row in scored], [row.alternatives for row in scored])
        if reason == "length" and len(ids) < tokens and len(context) + len(ids) < self.info.max_context:
            raise EngineContractError(
                f"the engine stopped for length after {len(ids)} of {tokens} tokens, before its context was full"
            )
        return replace(delta, finish_reason=reason, stop=completion.stop(reason, matched))

    async def _score(self, context: list[int], token_id: int, top: int) -> _Probability:
        """Return the log-probability that the server did not report with the id that it sampled after `context`.

        Sample the position again with enough alternatives, and with a bias towards a token that the server reports.
        """
        params = SamplingParams(max_tokens=1, temperature=0)
        for count in (_LIKELY, self.info.vocab_size + _LIKELY):
            bias = [[self._plain_id, _CERTAIN]]
            reply = await self._complete(context, params, 1, -1, after=0, logit_bias=bias, n_probs=count)
            for row in reply.completion_probabilities:
                for alternative in row.top_logprobs:
                    if alternative.id == token_id:
                        return _Probability(token_id, alternative.logprob, row.top_logprobs[: max(top, 1)])
        raise EngineContractError(f"the engine reported no log-probability for id {token_id}, which it sampled")

    async def _complete(
        self, context: list[int], params: SamplingParams, tokens: int, slot: int, *, after: int, **more: object
    ) -> _LlamaCppReply:
        """Request one piece. The request sets every field that has a default in the server."""
        # Each piece gets its own seed, because another call may have advanced the server's random state.
        seed = -1 if params.seed is None else (params.seed + after) % _SEEDS
        body: dict[str, object] = {
            "prompt": context,
            "n_predict": tokens,
            "n_cmpl": 1,
            "stream": False,
            "return_tokens": True,
            "n_probs": max(params.top_logprobs, 1),
            "post_sampling_probs": False,
            "id_slot": slot,
            "cache_prompt": True,
            # Don't reuse cached tokens at shifted positions: their keys and values are not exact for this context.
            "n_cache_reuse": 0,
            # Use the same order as the other engines. The server's default applies temperature last.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": self.info.max_context,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "min_keep": 0,
            "backend_sampling": False,
            "logit_bias": [],
            "ignore_eos": False,
            "seed": seed,
            "stop": params.stop_strings,
            "n_indent": 0,
            "t_max_predict_ms": -1,
            "reasoning_budget_tokens": -1,
            "response_fields": list(_LlamaCppReply.__struct_fields__),
        }
        if params.json_schema is not None:
            body["json_schema"] = msgspec.Raw(params.json_schema.encode())
        reply = await self.http.post("/completion", msgspec.json.encode(body | more), {})
        return decode(reply, _LlamaCppReply, "llama-server")

    async def _probe(self, rows: int) -> None:
        """Sample one token to check the reply. Alternatives may be ids of embedding padding, below `rows`."""
        params = SamplingParams(max_tokens=1, temperature=0, top_logprobs=2)
        context = [self._plain_id]
        reply = await self._complete(context, params, 1, -1, after=0, logit_bias=[[self._plain_id, _CERTAIN]])
        if reply.tokens != context or len(reply.completion_probabilities) != 1:
            raise EngineContractError(
                f"the engine returned {len(reply.tokens)} ids and {len(reply.completion_probabilities)} "
                "log-probabilities for one token; expected the one that logit_bias made certain"
            )
        (row,) = reply.completion_probabilities
        ReceivedTokens(params, rows).delta(reply.tokens, [row.logprob], [row.alternatives])


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Settings
    total_slots: int
    build_info: str


class _LlamaCppTokens(msgspec.Struct):
    tokens: list[int]


class _Alternative(msgspec.Struct):
    id: int
    logprob: float


class _Probability(msgspec.Struct):
    id: int
    logprob: float
    top_logprobs: list[_Alternative]

    @property
    def alternatives(self) -> list[tuple[int, float | None]]:
        return [(other.id, other.logprob) for other in self.top_logprobs]


class _LlamaCppReply(msgspec.Struct):
    """The reply fields that `response_fields` requests. All other fields, such as the prompt's text, are omitted."""

    tokens: list[int]
    tokens_evaluated: int
    tokens_predicted: int
    stop_type: str
    stopping_word: str = ""
    completion_probabilities: list[_Probability] = []


@dataclass(slots=True, eq=False)
class _Slot:
    """A server slot and the context cached in it."""

    number: int
    context: Sequence[int] = ()


class _Slots:
    """The server's slots. A call keeps one slot for all pieces: the free slot with most of its context cached."""

    def __init__(self, count: int) -> None:
        self._free = [_Slot(number) for number in range(max(count, 1))]
        self._one_is_free = asyncio.Semaphore(len(self._free))

    @asynccontextmanager
    async def taken(self, context: list[int]) -> AsyncGenerator[_Slot, None]:
        """Wait for a free slot, and reserve it until the `with` block ends."""
        async with self._one_is_free:
            best = max(self._free, key=lambda slot: common_prefix(slot.context, context))
            self._free.remove(best)
            try:
                yield best
            finally:
                self._free.append(best)


def _cut(reply: _LlamaCppReply, stop_ids: Sequence[int]) -> tuple[list[int], FinishReason, int | str | None]:
    """Return the reply's ids up to the first stop id, the finish reason, and the matched stop.

    The server does not know the stop ids and may sample tokens after them. These don't affect the ids before them.
    """
    for position, token_id in enumerate(reply.tokens):
        if token_id in stop_ids:
            return reply.tokens[: position + 1], "stop", token_id
    match reply.stop_type:
        case "eos":
            return reply.tokens, "stop", reply.tokens[-1] if reply.tokens else None
        case "word":
            return reply.tokens, "stop", reply.stopping_word
        case "limit":
            return reply.tokens, "length", None
        case _:
            raise EngineContractError(
                f"the engine finished with {safe_name(reply.stop_type) or 'an unknown stop_type'}; expected eos, word "
                "or limit"
            )


def _aligned(ids: Sequence[int], reported: Sequence[_Probability]) -> list[_Probability | None]:
    """Return for each id its entry of `reported`, or None if the server may have omitted it.

    `reported` has entries for some of the ids, in the same order. An entry that could belong to either of two equal
    ids is not used: matching from the front and from the back must return the same entry.
    """
    front = _matched(ids, reported)
    back = _matched(ids[::-1], reported[::-1])[::-1]
    return [entry if entry is other else None for entry, other in zip(front, back, strict=True)]


def _matched(ids: Sequence[int], reported: Sequence[_Probability]) -> list[_Probability | None]:
    rest = deque(reported)
    return [rest.popleft() if rest and rest[0].id == token_id else None for token_id in ids]
