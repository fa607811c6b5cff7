"""OpenAI's completions, for callers that make their own prompts: text or token ids in, text or token ids out.

The protocol is https://platform.openai.com/docs/api-reference/completions as the `openai` package speaks it, with the
extensions of vLLM, so that a client that expects its contract works against us. What is not known is refused by name.

Choices where the protocol leaves some:

- One prompt per call. Several texts or several lists of ids are refused: they would be turns of one session at once.
- A prompt of ids is sent as it is. A turn whose context and completion begin it is continued, a chat's turn too.
- A prompt of text is the caller's own rendering: control tokens that it spells are control tokens, and the tokenizer's
  special tokens are put around it unless `add_special_tokens` is false, as vLLM does.
- Nothing is parsed: the reply is text. Special tokens, the stop token and stop strings are left out of it. With both
  `skip_special_tokens: false` and `include_stop_str_in_output: true` all of them are in it.
- `logprobs` has one entry per sampled id, the stop token included. `text_offset` counts in the tokens' own spelling,
  as vLLM's does. Alternatives that spell alike are one key; `return_tokens_as_token_ids` names all by their ids.
- With `ignore_eos` the model's own stop ids don't end the completion; only `stop` and `stop_token_ids` do.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SampleDelta
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._endpoint import DecodedRequest, DoneChoice, RequestContext
from tokentape.gateway._events import TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._http import encode_event, read_as
from tokentape.gateway._pins import Count
from tokentape.gateway._wire.openai_fields import (
    OpenAIDialect,
    SamplingFields,
    TokenId,
    TopLogprobs,
    ignored_scheduling,
    json_schema,
    read_fields,
    recorded,
    refuse_unserved,
    sampling_params,
    usage,
)
from tokentape.types import TokenIds

MAX_CHOICES = 16

IGNORED = frozenset({"request_id", "service_tier", "spaces_between_special_tokens", "user"})
"""Fields that are accepted and have no effect: none of them changes what is sampled."""


class _StreamOptions(Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionsBody(SamplingFields, kw_only=True):
    """A request's fields."""

    prompt: str | list[Any]
    max_tokens: Count = 16
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stream_options: _StreamOptions | None = None
    logprobs: TopLogprobs | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str = ""
    logit_bias: Any = None
    response_format: Any = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False


class _Ids(Struct):
    prompt: Annotated[list[TokenId], Meta(min_length=1)]


class Completions(OpenAIDialect):
    """The dialect. `model_id` is the model's name in replies."""

    path = "/v1/completions"
    summary = "OpenAI's completions"
    body, ignored = CompletionsBody, IGNORED

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        """Read a request body. Raises `InvalidRequest` and `UnsupportedParameter` naming the parameter."""
        read, _ = read_fields(body, CompletionsBody, IGNORED, "prompt")
        _refuse_unserved(read)
        sampling = sampling_params(
            read,
            context,
            max_tokens=read.max_tokens,
            top_logprobs=read.logprobs or 0,
            min_tokens=read.min_tokens,
            schema=json_schema(read.response_format, "response_format", context),
            names={"top_logprobs": "logprobs"},
        )
        turn = TurnRequest(
            session_id=context.session_id,
            messages=(),
            tools=(),
            template_kwargs={},
            sampling=sampling,
            n=read.n,
            stream=read.stream,
            prompt_ids=await self._prompt_ids(read, context.vocab_size),
            ignore_eos=read.ignore_eos,
        )
        ignored = tuple(ignored_scheduling(read, context.engine))
        return DecodedRequest(
            turn, lambda started: _Encoder(read, started, self._model_id, self._tokenizer, ignored), ignored
        )

    async def _prompt_ids(self, body: CompletionsBody, vocab_size: int) -> TokenIds:
        prompt = _one_prompt(body.prompt)
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(text_ids, self._tokenizer, prompt, add_special_tokens=body.add_special_tokens)
            if not ids:
                raise InvalidRequest("prompt has no tokens; expected one or more", "prompt")
        else:
            ids = read_as({"prompt": prompt}, _Ids).prompt
        return known_ids(ids, vocab_size, "prompt")


def text_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a prompt that the caller wrote whole, control tokens included."""
    return tokenizer.encode_plain(text, add_special_tokens=add_special_tokens)


def known_ids(ids: Sequence[int], vocab_size: int, param: str) -> TokenIds:
    """`ids` as an array. Raises `InvalidRequest` naming `param` if one is outside the vocabulary."""
    array = np.array(ids, dtype=np.int32)
    if len(array) and array.max() >= vocab_size:
        raise InvalidRequest(f"{param} holds an id outside the vocabulary of {vocab_size}", param)
    return array


def _one_prompt(prompt: str | list[Any]) -> str | list[Any]:
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise UnsupportedParameter(
                f"prompt holds {len(prompt)} prompts; a call takes one. Send a call for each, or n for several "
                "completions of one prompt",
                "prompt",
            )
        one: str | list[Any] = prompt[0]
        return one
    return prompt


def _refuse_unserved(body: CompletionsBody) -> None:
    spelled = "together, skip_special_tokens: false and include_stop_str_in_output: true"
    continuous = body.stream_options is not None and body.stream_options.continuous_usage_stats
    refuse_unserved(
        {
            "echo": (not body.echo, "false"),
            "best_of": (body.best_of in (None, body.n), "the value of n"),
            "suffix": (not body.suffix, "an empty string"),
            "logit_bias": (body.logit_bias in (None, {}), "an empty object"),
            "prompt_logprobs": (body.prompt_logprobs is None, "null"),
            "stream_options": (not continuous, "continuous_usage_stats: false"),
            "skip_special_tokens": (body.skip_special_tokens != body.include_stop_str_in_output, spelled),
        }
    )


@dataclass(slots=True)
class _Progress:
    """What was sent of one choice."""

    tail: str = ""
    """The end of the text, as long as a stop string may have begun there."""
    offset: int = 0
    """Characters of the tokens sent, each spelled on its own."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class _Encoder:
    """Writes the replies to one request."""

    def __init__(
        self,
        body: CompletionsBody,
        started: TurnStarted,
        model_id: str,
        tokenizer: Tokenizer,
        ignored: Sequence[str],
    ) -> None:
        self._body = body
        self._ignored = ignored
        self._tokenizer = tokenizer
        self._prompt_ids = started.prompt_ids
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        self._longest_stop = max(map(len, stops), default=1)
        self._head = {
            "id": f"cmpl-{started.reply_id}",
            "object": "text_completion",
            "created": int(started.created_at),
            "model": model_id,
        }

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        written = [self._choice(choice) for choice in choices]
        counts = usage(self._prompt_ids, [choice.done for choice in choices], self._tokenizer)
        return {**self._head, "choices": written, "usage": counts}

    async def stream(self, events: AsyncGenerator[TurnEvent]) -> AsyncGenerator[bytes]:
        """The events of a stream: deltas, and when all is recorded how each choice ended."""
        progress = [_Progress() for _ in range(self._body.n)]
        done: list[TurnDone] = []
        opened: set[int] = set()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TurnStarted):
                    continue
                so_far, more = progress[event.choice], {}
                if isinstance(event, TurnDone):
                    done.append(event)
                    text = self._rest(so_far) if self._spells_all else event.rest.content
                else:
                    text = self._spelled(so_far, event.sampled) if self._spells_all else event.reply.content
                    more = self._sampled_fields(so_far, [event.sampled])
                    if self._body.return_token_ids and event.choice not in opened:
                        more["prompt_token_ids"] = self._prompt_ids.tolist()
                    opened.add(event.choice)
                if text or more:
                    yield self._chunk({"index": event.choice, "text": text, **more})
        for one in sorted(done, key=lambda one: one.choice):
            yield self._chunk({"index": one.choice, "text": "", **self._end(one)})
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield encode_event({**self._head, "choices": [], "usage": usage(self._prompt_ids, done, self._tokenizer)})
        yield b"data: [DONE]\n\n"

    @property
    def _spells_all(self) -> bool:
        return self._body.include_stop_str_in_output

    def _choice(self, choice: DoneChoice) -> dict[str, Any]:
        so_far = _Progress()
        if self._spells_all:
            text = "".join(self._spelled(so_far, one) for one in choice.sampled) + self._rest(so_far)
        else:
            text = choice.done.reply.content
        written = {
            "index": choice.done.choice,
            "text": text,
            "logprobs": None,
            **self._sampled_fields(so_far, choice.sampled),
            **self._end(choice.done),
        }
        if self._body.return_token_ids:
            written["prompt_token_ids"] = self._prompt_ids.tolist()
        return written

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        choice = {"logprobs": None, "finish_reason": None, "stop_reason": None, **choice}
        return encode_event({**self._head, "choices": [choice]})

    def _end(self, done: TurnDone) -> dict[str, Any]:
        stop = done.turn.stop
        # As in vLLM: a stop id that was not requested is the model's own end, and has no reason.
        asked = isinstance(stop, str) or stop in self._body.stop_token_ids
        return {
            "finish_reason": done.finish,
            "stop_reason": stop if asked else None,
            "tokentape": recorded(done.turn, self._ignored),
        }

    def _sampled_fields(self, so_far: _Progress, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        if self._body.logprobs is not None:
            written["logprobs"] = self._logprobs(so_far, sampled)
        if self._body.return_token_ids:
            written["token_ids"] = [token_id for delta in sampled for token_id in delta.token_ids]
        return written

    def _logprobs(self, so_far: _Progress, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        """Parallel lists over the tokens. The sampled one is among the alternatives, whatever its rank."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for delta in sampled:
            for at, (token_id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
                tokens.append(self._name(token_id))
                offsets.append(so_far.offset)
                so_far.offset += len(self._spelling(token_id))
                alternatives = delta.top_logprobs[at] if delta.top_logprobs else ()
                # Best first, and the first of those that spell alike stays.
                pairs = [*alternatives, (token_id, logprob)]
                tops.append({self._name(one): value for one, value in reversed(pairs)})
        logprobs = [logprob for delta in sampled for logprob in delta.logprobs]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else self._spelling(token_id)

    def _spelling(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _spelled(self, so_far: _Progress, sampled: SampleDelta) -> str:
        """Newly sampled tokens as text with nothing left out, up to the end of the stop string if there is one."""
        fresh = so_far.decoder.decode(b"".join(map(self._tokenizer.token_bytes, sampled.token_ids)))
        text, before = so_far.tail + fresh, len(so_far.tail)
        so_far.tail = text[-self._longest_stop :]
        if isinstance(sampled.stop, str) and sampled.stop in text:
            end = text.index(sampled.stop) + len(sampled.stop)
            return text[before : max(end, before)]
        return fresh

    def _rest(self, so_far: _Progress) -> str:
        return so_far.decoder.decode(b"", final=True)
