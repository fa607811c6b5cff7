"""OpenAI's completions, for callers that build their own prompts: text or token ids in, text or token ids out.

The protocol is https://platform.openai.com/docs/api-reference/completions as the `openai` package speaks it, with the
extensions of vLLM, so that vLLM's clients work. docs/how-to/connect-an-agent.md has the choices that it leaves open.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape._version import __version__
from tokentape.engines._base import SampleDelta
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._dialect import DecodedRequest, Dialect, DoneChoice, RequestContext
from tokentape.gateway._endpoint import Gateway
from tokentape.gateway._events import TurnDelta, TurnDone, TurnRequest, TurnStarted
from tokentape.gateway._http import json_response, read_as
from tokentape.gateway._openapi import also_below_sessions
from tokentape.gateway._pins import Count
from tokentape.gateway._wire import shared_fields as shared
from tokentape.types import TokenIds

IGNORED = frozenset({"request_id", "service_tier", "spaces_between_special_tokens", "user"})
"""Fields that are accepted and have no effect: none of them changes what is sampled."""


class CompletionsStreamOptions(shared.StreamOptions):
    continuous_usage_stats: bool | None = False


class CompletionsBody(shared.ChoicesBody, kw_only=True):
    """A request's fields."""

    prompt: str | list[Any]
    stream_options: CompletionsStreamOptions | None = None
    max_tokens: Count = 16
    logprobs: shared.TopLogprobs | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str = ""
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False


class _Ids(Struct):
    prompt: Annotated[list[shared.TokenId], Meta(min_length=1)]


class Completions(Dialect):
    path = "/v1/completions"
    summary = "OpenAI's completions"
    body, ignored, lists = CompletionsBody, IGNORED, ()
    names: ClassVar[Mapping[str, str]] = {**Dialect.names, "top_logprobs": "logprobs"}

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        read, _ = shared.read_fields(body, CompletionsBody, IGNORED, "prompt")
        _refuse_unserved(read)
        schema = shared.json_schema(read.response_format, "response_format", context)
        more = {"min_tokens": read.min_tokens, "json_schema": schema}
        turn = TurnRequest(
            session_id=context.session_id,
            messages=(),
            tools=(),
            template_kwargs={},
            sampling=shared.sampling_params(read, context, self.names, read.max_tokens, read.logprobs or 0, **more),
            n=read.n,
            stream=read.stream,
            prompt_ids=await self._prompt_ids(read, context.vocab_size),
            ignore_eos=read.ignore_eos,
        )
        ignored = tuple(shared.ignored_fields(read, context, self.model_id))
        return DecodedRequest(turn, partial(_Encoder, self, read, ignored), ignored)

    async def _prompt_ids(self, body: CompletionsBody, vocab_size: int) -> TokenIds:
        prompt = _single_prompt(body.prompt)
        if isinstance(prompt, str):
            # The caller rendered the prompt, so control tokens in it count as such.
            encode = self.tokenizer.encode_plain
            ids = await asyncio.to_thread(encode, prompt, add_special_tokens=body.add_special_tokens)
            if not ids:
                raise InvalidRequest("prompt has no tokens; expected at least one", "prompt")
        else:
            ids = read_as({"prompt": prompt}, _Ids).prompt
        return shared.known_ids(ids, vocab_size, "prompt")


def _single_prompt(prompt: str | list[Any]) -> str | list[Any]:
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        if len(prompt) > 1:
            raise UnsupportedParameter(
                f"prompt holds {len(prompt)} prompts; a call takes one. Send a call for each, or n for several "
                "completions of one prompt",
                "prompt",
            )
        only: str | list[Any] = prompt[0]
        return only
    return prompt


def _refuse_unserved(body: CompletionsBody) -> None:
    spelled = "together, skip_special_tokens: false and include_stop_str_in_output: true"
    continuous = body.stream_options is not None and body.stream_options.continuous_usage_stats
    shared.refuse_unserved(
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
    tail: str = ""
    """The end of the text, long enough to contain the start of a stop string."""
    offset: int = 0
    """Number of characters in the tokens sent, each decoded separately."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def rest(self) -> str:
        """Return the text of the last bytes, which don't form a complete character."""
        return self.decoder.decode(b"", final=True)


_NOTHING = {"logprobs": None, "finish_reason": None, "stop_reason": None}
"""Fields that clients expect in every chunk."""


class _Encoder(shared.ChoicesEncoder[CompletionsBody]):
    _id, _whole, _chunks = "cmpl", "text_completion", "text_completion"

    def __init__(self, dialect: Dialect, body: CompletionsBody, ignored: Sequence[str], started: TurnStarted) -> None:
        super().__init__(dialect, body, ignored, started)
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        self._longest_stop = max(map(len, stops), default=1)
        self._spells_all = body.include_stop_str_in_output
        self._progress: dict[int, _Progress] = {}
        """The progress of each choice's stream."""

    def _choice(self, choice: DoneChoice) -> dict[str, Any]:
        so_far = _Progress()
        text = choice.done.reply.content
        if self._spells_all:
            text = "".join(self._spelled(so_far, delta) for delta in choice.sampled) + so_far.rest()
        return {
            "index": choice.done.choice,
            "text": text,
            "logprobs": None,
            **self._sampled_fields(so_far, choice.sampled),
            **self._end(choice.done),
            **self._prompt_fields(),
        }

    def grow(self, event: TurnDelta | TurnDone) -> Iterator[bytes]:
        more: dict[str, Any] = {} if event.choice in self._progress else self._prompt_fields()
        so_far = self._progress.setdefault(event.choice, _Progress())
        if isinstance(event, TurnDone):
            text, more = so_far.rest() if self._spells_all else event.rest.content, {}
        else:
            text = self._spelled(so_far, event.sampled) if self._spells_all else event.reply.content
            more = {**self._sampled_fields(so_far, [event.sampled]), **more}
        if text or more:
            yield self._chunk({**_NOTHING, "index": event.choice, "text": text, **more})

    def _finish(self, done: TurnDone) -> bytes:
        return self._chunk({**_NOTHING, "index": done.choice, "text": "", **self._end(done)})

    def _end(self, done: TurnDone) -> dict[str, Any]:
        stop = done.turn.stop
        # As in vLLM, a stop id that the request does not list (the model's own) has no stop_reason.
        requested = isinstance(stop, str) or stop in self._body.stop_token_ids
        return {
            "finish_reason": done.finish,
            "stop_reason": stop if requested else None,
            "tokentape": self._recorded(done.turn),
        }

    def _sampled_fields(self, so_far: _Progress, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.logprobs is not None:
            fields["logprobs"] = self._logprobs(so_far, sampled)
        if self._body.return_token_ids:
            fields["token_ids"] = [token_id for delta in sampled for token_id in delta.token_ids]
        return fields

    def _logprobs(self, so_far: _Progress, sampled: Sequence[SampleDelta]) -> dict[str, Any]:
        """Return parallel lists over the tokens. Alternatives always include the sampled token."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        logprobs = [logprob for delta in sampled for logprob in delta.logprobs]
        for delta in sampled:
            for index, pair in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
                tokens.append(self._name(pair[0]))
                offsets.append(so_far.offset)
                so_far.offset += len(self._spelling(pair[0]))
                alternatives = delta.top_logprobs[index] if delta.top_logprobs else ()
                # Best first. Among alternatives with the same text, the first is kept.
                tops.append({self._name(alternative): value for alternative, value in reversed([*alternatives, pair])})
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else self._spelling(token_id)

    def _spelling(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _spelled(self, so_far: _Progress, sampled: SampleDelta) -> str:
        """Return the text of newly sampled tokens, with control tokens, up to the end of a stop string."""
        fresh = so_far.decoder.decode(b"".join(map(self._tokenizer.token_bytes, sampled.token_ids)))
        text, before = so_far.tail + fresh, len(so_far.tail)
        so_far.tail = text[-self._longest_stop :]
        if isinstance(sampled.stop, str) and sampled.stop in text:
            end = text.index(sampled.stop) + len(sampled.stop)
            return text[before : max(end, before)]
        return fresh


class TokenizeBody(Struct, kw_only=True):
    """The body of /tokenize, with a prompt as in /v1/completions."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: Annotated[list[shared.TokenId], Meta(max_length=2**24)]
    model: str = ""


def routes(gateway: Gateway) -> list[Route]:
    """Return the endpoints /version, /tokenize and /detokenize, at vLLM's paths."""
    turns = gateway.turns
    tokenizer = turns.renderer.tokenizer

    async def version(request: Request) -> Response:
        return json_response({"version": f"tokentape-{__version__}"})

    async def tokenize(request: Request) -> Response:
        gateway.caller(request)
        body, _ = shared.read_fields(await gateway.json(request), TokenizeBody, frozenset(), "prompt")
        special = body.add_special_tokens
        ids = await asyncio.to_thread(tokenizer.encode_plain, body.prompt, add_special_tokens=special)
        reply: dict[str, Any] = {"count": len(ids), "max_model_len": turns.engine.info.max_context, "tokens": ids}
        if body.return_token_strs:
            reply["token_strs"] = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
        return json_response(reply)

    async def detokenize(request: Request) -> Response:
        gateway.caller(request)
        body, _ = shared.read_fields(await gateway.json(request), DetokenizeBody, frozenset(), "tokens")
        shared.known_ids(body.tokens, tokenizer.vocab_size, "tokens")
        return json_response({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    return [
        *also_below_sessions("GET", "/version", version, "The gateway's version"),
        *also_below_sessions("POST", "/tokenize", tokenize, "A text's token ids", body=TokenizeBody),
        *also_below_sessions("POST", "/detokenize", detokenize, "The text of token ids", body=DetokenizeBody),
    ]
