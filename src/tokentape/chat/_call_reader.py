"""Find the tool calls in a completion by the template's delimiters, while the model writes them.

White space in delimiters may differ from the template, and parts of delimiters may be missing or doubled if the call
itself is complete. The result does not depend on the chunks in which the text arrives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from tokentape.chat._call_body import JSON_PUNCTUATION, BodyReader, Broken, ReadCall, body_reader
from tokentape.chat._call_literals import may_be_head, needs_known_tool, read_head
from tokentape.chat._call_syntax import CallSyntax
from tokentape.chat._delimiters import SPACE, any_of, may_grow, optional, pattern, pieces, skip, skip_space
from tokentape.chat._tokenizer import MARK
from tokentape.types import Tool

_LONGEST_DELIMITER = 300
_FAR = 10_000
_MOST_READ_FAR = 16
"""How many unclosed calls may be read for more than `_FAR` characters. Later calls end where the next one begins: if a
model in a loop leaves thousands open, reading each of them to the end takes time quadratic in the text."""


class CallReader:
    """Reads the calls of one syntax."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._tools: Mapping[str, Tool] = {}
        section_pieces, call_pieces = pieces(syntax.section_open + syntax.open), pieces(syntax.open)
        self.bare = not section_pieces and syntax.style == "json"
        """Whether calls have no delimiters. Any JSON object that names a tool is then a call."""
        self.begins_lines = self.bare and not syntax.within_lines
        """Whether a call without delimiters is recognized only at the beginning of a line."""
        self._like_json = set("".join([*section_pieces, *call_pieces])) <= set(JSON_PUNCTUATION)
        """Whether a JSON answer may look like calls, because nothing but JSON's brackets delimits them."""
        begins = tuple(dict.fromkeys([*section_pieces[:1], *call_pieces[:1]]))
        marked = tuple(piece for piece in begins if MARK.match(piece))
        opening = syntax.section_open + syntax.open
        through_mark = tuple(opening[: mark.end()].strip() for mark in MARK.finditer(opening))[: 1 if marked else 0]
        self.triggers = tuple(dict.fromkeys(through_mark + marked)) or begins
        """Texts that may begin a call. If there are control tokens, these, because text can quote the others, and the
        text up to the first of them."""
        again = any_of(begins)
        # Repetition is limited because the expressions are matched again with every token that may extend them.
        limit = "{0,8}"
        self._opening = re.compile(
            rf"(?:{SPACE}({MARK.pattern})){limit}"
            if self.bare
            else rf"(?:{SPACE}({again})){limit}{optional(section_pieces)}"
        )
        self._next = re.compile(re.escape(call_pieces[0]) if call_pieces else r"\{")
        self._headed = syntax.style == "literal" and not call_pieces
        """Whether a call begins with its name."""
        self._section_end = re.compile(pattern(syntax.section_close)) if syntax.section_close.strip() else None
        self._knows_names = syntax.style == "literal" and needs_known_tool(syntax)
        self._closing = re.compile(optional([syntax.close]))
        close = pieces(syntax.close)
        self._last = tuple(piece for piece in close[-1:] if close.count(piece) == 1)
        """The last part of the closing delimiter, if it occurs only once in it: the delimiter ends after it."""
        self._spare = re.compile("" if syntax.style in ("tagged", "literal") else rf"(?:\s*\}}){limit}")
        self._counts = syntax.separator.strip().isdecimal()
        """Whether the calls are numbered: a number comes before each call."""
        ends = [syntax.close, "" if self._counts else syntax.separator, syntax.section_close]
        between = [pattern(text) for text in ends if pieces(text)]
        between += [any_of(piece for text in ends for piece in pieces(text) if piece not in begins)]
        between += [rf"\d{{1,9}}(?={SPACE}{pattern(syntax.open)})"] if self._counts and call_pieces else []
        another = rf"(?!{pattern(syntax.open)})" if call_pieces else ""
        self._between = re.compile(
            r"(?:\s*[;,](?=\s*\{))?" if self.bare else rf"(?:\s*{another}(?:{'|'.join(between) or '(?!)'})){limit}"
        )
        self._begins = begins
        self._another = re.compile(any_of(begins))
        broken_ends = [*pieces(syntax.close), *pieces(syntax.section_close), *begins]
        self._broken_end = re.compile(any_of(piece for piece in broken_ends if not _is_within(syntax, piece)))
        self._start = self._seek = 0
        self._read_far = 0
        """The number of unclosed calls that were read for more than `_FAR` characters."""
        self._body: BodyReader | None = None

    def fresh(self, tools: Mapping[str, Tool]) -> CallReader:
        """Return a reader with the same syntax for a new completion.

        The regular expressions are shared because compiling them costs more than reading a call.
        """
        reader = copy(self)
        reader._tools = tools
        return reader

    def read(self, text: str, position: int, *, final: bool, ended: bool, within_reasoning: bool) -> ReadCall | None:
        """Return the call that begins at `position`; None if more text may complete or end it.

        `final` means that the text is complete, `ended` that the model has ended its turn. With `within_reasoning`,
        only a well-formed call is returned as a call.
        """
        over = final and ended
        if self._body is None:
            opening = self._opening.match(text, position)
            start = skip_space(text, opening.end() if opening else position)
            opens = [self._syntax.section_open + self._syntax.open, self._syntax.open]
            # A delimiter may be the beginning of a longer one.
            begins = (opening.start(1) if opening and opening[1] else position, start)
            if not final and any(may_grow(text, begin, opens) for begin in begins):
                return None
            self._start = self._seek = start if start > position or self.bare or self._headed else position + 1
            self._body = body_reader(self._syntax, self._tools, text, start)
        within = text
        if self._read_far >= _MOST_READ_FAR and (another := self._another.search(text, self._start)):
            within = text[: another.start()]
        body = self._body.read(within, over=over) if self._body is not None else None
        if body is None and not final:
            return None
        if isinstance(body, ReadCall):
            call = self._closed(text, body, final=final)
        else:
            call = self._broken(text, body, final=final, over=over, within_reasoning=within_reasoning)
        if call is not None:
            self._body = None
            followed = body.position if isinstance(body, Broken) else len(within)
            self._read_far += not isinstance(body, ReadCall) and followed - self._start > _FAR
        return call

    def skip_between(self, text: str, position: int, *, final: bool) -> tuple[int, bool] | None:
        """Skip text that may separate calls; return the position after it and whether a call begins there.

        Return None if more text may change the answer.
        """
        start, position = position, skip_space(text, skip(self._between, text, position))
        syntax = self._syntax
        expected = [syntax.separator, syntax.section_close, syntax.close, syntax.open, ";{", ",{"]
        if not final and may_grow(text, position, expected[:4] if not self.bare else expected[4:]):
            return None
        number = re.compile(r"\d{1,9}").match(text, position) if self._counts else None
        if not final and number and may_grow(text, number.end(), [syntax.open]):
            return None
        # A closing and an opening delimiter may begin the same way, like `[#</calls>` and `[#<call>`.
        if not final and any(may_grow(text, n, [syntax.open]) for n in range(start, position) if not text[n].isspace()):
            return None
        if self._headed:
            if not final and may_be_head(text, position):
                return None
            # After the section, a name and a bracket are text.
            closed = self._section_end is not None and self._section_end.search(text, start, position)
            return position, not closed and read_head(syntax, text, position) is not None
        return position, self._next.match(text, position) is not None

    def _closed(self, text: str, call: ReadCall, *, final: bool) -> ReadCall | None:
        """Return a complete call with the position after as much of its closing delimiter as was written.

        Return None if more text may complete the delimiter.
        """
        # Models may write too many braces, or only parts of the closing delimiter.
        position = skip(self._spare, text, call.end)
        end = skip(self._closing, text, position)
        close = self._syntax.close
        complete = final or not close.strip() or text.endswith(self._last, position, end)
        if not complete and may_grow(text, end, [close]):
            return None
        if call.name not in self._tools:
            if self._may_be_json(text):
                return ReadCall(call.end, None)
            call = replace(call, status="unknown_tool") if call.status == "ok" else call
        return replace(call, end=end if end > position else call.end)

    def _broken(
        self, text: str, broken: Broken | None, *, final: bool, over: bool, within_reasoning: bool
    ) -> ReadCall | None:
        """Return a malformed call, up to its closing delimiter, the next call or the end of the turn.

        Its status is `bad_arguments`, or `unclosed` if the completion was cut off within it. If no tool name is found,
        return its opening delimiter only, as text that is not a call; the text after it is read again.
        """
        end = self._start
        if self._may_be_json(text):
            end = broken.position if broken else len(text)
        none = ReadCall(end, None)
        if within_reasoning:
            return none
        if self._may_be_json(text):
            if broken is not None and not broken.no_json:
                return none
            name, arguments = self._guess(text[self._start : end])
            if name not in self._tools:
                return none
            if broken is None:
                return ReadCall(end, name)
            if name is None or not arguments.startswith("{"):
                return none
            return ReadCall(end, name, self._whole(text[self._start : end], name, arguments), "bad_arguments")
        match = self._broken_end.search(text, max(broken.position if broken else 0, self._seek))
        delimiters = [self._syntax.close, self._syntax.section_close, *self._begins]
        # At the end of the text, `<call` may become `<caller`.
        open_ended = match is None or match.end() == len(text) or may_grow(text, match.start(), delimiters)
        if not final and open_ended:
            self._seek = max(self._seek, len(text) - _LONGEST_DELIMITER)
            return None
        end = match.start() if match else len(text)
        raw = text[self._start : end]
        name, arguments = self._guess(raw)
        if name is None or (self._knows_names and name not in self._tools):
            return none
        if match and match[0] not in self._begins:
            end = match.end()
        arguments = self._whole(raw, name, arguments)
        return ReadCall(end, name, arguments, "bad_arguments" if match or over else "unclosed")

    def _may_be_json(self, text: str) -> bool:
        """Return whether the call may be a JSON answer. It is one unless it names a tool."""
        return self._like_json and (self._syntax.style == "json" or text.startswith("{", self._start))

    def _guess(self, raw: str) -> tuple[str | None, str]:
        """Return the name and raw arguments of a malformed call, each None or empty if not found."""
        syntax = self._syntax
        if syntax.style == "json" or raw.startswith("{"):
            keys = "|".join(map(re.escape, (syntax.arguments_key, "arguments", "parameters")))
            arguments = re.search(rf'"(?:{keys})"\s*:\s*(.*?)\s*\}}?\s*$', raw, re.DOTALL)
            name = re.search(rf'"{re.escape(syntax.name_key)}"\s*:\s*"([^"\\\s]{{1,256}})"', raw)
            return name[1] if name else None, arguments[1] if arguments else ""
        ends = [*pieces(syntax.name_close), *pieces(syntax.key_open)]
        end = re.escape(ends[0]) if ends else r"(?!\S)"
        match = re.match(rf"\s*([\w.:/-]{{1,256}})\s*{end}(.*)", raw, re.DOTALL)
        # If only white space follows names in this syntax, any word could be a name: accept only known names.
        if match is None or not (ends or match[1] in self._tools):
            return None, ""
        return match[1], match[2].strip()

    def _whole(self, raw: str, name: str, arguments: str) -> str:
        """Return a malformed call's arguments, or all of `raw` if it is JSON with other words before the arguments."""
        if self._syntax.style != "json" and not raw.startswith("{"):
            return arguments
        before = raw[: raw.rindex(arguments)] if arguments else raw
        keys = "|".join(map(re.escape, (self._syntax.name_key, self._syntax.arguments_key, "arguments", "parameters")))
        other = re.sub(rf'"(?:{keys})"\s*:', "", before).replace(name, "", 1)
        return raw.strip() if re.search(r"\w", other) else arguments


def _is_within(syntax: CallSyntax, piece: str) -> bool:
    """Return whether part of a closing delimiter also occurs within calls, so that it does not show a call's end."""
    within = (*pieces(syntax.name_close), *pieces(syntax.key_open), *pieces(syntax.value_close))
    return set(piece) <= set(JSON_PUNCTUATION) or any(inner.startswith(piece) for inner in within)
