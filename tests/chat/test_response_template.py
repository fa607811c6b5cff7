from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from tests.chat.conftest import ADD, setup_for
from tokentape.chat._overrides import find_overrides
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply, ReplyDelta
from tokentape.chat._tokenizer import Tokenizer

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|im_end|>"},
        "thinking": {"open": "BECAUSE", "close": "THUS"},
        "tool_calls": {
            "open": "CALL",
            "close": "END",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
"""A format that no chat template here writes."""


@pytest.fixture
def shipping(renderer: Renderer, model_dir: Any) -> Renderer:
    """Load the tiny model as if its tokenizer shipped `TEMPLATE`."""
    return with_template(renderer, model_dir, TEMPLATE)


def with_template(renderer: Renderer, model_dir: Any, template: Any) -> Renderer:
    config = {**renderer.tokenizer.config, "response_template": template}
    tokenizer = Tokenizer((model_dir / "tokenizer.json").read_bytes(), config)
    bare = Renderer(tokenizer, renderer.template)
    return Renderer(tokenizer, renderer.template, find_overrides(bare))


def parsed(renderer: Renderer, text: str) -> Reply:
    parser = renderer.parser(setup_for(renderer, tools=(ADD,)))
    for token_id in renderer.tokenizer.encode_plain(text):
        assert parser.feed([token_id]) == ReplyDelta()
    rest, reply = parser.finish()
    assert (rest.content, rest.reasoning, rest.tool_calls) == (reply.content, reply.reasoning, reply.calls_for_client)
    return reply


def test_response_template_is_read_from_the_tokenizer_config(shipping: Renderer, renderer: Renderer) -> None:
    assert shipping.overrides is not None
    assert shipping.overrides.name.startswith("response_template ")
    assert find_overrides(renderer) is None


def test_content_reasoning_and_calls_are_read(shipping: Renderer) -> None:
    text = 'BECAUSE I can THUS so it is CALL{"name": "add", "arguments": {"a": 1}}ENDCALL{"name": "sub", '
    reply = parsed(shipping, text + '"arguments": {}}END<|im_end|>')
    assert (reply.content, reply.reasoning) == ("so it is", "I can")
    assert [(c.name, c.arguments, c.status) for c in reply.tool_calls] == [
        ("add", '{"a": 1}', "ok"),
        ("sub", "{}", "unknown_tool"),
    ]


def test_unreadable_replies_fall_back_to_the_chat_template(shipping: Renderer) -> None:
    text = 'so CALL{"name": "add", "argum'
    assert parsed(shipping, text).content == text


def test_invalid_response_template_is_not_used_and_logged(
    renderer: Renderer, model_dir: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert with_template(renderer, model_dir, {"version": 99}).overrides is None
    assert "use the tokenizer's response_template" in caplog.text


def test_response_template_without_transformers_is_not_used_and_logged(
    renderer: Renderer, model_dir: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    with caplog.at_level(logging.WARNING):
        assert with_template(renderer, model_dir, TEMPLATE).overrides is None
    assert "import of transformers.utils.chat_parsing halted" in caplog.text
