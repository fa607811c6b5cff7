"""A conversation of a rollout loop as exact ids, extended by certified bridges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tokentape.chat._bridge_check import check_bridge
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._reply import Reply
from tokentape.chat._strategy import choose
from tokentape.chat._template import check_objects, with_argument_objects
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.types import Codes, Logprobs, Message, Provenance, Setup, TokenIds, Tool

_NEW_CONVERSATION = "create a new conversation with all messages and `sampled=conversation.sampled`"


class Conversation:
    """The ids of one conversation: what was rendered, what was sampled, and the bridges between the two.

    Sampled ids stay as they are, and ids are only appended. The certificate selects how each bridge is computed.

    >>> conversation = Conversation(Renderer.load("path/to/model"), messages, tools)    # doctest: +SKIP
    >>> ids = sample(conversation.token_ids, stop=conversation.stop_ids)                # doctest: +SKIP
    >>> reply = conversation.add_completion(ids)                                        # doctest: +SKIP
    >>> results = [run_tool(call) for call in reply.tool_calls]                         # doctest: +SKIP
    >>> conversation.add_messages(results)                                              # doctest: +SKIP

    `tools`, `template_kwargs` and `date` are as for `Renderer.setup`. `sampled` maps indices of assistant messages to
    the ids that they were parsed from, as for `Renderer.render`. With `check_bridges`, each bridge is compared with the
    template's rendering of the whole conversation, at a cost that grows with the conversation.

    The first conversation with a model and `template_kwargs` makes the certificate, which takes seconds. It is cached
    on disk (`load_or_certify`). Raises `TemplateRefused` if the template refuses the messages.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Setup = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        sampled: Mapping[int, TokenIds] | None = None,
        check_bridges: bool = False,
    ) -> None:
        self.renderer = renderer
        self.setup = renderer.setup_of(tools, template_kwargs, date)
        check_objects(messages, "messages", key="role")
        self.messages: list[Message] = [*map(with_argument_objects, messages)]
        """All messages, the parsed replies included. The arguments of calls are objects, as templates expect them."""
        self.sampled: dict[int, TokenIds] = dict(sampled or {})
        """The sampled ids of replies, by their index in `messages`."""
        self._certificate = load_or_certify(renderer, self.setup.template_kwargs)
        self.check_bridges = check_bridges
        self._pieces = [renderer.render(self.messages, self.setup, sampled=self.sampled)]
        self._logprobs: dict[int, Logprobs] = {}
        self._completion: TokenIds | None = None

    def copy(self) -> Self:
        """Return a conversation that continues on its own, for example to sample several completions of one prompt."""
        other = copy(self)
        other.messages, other.sampled, other._pieces = [*self.messages], {**self.sampled}, [*self._pieces]
        other._logprobs = {**self._logprobs}
        return other

    @property
    def token_ids(self) -> TokenIds:
        """All ids so far, int32 [tokens]: the prompt of the next completion."""
        return np.concatenate([piece.ids for piece in self._pieces])

    @property
    def provenance(self) -> Codes:
        """A `Provenance` code for each id, uint8 [tokens]."""
        return np.concatenate([piece.provenance for piece in self._pieces])

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True for the ids that were added by `add_completion`, bool [tokens]."""
        mask: npt.NDArray[np.bool_] = self.provenance == Provenance.SAMPLED
        return mask

    @property
    def completions(self) -> list[tuple[int, int, int]]:
        """For each completion: the index of its reply in `messages`, its first token, and the end of its tokens."""
        ends = np.cumsum([len(piece.ids) for piece in self._pieces]).tolist()
        # A prompt, then completions and bridges by turns.
        return [(n, ends[k], ends[k + 1]) for k, n in zip(range(0, len(ends) - 1, 2), self._logprobs, strict=True)]

    @property
    def logprobs(self) -> Logprobs:
        """The logprobs passed to `add_completion`, float32 [tokens]: NaN if none were passed, 0.0 for other tokens."""
        logprobs = np.zeros(len(self.token_ids), np.float32)
        for n, start, end in self.completions:
            logprobs[start:end] = self._logprobs[n]
        return logprobs

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids at which sampling has to stop. The one that was sampled belongs to the completion."""
        return self.renderer.stop_ids(self.setup)

    def add_completion(
        self,
        ids: Sequence[int] | TokenIds,
        stop_strings: Sequence[str] = (),
        logprobs: Sequence[float] | Logprobs | None = None,
    ) -> Reply:
        """Append the ids of a completion, as they were sampled, and return the reply that they spell.

        Calls without an id get one. A completion that does not end with a stop id counts as truncated, and the next
        bridge ends the turn. Raises `InvalidRequest` for ids that are not whole numbers, after another completion, and
        unless `logprobs` has one finite number of at most 0 for each id.
        """
        if self._completion is not None:
            raise InvalidRequest("the last message is a reply: call add_messages before the next add_completion")
        if isinstance(stop_strings, str):
            raise InvalidRequest(f"stop_strings is {stop_strings!r}: expected a list of strings", "stop_strings")
        completion = self.renderer.tokenizer.array(ids).copy()  # the caller may use its array again
        recorded = np.full(len(completion), np.nan, np.float32)
        if logprobs is not None:
            with suppress(TypeError, ValueError):
                recorded = np.array(logprobs, np.float32)
            # Rounding puts some a little above 0.
            if recorded.shape != completion.shape or not (np.isfinite(recorded) & (recorded <= 1e-3)).all():
                raise InvalidRequest(
                    f"logprobs: expected one finite number of at most 0 for each of {len(completion)} ids, found "
                    f"{repr(logprobs)[:80]}",
                    "logprobs",
                )
        parser = self.renderer.parser(self.setup, stop_strings, self.token_ids)
        parser.feed(completion.tolist())
        _, reply = parser.finish()
        # Nine letters and digits: some templates refuse other ids.
        named = [
            replace(call, id=call.id or f"c{len(self.messages) % 10_000:04}{n:04}")
            for n, call in enumerate(reply.tool_calls)
        ]
        reply = replace(reply, tool_calls=tuple(named))
        self.sampled[len(self.messages)] = completion
        self._logprobs[len(self.messages)] = recorded
        message = with_argument_objects(reply.message())
        # Many templates accept a reply without content only if it has calls.
        self.messages.append(message if "tool_calls" in message else {**message, "content": reply.content})
        self._completion = completion
        self._pieces.append(PromptTokens(completion, np.full(len(completion), Provenance.SAMPLED, np.uint8)))
        return reply

    def add_messages(self, messages: Sequence[Message]) -> TokenIds:
        """Append the bridge for new messages after a completion, ending with the generation prompt, and return its ids.

        Raises `TemplateRefused` if nothing can be appended: the template does not accept the messages, it rewrites what
        is before them, or a checked bridge differs from its rendering. Then the conversation stays as it was. Raises
        `InvalidRequest` without messages, and unless a completion is the last that was added.
        """
        if self._completion is None:
            raise InvalidRequest("the last message is no reply: call add_completion first")
        check_objects(messages, "messages", key="role")
        if not messages:
            raise InvalidRequest("messages: found none, expected at least 1 new message", "messages")
        messages = [*map(with_argument_objects, messages)]
        *history, reply = self.messages
        strategy = choose(self.renderer, self._certificate, reply, messages, self.setup, history)
        if strategy == "fork":
            raise TemplateRefused(f"the template rewrites earlier messages before these: {_NEW_CONVERSATION}")
        real = history if strategy == "contextual" else None
        bridge = self.renderer.bridge(self._completion, reply, messages, self.setup, real, self.token_ids)
        if self.check_bridges:
            check = check_bridge(self.renderer, self.setup, history, reply, messages, self._completion, bridge)
            if check.outcome == "differs":
                raise TemplateRefused(f"the template's rendering differs from the bridge: {_NEW_CONVERSATION}")
        self._pieces.append(bridge)
        self.messages += messages
        self._completion = None
        return bridge.ids
