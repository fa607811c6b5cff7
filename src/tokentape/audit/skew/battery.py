"""Texts on which tokenizers are known to differ: scripts, normal forms, digits, white space, code, control tokens.

Each text is short and aims at one thing, so that what fails is nearly minimal already. Groups name what they aim at.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping

_PROSE = (
    "Hello, world! How's it going?",
    "hello world",
    "Don't; we'll, they've, I'M, SHE'S, it’s",
    "eBay, mL, pH, iPhone, McDonald, HTTPServer, parseJSONFile, XMLHttpRequest",
    "The quick brown fox jumps over the lazy dog.",
    "unbelievable antidisestablishmentarianism Pantom Dorm repaid HIV rights",
    "x != y , a . b ? c ! don 't I 'm we 've",
    "e.g. U.S.A. vs. Mr. Smith's 3rd try...",
    "— dashes – and “quotes” ‘single’ «guillemets» …",
)

_SCRIPTS = {
    "latin": "naïve café Zürich Ærøskøbing İstanbul ŁÓDŹ ǅungla ﬁ ﬂ",
    "greek": "Ελληνικά ἀρχή ς σ",
    "cyrillic": "Русский язык, ёлка, Україна",
    "hebrew": "עברית שָׁלוֹם",
    "arabic": "العربية ٣٤٥ لَا ﻻ",
    "devanagari": "हिन्दी क्षत्रिय ज़ १२३",
    "bengali": "বাংলা ভাষা ড়",
    "tamil": "தமிழ் மொழி",
    "thai": "ภาษาไทย ๑๒๓ กำ",
    "georgian": "ქართული ენა",
    "armenian": "Հայերեն և",
    "amharic": "አማርኛ",
    "khmer": "ភាសាខ្មែរ",
    "han": "中文字符，你好。繁體中文 㐀 𠀀",
    "kana": "日本語 カタカナ ｶﾞ ひらがな ゔ が",
    "hangul": "한국어 각 가나다",
    "jamo": "한국 각",
    "mixed": "GPT-4的API是REST吗？yes是的123个",
}

_MARKS = ("é", "ñ", "ö", "각", "が", "ज़", "ệ", "Å", "שָׁ")
_DIGITS = (
    "2023",
    "1",
    "12",
    "123",
    "1234",
    "12345",
    "1234567890",
    "3.14159",
    "1,234,567.89",
    "2026-11-21T15:28:29Z",
    "0x1F",
    "1e-5",
    "½ ² ₂ Ⅷ ④",
    "１２３",
    "٣٤٥٦",
    "v1.2.3",
    "a1b22c333",
    "192.168.0.1:8080",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    " \n",
    "\n ",
    "a b",
    " a",
    "a ",
    "  a",
    "a  b",
    "a   b",
    "a    b",
    "a\tb",
    "a\t\tb",
    "a \tb",
    "a\nb",
    "a \nb",
    "a\n b",
    "a\n\nb",
    "a\n\n\nb",
    "a \n \n b",
    "a\r\nb",
    "\n\nHi",
    "a\u00a0b",
    "a\u2003b",
    "a\u3000b",
    "a\u200bb",
    "a\u2028b",
    "a\ufeffb",
    "\ufeffa",
    "a\x0bb\x0cc\x85d",
    "  leading and trailing  ",
    "x" + " " * 16 + "y",
    "x" + "\n" * 9 + "y",
)
_CODE = (
    "def f(x):\n    return {'a': [1, 2.5e-3, None]}\n",
    "for (int i=0;i<n;++i) { a[i] += b[i]<<2; }  // comment\n",
    '{"name": "f", "arguments": {"x": false, "y": null, "z": ["a"]}}',
    '<div class="a">&amp; &lt;b&gt;</div>',
    "\tif x:\n\t\tpass\n",
    "SELECT * FROM t WHERE a != 'b' AND c <> \"d\";",
    "https://example.org/a/b?c=d&e=f#g",
    "$x^2 + \\frac{1}{2}$ \\begin{align}",
    '```python\nprint("hi")\n```',
    "snake_case camelCase kebab-case SCREAMING_CASE __dunder__",
    "#!/bin/sh\nset -eu\n",
    "a==b a!=b a->b a=>b a::b ///// ------ ****** ####",
    "==\n++\n//\n",
)
_SYMBOLS = (
    "🙂",
    "🫠",
    "👩‍🚀",
    "🇪🇺",
    "👍🏽",
    "❤️",
    "☺",
    "🙂🇪🇺👩‍🚀 mixed 🙂",
    "∑∫√∞≠≤≥",
    "αβγ→δ",
    "①②③",
    "℃ № ™ ﷺ ㎏",
    "𝒳𝔘ℕ",
    "e\u0301\u0302\u0303",
    "a\u034fb",
    "\u202eabc\u202c",
    "▁a▁b ▁",
    "Ġa Ċ Ä",
    "<0x0A> <0xFF>",
    "<unk> <pad> <s> </s> [INST] [UNK] <mask>",
)
_CONTROLS = tuple(f"a{chr(code)}b" for code in (*range(0x20), *range(0x7F, 0xA0)))
_PLANES = ("\ue000", "a\uf8ffb", "\U000f0000", "\U0010fffd", "\ufffd", "\ufffe", "\U0001f9ff")


def texts() -> dict[str, tuple[str, ...]]:
    """All texts by group. Apart from `control_token_texts`, they are the same for every pair of sides."""
    scripts = tuple(_SCRIPTS.values())
    forms = tuple(
        dict.fromkeys(
            unicodedata.normalize(form, text)
            for text in (*_MARKS, *scripts, "e\u0301 \u00e9 \ufb01 \u00a0 x", "\u212b \u2126 \u1e9b\u0323")
            for form in ("NFC", "NFD", "NFKC", "NFKD")
        )
    )
    return {
        "prose": _PROSE,
        "scripts": scripts,
        "normal forms": forms,
        "digits": (*_DIGITS, *(f" {text}" for text in _DIGITS)),
        "white space": _SPACES,
        "code": _CODE,
        "symbols": _SYMBOLS,
        "control characters": _CONTROLS,
        "private use": _PLANES,
        "case": tuple(word.format(w) for w in ("word", "WORD", "Word", "wORD", "été", "ÉTÉ") for word in _AROUND),
    }


_AROUND = ("{}", " {}", "{}'s", "x{}", "{}1", "{}.", "({})", "{}\n", "/{}", "_{}", "\n{}")


def control_token_texts(tokens: Iterable[str]) -> Iterator[str]:
    """Each control token by itself, in words, and with white space around it."""
    for token in tokens:
        yield token
        yield f"a{token}b"
        yield f"a {token} b"
        yield f"a\n{token}\n\nb"


def by_text(groups: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The group of each text, each text once."""
    found: dict[str, str] = {}
    for group, members in groups.items():
        for text in members:
            found.setdefault(text, group)
    return found
