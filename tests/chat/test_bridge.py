from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import call, load_renderer, load_tokenizer, result, setup_for
from tests.chat.test_unseen_templates import parsed
from tokentape.chat._bridge import overlap
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.demo import MODEL
from tokentape.errors import TemplateRefused
from tokentape.types import Provenance

NEXT = {"role": "user", "content": "next"}
REPLY = {"role": "assistant", "content": "hi"}

few_ids = st.lists(st.integers(0, 2), max_size=8)


@given(completion=few_ids, tail=few_ids)
def test_overlap_is_the_longest_suffix_that_is_a_prefix(completion: list[int], tail: list[int]) -> None:
    sizes = [n for n in range(min(len(completion), len(tail)) + 1) if completion[len(completion) - n :] == tail[:n]]
    assert overlap(completion, tail) == max(sizes)


def bridged(renderer: Renderer, completion: str) -> tuple[str, str]:
    """Return the text of a bridge, and the part of it that closes the turn."""
    tokenizer = renderer.tokenizer
    ids = tokenizer.array(tokenizer.encode_plain(completion))
    added = renderer.bridge(ids, REPLY, [NEXT], setup_for(renderer))
    closing = added.ids[added.provenance == Provenance.CLOSE]
    return tokenizer.decode(added.ids.tolist()), tokenizer.decode(closing.tolist())


@pytest.mark.usefixtures("source")
def test_token_that_ends_conversations_counts_as_the_end_of_turn() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    text, closing = bridged(renderer, "<|channel|>final<|message|>hi<|return|>")
    assert text == "<|start|>user<|message|>next<|end|><|start|>assistant"
    assert closing == ""


@pytest.mark.usefixtures("source")
def test_truncated_turn_is_closed_with_the_end_of_turn_token() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    text, closing = bridged(renderer, "<|channel|>final<|message|>hi")
    assert text == "<|end|><|start|>user<|message|>next<|end|><|start|>assistant"
    assert closing == "<|end|>"


@pytest.mark.usefixtures("source")
def test_truncated_turn_is_closed_with_a_header_that_is_a_stop_token() -> None:
    renderer = load_renderer("glm4_5/templates/GLM-4.6.jinja")
    text, closing = bridged(renderer, "<think>so</think>\nhi")
    assert text.startswith("<|user|>\nnext")
    assert closing == "<|user|>"


TEXT_BEFORE_HEADERS = """{%- for m in messages -%}<|{{ m.role }}|>
{{ m.content }}{{ ' END OF TURN' if m.role == 'assistant' }}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("completion", "bridge"),
    [
        ("hi END OF TURN<|user|>", ""),
        ("hi EN/D OF TURN<|user|>", ""),
        ("hi<|user|>", ""),
        ("hi END OF TURN", "<|user|>"),
        ("hi", " END OF TURN<|user|>"),
    ],
)
def test_a_sampled_header_is_not_written_again_after_text_that_ends_the_turn(completion: str, bridge: str) -> None:
    tokenizer = load_renderer("glm4_5/templates/GLM-4.6.jinja").tokenizer
    renderer = Renderer(tokenizer, ChatTemplate(TEXT_BEFORE_HEADERS))
    # A slash separates texts that are tokenized apart.
    ids = [token_id for part in completion.split("/") for token_id in tokenizer.encode_plain(part)]
    added = renderer.bridge(tokenizer.array(ids), REPLY, [NEXT], setup_for(renderer))
    assert tokenizer.decode(added.ids.tolist()) == f"{bridge}\nnext<|assistant|>\n"


TEXT_ENDS_TURNS = """{%- for m in messages -%}### {{ m.role }}:
{{ m.content }}{{ '\n\n### End' if m.role == 'assistant' }}
{% endfor -%}{%- if add_generation_prompt -%}### assistant:
{% endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("end", ["\n\n\n### End", "\n\n\n### End\n", "\n/\n\n/### End"])
def test_a_text_that_ends_the_turn_is_not_repeated_after_one_token_of_white_space(end: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(TEXT_ENDS_TURNS))
    tokenizer = renderer.tokenizer
    # A slash separates texts that are tokenized apart.
    ids = [token_id for part in f"hi{end}".split("/") for token_id in tokenizer.encode_plain(part)]
    added = renderer.bridge(tokenizer.array(ids), {**REPLY, "content": "hi\n"}, [NEXT], setup_for(renderer))
    rest = "### user:\nnext\n### assistant:\n"
    assert tokenizer.decode(added.ids.tolist()) == (rest if end.endswith("\n") else f"\n{rest}")


NO_END_OF_TURN = """{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}
{%- if loop.last and m.role == 'assistant' -%}<|endoftext|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant: {%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_a_header_is_not_taken_for_the_end_of_a_turn() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NO_END_OF_TURN))
    text, _ = bridged(renderer, "hi<|endoftext|>")
    assert text.startswith("<|im_start|>user: next<|im_start|>assistant:")


TEXT_HEADERS = """{%- for m in messages -%}<{{ m.role }}>
{{ m.content }}{%- endfor -%}{%- if add_generation_prompt -%}<assistant>
{% endif -%}"""


@pytest.mark.usefixtures("source")
def test_the_end_of_a_truncated_content_is_not_taken_for_the_beginning_of_the_next_header() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(TEXT_HEADERS))
    tokenizer = renderer.tokenizer
    ids = tokenizer.array([*tokenizer.encode_plain("if a "), *tokenizer.encode_plain("<")])
    added = renderer.bridge(ids, {"role": "assistant", "content": "if a <"}, [NEXT], setup_for(renderer))
    assert tokenizer.decode(added.ids) == "<user>\nnext<assistant>\n"


ENDS_ALIKE = """{%- if tools %}### system: {{ tools | tojson }}<|endoftext|>
{% endif %}{%- for m in messages -%}
{%- if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'user' -%}
{{ raise_exception('Roles must alternate') }}{%- endif -%}
{%- if m.role == 'assistant' %}### {{ m.role }}: {{ m.content }}
{{- '<|im_end|>' if loop.last and not add_generation_prompt else '<|endoftext|>' }}
{% else -%}### {{ m.role }}: {{ m.content }}<|endoftext|>
{% endif %}{%- endfor -%}"""
"""Text begins messages, no generation prompt is written, and two questions in a row are refused."""


@pytest.mark.usefixtures("source")
def test_end_of_a_question_is_not_taken_for_a_generation_prompt() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(ENDS_ALIKE))
    assert renderer.format(setup_for(renderer)).generation_prompt == ""
    text, _ = bridged(renderer, "### assistant: hi<|im_end|>")
    assert text == "\n### user: next<|endoftext|>\n"


NO_END = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("completion", ["a thought", "a thought\n</think>\n\nhi", "a thought\n</think>\n\nhi\n"])
def test_a_turn_that_only_a_line_break_ends_is_closed_with_it(completion: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NO_END))
    closing = "" if "</think>" in completion else "\n</think>\n\n"
    assert bridged(renderer, completion)[0].startswith(f"{closing}\n<|im_start|>user\nnext\n<|im_start|>")


LAST_TURN_DIFFERS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}[calls]
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}
{%- if messages[-1] != m %}, "id": "{{ c.id }}"{% endif %}}{% endfor -%}
[end]{% endif %}{% if m.role != 'assistant' or not loop.last %}<|im_end|>
{% endif %}{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("marks", [("[calls]", "[end]"), ("<tool_call>", "</tool_call>")])
@pytest.mark.parametrize("label", ["", ', "id": "call00001"'])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_text_written_only_in_earlier_turns_is_not_repeated(end: str, label: str, marks: tuple[str, str]) -> None:
    source = LAST_TURN_DIFFERS.replace("[calls]", marks[0]).replace("[end]", marks[1])
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    tokenizer = renderer.tokenizer
    calling = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": 1})]}
    written = f'{marks[0]}{{"name": "add", "arguments": {{"a": 1}}{label}}}{marks[1]}{end}'
    ids = tokenizer.array(tokenizer.encode_plain(written))
    bridge = renderer.bridge(ids, calling, [result(1)], setup_for(renderer)).ids
    closing = "" if end else "<|im_end|>"
    text = tokenizer.decode(bridge.tolist())
    assert text == f"{closing}\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"


PLAN_AND_FINAL = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{%- if m.reasoning_content %}<|box_start|>plan<|quad_start|>{{ m.reasoning_content }}<|box_end|><|im_start|>assistant
{%- endif %}{% if m.role == 'assistant' %}<|box_start|>final{% endif %}<|quad_start|>{{ m.content }}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{% endif -%}"""


@pytest.mark.usefixtures("source")
def test_truncated_reasoning_is_closed_without_an_empty_header() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(PLAN_AND_FINAL))
    text, closing = bridged(renderer, "<|box_start|>plan<|quad_start|>a thought")
    assert text.startswith("<|box_end|><|im_end|><|im_start|>user<|quad_start|>next")
    assert closing == "<|box_end|><|im_end|>"


ENDS_TWICE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|><|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.mark.usefixtures("source")
def test_model_stops_at_the_first_of_two_end_of_turn_tokens() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(ENDS_TWICE))
    assert bridged(renderer, "hi<|im_end|>")[0].startswith("<|im_end|>\n<|im_start|>user\nnext")
    assert bridged(renderer, "hi")[0].startswith("<|im_end|><|im_end|>\n<|im_start|>user\nnext")


NUMBERED = """{%- for m in messages -%}### {{ m.role }} {{ loop.index }}: {{ m.content }}
{{- '<|im_end|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|endoftext|>' }}
{% endfor -%}{%- if add_generation_prompt -%}### assistant {{ messages | length + 1 }}: {% endif -%}"""


@pytest.mark.usefixtures("source")
def test_end_of_turn_is_detected_with_numbered_text_prompts() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NUMBERED))
    for completion in ("hi<|endoftext|>", "hi<|im_end|>"):
        assert bridged(renderer, completion)[0] == "\n### user 3: next<|endoftext|>\n### assistant 4: "


ASKED_LAST = """{%- for m in messages -%}### {{ m.role }}: {{ m.content }}
{%- if m.role == 'user' and loop.last %} (your last question){% endif -%}
{{- '<|im_end|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|fim_suffix|>' -}}
{%- endfor -%}{%- if messages[-1].role != 'assistant' -%}### assistant:{%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_end_of_turn_is_detected_if_the_last_question_is_marked() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(ASKED_LAST))
    expected = "### user: next (your last question)<|fim_suffix|>### assistant:"
    assert bridged(renderer, "hi<|im_end|>")[0] == expected


PLAN_AND_MARK = """{%- for m in messages -%}
{%- if m.reasoning_content %}<|im_start|>assistant<|box_start|>plan<|quad_start|>{{ m.reasoning_content }}<|box_end|>
{%- endif %}<|im_start|>{{ m.role }}<|box_start|>{{ 'final' if m.role == 'assistant' else 'said' }}<|quad_start|>
{{- m.content }}{% if m.role == 'user' and loop.last %} (your last question){% endif %}<|box_end|>
{% endfor -%}{%- if messages[-1].role != 'assistant' -%}<|im_start|>assistant{%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_truncated_reasoning_is_closed_without_the_next_header() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(PLAN_AND_MARK))
    _, closing = bridged(renderer, "<|box_start|>plan<|quad_start|>a thought")
    assert closing.startswith("<|box_end|>")
    assert "<|im_start|>" not in closing


LAST_IS_FINAL = """{%- for m in messages -%}
{%- if m.reasoning_content %}<|im_start|>assistant:plan
{{ m.reasoning_content }}
{% endif %}<|im_start|>{{ m.role }}{{ ':final' if m.role == 'assistant' }}
{{ 'Final: ' if loop.last and m.role == 'assistant' }}{{ m.content }}
{% endfor -%}"""


@pytest.mark.usefixtures("source")
def test_truncated_reasoning_is_closed_without_text_of_the_last_turn() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(LAST_IS_FINAL))
    text, closing = bridged(renderer, "<|im_start|>assistant:plan\na thought")
    assert text == "\n\n<|im_start|>user\nnext\n"
    assert closing == "\n"


SPEAKERS = """{{ '<|fim_middle|>rules<|im_end|>' }}{%- for m in messages -%}
{{ '<|fim_prefix|>' if m.role == 'user' else '<|fim_suffix|>' }} {{ m.content }}
{%- if m.role == 'assistant' and loop.last %}<|endoftext|>{% else %}<|im_end|>{% endif -%}
{%- endfor -%}{%- if messages[-1].role != 'assistant' -%}<|fim_suffix|> {% endif -%}"""


@pytest.mark.usefixtures("source")
def test_message_end_is_no_generation_prompt_after_a_default_system_message() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(SPEAKERS))
    form = renderer.format(setup_for(renderer))
    assert renderer.tokenizer.spell_marks(form.generation_prompt) == "<|fim_suffix|> "
    assert bridged(renderer, "hi<|im_end|>")[0] == "<|fim_prefix|> next<|im_end|><|fim_suffix|> "


NO_PROMPT = """{{ 'rules<|im_end|>' }}{%- for m in messages -%}
({{ m.role }} {{ loop.index }}) {{ m.content }}<|im_end|>
{%- endfor -%}"""


@pytest.mark.usefixtures("source")
def test_message_end_is_no_generation_prompt_if_there_is_none() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NO_PROMPT))
    assert renderer.format(setup_for(renderer)).generation_prompt == ""
    assert bridged(renderer, "(assistant 2) hi<|im_end|>")[0] == "(user 3) next<|im_end|>"


@pytest.mark.usefixtures("source")
def test_result_without_a_needed_name_is_refused_after_a_reply_without_calls() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain("<|channel|>final<|message|>hi<|return|>"))
    answer = {"role": "tool", "tool_call_id": "call00001", "content": "ok"}
    with pytest.raises(TemplateRefused, match="Send the result with a `name`"):
        renderer.bridge(ids, REPLY, [answer], setup_for(renderer))
    added = renderer.bridge(ids, REPLY, [{**answer, "name": "add"}], setup_for(renderer))
    assert "functions.add" in renderer.tokenizer.decode(added.ids.tolist())


LISTENS = """{%- set ns = namespace(brief=false) -%}{%- for m in messages -%}
{%- if '/brief' in (m.content or '') %}{% set ns.brief = true %}{% endif -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%- for t in m.tool_calls or [] -%}
{{ '<tool_call>' ~ ({'name': t.function.name, 'arguments': t.function.arguments} | tojson) }}
{%- else -%}{{ m.content }}{%- endfor -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' ~ ('<think></think>' if ns.brief else '') }}
{%- endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("beside", ["/brief", "at length"])
def test_contextual_bridge_depends_on_text_beside_a_call(beside: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(LISTENS))
    reply = {"role": "assistant", "content": beside, "tool_calls": [call(0, {"a": 1})]}
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain("{}<|im_end|>"))
    added = renderer.bridge(ids, reply, [result(0)], setup_for(renderer), history=[NEXT])
    assert renderer.tokenizer.decode(added.ids.tolist()).endswith("<think></think>") is (beside == "/brief")


@pytest.mark.parametrize("arguments", [{"a": 1}, {"note": "x"}])
@pytest.mark.parametrize("call_id", ["call00000", "Zx81kQ0pL"])
def test_id_in_the_close_of_a_call_is_the_call_s_id(arguments: dict[str, Any], call_id: str) -> None:
    renderer = load_renderer("mistral_nemo/templates/v7.jinja")
    setup = setup_for(renderer)
    text = f'[TOOL_CALLS][{{"name": "add", "arguments": {json.dumps(arguments)}, "id": "{call_id}"}}]</s>'
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain(text))
    function = {"name": "add", "arguments": json.dumps(arguments)}
    reply = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    added = renderer.bridge(ids, reply, [{"role": "tool", "tool_call_id": call_id, "content": "ok"}], setup)
    assert renderer.tokenizer.decode(added.ids).startswith("[TOOL_RESULTS]")


@pytest.mark.parametrize("call_id", ["call00000", "Zk3Lq8Wm2"])
@pytest.mark.parametrize("note", ["x", ["é"], {"k": 1}, None])
@pytest.mark.usefixtures("source")
def test_any_id_after_the_arguments_ends_the_call(call_id: str, note: object) -> None:
    renderer = load_renderer("mistral_nemo/templates/v3.jinja")
    setup, tokenizer = setup_for(renderer), renderer.tokenizer
    calling = {**call(0, {"a": 1, "note": note}), "id": call_id}
    reply = {"role": "assistant", "content": "", "tool_calls": [calling]}
    new = [{**result(0), "tool_call_id": call_id}]
    prompt = renderer.render_text([NEXT], setup, generate=True)
    spoken = renderer.render_text([NEXT, reply], setup, generate=False)
    whole = renderer.render_text([NEXT, reply, *new], setup, generate=True)
    completion = tokenizer.array(tokenizer.encode_after_control(spoken[len(prompt) :]).ids)
    added = renderer.bridge(completion, reply, new, setup)
    assert [*tokenizer.encode_marked(prompt).ids, *completion, *added.ids] == tokenizer.encode_marked(whole).ids


CONTENT_LAST = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% for t in m.tool_calls -%}<tool_call>{{ {'name': t.function.name, 'arguments': t.function.arguments} | tojson }}
{%- if not loop.last %}<|im_start|>assistant
{% endif %}{%- endfor %}{{ m.content }}{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("history", [None, [NEXT]])
def test_a_call_is_not_closed_again_after_the_content_that_follows_it(history: list[dict[str, Any]] | None) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(CONTENT_LAST))
    reply = {"role": "assistant", "content": "so there", "tool_calls": [call(0, {"a": 1})]}
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}so there'
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain(text))
    added = renderer.bridge(ids, reply, [result(0)], setup_for(renderer), history)
    expected = f"<|im_start|>tool\n{result(0)['content']}<|im_start|>assistant\n"
    assert renderer.tokenizer.decode(added.ids) == expected


PLANS = """{%- for m in messages -%}
{%- if m.role != 'assistant' -%}<|fim_prefix|>{{ m.role }}<|fim_suffix|>
{{ m.content }}
{%- else -%}
{%- if m.reasoning_content and loop.last -%}<|fim_prefix|>assistant:plan<|fim_suffix|>
{{ m.reasoning_content }}{%- endif -%}<|fim_prefix|>assistant:final<|fim_suffix|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|fim_prefix|>assistant{%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_header_that_closes_an_open_part_is_written_once() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(PLANS))
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain(":plan<|fim_suffix|>\nso far"))
    added = renderer.bridge(ids, {"role": "assistant", "content": "so far"}, [NEXT], setup_for(renderer), [NEXT])
    expected = "<|fim_prefix|>user<|fim_suffix|>\nnext<|fim_prefix|>assistant"
    assert renderer.tokenizer.decode(added.ids) == expected


ENDS_WITH_CONTENT = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% for t in m.tool_calls -%}<|box_start|>{{ {'name': t.function.name, 'arguments': t.function.arguments} | tojson }}
{%- if loop.last %}<|box_end|>{% endif %}{%- endfor %}{{ m.content }}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.mark.usefixtures("source")
def test_separator_of_calls_and_content_is_no_stop_token() -> None:
    tokenizer = load_tokenizer("qwen3")
    renderer = Renderer(tokenizer, ChatTemplate(ENDS_WITH_CONTENT))
    between = tokenizer.control("<|box_end|>")
    assert between is not None
    assert between.id not in renderer.stop_ids(setup_for(renderer))


CHANNELS = """{%- for m in messages -%}
{%- if m.role != 'assistant' -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- else -%}
{%- if m.reasoning_content -%}<|im_start|>assistant:plan
{{ m.reasoning_content }}<|im_end|>{%- endif -%}
{%- for t in m.tool_calls -%}<|im_start|>assistant to={{ t.function.name }}
{{ t.function.arguments | tojson }}<|fim_suffix|>
{%- else -%}<|im_start|>assistant:final
{{ m.content }}{{ '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""


UNENDED = """{%- for m in messages -%}
{%- if m.role == 'assistant' and m.reasoning_content -%}<|im_start|>assistant:plan
{{ m.reasoning_content + '\n' }}{%- endif -%}
<|im_start|>{{ m.role }}{{ ':final' if m.role == 'assistant' }}
{{ m.content }}{{ '\n' if m.role != 'assistant' or not loop.last or add_generation_prompt }}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_header_within_turns_is_no_stop_token() -> None:
    tokenizer = load_tokenizer("qwen3")
    renderer = Renderer(tokenizer, ChatTemplate(CHANNELS))
    stops = renderer.stop_ids(setup_for(renderer))
    within = {control.id for name in ("<|im_start|>", "<|im_end|>") if (control := tokenizer.control(name)) is not None}
    assert len(within) == 2
    assert stops & within <= tokenizer.eos_ids


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("step", [0, 1])
def test_reasoning_opener_within_content_opens_no_reasoning(step: int) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(UNENDED))
    setup = setup_for(renderer)
    assert renderer.format(setup).reasoning is not None
    reply = parsed(renderer, ":plan\nHm.<|im_start|>assistant:final\nSee assistant:plan for it", step)
    assert (reply.reasoning, reply.content, reply.reasoning_open) == ("Hm.", "See assistant:plan for it", False)
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain(":final\nSee assistant:plan for it"))
    added = renderer.bridge(ids, {"role": "assistant", "content": "See assistant:plan for it"}, [NEXT], setup)
    assert renderer.tokenizer.decode(added.ids) == "\n<|im_start|>user\nnext\n<|im_start|>assistant"


UNENDED_CALLS = """{%- for m in messages -%}
{%- if m.role != 'assistant' -%}<|im_start|>{{ m.role }}
{{ m.content + '\n' }}
{%- else -%}
{%- if m.reasoning_content -%}<|im_start|>assistant<|fim_prefix|>{{ m.reasoning_content }}<|fim_suffix|>{%- endif -%}
<|im_start|>assistant
{{ m.content }}{%- for t in m.tool_calls -%}<tool_call>
{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}
</tool_call>{%- endfor -%}{{ '\n' }}
{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("end", "closing"),
    [
        ("}}\n</tool_call>\n", ""),
        ("}}\n</tool_call>", "\n"),
        ("}}", "\n</tool_call>\n"),
        ("}}\n</tool_call><|im_end|>", "\n"),
    ],
)
def test_call_close_is_written_once_if_turns_contain_headers(end: str, closing: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(UNENDED_CALLS))
    written = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1' + end
    ids = renderer.tokenizer.array(renderer.tokenizer.encode_plain(written))
    reply = {"role": "assistant", "content": "", "tool_calls": [call(7, {"a": 1})]}
    added = renderer.bridge(ids, reply, [result(7, "ok")], setup_for(renderer))
    expected = f"{closing}<|im_start|>tool\nok\n<|im_start|>assistant"
    assert renderer.tokenizer.decode(added.ids) == expected


FRAMED = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' -%}<|box_start|>{{ m.content }}<|box_end|>{%- else %} {{ m.content }}{%- endif -%}
<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{%- endif -%}"""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("completion", "closing"),
    [("<|box_start|>h", "<|box_end|><|im_end|>"), ("<|box_start|>h<|box_end|>", "<|im_end|>"), ("h", "<|im_end|>")],
)
def test_delimiters_of_truncated_content_are_closed(completion: str, closing: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(FRAMED))
    following = "<|im_start|>user next<|im_end|><|im_start|>assistant"
    assert bridged(renderer, completion) == (closing + following, closing)


FRAMED_CALLS = FRAMED.replace(
    "{{ m.content }}<|box_end|>",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|box_end|>",
    1,
)


@pytest.mark.usefixtures("source")
def test_content_that_ends_with_half_a_call_is_closed() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(FRAMED_CALLS))
    _, closing = bridged(renderer, '<|box_start|>h<tool_call>{"name": "add", "argu')
    assert closing == "<|box_end|><|im_end|>"


SWITCHED = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '/brief' in messages[0].content %}<think></think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if '/brief' in messages[0].content %}<think></think>
{% endif %}{%- endif -%}"""


@pytest.mark.usefixtures("source")
def test_spliced_turn_keeps_the_prompt_of_its_conversation() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(SWITCHED))
    sampled = {1: renderer.tokenizer.array(renderer.tokenizer.encode_plain("hi<|im_end|>"))}
    for word in ("/brief", "long"):
        messages = [{"role": "user", "content": word}, REPLY, NEXT]
        spliced = renderer.render(messages, setup_for(renderer), sampled=sampled).ids
        assert spliced.tolist() == renderer.render(messages, setup_for(renderer)).ids.tolist()


FROM_THE_SECOND_ANSWER = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index > 2 %}<think>{{ m.reasoning_content or '' }}</think>{% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.mark.usefixtures("source")
def test_reasoning_shown_only_by_later_answers_is_closed() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(FROM_THE_SECOND_ANSWER))
    reply = parsed(renderer, "<think>so</think>hi<|im_end|>")
    assert (reply.reasoning, reply.content) == ("so", "hi")
    text, closing = bridged(renderer, "<think>so")
    assert closing == "</think><|im_end|>"
    assert text.startswith(closing + "\n<|im_start|>user\nnext")


LAST_QUESTION_MARKED = """{%- for m in messages -%}
{%- if m.reasoning_content -%}<|im_start|>assistant<|box_start|>{{ m.reasoning_content }}<|box_end|>{%- endif -%}
<|im_start|>{{ m.role }}{{ '<|quad_start|>' if m.role == 'assistant' and not m.tool_calls else '\\n' }}{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}
{{ ' (last)' if loop.last and m.role == 'user' }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{% endif -%}"""
"""Different tokens follow the header before content and before calls."""


@pytest.mark.usefixtures("source")
def test_truncated_reasoning_is_closed_if_the_last_question_is_marked() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(LAST_QUESTION_MARKED))
    text, closing = bridged(renderer, "<|box_start|>a thought")
    assert closing == "<|box_end|><|im_end|>"
    assert text.startswith(closing + "\n<|im_start|>user")


FRAMED_AFTER_REASONING = FRAMED.replace(
    "<|box_start|>", "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}<|box_start|>"
)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("completion", "closing"),
    [
        ("<think>so", "</think><|box_start|><|box_end|><|im_end|>"),
        ("<think>so</think>", "<|box_start|><|box_end|><|im_end|>"),
        ("<think>so</think><|box_start|>", "<|box_end|><|im_end|>"),
        ("<think>so</think><|box_start|><|box_end|>", "<|im_end|>"),
    ],
)
def test_missing_content_gets_the_delimiters_of_the_template(completion: str, closing: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(FRAMED_AFTER_REASONING))
    thought = {"role": "assistant", "content": "", "reasoning_content": "so"}
    conversation = renderer.render([NEXT, thought, NEXT], setup_for(renderer)).ids
    following = "<|im_start|>user next<|im_end|><|im_start|>assistant"
    assert renderer.tokenizer.decode(conversation).endswith(completion + closing + following)
    assert bridged(renderer, completion) == (closing + following, closing)


TAGGED_PARTS = """{%- for m in messages -%}<|im_start|>{{ m.role }}<|quad_start|>
{%- if m.role == 'assistant' -%}
<|box_start|>think<|quad_start|>{{ m.reasoning_content }}<|box_end|>think<|quad_start|>
{%- endif -%}
<|box_start|>text<|quad_start|>{{ m.content }}<|box_end|>text<|quad_start|><|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant<|quad_start|><|box_start|>think<|quad_start|>
{%- endif -%}"""
"""Reasoning and content are framed by the same tokens; the prompt opens reasoning."""


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "completion",
    [
        "so",
        "so<|box_end|>think<|quad_start|><|box_start|>text<|quad_start|>",
        "so<|box_end|>think<|quad_start|><|box_start|>text<|quad_start|>h",
        "so<|box_end|>think<|quad_start|><|box_start|>text<|quad_start|>h<|box_end|>text<|quad_start|>",
    ],
)
def test_part_is_closed_if_all_parts_have_the_same_tokens(completion: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(TAGGED_PARTS))
    thought = {"role": "assistant", "content": "h" if ">h" in completion else "", "reasoning_content": "so"}
    conversation = renderer.tokenizer.decode(renderer.render([NEXT, thought, NEXT], setup_for(renderer)).ids)
    text, _ = bridged(renderer, completion)
    assert conversation.endswith(completion + text)


ALWAYS_PROMPTED = FRAMED.replace("if add_generation_prompt", "if messages[-1].role == 'user'")
REFUSES_TWO_QUESTIONS = (
    "{%- for m in messages -%}{%- if loop.previtem and loop.previtem.role == m.role -%}"
    "{{ raise_exception('roles alternate') }}{%- endif -%}{%- endfor -%}" + ALWAYS_PROMPTED
)
NOTHING_ENDS_QUESTIONS = ALWAYS_PROMPTED.replace("<|im_end|>", "{{ '<|im_end|>' if m.role == 'assistant' else '' }}")

FRAMES_ROLES_OF_QUESTIONS = REFUSES_TWO_QUESTIONS.replace("{%- else %} {{", "{%- else %}<|quad_start|>{{")


@pytest.mark.parametrize(
    "template", [ALWAYS_PROMPTED, REFUSES_TWO_QUESTIONS, NOTHING_ENDS_QUESTIONS, FRAMES_ROLES_OF_QUESTIONS]
)
def test_generation_prompt_is_detected_if_always_written(template: str) -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(template))
    prompt = renderer.format(setup_for(renderer)).generation_prompt
    assert renderer.tokenizer.spell_marks(prompt) == "<|im_start|>assistant"


LAST_ENDS_OTHERWISE = """{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant: {% elif messages[-1].role == 'assistant' -%}
<|box_start|><|box_end|>{%- endif -%}"""


def test_end_of_the_last_turn_does_not_close_content() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(LAST_ENDS_OTHERWISE))
    # A model ends its turns with the next header, so that token closes a truncated turn.
    assert bridged(renderer, "h") == ("<|im_start|>user: next<|im_start|>assistant: ", "<|im_start|>")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_a_parsed_reply_becomes_the_message_to_bridge_after() -> None:
    renderer = Renderer.load(MODEL)
    setup = renderer.setup([ADD])
    question = {"role": "user", "content": "What do figs cost?"}
    written = call(1, {"a": 2})
    turn = {"role": "assistant", "content": None, "reasoning_content": "Let me see.", "tool_calls": [written]}
    prompt = renderer.render([question], setup).ids
    whole = renderer.render([question, turn, result(1, "12")], setup).ids
    stop = next(n for n in range(len(prompt), len(whole)) if whole[n] in renderer.stop_ids(setup))
    completion = whole[len(prompt) : stop + 1]
    parser = renderer.parser(setup, prompt_ids=prompt)
    parser.feed(completion.tolist())
    _, reply = parser.finish()
    message = reply.message()
    (made,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "reasoning_content": "Let me see."}
    assert (made["type"], made["function"]["name"], json.loads(made["function"]["arguments"])) == (
        "function",
        "add",
        {"a": 2},
    )
    added = renderer.bridge(completion, reply.message(), [result(1, "12")], setup)
    assert [*prompt, *completion, *added.ids] == whole.tolist()
