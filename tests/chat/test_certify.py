from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chat.conftest import call, load_renderer, load_tokenizer, new_renderer, result, setup_for
from tests.chat.data import make_tokenizers
from tests.chat.oracle import by_transformers
from tokentape.chat import _grammar as grammar
from tokentape.chat import _template_text as template_text
from tokentape.chat._certificate import Certificate
from tokentape.chat._certification import certify
from tokentape.chat._grammar import continuation_name
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import choose
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TemplateRefused

pytestmark = pytest.mark.usefixtures("source")

QWEN3 = "qwen3/templates/Qwen3.jinja"


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Certify only these continuations: each takes a tenth of a second."""
    monkeypatch.setattr(grammar, "NAMES", names)


def test_end_of_each_kind_of_turn_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tool")
    asked: list[object] = []

    def counted(render: object, probe: object, *rest: object) -> object:
        asked.append(probe)
        return turn_close(render, probe, *rest)  # type: ignore[arg-type]

    turn_close = template_text.turn_close
    monkeypatch.setattr(template_text, "turn_close", counted)
    certify(new_renderer("gpt_oss/templates/gpt-oss.jinja"))
    assert len(asked) == len({repr(probe) for probe in asked}) > 0


def test_omitted_parts_of_a_turn_are_not_certified_as_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)

    def details(name: str) -> dict[str, str]:
        return {check.name: check.detail for check in certify(load_renderer(name)).parsing if check.holds is None}

    assert details("qwen2_5/templates/Qwen2.5-Instruct.jinja")["reasoning"] == "the template leaves out the reasoning"
    assert details("gpt_oss/templates/gpt-oss.jinja") == {
        "parallel calls": "the template leaves out the calls",
        "content and call": "the template writes this content just as it writes reasoning",
    }
    assert "call" in details("llama3/templates/Llama-3-Instruct.jinja")


def test_template_that_drops_old_reasoning_has_a_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user")
    certificate = certify(load_renderer(QWEN3))
    user = certificate.continuation("user")
    assert user is not None
    assert (user.strategy, user.append_only) == ("local", "no")
    assert user.counterexample[-1]["role"] == "user"
    assert "written differently" in user.reason
    assert "reasoning of turns before a user message" in certificate.dropped


def test_a_template_made_to_keep_reasoning_is_append_only(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user", "tool", "tools+user", "user/no-tools/no-system")
    fixed = certify(load_renderer("qwen3/templates/fixed-trl-qwen3_training.jinja"))
    assert [continuation.append_only for continuation in fixed.continuations] == ["yes"] * 4


LINE_AFTER_TEXT = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|im_start|><think>{% if m.content %}{{ m.content }}
{% endif %}{%- else -%}### {{ m.role }}: {{ m.content }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}"""


def test_line_break_after_content_does_not_refuse_a_template() -> None:
    user = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(LINE_AFTER_TEXT))).continuation("user")
    assert user is not None
    assert user.strategy == "local"
    assert user.append_only != "yes"


INSTRUCTED_NOT_TO_THINK = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if '/quick' in messages[0].content %}<think></think>{% endif %}{%- endif -%}"""


def test_reasoning_after_a_prompt_that_closes_it_is_not_append_only() -> None:
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(INSTRUCTED_NOT_TO_THINK)))
    continuation = certificate.continuation("tool")
    assert continuation is not None
    assert continuation.append_only == "no"


LOOKS_AHEAD = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'tool' and loop.nextitem.role == 'user' %}{% endif %}{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_template_that_fails_after_results_is_certified_for_the_rest() -> None:
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(LOOKS_AHEAD)))
    assert strategies(certificate, "user", "tool", "tool+user") == ["local", "refused", "local"]


QUESTION_BESIDE_TOOLS = """{%- if tools -%}<|im_start|>user
{{ tools | tojson }}{{ messages[0].content }}<|im_end|>
{% set messages = messages[1:] -%}{%- endif -%}
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if '/fast' in messages[0].content %}<fast>{% endif %}{%- endif -%}"""
"""With tools, it removes the first message and then reads the first of the others."""


def test_template_that_refuses_a_single_question_is_probed_after_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user", "tool", "tool+user")
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(QUESTION_BESIDE_TOOLS))
    certificate = certify(renderer)
    assert strategies(certificate, "user", "tool", "tool+user") == ["contextual"] * 3
    held = {check.name for check in certificate.parsing if check.holds}
    assert held >= {"content", "call", "typed arguments"}
    setup = setup_for(renderer)
    question, answer = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}
    with pytest.raises(TemplateRefused):
        renderer.render([question], setup)
    asked = [question, answer, {"role": "user", "content": "Three?"}]
    assert renderer.render(asked, setup).ids.tolist() == by_transformers(renderer, asked)
    new = {"role": "user", "content": "Four?"}
    completion = renderer.tokenizer.array(renderer.tokenizer.encode_plain("Two.<|im_end|>"))
    for reply in (answer, {"role": "assistant", "content": "/fast"}):
        history = [question, reply, asked[-1]]
        ids = renderer.bridge(completion, answer, [new], setup, history).ids.tolist()
        whole = by_transformers(renderer, [*history, answer, new])
        assert whole is not None
        assert whole[-len(ids) :] == ids
        assert ("<fast>" in renderer.tokenizer.decode(ids)) is (reply is not answer)


def strategies(certificate: Certificate, *names: str) -> list[str]:
    continuations = [certificate.continuation(name) for name in names]
    return [continuation.strategy for continuation in continuations if continuation is not None]


def test_template_that_moves_tools_or_system_text_forks_if_present(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("user", "user/no-tools", "user/no-tools/no-system")
    only(monkeypatch, *names)
    for template, expected in ("v3", ["fork", "fork", "local"]), ("v11", ["fork", "local", "local"]):
        assert strategies(certify(load_renderer(f"mistral_nemo/templates/{template}.jinja")), *names) == expected


def test_a_message_that_a_template_writes_before_the_turn_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek collects all system messages at the start, so the appended text of such a tail lacks them."""
    only(monkeypatch, "system+user")
    for name in ("deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja", "deepseek_v31/templates/DeepSeek-V3.1.jinja"):
        system = certify(load_renderer(name)).continuation("system+user")
        assert system is not None
        assert (system.strategy, system.append_only) == ("fork", "no")
        assert "before the turn" in system.reason


def test_dependence_on_text_before_the_call_is_contextual(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tool")
    tool = certify(load_renderer("deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja")).continuation("tool")
    assert tool is not None
    assert tool.strategy == "contextual"


def test_dependence_on_the_clock_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert certify(load_renderer("gpt_oss/templates/gpt-oss.jinja")).date_dependent
    assert not certify(load_renderer(QWEN3)).date_dependent


def test_dependence_on_a_year_to_come_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    source = JSON_ANSWERS + "{% if strftime_now('%Y') | int > 2040 %}late{% endif %}"
    assert certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source))).date_dependent


def test_unknown_continuation_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    renderer = load_renderer(QWEN3)
    setup, certificate = setup_for(renderer), certify(renderer)
    new = [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]
    assert certificate.continuation(continuation_name(new)) is None
    reply = {"role": "assistant", "content": "y"}
    assert choose(renderer, certificate, reply, new, setup, [grammar.QUESTION]) == "local"


CLOSES_OLD_CALLS = """{%- set ns = namespace(results=false, calling=false) -%}{%- for m in messages -%}
{%- if ns.calling and m.role == 'user' %}{{ '[no result]' ~ ('[again]' if ns.results else '') }}{% endif -%}
{%- set ns.calling = m.tool_calls is defined -%}{%- if m.role == 'tool' %}{% set ns.results = true %}{% endif -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content or '') }}
{%- for t in m.tool_calls or [] %}{{ '<tool_call>' ~ (t.function | tojson) ~ '</tool_call>' }}{% endfor -%}
{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


def test_unanswered_call_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user", "tool", "tools")
    # DeepSeek V3's template also closes such a call differently after a tool result.
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(CLOSES_OLD_CALLS))
    certificate, setup = certify(renderer), setup_for(renderer)
    earlier, reply = ({"role": "assistant", "content": "", "tool_calls": [call(n, {"a": n})]} for n in (0, 1))
    continuation = certificate.continuation("user")
    assert continuation is not None
    assert continuation.strategy == "local"
    after_result = [grammar.QUESTION, earlier, result(0)]
    assert choose(renderer, certificate, reply, [grammar.NEXT], setup, [grammar.QUESTION]) == "local"
    assert choose(renderer, certificate, reply, [grammar.NEXT], setup, after_result) == "contextual"
    assert choose(renderer, certificate, reply, [result(1)], setup, after_result) == "local"


COUNTS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% if messages | length > 17 %}Briefly: {% endif %}{%- endif -%}"""


def test_template_that_counts_messages_is_probed_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = "user", "user/no-tools/no-system"
    only(monkeypatch, *names)
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(COUNTS)))
    for name in names:
        continuation = certificate.continuation(name)
        assert continuation is not None
        assert (continuation.strategy, continuation.append_only) == ("contextual", "no")


NUMBERED = """{%- for m in messages -%}<|im_start|>{{ m.role }} {{ loop.index }}
{{ m.content }}<|im_end|>
{% endfor -%}"""


def test_turn_read_back_only_as_the_first_is_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch)
    checks = {check.name: check for check in certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(NUMBERED))).parsing}
    assert checks["content"].holds is False
    assert "<|im_start|>assistant 4" in checks["content"].detail


NUMBERED_PROMPT = """{%- for m in messages -%}<|im_start|>{{ m.role }} #{{ loop.index }}
{{ m.content or '' }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant #{{ messages | length + 1 }}{%- endif -%}"""


@pytest.mark.parametrize(("merged", "append_only"), [(None, "yes"), ("8", "no"), ("9", "no"), ("13", "no")])
def test_turn_sharing_a_token_with_a_number_is_not_append_only(
    merged: str | None, append_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "user")
    family = make_tokenizers.FAMILIES["qwen3"]
    spec = make_tokenizers.compose("byte-level BPE", family)
    if merged is not None:
        like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        next_id = 1 + max(token["id"] for token in spec["added_tokens"])
        spec["added_tokens"].append({"id": next_id, "content": f"{merged}\n", **like})
    renderer = Renderer(Tokenizer(json.dumps(spec).encode(), family.config), ChatTemplate(NUMBERED_PROMPT))
    (continuation,) = certify(renderer).continuations
    assert continuation.append_only == append_only


PROMPT_WITH_TOOLS_ONLY = (
    NUMBERED
    + """{%- if tools and add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
)


def test_turn_read_back_only_with_tools_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(PROMPT_WITH_TOOLS_ONLY))
    checks = {check.name: check for check in certify(renderer).parsing}
    assert checks["content"].holds is False
    assert "<|im_start|>assistant 4" in checks["content"].detail


NUMBERED_AFTER_RESULTS = """{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.previtem.role == 'tool' %}#{{ loop.index }}{{ '' -}}
{% elif m.role == 'tool' -%}<tool_response>{% else -%}<|im_start|>{{ m.role }}
{% endif -%}
{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}
{%- if m.role == 'tool' -%}</tool_response>{% else -%}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|im_start|>assistant
{% endif -%}"""
"""A turn continues after a result without a header, and the model writes the text instead."""


def test_turn_not_read_back_after_a_result_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    checks = {
        source: {
            check.name: check for check in certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source))).parsing
        }
        for source in (NUMBERED_AFTER_RESULTS, NUMBERED_AFTER_RESULTS.replace("#{{ loop.index }}", ""))
    }
    numbered, bare = checks.values()
    assert (numbered["content"].holds, numbered["call"].holds) == (False, False)
    assert "#4" in numbered["call"].detail
    assert (bare["content"].holds, bare["call"].holds) == (True, True)


RESULTS_NEED_A_SYSTEM = """{%- for m in messages -%}
{%- if m.role == 'tool' and messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif -%}
<|im_start|>{{ m.role }}{{ '!' if loop.first and '/quick' in messages[-1].content }}
{{ m.content }}
{%- for t in m.tool_calls or [] -%}<tool_call>{{ t.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_change_by_a_new_message_is_detected_without_single_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tool")
    for source, append_only in (
        (RESULTS_NEED_A_SYSTEM, "no"),
        (RESULTS_NEED_A_SYSTEM.replace("messages[-1].content", "messages[0].content"), "clean text"),
    ):
        tool = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source))).continuation("tool")
        assert tool is not None
        assert (tool.strategy, tool.append_only) == ("contextual", append_only)


NO_THOUGHT_AFTER = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.reasoning_content and not (messages[-1].role == 'user' and messages[-1].content == '/no_think') -%}
<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_reasoning_that_only_a_word_of_a_new_message_drops_is_not_append_only(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user/no-tools")
    user = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(NO_THOUGHT_AFTER))).continuation("user/no-tools")
    assert user is not None
    assert (user.append_only, user.counterexample[-1]["content"]) == ("no", "/no_think")


JSON_ANSWERS = """{%- for m in messages -%}
{%- if m.role == 'assistant' and m.content.startswith('{') -%}# {% endif -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_turn_written_otherwise_because_of_its_own_words_is_not_append_only(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user/no-tools")
    user = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(JSON_ANSWERS))).continuation("user/no-tools")
    assert user is not None
    assert (user.strategy, user.append_only, user.counterexample[-2]["content"]) == ("local", "no", "{")


BRIEF_BY_SYSTEM = """{%- set ns = namespace(brief=false) -%}{%- for m in messages -%}
{%- if m.role == 'system' and '/brief' in m.content -%}{%- set ns.brief = true -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{%- if m.role == 'user' and ns.brief %} Be brief.{% endif -%}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_each_new_message_may_change_earlier_text(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "system+user/no-tools")
    continuations = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(BRIEF_BY_SYSTEM))).continuations
    (system,) = [continuation for continuation in continuations if continuation.name == "system+user/no-tools"]
    assert (system.append_only, system.counterexample[-2]["content"]) == ("no", "/brief")


COUNTED_CALLS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{% for t in m.tool_calls or [] %}{{ ('one', 'two', 'three')[loop.index0] -}}
[[call {{ t.function.name }} {{ t.function.arguments | tojson }}]]{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_calls_read_back_only_in_pairs_are_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(COUNTED_CALLS))
    checks = {check.name: check for check in certify(renderer).parsing}
    assert (checks["call"].holds, checks["parallel calls"].holds) == (True, False)
    assert "'three'" in checks["parallel calls"].detail


def test_missing_tools_and_system_message_have_separate_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user", "user/no-tools", "user/no-tools/no-system")
    name = "mistral_nemo/templates/v3.jinja"
    renderer = load_renderer(name)
    certificate = certify(renderer)
    answer, question = grammar.TURNS["content"], grammar.QUESTION

    def chosen(history: list[Any], **kwargs: Any) -> str:
        return choose(renderer, certificate, answer, [grammar.NEXT], setup_for(renderer, **kwargs), history)

    assert chosen([question]) == "fork"
    assert chosen([grammar.SYSTEM, question], tools=()) == "fork"
    assert chosen([question], tools=()) == "local"


def test_probed_continuation_forks_if_tools_or_history_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user", "user/no-tools", "user/no-tools/no-system")
    name = "mistral_nemo/templates/v3.jinja"
    renderer = load_renderer(name)
    certificate = certify(renderer)
    answer, question = grammar.TURNS["content"], grammar.QUESTION
    new = [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]

    def tried(history: list[Any], **kwargs: Any) -> str:
        return choose(renderer, certificate, answer, new, setup_for(renderer, **kwargs), history)

    assert tried([question]) == "fork"
    assert tried([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, question], tools=()) == "fork"
    assert tried([question], tools=()) == "local"


def test_probed_continuation_forks_if_a_message_moves_to_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    name = "deepseek_v31/templates/DeepSeek-V3.1.jinja"
    renderer = load_renderer(name)
    system = {"role": "system", "content": "Now in French."}
    new = [grammar.NEXT, system, grammar.NEXT]
    history = [grammar.QUESTION]
    assert choose(renderer, certify(renderer), grammar.TURNS["content"], new, setup_for(renderer), history) == "fork"


SYSTEM_FIRST = """{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor -%}
{%- for m in messages if m.role != 'system' %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ (m.content or '') }}
{%- for t in m.tool_calls or [] -%}{{ '<tool_call>' ~ t.function.name }}
{%- for k, v in t.function.arguments.items() %}{{ ' ' ~ k ~ '=' ~ v }}{% endfor %}{{ '</tool_call>' }}{% endfor -%}
{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


def test_a_recorded_reply_is_probed_with_the_objects_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(SYSTEM_FIRST))
    reply = {"role": "assistant", "content": "", "tool_calls": [call(0, '{"a": 1}')]}
    new = [result(0), {"role": "system", "content": "Now in French."}]
    assert choose(renderer, certify(renderer), reply, new, setup_for(renderer), [grammar.QUESTION]) == "fork"


def test_probed_message_that_never_reaches_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    renderer = load_renderer(QWEN3)
    certificate = certify(renderer)
    new = [grammar.NEXT, {"role": "developer", "content": "Now in French."}]
    with pytest.raises(TemplateRefused, match="developer"):
        choose(renderer, certificate, grammar.TURNS["content"], new, setup_for(renderer), [grammar.QUESTION])


def test_refused_continuation_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tools")
    name = "llama3/templates/Llama-3.1-3.3-Instruct.jinja"
    renderer = load_renderer(name)
    results = [grammar.result(1, "a"), grammar.result(2, "b")]
    with pytest.raises(TemplateRefused, match=r"single tool-calls|one call at most"):
        choose(renderer, certify(renderer), grammar.TURNS["parallel calls"], results, setup_for(renderer), [])


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


def test_unknown_template_is_certified() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(UNSEEN))
    certificate = certify(renderer)
    assert certificate.call_style == "named"
    assert certificate.reasoning == ("[[", "]]")
    assert {check.name for check in certificate.parsing if check.holds is not True} == set()
    # Its prompt ends with letters, `bot>>`, and a reply may begin with another `>`.
    reasons = {continuation.reason for continuation in certificate.continuations}
    assert reasons == {"the text stays, but it encodes to different ids where the turn meets its prompt"}


NOTHING_BETWEEN = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content }}<|im_end|>
{%- else -%}<|im_start|>{{ m.content }}{{ CLOSE }}{%- endif -%}{%- endfor -%}"""


@pytest.mark.parametrize(("close", "append_only"), [("''", "no"), ("'<|box_end|>'", "yes")])
def test_reply_may_merge_with_any_unclosed_question(
    close: str, append_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "user/no-tools")
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NOTHING_BETWEEN.replace("CLOSE", close)))
    user = certify(renderer).continuation("user/no-tools")
    assert user is not None
    assert user.append_only == append_only
    if append_only == "no":
        # The oracle: the ids of the counterexample's question are no prefix of the whole.
        question, reply = user.counterexample
        ids = [
            renderer.tokenizer.encode_plain(text)
            for text in (question["content"], question["content"] + reply["content"])
        ]
        assert ids[1][: len(ids[0])] != ids[0]


NUMBERED_END = """{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}
<|im_start|>{{ '<|box_end|>' if ns.n < AT else '>>' }}{{ m.content }}<|im_end|>
{%- else -%}{%- set ns.n = ns.n + 1 -%}<|im_start|>{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ '<|box_end|>' if ns.n < AT else '>>' }}{%- endif -%}"""


@pytest.mark.parametrize(("at", "append_only"), [(1, "no"), (2, "no"), (99, "yes")])
def test_a_reply_may_merge_with_a_later_prompt_only(at: int, append_only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user/no-tools")
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NUMBERED_END.replace("AT", str(at))))
    user = certify(renderer).continuation("user/no-tools")
    assert user is not None
    assert user.append_only == append_only
    assert len(user.counterexample) == (0 if append_only == "yes" else 2 * at)


FRAMED_ONCE = """{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}
<|im_start|>{{ '>' * ns.n }}{{ '<|box_start|>' if ns.n == 1 }}{{ m.content }}<|im_end|>
{%- else -%}{%- set ns.n = ns.n + 1 -%}<|im_start|>{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ '>' * ns.n }}{%- endif -%}"""


def test_a_reply_may_merge_where_only_earlier_replies_have_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "user/no-tools")
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(FRAMED_ONCE))
    user = certify(renderer).continuation("user/no-tools")
    assert user is not None
    assert user.append_only == "no"
    assert [message["role"] for message in user.counterexample] == ["user", "assistant"] * 2


def test_a_stop_token_within_a_turn_fails_the_parts_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
        "<|im_end|><|im_start|>assistant\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source)))
    [check] = [check for check in certificate.parsing if check.name == "reasoning"]
    assert check.holds is False
    assert "stop token <|im_end|> before the content" in check.detail


def test_parts_that_a_template_never_writes_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop token also stands within turns, but the template leaves reasoning out everywhere."""
    only(monkeypatch)
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<|im_end|><tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source)))
    [check] = [check for check in certificate.parsing if check.name == "reasoning"]
    assert (check.holds, check.detail) == (None, "the template leaves out the reasoning")
