"""Properties of the reply to any completion, checked independently of parser internals."""

from __future__ import annotations

import json
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chat.fuzz.completions import WORD, cut
from tokentape.chat._parse import ReplyParser
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply, ReplyDelta, ToolCall
from tokentape.chat._tokenizer import MARK
from tokentape.types import Setup


def complaints(
    renderer: Renderer, setup: Setup, ids: Sequence[int], rng: random.Random, stop_strings: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the errors in the reply to a completion."""
    try:
        whole = parsed(renderer.derived_parser(setup, stop_strings), [ids])
        streamed = parsed(renderer.derived_parser(setup, stop_strings), cut(ids, rng))
        safe = renderer.parser(setup, stop_strings)
        safe.feed(ids)
        _, kept = safe.finish()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        yield f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
        return
    if streamed != whole:
        yield "another reply when the stream is cut elsewhere"
    if kept != whole:
        yield f"the safe parser: {kept.problem or 'another reply'}"
    if any(MARK.search(text) for text in texts(whole)):
        yield "a mark in the reply"
    yield from _spans(whole, len(ids))
    lost = lost_words(renderer, setup, ids, whole, stop_strings)
    if lost:
        yield f"lost text: {' '.join(lost)}"


def parsed(parser: ReplyParser, runs: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> Reply:
    """Return the reply to ids that arrive in runs. The deltas must add up to the reply."""
    deltas = [parser.feed(run) for run in runs]
    rest, reply = parser.finish()
    content, reasoning, calls = joined([*deltas, rest])
    assert (content, reasoning, calls) == (reply.content, reply.reasoning, list(reply.calls_for_client))
    return reply


def joined(deltas: Sequence[ReplyDelta]) -> tuple[str, str, list[ToolCall]]:
    """Return a client's view of a stream."""
    calls = [call for delta in deltas for call in delta.tool_calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def _spans(reply: Reply, count: int) -> Iterator[str]:
    before = 0
    for call in reply.tool_calls:
        start, end = call.span
        if not before <= start < end <= count:
            yield f"the span {call.span} of a call, of {count} ids, behind {before}"
        before = end


def texts(reply: Reply) -> list[str]:
    """Return all texts of a reply."""
    calls = [text for call in reply.tool_calls for text in (call.name, call.arguments, call.id or "")]
    return [reply.content, reply.reasoning, *calls]


def lost_words(
    renderer: Renderer, setup: Setup, ids: Sequence[int], reply: Reply, stop_strings: Sequence[str]
) -> list[str]:
    """Return the planted words that are in the completion before its end, and nowhere in the reply."""
    stop_ids = renderer.stop_ids(setup)
    end = next((n for n, token_id in enumerate(ids) if token_id in stop_ids), len(ids))
    text = renderer.tokenizer.decode(ids[:end])
    form = renderer.format(setup)
    if form.channels is not None:
        # A header is a delimiter with any text, and so is the type after a call's recipient.
        text = re.sub(r"(=\S+)\s+\w+\s*(?=<)", r"\1", text)
        closing = renderer.tokenizer.spell_marks(form.channels.header_close)
        marks = "|".join(re.escape(renderer.tokenizer.spell_marks(mark)) for mark in form.channels.marks)
        text = re.sub(f"(?:{marks})(?:(?!{marks})[^\n])*{re.escape(closing)}", "", text)
        # So is a header that the completion truncates.
        begin = re.escape(renderer.tokenizer.spell_marks(form.channels.part_close + form.header[:2]))
        text = re.sub(rf"{begin}(?:(?!{re.escape(closing)}).)*\Z", "", text, flags=re.DOTALL)
    if form.calls is not None and form.calls.nested is not None:
        # In a parameter that the schema calls a list, as in vLLM's parser, the tags of items are labels with any name.
        text = re.sub(
            r"(?<=<tags>).*?(?=</tags>|\Z)", lambda found: re.sub(r"</?\w+>", "", found[0]), text, flags=re.DOTALL
        )
    close = form.content_close.last.strip()
    for stop in [*stop_strings, *([close] if close and not MARK.search(close) else [])]:
        text = text.partition(stop)[0]
    reply_text = "\n".join(texts(reply) + [string for call in reply.tool_calls for string in _strings(call.arguments)])
    reply_text += "\n".join(
        member
        for call in reply.tool_calls
        for member in _other_members(renderer.tokenizer.decode(ids[slice(*call.span)]))
    )
    return [word for word in dict.fromkeys(WORD.findall(text)) if word not in reply_text]


def _other_members(call: str) -> list[str]:
    """Return the members of a call's JSON object other than its arguments; none if it is not a whole JSON object.

    They are not part of the call.
    """
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(call, call.find("{"))
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, dict) or not {"arguments", "parameters"} & value.keys():
        return []
    return [f"{key} {member}" for key, member in value.items() if key not in ("arguments", "parameters")]


def _strings(raw: str) -> list[str]:
    """Return all strings in a JSON text; none if it is not JSON."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    strings: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            strings += item
            waiting += item.values()
    return strings
