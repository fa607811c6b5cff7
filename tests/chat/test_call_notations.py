"""Separators, ends of names, quotes and types in calls, each detected from a template written here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.chat.conftest import ADD, SMALL, call, setup_for
from tests.chat.test_unseen_templates import END, USERS, parsed, readings_of, renderer_of
from tokentape.chat._certification import written_turn
from tokentape.chat._grammar import TURNS
from tokentape.chat._json_text import ObjectEnd
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer

CALLS = ("call", "parallel calls", "no arguments")


def calling(call: str) -> str:
    """Return a template that writes each call of `c` as `one`."""
    turn = "{% else %}<|im_start|>assistant\n{{ m.content or '' }}"
    turn += "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    return USERS + turn + call + "{% endfor %}<|im_end|>\n" + END


def literal(value: str, separator: str, key_close: str = "=") -> str:
    """Return a template with arguments as in a function call, with these separators."""
    items = "{% for k, v in f.arguments.items() %}{{ k }}" + key_close + "{{ " + value + " }}"
    comma = "{% if not loop.last %}" + separator + "{% endif %}{% endfor %}"
    return calling("<tool_call>{{ f.name }}(" + items + comma + ")</tool_call>")


BARE = "v if v is string else v | tojson"
JSON = "v | tojson"
SEMICOLONS, QUOTED_SEMICOLONS = literal(BARE, "; "), literal(JSON, "; ")
SPACES, QUOTED_SPACES = literal(BARE, " "), literal(JSON, " ")
UNSEPARATED = literal(JSON, "")
ARROWS = literal(JSON, " && ", " -> ")
PIPE = calling("<tool_call>{{ f.name }}|{{ f.arguments | tojson }}</tool_call>")
ASCII = calling(
    "<tool_call>{{ {'name': f.name, 'arguments': f.arguments} | tojson(ensure_ascii=True, indent=1) }}</tool_call>"
)
ID_AS_NAME = calling("<tool_call>{{ c.id }}|{{ f.arguments | tojson }}</tool_call>")
COLON = calling("<tool_call>{{ f.name }}: {{ f.arguments | tojson }}</tool_call>")
SPACED = calling("[[call {{ f.name }} {{ f.arguments | tojson }}]]")
TYPE = "'string' if v is string else 'null' if v is none else 'number' if v is number else 'json'"
TYPED = calling(
    '<call name="{{ f.name }}">{% for k, v in f.arguments.items() %}<arg name="{{ k }}" type="{{ '
    + TYPE
    + ' }}">{{ '
    + BARE
    + " }}</arg>{% endfor %}</call>"
)
JSON_TAGS = calling(
    '<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg name="{{ k }}">{{ v | tojson }}</arg>\n'
    "{% endfor %}</tool_call>"
)
TAGS = JSON_TAGS.replace(JSON, BARE)
NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, w in v.items() %}<{{ k }}>{{ nested(w) }}</{{ k }}>"
    "{% endfor %}{% elif v is iterable and v is not string %}{% for w in v %}<item>{{ nested(w) }}</item>{% endfor %}"
    "{% else %}{{ " + BARE + " }}{% endif %}{% endmacro %}"
) + calling('<tool_call><call name="{{ f.name }}">{{ nested(f.arguments) }}</call></tool_call>')
NESTED_NAMES = NESTED.replace("<{{ k }}>", '<p n="{{ k }}">').replace("</{{ k }}>", "</p>").replace("item>", "i>")
ESCAPED = TAGS.replace(BARE, f"({BARE}) | e")
COUNTED_NAMES = (
    calling(
        "<tool_call>\n<function={{ f.name }}:{{ loop.index0 }}>\n{% for k, v in f.arguments.items() %}"
        "<parameter={{ k }}>\n{{ " + BARE + " }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n"
    ).replace("{{ m.content", "<think>{{ m.reasoning_content or '' }}</think>{{ m.content")
    + "{% if add_generation_prompt %}<think>{% endif %}"
)
COUNTED_CALLS = calling(
    "{% if loop.first %}[#<calls>\n{% endif %}{{ loop.index0 }}[#<call {{ f.name }}>"
    "{% for k, v in f.arguments.items() %}[#<{{ k }}>{{ " + BARE + " }}[#</{{ k }}>{% endfor %}[#</tool_call>\n"
    "{% if loop.last %}[#<|quad_end|>{% endif %}"
)
MARKED_TAGS = calling(
    '<<|quad_end|>call name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<<|quad_end|>arg name="{{ k }}">{{ '
    + BARE
    + " }}</<|quad_end|>arg>\n{% endfor %}</<|quad_end|>call>\n"
)
ARRAY = calling(
    "{% if loop.first %}[{% endif %}{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
    "{% if loop.last %}]{% else %}, {% endif %}"
)
LISTED = literal(JSON, ", ").replace("<tool_call>{{ f.name", "[{{ f.name").replace(")</tool_call>", ")]")
PROGRAM = (
    literal(JSON, ", ")
    .replace("<tool_call>{{ f.name", "{% if loop.first %}<tool_call>[{% else %}, {% endif %}{{ f.name")
    .replace(")</tool_call>", "){% if loop.last %}]</tool_call>{% endif %}")
)
ALL = {
    name: source
    for name, source in globals().items()
    if isinstance(source, str) and USERS in source and name not in ("USERS", "END")
}


def held(source: str) -> dict[str, bool | None]:
    return {check.name: check.holds for check in readings_of(source)}


def arguments(source: str, text: str, step: int = 0) -> list[Any]:
    """Return name and arguments of each parsed call."""
    reply = parsed(renderer_of(source), f"{text}<|im_end|>", step)
    assert (reply.content, reply.problem) == ("", "")
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls if call.status == "ok"]


@pytest.mark.parametrize("name", ALL)
def test_calls_round_trip(name: str) -> None:
    checks = held(ALL[name])
    assert {check: checks[check] for check in CALLS} == dict.fromkeys(CALLS, True)


@pytest.mark.parametrize(
    "source", [QUOTED_SEMICOLONS, QUOTED_SPACES, ARROWS, PIPE, ASCII, ID_AS_NAME, COLON, SPACED, TYPED, JSON_TAGS]
)
def test_every_call_round_trips_if_text_is_delimited(source: str) -> None:
    checks = held(source)
    assert {name for name, turn in TURNS.items() if turn.get("tool_calls") and checks[name] is False} == set()


@pytest.mark.parametrize(
    ("source", "missed"),
    [
        (SEMICOLONS, "null as text"),
        (SPACES, "null as text"),
        (TAGS, "null argument"),
        (ESCAPED, "null argument"),
        (NESTED, "null argument"),
        (NESTED_NAMES, "null argument"),
    ],
    ids=["semicolons", "spaces", "tags", "escaped", "nested", "nested-names"],
)
def test_certificate_reports_that_null_and_its_text_are_ambiguous(source: str, missed: str) -> None:
    checks = held(source)
    both = {"null argument", "null as text"}
    assert {name: checks[name] for name in both} == {missed: False, (both - {missed}).pop(): True}


@pytest.mark.parametrize("source", [NESTED, NESTED_NAMES], ids=["nested", "names"])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(
    "value",
    [
        ["a b", "c"],
        ["1", "é"],
        [],
        {},
        [[1, 2], [3]],
        {"o": {"o": "x", "b": 1}, "b": [{"c": "d"}]},
        "a <i>b</i>",
        "<o>1</o>",
    ],
)
def test_lists_and_objects_written_as_tags_are_read(source: str, step: int, value: Any) -> None:
    types = {"l": {"type": "array", "items": {"type": "string"}} if "1" in value else {"type": "array"}}
    types |= {"o": {"type": "object"}, "note": {"type": "string"}}
    parameters = {"type": "object", "properties": types}
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}
    renderer = renderer_of(source)
    key = "note" if isinstance(value, str) else "o" if isinstance(value, dict) else "l"
    turn = {"role": "assistant", "content": "", "tool_calls": [call(1, {key: value, "a": 2})]}
    text = renderer.render_text([turn], setup_for(renderer, tools=(tool,)), generate=False)
    completion = renderer.tokenizer.spell_marks(text).partition("assistant\n")[2]
    (read,) = parsed(renderer, completion, step, (tool,)).tool_calls
    assert (read.status, json.loads(read.arguments)) == ("ok", {key: value, "a": 2})


def test_values_escaped_as_in_xml_are_read() -> None:
    checks = held(ESCAPED)
    assert (checks["multi-line argument"], checks["quotes in an argument"]) == (True, True)


def test_arguments_in_tags_with_text_between_them_are_not_read_as_others() -> None:
    pairs = calling(
        "<tool_call>{{ f.name }} [{% for k, v in f.arguments.items() %}[{{ k | tojson }}, {{ v | tojson }}]"
        "{% if not loop.last %}, {% endif %}{% endfor %}]</tool_call>"
    )
    assert held(pairs)["call"] is False
    reply = parsed(renderer_of(pairs), '<tool_call>add [["note", "x"]]</tool_call><|im_end|>')
    assert [call for call in reply.tool_calls if call.status == "ok"] == []


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("plan", "call"),
    [
        ("<plan>", "<call>"),
        ("<plan>", "<place>"),
        ("[PLAN]", "[PLACE]"),
        ("<|plan|>", "<|place|>"),
        ("{plan}", "{place}"),
        ("**plan**", "**place**"),
        ("\u27e8plan\u27e9", "\u27e8place\u27e9"),
    ],
)
def test_tag_that_opens_calls_may_begin_like_the_tag_at_the_end_of_the_prompt(step: int, plan: str, call: str) -> None:
    source = ARRAY.replace("{% if loop.first %}[", f"{{% if loop.first %}}{{{{ '{call}' }}}}[").replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{{{{ '{plan}' }}}}\n",
    )
    reply = parsed(renderer_of(source), f'{call}[{{"name": "add", "arguments": {{"a": 1}}}}]<|im_end|>', step)
    assert (reply.content, [one.name for one in reply.tool_calls]) == ("", ["add"])


def test_certificate_reports_that_nested_quotes_do_not_round_trip() -> None:
    # LFM2 and similar Python-style templates escape nothing: f(a="g("x", y='z')") can be read as three arguments.
    checks = held(literal("'\"' ~ v ~ '\"' if v is string else v | tojson", ", "))
    assert (checks["multi-line argument"], checks["quotes in an argument"]) == (True, False)


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (SEMICOLONS, "add(a=1; note=two words, b)", {"a": 1, "note": "two words, b"}),
        (SEMICOLONS, "add(a=1;note=x;)", {"a": 1, "note": "x"}),
        (SEMICOLONS, "add(note=a; b; a=2)", {"note": "a; b", "a": 2}),
        (SEMICOLONS, "add(note={{ a }} {% b %} c; a=2)", {"note": "{{ a }} {% b %} c", "a": 2}),
        (SEMICOLONS, "add(note=[a] b)", {"note": "[a] b"}),
        (SEMICOLONS, "add(note=null)", {"note": None}),
        (SEMICOLONS, "add(note='null')", {"note": "null"}),
        (QUOTED_SEMICOLONS, 'add(note="x; y=1"; a=2)', {"note": "x; y=1", "a": 2}),
        (QUOTED_SEMICOLONS, 'add(note="say \\"hi\\"; then"; a=2)', {"note": 'say "hi"; then', "a": 2}),
        (QUOTED_SEMICOLONS, 'add(note="null"; a=None)', {"note": "null", "a": None}),
        (SPACES, "add(a=1 note=two words)", {"a": 1, "note": "two words"}),
        (QUOTED_SPACES, 'add(note="say "hi" then" a=2)', {"note": 'say "hi" then', "a": 2}),
        (QUOTED_SPACES, 'add(note="x )] y" a=2)', {"note": "x )] y", "a": 2}),
        (QUOTED_SPACES, 'add(a=1, note="x", b=True)', {"a": 1, "note": "x", "b": True}),
        (SPACES, "add(note=two, words, a=1)", {"note": "two, words", "a": 1}),
        (UNSEPARATED, 'add(a=1, b=None,note="x")', {"a": 1, "b": None, "note": "x"}),
        (ARROWS, 'add(note -> "x && y" && a -> 2)', {"note": "x && y", "a": 2}),
        (PIPE, 'add|{"a": 1}', {"a": 1}),
        (PIPE, 'add {"a": 1}', {"a": 1}),
        (PIPE, "add|", {}),
        (COLON, 'add:{"a": 1}', {"a": 1}),
    ],
)
def test_calls_are_read_as_models_write_them(source: str, text: str, expected: Any, step: int) -> None:
    assert arguments(source, f"<tool_call>{text}</tool_call>", step) == [("add", expected)]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("value", "expected"),
    [('type="null">null', None), ('type="null">None', None), ('type="string">null', "null"), ('type="number">7', "7")],
)
def test_typed_null_stays_null_for_any_schema(value: str, expected: Any, step: int) -> None:
    call = f'<call name="add"><arg name="note" {value}</arg></call>'
    assert arguments(TYPED, call, step) == [("add", {"note": expected})]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"x"', "x"),
        ("x", "x"),
        ("null", None),
        ('"null"', "null"),
        ('"a\\nb"', "a\nb"),
        ('"a "b" c"', 'a "b" c'),
        ("7", "7"),
    ],
)
def test_enclosing_quotes_are_not_part_of_the_text(value: str, expected: Any, step: int) -> None:
    call = f'<tool_call>add\n<arg name="note">{value}</arg>\n</tool_call>'
    assert arguments(JSON_TAGS, call, step) == [("add", {"note": expected})]


def test_an_argument_written_twice_is_kept_twice() -> None:
    call = '<tool_call>add\n<arg name="note">one</arg>\n<arg name="note">two</arg>\n</tool_call><|im_end|>'
    (parsed_call,) = parsed(renderer_of(TAGS), call).tool_calls
    assert parsed_call.arguments == '{"note": "one", "note": "two"}'


HERMES = calling("<tool_call>\n{{ f | tojson }}\n</tool_call>")


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "argumentz": {"a": 1}}',
        '{"name": "add", "a": 1}',
        '{"name": "add", but "arguments": {"a": 1}}',
        '{"name": "add", "arguments" is {"a": 1}}',
    ],
)
def test_call_with_misplaced_arguments_is_not_read_as_a_call_without_any(body: str) -> None:
    (call,) = parsed(renderer_of(HERMES), f"<tool_call>\n{body}\n</tool_call><|im_end|>", tools=(ADD,)).tool_calls
    assert (call.name, call.status, call.arguments) == ("add", "bad_arguments", body)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_count_after_a_name_may_arrive_before_it_is_recognizable(step: int) -> None:
    call = "<tool_call>\n<function=add:0>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert arguments(COUNTED_NAMES, f"{call}\n{call}", step) == [("add", {"a": 1})] * 2


@pytest.mark.parametrize("name", ["MARKED_TAGS", "TYPED", "TAGS"])
def test_call_truncated_in_its_arguments_is_not_made(name: str) -> None:
    renderer = renderer_of(ALL[name])
    made = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": 1, "note": "x y"})]}
    written = written_turn(renderer, setup_for(renderer), made)
    assert written is not None
    ids = renderer.tokenizer.encode_after_control(written[1]).ids
    statuses = []
    for end in range(1, len(ids)):
        parser = renderer.parser(setup_for(renderer))
        parser.feed(ids[:end])
        statuses.append([parsed_call.status for parsed_call in parser.finish()[1].tool_calls])
    # The name must arrive first. The close of a call may be missing if no further argument can follow.
    assert statuses == sorted(statuses, key=[[], ["unclosed"], ["ok"]].index)
    assert statuses.count(["unclosed"]) > 5


@pytest.mark.parametrize("step", [0, 1])
def test_counted_name_may_be_closed_by_the_first_piece_of_the_close(step: int) -> None:
    assert arguments(COUNTED_NAMES, "</think><tool_call>\n<function=add:0></function>", step) == [("add", {})]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_next_call_may_begin_like_the_close_of_all_calls(step: int) -> None:
    first, second = (f"{n}[#<call add>[#<a>{n}[#</a>[#</tool_call>\n" for n in (0, 1))
    text = f"[#<calls>\n{first}{second}[#<|quad_end|>"
    assert arguments(COUNTED_CALLS, text, step) == [("add", {"a": 0}), ("add", {"a": 1})]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("after", ["", "12 more"])
def test_the_number_before_a_call_may_be_any(after: str, step: int) -> None:
    calls = "".join(f"{n}[#<call add>[#<a>{n}[#</a>[#</tool_call>\n" for n in range(12))
    reply = parsed(renderer_of(COUNTED_CALLS), f"[#<calls>\n{calls}[#<|quad_end|>{after}<|im_end|>", step)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [{"a": n} for n in range(12)]
    assert reply.content == after


@pytest.mark.parametrize("pieces", [1, 2])
def test_call_closed_twice_has_one_span_for_any_chunking(pieces: int) -> None:
    renderer = renderer_of(TAGS.replace("</tool_call>", "</tool_call>" * 2))
    text = '<tool_call>add\n<arg name="a">1</arg>\n' + "</tool_call>" * pieces + "<|im_end|>"
    assert parsed(renderer, text).tool_calls == parsed(renderer, text, 1).tool_calls != ()


def test_end_of_json_may_arrive_in_pieces() -> None:
    object_end = ObjectEnd(0, re.escape("</call>"))
    for text in ('{"a": <', '{"a": </ca', '{"a": </call>}'):
        assert object_end.find(text) is None
    assert object_end.broken_at == len('{"a": ')


def test_token_between_two_calls_is_in_a_single_span() -> None:
    call = '[[call add {"a": 1}]]'
    first, second = parsed(renderer_of(SPACED), f"{call}{call}<|im_end|>").tool_calls
    assert first.span[0] < first.span[1] <= second.span[0] < second.span[1]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("source", [ARRAY, LISTED], ids=["array", "listed"])
@pytest.mark.parametrize(
    "before", ["Of [1, 2] take ", 'As in [{"a": 1}] take ', 'For [{"name": "Bob", "age": 3}] take ']
)
def test_json_answer_between_the_brackets_of_calls_is_content(source: str, before: str, step: int) -> None:
    call = '[{"name": "add", "arguments": {"a": 1}}]'
    reply = parsed(renderer_of(source), f"{before}{call}<|im_end|>", step)
    assert reply.content.strip() == before.strip()
    assert [(call.name, call.arguments, call.status) for call in reply.tool_calls] == [("add", '{"a": 1}', "ok")]


@pytest.mark.parametrize("step", [0, 1, 3])
def test_function_call_after_the_section_of_calls_is_content(step: int) -> None:
    text = "<tool_call>[add(a=1), add(a=2)]</tool_call>"
    reply = parsed(renderer_of(PROGRAM), f"{text}add(a=3)<|im_end|>", step)
    assert ([call.arguments for call in reply.tool_calls], reply.content) == (['{"a": 1}', '{"a": 2}'], "add(a=3)")


@pytest.mark.parametrize("step", [0, 1, 3])
def test_malformed_call_after_another_keeps_its_name(step: int) -> None:
    text = "<tool_call>[add(a=1), add(<think>)]</tool_call><|im_end|>"
    calls = parsed(renderer_of(PROGRAM), text, step).tool_calls
    assert [(call.name, call.status) for call in calls] == [("add", "ok"), ("add", "bad_arguments")]


@pytest.mark.parametrize(
    ("escaped", "text"),
    [(r"\ud83e\udee0 a", "🫠 a"), (r"\ud83e a \udee0", "\ufffd a \ufffd"), (r"\ud800\udc03", "\U00010003")],
)
def test_escaped_surrogates_in_a_function_call_are_one_character_or_replaced(escaped: str, text: str) -> None:
    call = f'<tool_call>[add(note="{escaped}")]</tool_call>'
    assert arguments(PROGRAM, call) == [("add", {"note": text})]


def test_strings_of_a_python_list_without_a_comma_are_not_joined() -> None:
    call = '<tool_call>add\n<arg name="tags">["a" "b"]</arg>\n</tool_call>'
    assert arguments(TAGS, call) == [("add", {"tags": '["a" "b"]'})]


QUOTE = '<|"|>'
QUOTED = calling(
    "<tool_call>{{ f.name + '{' }}{% for k, v in f.arguments.items() %}{{ k }}:"
    + ("{% if v is string %}" + QUOTE + "{{ v }}" + QUOTE + "{% else %}{{ v | tojson }}{% endif %}")
    + "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}</tool_call>"
)
"""Text is between two control tokens with a quote in their spelling, as Gemma 4 writes it."""


def quoted_calls(source: str, text: str) -> list[tuple[str, str]]:
    """Return status and arguments of each call, with a vocabulary that has `QUOTE`."""
    spec = (SMALL / "qwen3" / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((SMALL / "qwen3" / "tokenizer_config.json").read_bytes())
    tokenizer = Tokenizer(spec.replace('"<|quad_end|>"', json.dumps(QUOTE)).encode(), config)
    renderer = Renderer(tokenizer, ChatTemplate(source))
    return [(call.status, call.arguments) for call in parsed(renderer, f"{text}<|im_end|>", 0).tool_calls]


def test_object_keys_without_quotes_may_have_spaces_and_quotes() -> None:
    call = '<tool_call>add{o:{a b:1,q"q:{:true}},a:2}</tool_call>'
    assert quoted_calls(QUOTED, call) == [("ok", '{"o": {"a b": 1, "q\\"q": {"": true}}, "a": 2}')]


@pytest.mark.parametrize("value", ['a <|"|>b<|"|>', '[<|"|>a<|"|>;<|"|>b<|"|>]', ':<|"|>b<|"|>'])
def test_quote_token_within_a_value_makes_arguments_bad(value: str) -> None:
    assert quoted_calls(QUOTED, f"<tool_call>add{{note:{value}}}</tool_call>") == [("bad_arguments", f"note:{value}")]


def test_control_token_with_a_quote_is_escaped_in_json_arguments() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"note": "a<|"|>b"}}</tool_call>'
    assert quoted_calls(ASCII, call) == [("ok", '{"note": "a<|\\"|>b"}')]


def test_characters_of_private_planes_stay_in_ascii_json() -> None:
    renderer = renderer_of(ASCII)
    message = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": "\U000f0001 \U00100000"})]}
    ids = renderer.render([{"role": "user", "content": "hi"}, message], setup_for(renderer)).ids.tolist()
    assert '"\\udb80\\udc01 \\udbc0\\udc00"' in renderer.tokenizer.decode(ids)


@pytest.mark.parametrize("step", [0, 50])
def test_calls_that_a_model_in_a_loop_leaves_open_are_not_each_followed_to_the_end(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = 0
    find = ObjectEnd.find

    def counting(self: ObjectEnd, text: str) -> int | None:
        nonlocal followed
        before = self._position
        end = find(self, text)
        followed += self._position - before
        return end

    monkeypatch.setattr(ObjectEnd, "find", counting)
    text = '<tool_call>{"name": "add", "arguments": {"a": "\\" ' * 1000
    reply = parsed(renderer_of(ASCII), f"{text}<|im_end|>", step)
    assert {call.status for call in reply.tool_calls} == {"bad_arguments"}
    assert (len(reply.tool_calls), reply.content, reply.problem) == (1000, "", "")
    assert followed < 40 * len(text)
