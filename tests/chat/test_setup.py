"""What rendering depends on besides the messages is computed, kept apart and always reaches the ids.

The oracle is `apply_chat_template` of transformers with a plain tokenizer, which keeps nothing between calls.
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
"""Its calls can't be read, and need not be."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@cache
def plain_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))


def expected(tools: Sequence[Any], kwargs: dict[str, Any], day: str) -> list[int]:
    # transformers takes no other today than today.
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
# Few values, so that setups are often equal but for one thing: a type, an order, a place.
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
    """The same JSON with the keys of objects in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(one) for one in value] if isinstance(value, list) else value


@given(st.lists(contents, min_size=2, max_size=5))
@settings(max_examples=examples(60))
def test_whatever_was_rendered_before_the_ids_are_those_of_apply_chat_template(many: list[Any]) -> None:
    renderer = fresh()
    other_orders = [(turned(tools), turned(kwargs), day) for tools, kwargs, day in many]
    for tools, kwargs, day in [*many, *other_orders, *many]:
        found = renderer.render([QUESTION], tools, template_kwargs=kwargs, date=day).ids.tolist()
        assert found == expected(tools, kwargs, day)


def in_order(content: Any) -> str:
    # `repr` tells 1, 1.0 and True apart and has keys in their order.
    return repr(content)


@given(contents, contents)
def test_setups_that_differ_in_anything_have_keys_of_their_own(one: Any, other: Any) -> None:
    renderer = fresh()
    first, second = renderer.setup(*one), renderer.setup(*other)
    assert (first.key == second.key) == (in_order(one) == in_order(other))
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


def test_tools_in_another_order_of_keys_are_rendered_in_that_order() -> None:
    renderer = fresh()
    tool = {"type": "function", "function": {"name": "add", "description": "adds"}}
    turned = {"function": {"description": "adds", "name": "add"}, "type": "function"}
    first, second = (renderer.render([QUESTION], [one], date="2026-01-01").ids.tolist() for one in (tool, turned))
    assert first == expected([tool], {}, "2026-01-01")
    assert second == expected([turned], {}, "2026-01-01")
    assert first != second


def test_later_changes_to_a_tool_are_another_setup() -> None:
    renderer = fresh()
    tool = {"type": "function", "function": {"name": "add"}}
    before = renderer.setup([tool], date="2026-01-01")
    kept = json.loads(json.dumps(tool))
    tool["function"]["name"] = "mul"  # type: ignore[index]
    assert renderer.render([QUESTION], before).ids.tolist() == expected([kept], {}, "2026-01-01")
    found = renderer.render([QUESTION], [tool], date="2026-01-01").ids.tolist()
    assert found == expected([tool], {}, "2026-01-01")


def test_a_setup_stands_for_its_tools_kwargs_and_date() -> None:
    renderer = fresh()
    given = ([{"type": "function", "function": {"name": "add"}}], {"note": 1}, "2026-01-01")
    setup = renderer.setup(*given)
    again = renderer.render([QUESTION], given[0], template_kwargs=given[1], date=given[2])
    assert renderer.render([QUESTION], setup).ids.tolist() == again.ids.tolist()


@pytest.mark.parametrize("more", [{"template_kwargs": {"note": 1}}, {"date": "2026-01-01"}])
def test_a_setup_is_not_given_with_kwargs_or_a_date_besides(more: dict[str, Any]) -> None:
    renderer = fresh()
    with pytest.raises(InvalidRequest, match="either a `Setup` or `template_kwargs`"):
        renderer.render([QUESTION], renderer.setup(), **more)


def test_a_digest_can_not_be_given() -> None:
    with pytest.raises(TypeError):
        Setup((), {}, "2026-01-01", "fingerprint", "digest")  # type: ignore[call-arg]


@pytest.mark.parametrize("tools", [[{"name": {1, 2}}], [{"name": float("nan")}]])
def test_tools_that_are_not_json_are_refused(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        fresh().render([QUESTION], tools)


def test_of_another_renderers_setup_tools_kwargs_and_date_are_used() -> None:
    renderer, other = fresh(), Renderer.load(MODEL)
    tools = [{"type": "function", "function": {"name": "add"}}]
    foreign = other.setup(tools, date="2026-01-01")
    assert foreign.fingerprint == other.fingerprint != renderer.fingerprint
    other.render([QUESTION], foreign)
    assert renderer.render([QUESTION], foreign).ids.tolist() == expected(tools, {}, "2026-01-01")


def test_without_a_date_it_is_today() -> None:
    before = datetime.now(UTC).date()
    setup = fresh().setup()
    assert before <= date.fromisoformat(setup.date) <= datetime.now(UTC).date()
