"""vLLM's `/v1/chat/completions` with token ids, for capture: the server renders the messages itself.

Chats are always streamed, because the first event then has the prompt ids, before anything is sampled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self

import msgspec

from tokentape.engines._base import CAPTURED, SampleDelta, SamplingParams, StartedCompletion
from tokentape.engines._checks import refuse_params, refuse_unsupported
from tokentape.engines._http import HttpClient
from tokentape.engines._remote import unique_id
from tokentape.engines._replies import whole
from tokentape.engines._vllm import VllmEngine, call_headers, scheduling_fields, vllm_fields
from tokentape.engines._vllm_reply import VllmReply, alternatives_to_ask
from tokentape.errors import EngineContractError, InvalidRequest
from tokentape.types import Message, Tool

_CHAT = "/v1/chat/completions"


class VllmChatServer(VllmEngine):
    """A `VllmEngine` that also accepts messages, as `ChatServer`. Open it with `open`."""

    @classmethod
    async def _connect(cls, http: HttpClient, vocab_size: int, model: str | None, *, verify_prompt: bool) -> Self:
        """See `VllmEngine`. This samples one more token, to check that chats return ids."""
        server = await super()._connect(http, vocab_size, model, verify_prompt=verify_prompt)
        probe = SamplingParams(max_tokens=1, temperature=0)
        call = await server.begin(({"role": "user", "content": "?"},), (), {}, probe, request_id="tokentape-probe")
        await whole(call.deltas)
        return server

    async def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: dict[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
    ) -> StartedCompletion:
        """Have the server render the messages and start sampling; see `ChatServer`."""
        refuse_params(params)
        refuse_unsupported(replace(params, payloads_from=None), self.info)
        unique = unique_id(request_id)
        headers = call_headers(unique, params)
        body: dict[str, object] = {
            "model": self._model_of(params),
            "messages": [_vllm_message(message) for message in messages],
            "chat_template_kwargs": template_kwargs,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
            "max_completion_tokens": params.max_tokens,
            **vllm_fields(params),
            **scheduling_fields(params),
            "logprobs": True,
            "top_logprobs": alternatives_to_ask(params),
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        if tools:
            body["tools"] = tools
        reply = VllmReply(
            params,
            self.info.vocab_size,
            path=_CHAT,
            prompt=None,
            prompt_tokens=0,
            call=unique,
            returns_prompt=True,
            own_stops=True,
        )
        deltas = self._deltas(reply, msgspec.json.encode(body), headers)
        try:
            await anext(deltas)
            prompt_ids = reply.prompt_ids
            if prompt_ids is None:
                raise EngineContractError(
                    "the server sampled before it returned prompt_token_ids; capture needs these ids (return_token_ids)"
                )
        except BaseException:
            await deltas.aclose()
            raise
        return StartedCompletion(prompt_ids, deltas)

    async def _deltas(
        self, reply: VllmReply, body: bytes, headers: dict[str, str]
    ) -> AsyncGenerator[SampleDelta, None]:
        """Yield an empty delta when the prompt ids arrive, then the completion's deltas."""
        prompt_known = False
        async with aclosing(self.http.arrivals(_CHAT, body, headers)) as arrivals:
            async for data in (event async for arrival in arrivals for event in arrival):
                delta = reply.feed(data)
                if reply.prompt_tokens and not prompt_known:
                    prompt_known = True
                    yield SampleDelta((), ())
                if delta:
                    yield replace(delta, engine=f"{self.info} {CAPTURED}")
        yield replace(reply.last(), engine=f"{self.info} {CAPTURED}")


def _vllm_message(message: Message) -> dict[str, Any]:
    """Convert a message to the server's format: arguments as JSON text, reasoning in the field `reasoning`."""
    converted = dict(message)
    if "reasoning_content" in converted:
        converted["reasoning"] = converted.pop("reasoning_content")
    if converted.get("tool_calls"):
        converted["tool_calls"] = [_vllm_tool_call(call) for call in converted["tool_calls"]]
    return converted


def _vllm_tool_call(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except (TypeError, ValueError):
            raise InvalidRequest("a tool call's arguments are not JSON; expected JSON text", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
