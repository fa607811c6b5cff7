"""Render, bridge and parse with an object from the `renderers` library, or one with the same methods.

The object decides how messages become ids. Training requires bridges that keep the context's ids, so each of its
bridges is checked for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Continuation, Strategy
from tokentape.chat._media import ImageProcessor, image_parts
from tokentape.chat._overrides import Completion, Overrides, call_of, parse_whole
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._reply import Reply, ToolCall
from tokentape.chat._template import ChatTemplate, plain_message
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, InvariantViolation, TemplateRefused
from tokentape.types import Message, Provenance, Setup, TokenIds, Tool


class RendererObject(Protocol):
    """The methods that a renderer object needs, as in `renderers` 0.1.12. That library is not imported."""

    def render_ids(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Sequence[int]:
        """Return the ids of a conversation."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return the ids of prompt, completion and new messages, or an object with `token_ids`.

        Return None if these messages can't be bridged.
        """
        ...

    def parse_response(self, token_ids: list[int]) -> Any:
        """Return an object with `content`, `reasoning_content` and `tool_calls`."""
        ...


class ExternalRenderer(Renderer):
    """A `Renderer` that renders, bridges and parses with the object passed as `Overrides.renderer`.

    All tokens get the provenance TEMPLATE because the object does not tell who wrote them. Images are refused.
    """

    is_external = True

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, overrides: Overrides, images: ImageProcessor | None = None
    ) -> None:
        if overrides.parser is None:
            overrides = replace(overrides, parser=parse_whole(self, self.parse))
        super().__init__(tokenizer, template, overrides, images)
        assert overrides.renderer is not None
        self._object: RendererObject = overrides.renderer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Setup = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        **_: object,
    ) -> PromptTokens:
        """Return the ids of a conversation, ending with the generation prompt. Sampled ids are not spliced in."""
        setup = self.setup_of(tools, template_kwargs, date)
        _refuse_images(messages)
        ids = self._object.render_ids(_plain(messages), tools=_tools(setup), add_generation_prompt=True)
        return _added(self._ids(ids))

    def bridge(
        self,
        completion_ids: TokenIds,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        history: Sequence[Message] | None = None,
        context_ids: TokenIds | None = None,
    ) -> PromptTokens:
        """Return the ids to append to `context_ids`, which end with `completion_ids`.

        Raises `TemplateRefused` if the object can't bridge these messages, and `InvariantViolation` if its bridge
        changes the context's ids or if `context_ids` is None.
        """
        _refuse_images(new_messages)
        if context_ids is None:
            raise InvariantViolation("a renderer that overrides ours needs the context's ids; pass `context_ids`")
        prompt_ids = context_ids[: len(context_ids) - len(completion_ids)]
        result = self._object.bridge_to_next_turn(
            prompt_ids.tolist(), completion_ids.tolist(), _plain(new_messages), tools=_tools(setup)
        )
        name = type(self._object).__name__
        if result is None:
            roles = ", ".join(message["role"] for message in new_messages)
            raise TemplateRefused(f"the overriding renderer {name} has no bridge for messages with roles {roles}")
        ids = self._ids(getattr(result, "token_ids", result))
        beginning = ids[: len(context_ids)]
        if not np.array_equal(beginning, context_ids):
            same = beginning == context_ids[: len(beginning)]
            index = len(beginning) if same.all() else int(np.argmin(same))
            raise InvariantViolation(
                f"the overriding renderer {name} does not keep the context: it returned {len(ids)} ids "
                f"for a context of {len(context_ids)}, and they differ from position {index} on "
                f"({'in the prompt' if index < len(prompt_ids) else 'in the completion'}). It must return the whole "
                "context, followed by the new ids."
            )
        return _added(ids[len(context_ids) :])

    def parse(self, completion: Completion) -> Reply:
        """Return the reply that the object parses from a completion."""
        parsed = self._object.parse_response(list(completion.ids))
        tool_names = {tool["function"]["name"] for tool in completion.setup.tools}
        return Reply(
            content=parsed.content or "",
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(_call(call, tool_names, len(completion.ids)) for call in parsed.tool_calls or ()),
            reasoning_open=getattr(parsed, "reasoning_complete", True) is False,
        )

    def continuation(self, setup: Setup, name: str) -> Continuation:
        """Compare the object's bridges for one kind of new messages (see `grammar.conversations`) with full renderings.

        The strategy is `fork` if the object renders a conversation that it can't bridge, and `refused` if a bridge
        changes the context's ids or if the object renders no conversation.
        """
        strategy: Strategy = "local"
        refusal = "the renderer accepted no conversation with it"
        tried = 0
        rewritten: tuple[str, tuple[Message, ...]] | None = None
        for conversation in grammar.conversations(name):
            history, reply, new = conversation
            whole = conversation.messages
            try:
                completion_ids = self._completion(setup, history, reply)
                context_ids = np.concatenate([self.render(history, setup).ids, completion_ids])
                full_ids = self.render(whole, setup).ids
                added = self.bridge(completion_ids, reply, new, setup, context_ids=context_ids)
            except InvariantViolation as error:
                return Continuation(name, "refused", "no", tried, str(error), whole)
            except TemplateRefused as error:
                strategy, added = "fork", None
                rewritten = rewritten or (str(error), whole)
            except Exception as error:  # the object may raise any exception for messages that it does not accept
                refusal = f"the overriding renderer failed with {type(error).__name__}"
                continue
            tried += 1
            if added is not None and not np.array_equal(np.concatenate([context_ids, added.ids]), full_ids):
                rewritten = rewritten or ("it renders the whole conversation differently than it bridges it", whole)
        if not tried:
            return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
        if rewritten is None:
            return Continuation(name, strategy, append_only="yes", tried=tried, reason="")
        return Continuation(name, strategy, "no", tried, *rewritten)

    def _ids(self, returned: Sequence[int] | TokenIds) -> TokenIds:
        """Return ids from the object as an array. Raises `InvariantViolation` unless the tokenizer has each of them."""
        try:
            ids = self.tokenizer.array(returned)
        except (InvalidRequest, ValueError) as error:
            raise InvariantViolation(f"the overriding renderer did not return token ids: {error}") from error
        if ids.size and ids.max() >= self.tokenizer.vocab_size:
            raise InvariantViolation(
                f"the overriding renderer returned the id {ids.max()}; expected 0 to {self.tokenizer.vocab_size - 1}"
            )
        return ids

    def _completion(self, setup: Setup, history: Sequence[Message], reply: Message) -> TokenIds:
        """Return the ids that the object renders for `reply` after its prompt, through the first stop token.

        If the rendering does not begin with the prompt, return the content's ids and a stop token.
        """
        prompt_ids = self.render(history, setup).ids.tolist()
        rendered = list(self._object.render_ids(_plain([*history, reply]), tools=_tools(setup)))
        stop_ids = self.stop_ids(setup)
        if rendered[: len(prompt_ids)] == prompt_ids:
            turn = rendered[len(prompt_ids) :]
        else:
            turn = [*self.tokenizer.encode_after_control(reply.get("content") or "").ids, *sorted(stop_ids)[:1]]
        stops = [index for index, token_id in enumerate(turn) if token_id in stop_ids]
        return self.tokenizer.array(turn[: stops[0] + 1] if stops else turn)


def _call(call: Any, tool_names: set[str], length: int) -> ToolCall:
    status = str(getattr(call.status, "value", call.status)).lower()
    span = (0, length) if call.token_span is None else (int(call.token_span[0]), int(call.token_span[1]))
    if "unclosed" in status:
        return ToolCall(str(call.name or ""), str(call.raw), "unclosed", span)
    if call.name is None or status not in ("ok", "unknown_tool"):
        return ToolCall(str(call.name or ""), str(call.raw), "bad_arguments", span)
    return call_of(call.name, call.arguments, tool_names, span, call.id)


def _added(array: TokenIds) -> PromptTokens:
    return PromptTokens(array, np.full(len(array), Provenance.TEMPLATE, dtype=np.uint8))


def _refuse_images(messages: Sequence[Message]) -> None:
    if image_parts(messages):
        raise InvalidRequest("a message contains an image; the overriding renderer accepts only text", "messages")


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [plain_message(message) for message in messages]


def _tools(setup: Setup) -> list[Any] | None:
    return list(setup.tools) or None
