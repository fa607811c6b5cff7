"""Find why two backends render a conversation differently: compare texts, and exchange pieces of templates."""

from __future__ import annotations

import difflib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import TypeAlias

from tokentape._alignment import first_difference
from tokentape.audit._model_files import changed_entries
from tokentape.audit._skew.backends import BackendFacts, SkewChat
from tokentape.audit._skew.backends.spec import render_text
from tokentape.audit._skew.battery import FORMS
from tokentape.audit._skew.findings import Cause, Kind
from tokentape.chat._template import ChatTemplate
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable
from tokentape.types import Message

Messages: TypeAlias = Sequence[Message]
Change: TypeAlias = Callable[[Messages], Iterable[Message]]


OF_TEXT: tuple[tuple[str, Callable[[str], str]], ...] = (
    *((f"in Unicode form {form}", partial(unicodedata.normalize, form)) for form in FORMS),
    ("without white space around it", str.strip),
    ("without white space at its end", str.rstrip),
    ("without white space at its start", str.lstrip),
    (r"with \r\n as \n", lambda text: text.replace("\r\n", "\n")),
    ("without NUL", lambda text: text.replace("\0", "")),
    (r"without \r", lambda text: text.replace("\r", "")),
    ("with tabs as spaces", lambda text: text.expandtabs(4)),
    ("with several spaces as one", lambda text: " ".join(filter(None, text.split(" ")))),
    ("in lower case", str.lower),
    ("with HTML entities decoded", html.unescape),
    ("with HTML characters as entities", html.escape),
)
"""Changes to a text, each with a description of the changed text."""


def changes_of(messages: Messages) -> Iterator[tuple[str, Change]]:
    """Yield each change that may matter for the messages, after its description."""
    for what, change in OF_TEXT:
        yield f"the content of messages {what}", partial(_content, change)
    for none in ("", "None"):
        yield f"content None as {none!r}", partial(_content, str, none=none)
    for between in ("\n\n", "\n", " ", ""):
        yield f"messages of one role as one message, joined by {between!r}", partial(_joined, between)
    yield "one message for equal messages in a row", _once
    for field in dict.fromkeys(key for message in messages for key in message):
        if field not in ("role", "content"):
            yield f"messages without {field}", partial(_without, field)
    for count in range(1, len(messages)):
        yield f"the last {count} messages only", itemgetter(slice(-count, None))


def _content(change: Callable[[str], str], messages: Messages, none: str | None = None) -> Iterator[Message]:
    for message in messages:
        content = message.get("content")
        changed = change(content) if isinstance(content, str) else none if content is None else content
        yield {**message, "content": changed} if "content" in message else message


def _joined(between: str, messages: Messages) -> Iterator[Message]:
    for role, group in groupby(messages, lambda message: message["role"]):
        some = list(group)
        plain = role in ("user", "system") and all(isinstance(message.get("content"), str) for message in some)
        yield from [{**some[0], "content": between.join(message["content"] for message in some)}] if plain else some


def _once(messages: Messages) -> Messages:
    return [*messages[:1], *(new for old, new in pairwise(messages) if old != new)]


def _without(field: str, messages: Messages) -> Messages:
    return [{key: value for key, value in message.items() if key != field} for message in messages]


Writer: TypeAlias = Callable[[SkewChat], "str | None"]
"""A function that renders a conversation to text. Returns None if the template refuses."""

_TAGS = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\n)", re.DOTALL)
_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DATES = re.compile(rf"\d{{4}}-\d\d-\d\d|\d{{1,2}} {_MONTHS},? \d{{4}}|{_MONTHS} \d{{1,2}},? \d{{4}}|\d\d/\d\d/\d{{4}}")
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})")
_PRINTED = re.compile(r"\[\{['\"]type['\"]: ?['\"]text['\"]|<\|?im_start\|?>user\n\[\]|(?<=[>\n])\[\](?=[<\n]|$)")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_THINKING = re.compile(r"<think>.*?</think>\s*|<think>\s*|\s*</think>", re.DOTALL)
_SHOWN = 40
_MOST_PIECES = 40
_MOST_AGREED = 40
_LONGEST_CONTROL = 40
_SEVERAL = "several pieces"

_SAME_TEMPLATE = "Use the chat template that the weights were trained with on both sides, and compare hashes."
_SAME_LIBRARY = "Pin the same library versions on both sides."
PIN_DATE = "Pin the date on both sides, with a template kwarg if there is one."
_TOJSON = "Use transformers' `tojson` (json.dumps, ensure_ascii=False) on both sides, not Jinja's own."
_WORDS = "booleans and None are written as Python on one side and as JSON on the other"
_NO_STRING = "Write values with `tojson` in the template, not with `string` or `~`."
_SPACED = "Write JSON with the same separators on both sides."
_FULL_TOOLS = "Send tools with every field that the server adds, in its order, or render with the trainer's template."
_SAME_ARGUMENTS = "Pass arguments on unchanged: no other order, no other numbers, no values left out."
_ONLY_TEMPLATE_BOS = "Let the template alone write BOS: encode what it rendered with add_special_tokens=False."
_AS_SENT = "Make the same change before training renders messages, or disable it in the server."
_AS_TEXT = "Send content as text, or set the server's content format for this template."
_PROMPTED = "Pass add_generation_prompt=True to the template, and the same template kwargs on both sides."


def _named_lines(text: str, *, calls: bool) -> str:
    """Return the text with each line of JSON that is a call, or else a tool definition, replaced by its name."""

    def shortened(line: str) -> str:
        try:
            parsed = json.loads(line) if line.startswith("{") else None
            if parsed is None or ("arguments" in parsed) != calls:
                return line
            return f"tool {parsed.get('function', parsed)['name']}"
        except (ValueError, LookupError, TypeError, AttributeError):
            return line

    return "\n".join(map(shortened, text.split("\n")))


def _unescaped(text: str) -> str:
    return html.unescape(_ESCAPES.sub(lambda match: chr(int(match[1], 16)), text).replace('\\"', '"'))


_json_words = partial(re.compile(r"\b(True|False|None)\b").sub, lambda match: _CONSTANTS[match[0]])
_unspaced = partial(re.compile(r"([,:])\s+").sub, r"\1")
_without_tools, _without_arguments = partial(_named_lines, calls=False), partial(_named_lines, calls=True)
_undated, _unthought = partial(_DATES.sub, "DATE"), partial(_THINKING.sub, "")
_Form: TypeAlias = tuple[str, Kind, Callable[[str], str], str, str]
"""The key, the kind, a function that removes such differences from a text, the cause, the fix."""

_FORMS: tuple[_Form, ...] = (
    ("date", "date", _undated, "the template shows a date", PIN_DATE),
    ("escaping", "JSON", _unescaped, "JSON is escaped differently", _TOJSON),
    ("booleans", "booleans", _json_words, _WORDS, _NO_STRING),
)
_LATER_FORMS: tuple[_Form, ...] = (
    ("spacing", "JSON", _unspaced, "JSON is spaced differently", _SPACED),
    ("tools", "tools", _without_tools, "tool definitions are written differently", _FULL_TOOLS),
    ("arguments", "tools", _without_arguments, "arguments of tool calls are written differently", _SAME_ARGUMENTS),
    ("reasoning", "reasoning", _unthought, "reasoning is kept, left out or framed differently", _SAME_TEMPLATE),
)
"""Forms to try after content parts and generation prompts, because they would match those too."""


class TemplateCauses:
    """Finds causes of different renderings. `write` returns the text that each backend renders for a conversation."""

    def __init__(
        self, a: BackendFacts, b: BackendFacts, date: str, write: Callable[[SkewChat], tuple[str | None, str | None]]
    ) -> None:
        self._a, self._b, self._date, self._write = a, b, date, write
        self._writers: dict[tuple[str, str], Writer | None] = {}
        self.agreed: list[SkewChat] = []
        """Conversations that both sides render equally. A cause must not change their text."""

    def cause_of(self, conversation: SkewChat, a_text: str | None, b_text: str | None) -> Cause:
        """Return why backend A renders `a_text` and backend B `b_text`. A text is None if its backend refuses."""
        a, b = self._a, self._b
        exchanged = self._by_exchange(conversation, b_text) if b_text is not None else None
        if a_text is None or b_text is None:
            who, whom = ("A", "B") if a_text is None else ("B", "A")
            refused = Cause("template", f"{who} refuses what {whom} renders", _SAME_TEMPLATE, f"refused:{who}")
            return replace(exchanged or refused, severity="caution")  # the error is seen, and no wrong ids are trained
        seen = self._by_change(conversation, a_text, b_text) or self._by_texts(conversation, a_text, b_text)
        if seen is not None and exchanged is not None and exchanged.key != _SEVERAL:
            fix = _SAME_TEMPLATE if exchanged.kind == "template" else exchanged.fix
            return replace(seen, what=f"{seen.what}; {exchanged.what}", fix=fix)
        if seen is not None or exchanged is not None:
            return seen or exchanged  # type: ignore[return-value]
        what = f"they write {_apart(a_text, b_text)}"
        ours, theirs = _template(a, conversation), _template(b, conversation)
        if ours is not None and ours == theirs and a.template_variables == b.template_variables:
            what = f"the templates are the same, but {what}: {a.kind} and {b.kind} run them differently"
            return Cause("library", what, _SAME_LIBRARY, "library")
        differs = "the rendering differs" if ours is None or theirs is None else "the templates differ"
        return Cause("template", f"{differs}: {what}", _SAME_TEMPLATE, "template")

    def _by_change(self, conversation: SkewChat, a_text: str, b_text: str) -> Cause | None:
        """Return the cause if one side renders as the other side's known template renders a changed conversation."""
        sources = [_template(side, conversation) for side in (self._a, self._b)]
        if (sources[0] is None) == (sources[1] is None):
            return None
        index = 0 if sources[0] is not None else 1
        source, letter, expected = sources[index] or "", "BA"[index], (b_text, a_text)[index]
        write = self._writer(source, (self._a, self._b)[index].template_variables)
        if write is None:
            return None

        def changed(change: Change, chat: SkewChat) -> SkewChat:
            return replace(chat, messages=tuple(change(chat.messages)))

        for what, change in changes_of(conversation.messages):
            new = changed(change, conversation)
            if new == conversation or write(new) != expected:
                continue
            pairs = ((agreed, changed(change, agreed)) for agreed in self.agreed)
            touched = islice((pair for pair in pairs if pair[0] != pair[1]), _MOST_AGREED)
            if all(write(agreed) == write(new) for agreed, new in touched):

                def explains(chat: SkewChat, ours: str, theirs: str, change: Change = change) -> bool:
                    return write(changed(change, chat)) == (theirs, ours)[index]

                return Cause("template", f"{letter} renders {what}", _AS_SENT, f"{letter}:{what}", explains=explains)
        return None

    def _by_texts(self, conversation: SkewChat, a_text: str, b_text: str) -> Cause | None:
        """Return the cause if the two texts alone show it."""
        for token in {side.special_tokens.get("bos_token") for side in (self._a, self._b)} - {None}:
            strip = partial(re.compile(rf"\A(?:{re.escape(token or '')})+").sub, "")
            counts = [(len(text) - len(strip(text))) // len(token or "") for text in (a_text, b_text)]
            if counts[0] != counts[1] and strip(a_text) == strip(b_text):
                what = f"{token} begins the prompt {counts[0]} times in A and {counts[1]} times in B"
                return Cause("BOS/EOS", what, _ONLY_TEMPLATE_BOS, f"bos:{tuple(counts)}", explains=_alike(strip))
        cause = _same_form(_FORMS, a_text, b_text)
        if cause is not None:
            return cause
        if _prints_parts(a_text, b_text):
            what = f"{'A' if _PRINTED.search(a_text) else 'B'} prints a list of content parts into the prompt"
            return Cause("content parts", what, _AS_TEXT, "parts", explains=lambda _, *texts: _prints_parts(*texts))
        if self._unprompted(conversation, a_text, b_text):
            who = "B" if a_text.startswith(b_text) else "A"
            what = f"{who} writes less of the generation prompt: {_apart(a_text, b_text)}"
            return Cause("generation prompt", what, _PROMPTED, "generation prompt", explains=self._unprompted)
        return _same_form(_LATER_FORMS, a_text, b_text) or self._swapped_tokens(a_text, b_text)

    def _swapped_tokens(self, a_text: str, b_text: str) -> Cause | None:
        """Return the cause if replacing one control token turns A's text into B's."""
        index = first_difference(a_text, b_text)
        tokens = {**self._a.added, **self._b.added}
        starts = range(max(index - _LONGEST_CONTROL, 0), index + 1)
        spelled = [[token for token in tokens if any(t.startswith(token, n) for n in starts)] for t in (a_text, b_text)]
        for ours in spelled[0]:
            for theirs in spelled[1]:
                if ours != theirs and a_text.replace(ours, theirs) == b_text:
                    what = f"A writes {ours} where B writes {theirs}"

                    def explains(_: SkewChat, a_text: str, b_text: str, old: str = ours, new: str = theirs) -> bool:
                        return a_text.replace(old, new) == b_text

                    return Cause("template", what, _SAME_TEMPLATE, f"{ours}:{theirs}", explains=explains)
        return None

    def _unprompted(self, conversation: SkewChat, a_text: str, b_text: str) -> bool:
        """Return True if the texts differ only in the generation prompt, of which one side lacks some or all."""
        longer, shorter = sorted((a_text, b_text), key=len, reverse=True)
        if not conversation.generate or not longer.startswith(shorter):
            return False
        without = self._write(replace(conversation, generate=False))[0 if longer is a_text else 1]
        return without is not None and shorter.startswith(without) and without != longer

    def _by_exchange(self, conversation: SkewChat, b_text: str) -> Cause | None:
        """Return the cause if B's template variables, or one piece of B's template, turn A's text into B's."""
        a, b = self._a, self._b
        template, put = _template(a, conversation), _template(b, conversation)
        if template is None or put is None:
            return None
        ours, theirs = a.template_variables, b.template_variables
        changed = changed_entries(ours, theirs)
        writer = self._writer(template, theirs) if changed else None
        if writer is not None and writer(conversation) == b_text:
            description = ", ".join(
                f"{name} is {pair[0]!r} in A and {pair[1]!r} in B" for name, pair in changed.items()
            )
            kind: Kind = "special tokens" if all(n.endswith("_token") for n in changed) else "template kwargs"
            return Cause(kind, description, "Use the same values on both sides.", "variables", explains=_writes(writer))
        for description, source in _exchanges(template, put):
            writer = self._writer(source, ours)
            if writer is not None and writer(conversation) == b_text:
                return Cause("template", description, _SAME_TEMPLATE, description, explains=_writes(writer))
        whole = self._writer(put, theirs) if template != put else None
        if whole is not None and whole(conversation) == b_text:
            return Cause("template", "the templates differ in several pieces at once", _SAME_TEMPLATE, _SEVERAL)
        return None

    def _writer(self, source: str, variables: Mapping[str, object]) -> Writer | None:
        key = source, repr(variables)
        if key not in self._writers:
            self._writers[key] = template_writer(source, variables, self._date)
        return self._writers[key]


def template_writer(source: str, variables: Mapping[str, object], date: str) -> Writer | None:
    """Return a writer that renders with a template and a date. Return None if the template can't be parsed."""
    try:
        template = ChatTemplate(source)
    except TokenizerUnusable:
        return None

    def write(conversation: SkewChat) -> str | None:
        try:
            return render_text(template, conversation, date, variables)
        except (TemplateRefused, InvalidRequest):
            return None

    return write


def _template(facts: BackendFacts, conversation: SkewChat) -> str | None:
    """Return the template source that a backend renders a conversation with."""
    return (conversation.tools and facts.tool_template) or facts.template


def _same_form(forms: tuple[_Form, ...], a_text: str, b_text: str) -> Cause | None:
    for key, kind, form, what, fix in forms:
        if form(a_text) == form(b_text):
            description = f"{what}: {_apart(a_text, b_text)}"
            if key == "date":
                dates = [match[0] if (match := _DATES.search(text)) else "none" for text in (a_text, b_text)]
                description = f"{what}: {dates[0]} in A, {dates[1]} in B"
            return Cause(kind, description, fix, key, explains=_alike(form))
    return None


@lru_cache(4)
def _exchanges(a_template: str, b_template: str) -> list[tuple[str, str]]:
    """Return a description of each piece that differs, and `a_template` with that piece from `b_template`."""
    ours, theirs = ([part for part in _TAGS.split(source) if part] for source in (a_template, b_template))
    changes = [c for c in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes() if c[0] != "equal"]
    exchanges = []
    for _, start, end, from_, to in changes if len(changes) <= _MOST_PIECES else ():
        mine, put = _quoted("".join(ours[start:end]), "".join(theirs[from_:to]))
        source = "".join([*ours[:start], *theirs[from_:to], *ours[end:]])
        exchanges.append((f"the template has {mine} in A and {put} in B", source))
    return exchanges


def _quoted(*texts: str) -> list[str]:
    """Return two texts in quotes, cut around their first difference."""
    start = max(first_difference(*texts) - _SHOWN, 0)
    end, before = start + 2 * _SHOWN, "..." if start else ""
    return [
        repr(f"{before}{text[start:end]}{'...' if end < len(text) else ''}") if text else "nothing" for text in texts
    ]


def _apart(a_text: str, b_text: str) -> str:
    """Quote both texts around their first difference."""
    start = max(first_difference(a_text, b_text) - 10, 0)
    return f"{a_text[start : start + _SHOWN]!r} and {b_text[start : start + _SHOWN]!r}"


def _alike(form: Callable[[str], str]) -> Callable[[SkewChat, str, str], bool]:
    return lambda _, a_text, b_text: form(a_text) == form(b_text)


def _writes(writer: Writer) -> Callable[[SkewChat, str, str], bool]:
    return lambda conversation, _, b_text: writer(conversation) == b_text


def _prints_parts(a_text: str, b_text: str) -> bool:
    return (_PRINTED.search(a_text) is None) != (_PRINTED.search(b_text) is None)
