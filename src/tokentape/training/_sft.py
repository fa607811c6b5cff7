"""Make samples for supervised fine-tuning from conversations: the template's ids, with a mask of assistant turns.

The trained part of an assistant turn is what a model has to sample: from after the generation prompt through the token
that ends the turn. If a template marks this with `{% generation %}`, its marks are used, as in transformers. Otherwise
turns are located by their header, a control token that callers' text can't contain; in templates without headers, by
the text of the preceding message. The spans are checked against provenance: they must cover all of the assistant's
text, and no character of a user, tool or system message. Otherwise the conversation is refused.

The mask is computed from character offsets in the rendering together with the ids, so neither truncation nor the
tokenizer can shift it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from tokentape._session.verdict import NOT_KNOWN
from tokentape.chat._call_syntax import common_prefix
from tokentape.chat._caller_text import provenance_of_tokens
from tokentape.chat._generation_blocks import cut_marks, has_blocks, with_marks
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import REASONING_FIELDS
from tokentape.chat._tokenizer import MARK
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.gateway._wire.shared_fields import tool_arguments
from tokentape.training._samples import Sample
from tokentape.types import Codes, Message, Provenance, Setup

_FOREIGN = (Provenance.SYSTEM, Provenance.USER, Provenance.TOOL)


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation. Offsets count characters of `text`, where each control token is two characters."""

    renderer: Renderer
    messages: Sequence[Message]
    setup: Setup
    text: str
    codes: Codes
    """Provenance per character."""
    flat: npt.NDArray[np.int64]
    """The offset of each character, with a mark as one character, and the end offset."""


@dataclass(frozen=True, slots=True)
class AssistantSpan:
    """The trained span of an assistant message: characters [`start`, `end`) of the marked text."""

    message: int
    start: int
    end: int


def sft_sample(
    renderer: Renderer,
    messages: Sequence[Message],
    setup: Setup,
    *,
    name: str,
    select: Literal["all", "final"] | Collection[int] = "all",
    reasoning: bool = True,
    marks: bool = True,
) -> Sample:
    """Return a sample of a whole conversation that trains assistant messages. Its session id is `name`.

    `select` chooses the messages: `all`, `final` for the last message, or their indices. With `reasoning` False,
    reasoning and its delimiters are not trained. The ids are those of `transformers.apply_chat_template` without
    generation prompt, with tool call arguments as objects: JSON text is decoded first, as in the gateway. Each trained
    message is a turn of the sample, numbered by its index, so `assemble` can cut and group these samples too.
    `logprobs` are NaN for trained tokens. With `marks` False, `{% generation %}` is ignored: some templates mark text
    in their generation prompt, or the line break after a turn, which a model does not sample.

    Control tokens in the content of an assistant message, such as `<think>`, must be reasoning that the template reads.

    No ids are added: if a template writes nothing after the last turn (GLM), no end of turn is trained.

    Raises `TemplateRefused` if the template refuses the conversation, or if the assistant's text can't be found in its
    rendering (then train the final turn only), and `InvalidRequest` for an unknown word in `select` or the index of a
    message that is not the assistant's.
    """
    messages = [_with_objects(message) for message in messages]
    chosen = _chosen(messages, select)
    if renderer.is_external:
        raise InvalidRequest("an overriding renderer can't tell which ids to train: use the template's own", "renderer")
    messages = _with_reasoning_apart(renderer, messages, setup)
    rendered = _rendered(renderer, messages, setup, generate=False)
    marked = _marked_by_template(rendered) if marks else None
    turn_spans = marked if marked is not None else find_spans(rendered, chosen)
    _check(rendered, turn_spans, whole=marked is None and len(turn_spans) == len(_speakers(messages)))
    spans = turn_spans if reasoning else [_without_reasoning(rendered, span) for span in turn_spans]
    encoded = renderer.tokenizer.encode_marked(rendered.text)
    provenance = provenance_of_tokens(rendered.codes[rendered.flat[:-1]], encoded.spans)
    places = rendered.flat[encoded.spans]
    ranges = [(span.message, *_tokens(places, span)) for span in spans if span.message in chosen]
    ranges = [(message, start, end) for message, start, end in ranges if start < end]
    if not ranges:
        raise InvalidRequest("the template renders no text for the selected messages: select other messages", "select")
    loss_mask = np.zeros(len(encoded.ids), np.bool_)
    for _, start, end in ranges:
        loss_mask[start:end] = True
    return Sample(
        session_id=name,
        leaf=ranges[-1][0],
        token_ids=renderer.tokenizer.array(encoded.ids),
        provenance=provenance,
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, np.float32(np.nan), np.float32(0)),
        turns=tuple(message for message, _, _ in ranges),
        completion_starts=np.array([start for _, start, _ in ranges], np.int32),
        completion_ends=np.array([end for _, _, end in ranges], np.int32),
        weight_versions=("unknown",) * len(ranges),
        reward=None,
        verdict=f"exact, {NOT_KNOWN}",
        metadata={},
        turn_rewards=np.full(len(ranges), np.nan),
        weight_spans=(),
    )


def find_spans(rendered: RenderedConversation, chosen: Collection[int]) -> list[AssistantSpan]:
    """Return the span of each assistant message, or of the last if only that is chosen. Raises `TemplateRefused`."""
    for find_starts in (_starts_after_headers, _starts_after_others):
        if (starts := find_starts(rendered)) is not None:
            return _with_ends(rendered, starts)
    last = len(rendered.messages) - 1
    if set(chosen) == {last}:
        before = rendered.renderer.render_text(rendered.messages[:last], rendered.setup, generate=True)
        if rendered.text.startswith(before):
            return _with_ends(rendered, {last: len(before)})
    raise TemplateRefused(
        "can't locate the assistant's turns in the rendering: the template neither begins them with a control token of "
        "their own nor writes them right after the preceding message. Train the final turn only."
    )


def _chosen(messages: Sequence[Message], select: Literal["all", "final"] | Collection[int]) -> list[int]:
    speakers = _speakers(messages)
    if isinstance(select, str):
        if select not in ("all", "final"):
            raise InvalidRequest(f"select is {select!r}; pass 'all', 'final' or indices of messages", "select")
        indices = speakers if select == "all" else [len(messages) - 1]
    else:
        indices = sorted({int(n) for n in select})
    if not indices or not set(indices) <= set(speakers):
        raise InvalidRequest(
            f"select chooses messages {indices}; choose from the assistant messages: {speakers}", "select"
        )
    return indices


def _with_objects(message: Message) -> Message:
    """Return the message with tool call arguments parsed from JSON text: templates write text between quotes."""
    calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
    for call in calls:
        if "arguments" in call["function"]:
            call["function"]["arguments"] = tool_arguments(call["function"]["arguments"], "messages")
    return {**message, "tool_calls": calls} if calls else message


def _with_reasoning_apart(renderer: Renderer, messages: Sequence[Message], setup: Setup) -> Sequence[Message]:
    """Return the messages with reasoning that is written in the content, as `<think>...</think>`, in its own field.

    Raises `TemplateRefused` if transformers renders control tokens that the assistant's content spells differently.
    """
    tokenizer, form = renderer.tokenizer, renderer.format(setup).reasoning
    spelled = [
        (n, match[0])
        for n in _speakers(messages)
        if isinstance(content := messages[n].get("content"), str)
        and (match := tokenizer.control_pattern.search(content)) is not None
    ]
    if not spelled:
        return messages
    apart = list(messages)
    opening, closing = (tokenizer.spell_marks(s).strip() for s in (form.open, form.close)) if form else ("", "\0")
    for n, _ in spelled:
        before, close, after = messages[n]["content"].partition(closing)
        if close and not any(messages[n].get(field) for field in REASONING_FIELDS):
            thought = before.lstrip().removeprefix(opening).strip("\n")
            apart[n] = {**messages[n], "reasoning_content": thought, "content": after.lstrip("\n")}
    if renderer.render_text(apart, setup, generate=False) != renderer.render_text_trusting(messages, setup):
        n, token = spelled[0]
        raise TemplateRefused(
            f"the content of message {n} spells the control token {token!r}, which transformers would encode as such. "
            "Send reasoning as `reasoning_content` and calls as `tool_calls`, or remove the token."
        )
    return apart


def _speakers(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _rendered(renderer: Renderer, messages: Sequence[Message], setup: Setup, *, generate: bool) -> RenderedConversation:
    text, codes = renderer.render_text_with_provenance(messages, setup, generate=generate)
    marks = {match.start() for match in MARK.finditer(text)}
    flat = np.array([offset for offset in range(len(text) + 1) if offset - 1 not in marks], np.int64)
    return RenderedConversation(renderer, messages, setup, text, np.repeat(codes, np.diff(flat)), flat)


def _marked_by_template(rendered: RenderedConversation) -> list[AssistantSpan] | None:
    """Return the spans of the template's `{% generation %}` blocks; None if the template has none.

    Raises `TemplateRefused` if no block has text, or if a block can't be assigned to an assistant message of its own.
    """
    template = rendered.renderer.template
    if not has_blocks(template.whole_source):
        return None
    renderer, speakers = Renderer(rendered.renderer.tokenizer, with_marks(template)), _speakers(rendered.messages)
    text, ranges = cut_marks(renderer.render_text(rendered.messages, rendered.setup, generate=False))
    if text != rendered.text:
        return None
    if not any(start < end for start, end in ranges):
        raise TemplateRefused(
            "the template's {% generation %} blocks mark no text of this conversation; pass marks=False to train "
            "whole turns"
        )
    owners = speakers
    if len(ranges) != len(speakers):
        ranges = _joined(ranges)
        starts = {span.message: span.start for span in find_spans(rendered, speakers)}
        owners = [max((n for n in speakers if starts[n] <= end), default=-1) for _, end in ranges]
        if -1 in owners or len({*owners}) < len(owners):
            raise TemplateRefused(
                f"the template writes {len(ranges)} {{% generation %}} blocks, expected at most one in each of the "
                f"{len(speakers)} assistant messages and none elsewhere; pass marks=False to train whole turns"
            )
    return [AssistantSpan(n, start, end) for n, (start, end) in zip(owners, ranges, strict=True)]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges without empty ranges. Adjacent ranges are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        elif start < end:
            joined.append((start, end))
    return joined


def _starts_after_headers(rendered: RenderedConversation) -> dict[int, int] | None:
    """Return the start of each assistant message, after its header; None if any has no header."""
    form = rendered.renderer.format(rendered.setup)
    prompt = form.generation_prompt
    shared = prompt[: common_prefix(form.header, prompt)]
    if not MARK.match(shared):
        return None
    speakers = _speakers(rendered.messages)
    # Try the longest prefix first: the prompt may have an empty reasoning block, which is not empty in some turns.
    for end in [len(shared), *(match.start() for match in reversed(list(MARK.finditer(shared, 1))))]:
        header_ends = [match.end() for match in re.finditer(re.escape(shared[:end]), rendered.text)]
        if len(header_ends) == len(speakers):
            # The model does not sample the text of the generation prompt after the header.
            rest = prompt[end:]
            starts = [
                offset + common_prefix(rendered.text[offset : offset + len(rest)], rest) for offset in header_ends
            ]
            return dict(zip(speakers, starts, strict=True))
    return None


def _starts_after_others(rendered: RenderedConversation) -> dict[int, int] | None:
    """Return the start of each assistant message, after what follows the preceding one; None if that text varies."""
    by_writer = groupby(enumerate(rendered.messages), lambda entry: entry[1]["role"] == "assistant")
    groups, runs = [(own, [n for n, _ in run]) for own, run in by_writer], list(_runs(rendered.codes))
    if [own for own, _ in groups] != [own for own, _, _ in runs] or any(own and len(run) > 1 for own, run in groups):
        return None
    form = rendered.renderer.format(rendered.setup)
    opened = len(form.generation_prompt) - common_prefix(form.header, form.generation_prompt)
    starts = {}
    for k, (own, run) in enumerate(groups):
        if not own:
            continue
        if k == 0:
            return None
        before = _rendered(rendered.renderer, rendered.messages[: run[0]], rendered.setup, generate=True)
        spoken = np.flatnonzero(np.isin(before.codes, _FOREIGN))
        tail = before.text[spoken[-1] + 1 :] if spoken.size else before.text
        after = runs[k - 1][2] + 1
        shared = common_prefix(rendered.text[after : after + len(tail)], tail)
        if shared < len(tail) - opened:
            return None
        starts[run[0]] = after + shared
    return starts


def _runs(codes: Codes) -> Iterator[tuple[bool, int, int]]:
    """Yield (is_assistant, first, last) for each run of text that comes from messages, not from the template.

    `first` and `last` are the positions of its first and last character.
    """
    places = np.flatnonzero(codes != Provenance.TEMPLATE)
    own = codes[places] == Provenance.ASSISTANT
    edges = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(places)]
    for first, end in pairwise(edges):
        if first < end:
            yield bool(own[first]), int(places[first]), int(places[end - 1])


def _with_ends(rendered: RenderedConversation, starts: dict[int, int]) -> list[AssistantSpan]:
    """Return the spans of turns. A span includes the token that ends its turn, or else the text that closes it."""
    renderer, messages, text, codes = rendered.renderer, rendered.messages, rendered.text, rendered.codes
    form, stops = renderer.format(rendered.setup), renderer.stop_ids(rendered.setup)
    ends = [m.end() for m in MARK.finditer(text) if renderer.tokenizer.control_of_mark(m[0]).id in stops]
    foreign = np.flatnonzero(np.isin(codes, _FOREIGN))
    own = np.flatnonzero(codes == Provenance.ASSISTANT)
    spans = []
    for n, start in starts.items():
        limits = [later for later in starts.values() if later > start] + foreign[foreign >= start][:1].tolist()
        limit = min([*limits, len(text)])
        end = next((end for end in ends if start < end <= limit), None)
        if end is None:
            last = own[(own >= start) & (own < limit)]
            end = int(last[-1]) + 1 if last.size else start
            close = (form.calls_close if messages[n].get("tool_calls") else form.content_close).last
            end += common_prefix(text[end:limit], close)
            if n == len(messages) - 1:
                end = max(end, len(text.rstrip()))
        spans.append(AssistantSpan(n, start, end))
    return spans


def _check(rendered: RenderedConversation, spans: Sequence[AssistantSpan], *, whole: bool) -> None:
    """Raise `TemplateRefused` if spans contain text of other roles or no text of the assistant.

    With `whole`, also raise if a part of the assistant's text is in no span.
    """
    own, others = rendered.codes == Provenance.ASSISTANT, np.isin(rendered.codes, _FOREIGN)
    inside = np.zeros(len(rendered.codes), np.bool_)
    for span in spans:
        inside[span.start : span.end] = True
        if others.any() and _speaks(rendered.messages[span.message]) and not own[span.start : span.end].any():
            raise TemplateRefused(
                f"the template drops the content of message {span.message}, so there is nothing to train on"
            )
    wrong, missed = int((inside & others).sum()), int((~inside & own).sum()) if whole else 0
    if wrong or missed:
        raise TemplateRefused(
            f"the assistant's turns can't be located with this template: the mask would train {wrong} characters of "
            f"other messages, and miss {missed} characters of the assistant's messages"
        )


def _speaks(message: Message) -> bool:
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    return bool(content if not isinstance(content, str) else content.strip()) or any(
        call["function"].get("arguments") not in (None, "", "{}", {}) for call in calls
    )


def _without_reasoning(rendered: RenderedConversation, span: AssistantSpan) -> AssistantSpan:
    form = rendered.renderer.format(rendered.setup).reasoning
    for close in filter(None, (form.close, form.close.strip()) if form is not None else ()):
        offset = rendered.text.find(close, span.start, span.end)
        if offset >= 0:
            return AssistantSpan(span.message, offset + len(close), span.end)
    return span


def _tokens(places: npt.NDArray[np.int64], span: AssistantSpan) -> tuple[int, int]:
    """Return the start and end of the tokens that are completely in the span."""
    within = np.flatnonzero((places[:, 0] >= span.start) & (places[:, 1] <= span.end) & (places[:, 1] > span.start))
    return (int(within[0]), int(within[-1]) + 1) if within.size else (0, 0)
