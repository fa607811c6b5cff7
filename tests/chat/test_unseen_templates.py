"""Templates written for these tests, each with a feature that the parser must detect: no name identifies it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.chat.conftest import ADD, STAND_IN, load_tokenizer, setup_for
from tests.searching import examples
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate, ParseCheck
from tokentape.chat._certification import certify, written_turn
from tokentape.chat._certify_continuations import Continuations
from tokentape.chat._parse import Reply
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.errors import TemplateRefused

pytestmark = pytest.mark.usefixtures("source")

USERS = "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
"""The beginning of each template; the rest writes the assistant's turns."""

END = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FRAMED = (
    USERS
    + """{% else %}<|im_start|>assistant
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{% if m.content %}<|box_start|>{{ m.content }}<|box_end|>{% endif -%}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Content has delimiters; reasoning closes before them or before a call."""

BESIDE_CALLS = (
    USERS
    + """{% else %}<|im_start|>assistant
<think>{% if m.tool_calls %}{{ m.reasoning_content or '' }}{% endif %}</think>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Reasoning is shown only with calls."""

PYTHON = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson if v is string else v }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}<|im_end|>
"""
    + END
)
"""Function-call notation, with no delimiters that are not also text."""

QUOTED = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>do:{{ c.function.name }}{
{%- for k, v in c.function.arguments.items() %}{{ k }}:
{%- if v is string %}<|quad_start|>{{ v }}<|quad_start|>{% else %}{{ v }}{% endif %}
{%- if not loop.last %},{% endif %}{% endfor %}}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Text between tokens that quote it."""

NUMBERED = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>functions.{{ c.function.name }}:{{ loop.index0 -}}
<|quad_start|>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Calls are counted after their names."""

UNCLOSED_VALUES = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{%
for k, v in c.function.arguments.items() %}<|quad_start|>{{ k }}<|quad_end|>{{ v if v is string else v | tojson }}{%
endfor %}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""A value ends where the next key or the call's end begins."""

NUMBERED_TAGS = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>call tool="{{ c.function.name }}" index="{{
loop.index }}"{% for k, v in c.function.arguments.items() %}<|quad_start|>{{ k }} type="{{ 'string' if v is string else
'boolean' if v is boolean else 'number' if v is number else 'json' }}"<|quad_end|>{{
v if v is string else v | tojson }}<|box_end|>{% endfor %}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Calls are counted in an attribute, and arguments have their types."""

ID_FIRST = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}<|quad_start|>{{ c.function.name -}}
<|quad_end|>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""A call's id is before its name."""

IN_STRING = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{
{'name': c.function.name, 'arguments': c.function.arguments | tojson} | tojson }}</tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Arguments are JSON text in a JSON string."""

NAME_IS_KEY = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% if m.tool_calls %}<tool_call>[{% for c in m.tool_calls %}{"{{ c.function.name }}": {{
c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]</tool_call>{% endif %}<|im_end|>
"""
    + END
)
"""The name is the only key of a call's object."""

ALWAYS_PROMPTED = FRAMED.replace("{% if add_generation_prompt %}", "{% if messages[-1].role != 'assistant' %}")
"""The generation prompt is always written."""

TWO_ENDS = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}
<|box_end|>
{% if loop.last %}<|im_end|>{% endif %}"""
    + END
)
"""Turns and conversations end with different tokens."""

AS_REASONING = FRAMED.replace(
    "{% if m.content %}<|box_start|>",
    "{% if m.tool_calls and m.content %}<think>{{ m.content }}</think>{% elif m.content %}<|box_start|>",
)
"""Text beside a call is written in place of reasoning."""

BARE = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
"""
    + END
)
"""Calls are bare JSON, directly after content."""

QUOTED_WHERE_NEEDED = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call><f n="{{ c.function.name }}">{%-
for k, v in c.function.arguments.items() %}<p k="{{ k }}">{% if v is string and ('<' in v or '\n' in v) -%}
<![CDATA[{{ v }}]]>{% else %}{{ v if v is string else v | tojson }}{% endif %}</p>{% endfor -%}
</f></tool_call>{% endfor %}<|im_end|>
"""
    + END
)
"""Text that contains tags is written between special tags."""

AS_MESSAGES = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}<|box_end|>
{% for c in m.tool_calls or [] %}function call<|quad_start|>{{ c.function | tojson }}<|box_end|>
{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)
"""Calls are written like further messages; the end of a message is before them."""

TEXT_SECTION = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% if m.tool_calls %}<calls>
{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}</calls>{% endif %}<|im_end|>
"""
    + END
)
"""A control token opens each call, and text opens their section."""

TOKENS_IN_TAGS = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% if m.tool_calls %}<|quad_start|>calls<|quad_end|>{% for c in m.tool_calls -%}
<|quad_start|>call tool="{{ c.function.name }}"<|quad_end|>{% for k, v in c.function.arguments.items() -%}
<|quad_start|>argument key="{{ k }}"<|quad_end|>{{ v if v is string else v | tojson }}<|box_start|>argument<|quad_end|>
{%- endfor %}<|box_start|>call<|quad_end|>{% endfor %}<|box_start|>calls<|quad_end|>{% endif %}<|im_end|>
"""
    + END
)
"""Tags begin and end with control tokens, as Kimi K3 writes them."""

SPACED_END = (
    USERS
    + """{% else %}<|im_start|>assistant
{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' -}}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\n\n' }}<|im_end|>
"""
    + END
)
"""More white space is written before the end of a turn than before a call."""

SPACED_CLOSE = SPACED_END.replace("{{ '\n\n' }}<|im_end|>", "{{ '\n' }}<|box_end|><|endoftext|>")
"""White space is written before a call and before the token that closes the content."""

TEXT_QUOTED = {"PYTHON": PYTHON, "QUOTED": QUOTED}
ALL = {
    "FRAMED": FRAMED,
    "BESIDE_CALLS": BESIDE_CALLS,
    **TEXT_QUOTED,
    "NUMBERED": NUMBERED,
    "UNCLOSED_VALUES": UNCLOSED_VALUES,
    "NUMBERED_TAGS": NUMBERED_TAGS,
    "ID_FIRST": ID_FIRST,
    "IN_STRING": IN_STRING,
    "NAME_IS_KEY": NAME_IS_KEY,
    "ALWAYS_PROMPTED": ALWAYS_PROMPTED,
    "TWO_ENDS": TWO_ENDS,
    "BARE": BARE,
    "AS_MESSAGES": AS_MESSAGES,
    "QUOTED_WHERE_NEEDED": QUOTED_WHERE_NEEDED,
    "AS_REASONING": AS_REASONING,
    "TEXT_SECTION": TEXT_SECTION,
    "TOKENS_IN_TAGS": TOKENS_IN_TAGS,
    "SPACED_END": SPACED_END,
}
CALLS = ("call", "parallel calls", "no arguments", "typed arguments", "multi-line argument")


def renderer_of(source: str) -> Renderer:
    return _renderer(load_tokenizer(STAND_IN), source)


def certificate_of(source: str) -> Certificate:
    return _certificate(load_tokenizer(STAND_IN), source)


@cache
def _renderer(tokenizer: Tokenizer, source: str) -> Renderer:
    return Renderer(tokenizer, ChatTemplate(source))


@cache
def _certificate(tokenizer: Tokenizer, source: str) -> Certificate:
    return certify(_renderer(tokenizer, source))


@cache
def readings_of(source: str) -> tuple[ParseCheck, ...]:
    """Return a certificate's checks of reading turns back, without the slower checks of continuations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "NAMES", ())
        return certify(renderer_of(source)).parsing


def parsed(renderer: Renderer, text: str, step: int = 0, tools: tuple[Any, ...] = (ADD,)) -> Reply:
    """Return the reply in a completion, fed whole or `step` tokens at a time."""
    ids = renderer.tokenizer.encode_after_control(renderer.tokenizer.mark_controls(text)).ids
    parser = renderer.parser(setup_for(renderer, tools=tools))
    for at in range(0, len(ids), step or len(ids)):
        parser.feed(ids[at : at + (step or len(ids))])
    return parser.finish()[1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ALL)
def test_every_turn_that_a_template_writes_is_read_back(name: str) -> None:
    checks = readings_of(ALL[name])
    failed = [(check.name, check.detail) for check in checks if check.holds is False]
    # If arguments are bare text, null and its spelling look the same.
    assert [failure for failure in failed if failure[0] != "null argument"] == []
    held = {check.name for check in checks if check.holds}
    assert held >= {"content", "white space", "unicode", "code", *CALLS}


@pytest.mark.parametrize("name", ALL)
def test_turns_are_read_back_equally_token_by_token(name: str) -> None:
    renderer = renderer_of(ALL[name])
    setup = grammar.setup(renderer.fingerprint, {})
    for message in grammar.TURNS.values():
        try:
            written = written_turn(renderer, setup, message)
        except TemplateRefused:
            continue
        assert written is not None
        ids = renderer.tokenizer.encode_after_control(written[1]).ids
        whole, streamed = renderer.parser(setup), renderer.parser(setup)
        whole.feed(ids)
        deltas = [streamed.feed([token_id]) for token_id in ids]
        rest, reply = streamed.finish()
        assert reply == whole.finish()[1]
        assert "".join(delta.content for delta in [*deltas, rest]) == reply.content


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["FRAMED", "ALWAYS_PROMPTED"])
def test_reasoning_closes_before_the_opener_of_content(name: str) -> None:
    renderer = renderer_of(ALL[name])
    reply = parsed(renderer, "<think>Hm.</think><|box_start|>Yes.<|box_end|>Also this.<|im_end|>")
    assert (reply.reasoning, reply.content.split()) == ("Hm.", ["Yes.", "Also", "this."])
    assert certificate_of(ALL[name]).reasoning == ("<think>", "</think>")


PREFIXED = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>Final: {% endif %}{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
<think></think>{%- endif -%}"""


def test_common_opener_of_content_and_calls_does_not_close_reasoning() -> None:
    reply = parsed(renderer_of(PREFIXED), "Final: Yes.<|im_end|>")
    assert (reply.reasoning, reply.content.strip()) == ("", "Yes.")


CLOSED_AT_ONCE = PREFIXED.replace("Final: ", "")
"""Every header and the prompt close reasoning immediately: thinking is disabled."""


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Yes.<|im_end|>", "", "Yes."),
        ("<think>Hm.</think>Yes.<|im_end|>", "Hm.", "Yes."),
        ("<think>Hm.", "Hm.", ""),
    ],
)
@pytest.mark.parametrize("source", [CLOSED_AT_ONCE, PREFIXED], ids=["CLOSED_AT_ONCE", "PREFIXED"])
def test_reasoning_is_detected_though_the_prompt_closes_it(
    source: str, text: str, reasoning: str, content: str, step: int
) -> None:
    reply = parsed(renderer_of(source), text, step)
    assert (reply.reasoning, reply.content) == (reasoning, content)


@pytest.mark.parametrize("name", [*ALL, "PREFIXED", "CLOSED_AT_ONCE"])
def test_no_detected_delimiter_contains_half_a_mark(name: str) -> None:
    renderer = renderer_of({**ALL, "PREFIXED": PREFIXED, "CLOSED_AT_ONCE": CLOSED_AT_ONCE}[name])
    read = [*texts_in(asdict(renderer.format(setup_for(renderer))))]
    # Placeholders are of the high surrogates that no mark has.
    assert [text for text in read if re.search("[\ud800-\udb7f\udc00-\udfff]", MARK.sub("", text))] == []


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_in(item)


PROMPTED_LAST = "{% set last = add_generation_prompt and messages[-1].role == 'assistant' %}"
LEAVES_LAST_OUT = PROMPTED_LAST + "{% set messages = messages[:-1] if last else messages %}"


COUNTED = FRAMED.replace(
    "<|im_end|>\n{% endif %}{% endfor %}", "<|im_end|>\n({{ m.content | length }})\n{% endif %}{% endfor %}"
)


ASKS_ABOUT_LETTERS = FRAMED.replace(
    "<|im_end|>\n{% endif %}{% endfor %}",
    "<|im_end|>\n{{ '' if m.content is undefined or m.content.isascii() else '(unicode)' }}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("source", [COUNTED, ASKS_ABOUT_LETTERS], ids=["counted", "letters"])
def test_a_bridge_that_depends_on_the_text_of_the_turn_is_not_certified(source: str) -> None:
    renderer = renderer_of(source)
    found = Continuations(renderer, grammar.setup(renderer.fingerprint, {})).find("user")
    assert found.strategy == "fork"


def asking(about: str) -> str:
    """Return a template with a prompt that depends on something in earlier turns."""
    flag = "{% set ns = namespace(asked=false) %}"
    ask = "{% for m in messages %}{% if " + about + " %}{% set ns.asked = true %}{% endif %}"
    return (flag + FRAMED.replace("{% for m in messages %}", ask, 1)).replace(
        "<|im_start|>assistant\n{% endif %}", "{{ ns.asked }}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("user", "'unsure' in (m.reasoning_content or '')"),
        ("tool", "m.tool_calls and 'rm -rf' in m.tool_calls[0].function.arguments"),
        ("tool", "m.tool_calls and m.tool_calls[0].function.arguments | length > 1"),
        ("user", "m.role == 'assistant' and m.content == '/deep'"),
    ],
)
def test_a_bridge_that_depends_on_words_in_the_turn_is_not_certified(name: str, about: str) -> None:
    renderer = renderer_of(asking(about))
    found = Continuations(renderer, grammar.setup(renderer.fingerprint, {})).find(name)
    assert found.strategy == "fork"


LEAVES_CALLS_OUT = FRAMED.replace(
    "{% if m.content %}<|box_start|>{{ m.content }}<|box_end|>{% endif -%}",
    "{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' and m.content %}{{ m.content }}<|endoftext|>\n"
    "{% continue %}{% endif -%}{% if m.content %}<|box_start|>{{ m.content }}<|box_end|>{% endif -%}",
)


def test_calls_left_out_after_a_tool_result_keep_the_certificate() -> None:
    """DeepSeek-V3 does this. What it writes after the turn does not depend on the turn's text."""
    found = [
        Continuations(renderer, grammar.setup(renderer.fingerprint, {})).find("tool").strategy
        for renderer in map(renderer_of, (FRAMED, LEAVES_CALLS_OUT))
    ]
    assert found[0] == found[1] != "fork"


def test_omitting_the_last_turn_before_a_prompt_keeps_the_certificate() -> None:
    """No request ends with an assistant's message."""
    assert certificate_of(LEAVES_LAST_OUT + FRAMED).continuations == certificate_of(FRAMED).continuations


@pytest.mark.parametrize("step", [0, 1])
def test_call_directly_after_content_is_detected_if_the_template_writes_it(step: int) -> None:
    text = 'Take {"a": 1} and {x}.{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    reply = parsed(renderer_of(BARE), text, step)
    assert reply.content == 'Take {"a": 1} and {x}.'
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", '{"a": 1}')]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<![CDATA[<b>7</b>]]>", "<b>7</b>"),
        ("<![CDATA[a</p>b]]>", "a</p>b"),
        ("<![CDATA[]]>", ""),
        ("<![CDATA[7]]", "<![CDATA[7]]"),
        ("7", "7"),
    ],
)
def test_delimiters_of_tag_like_text_are_not_text(written: str, value: str, step: int) -> None:
    text = f'<tool_call><f n="add"><p k="note">{written}</p></f></tool_call><|im_end|>'
    (call,) = parsed(renderer_of(QUOTED_WHERE_NEEDED), text, step).tool_calls
    assert json.loads(call.arguments) == {"note": value}


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("source", "end"), [(SPACED_END, "\n\n<|im_end|>"), (SPACED_CLOSE, "\n<|box_end|><|endoftext|>")]
)
def test_white_space_before_the_end_of_the_turn_is_not_content(source: str, end: str, step: int) -> None:
    assert parsed(renderer_of(source), f"Yes.{end}", step).content == "Yes."


NAMED_TWICE = (
    USERS
    + """{% else %}{% for c in m.tool_calls or [{}] %}<|im_start|>assistant to={{ c.function.name if c else 'user' -}}
<|quad_start|>{{ m.content or '' }}{% if c %}<f n="{{ c.function.name }}">{%
for k, v in c.function.arguments.items() %}<p k="{{ k }}">{{ v if v is string else v | tojson }}</p>{% endfor -%}
</f>{% endif %}<|im_end|>
{% endfor %}"""
    + END.replace("assistant\n", "assistant")
)


def test_a_call_that_has_its_name_in_a_header_too_is_not_read_with_other_arguments() -> None:
    reply = parsed(renderer_of(NAMED_TWICE), ' to=add<|quad_start|><f n="add"><p k="a">7</p></f><|im_end|>')
    assert reply.tool_calls == ()


def test_reasoning_shown_only_with_calls_is_detected() -> None:
    reply = parsed(renderer_of(BESIDE_CALLS), "<think>Hm.</think>Yes.<|im_end|>")
    assert (reply.reasoning, reply.content) == ("Hm.", "Yes.")


def test_content_written_as_reasoning_is_not_certified() -> None:
    checks = {check.name: check for check in readings_of(AS_REASONING)}
    assert checks["content and call"].holds is None
    assert "as it writes reasoning" in checks["content and call"].detail
    assert checks["reasoning and call"].holds


def test_end_of_turn_token_within_a_conversation_is_a_stop_token() -> None:
    assert {"<|box_end|>", "<|im_end|>"} <= set(certificate_of(TWO_ENDS).stop_tokens)
    assert "<|box_end|>" not in certificate_of(FRAMED).stop_tokens


def test_end_of_content_before_a_call_is_no_stop_token() -> None:
    assert "<|box_end|>" not in certificate_of(AS_MESSAGES).stop_tokens


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Yes.<|im_end|>", "Yes.", []),
        ("Yes.<|box_end|><|im_end|>", "Yes.", []),
        ("Yes.<|box_end|>\n", "Yes.", []),
        ("Yes.<|box_end|>\nAnd this.<|im_end|>", "Yes.\nAnd this.", []),
        ('<|box_end|>\nfunction call<|quad_start|>{"name": "add", "arguments": {"a": 1}}<|im_end|>', "", ["add"]),
        (
            'Yes.<|box_end|>\nfunction call<|quad_start|>{"name": "add", "arguments": {}}<|box_end|>\n<|im_end|>',
            "Yes.",
            ["add"],
        ),
    ],
)
def test_end_of_content_is_no_text_with_or_without_a_call(text: str, content: str, calls: list[str], step: int) -> None:
    reply = parsed(renderer_of(AS_MESSAGES), text, step)
    assert (reply.content, [call.name for call in reply.tool_calls]) == (content, calls)


def test_id_before_the_name_is_the_call_s_id() -> None:
    text = '<tool_call>abc-7<|quad_start|>add<|quad_end|>{"a": 1}</tool_call><|im_end|>'
    (call,) = parsed(renderer_of(ID_FIRST), text).tool_calls
    assert (call.id, call.name, call.arguments, call.status) == ("abc-7", "add", '{"a": 1}', "ok")


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('[add(a=1, note="x")]', {"a": 1, "note": "x"}),
        ("[add( a = 1,note='it is' , )]", {"a": 1, "note": "it is"}),
        ("[add(note='it\\'s', exact=True)]", {"note": "it's", "exact": True}),
        ('[add(note="say "hi" then", a=2)]', {"note": 'say "hi" then', "a": 2}),
        ('[add(note="f(x) ] } )", a=2)]', {"note": "f(x) ] } )", "a": 2}),
        ("[add(a=3, b=[1, None, {'k': (True, 2.5)}])]", {"a": 3, "b": [1, None, {"k": [True, 2.5]}]}),
        ("[add(a=3, b={k: null, l: word})]", {"a": 3, "b": {"k": None, "l": "word"}}),
        ("[add(note=two words)]", {"note": "two words"}),
        ("[add()]", {}),
        ("[add (a=1)]", {"a": 1}),
    ],
)
def test_calls_as_in_a_program_are_read_as_models_write_them(
    written: str, arguments: dict[str, Any], step: int
) -> None:
    (call,) = parsed(renderer_of(PYTHON), f"Sure.\n{written}<|im_end|>", step).tool_calls
    assert (call.name, call.status, json.loads(call.arguments)) == ("add", "ok", arguments)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "text",
    ["See [1] and [other(a=1)].", "[add] is a tool, [add", "A list: [1, 2, (3)]", "[link](http://a.b/add(c))", "[a("],
)
def test_brackets_in_text_are_no_calls(text: str, step: int) -> None:
    reply = parsed(renderer_of(PYTHON), f"{text}<|im_end|>", step)
    assert (reply.content, reply.tool_calls) == (text, ())


def test_call_with_unnamed_arguments_is_reported_as_broken() -> None:
    (call,) = parsed(renderer_of(PYTHON), "[add(1, 2)]<|im_end|>").tool_calls
    assert (call.name, call.arguments, call.status) == ("add", "1, 2", "bad_arguments")


def test_truncated_call_is_not_made() -> None:
    renderer = renderer_of(PYTHON)
    ids = renderer.tokenizer.encode_after_control('Sure. [add(a=1, note="x').ids
    parser = renderer.parser(setup_for(renderer))
    parser.feed(ids)
    reply = parser.finish()[1]
    assert [call.status for call in reply.tool_calls] in ([], ["unclosed"])
    assert reply.content == 'Sure. [add(a=1, note="x'


@pytest.mark.parametrize("source", [FRAMED, ALWAYS_PROMPTED], ids=["asked", "always"])
def test_a_header_begins_with_the_token_that_opens_messages(source: str) -> None:
    # A prompt that is always written begins like the next question: this prefix belongs to the message, not to the end
    # of the question before it.
    renderer = renderer_of(source)
    form = renderer.format(setup_for(renderer))
    spelled = renderer.tokenizer.spell_marks
    assert spelled(form.header).startswith("<|im_start|>assistant")
    assert spelled(form.generation_prompt) == "<|im_start|>assistant\n"


SINGLE_EXCHANGE = (
    "{% if messages[:-1] | selectattr('role', 'equalto', 'assistant') | list %}{{ raise_exception('one turn only') }}"
    "{% endif %}" + FRAMED
)


def test_template_limited_to_a_single_exchange_is_certified() -> None:
    certificate = certificate_of(SINGLE_EXCHANGE)
    assert {continuation.strategy for continuation in certificate.continuations} == {"refused"}
    assert all("one turn only" in continuation.reason for continuation in certificate.continuations)
    assert {check.name: check.holds for check in certificate.parsing}["content"] is True


NO_TOOLS_TAKEN = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + FRAMED


def test_a_template_that_fails_with_tools_is_certified_without_them() -> None:
    certificate = certificate_of(NO_TOOLS_TAKEN)
    bare = certificate_of(FRAMED)
    for continuation in certificate.continuations:
        if "no-tools" in continuation.name:
            assert continuation == bare.continuation(continuation.name)
        else:
            assert (continuation.strategy, "no tools here" in continuation.reason) == ("refused", True)
    details = {check.name: check.detail for check in certificate.parsing if not check.holds}
    assert set(details) == {name for name, turn in grammar.TURNS.items() if turn.get("tool_calls")}
    assert all("no tools here" in detail for detail in details.values())
    assert list(certificate.shortfalls(["user/no-tools", "injection"])) == []
    assert [line for line in certificate.shortfalls(["tool", "calls"]) if "no tools here" in line]
    assert "tools" not in certificate.dropped


def test_a_request_with_tools_is_refused_with_the_reason_of_a_template_that_fails_with_them() -> None:
    renderer = renderer_of(NO_TOOLS_TAKEN)
    with pytest.raises(TemplateRefused, match="no tools here"):
        renderer.render([{"role": "user", "content": "hi"}], setup_for(renderer))
    assert len(renderer.render([{"role": "user", "content": "hi"}], setup_for(renderer, tools=())).ids)


KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(lambda text: normalize("NFC", text))
"""As the tokenizer normalizes it before it encodes: other text would change."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
@settings(max_examples=examples(150), deadline=None)
def test_python_literals_are_read_as_python_reads_them(arguments: dict[str, Any]) -> None:
    free = {**ADD, "function": {**ADD["function"], "parameters": {"type": "object"}}}
    written = f"[add({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    # The tokenizer brings text to this form: a mark after `\\U000a6b6a` becomes a part of its last digit.
    assume(normalize("NFC", written) == written)
    reply = parsed(renderer_of(PYTHON), f"{written}<|im_end|>", tools=(free,))
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [arguments]
