"""Texts that are encoded to find a difference: a separate corpus, and texts made from the changes.

Nothing here is taken from the battery of the audit.
"""

from __future__ import annotations

import inspect
import json
import random
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tests.audit.mutator.changes import Change
from tests.audit.mutator.drawing import pair
from tests.audit.mutator.files import TOKENIZER, Model

_MARK = "\u0338"
_LONGEST = 200
_MOST_WITNESSES = 400
_WORDS = (
    "Sphinx of black quartz, judge my vow; they'll say I'D've known it's SHE'S.",
    "Ça alors, l'été à Besançon où naïveté s'écrit ï — œuvre, Œdipe, ĳsvogel.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ζαφείρι δέξου πάγκαλο, βαθῶν ψυχῆς τὸ σῆμα. ΟΔΥΣΣΕΎΣ ς",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "نص حكيم له سر قاطع ﷲ محمد ﷺ ﻻ ٠١٢٣",
    "ऋषियों को सताने वाले दुष्ट क्षत्रिय ॐ ०१२",
    "いろはにほへと ﾁﾘﾇﾙｦ ㌔ ㍿ パーティー が か\u3099",
    "天地玄黃，宇宙洪荒。日月盈昃！𠮷野家 ｱﾍﾟ",
    "키스의 고유조건은 입술끼리 만나야 \u1112\u1161\u11ab",
    "நன்றி வணக்கம் ௧௨ เป็นมนุษย์สุดประเสริฐ ខ្ញុំ ქართული ԱԲԳ አማርኛ",
    "🙈🧑🏽‍💻 👨‍👩‍👧 🇯🇵 ✈️ ☃︎ 1️⃣ 🫨",
    "0 00 000 1234567 3.14159e-10 12,345,678.90 0xDEADBEEF ½ ⅷ ² ९८ 1st 2nd 10th",
    "2024-02-29T23:59:59.999+05:30 v10.20.30-rc1 192.168.10.254:65535 #123 $9.99 50%",
    "FooBarBaz fooBarBaz foo_bar_baz FOO_BAR FOObar __init__ x1y2 HTTPSServer2Go",
)
_RUNS = (
    " ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2028",
    " \n",
    "\n ",
    "\t\n",
    "\u200b",
    "\ufeff",
    "\x00",
    "=",
    "#",
    "0",
)
_AROUND = (
    "{0}",
    " {0}",
    "{0} ",
    "  {0}",
    "a{0}b",
    "a {0} b",
    "\n{0}\n",
    "{0}{0}",
    "{0} {0}",
    "{0}" + _MARK,
    "{0}1",
    ".{0}",
)


@cache
def corpus() -> tuple[str, ...]:
    """Return the texts that are encoded for every mutant."""
    modules = (textwrap, json.decoder, inspect.getmodule(random.Random))
    code = [inspect.getsource(module) for module in modules if module is not None]
    chunks = [text[at : at + 400] for text in code for at in range(0, min(len(text), 12_000), 400)]
    runs = [f"x{sign * n}y" for sign in _RUNS for n in (1, 2, 3, 4, 7, 8, 16, 33)] + [sign * 3 for sign in _RUNS]
    forms = [unicodedata.normalize(form, text) for text in _WORDS for form in ("NFD", "NFKC", "NFKD")]
    cased = [change(text) for text in _WORDS for change in (str.upper, str.lower, str.title)]
    return tuple(dict.fromkeys([*_WORDS, *forms, *cased, *runs, *chunks, *_characters()]))


def _characters() -> Iterator[str]:
    """Every character that a normal form or a case changes, and a sample of all others, some to a text."""
    changed = [c for c in _assigned() if any(unicodedata.normalize(f, c) != c for f in ("NFC", "NFKC", "NFD", "NFKD"))]
    hangul = [c for c in changed if "\uac00" <= c <= "\ud7a3"]
    others = [c for c in changed if not "\uac00" <= c <= "\ud7a3"]
    sample = [c for at, c in enumerate(_assigned()) if at % 11 == 0]
    for characters in (others, hangul[::29], sample):
        for at in range(0, len(characters), 24):
            yield " ".join(characters[at : at + 24])
            yield "".join(characters[at : at + 24])


@cache
def _assigned() -> tuple[str, ...]:
    return tuple(c for c in map(chr, range(0x20, 0x32000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co"))


def concatenations(texts: Sequence[str], count: int = 3000) -> list[str]:
    """Return texts put together from two to four entries of a vocabulary, the same ones each time."""
    rng = random.Random("concatenations")
    return ["".join(rng.choices(texts, k=rng.randrange(2, 5))) for _ in range(count)] if texts else []


def about(a: Model, b: Model, changes: Sequence[Change]) -> list[str]:
    """Return texts made from the entries, tokens and strings that were changed."""
    found: dict[str, None] = {}
    for string in (*_strings(changes), *_entries(a, changes)):
        for spelled in {string, _spelled(string)}:
            if spelled and len(spelled) <= _LONGEST:
                found |= dict.fromkeys(_around(spelled))
    for text in _merge_texts(a, b):
        found |= dict.fromkeys(_around(text, few=True))
    return list(found)


def _around(text: str, *, few: bool = False) -> Iterator[str]:
    for form in _AROUND[:5] if few else _AROUND:
        yield form.format(text)
    if not few:
        yield from (unicodedata.normalize(form, text) for form in ("NFD", "NFC", "NFKC"))
        yield from (text.upper(), text.lower(), text.strip())


def _strings(changes: Iterable[Change]) -> Iterator[str]:
    for change in changes:
        yield from (key for key in change.path if isinstance(key, str))
        yield from _within(change.value)


def _entries(a: Model, changes: Iterable[Change]) -> Iterator[str]:
    """Strings of the list entries in which something was changed, such as what an added token spells."""
    for change in changes:
        value = a.docs.get(change.file)
        for step in change.path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                break
            if isinstance(step, int) and isinstance(value, Mapping):
                yield from _within(value)


def _within(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield key
                yield from _within(item)
        case list() | tuple():
            for inner in value:
                yield from _within(inner)


def _merge_texts(a: Model, b: Model) -> Iterator[str]:
    """Texts in which merges compete that changed their order, or that only one side has."""
    ours, theirs = (model.docs[TOKENIZER].get("model", {}).get("merges") or [] for model in (a, b))
    if ours is theirs or not isinstance(ours, list) or not isinstance(theirs, list):
        return
    ranks, others = ({pair(m): n for n, m in enumerate(merges) if _is_pair(m)} for merges in (ours, theirs))
    first = next(
        (
            n
            for n, (ours_merge, theirs_merge) in enumerate(zip(ours, theirs, strict=False))
            if ours_merge != theirs_merge
        ),
        None,
    )
    if first is None:
        return
    moved = [m for m in {*ranks, *others} if abs(ranks.get(m, 1 << 40) - others.get(m, 1 << 40)) > 1]
    for left, right in moved[:8]:
        yield _spelled(left + right)
        low, high = sorted((ranks.get((left, right), 1 << 40), others.get((left, right), 1 << 40)))
        rivals = [m for m, rank in ranks.items() if low <= rank <= high and (m[0] == right or m[1] == left)]
        random.Random(left + right).shuffle(rivals)
        for before, after in rivals[:_MOST_WITNESSES]:
            yield _spelled(left + right + after if before == right else before + left + right)


def _is_pair(merge: Any) -> bool:
    return (isinstance(merge, str) and " " in merge) or (isinstance(merge, list) and len(merge) == 2)


@cache
def _bytes() -> dict[str, int]:
    """The byte of each character with which GPT-2's tokens are written."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def _spelled(piece: str) -> str:
    """Return the text of a piece: bytes written as characters read back, U+2581 as a space."""
    table = _bytes()
    if all(sign in table for sign in piece):
        return bytes(table[sign] for sign in piece).decode(errors="ignore")
    return piece.replace("▁", " ")
