"""Render, bridge and parse for one model, using only its template and tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

from tokentape.chat import _grammar as grammar
from tokentape.chat._assistant_format import AssistantFormat
from tokentape.chat._bridge import overlap, repeated_end, trim_to_turn_end
from tokentape.chat._call_syntax import KEY
from tokentape.chat._caller_text import provenance_of_tokens
from tokentape.chat._channels import ChannelParser
from tokentape.chat._media import ImageProcessor, image_parts, repeat_placeholders
from tokentape.chat._overrides import Overrides, find_overrides
from tokentape.chat._parse import Parser, ReplyParser, SafeParser
from tokentape.chat._reader import Reader, read_text
from tokentape.chat._regions import RegionParser
from tokentape.chat._reply import Reply
from tokentape.chat._splice import PROMPT_END, History, StopMismatch, find_splices
from tokentape.chat._template import ChatTemplate, check_objects, check_variables, plain_message, read_source
from tokentape.chat._template_text import TemplateText, cached
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.chat._twin_proof import prove_twin
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.types import Codes, Message, Provenance, Setup, TokenIds, Tool, setup_key

_TURN_END = 96
"""The number of ids at the end of a turn that are decoded to find the close of its calls."""

_LETTER = "x"
"""Text before the close of a truncated turn when it is encoded: it follows text, but sampled ids are not re-encoded."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """Ids to append to a context and their provenance codes, both with shape [tokens]."""

    ids: TokenIds
    provenance: Codes
    stop_mismatch: bool = False
    """The previous turn ended with a different stop token than the template writes there; the sampled one is kept."""


class Renderer(TemplateText):
    """Converts messages to ids and back, for one tokenizer and one chat template.

    >>> renderer = Renderer.load("path/to/model")              # doctest: +SKIP
    >>> renderer.render([{"role": "user", "content": "hi"}], tools).ids     # doctest: +SKIP
    array([...], dtype=int32)

    Methods that take a `Setup` use its tools, kwargs and date. A different renderer may have created the setup.
    """

    is_external: ClassVar[bool] = False
    """Whether another library's object renders and bridges, see `ExternalRenderer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        overrides: Overrides | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        tokenizer = tokenizer.for_template(_spelled_by(template, tokenizer))
        super().__init__(tokenizer, template)
        if overrides is not None and overrides.renderer is not None and not self.is_external:
            raise TypeError("`overrides.renderer` needs an `ExternalRenderer`; call `Renderer.load` to create it")
        self.overrides = overrides
        self.images = images
        self.fingerprint = _fingerprint(tokenizer, template, overrides, images)
        self._setups: dict[str, Setup] = {}
        self._prompt_ids: dict[str, TokenIds] = {}
        """The usual ids of generation prompts, by their text."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a renderer without its caches, for example to use it in the workers of `datasets.map`."""
        return type(self), (self.tokenizer, self.template, self.overrides, self.images)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | Path | None = None,
        overrides: Overrides | None = None,
        images: ImageProcessor | None = None,
        *,
        strict_text: bool = False,
    ) -> Renderer:
        """Load from a model folder. `chat_template` is the path of a file that replaces the model's own template.

        `overrides` replace the parser or renderer derived from the template; the default is from `find_overrides`.
        Without `images`, messages with images are refused. For `strict_text`, see `Tokenizer.load`.

        Raises `TokenizerUnusable` if the tokenizer or template can't be loaded safely, or if keeping text and control
        tokens apart would change ids (checked by `prove_twin`, once per machine).
        """
        tokenizer = Tokenizer.load(folder, strict_text=strict_text)
        if chat_template is not None:
            template = ChatTemplate(read_source(Path(chat_template)))
        else:
            template = ChatTemplate.load(folder, tokenizer.config)
        bare = cls(tokenizer, template)
        prove_twin(bare.tokenizer)
        overrides = overrides or find_overrides(bare)
        if overrides is not None and overrides.renderer is not None:
            from tokentape.chat._external_renderer import ExternalRenderer

            return ExternalRenderer(bare.tokenizer, template, overrides, images)
        return cls(bare.tokenizer, template, overrides, images)

    def setup(
        self, tools: Sequence[Tool] = (), template_kwargs: Mapping[str, Any] | None = None, date: str | None = None
    ) -> Setup:
        """Return the tools, template kwargs and date as a `Setup`, which can be used for many calls.

        `date` is the template's current date, in ISO 8601; the default is today's date in UTC. Raises `InvalidRequest`
        if it is no date, if tools or kwargs are not JSON objects, and for kwargs that are arguments of `render`.
        """
        check_objects(tools, "tools")
        kwargs, date = template_kwargs or {}, date or datetime.now(UTC).date().isoformat()
        check_variables(kwargs, date)
        key = setup_key(tools, kwargs, date, self.fingerprint)
        return cached(self._setups, key, lambda: Setup(tuple(tools), kwargs, date, self.fingerprint))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Setup = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        sampled: Mapping[int, TokenIds] | None = None,
        prompts: Mapping[int, TokenIds] | None = None,
        history: History = "sampled",
        stop_mismatch: StopMismatch = "keep",
    ) -> PromptTokens:
        """Return the ids of a conversation, ending with the generation prompt.

        If no text spells a control token, the ids equal those from `transformers.apply_chat_template`. A control token
        that a caller's text spells is encoded as text. `tools`, `template_kwargs` and `date` are as for `setup`; a
        `Setup` passed as `tools` replaces all three.

        `sampled` maps indices of assistant messages to the sampled ids that they were parsed from. The result has these
        exact ids with provenance ASSISTANT: all of them (`history` "sampled"), or those for the text that the template
        keeps ("template"). A turn without a stop token is rendered as text if its end can't be found in the rendering.
        `prompts` has the last ids of the prompts of turns that were sampled under another setup, whose generation
        prompt may have been another one (thinking on or off).
        A turn's own stop token is kept if the template writes another one there; with `stop_mismatch` "fork" or
        `history` "template" it is replaced by the template's.

        Raises `TemplateRefused` if the template refuses the conversation or does not know one of its roles, and
        `InvalidRequest` for messages that are not dictionaries and for an index of another message in `sampled`.
        """
        setup = self.setup_of(tools, template_kwargs, date)
        self._refuse_images(messages)
        if history not in get_args(History) or stop_mismatch not in get_args(StopMismatch):
            raise InvalidRequest(
                f"history is {history!r}, stop_mismatch {stop_mismatch!r}: expected sampled or template, keep or fork"
            )
        sampled = {n: self.tokenizer.array(ids) for n, ids in (sampled or {}).items()}
        for n in sampled:
            if not (0 <= n < len(messages) and messages[n].get("role") == "assistant"):
                raise InvalidRequest(f"`sampled` has ids for message {n}, which is no assistant message", "sampled")
        text, codes = self.render_text_with_provenance(messages, setup, generate=True)
        prompts = prompts or {}
        closed = {n: self._with_part_closed(ids, setup, prompts.get(n)) for n, ids in sampled.items()}
        splices = find_splices(self, setup, text, messages, closed, prompts, history, stop_mismatch)
        marks = [match.start() for match in MARK.finditer(text)] if splices else []

        def coded(start: int, end: int) -> Codes:
            """Return the provenance of a part of the text, in which a mark counts as one."""
            return codes[start - bisect_left(marks, start) : end - bisect_left(marks, end)]

        pieces: list[PromptTokens] = []
        position, before = 0, None
        for splice in splices:
            if np.isin(coded(splice.start, splice.end), (Provenance.SYSTEM, Provenance.USER, Provenance.TOOL)).any():
                # No stop token ends the turn, and the splice would replace callers' text after it: keep the rendering.
                continue
            pieces.append(self._encode_piece(text, position, splice.start, coded(position, splice.start), before))
            provenance = np.full(len(splice.ids), Provenance.ASSISTANT, dtype=np.uint8)
            pieces.append(PromptTokens(self.tokenizer.array(splice.ids), provenance))
            position, before = splice.end, splice.ids[-1] if splice.ids else None
        pieces.append(self._encode_piece(text, position, len(text), coded(position, len(text)), before))
        ids = np.concatenate([piece.ids for piece in pieces])
        provenance = np.concatenate([piece.provenance for piece in pieces])
        return self._with_images(PromptTokens(ids, provenance), messages)

    def setup_of(
        self, tools: Sequence[Tool] | Setup, template_kwargs: Mapping[str, Any] | None, date: str | None
    ) -> Setup:
        """Return `tools` if they are a `Setup`, else the setup that `setup` makes of the arguments."""
        if not isinstance(tools, Setup):
            return self.setup(tools, template_kwargs, date)
        if template_kwargs is None and date is None:
            return tools
        raise InvalidRequest("pass either a `Setup` or `template_kwargs` and `date`, not both", "setup")

    def _refuse_images(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidRequest` for messages that are no dictionaries, and for images that can't be rendered."""
        check_objects(messages, "messages", key="role")
        if self.images is None and image_parts(messages):
            raise InvalidRequest("a message contains an image; this model accepts only text", "messages")

    def _with_images(self, added: PromptTokens, messages: Sequence[Message]) -> PromptTokens:
        """Return `added` with each image's placeholder repeated once per token of the image."""
        if self.images is None:
            return added
        counts = [part["tokens"] for part in image_parts(messages)]
        ids, provenance = repeat_placeholders(added.ids, added.provenance, self.images.placeholder_id, counts)
        return replace(added, ids=ids, provenance=provenance)

    def _encode_piece(self, text: str, start: int, end: int, codes: Codes, before: int | None) -> PromptTokens:
        """Encode `text[start:end]`, given the provenance of its characters, `codes`, and the id `before` it."""
        control = None if before is None else self.tokenizer.control_by_id(before)
        mark = "" if control is None else control.mark
        if start:
            encoded = self.tokenizer.encode_after_control(text[start:end], mark)
        else:
            encoded = self.tokenizer.encode_marked(text[start:end])
        return PromptTokens(encoded.array, provenance_of_tokens(codes, encoded.spans))

    def bridge(
        self,
        completion_ids: TokenIds,
        reply: Message,
        new_messages: Sequence[Message],
        setup: Setup,
        history: Sequence[Message] | None = None,
        context_ids: TokenIds | None = None,
    ) -> PromptTokens:
        """Return the ids to append after a sampled turn for `new_messages`, ending with the generation prompt.

        `completion_ids` are the turn's sampled ids, which the bridge never repeats or replaces, and `reply` is the
        message parsed from them, such as `Reply.message`. A truncated turn is closed as the template closes turns, with
        provenance CLOSE.

        Without `history`, the bridge is computed after a placeholder user message (strategy `local`), at a cost that
        does not depend on the conversation. With `history`, the messages before `reply`, it is computed in the real
        conversation (`contextual`). The certificate says which strategy a template needs.

        `context_ids` are all ids so far, including the completion's. They show whether the prompt opened reasoning.

        Raises `TemplateRefused` if the template does not accept these messages after such a turn.
        """
        self._refuse_images(new_messages)
        completion_ids = self.tokenizer.array(completion_ids)
        form = self.format(setup)
        suffix, codes, close = self._suffix(reply, new_messages, setup, form, history)
        last_id = int(completion_ids[-1]) if len(completion_ids) else None

        def calls_end() -> str:
            last = completion_ids[-_TURN_END:].tolist() if reply.get("tool_calls") else []
            return read_text(self.tokenizer, last, self.stop_ids(setup))

        cut = trim_to_turn_end(suffix, close, form, self.tokenizer, last_id, calls_end)
        if KEY in cut.text:
            raise TemplateRefused("the template repeats an argument's name after its call, where nothing ends the turn")
        # Without a control token in between, what the template writes continues the model's text.
        continues = last_id is not None and self.tokenizer.control_by_id(last_id) is None
        before = cut.before.rpartition(KEY)[2] or (_LETTER if continues else "")
        encoded = self.tokenizer.encode_after(before, cut.text)
        ids = encoded.array
        provenance = provenance_of_tokens(codes[len(codes) - len(encoded.text) :], encoded.spans)
        sampled, skipped = overlap(completion_ids.tolist(), encoded.ids, cut.repeated), 0
        if cut.ends_turn and encoded.text[:1].isspace():
            # The model's last word and the white space before the text that ends the turn may be one token.
            space_end = len(encoded.text) - len(encoded.text.lstrip())
            spaces = int(np.searchsorted(encoded.spans[:, 1], space_end, side="right"))
            after = overlap(completion_ids.tolist(), encoded.ids[spaces:]) if spaces else 0
            if after and spaces + after > sampled:
                sampled, skipped = spaces + after, space_end
        if sampled and not reply.get("tool_calls"):
            shared = encoded.text[skipped : encoded.spans[sampled - 1][1]]
            content = reply.get("content") or reply.get("reasoning_content") or ""
            if shared.isspace() or content.endswith(shared):
                # The overlap is part of the model's text, so it is not also the turn's end.
                sampled = 0
        if sampled or last_id in self.stop_ids(setup):
            # A different stop token than the template writes here replaces the token that ends the turn, but not the
            # next message's header.
            start = sampled or int(cut.ends_turn)
            # Copy, because turns stay in memory and a view would keep the whole array alive.
            added = PromptTokens(ids[start:].copy(), provenance[start:].copy(), stop_mismatch=not sampled)
        else:
            prompt_ids = None if context_ids is None else context_ids[: len(context_ids) - len(completion_ids)]
            space = cut.before[len(cut.before.rstrip()) :]
            closing = self._close_part(completion_ids, setup, prompt_ids, cut.text, space)
            # The next message's header may be the stop token that the model did not sample (GLM).
            if cut.ends_turn or not self.stop_ids(setup).isdisjoint(ids[:1].tolist()):
                provenance[:1] = Provenance.CLOSE
            closed = np.full(len(closing), Provenance.CLOSE, dtype=np.uint8)
            added = PromptTokens(np.concatenate([closing, ids]), np.concatenate([closed, provenance]))
        return self._with_images(added, new_messages)

    def parser(self, setup: Setup, stop_strings: Sequence[str] = (), prompt_ids: TokenIds | None = None) -> SafeParser:
        """Return a parser for one completion sampled under `setup`. Errors of overrides are handled, see `SafeParser`.

        `prompt_ids` are the ids before the completion, or the last of them. They show whether the prompt opens
        reasoning: some prompts do so after a question but not after a tool result. The default is as after a question.
        """
        if isinstance(stop_strings, str):
            stop_strings = (stop_strings,)  # its letters would end the completion otherwise
        parser: ReplyParser
        if self.overrides is not None and self.overrides.parser is not None:
            parser = self.overrides.parser(setup, stop_strings)
        else:
            parser = self.derived_parser(setup, stop_strings, prompt_ids)
        return SafeParser(parser, self.tokenizer, self.stop_ids(setup), stop_strings)

    def derived_parser(
        self, setup: Setup, stop_strings: Sequence[str] = (), prompt_ids: TokenIds | None = None
    ) -> Parser:
        """Return the parser derived from the template, even if there are overrides."""
        form = self.format_after(prompt_ids, self.format(setup))
        close = form.content_close.last.strip()
        if close and not MARK.search(close):
            # The vocabulary has no token that ends a turn, so the engine can't stop there.
            stop_strings = [*stop_strings, close]
        reader = Reader(self.tokenizer, self.stop_ids(setup), stop_strings)
        tools = {tool["function"]["name"]: tool for tool in setup.tools}
        if form.channels is not None:
            return ChannelParser(reader, tools, form.channels)
        return RegionParser(reader, tools, form)

    def format_after(self, prompt_ids: TokenIds | None, form: AssistantFormat) -> AssistantFormat:
        """Return the format for a turn after this prompt. R1's prompts after a tool result do not open reasoning."""
        if prompt_ids is None or form.reasoning is None:
            return form
        prompt = form.generation_prompt
        usual = cached(self._prompt_ids, prompt, lambda: self.tokenizer.encode_after_control(prompt).array)
        if len(usual) and np.array_equal(prompt_ids[-len(usual) :], usual):
            return form
        text = read_text(self.tokenizer, prompt_ids[-PROMPT_END:].tolist()).rstrip()
        if text.endswith(prompt.rstrip()):
            return form
        opened = text.endswith(form.reasoning.open.strip()) or _opens(text, form)
        return replace(form, reasoning=replace(form.reasoning, opened_by_prompt=opened))

    def _with_part_closed(self, completion_ids: TokenIds, setup: Setup, prompt_ids: TokenIds | None) -> TokenIds:
        """Return the completion's ids, followed by ids that close its reasoning or content if it was truncated."""
        if not self.stop_ids(setup).isdisjoint(completion_ids.tolist()):
            return completion_ids
        return np.concatenate([completion_ids, self._close_part(completion_ids, setup, prompt_ids)])

    def _close_part(
        self, completion_ids: TokenIds, setup: Setup, prompt_ids: TokenIds | None, following: str = "", space: str = ""
    ) -> TokenIds:
        """Return the ids that close the reasoning or content frame that a truncated completion left open.

        They include `space`, the white space that the template writes after a turn, but no text with which `following`,
        the text after them, begins.
        """
        form, parser = self.format(setup), self.parser(setup, prompt_ids=prompt_ids)
        parser.feed(completion_ids.tolist())
        _, reply = parser.finish()
        close = ""
        if reply.reasoning_open:
            close = form.reasoning.close if form.reasoning is not None else ""
            # The close of reasoning may also begin the content's header, which is left out here.
            close = close[: len(close) - repeated_end(close, form.header)] + form.empty_content + space
        elif not reply.calls_for_client:
            close = self._content_left_open(completion_ids, form, reply) or space
        elif not read_text(self.tokenizer, completion_ids.tolist()).endswith(space):
            close = space
        # The next message's header may also close the part.
        close = close[: len(close) - repeated_end(close, following)]
        return self.tokenizer.encode_after(_LETTER, close).array if close else self.tokenizer.array([])

    def _content_left_open(self, completion_ids: TokenIds, form: AssistantFormat, reply: Reply) -> str:
        """Return the delimiters that close the content if the completion ended inside or before the content's frame."""
        close = form.content_end + form.turn_end
        opening, closing = (
            MARK.findall(form.content_reopen if reply.reasoning else form.content_open)[-1:],
            MARK.findall(close),
        )
        text = read_text(self.tokenizer, completion_ids.tolist())
        if form.reasoning is not None and reply.reasoning:
            text = text.rpartition(form.reasoning.close.strip())[2]
        closed = repeated_end(text, close)
        if closed:
            return close[closed:]
        framing = [mark for mark in MARK.findall(text) if mark in (*opening, *closing[:1])]
        if reply.reasoning and not reply.content and not framing:
            return form.empty_content
        inside = framing[-1] in opening if framing else not opening
        return close if closing and inside else ""


def _opens(text: str, form: AssistantFormat) -> bool:
    """Return whether a prompt ends with the control token that opens reasoning and other text than usual after it.

    A prompt may write a budget there. The token must be one that opens reasoning only.
    """
    assert form.reasoning is not None
    marks = MARK.findall(form.reasoning.open)
    others = form.content_open + form.content_reopen + form.reasoning.close
    return len(marks) == 1 and marks[0] not in others and MARK.findall(text)[-1:] == marks


def _spelled_by(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return texts that spell the tokens that a template writes: its source and some renderings.

    Renderings are needed because a template may build tokens from parts (`'[' + role + ']'`).
    """
    texts = [template.whole_source]
    for messages in grammar.SAMPLES if tokenizer.text_tokens else ():
        with contextlib.suppress(TemplateRefused):
            plain = [plain_message(message) for message in messages]
            variables = tokenizer.special_tokens
            texts.append(
                template.render(
                    plain, tools=[grammar.TOOL], add_generation_prompt=True, date=grammar.DATE, variables=variables
                )
            )
    return "\0".join(texts)


def _fingerprint(
    tokenizer: Tokenizer, template: ChatTemplate, overrides: Overrides | None, images: ImageProcessor | None
) -> str:
    """Return the hex SHA-256 of everything that determines how messages become ids, including library versions."""
    parts = {
        "tokenizer": tokenizer.sha256,
        "special_tokens": tokenizer.special_tokens,
        **({"text_tokens": [t.content for t in tokenizer.text_tokens]} if tokenizer.text_tokens else {}),
        "template": template.sha256,
        "tokenizers": version("tokenizers"),
        "jinja2": version("jinja2"),
        **({"overrides": overrides.name} if overrides else {}),
        **({"images": images.settings.sha256} if images else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
