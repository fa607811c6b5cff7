"""Render conversations with transformers and encode the text with plain `tokenizers`: the reference for templates.

This module does not import tokentape.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import jinja2
import tokenizers

DATE = "2026-11-21"
"""The date for templates."""


class Unrenderable(Exception):
    """The template refuses every form of the conversation that was tried."""


@dataclass
class Oracle:
    """A template with the tokenizer for its text."""

    template: str
    tokenizer: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _encoded: dict[str, list[int]] = field(default_factory=dict)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, generate: bool) -> str:
        """Render unchanged messages to text. Raises `Unrenderable`."""
        from transformers.utils import chat_template_utils

        try:
            with mock.patch.object(chat_template_utils, "datetime", _Today):
                rendered, _ = chat_template_utils.render_jinja_template(
                    conversations=[list(messages)],
                    tools=list(tools) or None,
                    chat_template=self.template,
                    add_generation_prompt=generate,
                    **self.special_tokens,
                    **self.kwargs,
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Unrenderable(f"{type(error).__name__}: {error}") from error
        return rendered[0]

    def ids(self, text: str) -> list[int]:
        """Return the ids of a template's text."""
        if text not in self._encoded:
            # A prompt is requested as the end of a turn and the beginning of the next.
            while len(self._encoded) > 3:
                del self._encoded[next(iter(self._encoded))]
            self._encoded[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return list(self._encoded[text])

    def shaped(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation in the form that the template accepts.

        Templates differ in whether arguments are an object or JSON text, and whether content beside calls is absent,
        None or empty.
        """
        as_text, empty = self._shape
        return [_shaped(message, as_text=as_text, empty=empty) for message in messages]

    @cached_property
    def _shape(self) -> tuple[bool, str]:
        """Return the first form in which a call is written, or the first accepted form."""
        call = {"id": "call00000", "type": "function", "function": {"name": "zqxname", "arguments": {"zqxkey": "zqx"}}}
        asked: list[dict[str, Any]] = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]
        asked.append({"role": "tool", "tool_call_id": "call00000", "name": "zqxname", "content": "gone"})
        taken: tuple[bool, str] | None = None
        for shape in [(as_text, empty) for as_text in (False, True) for empty in ("absent", "none", "text")]:
            shaped = [_shaped(message, as_text=shape[0], empty=shape[1]) for message in asked]
            try:
                text = self.text(shaped[:2], (), generate=False) + self.text(shaped, (), generate=True)
            except Unrenderable:
                continue
            if "zqxname" in text and "zqxkey" in text:
                return shape
            taken = taken or shape
        return taken or (False, "text")


class _Today(datetime.datetime):
    """Return the clock for templates."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Today:
        return cls.fromisoformat(DATE)


def _shaped(message: Mapping[str, Any], *, as_text: bool, empty: str) -> dict[str, Any]:
    shaped = {key: value for key, value in message.items() if value is not None}
    if not shaped.get("tool_calls"):
        return {"content": "", **shaped}
    if not shaped.get("content"):
        shaped.pop("content", None)
        shaped |= {"none": {"content": None}, "text": {"content": ""}}.get(empty, {})
    shaped["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], as_text)}}
        for call in shaped["tool_calls"]
    ]
    return shaped


def _arguments(arguments: Any, as_text: bool) -> Any:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps(value, ensure_ascii=False) if as_text else value
