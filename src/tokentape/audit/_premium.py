"""Count tokens per byte and per character of a corpus, by language and script, for several tokenizers.

The *premium* of a language is its number of tokens divided by that of a baseline language, on line-by-line translations
(Petrov et al. 2023, arXiv 2305.15425). It shows how much more context, time and money the language takes.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokentape._batches import batched
from tokentape.audit._report import Bar, Bars, Block, Details, Heading, Paragraph, Report, Table
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, NothingToMeasure

COMMON = "Common"
"""The name for characters without a script: digits, punctuation, white space, symbols, emoji."""

_BATCH_LINES = 512
_SCRIPT_NAMES = dict.fromkeys(["CJK", "IDEOGRAPHIC", "HANGZHOU", "KANGXI"], "Han") | {"KATAKANA-HIRAGANA": "Katakana"}
_SCRIPT_NAMES |= dict.fromkeys(["FEMININE", "MASCULINE", "KELVIN", "ANGSTROM"], "Latin")
_NO_SCRIPT = ("MODIFIER", "COMBINING", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "VARIATION")
_WIDTHS = ("FULLWIDTH", "HALFWIDTH", "SMALL", "SUPERSCRIPT", "SUBSCRIPT")
_TWO_WORDS = ("OLD", "NEW", "TAI", "MEETEI", "OL", "LINEAR", "PAHAWH", "NYIAKENG", "CANADIAN", "SYLOTI")


class Line(NamedTuple):
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class PremiumRow:
    """One tokenizer's counts for one language or script."""

    tokenizer: str
    name: str
    lines: int
    characters: int
    bytes: int
    tokens: float
    """Fractional for scripts, because a token with letters of two scripts is split between them by bytes."""
    tokens_per_character: float
    tokens_per_byte: float
    premium: float | None = None
    """Tokens divided by those of the baseline language; None without a baseline, and for scripts."""


@dataclass(frozen=True, slots=True)
class Premium:
    """Rows by language and by script: tokenizers in the given order, each with the most tokens per character first."""

    languages: tuple[PremiumRow, ...]
    scripts: tuple[PremiumRow, ...]
    baseline: str | None


_Counts = dict[tuple[str, str], "np.ndarray[Any, Any]"]
"""Lines, characters, bytes and tokens by tokenizer and name."""


def read_corpus(paths: str | Path | Iterable[str | Path], most_lines: int | None = None) -> Iterator[Line]:
    """Yield the lines of text files and JSON lines files. A text file's name is its language (`de.txt`).

    A JSON line is an object with `text`, and optionally `language` or `lang` (default: the file's name). A path to a
    folder reads all its files. Empty lines are skipped. At most `most_lines` lines of each file are read.

    Raises `InvalidRequest` for a JSON line without `text`, and for a file that is not UTF-8; `NothingToMeasure` for a
    file without text.
    """
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        for file in sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]:
            try:
                with file.open(encoding="utf-8-sig") as lines:
                    texts = filter(str.strip, (line.rstrip("\n") for line in lines))
                    if (first := next(texts, None)) is not None:
                        yield from (_line(file, text) for text in islice(chain([first], texts), most_lines))
                    elif not file.name.startswith("."):  # a language would be missing without a word
                        raise NothingToMeasure(f"{file} has no text: every line is empty")
            except UnicodeDecodeError:
                raise InvalidRequest(f"{file} is not UTF-8 text") from None


def measure_premium(
    tokenizers: Mapping[str, Tokenizer], corpus: Iterable[Line], *, baseline: str | None = None
) -> Premium:
    """Count tokens of a corpus, by language and by script, for each tokenizer.

    The premium is relative to the language `baseline`. It needs the same number of lines in all languages, because
    line n of each language must translate line n of the baseline.

    Raises `NothingToMeasure` if the corpus is empty, `InvalidRequest` if it lacks the baseline or a language has a
    different number of lines.
    """
    languages: _Counts = defaultdict(lambda: np.zeros(4))
    scripts: _Counts = defaultdict(lambda: np.zeros(4))
    for lines in batched(corpus, _BATCH_LINES):
        parts = [_by_script(line.text) for line in lines]
        for name, tokenizer in tokenizers.items():
            encoded = tokenizer.encode_plain_batch([line.text for line in lines])
            for (language, text), sizes, ids in zip(lines, parts, encoded, strict=True):
                languages[name, language] += (1, len(text), len(text.encode()), len(ids))
                for script, tokens in _shares(ids, list(sizes), tokenizer).items():
                    scripts[name, script] += (1, *sizes[script], tokens)
    if not languages:
        raise NothingToMeasure("the corpus has no text: every line is empty")
    base = {} if baseline is None else _baseline(languages, baseline)
    return Premium(tuple(_rows(languages, base)), tuple(_rows(scripts, {})), baseline)


def premium_layout(premium: Premium) -> Report:
    blocks: list[Block] = [
        Paragraph(
            "Tokens of a text, per character (code point) and per UTF-8 byte. Fewer is cheaper. Tokens per character "
            "compare tokenizers on one language. Characters of different languages carry different amounts of "
            "information, so compare languages by translations only."
        )
    ]
    names = list(dict.fromkeys(row.tokenizer for row in premium.languages))
    kinds = {"language": premium.languages, "script": premium.scripts}
    for name in names:
        tables = [_table([row for row in rows if row.tokenizer == name], what) for what, rows in kinds.items()]
        blocks += [Heading(name), *tables]
    plots = [(f"By {what}", rows, "tokens per character", "tokens_per_character") for what, rows in kinds.items()]
    if premium.baseline is not None:
        over = f"tokens relative to {premium.baseline}"
        plots.append((f"Premium over {premium.baseline}", premium.languages, over, "premium"))
    for title, rows, unit, field in plots:
        bars = [
            Bar(f"{row.name}, {row.tokenizer}", getattr(row, field) or 0.0, group=names.index(row.tokenizer))
            for row in sorted(rows, key=lambda row: (row.name, names.index(row.tokenizer)))
        ]
        blocks.append(Details(title, [Bars(bars, unit)]))
    return Report("Token premium", blocks)


def _table(rows: Sequence[PremiumRow], what: str) -> Table:
    head = [what, "lines", "characters", "tokens", "tokens per character", "tokens per byte", "premium"]
    body = []
    for row in rows:
        counts = [f"{many:,.0f}" for many in (row.lines, row.characters, row.tokens)]
        rates = [f"{rate:.3f}" for rate in (row.tokens_per_character, row.tokens_per_byte)]
        body.append([row.name, *counts, *rates, "" if row.premium is None else f"{row.premium:.2f}"])
    shown = len(head) if any(row.premium is not None for row in rows) else len(head) - 1
    return Table(head[:shown], [row[:shown] for row in body], range(1, shown))


def _line(path: Path, text: str) -> Line:
    language = path.name.split(".")[0]
    if ".json" not in path.name:
        return Line(language, text)
    try:
        fields = json.loads(text)
        language = str(next((fields[key] for key in ("language", "lang") if key in fields), language))
        # JSON escapes may spell halves of surrogate pairs.
        valid = [value.encode("utf-8", "replace").decode() for value in (language, fields["text"])]
        return Line(*valid)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InvalidRequest(f'{path}: expected an object like {{"text": "…"}} on every line') from None


@cache
def script_of(char: str) -> str:
    """Return the script of a letter or a mark, by its English name; `COMMON` for anything else.

    For all letters in wide use, the script is the first words of the character's name. Unicode's own property would
    also assign scripts to a few rare marks that are `COMMON` here.

    >>> [script_of(char) for char in "aяあ漢한ア9"]
    ['Latin', 'Cyrillic', 'Hiragana', 'Han', 'Hangul', 'Katakana', 'Common']
    """
    words = unicodedata.name(char, "").split() if unicodedata.category(char)[0] in "LM" else []
    if words and words[0] in _WIDTHS:
        words = words[1:]
    if not words or words[0] in _NO_SCRIPT:
        return COMMON
    name = " ".join(words[:2]) if words[0] in _TWO_WORDS else words[0]
    return _SCRIPT_NAMES.get(words[0], name.title())


def scripts_of(text: str) -> list[str]:
    """Return each character's script. Characters without a script get that of the letter before, else after them."""
    scripts = [script_of(char) for char in text]
    last = next((script for script in scripts if script != COMMON), COMMON)
    for index, script in enumerate(scripts):
        scripts[index] = last = last if script == COMMON else script
    return scripts


def _by_script(text: str) -> dict[str, tuple[int, int]]:
    if text.isascii():
        return {"Latin" if any(map(str.isalpha, text)) else COMMON: (len(text), len(text))}
    chars: dict[str, list[str]] = defaultdict(list)
    for char, script in zip(text, scripts_of(text), strict=True):
        chars[script].append(char)
    return {script: (len(some), len("".join(some).encode())) for script, some in chars.items()}


def _shares(ids: Sequence[int], scripts: Sequence[str], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the number of tokens of each script. A token is divided evenly over the bytes that it spells."""
    if len(scripts) == 1:
        return {scripts[0]: float(len(ids))}
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    lengths = np.array(list(map(len, pieces)))
    spelled = b"".join(pieces).decode("utf-8", "replace")
    numbers = {script: n for n, script in enumerate(scripts)}
    pairs = zip(spelled, scripts_of(spelled), strict=True)
    of_bytes = [numbers.get(script, 0) for char, script in pairs for _ in char.encode()]
    weights = np.repeat(1 / np.maximum(lengths, 1), lengths)
    # U+FFFD, which replaces invalid bytes, is longer than these bytes.
    least = min(len(of_bytes), len(weights))
    sums = np.bincount(of_bytes[:least], weights[:least], minlength=len(scripts))
    sums *= len(ids) / sums.sum()
    return {script: float(sums[number]) for script, number in numbers.items()}


def _baseline(languages: _Counts, baseline: str) -> dict[str, float]:
    lines = {language: int(counts[0]) for (_, language), counts in sorted(languages.items(), key=itemgetter(0))}
    if baseline not in lines:
        raise InvalidRequest(f"the corpus has no language {baseline!r}; choose from {', '.join(sorted(lines))}")
    for language, many in lines.items():
        if many != lines[baseline]:
            counts = f"{baseline} has {lines[baseline]} lines, {language} has {many}"
            raise InvalidRequest(f"{counts}; expected equal numbers: a language's line n must translate {baseline}'s")
    return {name: counts[3] for (name, language), counts in languages.items() if language == baseline}


def _rows(counted: _Counts, base: Mapping[str, float]) -> list[PremiumRow]:
    order = list(dict.fromkeys(name for name, _ in counted))
    rows = []
    for (tokenizer, name), counts in counted.items():
        lines, characters, octets, tokens = counts.tolist()
        rates = tokens / (characters or 1), tokens / (octets or 1)
        premium = tokens / base[tokenizer] if base.get(tokenizer) else None
        rows.append(PremiumRow(tokenizer, name, int(lines), int(characters), int(octets), tokens, *rates, premium))
    return sorted(rows, key=lambda row: (order.index(row.tokenizer), -row.tokens_per_character, row.name))
