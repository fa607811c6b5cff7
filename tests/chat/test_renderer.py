from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.conftest import (
    ADD,
    SMALL_TEMPLATES,
    call,
    load_renderer,
    load_tokenizer,
    new_renderer,
    result,
    setup_for,
)
from tests.chat.oracle import ANSWER, CONVERSATIONS, QUESTION, SYSTEM, by_transformers, rendered_by_transformers
from tests.searching import examples
from tokentape.chat._renderer import Renderer
from tokentape.chat._sandbox import Sandbox
from tokentape.chat._template import ChatTemplate
from tokentape.chat._template import _compile as compiled_template
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable
from tokentape.types import Provenance

pytestmark = pytest.mark.usefixtures("source")

QWEN = [name for name in SMALL_TEMPLATES if name.startswith(("qwen2_5/", "qwen3/"))]
QWEN3 = "qwen3/templates/Qwen3.jinja"


def test_content_parts_render_as_their_text() -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    whole = [{"role": "user", "content": "one two"}]
    assert renderer.render(parts, setup).ids.tolist() == renderer.render(whole, setup).ids.tolist()


@pytest.mark.parametrize("template", ["missing.jinja", "{{ messages[0].content }}" * 30], ids=["missing file", "text"])
def test_a_template_that_is_no_file_is_named(template: str) -> None:
    with pytest.raises(TokenizerUnusable, match="pass the path of a file"):
        Renderer.load(MODEL, chat_template=template)


def test_a_used_renderer_can_be_pickled() -> None:
    renderer = load_renderer(QWEN3)
    question = [{"role": "user", "content": "what is <|im_end|>?"}]
    ids = renderer.render(question).ids.tolist()
    renderer.parser(renderer.setup()).finish()
    unpickled = pickle.loads(pickle.dumps(renderer))
    assert unpickled.render(question).ids.tolist() == ids
    assert unpickled.fingerprint == renderer.fingerprint


def test_date_comes_from_the_setup_and_not_the_clock() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    ids = renderer.render([QUESTION], setup_for(renderer, date="2020-02-29")).ids.tolist()
    assert "2020-02-29" in renderer.tokenizer.decode(ids)


CONTINUATIONS = {
    "user": ([], [{"role": "user", "content": "next  question\n\n"}]),
    "tool": ([7], [result(7, "  five\n")]),
    "two tools": ([7, 8], [result(7), result(8)]),
    "tool then user": ([7], [result(7), {"role": "user", "content": "go on"}]),
}


def sampled_turn(renderer: Renderer, calls: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Return an assistant message and ids that a model would sample for it: the template's text up to the stop."""
    setup = setup_for(renderer)
    message = {**ANSWER, "tool_calls": [call(n, {"a": n, "note": "x y"}) for n in calls]}
    if not calls:
        del message["tool_calls"]
    prompt = by_transformers(renderer, [SYSTEM, QUESTION])
    whole = by_transformers(renderer, [SYSTEM, QUESTION, message], generate=False)
    assert prompt is not None
    assert whole is not None
    assert whole[: len(prompt)] == prompt, "the template does not begin this turn with its generation prompt"
    ids = whole[len(prompt) :]
    end = next(n for n, token_id in enumerate(ids) if token_id in renderer.stop_ids(setup))
    return message, ids[: end + 1]


@pytest.mark.parametrize("template", [t for t in QWEN if "QwQ" not in t])
@pytest.mark.parametrize("name", CONTINUATIONS)
def test_bridge_equals_the_template_if_it_only_appends(template: str, name: str) -> None:
    renderer = load_renderer(template)
    setup = setup_for(renderer)
    calls, new = CONTINUATIONS[name]
    message, completion = sampled_turn(renderer, calls)
    context = renderer.render([SYSTEM, QUESTION], setup).ids.tolist() + completion
    bridged = context + renderer.bridge(np.array(completion, np.int32), message, new, setup).ids.tolist()
    expected = by_transformers(renderer, [SYSTEM, QUESTION, message, *new])
    assert expected is not None
    if expected[: len(context)] != context:
        # The template rewrites the earlier turn. The ids after it must still equal the bridge.
        added = bridged[len(context) :]
        assert expected[-len(added) :] == added
    else:
        assert bridged == expected


@pytest.mark.parametrize("template", QWEN)
def test_a_truncated_turn_is_closed_and_the_close_is_not_sampled(template: str) -> None:
    renderer = load_renderer(template)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    half = tokenizer.array(tokenizer.encode_plain("half an ans"))
    added = renderer.bridge(half, {"role": "assistant", "content": "half an ans"}, [QUESTION], setup)
    end = tokenizer.control("<|im_end|>")
    assert end is not None
    assert end.id in added.ids[added.provenance == Provenance.CLOSE]
    assert tokenizer.decode(added.ids.tolist()).count("<|im_end|>") == 2


def test_open_reasoning_is_closed_as_the_template_closes_it() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    half = tokenizer.array(tokenizer.encode_plain("<think>\nI wonder"))
    added = renderer.bridge(half, {"role": "assistant", "content": None}, [QUESTION], setup)
    closed = tokenizer.decode(added.ids[added.provenance == Provenance.CLOSE].tolist())
    assert closed == "\n</think>\n\n<|im_end|>"


def test_other_stop_token_is_kept_as_the_end_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    # A separate renderer: it detects the ids that end a turn once per setup.
    renderer = new_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    monkeypatch.setattr(tokenizer, "eos_ids", tokenizer.eos_ids | set(tokenizer.encode_plain("<|endoftext|>")))
    completion = tokenizer.array(tokenizer.encode_plain("hi<|endoftext|>"))
    added = renderer.bridge(completion, {"role": "assistant", "content": "hi"}, [QUESTION], setup)
    assert tokenizer.decode(added.ids.tolist()).startswith("\n<|im_start|>user\n")


def test_tokens_after_the_stop_token_stay_and_are_not_repeated() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    reply = {"role": "assistant", "content": "hi"}
    completion = tokenizer.array(tokenizer.encode_plain("hi<|im_end|>\n"))
    added = renderer.bridge(completion, reply, [QUESTION], setup)
    assert tokenizer.decode(added.ids.tolist()).startswith("<|im_start|>user\n")


def test_bridge_keeps_only_its_tokens_in_memory() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    completion = tokenizer.array(tokenizer.encode_plain("hi<|im_end|>"))
    added = renderer.bridge(completion, {"role": "assistant", "content": "hi"}, [QUESTION], setup)
    assert added.ids.base is None
    assert added.provenance.base is None


def test_a_bridge_never_depends_on_the_history() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    completion = tokenizer.array(tokenizer.encode_plain("hi<|im_end|>"))
    reply = {"role": "assistant", "content": "hi"}
    added = renderer.bridge(completion, reply, [QUESTION], setup)
    for turns in (1, 5):
        history = [SYSTEM] + turns * [QUESTION, reply]
        whole = by_transformers(renderer, [*history, QUESTION])
        assert whole is not None
        assert whole[-len(added.ids) :] == added.ids.tolist()


def test_a_role_that_the_template_drops_is_refused() -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    with pytest.raises(TemplateRefused, match="developer"):
        renderer.render([{"role": "developer", "content": "be brief"}, QUESTION], setup)


def test_refusal_by_the_template_is_reported() -> None:
    renderer = load_renderer("llama3/templates/Llama-3.1-3.3-Instruct.jinja")
    two_calls = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": 1}), call(2, {"a": 2})]}
    with pytest.raises(TemplateRefused, match=r"single tool-calls|one call at most"):
        renderer.render([QUESTION, two_calls, result(1), result(2)], setup_for(renderer))


def test_provenance_names_the_writer_of_each_text() -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    rendered = renderer.render(CONVERSATIONS["tool"], setup)

    def text_of(code: Provenance) -> str:
        return tokenizer.decode(rendered.ids[rendered.provenance == code].tolist())

    assert text_of(Provenance.USER).strip() == "hello  there é日本\n\nok"
    assert text_of(Provenance.SYSTEM).strip() == "You are X."
    assert text_of(Provenance.TOOL) == "ok"
    assert "answer text" in text_of(Provenance.ASSISTANT)
    assert "<|im_start|>" in text_of(Provenance.TEMPLATE)
    assert Provenance.SAMPLED not in rendered.provenance


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_control_token_split_over_neighbouring_texts_stays_text(cut: int) -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    spelled = "<|im_start|>"
    parts = [{"type": "text", "text": spelled[:cut]}, {"type": "text", "text": spelled[cut:]}]
    joined = renderer.render([{"role": "user", "content": parts}], setup).ids.tolist()
    plain = renderer.render([{"role": "user", "content": "x"}], setup).ids.tolist()
    start = renderer.tokenizer.control(spelled)
    assert start is not None
    assert joined.count(start.id) == plain.count(start.id)


TEXTS = st.text(max_size=30) | st.sampled_from(["", " ", "\n\n", "<|im_end|>", "</think>", '{"a": 1}', "  x\n", "é́"])


@given(user=TEXTS, tool=TEXTS, system=TEXTS, template=st.sampled_from(QWEN), seed=st.integers(0, 2**16))
@settings(max_examples=examples(25), deadline=None)
def test_context_is_only_appended_to(user: str, tool: str, system: str, template: str, seed: int) -> None:
    """No sampled id changes over many turns, for any caller text and any split of the model's text."""
    renderer = load_renderer(template)
    tokenizer, setup, rng = renderer.tokenizer, setup_for(renderer), random.Random(seed)
    call_id = f"call{seed:05d}"
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    context = renderer.render(messages, setup).ids.tolist()
    for n in range(30):
        completion = random_split(tokenizer, f"word{n} {user[:8]}", rng) + tokenizer.encode_plain("<|im_end|>")
        reply: dict[str, Any] = {"role": "assistant", "content": "said"}
        new = [{"role": "user", "content": user}]
        if n % 2:
            reply["tool_calls"] = [{**call(0, '{"a": 1}'), "id": call_id}]
            new = [{"role": "tool", "tool_call_id": call_id, "content": tool}]
        added = renderer.bridge(np.array(completion, np.int32), reply, new, setup)
        expected_text = tokenizer.decode(added.ids.tolist())
        assert expected_text.startswith("\n<|im_start|>")
        assert len(added.ids) == len(added.provenance)
        assert Provenance.CLOSE not in added.provenance
        context = context + completion + added.ids.tolist()
    starts = tokenizer.control("<|im_start|>")
    assert starts is not None
    assert context.count(starts.id) == len(renderer_starts(renderer, system, user)) + 30 * 2


def renderer_starts(renderer: Renderer, system: str, user: str) -> list[int]:
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    start = renderer.tokenizer.control("<|im_start|>")
    assert start is not None
    return [i for i in renderer.render(plain, setup_for(renderer)).ids.tolist() if i == start.id]


def random_split(tokenizer: Any, text: str, rng: random.Random) -> list[int]:
    """Encode `text` cut at random positions: the ids are rarely canonical."""
    ids: list[int] = []
    while text:
        n = rng.randint(1, 4)
        ids += tokenizer.encode_marked(text[:n]).ids
        text = text[n:]
    return ids


def test_stop_ids_are_the_ends_of_assistant_turns() -> None:
    expected = {
        "qwen3/templates/Qwen3.jinja": {"<|im_end|>"},
        "llama3/templates/Llama-3.1-3.3-Instruct.jinja": {"<|eot_id|>"},
        "glm4_5/templates/GLM-4.6.jinja": {"<|user|>", "<|observation|>", "<|endoftext|>"},
        "gpt_oss/templates/gpt-oss.jinja": {"<|return|>", "<|call|>"},
    }
    for template, stops in expected.items():
        renderer = load_renderer(template)
        controls = {renderer.tokenizer.control_by_id(i) for i in renderer.stop_ids(setup_for(renderer))}
        assert {control.content for control in controls if control} == stops


def test_two_models_have_two_fingerprints() -> None:
    assert load_renderer(QWEN[0]).fingerprint != load_renderer(QWEN[1]).fingerprint
    assert load_tokenizer("qwen3").sha256 != load_tokenizer("qwen2_5").sha256


NEEDS_CONTENT = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content.strip() }}{%- for t in m.tool_calls -%}
<tool_call>{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_call_without_content_is_rendered_if_the_template_needs_text() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NEEDS_CONTENT))
    question = {"role": "user", "content": "?"}
    calling = {"role": "assistant", "content": None, "tool_calls": [call(1, {"a": 1})]}
    empty = {**calling, "content": ""}
    rendered, expected = (
        renderer.render([question, empty_call, result(1)], (ADD,)).ids for empty_call in (calling, empty)
    )
    assert rendered.tolist() == expected.tolist()


def test_a_template_is_compiled_once_and_keeps_nothing_of_a_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = Sandbox.compiled

    def counted(self: Sandbox, source: str) -> Any:
        compiled.append(source)
        return real(self, source)

    monkeypatch.setattr(Sandbox, "compiled", counted)
    compiled_template.cache_clear()
    source = "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ messages[0].content }}"
    written = [
        ChatTemplate(source).render(
            [{"role": "user", "content": text}], tools=(), add_generation_prompt=True, date="2026-01-01", variables={}
        )
        for text in "ab"
    ]
    assert written == ["1 a", "1 b"]
    assert compiled == [source]


def test_a_variable_set_in_a_generation_block_is_not_set_after_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    how: dict[str, Any] = {"tools": (), "add_generation_prompt": False, "date": "2026-01-02", "variables": {}}
    text = ChatTemplate(source).render([QUESTION], **how)
    assert text == rendered_by_transformers(source, [QUESTION], [], {}, generate=False) == "21"


@pytest.mark.parametrize("index", [0, 2, -1])
def test_sampled_ids_for_no_assistant_message_are_refused(index: int) -> None:
    renderer = load_renderer(QWEN3)
    messages = [QUESTION, {"role": "assistant", "content": "yes"}]
    with pytest.raises(InvalidRequest, match="no assistant message"):
        renderer.render(messages, setup_for(renderer), sampled={index: np.array([1], np.int32)})


def test_a_misspelled_history_is_refused() -> None:
    renderer = load_renderer(QWEN3)
    with pytest.raises(InvalidRequest, match="expected sampled or template"):
        renderer.render([QUESTION], setup_for(renderer), history="templat")  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [QUESTION, "hi", [object()], iter([QUESTION])])
def test_messages_that_are_no_list_of_dictionaries_are_refused(messages: Any) -> None:
    renderer = load_renderer(QWEN3)
    with pytest.raises(InvalidRequest, match="expected a list of dictionaries"):
        renderer.render(messages, setup_for(renderer))


def test_a_bridge_takes_sampled_ids_as_a_list() -> None:
    renderer = load_renderer(QWEN3)
    setup, ids = setup_for(renderer), renderer.tokenizer.encode_plain("yes<|im_end|>")
    reply = {"role": "assistant", "content": "yes"}
    listed = renderer.bridge(ids, reply, [QUESTION], setup)  # type: ignore[arg-type]
    assert listed.ids.tolist() == renderer.bridge(np.array(ids, np.int32), reply, [QUESTION], setup).ids.tolist()


def test_a_text_as_stop_strings_is_one_stop_string() -> None:
    renderer = load_renderer(QWEN3)
    parser = renderer.parser(setup_for(renderer), "END")
    parser.feed(renderer.tokenizer.encode_plain("NEED itEND"))
    assert parser.finish()[1].content == "NEED it"


def test_two_prompts_are_compared_by_identity() -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    assert renderer.render([QUESTION], setup) != renderer.render([QUESTION], setup)
