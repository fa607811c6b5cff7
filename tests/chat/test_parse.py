from __future__ import annotations

import json
import random
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import load_renderer, load_tokenizer, setup_for
from tests.chat.test_renderer import QWEN, QWEN3, random_split
from tests.chat.test_unseen_templates import parsed
from tests.searching import examples
from tokentape.chat._parse import Reply
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate

pytestmark = pytest.mark.usefixtures("source")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
THINKING = "qwen3/templates/Qwen3-Thinking-2507.jinja"
CODER = "qwen3/templates/Qwen3-Coder.jinja"


def parse(text: str, template: str = QWEN3, **kwargs: Any) -> Reply:
    """Parse a completion in which control tokens are spelled."""
    renderer = load_renderer(template)
    parser = renderer.parser(setup_for(renderer), **kwargs)
    parser.feed(renderer.tokenizer.encode_plain(text))
    return parser.finish()[1]


def test_reasoning_content_and_call_are_separated() -> None:
    reply = parse(f"<think>\nhm\n</think>\n\nwell\n{CALL}<|im_end|>")
    assert (reply.reasoning, reply.content, reply.reasoning_open) == ("hm", "well", False)
    (call,) = reply.tool_calls
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 7}, "ok")


def test_reasoning_that_the_prompt_opened_needs_no_opening_token() -> None:
    reply = parse("hm\n</think>\n\nwell<|im_end|>", THINKING)
    assert (reply.reasoning, reply.content) == ("hm", "well")


def test_truncated_reasoning_is_open() -> None:
    reply = parse("<think>\nI wonder whether")
    assert (reply.reasoning, reply.content, reply.reasoning_open) == ("I wonder whether", "", True)


def test_the_span_of_a_call_covers_its_tokens() -> None:
    renderer = load_renderer(QWEN3)
    ids = renderer.tokenizer.encode_plain(f"well\n{CALL}<|im_end|>")
    parser = renderer.parser(setup_for(renderer))
    parser.feed(ids)
    _, reply = parser.finish()
    start, end = reply.tool_calls[0].span
    assert renderer.tokenizer.decode(ids[start:end]) == CALL


LAST_CALLS_END_OTHERWISE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.tool_calls -%}
[CALLS][{% for t in m.tool_calls -%}{{ ', ' if not loop.first }}{{ t.function | tojson }}{%- endfor -%}]
{{- 'Final: ' if loop.last }}{%- endif -%}{{ m.content }}
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_end_of_the_last_turn_does_not_close_calls() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(LAST_CALLS_END_OTHERWISE))
    parser = renderer.parser(setup_for(renderer))
    call = '{"name": "add", "arguments": {"a": 7}}'
    parser.feed(renderer.tokenizer.encode_plain(f"[CALLS][{call}, {call}]"))
    reply = parser.finish()[1]
    assert ([call.status for call in reply.tool_calls], reply.content) == (["ok", "ok"], "")


def test_parallel_calls() -> None:
    reply = parse(f"{CALL}\n{CALL}<|im_end|>")
    assert [call.status for call in reply.tool_calls] == ["ok", "ok"]
    assert reply.content == ""
    assert reply.tool_calls[0].span[1] <= reply.tool_calls[1].span[0]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "add", "arguments": {"a": 7}}', "ok"),
        ('{"arguments":{"a":7},"name":"add"}', "ok"),
        ('{"name": "add", "arguments": {}}', "ok"),
        ('{"name": "add"}', "ok"),
        ('{"name": "multiply", "arguments": {"a": 7}}', "unknown_tool"),
        ('{"name": "add", "arguments": {"a": 7}', "bad_arguments"),
        ('{"name": "add", "arguments": [7]}', "bad_arguments"),
        ('{"name": "add", "arguments": {"a": 7,}}', "bad_arguments"),
    ],
)
def test_status_of_a_call(body: str, status: str) -> None:
    (call,) = parse(f"<tool_call>\n{body}\n</tool_call><|im_end|>").tool_calls
    assert call.status == status


def test_a_call_without_a_name_is_text() -> None:
    reply = parse("<tool_call>\nhello\n</tool_call><|im_end|>")
    assert reply.tool_calls == ()
    assert reply.content == "<tool_call>\nhello\n</tool_call>"


def test_half_a_call_is_text_for_the_client_and_unclosed_in_the_record() -> None:
    reply = parse('well\n<tool_call>\n{"name": "add", "argu')
    assert [call.status for call in reply.tool_calls] == ["unclosed"]
    assert reply.calls_for_client == ()
    assert reply.content == 'well\n<tool_call>\n{"name": "add", "argu'


def test_a_complete_call_may_lack_its_closing_token() -> None:
    reply = parse('<tool_call>\n{"name": "add", "arguments": {"a": 7}}<|im_end|>')
    assert [call.status for call in reply.tool_calls] == ["ok"]


def test_letters_of_a_control_token_open_nothing() -> None:
    renderer = load_renderer(QWEN3)
    parser = renderer.parser(setup_for(renderer))
    parser.feed(renderer.tokenizer.encode_marked(f"see: {CALL}").ids)
    _, reply = parser.finish()
    assert reply.tool_calls == ()
    assert reply.content == f"see: {CALL}"


def test_letters_that_close_nothing_inside_a_call() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer = renderer.tokenizer
    body = '{"name": "add", "arguments": {"a": 7, "note": "</tool_call> and <|im_end|>"}}'
    ids = tokenizer.encode_plain("<tool_call>") + tokenizer.encode_marked(body).ids
    ids += tokenizer.encode_plain("</tool_call><|im_end|>")
    parser = renderer.parser(setup_for(renderer))
    parser.feed(ids)
    (call,) = parser.finish()[1].tool_calls
    assert json.loads(call.arguments)["note"] == "</tool_call> and <|im_end|>"


def test_tagged_values_take_the_type_of_the_schema() -> None:
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=note>\n7\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    (call,) = parse(text, CODER).tool_calls
    assert json.loads(call.arguments) == {"a": 7, "note": "7", "exact": True}


def test_nothing_after_the_stop_token_is_reported() -> None:
    assert parse("well<|im_end|>\nmore").content == "well"


def test_a_stop_string_is_cut_off_wherever_tokens_split_it() -> None:
    renderer = load_renderer(QWEN3)
    for n in range(1, 5):
        parser = renderer.parser(setup_for(renderer), stop_strings=["STOP"])
        content = ""
        for piece in ("we", "ll S", "TO", "P more")[:n]:
            content += parser.feed(renderer.tokenizer.encode_marked(piece).ids).content
        rest, reply = parser.finish()
        assert content + rest.content == reply.content
    assert reply.content == "well "


def test_without_tools_a_call_is_text() -> None:
    renderer = load_renderer(QWEN3)
    parser = renderer.parser(setup_for(renderer, tools=()))
    parser.feed(renderer.tokenizer.encode_plain(CALL))
    assert parser.finish()[1].content == CALL


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
PLAIN = TEXT.map(lambda text: "x" + text.replace("<", "(").replace("{", "(") + "x")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def completions(draw: st.DrawFn) -> tuple[str, str, list[dict[str, Any]]]:
    return (
        draw(st.just("") | PLAIN),
        draw(st.just("") | PLAIN),
        draw(st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=2)),
    )


def written(parts: tuple[str, str, list[dict[str, Any]]]) -> list[Any]:
    """Encode a completion as a model writes it: control tokens by name, the rest as text."""
    reasoning, content, calls = parts
    pieces: list[Any] = []
    if reasoning:
        pieces += [("<think>",), f"\n{reasoning}\n", ("</think>",), "\n\n"]
    if content:
        pieces.append(content)
    for arguments in calls:
        body = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=False)
        pieces += [
            "\n" if pieces and isinstance(pieces[-1], str) else "",
            ("<tool_call>",),
            f"\n{body}\n",
            ("</tool_call>",),
        ]
    return [*pieces, ("<|im_end|>",)]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@given(parts=completions(), seed=st.integers(0, 2**16))
@settings(max_examples=examples(150), deadline=None)
def test_parse_returns_the_written_turn_for_any_split(parts: tuple[str, str, list[dict[str, Any]]], seed: int) -> None:
    renderer, rng = load_renderer(QWEN3), random.Random(seed)
    tokenizer = renderer.tokenizer
    ids: list[int] = []
    for piece in written(parts):
        if isinstance(piece, tuple):
            control = tokenizer.control(piece[0])
            assert control is not None
            ids.append(control.id)
        else:
            ids += random_split(tokenizer, piece, rng)
    parser = renderer.parser(setup_for(renderer))
    content = reasoning = ""
    calls = []
    at = 0
    while at < len(ids):
        step = rng.randint(1, 6)
        delta = parser.feed(ids[at : at + step])
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        calls += delta.tool_calls
        at += step
    rest, reply = parser.finish()
    # Some tokenizers compose characters (NFC), and which ones depends on the split.
    assert (nfc(reply.reasoning), nfc(reply.content)) == (nfc(parts[0]), nfc(parts[1]))
    assert [nfc(call.arguments) for call in reply.tool_calls] == [
        nfc(json.dumps(arguments, ensure_ascii=False)) for arguments in parts[2]
    ]
    assert content + rest.content == reply.content
    assert reasoning + rest.reasoning == reply.reasoning
    assert tuple(calls) + rest.tool_calls == reply.tool_calls
    assert [call.status for call in reply.tool_calls] == ["ok"] * len(parts[2])
    assert not reply.reasoning_open


@given(ids=st.lists(st.integers(0, 2**32), max_size=60), template=st.sampled_from(QWEN))
@settings(max_examples=examples(100), deadline=None)
def test_any_ids_at_all_parse(ids: list[int], template: str) -> None:
    renderer = load_renderer(template)
    parser = renderer.parser(setup_for(renderer), stop_strings=["the"])
    deltas = [parser.feed([token_id % renderer.tokenizer.vocab_size]) for token_id in ids]
    rest, reply = parser.finish()
    assert "".join(delta.content for delta in deltas) + rest.content == reply.content
    json.dumps(reply.content).encode("utf-8")


OPENS_AFTER_QUESTIONS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if messages[-1].role == 'user' -%}<think>
{% endif -%}{%- endif -%}"""


@pytest.mark.parametrize(
    ("role", "reasoning", "content"), [("user", "Hm.", "Yes."), ("tool", "", "Hm.</think>Yes."), (None, "Hm.", "Yes.")]
)
def test_prompt_of_the_turn_determines_whether_reasoning_is_open(
    role: str | None, reasoning: str, content: str
) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(OPENS_AFTER_QUESTIONS))
    setup = renderer.setup()
    prompt_ids = None if role is None else renderer.render([{"role": role, "content": "<think>\n"}]).ids
    parser = renderer.parser(setup, prompt_ids=prompt_ids)
    parser.feed(renderer.tokenizer.encode_plain("Hm.</think>Yes.<|im_end|>"))
    reply = parser.finish()[1]
    assert (reply.reasoning.strip(), reply.content.strip()) == (reasoning, content)


PROMPT_CLOSES_REASONING = OPENS_AFTER_QUESTIONS.replace("split('</think>')[-1]", "split('</think>', 1)[-1]").replace(
    "<think>\n", "<think></think>"
)


def test_a_prompt_that_opens_and_closes_reasoning_leaves_none_open() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(PROMPT_CLOSES_REASONING))
    parser = renderer.parser(renderer.setup())
    parser.feed(renderer.tokenizer.encode_plain("Yes.<|im_end|>"))
    reply = parser.finish()[1]
    assert (reply.reasoning, reply.content, reply.reasoning_open) == ("", "Yes.", False)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "header", ["<|channel|>commentary to=functions.add", " to=functions.add<|channel|>commentary json"]
)
def test_a_call_that_is_cut_off_in_its_header_keeps_its_name(header: str, step: int) -> None:
    reply = parsed(load_renderer("gpt_oss/templates/gpt-oss.jinja"), header, step)
    assert [(call.name, call.status) for call in reply.tool_calls] == [("add", "unclosed")]
    assert reply.content == header
