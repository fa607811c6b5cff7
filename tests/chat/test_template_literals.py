"""Attribution of texts by the surroundings of earlier texts equals the attribution by a second rendering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import (
    REAL_TEMPLATES,
    SMALL_TEMPLATES,
    call,
    load_renderer,
    load_tokenizer,
    result,
    setup_for,
    slow_unless,
)
from tokentape.chat._caller_text import TemplateLiterals, Text, template_literals
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.errors import TemplateRefused
from tokentape.types import Provenance

T, U, V = Provenance.TEMPLATE, Provenance.USER, Provenance.TOOL
TEXTS = st.sampled_from(
    ["ok", " ok", "ok\n", "\n a \n", "user", "<|im_end|>", "<tool_response>\n", "{}", " ", "", "\0", "a b\n\nc \u4e2d"]
)


def bridged(renderer: Renderer, reply: dict[str, Any], new: list[dict[str, Any]]) -> PromptTokens | None:
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain("hi"))
    try:
        return renderer.bridge(ids, reply, new, setup_for(renderer))
    except TemplateRefused:
        return None


@pytest.mark.sampled(8)
@pytest.mark.parametrize("template", [*SMALL_TEMPLATES, *map(slow_unless, REAL_TEMPLATES)])
@settings(max_examples=6)
@given(rounds=st.lists(st.tuples(st.sampled_from(["user", "tool", "tools"]), TEXTS, TEXTS), min_size=2, max_size=5))
def test_bridge_is_the_same_with_or_without_earlier_renderings(
    template: str, rounds: list[tuple[str, str, str]]
) -> None:
    renderer = load_renderer(template)
    renderer._literals.clear()
    plain_reply = {"role": "assistant", "content": "hi"}
    for kind, first, second in rounds:
        calls = {"tool": [call(0, {"a": 1})], "tools": [call(0, {"a": 1}), call(1, {"a": 2})], "user": []}[kind]
        reply = {**plain_reply, "tool_calls": calls} if calls else plain_reply
        new = [result(n, text) for n, text in enumerate([first, second][: len(calls)])]
        new = new or [{"role": "user", "content": first}]
        warm = bridged(renderer, reply, new)
        kept = dict(renderer._literals)
        renderer._literals.clear()
        cold = bridged(renderer, reply, new)
        renderer._literals.update(kept)
        assert (warm is None) == (cold is None)
        if warm is not None and cold is not None:
            assert warm.ids.tolist() == cold.ids.tolist()
            assert warm.provenance.tolist() == cold.provenance.tolist()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("template", [*SMALL_TEMPLATES, *map(slow_unless, REAL_TEMPLATES)])
@settings(max_examples=6)
@given(first=st.lists(TEXTS, min_size=5, max_size=5), second=st.lists(TEXTS, min_size=5, max_size=5))
def test_prompt_is_the_same_with_or_without_earlier_renderings(
    template: str, first: list[str], second: list[str]
) -> None:
    renderer = load_renderer(template)
    setup = setup_for(renderer)

    def prompt(contents: list[str]) -> tuple[list[int], list[int]] | None:
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, ["Be kind.", *contents], strict=True)]
        try:
            made = renderer.render(messages, setup)
        except TemplateRefused:
            return None
        return made.ids.tolist(), made.provenance.tolist()

    renderer._literals.clear()
    prompt(first)
    prompt(["one", "two", "three", "four", "five"])
    warm = prompt(second)
    renderer._literals.clear()
    assert prompt(second) == warm


def test_texts_that_differ_only_at_their_ends_stay_different_in_a_first_rendering() -> None:
    source = (
        "{% set last = messages[-1] %}{% for m in messages %}{% if m.content == last.content %}Last: {% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    made = renderer.render([{"role": "user", "content": text} for text in ("ok", "so")], setup_for(renderer))
    assert renderer.tokenizer.decode(made.ids[made.provenance == Provenance.USER].tolist()) == "okso"


def renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by each rendering's number of messages."""
    rendered: list[int] = []
    render = Renderer._render

    def counting(self: Renderer, messages: Any, setup: Any, *, generate: bool) -> str:
        rendered.append(len(messages))
        return render(self, messages, setup, generate=generate)

    monkeypatch.setattr(Renderer, "_render", counting)
    return rendered


def test_bracketed_word_of_a_caller_is_caller_text() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    made = renderer.render([{"role": "user", "content": "think"}], setup_for(renderer))
    assert renderer.tokenizer.decode(made.ids[made.provenance == Provenance.USER].tolist()) == "think"


def test_prompts_that_differ_only_in_texts_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    renderer._literals.clear()
    renderer.render([{"role": "user", "content": "warm"}], setup_for(renderer))
    rendered = renderings(monkeypatch)
    made = renderer.render([{"role": "user", "content": "other"}], setup_for(renderer))
    assert rendered == [1]
    text = renderer.tokenizer.decode(made.ids[made.provenance == Provenance.USER].tolist())
    assert text == "other"


def test_a_second_tool_result_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = load_renderer("qwen3/templates/Qwen3.jinja")
    renderer._literals.clear()
    reply = {"role": "assistant", "content": "", "tool_calls": [call(0, {"a": 1})]}
    assert bridged(renderer, reply, [result(0, "warm")]) is not None
    rendered = renderings(monkeypatch)
    assert bridged(renderer, reply, [result(0, "another\n")]) is not None
    assert len(rendered) == 1
    assert bridged(renderer, reply, [result(0, " a third")]) is not None
    assert len(rendered) == 2


def codes(text: str, user: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([U if char in user else T for char in text], dtype=np.uint8)


@pytest.mark.parametrize(
    ("written", "text", "expected"),
    [
        ("<a>XY<b>", Text("XY", "XY", U), TemplateLiterals(("<a>", "<b>"), trims=False)),
        ("<a>XY <b>", Text("XY ", "XY", U), TemplateLiterals(("<a>", "<b>"), trims=False)),
        ("<a>XY<b>", Text(" XY ", "XY", U), TemplateLiterals(("<a>", "<b>"), trims=True)),
        ("<a>XY<b>XY", Text("XY", "XY", U), None),
        ("<a><b>", Text("XY", "XY", U), None),
        ("", Text("XY", "XY", U), None),
    ],
)
def test_surroundings_of_a_text_are_read(written: str, text: Text, expected: TemplateLiterals | None) -> None:
    assert template_literals(written, codes(written, "XY"), [text]) == expected


@pytest.mark.parametrize("written", ["<a>Z<b>!", "<a>Z<c>", "<a >Z<b>", "<a>Zz<b>", "<a>Z", ""])
def test_unknown_surroundings_give_none(written: str) -> None:
    known = TemplateLiterals(("<a>", "<b>"), trims=True)
    assert known.codes(written, [Text("Z", "Z", V)]) is None
    codes = known.codes("<a>Z<b>", [Text("Z", "Z", V)])
    assert codes is not None
    assert codes.tolist() == [T, T, T, V, T, T, T]
    assert known.codes("<a>Z<b>", []) is None
