from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.chat.conftest import ADD
from tokentape.chat import Conversation, Renderer, _conversation
from tokentape.chat._template import ChatTemplate
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.types import Provenance

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}NUMBER\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistantNUMBER\n{% endif %}"
NUMBERED = TURNS.replace("NUMBER", " {{ loop.index }}") + PROMPT.replace("NUMBER", " {{ messages | length + 1 }}")
MOVED = TURNS.replace("NUMBER", "{{ '\\n' ~ messages[0].content if loop.last else '' }}") + PROMPT.replace("NUMBER", "")


def with_template(renderer: Renderer, template: str) -> Renderer:
    return Renderer(renderer.tokenizer, ChatTemplate(template))


def sampled(renderer: Renderer, text: str, *, stopped: bool = True) -> list[int]:
    """Return ids of a text with one token per letter, which the tokenizer would not choose, and the stop token."""
    ids = [token_id for letter in text for token_id in renderer.tokenizer.encode_plain(letter)]
    return ids + renderer.tokenizer.encode_plain("<|im_end|>") * stopped


def rendered_with(renderer: Renderer, conversation: Conversation, ids: Sequence[int], text: str) -> list[int]:
    """Return the rendering of all messages, with the sampled ids in place of those of their text."""
    whole = renderer.render(conversation.messages, conversation.setup).ids.tolist()
    usual = renderer.tokenizer.encode_plain(text)
    (start,) = [n for n in range(len(whole)) if whole[n : n + len(usual)] == usual]
    return [*whole[:start], *ids[:-1], *whole[start + len(usual) :]]


@pytest.mark.parametrize("template", [None, NUMBERED], ids=["local", "contextual"])
def test_ids_are_those_of_the_rendering_with_the_sampled_ids(renderer: Renderer, template: str | None) -> None:
    if template is not None:
        renderer = with_template(renderer, template)
    conversation = Conversation(renderer, [QUESTION], check_bridges=True)
    ids = sampled(renderer, "Exactly five")
    assert conversation.add_completion(ids).content == "Exactly five"
    before = conversation.token_ids.tolist()
    added = conversation.add_messages([{"role": "user", "content": "And 3 + 4?"}])
    assert conversation.token_ids.tolist() == [*before, *added.tolist()]
    assert conversation.token_ids.tolist() == rendered_with(renderer, conversation, ids, "Exactly five")


def test_the_loss_mask_has_what_was_sampled(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    first, second = sampled(renderer, "five"), sampled(renderer, "seven")
    conversation.add_completion(first)
    conversation.add_messages([{"role": "user", "content": "And 3 + 4?"}])
    conversation.add_completion(second)
    assert conversation.token_ids[conversation.loss_mask].tolist() == first + second


@pytest.mark.parametrize("check_bridges", [False, True])
def test_an_empty_completion_can_be_continued_where_nothing_ends_turns(renderer: Renderer, check_bridges: bool) -> None:
    unended = TURNS.replace("NUMBER", "").replace("<|im_end|>\n", "")
    renderer = with_template(renderer, unended + PROMPT.replace("NUMBER", ""))
    conversation = Conversation(renderer, [QUESTION], check_bridges=check_bridges)
    conversation.add_completion([])
    added = conversation.add_messages([QUESTION])
    assert renderer.tokenizer.decode(added) == "<|im_start|>user\nWhat is 2 + 3?<|im_start|>assistant\n"


def test_the_next_bridge_ends_a_truncated_completion(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    conversation.add_completion(sampled(renderer, "fi", stopped=False))
    added = conversation.add_messages([{"role": "user", "content": "Go on."}])
    (position,) = np.flatnonzero(conversation.provenance == Provenance.CLOSE)
    assert conversation.token_ids[position] == added[0]
    assert added[0] in conversation.stop_ids


def test_results_of_tools_name_the_calls_of_the_reply(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION], [ADD], check_bridges=True)
    call: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    whole = renderer.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], conversation.setup)
    ids = whole.ids[len(conversation.token_ids) :].tolist()
    completion = ids[: next(n for n, token_id in enumerate(ids, 1) if token_id in conversation.stop_ids)]
    (parsed,) = conversation.add_completion(completion).tool_calls
    assert (parsed.name, parsed.arguments) == ("add", '{"a": 2}')
    assert parsed.id == conversation.messages[-1]["tool_calls"][0]["id"]
    conversation.add_messages([{"role": "tool", "tool_call_id": parsed.id, "content": "5"}])
    assert conversation.loss_mask.sum() == len(completion)


def test_a_rewritten_history_is_refused_and_can_begin_a_new_conversation(renderer: Renderer) -> None:
    renderer = with_template(renderer, MOVED)
    conversation = Conversation(renderer, [QUESTION])
    ids = sampled(renderer, "Exactly five")
    conversation.add_completion(ids)
    before, more = conversation.token_ids.tolist(), [{"role": "user", "content": "And 3 + 4?"}]
    with pytest.raises(TemplateRefused, match="rewrites earlier messages"):
        conversation.add_messages(more)
    assert conversation.token_ids.tolist() == before
    new = Conversation(renderer, [*conversation.messages, *more], sampled=conversation.sampled)
    assert new.token_ids.tolist() == rendered_with(renderer, new, ids, "Exactly five")
    assert not new.loss_mask.any()


def test_a_checked_bridge_that_differs_is_refused(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = with_template(renderer, NUMBERED)
    monkeypatch.setattr(_conversation, "choose", lambda *_: "local")  # a wrong certificate
    earlier = [QUESTION, {"role": "assistant", "content": "5"}]
    conversation = Conversation(renderer, [*earlier, QUESTION], check_bridges=True)
    conversation.add_completion(sampled(renderer, "five"))
    with pytest.raises(TemplateRefused, match="differs from the bridge"):
        conversation.add_messages([{"role": "user", "content": "And 3 + 4?"}])


def test_completions_and_messages_take_turns(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    with pytest.raises(InvalidRequest, match="call add_completion first"):
        conversation.add_messages([QUESTION])
    conversation.add_completion(sampled(renderer, "five"))
    with pytest.raises(InvalidRequest, match="call add_messages before"):
        conversation.add_completion(sampled(renderer, "five"))


def test_a_reply_without_content_has_an_empty_text(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    conversation.add_completion(sampled(renderer, ""))
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}


def test_a_copy_continues_on_its_own(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    before = conversation.token_ids.tolist()
    other = conversation.copy()
    other.add_completion(sampled(renderer, "five"))
    other.add_messages([QUESTION])
    assert conversation.token_ids.tolist() == before
    assert (conversation.messages, conversation.sampled) == ([QUESTION], {})


def test_template_kwargs_beside_a_setup_are_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        Conversation(renderer, [QUESTION], renderer.setup(), template_kwargs={"enable_thinking": False})


LISTED = TURNS.replace("NUMBER", "").replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or () %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }} is {{ v }}{% endfor %}{% endfor %}",
)


def test_json_text_of_arguments_is_an_object_for_the_template(renderer: Renderer) -> None:
    renderer = with_template(renderer, LISTED)
    function = {"name": "add", "arguments": '{"a": 2}'}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    conversation = Conversation(renderer, [QUESTION, call])
    assert "a is 2<|im_end|>" in renderer.tokenizer.decode(conversation.token_ids)


def test_ids_stay_when_the_caller_uses_its_array_again(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    ids = sampled(renderer, "five")
    buffer = np.array(ids, np.int32)
    conversation.add_completion(buffer)
    buffer[:] = 0
    assert conversation.token_ids[conversation.loss_mask].tolist() == ids


def test_stop_strings_in_one_text_are_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="stop_strings is 'END': expected a list"):
        Conversation(renderer, [QUESTION]).add_completion(sampled(renderer, "five"), "END")


def test_no_new_messages_are_refused(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    conversation.add_completion(sampled(renderer, "five"))
    with pytest.raises(InvalidRequest, match="at least 1 new message"):
        conversation.add_messages([])


def test_a_message_without_a_role_is_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match=r"the keys \['content'\], expected a `role`"):
        Conversation(renderer, [{"content": "five"}])


@pytest.mark.parametrize("messages", [QUESTION, "And 3 + 4?", ["And 3 + 4?"]])
def test_messages_that_are_no_list_of_dictionaries_are_refused(renderer: Renderer, messages: Any) -> None:
    conversation = Conversation(renderer, [QUESTION])
    conversation.add_completion(sampled(renderer, "five"))
    with pytest.raises(InvalidRequest, match="expected a list of dictionaries"):
        conversation.add_messages(messages)


@pytest.mark.parametrize(
    "logprobs", [[-1.0], [-1.0, -1.0, float("nan"), -1.0, -1.0], [-1.0, -1.0, 0.5, -1.0, -1.0], ["a"] * 5]
)
def test_logprobs_that_can_not_be_the_engine_s_are_refused(renderer: Renderer, logprobs: list[Any]) -> None:
    conversation = Conversation(renderer, [QUESTION])
    with pytest.raises(
        InvalidRequest, match=r"logprobs: expected one finite number of at most 0 for each of 5 ids, found \["
    ):
        conversation.add_completion(sampled(renderer, "five"), logprobs=logprobs)
    assert len(conversation.messages) == 1
    conversation.add_completion(sampled(renderer, "five"), logprobs=[-1.0] * 5)


def test_a_copy_keeps_its_own_logprobs(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    other = conversation.copy()
    conversation.add_completion(sampled(renderer, "five"), logprobs=[-1.0] * 5)
    other.add_completion(sampled(renderer, "five"), logprobs=[-2.0] * 5)
    assert conversation.logprobs[conversation.loss_mask].tolist() == [-1.0] * 5
    assert other.logprobs[other.loss_mask].tolist() == [-2.0] * 5
