"""Sampled ids in place of the template's text, in conversations rendered from the start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.conftest import call, load_tokenizer, result, setup_for
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate

QUESTION: dict[str, Any] = {"role": "user", "content": "and"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "hi"}
TALK = [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "ho"}, QUESTION]

NUMBERED = """{%- for m in messages -%}<|im_start|>{{ m.role }} {{ loop.index }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant {{ messages | length + 1 }}
{% endif -%}"""

BRIEF = """{%- for m in messages -%}
{%- set told = m.role == 'assistant' and '/brief' in messages[loop.index0 - 1].content -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ ('<think></think>' if told else '') ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' ~ ('<think></think>' if '/brief' in messages[-1].content else '') }}
{%- endif -%}"""


def spliced(source: str, messages: list[dict[str, Any]], turns: dict[int, str]) -> tuple[str, str]:
    """Return the text of a conversation with these turns by their ids, and without."""
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    sampled = {n: tokenizer.array(tokenizer.encode_plain(text)) for n, text in turns.items()}
    actual_ids = renderer.render(messages, setup, sampled=sampled).ids.tolist()
    for ids in sampled.values():
        assert any(actual_ids[n : n + len(ids)] == ids.tolist() for n in range(len(actual_ids)))
    return tokenizer.decode(actual_ids), tokenizer.decode(renderer.render(messages, setup).ids.tolist())


def test_turn_keeps_the_number_of_its_prompt() -> None:
    with_ids, written = spliced(NUMBERED, TALK, {1: "hi<|im_end|>", 3: "ho<|im_end|>"})
    assert with_ids == written
    assert "<|im_start|>assistant 4\nho" in with_ids


@pytest.mark.parametrize("last", ["and", "/brief"])
def test_turn_follows_the_opener_of_its_prompt(last: str) -> None:
    messages = [{**QUESTION, "content": "/brief"}, *TALK[1:-1], {**QUESTION, "content": last}]
    with_ids, written = spliced(BRIEF, messages, {1: "hi<|im_end|>", 3: "ho<|im_end|>"})
    assert with_ids == written


ENDS_IN_TEXT = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{{ '.' if m.role == 'assistant' else '<|im_end|>' }}
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_no_turn_replaces_the_message_after_it() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(ENDS_IN_TEXT))
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    sampled = {1: tokenizer.array(tokenizer.encode_plain("hi."))}
    text = tokenizer.decode(renderer.render(TALK[:3], setup, sampled=sampled).ids.tolist())
    assert text == tokenizer.decode(renderer.render(TALK[:3], setup).ids.tolist())


HEADER_TWICE = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ m.content }}
{%- if loop.last or loop.nextitem.role != 'user' -%}<|box_end|><|box_end|>{%- endif -%}
{%- elif m.role == 'tool' -%}<tool_response>{{ m.content }}</tool_response>
{%- else -%}{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>{%- endif -%}
{%- endfor -%}"""
"""Two headers precede a call, and none precedes the answer after its result: as many headers as turns."""


def test_a_header_that_is_written_twice_does_not_count_for_two_turns() -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": 1})]}
    messages = [QUESTION, calling, result(1), ANSWER, QUESTION, {**ANSWER, "content": "ho"}]
    for sampled in ({3: "hi<|im_end|>"}, {3: "hi<|im_end|>", 5: "ho<|im_end|>"}):
        with_ids, written = spliced(HEADER_TWICE, messages[: max(sampled) + 1], sampled)
        assert with_ids == written


TOGGLED = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ WRITTEN if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{{ ON if thinking else OFF }}{% endif -%}"""


@pytest.mark.parametrize("written", ["", "<think></think>", "</think>"])
@pytest.mark.parametrize(
    ("on", "off"),
    [
        ("", "<think>\n\n</think>\n\n"),
        ("<think>", "</think>"),
        ("<think>", "<think></think>"),
        ("<think>\n", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_ids_of_another_setup_follow_the_prompt_that_they_were_sampled_after(
    written: str, on: str, off: str, thinking: bool
) -> None:
    """A branch that turns thinking on or off has the earlier turn's ids after the earlier generation prompt."""
    source = TOGGLED.replace("WRITTEN", repr(written)).replace("ON", repr(on)).replace("OFF", repr(off))
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    tokenizer = renderer.tokenizer
    sampled_under, now = (renderer.setup(template_kwargs={"thinking": value}) for value in (thinking, not thinking))
    prompt = renderer.render([QUESTION], sampled_under).ids
    completion = tokenizer.array(tokenizer.encode_marked(tokenizer.mark_controls("hm</think>hi<|im_end|>")).ids)
    turn = [*prompt.tolist(), *completion.tolist()]
    messages = [QUESTION, ANSWER, QUESTION]
    actual = renderer.render(messages, now, sampled={1: completion}, prompts={1: prompt}).ids.tolist()
    assert actual[: len(turn)] == turn
    assert (
        tokenizer.decode(actual[len(turn) :])
        == f"\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n{off if thinking else on}"
    )


def test_reasoning_that_another_setup_opened_and_cut_short_is_closed() -> None:
    """The prompt opened the reasoning, which the present setup does not know."""
    written = "('<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' if m.reasoning_content else '')"
    source = TOGGLED.replace("WRITTEN", written).replace("ON", r"'<think>\n'").replace("OFF", "''")
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    tokenizer = renderer.tokenizer
    thinking, plain = (renderer.setup(template_kwargs={"thinking": value}) for value in (True, False))
    prompt = renderer.render([QUESTION], thinking).ids
    messages = [QUESTION, {"role": "assistant", "content": "", "reasoning_content": "hm"}, QUESTION]
    sampled = {1: tokenizer.array(tokenizer.encode_plain("hm"))}
    text = tokenizer.decode(renderer.render(messages, plain, sampled=sampled, prompts={1: prompt}).ids)
    assert "assistant\n<think>\nhm\n</think>\n\n<|im_end|>" in text
