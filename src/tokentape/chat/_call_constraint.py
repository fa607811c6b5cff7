"""Derive the constraint for engines on replies that must contain tool calls from how the template writes calls.

The result is an XGrammar structural tag (https://xgrammar.mlc.ai/docs/structural_tag), which vLLM and SGLang accept.
It refers to control tokens by id, so text that only spells a control token does not match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokentape.chat._assistant_format import AssistantFormat
from tokentape.chat._call_syntax import ID, NAME, CallSyntax
from tokentape.chat._delimiters import ANY
from tokentape.chat._tokenizer import MARK, Tokenizer
from tokentape.types import Tool

_Format: TypeAlias = dict[str, Any]

_ID_PATTERN = "[a-zA-Z0-9]{9}"
"""Matches call ids that even the strictest template accepts."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """What a request requires of the tool calls in its reply."""

    required: tuple[str, ...] = ()
    """The reply must consist of calls to these tools, with valid arguments. If empty, the reply may also be text."""
    strict: frozenset[str] = frozenset()
    """If `required` is empty, calls to these tools must have valid arguments."""
    parallel: bool = True
    """If `required` is set, whether the reply may contain more than one call."""


def structural_tag(
    rule: CallRule, form: AssistantFormat, tokenizer: Tokenizer, tools: Sequence[Tool], stop_ids: Iterable[int]
) -> str | None:
    """Return the structural tag, as JSON text, for replies that follow the rule; None if it can't be expressed.

    It can't if calls are not written as a name and a JSON object, or, for `strict`, if no control token begins calls.
    """
    parts = _parts(form.calls) if form.calls is not None and form.channels is None else None
    if form.calls is None or parts is None:
        return None
    maker = _Maker(form, form.calls, parts, tokenizer, sorted(stop_ids))
    by_name = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if rule.required:
        calls = {name: by_name[name] for name in rule.required}
        elements = [*maker.reasoning(), *maker.calls(calls, parallel=rule.parallel)]
        return _tag({"type": "sequence", "elements": elements})
    calls = {name: schema if name in rule.strict else None for name, schema in by_name.items()}
    between = maker.text_and_calls(calls)
    return None if between is None else _tag(between)


def _parts(syntax: CallSyntax) -> tuple[str, str] | None:
    """Return a tool call's text before and after its arguments, with `NAME` and `ID` in place of its name and id."""
    if syntax.style == "json" and syntax.around_arguments is not None:
        before, after = syntax.around_arguments
    elif syntax.style == "named" and not syntax.name_is_id:
        front = f"{ID}{syntax.name_open}" if syntax.name_open else ""
        before = f"{front}{NAME}{syntax.name_close}" + (f"{ID}{syntax.id_close}" if syntax.id_close else "")
        after = ""
    else:
        return None
    # A word that varies, such as a call's number, can't be expressed.
    delimiters = f"{syntax.section_open}{syntax.open}{before}{after}{syntax.close}{syntax.separator}"
    return None if ANY in delimiters or syntax.separator.strip().isdecimal() else (before, after)


@dataclass(frozen=True, slots=True)
class _Maker:
    form: AssistantFormat
    syntax: CallSyntax
    parts: tuple[str, str]
    tokenizer: Tokenizer
    stop_ids: Sequence[int]

    def reasoning(self) -> list[_Format]:
        """Return what may come before the calls: reasoning, without its opening if the prompt already contains it."""
        reasoning = self.form.reasoning
        if reasoning is None:
            return []
        close = reasoning.close.lstrip()
        mark = MARK.match(close)
        begins = MARK.findall(f"{self.syntax.section_open}{self.syntax.open}")
        if mark is not None:
            excluded = sorted({*map(self._id, [mark[0], *begins]), *self.stop_ids})
            thought: _Format = {"type": "any_tokens", "exclude_tokens": excluded}
        else:
            words = [close.strip(), *map(self.tokenizer.spell_marks, begins)]
            thought = {"type": "any_text", "excludes": words}
        rest = [thought, *self._literal(close)]
        if reasoning.opened_by_prompt:
            return rest
        opened = [*self._literal(reasoning.open.lstrip()), *rest]
        return [{"type": "optional", "content": {"type": "sequence", "elements": opened}}]

    def calls(self, schemas: Mapping[str, Any], *, parallel: bool, begun: str = "") -> list[_Format]:
        """Return a section of calls, without leading white space and without `begun`, its already written beginning."""
        syntax = self.syntax
        opening = f"{syntax.section_open}{syntax.open}".lstrip().removeprefix(begun)
        elements = [*self._literal(opening), *self._call(schemas)]
        if parallel and syntax.between:
            another = [*self._literal(f"{syntax.separator}{syntax.open}"), *self._call(schemas)]
            elements.append({"type": "star", "content": {"type": "sequence", "elements": another}})
        return [*elements, *self._literal(syntax.section_close.rstrip())]

    def text_and_calls(self, schemas: Mapping[str, Any]) -> _Format | None:
        """Return text in which every call follows its schema; None if no control token begins calls."""
        syntax = self.syntax
        section_opening, call_opening = f"{syntax.section_open}{syntax.open}".strip(), syntax.open.strip()
        begin = MARK.match(section_opening)
        if begin is None:
            return None
        # The parser also accepts a call without the section's delimiter.
        others = {mark[0] for mark in [MARK.match(call_opening)] if mark is not None} - {begin[0]}
        rest = self.calls(schemas, parallel=True, begun=begin[0])
        rule = [self._id(begin[0]), {"type": "sequence", "elements": rest}]
        excluded = sorted({*map(self._id, others), *self.stop_ids})
        return {"type": "token_dispatch", "rules": [rule], "loop": True, "exclude_tokens": excluded}

    def _call(self, schemas: Mapping[str, Any]) -> list[_Format]:
        before, after = self.parts
        choices = []
        for name, schema in schemas.items():
            spelled = json.dumps(name, ensure_ascii=False)[1:-1] if self.syntax.style == "json" else name
            arguments = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
            choices.append({"type": "sequence", "elements": [*self._literal(before.replace(NAME, spelled)), arguments]})
        return [{"type": "or", "elements": choices}, *self._literal(f"{after}{self.syntax.close}")]

    def _literal(self, marked: str) -> list[_Format]:
        """Convert marked text to elements: control tokens by id, the sentinel `ID` as a pattern, the rest as text."""
        elements: list[_Format] = []
        for piece in re.split(f"({MARK.pattern}|{ID})", marked):
            if piece == ID:
                elements.append({"type": "regex", "pattern": _ID_PATTERN})
            elif MARK.fullmatch(piece):
                elements.append({"type": "token", "token": self._id(piece)})
            elif piece:
                elements.append({"type": "const_string", "value": piece})
        return elements

    def _id(self, mark: str) -> int:
        return self.tokenizer.control_of_mark(mark).id


def _tag(content: _Format) -> str:
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False)
