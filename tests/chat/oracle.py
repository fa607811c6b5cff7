"""Conversations, and their renderings by transformers."""

from __future__ import annotations

from typing import Any

import jinja2

from tests.chat.conftest import ADD, call, result
from tokentape.chat._renderer import Renderer

SYSTEM = {"role": "system", "content": "You are X.\n"}
QUESTION = {"role": "user", "content": " hello  there é日本\n\nok"}
ANSWER = {"role": "assistant", "content": "answer text", "reasoning_content": "some thinking"}
CONVERSATIONS = {
    "user": [QUESTION],
    "system, user": [SYSTEM, QUESTION],
    "several turns": [SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "\n\nnext  q\n"}],
    "tool": [SYSTEM, QUESTION, {**ANSWER, "tool_calls": [call(7, {"a": 7, "note": "x y"})]}, result(7)],
    "string arguments": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call(7, '{"a":1}')]}, result(7)],
    "parallel calls": [
        SYSTEM,
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call(7, {"a": 7}), call(8, {"a": 8, "exact": False})]},
        result(7),
        result(8, "\nresult 8 "),
        {"role": "user", "content": "go"},
    ],
}


def rendered_by_transformers(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    generate: bool = True,
) -> str:
    """Render text with transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages], tools=tools or None, chat_template=source, add_generation_prompt=generate, **variables
    )
    return rendered[0]  # type: ignore[no-any-return]


def by_transformers(renderer: Renderer, messages: list[dict[str, Any]], *, generate: bool = True) -> list[int] | None:
    """Render ids with transformers; None if the template refuses."""
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    special = renderer.tokenizer.special_tokens
    try:
        text = rendered_by_transformers(renderer.template.source, kept, [ADD], special, generate=generate)
    except (jinja2.TemplateError, TypeError):
        return None
    return renderer.tokenizer.encode_plain(text)
