"""What is true of a conversation, by transformers' rendering and plain `tokenizers` encodings; no code of the product.

A bridge is judged by the template's own rendering of the whole conversation: what stands there after the reply is what
belongs after it. Append-only is taken literally: the ids of the prompt and of the turn begin the ids of the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
from transformers.utils import chat_template_utils

from tests.generator.conversations import Message, words_in

DATE = "2026-07-26"


class _Clock(datetime):
    """A frozen clock, for templates that print the date."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromisoformat(DATE)


def frozen_clock() -> AbstractContextManager[object]:
    """A frozen clock for one rendering only: other tests need the real date."""
    return mock.patch.object(chat_template_utils, "datetime", _Clock)


class Refused(Exception):
    """The template does not render this conversation."""


@dataclass(frozen=True)
class Ids:
    """Ids of a text, each with the characters it covers."""

    ids: list[int]
    spans: list[tuple[int, int]]

    def boundary(self, at: int) -> int | None:
        """The index of the first token after character `at`; None if a token lies across it.

        A token that takes the white space after it along is no obstacle: its id is complete.
        """
        index = next((n for n, (start, _) in enumerate(self.spans) if start >= at), len(self.ids))
        return index if index == 0 or self.spans[index - 1][1] <= at else None


class Reference:
    """One model folder, seen by transformers and `tokenizers`."""

    def __init__(self, folder: Path, kwargs: dict[str, bool], used: Sequence[str] = ()) -> None:
        """`used`: tokens that the template is known to write, also those that it puts together."""
        self._source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._variables = {k: v for k, v in config.items() if k in ("bos_token", "eos_token") and v} | kwargs
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.added = {token["content"]: token for token in spec["added_tokens"]}
        self.eos_ids = set(json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"])
        # Tokens that callers must not be able to produce: special ones, the template's own, and lookalikes.
        self.controls = {
            content
            for content, token in self.added.items()
            if token["special"]
            or content in used
            or content in self._source
            or re.fullmatch(r"<[|｜].*[|｜]>", content)
            if content.strip(" \n\t▁") and content != "<unk>"
        }
        self._any_control = re.compile("|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))) or "(?!)")
        self._rendered: dict[str, str | Refused] = {}
        self._parts_only: bool | None = None
        # Not on the method: that cache would keep the vocabularies of all cases, 27 MB each.
        self.encode = lru_cache(maxsize=512)(self._encode)

    def render(self, messages: Sequence[Message], tools: Sequence[Message], *, generate: bool) -> str:
        """The template's text. Raises `Refused` with what transformers raised."""
        if self._parts_only is None:
            self._parts_only = self._takes_parts_only()
        key = json.dumps([list(messages), list(tools), generate])
        if key not in self._rendered:
            self._rendered[key] = self._render(messages, tools, generate=generate)
        found = self._rendered[key]
        if isinstance(found, Refused):
            raise found
        return found

    def template_message(self, message: Message) -> Message:
        """The message as the template gets it: as parts if the template shows only parts and no plain text."""
        prepared, content = joined(message), message.get("content")
        if self._parts_only and content is not None:
            prepared["content"] = [{"type": "text", "text": prepared["content"]}]
        return prepared

    def _takes_parts_only(self) -> bool:
        shown = []
        for self._parts_only in (False, True):
            found = self._render([{"role": "user", "content": "zqshown"}], (), generate=True)
            shown.append(isinstance(found, str) and "zqshown" in found)
        return shown == [False, True]

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], *, generate: bool) -> str | Refused:
        try:
            with frozen_clock():
                texts, _ = chat_template_utils.render_jinja_template(
                    conversations=[[self.template_message(message) for message in messages]],
                    tools=list(tools) or None,
                    chat_template=self._source,
                    add_generation_prompt=generate,
                    **self._variables,
                )
        except Exception as error:  # a template may raise anything
            return Refused(f"{type(error).__name__}: {error}")
        return str(texts[0])

    def _encode(self, text: str) -> Ids:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Ids(encoding.ids, encoding.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids: added tokens by their spelling, the ids between them as `tokenizers` decodes them."""
        spelled = {token["id"]: content for content, token in self.added.items() if content.strip(" \n\t▁")}
        texts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in spelled:
                texts += [self.decode_whole(run) if run else "", spelled[token_id]]
                run = []
            else:
                run.append(token_id)
        return "".join(texts) + (self.decode_whole(run) if run else "")

    def decode_whole(self, ids: Sequence[int]) -> str:
        """Text of ids as `tokenizers` decodes it."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def content_of(self, token_id: int) -> str | None:
        """The spelling of an added token; None for any other id."""
        return next((content for content, token in self.added.items() if token["id"] == token_id), None)

    def first_control(self, text: str, at: int = 0) -> tuple[int, str] | None:
        """The position of the first control token from `at` on, and its spelling."""
        found = self._any_control.search(text, at)
        return (found.start(), found[0]) if found else None

    def spells_control(self, value: Any) -> bool:
        """Whether callers' texts spell a control token."""
        written = json.dumps(value, ensure_ascii=False)
        # A token that contains a quotation mark is spelled differently in JSON (Gemma 4).
        return self._any_control.search(written) is not None or json.dumps(self.neutral(value)) != json.dumps(value)

    def neutral(self, value: Any) -> Any:
        """A copy of messages in which nothing spells a control token: the first character of each is a letter."""
        if isinstance(value, str):
            while self._any_control.search(value):
                value = self._any_control.sub(lambda found: "q" + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {key: self.neutral(item) for key, item in value.items()}
        return [self.neutral(item) for item in value] if isinstance(value, list | tuple) else value

    def control_counts(self, ids: Sequence[int]) -> dict[str, int]:
        """How often each control token occurs in ids."""
        wanted = {self.added[content]["id"]: content for content in self.controls}
        counts: dict[str, int] = {}
        for token_id in ids:
            if token_id in wanted:
                counts[wanted[token_id]] = counts.get(wanted[token_id], 0) + 1
        return counts


def joined(message: Message) -> Message:
    """The message without None, as `apply_chat_template` gives it to the template, and text parts as one text.

    Reasoning is under both of its names, as servers give it.
    """
    fields = {key: value for key, value in message.items() if value is not None}
    if "reasoning_content" in fields:
        fields["reasoning"] = fields["reasoning_content"]
    if isinstance(fields.get("content"), list):
        fields["content"] = "".join(part["text"] for part in fields["content"])
    return fields


def main_words(reply: Message) -> list[str]:
    """Words that show where a reply ends: of its last call, else of its content."""
    calls = reply.get("tool_calls")
    return words_in(calls[-1]["function"]["arguments"] if calls else reply.get("content"))


def end_of_reply(text: str, reply: Message, new: Sequence[Message] = ()) -> int | None:
    """Where in a rendering the last word of the reply ends; None if the template leaves it out.

    What a template says of the reply after the new messages is not the reply. If it writes the whole conversation
    twice, the last one counts.
    """
    if not any(word in text for word in main_words(reply)):
        return None
    words, added, start = [word for word in words_in(reply) if word in text], words_in(list(new)), 0
    while True:
        first = min(at for at in (text.find(word, start) for word in words) if at >= 0)
        limit = min((at for at in (text.find(word, start) for word in added) if at > first), default=len(text))
        again = [text.find(word, limit) for word in words]
        if not added or min(again) < 0 or any(word not in text[max(again) :] for word in added):
            break
        start = limit
    return max(text.rfind(word, start, limit) + len(word) for word in words if 0 <= text.find(word, start) < limit)


def begins(whole: Ids, part: Ids) -> bool:
    """Whether the ids of a part begin those of the whole."""
    return whole.ids[: len(part.ids)] == part.ids


def appends(reference: Reference, prompt: str, with_reply: str, full: str, turn: str) -> str:
    """Why the whole conversation does not append to prompt and turn; empty if it does.

    `prompt` is the history's rendering with the generation prompt, `with_reply` history and reply, `full` everything,
    and `turn` the reply as the template wrote it, without the token that ends it.
    """
    if not with_reply.startswith(prompt):
        return "the generation prompt is not shown before the turn"
    if not full.startswith(prompt):
        return "what came before the turn changed"
    if not full.startswith(prompt + turn):
        return "the turn changed"
    whole = reference.encode(full)
    if not begins(whole, reference.encode(prompt)):
        return "the prompt has other ids"
    reply_ids = reference.encode(with_reply)
    end = len(prompt) + len(turn)
    counts = [ids.boundary(end) for ids in (whole, reply_ids)]
    if None not in counts and whole.ids[: counts[0]] != reply_ids.ids[: counts[1]]:
        return "the turn has other ids"
    return ""
