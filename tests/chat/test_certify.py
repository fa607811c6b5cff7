from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from tests.chat.conftest import ROOT, TEMPLATES, load_renderer, load_tokenizer, needs_tokenizers, setup_for
from tokentape.chat import grammar
from tokentape.chat.certificate import Certificate
from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.certify import certify, choose
from tokentape.chat.grammar import continuation_name
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import ChatTemplate
from tokentape.errors import TemplateRefused

pytestmark = needs_tokenizers

QWEN3 = "qwen3/templates/Qwen3.jinja"

NOT_READ = {
    # Lists and objects become nested tags named by their keys.
    "minimax_m2/templates/MiniMax-M3.jinja": {"typed arguments"},
}


@pytest.fixture(scope="module")
def certificates() -> dict[str, Certificate]:
    return {template: load_or_certify(load_renderer(template), {}) for template in TEMPLATES}


def test_every_template_is_safe_against_forged_control_tokens(certificates: dict[str, Certificate]) -> None:
    assert [name for name, certificate in certificates.items() if not certificate.injection_safe] == []


def test_every_turn_that_a_template_writes_is_read_back(certificates: dict[str, Certificate]) -> None:
    failed = {
        name: {check.name for check in certificate.parsing if check.holds is False}
        for name, certificate in certificates.items()
    }
    assert {name: checks for name, checks in failed.items() if checks} == NOT_READ


def test_what_a_template_leaves_out_of_a_turn_is_not_called_read_back(certificates: dict[str, Certificate]) -> None:
    def details(name: str) -> dict[str, str]:
        return {check.name: check.detail for check in certificates[name].parsing if check.holds is None}

    assert details("qwen2_5/templates/Qwen2.5-Instruct.jinja")["reasoning"] == "the template leaves out the reasoning"
    assert details("gpt_oss/templates/gpt-oss.jinja") == {
        "parallel calls": "the template leaves out the calls",
        "content and call": "the template writes this content just as it writes reasoning",
    }
    assert "call" in details("llama3/templates/Llama-3-Instruct.jinja")


def test_user_and_tool_continuations_are_certified_wherever_the_template_takes_them(
    certificates: dict[str, Certificate],
) -> None:
    for name, certificate in certificates.items():
        for continuation in ("user", "tool"):
            found = certificate.continuation(continuation)
            assert found is not None
            assert found.strategy != "refused", (name, found.reason)


def test_append_only_agrees_with_an_independent_table(certificates: dict[str, Certificate]) -> None:
    """prefix_map.json was computed by other code, which compares full renderings of one conversation per column."""
    rows = json.loads((ROOT / "prefix_map.json").read_text(encoding="utf-8"))["rows"]
    compared, wrong = 0, []
    for row in rows:
        certificate = certificates.get(row["template"])
        if certificate is None or row["kw"] or "*" in row["label"]:
            continue
        for continuation, columns in (("user", ("UT", "RTU")), ("tool", ("TL", "RT"))):
            found = certificate.continuation(continuation)
            assert found is not None
            kept = all(row[column] in "✓∅" for column in columns) and row[columns[0]] == "✓"
            compared += 1
            if kept != (found.append_only != "no"):
                wrong.append((row["template"], continuation, [row[column] for column in columns], found.reason))
    assert compared >= 40
    # The certificate tries more: a tool call right behind a tool result, where DeepSeek-V3 writes no header, and for R1
    # an answer that is not behind one, where the prompt opens reasoning.
    assert {(template.split("/")[0], continuation, columns[0]) for template, continuation, columns, _ in wrong} == {
        ("deepseek_v3", "tool", "✓"),
        ("deepseek_v31", "user", "✓"),
    }


def test_a_template_that_drops_old_reasoning_shows_where(certificates: dict[str, Certificate]) -> None:
    user = certificates[QWEN3].continuation("user")
    assert user is not None
    assert (user.strategy, user.append_only) == ("local", "no")
    assert user.counterexample[-1]["role"] == "user"
    assert "written differently" in user.reason
    assert "reasoning of turns before a user message" in certificates[QWEN3].dropped


def test_a_template_made_to_keep_reasoning_is_append_only(certificates: dict[str, Certificate]) -> None:
    fixed = certificates["qwen3/templates/fixed-trl-qwen3_training.jinja"]
    assert {found.append_only for found in fixed.continuations} == {"yes"}


def strategies(certificate: Certificate, *names: str) -> list[str]:
    found = [certificate.continuation(name) for name in names]
    return [one.strategy for one in found if one is not None]


def test_a_template_that_moves_tools_or_system_text_forks_where_there_are_any(
    certificates: dict[str, Certificate],
) -> None:
    names = ("user", "user/no-tools", "user/no-tools/no-system")
    assert strategies(certificates["mistral_nemo/templates/v3.jinja"], *names) == ["fork", "fork", "local"]
    assert strategies(certificates["mistral_nemo/templates/v11.jinja"], *names) == ["fork", "local", "local"]


def test_a_message_that_a_template_writes_in_front_of_the_turn_forks(certificates: dict[str, Certificate]) -> None:
    """DeepSeek collects all system messages at the start: what such a tail appends would leave them out."""
    for name in ("deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja", "deepseek_v31/templates/DeepSeek-V3.1.jinja"):
        system = certificates[name].continuation("system+user")
        assert system is not None
        assert (system.strategy, system.append_only) == ("fork", "no")
        assert "in front of the turn" in system.reason


def test_local_bridges_equal_the_tail_of_the_whole_rendering(certificates: dict[str, Certificate]) -> None:
    """Also for conversations without tools: what `local` says is checked against the real history."""
    for name, certificate in certificates.items():
        renderer = load_renderer(name)
        for found in certificate.continuations:
            if found.strategy != "local" or "/" not in found.name:
                continue
            setup = grammar.setup(renderer.fingerprint, {}, tools=())
            for history, reply, new in list(grammar.conversations(found.name))[::5]:
                with suppress(TemplateRefused):
                    full = renderer.marked([*history, reply, *new], setup, generate=True)
                    assert full.endswith(renderer.tail(reply, new, setup)), (name, found.name)


def test_what_depends_on_what_came_before_the_call_is_contextual(certificates: dict[str, Certificate]) -> None:
    tool = certificates["deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja"].continuation("tool")
    assert tool is not None
    assert tool.strategy == "contextual"


def test_the_clock_is_noticed(certificates: dict[str, Certificate]) -> None:
    dated = {name.split("/")[-1] for name, certificate in certificates.items() if certificate.date_dependent}
    assert {"gpt-oss.jinja", "Llama-3.2-Instruct.jinja"} <= dated
    assert "Qwen3.jinja" not in dated


def test_a_certificate_survives_json(certificates: dict[str, Certificate]) -> None:
    for certificate in certificates.values():
        assert Certificate.from_json(certificate.to_json()) == certificate


def test_an_unknown_continuation_is_tried_out(certificates: dict[str, Certificate]) -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    new = [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]
    assert certificates[QWEN3].continuation(continuation_name(new)) is None
    reply = {"role": "assistant", "content": "y"}
    assert choose(renderer, certificates[QWEN3], reply, new, setup, [grammar.QUESTION]) == "local"


def test_no_tools_and_no_system_message_choose_their_own_rows(certificates: dict[str, Certificate]) -> None:
    name = "mistral_nemo/templates/v3.jinja"
    renderer = load_renderer(name)
    answer, question = grammar.TURNS["content"], grammar.QUESTION

    def chosen(history: list[Any], **kwargs: Any) -> str:
        return choose(renderer, certificates[name], answer, [grammar.NEXT], setup_for(renderer, **kwargs), history)

    assert chosen([question]) == "fork"
    assert chosen([grammar.SYSTEM, question], tools=()) == "fork"
    assert chosen([question], tools=()) == "local"


def test_what_is_tried_out_forks_where_tools_or_history_come_up_again(certificates: dict[str, Certificate]) -> None:
    name = "mistral_nemo/templates/v3.jinja"
    renderer = load_renderer(name)
    answer, question = grammar.TURNS["content"], grammar.QUESTION
    new = [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]

    def tried(history: list[Any], **kwargs: Any) -> str:
        return choose(renderer, certificates[name], answer, new, setup_for(renderer, **kwargs), history)

    assert tried([question]) == "fork"
    assert tried([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, question], tools=()) == "fork"
    assert tried([question], tools=()) == "local"


def test_what_is_tried_out_forks_where_a_message_goes_to_the_front(certificates: dict[str, Certificate]) -> None:
    name = "deepseek_v31/templates/DeepSeek-V3.1.jinja"
    renderer = load_renderer(name)
    system = {"role": "system", "content": "Now in French."}
    new = [grammar.NEXT, system, grammar.NEXT]
    history = [grammar.QUESTION]
    assert choose(renderer, certificates[name], grammar.TURNS["content"], new, setup_for(renderer), history) == "fork"


def test_what_is_tried_out_and_never_reaches_the_model_is_refused(certificates: dict[str, Certificate]) -> None:
    renderer = load_renderer(QWEN3)
    new = [grammar.NEXT, {"role": "developer", "content": "Now in French."}]
    with pytest.raises(TemplateRefused, match="developer"):
        choose(renderer, certificates[QWEN3], grammar.TURNS["content"], new, setup_for(renderer), [grammar.QUESTION])


def test_a_refused_continuation_says_why(certificates: dict[str, Certificate]) -> None:
    name = "llama3/templates/Llama-3.1-3.3-Instruct.jinja"
    renderer = load_renderer(name)
    results = [grammar.result(1, "a"), grammar.result(2, "b")]
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        choose(renderer, certificates[name], grammar.TURNS["parallel calls"], results, setup_for(renderer), [])


UNSEEN = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|im_start|>bot>>{% if m.reasoning_content %}[[{{ m.reasoning_content }}]]{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
@@call {{ c.function.name }} {{ c.function.arguments | tojson }} @@{% endfor %}<|im_end|>
{%- else -%}
<|im_start|>{{ m.role }}>>{{ m.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>bot>>{%- endif -%}"""


def test_a_template_that_nobody_has_seen_is_certified() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(UNSEEN))
    certificate = certify(renderer)
    assert certificate.call_style == "named"
    assert certificate.reasoning == ("[[", "]]")
    assert {check.name for check in certificate.parsing if check.holds is not True} == set()
    assert {found.append_only for found in certificate.continuations} == {"yes"}
