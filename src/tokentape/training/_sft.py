"""Conversations to samples for supervised fine-tuning: the template's ids, and which of them the assistant says.

What an assistant turn trains is what a model has to sample for it: from after the generation prompt through the token
that ends the turn. Where a template marks that itself with `{% generation %}`, its marks count, as in transformers.
Elsewhere turns are found in the rendering by their header, a control token that no caller's text can spell, or, where
templates have none, after the text of the message before. What is found is checked against provenance: not one
character of a user, tool or system is trained, and all that the assistant says is found. A template that resists is
refused.

The mask is made of characters' places in the rendering and cut together with the ids, so neither truncation nor a
tokenizer can move it.
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
from tokentape.chat._caller_text import SENTINELS, provenance_of_tokens
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import MARK
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.gateway._wire.openai_fields import tool_arguments
from tokentape.training._samples import Sample
from tokentape.types import Codes, Message, Provenance, Setup

_FOREIGN = (Provenance.SYSTEM, Provenance.USER, Provenance.TOOL)
_OPEN, _CLOSE = SENTINELS[:2]
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@dataclass(frozen=True, slots=True)
class Written:
    """A rendered conversation, in characters of its marked text, in which a mark has two."""

    text: str
    codes: Codes
    """Provenance per character."""
    flat: npt.NDArray[np.int64]
    """Where each character begins if marks are counted as one, and the end."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one assistant message trains: characters `start` to before `end` of a marked text."""

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
    """Return a sample of a whole conversation, `name` its session id, that trains assistant messages.

    `select` says which: all, only the last message, or those at these indices. `reasoning` False leaves reasoning and
    its delimiters out. The ids are those of `transformers.apply_chat_template` without generation prompt, with
    arguments of tool calls as objects: JSON text is decoded first, as the gateway does. Each message that is trained is
    a turn of the sample, its index the turn's number, so `assemble` cuts and groups such samples as any; `logprobs` are
    NaN where it trains. `marks` False ignores `{% generation %}`: some templates mark what their own generation prompt
    writes, or the line break after a turn, neither of which a model samples.

    Nothing is made up: a template that writes nothing after the last turn (GLM) has no end there to be trained.

    Raises `TemplateRefused` if the template refuses the conversation, or its rendering does not show what the
    assistant says (train the final turn only, then), and `InvalidRequest` for a `select` that is neither of the
    words or names a message that is no assistant message.
    """
    messages = [_with_objects(message) for message in messages]
    chosen = _chosen(messages, select)
    if renderer.is_external:
        raise InvalidRequest("an overriding renderer does not say which of its ids the assistant says", "renderer")
    written = _written(renderer, messages, setup, generate=False)
    marked = _marked_by_template(renderer, messages, setup, written) if marks else None
    said = marked if marked is not None else find_said(renderer, messages, setup, written, chosen)
    _check(written, said, messages, whole=marked is None and len(said) == len(_speakers(messages)))
    spans = [_without_reasoning(renderer, one, written, setup) if not reasoning else one for one in said]
    encoded = renderer.tokenizer.encode_marked(written.text)
    provenance = provenance_of_tokens(written.codes[written.flat[:-1]], encoded.spans)
    places = written.flat[encoded.spans]
    ranges = [(one.message, *_tokens(places, one)) for one in spans if one.message in chosen]
    ranges = [(message, start, end) for message, start, end in ranges if start < end]
    if not ranges:
        raise InvalidRequest("the template writes nothing of the messages that are to be trained", "select")
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


def find_said(
    renderer: Renderer, messages: Sequence[Message], setup: Setup, written: Written, chosen: Collection[int]
) -> list[Said]:
    """Return the span of each assistant message in the rendering; only the last one if only that is chosen.

    Raises `TemplateRefused` if the rendering does not show it.
    """
    for starts in (
        _behind_headers(renderer, messages, setup, written),
        _behind_others(renderer, messages, setup, written),
    ):
        if starts is not None:
            return _with_ends(renderer, messages, setup, written, starts)
    last = len(messages) - 1
    if set(chosen) == {last}:
        before = renderer.render_text(messages[:last], setup, generate=True)
        if written.text.startswith(before):
            return _with_ends(renderer, messages, setup, written, {last: len(before)})
    raise TemplateRefused(
        "the rendering does not show which tokens the assistant says: the template neither begins its turns "
        "with a control token of their own nor writes them right after the message before. Train the final turn only."
    )


def _chosen(messages: Sequence[Message], select: Literal["all", "final"] | Collection[int]) -> list[int]:
    speakers = _speakers(messages)
    if isinstance(select, str):
        if select not in ("all", "final"):
            raise InvalidRequest(f"select is {select!r}; pass 'all', 'final' or indices of messages", "select")
        wanted = speakers if select == "all" else [len(messages) - 1]
    else:
        wanted = sorted({int(n) for n in select})
    if not wanted or not set(wanted) <= set(speakers):
        raise InvalidRequest(
            f"messages {wanted} are to be trained, assistant messages are {speakers}; name some of those", "select"
        )
    return wanted


def _with_objects(message: Message) -> Message:
    """Return the message with arguments of its calls as objects: templates print those, and would quote a string."""
    calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
    for call in calls:
        if "arguments" in call["function"]:
            call["function"]["arguments"] = tool_arguments(call["function"]["arguments"], "messages")
    return {**message, "tool_calls": calls} if calls else message


def _speakers(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _written(renderer: Renderer, messages: Sequence[Message], setup: Setup, *, generate: bool) -> Written:
    text, codes = renderer.render_text_with_provenance(messages, setup, generate=generate)
    marks = {match.start() for match in MARK.finditer(text)}
    flat = [at for at in range(len(text) + 1) if at - 1 not in marks]
    places = np.array(flat, np.int64)
    return Written(text, np.repeat(codes, places[1:] - places[:-1]), places)


def _marked_by_template(
    renderer: Renderer, messages: Sequence[Message], setup: Setup, written: Written
) -> list[Said] | None:
    """Return the contents of the template's `{% generation %}` blocks; None unless there is one per message."""
    if not _GENERATION.search(renderer.template.source):
        return None
    source = _GENERATION.sub(_shown, renderer.template.source)
    shown = Renderer(renderer.tokenizer, ChatTemplate(source)).render_text(messages, setup, generate=False)
    pieces = re.split(f"([{_OPEN}{_CLOSE}])", shown)
    speakers = _speakers(messages)
    if "".join(pieces[::2]) != written.text or pieces[1::2] != [_OPEN, _CLOSE] * len(speakers):
        return None
    ends = np.cumsum([len(piece) for piece in pieces[::2]]).tolist()
    return [Said(n, ends[2 * k], ends[2 * k + 1]) for k, n in enumerate(speakers)]


def _shown(tag: re.Match[str]) -> str:
    """Return a generation tag as one that writes a sentinel, with the same control of white space."""
    left, end, right = tag.groups()
    sentinel = _CLOSE if end else _OPEN
    return f'{{%{left} if true %}}{{{{ "\\u{ord(sentinel):04x}" }}}}{{% endif {right}%}}'


def _behind_headers(
    renderer: Renderer, messages: Sequence[Message], setup: Setup, written: Written
) -> dict[int, int] | None:
    """Return per assistant message where it starts, after its own header; None if they don't all have one."""
    prompt = renderer.format(setup).generation_prompt
    shared = prompt[: common_prefix(renderer.format(setup).header, prompt)]
    if not MARK.match(shared):
        return None
    speakers = _speakers(messages)
    # The longest beginning of it that every turn has: what reasoning goes into may be in it, and be filled in some.
    for end in [len(shared), *(match.start() for match in reversed(list(MARK.finditer(shared, 1))))]:
        found = [match.end() for match in re.finditer(re.escape(shared[:end]), written.text)]
        if len(found) == len(speakers):
            # The model does not sample what the generation prompt writes after the header.
            starts = [at + common_prefix(written.text[at : at + len(prompt) - end], prompt[end:]) for at in found]
            return dict(zip(speakers, starts, strict=True))
    return None


def _behind_others(
    renderer: Renderer, messages: Sequence[Message], setup: Setup, written: Written
) -> dict[int, int] | None:
    """Return the same, after what the template writes between the message before and a turn; None if that differs."""
    groups = [
        (own, [n for n, _ in run])
        for own, run in groupby(enumerate(messages), lambda one: one[1]["role"] == "assistant")
    ]
    runs = list(_runs(written.codes))
    if [own for own, _ in groups] != [own for own, _, _ in runs] or any(own and len(run) > 1 for own, run in groups):
        return None
    form = renderer.format(setup)
    opened = len(form.generation_prompt) - common_prefix(form.header, form.generation_prompt)
    starts = {}
    for k, (own, run) in enumerate(groups):
        if not own:
            continue
        if k == 0:
            return None
        before = _written(renderer, messages[: run[0]], setup, generate=True)
        spoken = np.flatnonzero(np.isin(before.codes, _FOREIGN))
        tail = before.text[spoken[-1] + 1 :] if spoken.size else before.text
        after = runs[k - 1][2] + 1
        shared = common_prefix(written.text[after : after + len(tail)], tail)
        if shared < len(tail) - opened:
            return None
        starts[run[0]] = after + shared
    return starts


def _runs(codes: Codes) -> Iterator[tuple[bool, int, int]]:
    """Yield runs of callers' text: whether it is the assistant's, first and last character."""
    places = np.flatnonzero(codes != Provenance.TEMPLATE)
    own = codes[places] == Provenance.ASSISTANT
    edges = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(places)]
    for first, end in pairwise(edges):
        if first < end:
            yield bool(own[first]), int(places[first]), int(places[end - 1])


def _with_ends(
    renderer: Renderer, messages: Sequence[Message], setup: Setup, written: Written, starts: dict[int, int]
) -> list[Said]:
    """Return turns through the token that ends them, or without one through the text that closes them."""
    text, codes, form = written.text, written.codes, renderer.format(setup)
    stops = renderer.stop_ids(setup)
    ends = [m.end() for m in MARK.finditer(text) if renderer.tokenizer.control_of_mark(m[0]).id in stops]
    foreign = np.flatnonzero(np.isin(codes, _FOREIGN))
    own = np.flatnonzero(codes == Provenance.ASSISTANT)
    said = []
    for n, start in starts.items():
        limits = [at for at in starts.values() if at > start] + foreign[foreign >= start][:1].tolist()
        limit = min([*limits, len(text)])
        end = next((end for end in ends if start < end <= limit), None)
        if end is None:
            last = own[(own >= start) & (own < limit)]
            end = int(last[-1]) + 1 if last.size else start
            close = (form.calls_close if messages[n].get("tool_calls") else form.content_close).last
            end += common_prefix(text[end:limit], close)
            if n == len(messages) - 1:
                end = max(end, len(text.rstrip()))
        said.append(Said(n, start, end))
    return said


def _check(written: Written, said: Sequence[Said], messages: Sequence[Message], *, whole: bool) -> None:
    """Raise `TemplateRefused` if others' text would be trained, or what the assistant says is not where it should be.

    Of a `whole` conversation none of it may stand elsewhere.
    """
    own, others = written.codes == Provenance.ASSISTANT, np.isin(written.codes, _FOREIGN)
    inside = np.zeros(len(written.codes), np.bool_)
    for one in said:
        inside[one.start : one.end] = True
        if others.any() and _speaks(messages[one.message]) and not own[one.start : one.end].any():
            raise TemplateRefused(f"the template writes nothing of what message {one.message} says: nothing to train")
    wrong, missed = int((inside & others).sum()), int((~inside & own).sum()) if whole else 0
    if wrong or missed:
        raise TemplateRefused(
            f"the mask of this conversation would train {wrong} characters that others wrote and leave {missed} of the "
            "assistant's out; the template writes turns in a way that is not understood"
        )


def _speaks(message: Message) -> bool:
    """Return whether the message has content, or a call with arguments."""
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    return bool(content if not isinstance(content, str) else content.strip()) or any(
        call["function"].get("arguments") not in (None, "", "{}", {}) for call in calls
    )


def _without_reasoning(renderer: Renderer, said: Said, written: Written, setup: Setup) -> Said:
    """Return the turn from after its reasoning, if it has any."""
    form = renderer.format(setup).reasoning
    if form is None:
        return said
    for close in (form.close, form.close.strip()):
        at = written.text.find(close, said.start, said.end) if close else -1
        if at >= 0:
            return Said(said.message, at + len(close), said.end)
    return said


def _tokens(places: npt.NDArray[np.int64], said: Said) -> tuple[int, int]:
    """Return the tokens within; a model does not sample a token there that begins before."""
    within = np.flatnonzero((places[:, 0] >= said.start) & (places[:, 1] <= said.end) & (places[:, 1] > said.start))
    return (int(within[0]), int(within[-1]) + 1) if within.size else (0, 0)
