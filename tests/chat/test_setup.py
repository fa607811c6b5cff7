"""Inputs of rendering other than messages are part of the setup and always affect the ids.

The oracle is `apply_chat_template` of transformers with a plain tokenizer, which caches nothing between calls.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.searching import examples
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest
from tokentape.types import Setup

QUESTION = {"role": "user", "content": "what is 3 + 4?"}
REPLY = {"role": "assistant", "content": "7"}
SHOWS_EVERYTHING = """
{%- for tool in tools or [] -%}{{ tool | tojson }};{%- endfor -%}
{%- if note is defined -%}{{ note | tojson }};{%- endif -%}
{{- strftime_now('%d %b %Y') -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""Its calls can't be parsed, and need not be."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@cache
def plain_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))


def expected(tools: Sequence[Any], kwargs: dict[str, Any], day: str) -> list[int]:
    # transformers always uses the current date.
    template = SHOWS_EVERYTHING.replace("strftime_now('%d %b %Y')", repr(f"{date.fromisoformat(day):%d %b %Y}"))
    ids: list[int] = plain_tokenizer().apply_chat_template(
        [QUESTION],
        chat_template=template,
        tools=[copy.deepcopy(tool) for tool in tools] or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **kwargs,
    )
    return ids


def fresh() -> Renderer:
    return Renderer(tokenizer(), ChatTemplate(SHOWS_EVERYTHING))


words = st.sampled_from(["add", "mul", "x", "y"])
# Few values, so that setups often differ only in a type, an order or a position.
values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, "0", "1", "", "true"]),
    lambda inner: st.lists(inner, max_size=2) | st.lists(st.tuples(words, inner), max_size=3).map(dict),
    max_leaves=4,
)
objects = st.lists(st.tuples(words, values), max_size=3).map(dict)
tool_lists = st.lists(objects.map(lambda schema: {"type": "function", "function": {"name": "f", **schema}}), max_size=2)
contents = st.tuples(
    tool_lists,
    st.just({}) | values.map(lambda note: {"note": note}),
    st.sampled_from(["2026-01-01", "2026-01-02"]),
)


def turned(value: Any) -> Any:
    """Return the same JSON with the keys of objects in reverse order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


@given(st.lists(contents, min_size=2, max_size=5))
@settings(max_examples=examples(60))
def test_ids_match_apply_chat_template_after_any_earlier_rendering(many: list[Any]) -> None:
    renderer = fresh()
    other_orders = [(turned(tools), turned(kwargs), day) for tools, kwargs, day in many]
    for tools, kwargs, day in [*many, *other_orders, *many]:
        actual_ids = renderer.render([QUESTION], tools, template_kwargs=kwargs, date=day).ids.tolist()
        assert actual_ids == expected(tools, kwargs, day)


def in_order(content: Any) -> str:
    # `repr` distinguishes 1, 1.0 and True, and keeps the order of keys.
    return repr(content)


@given(contents, contents)
def test_different_setups_have_different_keys(left: Any, right: Any) -> None:
    renderer = fresh()
    first, second = renderer.setup(*left), renderer.setup(*right)
    assert (first.key == second.key) == (in_order(left) == in_order(right))
    if first.key != second.key:
        assert first is not second


@given(contents)
def test_a_setup_with_another_fingerprint_has_another_key_and_digest(content: Any) -> None:
    setup = fresh().setup(*content)
    other = dataclasses.replace(setup, fingerprint="other")
    assert (other.key, other.digest) != (setup.key, setup.digest)
    assert other.key != setup.key
    assert other.digest != setup.digest


@given(contents)
def test_the_digest_is_that_of_the_fields_with_keys_in_any_order(content: Any) -> None:
    tools, kwargs, day = content
    renderer = fresh()
    assert renderer.setup(tools, kwargs, day).digest == renderer.setup(turned(tools), turned(kwargs), day).digest


def test_tools_are_rendered_in_the_order_of_their_keys() -> None:
    renderer = fresh()
    tool = {"type": "function", "function": {"name": "add", "description": "adds"}}
    turned = {"function": {"description": "adds", "name": "add"}, "type": "function"}
    first, second = (
        renderer.render([QUESTION], [variant], date="2026-01-01").ids.tolist() for variant in (tool, turned)
    )
    assert first == expected([tool], {}, "2026-01-01")
    assert second == expected([turned], {}, "2026-01-01")
    assert first != second


def test_changing_a_tool_later_makes_another_setup() -> None:
    renderer = fresh()
    tool = {"type": "function", "function": {"name": "add"}}
    before = renderer.setup([tool], date="2026-01-01")
    kept = json.loads(json.dumps(tool))
    tool["function"]["name"] = "mul"  # type: ignore[index]
    assert renderer.render([QUESTION], before).ids.tolist() == expected([kept], {}, "2026-01-01")
    actual_ids = renderer.render([QUESTION], [tool], date="2026-01-01").ids.tolist()
    assert actual_ids == expected([tool], {}, "2026-01-01")


def test_setup_replaces_tools_kwargs_and_date() -> None:
    renderer = fresh()
    arguments = ([{"type": "function", "function": {"name": "add"}}], {"note": 1}, "2026-01-01")
    setup = renderer.setup(*arguments)
    again = renderer.render([QUESTION], arguments[0], template_kwargs=arguments[1], date=arguments[2])
    assert renderer.render([QUESTION], setup).ids.tolist() == again.ids.tolist()


@pytest.mark.parametrize("more", [{"template_kwargs": {"note": 1}}, {"date": "2026-01-01"}])
def test_setup_can_not_be_combined_with_kwargs_or_a_date(more: dict[str, Any]) -> None:
    renderer = fresh()
    with pytest.raises(InvalidRequest, match="either a `Setup` or `template_kwargs`"):
        renderer.render([QUESTION], renderer.setup(), **more)


def test_digest_can_not_be_passed() -> None:
    with pytest.raises(TypeError):
        Setup((), {}, "2026-01-01", "fingerprint", "digest")  # type: ignore[call-arg]


@pytest.mark.parametrize("tools", [[{"name": {1, 2}}], [{"name": float("nan")}]])
def test_tools_that_are_not_json_are_refused(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        fresh().render([QUESTION], tools)


def test_setup_of_another_renderer_contributes_tools_kwargs_and_date() -> None:
    renderer, other = fresh(), Renderer.load(MODEL)
    tools = [{"type": "function", "function": {"name": "add"}}]
    foreign = other.setup(tools, date="2026-01-01")
    assert foreign.fingerprint == other.fingerprint != renderer.fingerprint
    other.render([QUESTION], foreign)
    assert renderer.render([QUESTION], foreign).ids.tolist() == expected(tools, {}, "2026-01-01")


def test_default_date_is_today() -> None:
    before = datetime.now(UTC).date()
    setup = fresh().setup()
    assert before <= date.fromisoformat(setup.date) <= datetime.now(UTC).date()


@pytest.mark.parametrize(
    "arguments",
    [
        {"tools": "search"},
        {"tools": ["search"]},
        {"tools": {"type": "function"}},
        {"date": "yesterday"},
        {"template_kwargs": {"add_generation_prompt": False}},
        {"template_kwargs": {"tools": []}},
    ],
)
def test_arguments_that_would_have_no_or_another_effect_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        fresh().setup(**arguments)
