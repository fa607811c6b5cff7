"""Why two sides render a conversation differently: found in what they wrote, and by exchanging pieces of templates."""

from __future__ import annotations

import difflib
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from tokentape.audit.skew.findings import Kind, Severity
from tokentape.audit.skew.layout import first_difference
from tokentape.audit.skew.sides.base import SideFacts, SkewChat
from tokentape.chat.template import ChatTemplate, plain_message
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable

Writer: TypeAlias = Callable[[SkewChat], "str | None"]
"""Renders to text; None if it refuses."""

_TAGS = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\n)", re.DOTALL)
_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DATES = re.compile(rf"\d{{4}}-\d\d-\d\d|\d{{1,2}} {_MONTHS},? \d{{4}}|{_MONTHS} \d{{1,2}},? \d{{4}}|\d\d/\d\d/\d{{4}}")
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})")
_PRINTED = re.compile(r"\[\{['\"]type['\"]: ?['\"]text['\"]|<\|?im_start\|?>user\n\[\]|(?<=[>\n])\[\](?=[<\n]|$)")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANT = re.compile(r"\b(True|False|None)\b")
_THINKING = re.compile(r"<think>.*?</think>\s*|<think>\s*|\s*</think>", re.DOTALL)
_SHOWN = 40
_MOST_PIECES = 40
_LONGEST_CONTROL = 40
_SEVERAL = "several pieces"

_SAME_TEMPLATE = "Give both sides the same chat template file, and compare its hash."


@dataclass(frozen=True, slots=True)
class TemplateCause:
    """One cause of different renderings."""

    kind: Kind
    what: str
    fix: str
    key: str
    """Two conversations with causes of one key differ for the same reason."""
    explains: Callable[[SkewChat, str, str], bool] | None = None
    """Whether this cause alone makes the texts of another conversation differ as they do."""
    severity: Severity = "skew"


class TemplateCauses:
    """Explains differences between what two sides write. `write` gives what each writes for a conversation."""

    def __init__(
        self, a: SideFacts, b: SideFacts, date: str, write: Callable[[SkewChat], tuple[str | None, str | None]]
    ) -> None:
        self._a, self._b = a, b
        self._write = write
        self._date = date
        self._pieces: list[tuple[str, Writer]] | None = None
        self._whole: Writer | None = None

    def cause_of(self, conversation: SkewChat, one: str | None, other: str | None) -> TemplateCause:
        """Why side A writes `one` and side B `other`; None: it refuses."""
        a, b = self._a, self._b
        if one is None or other is None:
            who, whom = ("A", "B") if one is None else ("B", "A")
            what = f"{who} refuses what {whom} renders"
            found = self._exchanged(conversation, other) if other is not None else None
            refused = TemplateCause("template", what, _SAME_TEMPLATE, f"refused:{who}")
            return replace(found or refused, severity="caution")  # it is loud, and no ids are trained
        seen = self._seen(conversation, one, other)
        exchanged = self._exchanged(conversation, other)
        if seen is not None:
            if exchanged is not None and exchanged.key != _SEVERAL:
                return replace(seen, what=f"{seen.what}; {exchanged.what}")
            return seen
        if exchanged is not None:
            return exchanged
        what = f"they write {_apart(one, other)}"
        if a.template is not None and a.template == b.template and a.template_variables == b.template_variables:
            what = f"the templates are the same, and yet {what}: {a.kind} and {b.kind} run them differently"
            return TemplateCause("library", what, "Pin the same library versions on both sides.", "library")
        if a.template is None or b.template is None:
            what = f"the rendering differs: {what}"
        else:
            what = f"the templates differ: {what}"
        return TemplateCause("template", what, _SAME_TEMPLATE, "template")

    def _seen(self, conversation: SkewChat, one: str, other: str) -> TemplateCause | None:
        """What the two texts show by themselves."""
        a, b = self._a, self._b
        for token in {side.special_tokens["bos_token"] for side in (a, b) if "bos_token" in side.special_tokens}:
            counts = _leading(token, one), _leading(token, other)
            if counts[0] != counts[1] and _strip(token, one) == _strip(token, other):
                what = f"{token} begins the prompt {counts[0]} times in A and {counts[1]} times in B"
                fix = "Let the template alone write BOS: encode what it rendered with add_special_tokens=False."
                return TemplateCause("BOS/EOS", what, fix, f"bos:{counts}", _alike(partial(_strip, token)))
        if _undated(one) == _undated(other):
            dates = [match[0] if (match := _DATES.search(text)) else "none" for text in (one, other)]
            what = f"the template shows a date: {dates[0]} in A, {dates[1]} in B"
            fix = "Pin the date on both sides, with a template kwarg if there is one."
            return TemplateCause("date", what, fix, "date", _alike(_undated))
        if _unescaped(one) == _unescaped(other):
            what = f"JSON is escaped differently: {_apart(one, other)}"
            fix = "Use transformers' `tojson` (json.dumps, ensure_ascii=False) on both sides, not Jinja's own."
            return TemplateCause("JSON", what, fix, "escaping", _alike(_unescaped))
        if _constants(one) == _constants(other):
            what = f"booleans and None are written as Python on one side and as JSON on the other: {_apart(one, other)}"
            fix = "Write values with `tojson` in the template, not with `string` or `~`."
            return TemplateCause("booleans", what, fix, "booleans", _alike(_constants))
        if _prints_parts(one, other):
            what = f"{'A' if _PRINTED.search(one) else 'B'} prints a list of content parts into the prompt"
            fix = "Send content as text, or set the server's content format for this template."
            return TemplateCause("content parts", what, fix, "parts", lambda _, one, other: _prints_parts(one, other))
        if self._unprompted(conversation, one, other):
            what = f"{'B' if one.startswith(other) else 'A'} writes less of the generation prompt: {_apart(one, other)}"
            fix = "Pass add_generation_prompt=True to the template, and the same template kwargs on both sides."
            return TemplateCause("generation prompt", what, fix, "generation prompt", self._unprompted)
        if _compact(one) == _compact(other):
            what = f"JSON is spaced differently: {_apart(one, other)}"
            fix = "Write JSON with the same separators on both sides."
            return TemplateCause("JSON", what, fix, "spacing", _alike(_compact))
        if _without_tools(one) == _without_tools(other):
            what = f"tool definitions are written differently: {_apart(one, other)}"
            fix = (
                "Send tools with every field that the server adds, in its order, or render with the trainer's template."
            )
            return TemplateCause("tools", what, fix, "tools", _alike(_without_tools))
        if _unthought(one) == _unthought(other):
            what = f"reasoning is kept, left out or framed differently: {_apart(one, other)}"
            return TemplateCause("reasoning", what, _SAME_TEMPLATE, "reasoning", _alike(_unthought))
        swapped = self._swapped_tokens(one, other)
        if swapped is not None:
            ours, theirs = swapped
            return TemplateCause(
                "template",
                f"A writes {ours} where B writes {theirs}",
                _SAME_TEMPLATE,
                f"{ours}:{theirs}",
                lambda _, one, other: one.replace(ours, theirs) == other,
            )
        return None

    def _swapped_tokens(self, one: str, other: str) -> tuple[str, str] | None:
        """Two control tokens of which one side writes one wherever the other side writes the other."""
        at = first_difference(one, other)
        spelled = [
            [token for token in {**self._a.added, **self._b.added} if any(text.startswith(token, n) for n in starts)]
            for text in (one, other)
            for starts in [range(max(at - _LONGEST_CONTROL, 0), at + 1)]
        ]
        pairs = ((ours, theirs) for ours in spelled[0] for theirs in spelled[1] if ours != theirs)
        return next((pair for pair in pairs if one.replace(*pair) == other), None)

    def _unprompted(self, conversation: SkewChat, one: str, other: str) -> bool:
        """Whether one text is the other without its generation prompt, or without a part of it."""
        if not conversation.generate or not (one.startswith(other) or other.startswith(one)):
            return False
        without = self._write(replace(conversation, generate=False))[0 if len(one) > len(other) else 1]
        longer, shorter = (one, other) if len(one) > len(other) else (other, one)
        return without is not None and shorter.startswith(without) and without != longer

    def _exchanged(self, conversation: SkewChat, other: str) -> TemplateCause | None:
        """The one difference of variables or templates that makes of A's text B's."""
        a, b = self._a, self._b
        if a.template is None or b.template is None:
            return None
        changed = sorted(
            name
            for name in {*a.template_variables, *b.template_variables}
            if a.template_variables.get(name) != b.template_variables.get(name)
        )
        if changed:
            writer = self._writer(a.template, b.template_variables)
            if writer is not None and writer(conversation) == other:
                one, two = a.template_variables, b.template_variables
                said = ", ".join(f"{name} is {one.get(name)!r} in A and {two.get(name)!r} in B" for name in changed)
                kind: Kind = "special tokens" if all(n.endswith("_token") for n in changed) else "template kwargs"
                return TemplateCause(kind, said, "Use the same values on both sides.", "variables", _writes(writer))
        for said, writer in self._all_pieces():
            if writer(conversation) == other:
                return TemplateCause("template", said, _SAME_TEMPLATE, said, _writes(writer))
        if self._whole is not None and self._whole(conversation) == other:
            said = "the templates differ in several pieces at once"
            return TemplateCause("template", said, _SAME_TEMPLATE, _SEVERAL)
        return None

    def _all_pieces(self) -> list[tuple[str, Writer]]:
        """Side A's template with one piece of B's at a time."""
        if self._pieces is None:
            self._pieces = []
            assert self._a.template is not None
            assert self._b.template is not None
            if self._a.template != self._b.template:
                for said, source in _exchanges(self._a.template, self._b.template):
                    writer = self._writer(source, self._a.template_variables)
                    if writer is not None:
                        self._pieces.append((said, writer))
                self._whole = self._writer(self._b.template, self._b.template_variables)
        return self._pieces

    def _writer(self, source: str, variables: Mapping[str, object]) -> Writer | None:
        try:
            template = ChatTemplate(source)
        except TokenizerUnusable:
            return None

        def write(conversation: SkewChat) -> str | None:
            try:
                return template.render(
                    [plain_message(message) for message in conversation.messages],
                    tools=conversation.tools,
                    add_generation_prompt=conversation.generate,
                    date=self._date,
                    variables=variables,
                )
            except (TemplateRefused, InvalidRequest):
                return None

        return write


def _exchanges(one: str, other: str) -> Iterator[tuple[str, str]]:
    """Pieces in which two templates differ, in words, with the first template that has that piece of the second."""
    ours, theirs = ([part for part in _TAGS.split(source) if part] for source in (one, other))
    changes = [c for c in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes() if c[0] != "equal"]
    if len(changes) > _MOST_PIECES:
        return
    for _, start, end, from_, to in changes:
        mine, put = "".join(ours[start:end]), "".join(theirs[from_:to])
        yield (
            f"the template has {_quoted(mine)} in A and {_quoted(put)} in B",
            "".join([*ours[:start], *theirs[from_:to], *ours[end:]]),
        )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 2 * _SHOWN else text[: 2 * _SHOWN - 3] + "...") if text else "nothing"


def _leading(token: str, text: str) -> int:
    count = 0
    while text.startswith(token, count * len(token)):
        count += 1
    return count


def _unescaped(text: str) -> str:
    return html.unescape(_ESCAPES.sub(lambda match: chr(int(match[1], 16)), text).replace('\\"', '"'))


def _constants(text: str) -> str:
    return _CONSTANT.sub(lambda match: _CONSTANTS[match[1]], text)


def _compact(text: str) -> str:
    return re.sub(r"([,:])\s+", r"\1", text)


def _apart(one: str, other: str) -> str:
    """Where two texts begin to differ, in words."""
    start = max(first_difference(one, other) - 10, 0)
    return f"{one[start : start + _SHOWN]!r} and {other[start : start + _SHOWN]!r}"


def _alike(form: Callable[[str], str]) -> Callable[[SkewChat, str, str], bool]:
    """Whether two texts are the same in some form."""
    return lambda _, one, other: form(one) == form(other)


def _writes(writer: Writer) -> Callable[[SkewChat, str, str], bool]:
    """Whether a template writes what side B does."""
    return lambda conversation, _, other: writer(conversation) == other


def _strip(token: str, text: str) -> str:
    return text[_leading(token, text) * len(token) :]


def _undated(text: str) -> str:
    return _DATES.sub("DATE", text)


def _without_tools(text: str) -> str:
    """The text with each tool definition, a line of JSON, as nothing but its name."""
    return "\n".join(map(_tool_name, text.split("\n")))


def _tool_name(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        tool = json.loads(line)
        return f"tool {tool.get('function', tool)['name']}"
    except (ValueError, LookupError, TypeError):
        return line


def _unthought(text: str) -> str:
    return _THINKING.sub("", text)


def _prints_parts(one: str, other: str) -> bool:
    return (_PRINTED.search(one) is None) != (_PRINTED.search(other) is None)
