"""Replace the text of assistant turns in a rendering by their exact sampled ids.

A conversation that is rendered from the start may have assistant turns that were sampled in this session. In the
rendering, their text is between an assistant header and the token that ends the turn, both control tokens. It is
replaced by the sampled ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tokentape.chat._call_syntax import common_prefix, common_suffix
from tokentape.chat._reader import Reader, read_text
from tokentape.chat._template_text import TemplateText
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.types import Message, Setup, TokenIds

History: TypeAlias = Literal["sampled", "template"]
"""Which ids of earlier turns stay in context: all sampled ids, or only those for the text that the template keeps."""

StopMismatch: TypeAlias = Literal["keep", "fork"]
"""What happens after a turn that ended with a different stop token than the template writes there. `keep`: the branch
continues with the sampled token. `fork`: new messages start a new branch, which has the template's token."""

PROMPT_END = 96
"""The number of ids at the end of a prompt that are decoded to find its generation prompt."""


@dataclass(frozen=True, slots=True)
class Splice:
    """Replaces the characters `start` to `end` in a marked text by `ids`."""

    start: int
    end: int
    ids: list[int]


def find_splices(
    renderer: TemplateText,
    setup: Setup,
    text: str,
    messages: Sequence[Message],
    sampled: Mapping[int, TokenIds],
    prompts: Mapping[int, TokenIds],
    history: History,
    stop_mismatch: StopMismatch,
) -> list[Splice]:
    """Return the splices of sampled ids into `text`, the marked rendering of `messages` with the generation prompt.

    `sampled` maps indices of assistant messages to completion ids, and `prompts` those of turns that were sampled under
    another setup to the last ids of their prompts. Return no splices unless the rendering has exactly
    one assistant header per assistant message, because turns can't be told apart otherwise.
    """
    if not sampled:
        return []
    tokenizer, form, stop_ids = renderer.tokenizer, renderer.format(setup), renderer.stop_ids(setup)
    stops = tokenizer.marks(stop_ids)
    prompt = form.generation_prompt
    header = form.header[: common_prefix(form.header, prompt)]
    # The prompt may depend on the turn's number, or differ after a tool result.
    others = [
        rendering
        for rendering in (text, form.content_suffix, form.calls_suffix)
        if rendering and not rendering.endswith(prompt)
    ]
    mark = MARK.match(header)
    if mark is None:
        return []
    for other in others:
        index = other.rfind(mark[0])
        header = header[: common_prefix(header, other[index:])] if index >= 0 else header
    regions = _regions(text, header, stops)
    speakers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if len(regions) != len(speakers):
        return []
    # If the prompt varies, or may depend on a word that the template compares with texts, render each turn's prompt.
    varies = bool(others) or any(word in text for word in renderer.template.compared.strings)
    splices = []
    for turn, (n, (start, end)) in enumerate(zip(speakers, regions, strict=True)):
        if n not in sampled:
            continue
        ids = sampled[n].tolist()
        if history == "template" or stop_mismatch == "fork":
            stop = tokenizer.control_of_mark(text[_last_mark(text, start, end) : end]).id
            if ids and ids[-1] in stop_ids and ids[-1] != stop:
                ids = ids[:-1]
        if history == "template":
            splices += _suffix_splice(text, start, end, ids, tokenizer)
        else:
            # For a truncated turn, keep the token with which the template ends it.
            ended = not stop_ids.isdisjoint(ids)
            if varies:
                prompt = renderer.prompt_or_nothing(messages[:n], setup)
                if prompt.count(header) != turn + 1:
                    continue
            kept, opened = header, prompt.rpartition(header)[2]
            if n in prompts:
                # Thinking may have been on then and be off now: the ids must follow what they were sampled after.
                own = read_text(tokenizer, prompts[n][-PROMPT_END:].tolist())
                index = own.rfind(mark[0])
                if index < 0:
                    continue
                kept = header[: common_prefix(header, own[index:])]
                opened = own[index + len(kept) :]
            # Encode text that the prompt opened from a control token on, so that no token is cut.
            cut = opened and not MARK.match(opened)
            again = kept[_last_mark(kept, 0, len(kept)) :] if cut else ""
            opened_ids = tokenizer.encode_after_control(again + opened).ids if opened else []
            end = end if ended else _last_mark(text, start, end)
            splices.append(Splice(start - len(header) + len(kept) - len(again), end, opened_ids + ids))
    return splices


def _regions(text: str, header: str, stops: frozenset[str]) -> list[tuple[int, int]]:
    """Return the bounds of each assistant turn, from after its header through the token that ends it.

    The generation prompt's header, which has no turn yet, is left out. Turns do not overlap, even if a template writes
    the header twice before a turn.
    """
    regions = []
    index = text.find(header)
    while index >= 0:
        start = index + len(header)
        stop = next((mark for mark in MARK.finditer(text, start) if mark[0] in stops), None)
        if stop is None:
            break
        regions.append((start, stop.end()))
        index = text.find(header, stop.start())  # the token that ends a turn may begin the next header
    return regions


def _last_mark(text: str, start: int, end: int) -> int:
    return max(match.start() for match in MARK.finditer(text, start, end))


def _suffix_splice(text: str, start: int, end: int, ids: list[int], tokenizer: Tokenizer) -> list[Splice]:
    """Return a splice of the longest suffix of the sampled ids that spells the end of `text[start:end]`, if any.

    Try the text with and without its final mark.
    """
    reader = Reader(tokenizer, frozenset(), ())
    starts = []
    for token_id in ids:
        starts.append(len(reader.text))
        reader.feed([token_id])
    reader.finish()
    for tail_end in (end, _last_mark(text, start, end)):
        kept_from = len(reader.text) - common_suffix(text[start:tail_end], reader.text)
        first = next((n for n, offset in enumerate(starts) if offset >= kept_from), len(ids))
        if first < len(ids):
            return [Splice(tail_end - (len(reader.text) - starts[first]), tail_end, ids[first:])]
    return []
