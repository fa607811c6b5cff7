"""Model output that differs from the template's notation: parsed if unambiguous, else text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chat.conftest import STAND_IN, load_renderer, model_path, setup_for
from tokentape.chat import _grammar as grammar
from tokentape.chat._parse import Reply
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Tool

pytestmark = pytest.mark.usefixtures("source")

QWEN3, THINKING = "qwen3/templates/Qwen3.jinja", "qwen3/templates/Qwen3-Thinking-2507.jinja"
CODER = "qwen3/templates/Qwen3-Coder.jinja"
GLM = "glm4_5/templates/GLM-4.6.jinja"
DEEPSEEK, DEEPSEEK_V31 = "deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja", "deepseek_v31/templates/DeepSeek-V3.1.jinja"
LLAMA = "llama3/templates/Llama-3.1-3.3-Instruct.jinja"
MISTRAL_V3, MISTRAL_V11 = "mistral_nemo/templates/v3.jinja", "mistral_nemo/templates/v11.jinja"
MISTRAL_V13 = "mistral_nemo/templates/v13.jinja"
GPT_OSS = "gpt_oss/templates/gpt-oss.jinja"
MINIMAX, NEMOTRON = "minimax_m2/templates/MiniMax-M2.jinja", "nemotron3/templates/Nemotron-3-Nano.jinja"

FREE: Tool = {
    "type": "function",
    "function": {"name": "free", "description": "Takes anything.", "parameters": {"type": "object"}},
}
OPTIONAL: Tool = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Ask.",
        "parameters": {
            "type": "object",
            "properties": {
                "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "kind": {"enum": ["1", "2"]},
                "either": {"type": ["string", "integer"]},
                "mode": {"const": "1"},
                "color": {"$ref": "#/$defs/Color", "description": "Which."},
                "shade": {"allOf": [{"$ref": "#/$defs/Color"}]},
                "spot": {"anyOf": [{"$ref": "#/$defs/Spot"}, {"type": "null"}]},
                "tree": {"$ref": "#/$defs/Tree"},
                "elsewhere": {"anyOf": [{"$ref": "https://example.com/spot"}, {"type": "null"}]},
            },
            "$defs": {
                "Color": {"type": "string", "enum": ["1", "2"]},
                "Spot": {"type": "object", "properties": {"x": {"type": "integer"}}},
                "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]},
            },
        },
    },
}
TOOLS = (grammar.TOOL, FREE, OPTIONAL)


def parse(template: str, text: str, *, ended: bool = True, tools: tuple[Tool, ...] = TOOLS) -> Reply:
    """Parse a completion in which control tokens are spelled; `ended`: a stop token follows."""
    renderer = load_renderer(template)
    setup = setup_for(renderer, tools=tools)
    ids = renderer.tokenizer.encode_plain(text)
    if ended:
        ids.append(min(renderer.stop_ids(setup)))
    parser = renderer.parser(setup)
    parser.feed(ids)
    return parser.finish()[1]


def content_and_calls(reply: Reply) -> tuple[str, list[tuple[str, Any, str]]]:
    """Return content and calls, with arguments decoded if they are JSON."""
    return reply.content, [
        (call.name, json.loads(call.arguments) if call.status != "bad_arguments" else None, call.status)
        for call in reply.calls_for_client
    ]


HERE = ("measure", {"place": "here"}, "ok")
ARGUMENTS = '{"place": "here"}'

SINGLE_CALL = {
    QWEN3: [
        '<tool_call>\n{"name": "measure", "arguments": {"place": "here"}}\n</tool_call>',
        '<tool_call>{"name":"measure","arguments":{"place":"here"}}</tool_call>',
        '<tool_call>\n\n\n  {"name": "measure", "arguments": {"place": "here"}}  \n\n</tool_call>\n\n',
        '\n\n<tool_call>\n{"arguments": {"place": "here"}, "name": "measure"}\n</tool_call>',
        '<tool_call>\n{"id": 7, "type": "function", "name": "measure", "arguments": {"place": "here"}}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": "{\\"place\\": \\"here\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "parameters": {"place": "here"}}\n</tool_call>',
        '<tool_call>\n{"function": {"name": "measure", "arguments": {"place": "here"}}}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": {"place": "here"}}',
        '<tool_call>\n{"name": "measure", "arguments": {"place": "here"}}}\n</tool_call>',
        '<tool_call>\n<tool_call>\n{"name": "measure", "arguments": {"place": "here"}}\n</tool_call>\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": {"place": "gone", "place": "here"}}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": {"place": "h\\u0065re"}}\n</tool_call>',
        '<tool_call>\n{\n  "name": "measure",\n  "arguments": {\n    "place": "here"\n  }\n}\n</tool_call>',
    ],
    CODER: [
        "<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=measure><parameter=place>here</parameter></function></tool_call>",
        "<tool_call>\n\n<function=measure>\n\n<parameter=place>\nhere\n</parameter>\n\n</function>\n\n</tool_call>\n",
        "<tool_call>\n<function= measure >\n<parameter= place >\nhere\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>\n</function>",
        "<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>",
        "<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>\n</tool_call>",
        '<tool_call>\n{"name": "measure", "arguments": {"place": "here"}}\n</tool_call>',
    ],
    GLM: [
        "\n<tool_call>measure\n<arg_key>place</arg_key>\n<arg_value>here</arg_value>\n</tool_call>",
        "<tool_call>measure<arg_key>place</arg_key><arg_value>here</arg_value></tool_call>",
        "<tool_call>\nmeasure \n <arg_key> place </arg_key>\n\n<arg_value>here</arg_value>\n\n</tool_call>\n",
        "<tool_call>measure\n<arg_key>place</arg_key>\n<arg_value>here</arg_value>\n",
    ],
    DEEPSEEK: [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜> function <｜tool▁sep｜> measure ```json{ARGUMENTS}```"
        "<｜tool▁call▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```\n{ARGUMENTS}\n```\n",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>measure<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```json\n{json.dumps(ARGUMENTS)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    DEEPSEEK_V31: [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>measure<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜> measure\n<｜tool▁sep｜>\n{ARGUMENTS}\n<｜tool▁call▁end｜>\n",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>measure<｜tool▁sep｜>{ARGUMENTS}",
    ],
    LLAMA: [
        '{"name": "measure", "parameters": {"place": "here"}}',
        '  \n{"name": "measure", "arguments": {"place": "here"}}\n',
        '<|reserved_special_token_0|>{"name": "measure", "parameters": {"place": "here"}}',
        '{"type": "function", "name": "measure", "parameters": {"place": "here"}}',
        '{"function": "measure", "parameters": {"place": "here"}}',
    ],
    MISTRAL_V3: [
        '[TOOL_CALLS][{"name": "measure", "arguments": {"place": "here"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS] [ {"name": "measure", "arguments": {"place": "here"}} ]',
        '[TOOL_CALLS]{"name": "measure", "arguments": {"place": "here"}}',
        '[TOOL_CALLS][{"name": "measure", "arguments": {"place": "here"}}',
    ],
    MISTRAL_V11: [
        f"[TOOL_CALLS]measure[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]measure[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS] measure\n{ARGUMENTS}\n",
    ],
    MISTRAL_V13: [
        f"[TOOL_CALLS]measure[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]measure{ARGUMENTS}",
        f"[TOOL_CALLS]measure[ARGS]{json.dumps(ARGUMENTS)}",
    ],
    GPT_OSS: [
        f" to=functions.measure<|channel|>commentary json<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=functions.measure <|constrain|>json<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=functions.measure<|constrain|>json<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=functions.measure<|message|>\n{ARGUMENTS}\n",
        f"<|channel|>analysis to=functions.measure code<|message|>{ARGUMENTS}",
        f"<|channel|>commentary to=measure json<|message|>{ARGUMENTS}",
    ],
    MINIMAX: [
        '</think>\n<minimax:tool_call>\n<invoke name="measure">\n<parameter name="place">here</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '</think><minimax:tool_call><invoke name="measure"><parameter name="place">here</parameter></invoke>'
        "</minimax:tool_call>",
        '</think><invoke name="measure">\n<parameter name="place">here</parameter>\n</invoke>',
        '</think><minimax:tool_call>\n<invoke  name="measure">\n<parameter  name="place">here</parameter>\n</invoke>\n',
    ],
    NEMOTRON: [
        "</think>\n<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>\n</function>\n</tool_call>\n",
        "</think><tool_call><function=measure><parameter=place>here</parameter></function></tool_call>",
    ],
}


@pytest.mark.parametrize(("template", "text"), [(name, text) for name, texts in SINGLE_CALL.items() for text in texts])
def test_calls_are_read_in_many_spellings(template: str, text: str) -> None:
    assert content_and_calls(parse(template, text)) == ("", [HERE])


NO_ARGUMENTS = {
    QWEN3: [
        '<tool_call>\n{"name": "measure", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "measure"}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": null}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": ""}\n</tool_call>',
        '<tool_call>\n{"name": "measure", "arguments": "{}"}\n</tool_call>',
    ],
    CODER: [
        "<tool_call>\n<function=measure>\n</function>\n</tool_call>",
        "<tool_call><function=measure></function></tool_call>",
        "<tool_call>\n<function=measure>\n</tool_call>",
        "<tool_call>\n<function=measure>\n<parameter=>\n</parameter>\n</function>\n</tool_call>",
    ],
    GLM: ["<tool_call>measure\n</tool_call>", "<tool_call>measure</tool_call>", "<tool_call>\nmeasure\n"],
    DEEPSEEK: [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```json\n\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```json\nnull\n```<｜tool▁call▁end｜>",
    ],
    DEEPSEEK_V31: [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>measure<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>measure<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    LLAMA: ['{"name": "measure", "parameters": {}}', '{"name": "measure", "parameters": null}'],
    MISTRAL_V13: ["[TOOL_CALLS]measure[ARGS]{}", "[TOOL_CALLS]measure[ARGS]", "[TOOL_CALLS]measure[ARGS]null"],
    GPT_OSS: [" to=functions.measure<|channel|>commentary json<|message|>"],
    MINIMAX: [
        '</think>\n<minimax:tool_call>\n<invoke name="measure">\n</invoke>\n</minimax:tool_call>',
        '</think><minimax:tool_call><invoke name="measure"></invoke></minimax:tool_call>',
    ],
}


@pytest.mark.parametrize(("template", "text"), [(name, text) for name, texts in NO_ARGUMENTS.items() for text in texts])
def test_calls_without_arguments_are_read(template: str, text: str) -> None:
    assert content_and_calls(parse(template, text)) == ("", [("measure", {}, "ok")])


TWO_CALLS = {
    QWEN3: f'<tool_call>{{"name": "measure", "arguments": {ARGUMENTS}}}</tool_call>\n\n' * 2,
    CODER: "<tool_call><function=measure><parameter=place>here</parameter></function></tool_call>" * 2,
    GLM: "<tool_call>measure<arg_key>place</arg_key><arg_value>here</arg_value></tool_call>" * 2,
    DEEPSEEK_V31: "<｜tool▁calls▁begin｜>"
    + f"\n<｜tool▁call▁begin｜>measure<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>\n" * 2,
    LLAMA: f'{{"name": "measure", "parameters": {ARGUMENTS}}}; {{"name": "measure", "parameters": {ARGUMENTS}}}',
    MISTRAL_V3: f'[TOOL_CALLS][{{"name": "measure", "arguments": {ARGUMENTS}}},'
    f'\n{{"name": "measure", "arguments": {ARGUMENTS}}}]',
    MISTRAL_V13: f"[TOOL_CALLS]measure[ARGS]{ARGUMENTS}" * 2,
    GPT_OSS: f"<|channel|>commentary to=functions.measure json<|message|>{ARGUMENTS}<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.measure json<|message|>{ARGUMENTS}",
    MINIMAX: "</think><minimax:tool_call>"
    + '<invoke name="measure"><parameter name="place">here</parameter></invoke>' * 2
    + "</minimax:tool_call>",
}


@pytest.mark.parametrize("template", TWO_CALLS)
def test_two_calls_are_read(template: str) -> None:
    assert content_and_calls(parse(template, TWO_CALLS[template])) == ("", [HERE, HERE])


@pytest.mark.parametrize(
    "template", [QWEN3, CODER, GLM, DEEPSEEK_V31, MISTRAL_V3, LLAMA], ids=lambda name: name.split("/")[-1]
)
def test_text_before_between_and_after_calls_is_content(template: str) -> None:
    call = SINGLE_CALL[template][0]
    end = "\n" if template == LLAMA else ""
    content, calls = content_and_calls(parse(template, f"first\n{call}{end}second\n{call}{end}third"))
    assert (content.split(), calls) == (["first", "second", "third"], [HERE, HERE])


def test_interrupted_call_is_broken_and_the_interrupting_call_is_read() -> None:
    call = SINGLE_CALL[QWEN3][0]
    reply = parse(QWEN3, '<tool_call>\n{"name": "measure", "arguments": {"pla\n' + call.replace('"here"', '"there"'))
    # The second call opens within an unclosed string of the first: the intended call is ambiguous.
    assert [call.status for call in reply.tool_calls][-1:] != []
    reply = parse(QWEN3, '<tool_call>\n{"name": "measure", "arguments": {\n' + call)
    assert [call.status for call in reply.tool_calls] == ["bad_arguments", "ok"]


@pytest.mark.parametrize(
    "value", ["a } b", '"quoted" \\ {"', "</tool_call>", "[TOOL_CALLS]", "```\n<tool_call>", "é\U0001fae0\u2028"]
)
def test_braces_and_delimiters_within_strings_are_text(value: str) -> None:
    arguments = json.dumps({"place": value})
    renderer = load_renderer(QWEN3)
    tokenizer = renderer.tokenizer
    ids = tokenizer.encode_plain("<tool_call>")
    ids += tokenizer.encode_marked(f'\n{{"name": "measure", "arguments": {arguments}}}\n').ids
    ids += tokenizer.encode_plain("</tool_call><|im_end|>")
    parser = renderer.parser(setup_for(renderer, tools=TOOLS))
    parser.feed(ids)
    assert content_and_calls(parser.finish()[1]) == ("", [("measure", {"place": value}, "ok")])


def test_a_control_token_within_a_string_closes_nothing_if_the_string_goes_on() -> None:
    text = '<tool_call>\n{"name": "measure", "arguments": {"place": "a </tool_call> b"}}\n</tool_call>'
    assert content_and_calls(parse(QWEN3, text)) == ("", [("measure", {"place": "a </tool_call> b"}, "ok")])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN3, '<tool_call>\n{"name": "measure", "argu'),
        (MISTRAL_V3, '[TOOL_CALLS][{"name": "measure", "arguments": {"place": he"re}, "id": "abcdefghi"}]'),
        (MISTRAL_V13, '[TOOL_CALLS]measure[ARGS]{"place": "here"'),
    ],
)
def test_broken_call_counts_if_the_model_ended_its_turn_after_it(template: str, text: str) -> None:
    (call,) = parse(template, text).calls_for_client
    assert (call.name, call.status) == ("measure", "bad_arguments")
    reply = parse(template, text, ended=False)
    assert (reply.calls_for_client, reply.content) == ((), text)


def test_partial_call_end_does_not_end_a_broken_call() -> None:
    opening = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>measure\n```json\n"
    reply = parse(DEEPSEEK, opening + '{"place": "he"re"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>')
    assert [(call.name, call.status) for call in reply.tool_calls] == [("measure", "bad_arguments")]


def test_letters_open_no_call_if_a_control_token_opens_the_section() -> None:
    call = '<invoke name="measure">\n<parameter name="place">here</parameter>\n</invoke>'
    spec = json.loads((model_path(STAND_IN) / "tokenizer.json").read_bytes())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    following = 1 + max(token["id"] for token in spec["added_tokens"])
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    spec["added_tokens"] += [{"id": following + n, "content": c, **flags} for n, c in enumerate(section)]
    config = json.loads((model_path(STAND_IN) / "tokenizer_config.json").read_bytes())
    tokenizer = Tokenizer(json.dumps(spec).encode(), config)
    renderer = Renderer(tokenizer, ChatTemplate(model_path(MINIMAX).read_text(encoding="utf-8")))
    for text, calls in ((f"</think>{call}", []), (f"</think>{section[0]}{call}{call}{section[1]}", [HERE, HERE])):
        parser = renderer.parser(setup_for(renderer, tools=TOOLS))
        parser.feed(tokenizer.encode_plain(text))
        reply = parser.finish()[1]
        assert content_and_calls(reply) == ("" if calls else call, calls)


def test_a_line_break_within_a_json_string_is_read() -> None:
    text = '<tool_call>\n{"name": "measure", "arguments": {"place": "one\n\ttwo"}}\n</tool_call>'
    assert content_and_calls(parse(QWEN3, text)) == ("", [("measure", {"place": "one\n\ttwo"}, "ok")])


def test_arguments_are_kept_as_they_were_written() -> None:
    arguments = '{"ratio": 1.10, "count": 123456789012345678901234567890, "huge": 1e999, "place": "\\u00e9\\ud83d"}'
    for template, text in (
        (QWEN3, f'<tool_call>\n{{"name": "measure", "arguments": {arguments}}}\n</tool_call>'),
        (MISTRAL_V13, f"[TOOL_CALLS]measure[ARGS]{arguments}"),
        (LLAMA, f'{{"name": "measure", "parameters": {arguments}}}'),
    ):
        (call,) = parse(template, text).tool_calls
        assert (call.arguments, call.status) == (arguments, "ok")


def test_a_number_too_large_for_python_to_print_is_read() -> None:
    digits = "9" * 6000
    (call,) = parse(
        CODER, f"<tool_call><function=measure><parameter=count>{digits}</parameter></function></tool_call>"
    ).tool_calls
    assert (call.arguments, call.status) == (f'{{"count": {digits}}}', "ok")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_invalid_json_is_no_argument(constant: str) -> None:
    text = f'<tool_call>\n{{"name": "measure", "arguments": {{"ratio": {constant}}}}}\n</tool_call>'
    (call,) = parse(QWEN3, text).tool_calls
    assert call.status == "bad_arguments"


@pytest.mark.parametrize(
    "arguments", ['{"ratio": NaN}', "{\"place\": 'here'}", '{"place": "here",}', '{"exact": True}']
)
def test_bare_json_call_with_invalid_arguments_has_bad_arguments(arguments: str) -> None:
    for step in (1, 1000):
        renderer = load_renderer(LLAMA)
        parser = renderer.parser(setup_for(renderer, tools=TOOLS))
        ids = renderer.tokenizer.encode_plain(f'{{"name": "measure", "parameters": {arguments}}}\nthen')
        for at in range(0, len(ids), step):
            parser.feed(ids[at : at + step])
        reply = parser.finish()[1]
        assert [(call.name, call.arguments, call.status) for call in reply.tool_calls] == [
            ("measure", arguments, "bad_arguments")
        ]
        assert reply.content.strip() == "then"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "multiply", "parameters": {"ratio": NaN}}',
        '{"name": "measure" is a tool}',
        '{"name": "measure", "parameters": NaN}',
    ],
)
def test_invalid_json_without_a_known_tool_is_text(text: str) -> None:
    reply = parse(LLAMA, text)
    assert (reply.content, reply.tool_calls) == (text, ())


def test_partial_character_in_a_name_can_be_written_as_utf8() -> None:
    (call,) = parse(
        QWEN3, '<tool_call>\n{"name": "a\\ud800", "arguments": "{\\"a\\": \\"\\udc00\\"}"}\n</tool_call>'
    ).tool_calls
    (call.name + call.arguments).encode("utf-8")
    assert call.status == "unknown_tool"


def tagged(name: str, **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "key", "raw", "value"),
    [
        ("measure", "exact", "True", True),
        ("measure", "exact", "true", True),
        ("measure", "tags", "['a', \"b\", None]", ["a", "b", None]),
        ("measure", "options", "{'a': True, 'b': (1, 2)}", {"a": True, "b": [1, 2]}),
        ("measure", "options", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("measure", "place", "None", "None"),
        ("measure", "place", "42", "42"),
        ("measure", "place", '{"a": 1}', '{"a": 1}'),
        ("measure", "place", "\n two \n", "\n two \n"),
        ("measure", "place", "", ""),
        ("measure", "place", "a < b && </param> <parameter=x", "a < b && </param> <parameter=x"),
        ("measure", "place", "before </parameter> behind", "before </parameter> behind"),
        ("measure", "count", "seven", "seven"),
        ("measure", "unknown", "7", 7),
        ("measure", "unknown", "seven", "seven"),
        ("free", "any", "None", None),
        ("free", "any", "[1, 2", "[1, 2"),
        ("ask", "who", "7", "7"),
        ("ask", "who", "null", None),
        ("ask", "kind", "1", "1"),
        ("ask", "either", "7", 7),
        ("ask", "either", "seven", "seven"),
        ("ask", "mode", "1", "1"),
        ("ask", "color", "1", "1"),
        ("ask", "shade", "1", "1"),
        ("ask", "spot", '{"x": 1}', {"x": 1}),
        ("ask", "spot", "null", None),
        ("ask", "tree", "1", "1"),
        ("ask", "elsewhere", '{"x": 1}', {"x": 1}),
        ("multiply", "a", "7", 7),
    ],
)
def test_tagged_value_gets_a_type_allowed_by_the_schema(name: str, key: str, raw: str, value: Any) -> None:
    (call,) = parse(CODER, tagged(name, **{key: raw})).tool_calls
    assert call.status == ("unknown_tool" if name == "multiply" else "ok")
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": None}, {"properties": {"a": 7}}])
def test_empty_schema_is_accepted(parameters: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    (call,) = parse(CODER, tagged("measure", a="7"), tools=(tool,)).tool_calls
    assert (json.loads(call.arguments), call.status) == ({"a": 7}, "ok")


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (THINKING, "<think>\nhm\n</think>\n\nwell", "hm", "well"),
        (THINKING, "\n<think>hm</think>well", "hm", "well"),
        (THINKING, "hm</think>\n\nwell", "hm", "well"),
        (QWEN3, "<think>hm</think>well", "hm", "well"),
        (QWEN3, "\n\n<think>\n\nhm\n\n</think>\n\n\nwell", "\nhm\n", "\nwell"),
        (QWEN3, "<think>\n\n\n\n</think>\n\nwell", "", "well"),
        (QWEN3, "<think>\nhm\n</think></think>\n\nwell", "hm", "well"),
        (QWEN3, "</think>\n\nwell", "", "well"),
        (QWEN3, "well</think>then", "", "well</think>then"),
        (QWEN3, "<think>one</think>well<think>two</think>then", "one\ntwo", "well\nthen"),
        (QWEN3, "<think>\nI would <tool_call> it\n</think>\n\nwell", "I would <tool_call> it", "well"),
        (GPT_OSS, "well", "", "well"),
        (GPT_OSS, "An answer<|message|>word.", "", "An answer\nword."),
        (GPT_OSS, "in my analysis<|message|>word.", "", "in my analysis\nword."),
        (GPT_OSS, "analysis<|message|>hm", "hm", ""),
        (GPT_OSS, "assistant<|channel|>final<|message|>well", "", "well"),
        (GPT_OSS, "<|channel|>An answer", "", "An answer"),
        (GPT_OSS, "<|channel|>analysis", "", ""),
        (GPT_OSS, "<|channel|>in a final an", "", "in a final an"),
        (
            GPT_OSS,
            "<|channel|>final<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two",
            "",
            "one\ntwo",
        ),
        (GPT_OSS, "well now<|channel|>final<|message|>then", "", "well now\nthen"),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>preamble<|end|>"
            "<|start|>assistant<|channel|>final<|message|>well",
            "one\ntwo",
            "preamble\nwell",
        ),
        (GPT_OSS, "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        (
            LLAMA,
            '{"well": {"name": "measure", "parameters": {}}}',
            "",
            '{"well": {"name": "measure", "parameters": {}}}',
        ),
        (LLAMA, 'so {"name": "measure", "parameters": {}}', "", 'so {"name": "measure", "parameters": {}}'),
        (LLAMA, '{"name": "multiply", "parameters": {}}', "", '{"name": "multiply", "parameters": {}}'),
        (LLAMA, '{"name": "Bob", "age": 3}', "", '{"name": "Bob", "age": 3}'),
    ],
)
def test_reasoning_and_content_are_separated(template: str, text: str, reasoning: str, content: str) -> None:
    reply = parse(template, text)
    assert (reply.reasoning, reply.content, reply.tool_calls) == (reasoning, content, ())


def test_call_closes_open_reasoning() -> None:
    reply = parse(QWEN3, f"<think>\nhm\n{SINGLE_CALL[QWEN3][0]}")
    assert (reply.reasoning, reply.reasoning_open, content_and_calls(reply)) == ("hm", False, ("", [HERE]))


def test_partial_call_within_reasoning_is_reasoning() -> None:
    reply = parse(QWEN3, '<think>\nhm <tool_call>\n{"name": "measure", "argu', ended=False)
    assert (reply.reasoning, reply.content) == ('hm <tool_call>\n{"name": "measure", "argu', "")
    assert (reply.reasoning_open, reply.calls_for_client) == (True, ())


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CODER, "<tool_call>\n<function=measure>\n"),
        (CODER, "<tool_call>\n<function=measure>\n<parameter=place>\nhere\n</parameter>\n"),
        (GLM, "<tool_call>measure"),
        (GLM, "<tool_call>measure\n<arg_key>place</arg_key>\n<arg_value>here</arg_value>\n"),
        (MISTRAL_V13, "[TOOL_CALLS]measure[ARGS]"),
        (GPT_OSS, " to=functions.measure<|channel|>commentary json<|message|>"),
    ],
)
def test_unclosed_call_counts_if_the_model_stopped_but_not_if_truncated(template: str, text: str) -> None:
    assert [call.status for call in parse(template, text).tool_calls] == ["ok"]
    assert parse(template, text, ended=False).calls_for_client == ()


@pytest.mark.parametrize(
    ("rest", "ended", "calls", "content"),
    [
        ("}}\n</tool_call>", True, [("measure", {"count": 1}, "ok")], ""),
        ("", False, [], None),
        ('}, "name": "free"}\n</tool_call>', True, [("free", {"count": 1}, "ok")], ""),
        ('}, "arguments": {}}\n</tool_call>', True, [("measure", {}, "ok")], ""),
        ('}, "function": {"name": "free", "arguments": {}}}\n</tool_call>', True, [("free", {}, "ok")], ""),
    ],
)
def test_call_is_recognized_at_its_end(rest: str, ended: bool, calls: list[Any], content: str | None) -> None:
    """Streams return whole calls: see docs/decisions/0009."""
    begun = '<tool_call>\n{"name": "measure", "arguments": {"count": 1'
    assert content_and_calls(parse(QWEN3, begun + rest, ended=ended)) == (begun if content is None else content, calls)
