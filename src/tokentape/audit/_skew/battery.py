"""The built-in inputs of an audit: texts on which tokenizers are known to differ, texts made from parts, conversations.

Each text is short and tests one thing, named by its group, so a text that fails is nearly minimal. Servers and trainers
receive conversations unchanged, so content is text and arguments are objects, which both accept.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from jinja2 import nodes

from tokentape.audit._model_files import changed_entries
from tokentape.audit._skew.backends import Backend, SkewChat
from tokentape.audit._skew.merge_tables import Merge, applied_merges
from tokentape.audit._skew.parts import Spec, is_byte_level, part_of
from tokentape.chat import _grammar as grammar
from tokentape.chat._byte_level import text_of_byte_piece
from tokentape.chat._template import ChatTemplate, parse_template
from tokentape.engines._tokenizing import with_text_arguments
from tokentape.types import Message, Tool

FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
_COMPOSED = ("e\u0301 \u00e9 \ufb01 \u00a0 x", "\u212b \u2126 \u1e9b\u0323")
_INVISIBLE = (
    *"\u00ad\u034f\u061c\u115f\u180e\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202c\u202e\u2060\u2062\u2066",
    *"\u2069\ufe0e\ufe0f\ufeff\ufff9\U000e0001\U000e0061",
)
_WORDS = ("word", "WORD", "Word", "wORD", "été", "ÉTÉ")
_AROUND = ("{}", " {}", "{}'s", "x{}", "{}1", "{}.", "({})", "{}\n", "/{}", "_{}", "\n{}")


def texts() -> dict[str, tuple[str, ...]]:
    """Return the texts that every pair of backends encodes, by group."""
    groups = json.loads(Path(__file__).with_name("battery.json").read_text(encoding="utf-8"))
    composed = [*groups.pop("marks"), *groups["scripts"], *_COMPOSED]
    return {
        **{name: tuple(members) for name, members in groups.items()},
        "digits": (*groups["digits"], *(f" {text}" for text in groups["digits"])),
        "normal forms": tuple(dict.fromkeys(unicodedata.normalize(form, t) for t in composed for form in FORMS)),
        "control characters": tuple(f"a{chr(code)}b" for code in (*range(0x20), *range(0x7F, 0xA0))),
        "invisible characters": tuple(f"a{character}b" for character in _INVISIBLE),
        "case": tuple(pattern.format(word) for word in _WORDS for pattern in _AROUND),
    }


def control_token_texts(tokens: Iterable[str]) -> Iterator[str]:
    """Yield texts with each control token: alone, between letters, within whitespace, and before a combining character.

    A normalizer may merge this character, U+0338, with the token's last one. It matters only for `normalized` tokens.
    """
    for token in tokens:
        yield token
        yield f"a{token}b"
        yield f"a {token} b"
        yield f"a\n{token}\n\nb"
        yield f"{token}\u0338"


def by_text(groups: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Map each text to its group, or to the first of its groups."""
    group_of: dict[str, str] = {}
    for group, members in groups.items():
        for text in members:
            group_of.setdefault(text, group)
    return group_of


_LONGEST = 200
_MOST_MERGES = 200
_MOST_RIVALS = 200
_MOST_CHANGED = 20
_LONG = 400
_MANY_TOOLS = 8
_MANY_TURNS = 12
_REPLACING = ("replace", "removeprefix", "removesuffix")
_AT_ONCE = 24
_BESIDE = ("{}", " {}", "a{}b", "{} {}", "{}\u0338", "{}1")
_RARE = {"L": "\ua66e", "M": "\ua66e", "N": "\ua9d1", "Z": "\u1680", "P": "\u2e19", "S": "\u2e19"}
"""A rare character for each major Unicode category. No merge joins it to the character before it."""


def part_texts(a: Backend, b: Backend, differing: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return texts by group: each token's text, and texts made for the parts named in `differing`."""
    specs = [side.facts.spec for side in (a, b) if side.facts.spec is not None]
    spellings = vocabulary_texts(*specs)
    pieces = [side.facts.tables.get("pieces", {}) for side in (a, b)]
    spellings |= dict.fromkeys(_text(piece, byte_level=False) for piece in {**pieces[0], **pieces[1]})
    if len(specs) == 1:  # the other side's merges are unknown
        spellings |= dict.fromkeys(map(merged_text, spellings))
    by_group = {"vocabulary": tuple(spellings)}
    if len(specs) == 1:
        by_group["competing merges"] = tuple(dict.fromkeys(map(merged_text, _competing_texts(specs[0]))))
    if all(pieces):
        by_group["changed pieces"] = tuple(
            dict.fromkeys(_overlapping(changed_entries(*pieces), {**pieces[0], **pieces[1]}))
        )
    parts = set(differing)
    if parts & {"merges", "settings"}:
        by_group["merges"] = tuple(dict.fromkeys(_merge_texts(*specs)))
    if parts & {"normalizer", "pre_tokenizer", "settings"}:
        strings = {text for part in parts for spec in specs for text in _strings(part, spec)}
        by_group["strings of the parts"] = tuple(
            form.format(text, text) for text in sorted(strings) for form in _BESIDE
        )
        by_group["characters"] = _characters()
    return by_group


def token_texts(token: str) -> list[str]:
    """Return texts that spell a token, alone and next to characters that its flags or a normalizer react to."""
    forms = [unicodedata.normalize("NFC", token), token.upper(), token.lower()]
    around = ("{}", "a{}b", " {} ", "a {} b", "{}\u0338", "{}\u0301", "\n{}\n", "{}{}", "\u0338{}")
    return list(dict.fromkeys([*(form.format(token, token) for form in around), *forms]))


def vocabulary_texts(*specs: Spec) -> dict[str, None]:
    """Return a dictionary with the text of each token in the vocabularies as a key, if it is valid text."""
    spellings: dict[str, None] = {}
    seen: set[tuple[bool, str]] = set()
    for spec in specs:
        vocab, byte_level = part_of(spec, "vocabulary"), is_byte_level(spec)
        pieces = vocab if isinstance(vocab, Mapping) else (entry[0] for entry in vocab)
        new = {(byte_level, piece): None for piece in pieces if (byte_level, piece) not in seen}
        seen.update(new)
        spellings |= dict.fromkeys(_text(piece, byte_level=byte_level) for _, piece in new)
    spellings.pop("", None)
    return spellings


def merged_text(text: str) -> str:
    """Append a rare character, so that a tokenizer must merge and can't look up the whole word in its vocabulary."""
    return text + _RARE.get(unicodedata.category(text[-1])[0], "")


def _text(piece: str, *, byte_level: bool) -> str:
    return text_of_byte_piece(piece) if byte_level else piece.replace("▁", " ")


def _merge_texts(a: Spec, b: Spec) -> Iterator[str]:
    """Yield texts in which a merge that moved, or that one side lacks, competes with other merges."""
    byte_level = is_byte_level(a)
    ours, theirs = (dict.fromkeys(applied_merges(tuple(part_of(spec, "merges")))) for spec in (a, b))
    lacking = [merge for merge in {**ours, **theirs} if merge not in ours or merge not in theirs]
    common = ([merge for merge in ranks if merge in others] for ranks, others in ((ours, theirs), (theirs, ours)))
    moved = [merge for pair in zip(*common, strict=True) if pair[0] != pair[1] for merge in pair]
    for merge in islice(dict.fromkeys([*lacking, *moved]), _MOST_MERGES):
        if len(merge) != 2:
            continue
        left, right = merge
        yield from (around.format(_text(left + right, byte_level=byte_level)) for around in ("{}", " {}", "a{}", "{}a"))
        rivals = (rival for rival in {**ours, **theirs} if len(rival) == 2 and (rival[0] == right or rival[1] == left))
        for rival in islice(rivals, _MOST_RIVALS):
            yield _text(
                left + right + rival[1] if rival[0] == right else rival[0] + left + right, byte_level=byte_level
            )


def _competing_texts(spec: Spec) -> Iterator[str]:
    """Yield texts in which a merge competes for a piece with the rivals nearest in rank, which it would pass first."""
    byte_level = is_byte_level(spec)
    at_piece: dict[str, tuple[list[Merge], list[Merge]]] = {}
    applied = [merge for merge in applied_merges(tuple(part_of(spec, "merges"))) if len(merge) == 2]
    ranks: dict[Merge, int] = {merge: rank for rank, merge in enumerate(applied)}
    for merge in ranks:
        for piece, begins in ((merge[1], 0), (merge[0], 1)):
            at_piece.setdefault(piece, ([], []))[begins].append(merge)
    for piece, (ending, beginning) in at_piece.items():
        by_rank = [(ranks[merge], side, merge) for side, some in enumerate((ending, beginning)) for merge in some]
        for ordered in (sorted(by_rank), sorted(by_rank, reverse=True)):
            last: list[Merge | None] = [None, None]
            for _, side, merge in ordered:
                last[side] = merge
                if (rival := last[1 - side]) is not None:
                    before, after = (merge, rival) if side == 0 else (rival, merge)
                    if text := _text(before[0] + piece + after[1], byte_level=byte_level):
                        yield text


def _overlapping(changed: Iterable[str], pieces: Iterable[str]) -> Iterator[str]:
    """Yield texts in which changed pieces compete with other pieces: words in which two pieces overlap."""
    for piece in islice(changed, _MOST_CHANGED):
        pairs = (pair for neighbor in pieces for pair in ((neighbor, piece), (piece, neighbor)))
        joined = (
            before + after[n:]
            for before, after in pairs
            for n in range(1, min(len(before), len(after)))
            if before.endswith(after[:n])
        )
        yield from (_text(text, byte_level=False) for text in islice(joined, _MOST_RIVALS))


def _strings(part: str, spec: Spec) -> Iterator[str]:
    """Yield the short strings that a part contains, such as patterns and replacements."""
    waiting: list[Any] = [part_of(spec, part)] if part not in ("merges", "vocabulary") else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and 0 < len(value) <= _LONGEST:
            yield value.replace("{", "").replace("}", "")
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


@cache
def _characters() -> tuple[str, ...]:
    """Return texts with every assigned character up to U+1FFFF, several per text, but only few of Hangul and Han."""
    characters = [c for c in map(chr, range(0x20, 0x20000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    rare = [c for c in characters if not ("\u3400" <= c <= "\u9fff" or "\uac00" <= c <= "\ud7a3") or ord(c) % 29 == 0]
    groups: Iterable[list[str]] = (rare[start : start + _AT_ONCE] for start in range(0, len(rare), _AT_ONCE))
    return tuple(text for group in groups for text in (" ".join(group), "".join(group)))


_DATA = json.loads(Path(__file__).with_name("conversations.json").read_text(encoding="utf-8"))


def conversations(control: str | None = None) -> Iterator[SkewChat]:
    """Yield the built-in conversations, roughly from short to long.

    The text of some messages contains `control`, which is the spelling of a control token.
    """
    user, system, call = _user("What is a questionword?"), grammar.SYSTEM, grammar.TURNS["call"]
    yield SkewChat((user,), name="one question")
    yield SkewChat((user,), generate=False, name="one question, no generation prompt")
    yield SkewChat((system, user), name="system and question")
    strange: Tool = _DATA["a strange tool"]
    for what, tool in {
        "a tool": grammar.TOOL,
        "a strange tool": strange,
        "no arguments": _DATA["no arguments"],
    }.items():
        yield SkewChat((user,), (tool,), name=f"tools: {what}")
        yield SkewChat((system, user), (tool,), name=f"tools, system: {what}")
    yield SkewChat((system, user), (grammar.TOOL, strange), name="two tools")
    nested: Tool = _DATA["a nested tool"]
    yield SkewChat((user,), (nested,), name="tools: a nested tool")
    named = [{**nested, "function": {**nested["function"], "name": f"tools.name_{n}"}} for n in range(_MANY_TOOLS)]
    yield SkewChat((user,), (*named, nested, grammar.TOOL, nested), name="many tools, one twice")
    for name, turn in grammar.TURNS.items():
        tools = (grammar.TOOL,) if "call" in name or "argument" in name else ()
        yield SkewChat((user, turn), tools, generate=False, name=f"answer: {name}")
        if turn.get("tool_calls"):
            yield SkewChat((user, with_text_arguments(turn)), tools, generate=False, name=f"text args: {name}")
    for name, text in _DATA["said"].items():
        yield SkewChat((_user(text),), name=f"user says {name}")
        yield SkewChat(({"role": "system", "content": text}, user), name=f"system says {name}")
        yield SkewChat((system, user, {"role": "assistant", "content": text}, user), name=f"assistant says {name}")
        yield SkewChat((user, {**grammar.TURNS["reasoning"], "reasoning_content": text}), name=f"reasoning says {name}")
        said: Message = {**call, "content": text, "tool_calls": [grammar.call(1, {"place": text})]}
        messages = ({"role": "system", "content": text}, _user(text), said, grammar.result(1, text))
        yield SkewChat(messages, (grammar.TOOL,), name=f"all say {name}, with tools")
    yield SkewChat(({"role": "developer", "content": "A developerword."}, user), name="developer")
    yield SkewChat((user, {"role": "assistant", "content": None}, user), name="content is None")
    yield SkewChat(({**user, "name": "nameword"},), name="a user with a name")
    yield SkewChat((user, user), name="equal messages in a row")
    yield _called(user, {**call, "tool_calls": call["tool_calls"] * 2}, "ok", "equal calls in a row")
    yield SkewChat((_user(" ".join(f"longword{n}" for n in range(_LONG))),), name="a long question")
    answers = [{"role": "assistant", "content": f"An answerword {n}."} for n in range(_MANY_TURNS)]
    turns = (message for n, answer in enumerate(answers) for message in (_user(f"A question {n}?"), answer))
    yield SkewChat((system, *turns, user), name="a long conversation")
    yield SkewChat((user, *answers[:2], user), name="two answers in a row")
    results = [grammar.result(n, f"result {n}") for n in (1, 2, 3)]
    for order in (results, results[::-1]):
        yield SkewChat((user, grammar.THREE_CALLS, *order), (grammar.TOOL,), name="three calls and results")
    flags: dict[str, Any] = {"place": "x", "exact": False, "options": {"deep": None, "flag": True}, "ratio": 1e-7}
    typed: Message = {"role": "assistant", "content": "", "tool_calls": [grammar.call(1, flags)]}
    yield _called(user, dict(call, content=None), "ok", "call with content None")
    yield _called(user, typed, "true", "booleans and None")
    function = {"name": strange["function"]["name"], "arguments": {"query": "x"}}
    named_call: Message = {**call, "tool_calls": [{**grammar.call(1, {}), "function": function}]}
    yield SkewChat((user, named_call), (strange,), generate=False, name="call of a strange tool")
    for name, arguments in _DATA["arguments"].items():
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [grammar.call(1, arguments)]}
        yield _called(user, calling, "ok", f"arguments: {name}")
    yield _called(user, call, '{"ok": true, "text": "<é & 日本>"}', "result in JSON")
    if control is not None:
        yield SkewChat((_user(f"a{control}b"),), name="user spells a control token")
        yield _called(user, call, f"a {control} b", "result spells a control token")
    for name in grammar.NAMES:
        tools = () if grammar.NO_TOOLS in name else (grammar.TOOL,)
        for number, (history, turn, new) in enumerate(grammar.conversations(name)):
            yield SkewChat((*history, turn, *new), tools, name=f"{name} {number}")


def template_conversations(sources: Iterable[str]) -> Iterator[SkewChat]:
    """Yield conversations in which each role's text has the strings that templates look for or replace."""
    user = _user("What is a questionword?")
    strings = [text for source in sources for text in (*ChatTemplate(source).compared.strings, *_replaced(source))]
    for text in dict.fromkeys(strings):
        for content in (text, f"a {text} b"):
            yield SkewChat((_user(content),), name=f"user says {text}")
            yield SkewChat(({"role": "system", "content": content}, user), name=f"system says {text}")
            yield SkewChat((user, {"role": "assistant", "content": content}, user), name=f"assistant says {text}")
            yield _called(user, grammar.TURNS["call"], content, f"result says {text}")


def _replaced(source: str) -> Iterator[str]:
    tree = parse_template(source)
    calls: list[nodes.Call | nodes.Filter] = [*tree.find_all(nodes.Call), *tree.find_all(nodes.Filter)]
    for call in calls:
        name = call.name if isinstance(call, nodes.Filter) else getattr(call.node, "attr", "")
        texts = [argument.value for argument in call.args[:1] if isinstance(argument, nodes.Const)]
        if name in _REPLACING and texts and str(texts[0]).strip():
            yield str(texts[0])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _called(user: Message, turn: Message, result: str, name: str) -> SkewChat:
    return SkewChat((user, turn, grammar.result(1, result)), (grammar.TOOL,), name=name)
