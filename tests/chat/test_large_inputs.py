"""Ordinary templates render large conversations as transformers does, within the limits of the sandbox."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.chat.conftest import REAL_TEMPLATES, SMALL_TEMPLATES, model_path, slow_unless
from tests.chat.oracle import rendered_by_transformers
from tests.data import REAL
from tokentape.chat._template import ChatTemplate, _with_parts, plain_message, read_source
from tokentape.errors import TemplateRefused

TRIAL = sorted((REAL.parent / "trial" / "templates").glob("*.jinja"))
TEMPLATES: dict[str, Path] = {name: model_path(name) for name in SMALL_TEMPLATES + REAL_TEMPLATES}
TEMPLATES |= {f"trial/{path.name}": path for path in TRIAL}

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def schema(depth: int) -> dict[str, Any]:
    leaf = {"type": "string", "description": "a thing <b> " * 10, "enum": ["a", "b", None]}
    properties = {f"p{number}": schema(depth - 1) if depth else leaf for number in range(3)}
    return {"type": "object", "properties": properties, "required": ["p0"]}


def tools(count: int, depth: int) -> list[dict[str, Any]]:
    parameters = schema(depth)
    return [
        {"type": "function", "function": {"name": f"f{n}", "description": "does " * 20, "parameters": parameters}}
        for n in range(count)
    ]


def conversation(turns: int, size: int, *, calls: bool = True) -> list[dict[str, Any]]:
    """Return a system message and turns with a question, reasoning, a call, its result and an answer of `size` each."""
    text = "x y <z> 漢\n" * (size // 10)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}]
    for turn in range(turns):
        function = {"name": "f1", "arguments": {"p0": text, "n": turn, "o": {"k": [1, 2.5, {"z": None}]}}}
        called = {"id": f"a{turn:08d}", "type": "function", "function": function}
        messages.append({"role": "user", "content": f"q {turn} {text}"})
        if calls:
            messages += [
                {"role": "assistant", "content": "", "reasoning_content": "\n" + text, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": called["id"], "name": "f1", "content": text},
            ]
        messages.append({"role": "assistant", "content": f"<think>\n{text}</think>\n\n{text}"})
    return [plain_message(message) for message in [*messages, {"role": "user", "content": text}]]


INPUTS = {
    "contents of 200 kB": (conversation(3, 200_000), []),
    "100 tools with deep schemas": (conversation(1, 100), tools(100, 3)),
    "300 tools": (conversation(1, 100), tools(300, 1)),
    "3,000 messages": (conversation(1500, 400, calls=False), []),
    "4,002 messages": (conversation(1000, 10), []),
    "1,000 messages": (conversation(250, 800), []),
    "1,000 messages with tools": (conversation(250, 100), tools(20, 1)),
}


def check_equal(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    template = ChatTemplate(source)
    today = datetime.date.today().isoformat()
    converted = [dict(_with_parts(message)) for message in messages] if template.takes_parts_only else messages
    try:
        expected = rendered_by_transformers(source, converted, tools, VARIABLES)
    except (jinja2.TemplateError, TypeError):
        with pytest.raises(TemplateRefused, match=r" failed on |refused this conversation: (?!it )"):
            template.render(messages, tools=tools, add_generation_prompt=True, date=today, variables=VARIABLES)
        return
    rendered = template.render(messages, tools=tools, add_generation_prompt=True, date=today, variables=VARIABLES)
    assert rendered == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("input_name", [slow_unless(name, *(INPUTS.keys() - {"4,002 messages"})) for name in INPUTS])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_large_input_renders_as_by_transformers(template: str, input_name: str) -> None:
    check_equal(read_source(TEMPLATES[template]), *INPUTS[input_name])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% set c = m.content %}{{ c.lstrip('\\n') }}{{ c.rfind('y') }}{% endfor %}",
        "{% block a %}{% set c = messages[1].content %}{{ c.lstrip('\\n') }}{% endblock %}",
        "{% for m in messages %}{{ m.content|trim('\\n') }}{% endfor %}{{ messages|tojson }}",
        "{{ (messages * 3)|tojson|length }}{{ messages|string|length }}{{ '%s %s' % (messages[0].content, messages) }}",
        "{% for m in messages %}{{ '{} {}'.format(m.role, m.content) }}{{ m.content.split('\\n')|length }}{% endfor %}",
    ],
)
def test_expressions_accept_long_texts(source: str) -> None:
    check_equal(source, conversation(3, 200_000, calls=False), [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t %}{{ ns.t }}{{ m.content }}{% endset %}"
        "{% endfor %}{{ ns.t }}",
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l|tojson }}",
        "{% for m in messages %}{% for k in messages[loop.index0:] if k.role == 'tool' %}{% endfor %}{% endfor %}",
    ],
)
def test_memory_counts_only_while_values_exist(source: str) -> None:
    check_equal(source, conversation(800, 2000, calls=False), [])
