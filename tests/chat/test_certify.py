from __future__ import annotations

import json

import pytest

from tests.chat.conftest import ROOT, TEMPLATES, load_renderer, load_tokenizer, needs_tokenizers, setup_for
from tokentape.chat import grammar
from tokentape.chat.certify import Certificate, certify, choose, continuation_name
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import ChatTemplate
from tokentape.errors import TemplateRefused

pytestmark = needs_tokenizers

QWEN3 = "qwen3/templates/Qwen3.jinja"

NOT_READ = {
    # The template writes the content beside a call into the reasoning channel, and one call per turn only.
    "gpt_oss/templates/gpt-oss.jinja": {"content and call", "parallel calls"},
    # Lists and objects become nested tags named by their keys.
    "minimax_m2/templates/MiniMax-M3.jinja": {"typed arguments"},
}


@pytest.fixture(scope="module")
def certificates() -> dict[str, Certificate]:
    return {template: certify(load_renderer(template)) for template in TEMPLATES}


def test_every_template_is_safe_against_forged_control_tokens(certificates: dict[str, Certificate]) -> None:
    assert [name for name, certificate in certificates.items() if not certificate.injection_safe] == []


def test_every_turn_that_a_template_writes_is_read_back(certificates: dict[str, Certificate]) -> None:
    failed = {
        name: {check.name for check in certificate.parsing if check.holds is False}
        for name, certificate in certificates.items()
    }
    assert {name: checks for name, checks in failed.items() if checks} == NOT_READ


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


def test_a_template_that_moves_tools_forks(certificates: dict[str, Certificate]) -> None:
    for name in ("mistral_nemo/templates/v3.jinja", "mistral_nemo/templates/v11.jinja"):
        user = certificates[name].continuation("user")
        assert user is not None
        assert user.strategy == "fork"


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


def test_a_certificate_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format"):
        Certificate.from_json('{"format": 99}')


def test_a_continuation_is_named_by_its_roles() -> None:
    roles = [{"role": role} for role in ("tool", "tool", "tool", "user", "assistant", "tool")]
    assert continuation_name(roles) == "tools, user, assistant, tool"


def test_an_unknown_continuation_is_tried_out(certificates: dict[str, Certificate]) -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    new = [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]
    assert certificates[QWEN3].continuation(continuation_name(new)) is None
    reply = {"role": "assistant", "content": "y"}
    assert choose(renderer, certificates[QWEN3], reply, new, setup, [grammar.QUESTION]) == "local"


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
