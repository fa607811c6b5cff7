"""Truncated, mangled or hostile completions, as tokens arrive: no text is lost, no call is invented."""

from __future__ import annotations

import functools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import REAL_TEMPLATES, SMALL_TEMPLATES, load_renderer, slow_unless
from tests.chat.test_sloppy import (
    CODER,
    DEEPSEEK_V31,
    GLM,
    GPT_OSS,
    LLAMA,
    MINIMAX,
    MISTRAL_V3,
    MISTRAL_V13,
    QWEN3,
    parse,
)
from tests.searching import examples
from tokentape.chat import _grammar as grammar
from tokentape.chat._certification import written_turn
from tokentape.chat._parse import Reply
from tokentape.errors import TemplateRefused


@functools.cache
def written(template: str) -> tuple[list[int], ...]:
    """Return completions as the template writes them, one for each kind of turn."""
    renderer = load_renderer(template)
    setup = grammar.setup(renderer.fingerprint, {})
    completions = []
    for message in grammar.TURNS.values():
        try:
            turn = written_turn(renderer, setup, message)
        except TemplateRefused:
            continue
        if turn is not None:
            completions.append(renderer.tokenizer.encode_after_control(turn[1]).ids)
    return tuple(completions)


def stream(template: str, ids: list[int], step: int, stop_strings: tuple[str, ...] = ()) -> Reply:
    """Parse `step` tokens at a time; the deltas must add up to the reply."""
    renderer = load_renderer(template)
    parser = renderer.parser(grammar.setup(renderer.fingerprint, {}), stop_strings=stop_strings)
    deltas = [parser.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
    rest, reply = parser.finish()
    deltas.append(rest)
    assert "".join(delta.content for delta in deltas) == reply.content
    assert "".join(delta.reasoning for delta in deltas) == reply.reasoning
    assert tuple(call for delta in deltas for call in delta.tool_calls) == reply.calls_for_client
    return reply


@pytest.mark.parametrize(
    "template", [slow_unless(name, QWEN3, MISTRAL_V13) for name in SMALL_TEMPLATES + REAL_TEMPLATES]
)
def test_truncated_completion_loses_no_text_and_invents_no_call(template: str) -> None:
    renderer = load_renderer(template)
    words = ("answerword", "thoughtword", "line one", "réponse")
    for ids in written(template):
        whole = stream(template, ids, 1)
        complete = [(call.name, call.arguments) for call in whole.tool_calls]
        for n in range(len(ids)):
            reply = stream(template, ids[:n], n or 1)
            calls = [(call.name, call.arguments) for call in reply.calls_for_client]
            assert calls == complete[: len(calls)]
            assert all(call.status == "ok" for call in reply.calls_for_client)
            text = renderer.tokenizer.decode(ids[:n])
            shown = "".join([reply.content, reply.reasoning, *(call.arguments for call in reply.tool_calls)])
            assert [word for word in words if word in text and word not in shown] == []


def mangled(template: str, rng: random.Random) -> list[int]:
    """Draw ids of one or two completions, with pieces missing, doubled, moved and inserted."""
    renderer = load_renderer(template)
    tokenizer = renderer.tokenizer
    ids = [i for _ in range(rng.randint(1, 2)) for i in rng.choice(written(template))]
    controls = [control.id for control in tokenizer.controls if control.content in renderer.template.source]
    strewn = [*' \n{}"x<>\\[];,:', "}}", "</", "function", "parameter", "```", "measure", '{"name": "measure"}']
    for _ in range(rng.randint(0, 6)):
        at, kind = rng.randint(0, len(ids)), rng.randint(0, 4)
        if kind == 0:
            del ids[at : at + rng.randint(1, 5)]
        elif kind == 1:
            ids[at:at] = tokenizer.encode_plain(rng.choice(strewn))
        elif kind == 2 and controls:
            ids.insert(at, rng.choice(controls))
        elif kind == 3:
            del ids[at:]
        else:
            start = rng.randint(0, len(ids))
            ids[at:at] = ids[start : start + 20]
    if rng.random() < 0.5:
        stops = renderer.stop_ids(grammar.setup(renderer.fingerprint, {}))
        ids = [token_id for token_id in ids if token_id not in stops]
    return ids


@pytest.mark.parametrize(
    "templates",
    [SMALL_TEMPLATES, *([pytest.param(REAL_TEMPLATES, marks=pytest.mark.slow)] if REAL_TEMPLATES else [])],
    ids=["small", "real"][: 1 + bool(REAL_TEMPLATES)],
)
@given(data=st.data(), seed=st.integers(0, 2**32), stop=st.sampled_from([(), ("here",), ("\n\n",)]))
@settings(max_examples=examples(40), deadline=None)
def test_reply_does_not_depend_on_token_chunking(
    templates: list[str], data: st.DataObject, seed: int, stop: tuple[str, ...]
) -> None:
    template = data.draw(st.sampled_from(templates))
    ids = mangled(template, random.Random(seed))
    whole = stream(template, ids, len(ids) or 1, stop)
    assert stream(template, ids, 1, stop) == whole
    assert stream(template, ids, 3, stop) == whole


HOSTILE = [
    "<tool_call>" * 3000,
    '<tool_call>{"name": "measure", "arguments": ' + '{"a": ' * 20000,
    '{"name": "measure", "parameters": ' + "[" * 50000,
    '<tool_call>{"name": "measure", "arguments": "' + "\\" * 30001,
    "<tool_call><function=measure>" + "<parameter=place>" * 3000,
    "<tool_call><function=measure><parameter=tags>" + "[" * 5000,
    "[TOOL_CALLS]" * 3000 + "[" * 3000,
    "<|channel|>" * 2000 + "<|message|>" * 2000,
    "</think>" * 2000 + "<think>" * 2000,
    " \n" * 20000 + "<tool_call>" + "\n" * 20000,
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "template", [QWEN3, CODER, GLM, LLAMA, MISTRAL_V3, MISTRAL_V13, DEEPSEEK_V31, GPT_OSS, MINIMAX]
)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_are_parsed_to_their_end(template: str, text: str) -> None:
    reply = parse(template, text, ended=False)
    json.dumps([reply.content, reply.reasoning, [call.arguments for call in reply.tool_calls]]).encode("utf-8")
    assert [call for call in reply.tool_calls if call.status == "ok"] == []
