"""llama.cpp's `llama-server` over HTTP: token ids in and out through its native `/completion`.

The wire facts are in docs/engines.md. Three of them shape this module:

- Its streams leave out the ids of tokens that end within a character, so streams are never requested. A completion is
  sampled in pieces of `PIECE` tokens instead, each a whole reply that has all ids; the server keeps the context of
  one piece for the next.
- Whole replies leave out the log-probabilities of those tokens, which are then requested one by one.
- It has no stop ids. A completion ends at the ids that the model file calls end-of-generation; for other stop ids this
  engine cuts the pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

import msgspec
import numpy as np

from tokentape.engines._base import BEFORE_GRAMMAR, DISTRIBUTION, EngineInfo, SampleDelta, SamplingParams, common_prefix
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import served_cards
from tokentape.engines._remote import RemoteEngine
from tokentape.engines._replies import ReceivedTokens, decode, joined
from tokentape.engines._status_errors import safe_name
from tokentape.errors import EngineContractError
from tokentape.types import FinishReason, TokenIds

PIECE = 32
"""Tokens per reply. Each piece sends the context again: small pieces cost bytes, large ones arrive late."""

_COMPLETION = "/completion"

_SEEDS = 1 << 31

# Larger than any logit.
_CERTAIN = 1e6

# How many alternatives to request first where a log-probability is missing. A sampled token is likely to be among them;
# if it is not, all are requested.
_LIKELY = 256

# Presence and frequency penalties count the prompt's tokens here, elsewhere the completion's only.
_UNLIKE = frozenset({"presence_penalty", "frequency_penalty"})


class LlamaCppEngine(RemoteEngine):
    """A llama-server, which serves one model. Open it with `open`.

    A completion also ends at every id that the model file calls end-of-generation: that can't be switched off without
    changing the distribution. A stream has a delta per `PIECE` tokens; with `stop_strings` or a
    `json_schema`, which the server follows only within a reply, there is a single one.
    """

    def __init__(self, http: HttpClient, info: EngineInfo, *, slots: int, plain_id: int) -> None:
        super().__init__(http, info)
        self._plain_id = plain_id
        self._slots = _Slots(slots)

    @classmethod
    async def _explore(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        props = decode(await http.get("/props"), _Props, "llama-server")
        card = (await served_cards(http))[0]
        rows = 0 if card.meta is None else card.meta.n_vocab
        if rows < vocab_size:
            raise EngineContractError(
                f"the engine's model has {rows} ids, expected at least {vocab_size}; was it converted "
                "from this tokenizer?"
            )
        spelled = await http.post("/tokenize", msgspec.json.encode({"content": "a", "add_special": False}), {})
        plain = decode(spelled, _LlamaCppTokens, "llama-server").tokens
        info = EngineInfo(
            name="llamacpp",
            version=props.build_info,
            model=card.id,
            vocab_size=vocab_size,
            max_context=props.default_generation_settings.n_ctx,
            logprobs_mode="raw_logprobs",
            sampling=DISTRIBUTION - _UNLIKE | {"json_schema"},
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

        Equal seeds give equal completions, streamed or not. No more calls run at once than the server has slots: they
        would drop the context of others between two pieces. `request_id` is not sent: the server does not use it.
        """
        self._refuse(prompt_ids, params)
        completion = ReceivedTokens(params, self._info.vocab_size, own_stops=True)
        context: list[int] = np.asarray(prompt_ids).tolist()
        budget = min(params.max_tokens, self._info.max_context - len(context))
        async with self._slots.taken(context) as slot:
            held: list[SampleDelta] = []
            while True:
                left = budget - completion.tokens
                # A schema and stop strings are followed within one reply only.
                piece = left if params.stop_strings or params.json_schema else min(left, PIECE)
                delta = await self._piece(context, params, completion, piece, slot.number)
                context += delta.token_ids
                slot.context = context
                if delta.finish_reason == "length" and completion.tokens < budget:
                    delta = replace(delta, finish_reason=None)
                if stream and delta.finish_reason is None:
                    yield delta
                else:
                    held.append(delta)
                if delta.finish_reason is not None:
                    break
        yield joined(held)

    async def _piece(
        self, context: list[int], params: SamplingParams, completion: ReceivedTokens, tokens: int, slot: int
    ) -> SampleDelta:
        """Return the next tokens of a completion, with `length` if the server sampled `tokens` of them."""
        body = self._request_body(context, params, tokens, slot, after=completion.tokens)
        reply = decode(await self._http.post(_COMPLETION, body, {}), _LlamaCppReply, "llama-server")
        if (reply.tokens_evaluated, reply.tokens_predicted) != (len(context), len(reply.tokens)):
            raise EngineContractError(
                f"the engine counts {reply.tokens_evaluated} prompt and {reply.tokens_predicted} completion tokens; "
                f"{len(context)} were sent and {len(reply.tokens)} came back (return_tokens)"
            )
        ids, reason, matched = _cut(reply, params.stop_token_ids)
        completion.check_ids(ids)
        rows = _aligned(reply.tokens, reply.completion_probabilities)[: len(ids)]
        for position, row in enumerate(rows):
            if row is None:
                rows[position] = await self._score([*context, *ids[:position]], ids[position], params.top_logprobs)
        known = [row for row in rows if row is not None]
        delta = completion.delta(ids, [row.logprob for row in known], [row.alternatives for row in known])
        if reason == "length" and len(ids) < tokens and len(context) + len(ids) < self._info.max_context:
            raise EngineContractError(f"the engine stopped after {len(ids)} of {tokens} tokens, with room for more")
        return replace(delta, finish_reason=reason, stop=completion.stop(reason, matched))

    async def _score(self, context: list[int], token_id: int, top: int) -> _Probability:
        """Return the log-probability of an id that the server sampled after `context` without reporting it.

        The same position is sampled again, biased to a token that it does report, with enough alternatives.
        """
        params = SamplingParams(max_tokens=1, temperature=0)
        for count in (_LIKELY, self._info.vocab_size + _LIKELY):
            bias = {"logit_bias": [[self._plain_id, _CERTAIN]], "n_probs": count}
            body = self._request_body(context, params, 1, -1, after=0, **bias)
            reply = decode(await self._http.post(_COMPLETION, body, {}), _LlamaCppReply, "llama-server")
            for row in reply.completion_probabilities:
                for one in row.top_logprobs:
                    if one.id == token_id:
                        return _Probability(token_id, one.logprob, row.top_logprobs[: max(top, 1)])
        raise EngineContractError(f"the engine reported no log-probability for id {token_id}, which it sampled")

    def _request_body(
        self, context: list[int], params: SamplingParams, tokens: int, slot: int, *, after: int, **more: object
    ) -> bytes:
        """Return the body of one piece: every field that a server's default could otherwise fill in."""
        # A server in the state of another piece would go on with other random numbers: one seed per piece.
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
            # Cached pieces moved to other positions are not the context that was sent.
            "n_cache_reuse": 0,
            # The order in which other engines apply them; by default temperature comes last.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": self._info.max_context,
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
        return msgspec.json.encode(body | more)

    async def _probe(self, rows: int) -> None:
        """Sample one token; the ids of the padding, if the model file has any, may come up and do not matter."""
        params = SamplingParams(max_tokens=1, temperature=0, top_logprobs=2)
        context = [self._plain_id]
        body = self._request_body(context, params, 1, -1, after=0, logit_bias=[[self._plain_id, _CERTAIN]])
        reply = decode(await self._http.post(_COMPLETION, body, {}), _LlamaCppReply, "llama-server")
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
    """What is asked for of a reply; `response_fields` leaves out the rest, the prompt's text among it."""

    tokens: list[int]
    tokens_evaluated: int
    tokens_predicted: int
    stop_type: str
    stopping_word: str = ""
    completion_probabilities: list[_Probability] = []


class _Slot:
    """One of the server's slots, and the context that it holds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.context: Sequence[int] = ()


class _Slots:
    """The server's slots. A call keeps one for all its pieces, if it can the one that holds most of its context."""

    def __init__(self, count: int) -> None:
        self._free = [_Slot(number) for number in range(max(count, 1))]
        self._one_is_free = asyncio.Semaphore(len(self._free))

    @asynccontextmanager
    async def taken(self, context: list[int]) -> AsyncGenerator[_Slot, None]:
        """A slot for as long as the context lasts; waits for one."""
        async with self._one_is_free:
            best = max(self._free, key=lambda slot: common_prefix(slot.context, context))
            self._free.remove(best)
            try:
                yield best
            finally:
                self._free.append(best)


def _cut(reply: _LlamaCppReply, stop_ids: Sequence[int]) -> tuple[list[int], FinishReason, int | str | None]:
    """The reply's ids up to the first stop id, and how they end.

    What the server sampled after a stop id that it does not know is no part of the completion: the ids before
    would have been the same.
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
    """For each id its report, None where the server may have left it out.

    The reports are some of the ids in their order. Where it is not clear which of two equal ids a report is of,
    it is of neither: matched from the front and from the back, they must meet.
    """
    front = _matched(ids, reported)
    back = _matched(ids[::-1], reported[::-1])[::-1]
    return [one if one is not None and one is other else None for one, other in zip(front, back, strict=True)]


def _matched(ids: Sequence[int], reported: Sequence[_Probability]) -> list[_Probability | None]:
    rest = iter(reported)
    following = next(rest, None)
    matched: list[_Probability | None] = []
    for token_id in ids:
        if following is not None and following.id == token_id:
            matched.append(following)
            following = next(rest, None)
        else:
            matched.append(None)
    return matched
