"""Completions that parsers are compared on: as the template writes them, sloppy, cut off, hostile.

All are made of what the template at hand writes for a turn, so that one list serves every family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokentape.chat import _grammar as grammar
from tokentape.chat._assistant_format import AssistantFormat
from tokentape.chat._certification import written_turn
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

Kind = Literal["well-formed", "sloppy", "truncated", "hostile"]

_LAST_PIECE = re.compile(rf"\s*(?:{MARK.pattern}|</[^<>]*>|\]|```)\s*$")


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled ids, with a name for what is special about them."""

    kind: Kind
    name: str
    ids: tuple[int, ...]
    """With the stop token, if the model stopped."""
    ended: bool


def completions(
    renderer: Renderer, setup: Setup, *, content_of_calls: str | None, end_of_call: str, single_call: bool
) -> Iterator[Completion]:
    """All completions of one template, see `families.Family` for the arguments.

    `single_call`: the template refuses parallel calls.
    """
    tokenizer, form = renderer.tokenizer, renderer.format(setup)
    stops = {c.mark: c.id for c in tokenizer.controls if c.id in renderer.stop_ids(setup)}
    written_stops: dict[bool, int] = {}
    """What the template ends a turn with, by whether the turn calls a tool."""

    def written(turn: Message) -> str | None:
        """Marked text of a turn, without the stop token."""
        calls = turn.get("tool_calls") or ()
        if calls and not turn["content"]:
            turn = {**turn, "content": content_of_calls}
        try:
            found = written_turn(renderer, setup, turn)
        except TemplateRefused:
            return None
        if found is None:
            return None
        text = found[1]
        if len(calls) == 1 and "measure" in text:
            text += tokenizer.mark_controls(end_of_call)
        for mark, stop_id in stops.items():
            if text.endswith(mark):
                written_stops.setdefault(bool(calls), stop_id)
                text = text.removesuffix(mark)
        return text

    def made(kind: Kind, name: str, text: str, *, calls: bool, ended: bool = True) -> Completion:
        ids = tokenizer.encode_after_control(text).ids
        stop = written_stops.get(calls, min(stops.values()))
        return Completion(kind, name, (*ids, stop) if ended else tuple(ids), ended)

    for name, turn in grammar.TURNS.items():
        text = None if single_call and name == "parallel calls" else written(turn)
        if text is not None:
            yield made("well-formed", name, text, calls="tool_calls" in turn)
    texts = {name: text for name, turn in grammar.TURNS.items() if (text := written(turn)) is not None}
    for name, text in _sloppy(texts, form).items():
        yield made("sloppy", name, text, calls=name != "reasoning opened again")
    for name, text in _truncated(texts).items():
        yield made("truncated", name, text, calls=False, ended=False)
    for name, turn in _hostile_turns(tokenizer.spell_marks(texts["call"])).items():
        if (text := written(turn)) is not None:
            yield made("hostile", name, text, calls="tool_calls" in turn)
    for name, text in _hostile(texts).items():
        yield made("hostile", name, text, calls=name != "a stray control token")
    half = tokenizer.encode_after_control("A half \U0001fae0").ids[:-1]
    stop = made("hostile", "", "", calls=False).ids[-1]
    yield Completion("hostile", "half a character", (*half, stop), ended=True)


def _sloppy(texts: Mapping[str, str], form: AssistantFormat) -> dict[str, str]:
    call = texts["call"]
    _, _, after = texts.get("content and call", "").partition("answerword.")
    found = {
        "no white space": re.sub(rf"\s+(?={MARK.pattern}|<)|(?<=[>\udc00-\udfff])\s+", "", call),
        "more white space": re.sub(rf"({MARK.pattern})", r"\1\n", call) + "\n",
        "call not closed": _LAST_PIECE.sub("", call),
        "unknown tool": call.replace("measure", "weigh"),
        "text behind a call": f"{call}\nAn afterword.",
    }
    if "measure" in after:
        found["a call twice"] = call + after
    if call.rstrip().endswith("}") and "here" in call:
        del found["call not closed"]
    arguments = re.search(r'\{\s*"place"\s*:\s*"here"\s*\}', call)
    if arguments is not None:
        around = call[: arguments.start()], call[arguments.end() :]
        found["arguments as a string"] = json.dumps(arguments[0]).join(around)
        found["line break in a string"] = '{"place": "one\ntwo"}'.join(around)
        found["arguments null"] = "null".join(around)
    else:
        found["Python's words"] = re.sub("true|false|null", _as_python, texts["typed arguments"])
    if form.channels is not None:
        found["recipient behind the channel"] = re.sub(rf"^(\s*\S+?)({MARK.pattern})(\w+)", r"\2\3\1", call)
    reasoning = form.reasoning
    if reasoning is not None and form.channels is None and "reasoning and call" in texts:
        found["reasoning not closed before a call"] = texts["reasoning and call"].replace(reasoning.close.strip(), "")
        if reasoning.opened_by_prompt:
            found["reasoning opened again"] = reasoning.open + texts["reasoning"]
    return found


def _truncated(texts: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, turn, last in (
        ("in content", "content", "An answerw"),
        ("in reasoning", "reasoning", "A thoughtw"),
        ("in a tool's name", "call", "measu"),
        ("behind a tool's name", "call", "measure"),
        ("in a value", "call", "her"),
    ):
        if turn in texts and last in texts[turn]:
            at = texts[turn].rindex(last) + len(last)
            found[name] = texts[turn][:at]
    if _LAST_PIECE.search(texts["call"]):
        found["before the call's end"] = _LAST_PIECE.sub("", texts["call"])
    return found


def _hostile_turns(call: str) -> dict[str, Message]:
    """Turns whose text looks like something else; `call` is a call in letters."""
    opening, _, closing = call.partition("measure")

    def calling(arguments: Mapping[str, Any]) -> Message:
        return {"role": "assistant", "content": "", "tool_calls": [grammar.call(1, arguments)]}

    return {
        "a call in letters": {"role": "assistant", "content": f"Write {call} to call."},
        "reasoning in letters": {"role": "assistant", "content": "Write <think> and </think> to think."},
        "delimiters in a value": calling({"place": f"a {closing.strip()[-16:]} b {opening.strip()[-16:]} c"}),
        "JSON in a value": calling({"place": '{"name": "measure", "arguments": {"place": "there"}}'}),
        "deep arguments": calling({"place": "here", "options": json.loads('{"a":' * 40 + "{}" + "}" * 40)}),
        "a long number": calling({"place": "here", "count": 123456789012345678901234567890}),
        "a look-alike of another type": calling({"place": "true", "count": 1}),
    }


def _hostile(texts: Mapping[str, str]) -> dict[str, str]:
    call = texts["call"]
    found = {
        "an opening delimiter alone": call[: call.index("measure")],
        "an opening delimiter, then text": call[: call.index("measure")] + " is how calls begin.",
        "a stray control token": "An answer" + (MARK.findall(call) or [""])[-1] + "word.",
        "delimiters doubled": "".join(f"{piece}{piece}" if MARK.fullmatch(piece) else piece for piece in _pieces(call)),
        "a broken value": call.replace("here", 'he"re'),
    }
    if '"here"' in call:
        found["JSON not closed"] = call.replace('"here"}', '"here"', 1)
        found["NaN"] = call.replace('"here"', "NaN")
        found["a key twice"] = call.replace('"place"', '"place": "gone", "place"')
        found["half a surrogate"] = call.replace('"here"', '"h\\ud83de"')
    return {name: text for name, text in found.items() if text != call}


def _as_python(word: re.Match[str]) -> str:
    return {"true": "True", "false": "False", "null": "None"}[word[0]]


def _pieces(text: str) -> list[str]:
    return re.split(f"({MARK.pattern})", text)
