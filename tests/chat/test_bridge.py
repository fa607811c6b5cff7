from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_renderer, load_tokenizer, needs_tokenizers, setup_for
from tokentape.chat.bridge import overlap
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import ChatTemplate
from tokentape.types import Provenance

NEXT = {"role": "user", "content": "next"}
REPLY = {"role": "assistant", "content": "hi"}

few_ids = st.lists(st.integers(0, 2), max_size=8)


@given(completion=few_ids, tail=few_ids)
def test_overlap_is_the_longest_suffix_that_is_a_prefix(completion: list[int], tail: list[int]) -> None:
    sizes = [n for n in range(min(len(completion), len(tail)) + 1) if completion[len(completion) - n :] == tail[:n]]
    assert overlap(completion, tail) == max(sizes)


def bridged(renderer: Renderer, completion: str) -> tuple[str, str]:
    """The text of a bridge, and the part of it that closes the turn."""
    tokenizer = renderer.tokenizer
    ids = tokenizer.array(tokenizer.encode_plain(completion))
    added = renderer.bridge(ids, REPLY, [NEXT], setup_for(renderer))
    closing = added.ids[added.provenance == Provenance.CLOSE]
    return tokenizer.decode(added.ids.tolist()), tokenizer.decode(closing.tolist())


@needs_tokenizers
def test_a_token_that_ends_conversations_stands_for_the_one_that_ends_turns() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    text, closing = bridged(renderer, "<|channel|>final<|message|>hi<|return|>")
    assert text == "<|start|>user<|message|>next<|end|><|start|>assistant"
    assert closing == ""


@needs_tokenizers
def test_a_truncated_turn_is_closed_with_the_token_that_ends_turns() -> None:
    renderer = load_renderer("gpt_oss/templates/gpt-oss.jinja")
    text, closing = bridged(renderer, "<|channel|>final<|message|>hi")
    assert text == "<|end|><|start|>user<|message|>next<|end|><|start|>assistant"
    assert closing == "<|end|>"


NO_END_OF_TURN = """{%- for m in messages -%}<|im_start|>{{ m.role }}: {{ m.content }}
{%- if loop.last and m.role == 'assistant' -%}<|endoftext|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant: {%- endif -%}"""


@needs_tokenizers
def test_a_header_is_not_taken_for_the_end_of_a_turn() -> None:
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(NO_END_OF_TURN))
    text, _ = bridged(renderer, "hi<|endoftext|>")
    assert text.startswith("<|im_start|>user: next<|im_start|>assistant:")
