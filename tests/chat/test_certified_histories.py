"""Histories and turns that change later text of a template. Regression: real templates were certified `local`."""

from __future__ import annotations

import pytest

from tests.chat.conftest import call, load_tokenizer, result, setup_for
from tests.chat.oracle import by_transformers
from tokentape.chat import _grammar as grammar
from tokentape.chat._certification import certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate

CALLS = "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

COUNTS_FROM_THE_SYSTEM_MESSAGE = (
    "{% set said = messages[1:] if messages[0].role == 'system' else messages %}{% for m in said %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "{% endif %}"
    + PROMPT
)
"""After a system message, it checks whether the message two before is a result, which changes the next beginning."""

CLOSES_RESULTS_AT_CONTENT = (
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ ', ' if ns.open else '<tool_response>' }}{% set ns.open = true %}{{ m.content }}{% else %}"
    "{% if ns.open and m.content is defined %}</tool_response>{% set ns.open = false %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "{% endif %}" + PROMPT
)
"""A turn without a content key leaves a list of results open."""

TAKES_CONTENT_APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content %}"
    "{{ said or '' }}" + CALLS + PROMPT
)
"""A turn without a content key is accepted only at the end."""

COUNTS_FAILURES = (
    "{% set ns = namespace(failed=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if m.role == 'tool' %}{% set ns.failed = ns.failed + 1 if 'error:' in m.content else 0 %}"
    "{% if ns.failed > 1 %} ({{ ns.failed }} failures){% endif %}{% endif %}" + CALLS + PROMPT
)
"""A failed result after another failed result is written differently."""

NEEDS_TOOLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}" + CALLS + PROMPT
)


@pytest.mark.parametrize("source", [COUNTS_FROM_THE_SYSTEM_MESSAGE, CLOSES_RESULTS_AT_CONTENT])
def test_a_step_after_a_result_may_depend_on_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("tool",))
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    certificate = certify(renderer)
    assert [continuation.strategy for continuation in certificate.continuations] == ["contextual"]
    first, second = ({"role": "assistant", "content": None, "tool_calls": [call(n, {"a": n})]} for n in (1, 2))
    history = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, first, result(1)]
    whole = by_transformers(renderer, [*history, second, result(2)])
    assert whole is not None
    opening, closing, end = (
        renderer.tokenizer.control(token).id for token in ("<tool_call>", "</tool_call>", "<|im_end|>")
    )
    start, stop = (len(whole) - whole[::-1].index(token) for token in (opening, closing))
    sampled = renderer.tokenizer.array([*whole[start - 1 : stop], end])
    bridge = renderer.bridge(sampled, second, [result(2)], setup_for(renderer), history).ids.tolist()
    assert [end, *bridge] == whole[stop:]


def test_result_with_a_word_may_depend_on_earlier_results_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("user", "tool"))
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(COUNTS_FAILURES)))
    assert [continuation.strategy for continuation in certificate.continuations] == ["local", "contextual"]


def test_missing_content_key_is_added_if_the_template_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("tool",))
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(TAKES_CONTENT_APART)))
    assert [continuation.strategy for continuation in certificate.continuations] == ["local"]


def test_template_that_requires_tools_is_certified_for_conversations_with_tools() -> None:
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(NEEDS_TOOLS)))
    assert {
        continuation.strategy for continuation in certificate.continuations if grammar.NO_TOOLS not in continuation.name
    } == {"local"}
    assert {
        continuation.strategy for continuation in certificate.continuations if grammar.NO_TOOLS in continuation.name
    } == {"refused"}
    assert all(check.holds is not False for check in certificate.parsing)
