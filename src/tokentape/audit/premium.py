"""What a language or a script costs in tokens: tokens per byte and per character of a corpus, for several tokenizers.

Where the languages' texts are translations of each other, line by line, the *premium* of one is its tokens over those
of a baseline (Petrov et al. 2023, arXiv 2305.15425): how much more of context, time and money the same content takes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tokentape.audit.report import Bar, Bars, Block, Details, Heading, Paragraph, Report, Table
from tokentape.audit.scripts import COMMON, scripts_of
from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

_LINES_AT_ONCE = 512
_LANGUAGE_FIELDS = ("language", "lang")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a corpus."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class PremiumRow:
    """What one tokenizer makes of one language, or of one script."""

    tokenizer: str
    name: str
    """Of the language or the script."""
    lines: int
    characters: int
    """Code points."""
    octets: int
    """UTF-8 bytes."""
    tokens: float
    """Of scripts a fraction: a token over two scripts counts for each by its bytes."""
    premium: float | None = None
    """Tokens over those of the baseline language; None without a baseline, and for scripts."""

    @property
    def per_character(self) -> float:
        """Tokens per code point."""
        return self.tokens / self.characters if self.characters else 0.0

    @property
    def per_octet(self) -> float:
        """Tokens per UTF-8 byte."""
        return self.tokens / self.octets if self.octets else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokenizer": self.tokenizer,
            "name": self.name,
            "lines": self.lines,
            "characters": self.characters,
            "bytes": self.octets,
            "tokens": self.tokens,
            "tokens_per_character": self.per_character,
            "tokens_per_byte": self.per_octet,
            "premium": self.premium,
        }


@dataclass(frozen=True, slots=True)
class Premium:
    """The whole report: rows by language and by script, tokenizers in the order given, the dearest first."""

    languages: tuple[PremiumRow, ...]
    scripts: tuple[PremiumRow, ...]
    baseline: str | None


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    characters: int = 0
    octets: int = 0
    tokens: float = 0.0


def read_corpus(paths: Iterable[str | Path], most_lines: int | None = None) -> Iterator[Line]:
    """Lines of text files, of which the language is the name (`de.txt`), and of JSON lines.

    A JSON line has `text`, and may have `language` or `lang`; without, it is the file's name. A folder stands for the
    files in it. Empty lines are left out. `most_lines` is how many of each file are read.

    Raises `InvalidRequest` for a JSON line without `text`, and for a file that is not UTF-8.
    """
    for path in _files(paths):
        try:
            with path.open(encoding="utf-8") as file:
                whole = (line.rstrip("\n") for line in file)
                yield from (_line(path, text) for text in islice(filter(str.strip, whole), most_lines))
        except UnicodeDecodeError:
            raise InvalidRequest(f"{path} is not UTF-8 text") from None


def measure(tokenizers: Mapping[str, Tokenizer], corpus: Iterable[Line], *, baseline: str | None = None) -> Premium:
    """Count tokens of a corpus, by language and by script, for each tokenizer.

    `baseline` is the language that the premium is over; its lines must be as many as any other language's, since line n
    of one is the translation of line n of another.

    Raises `InvalidRequest` if the corpus is empty, or there is no such baseline, or lines don't match.
    """
    languages: dict[tuple[str, str], _Counts] = defaultdict(_Counts)
    scripts: dict[tuple[str, str], _Counts] = defaultdict(_Counts)
    rest = iter(corpus)
    while lines := list(islice(rest, _LINES_AT_ONCE)):
        of_script = [_by_script(line.text) for line in lines]
        for name, tokenizer in tokenizers.items():
            for line, parts, ids in zip(
                lines, of_script, tokenizer.encode_plain_batch([line.text for line in lines]), strict=True
            ):
                _add(languages[name, line.language], len(line.text), len(line.text.encode()), len(ids))
                for script, tokens in _shares(line.text, ids, parts, tokenizer).items():
                    _add(scripts[name, script], *parts.get(script, (0, 0)), tokens)
    if not languages:
        raise InvalidRequest("the corpus has no text")
    base = _baseline(languages, baseline) if baseline is not None else {}
    return Premium(
        tuple(_rows(languages, {key: base.get(key[0], 0) for key in languages} if base else {})),
        tuple(_rows(scripts, {})),
        baseline,
    )


def premium_layout(found: Premium) -> Report:
    """Return the report as blocks: a table per tokenizer and, for languages and scripts, plots."""
    blocks: list[Block] = [
        Paragraph(
            "Tokens of a text, per character (code point) and per UTF-8 byte. Fewer is cheaper. Tokens per character "
            "compare tokenizers on one language. Across languages characters say different amounts, so only "
            "translations compare."
        )
    ]
    names = list(dict.fromkeys(row.tokenizer for row in found.languages))
    for name in names:
        blocks.append(Heading(name))
        blocks += [
            _table([row for row in rows if row.tokenizer == name], what)
            for what, rows in (("language", found.languages), ("script", found.scripts))
        ]
    for what, rows in (("language", found.languages), ("script", found.scripts)):
        ordered = sorted(rows, key=lambda row: (row.name, names.index(row.tokenizer)))
        blocks.append(Details(f"By {what}", [_bars(ordered, names, "tokens per character", "per_character")]))
    if found.baseline is not None:
        unit = f"tokens over those of {found.baseline}"
        ordered = sorted(found.languages, key=lambda row: (row.name, names.index(row.tokenizer)))
        blocks.append(Details(f"Premium over {found.baseline}", [_bars(ordered, names, unit, "premium")]))
    return Report("Token premium", blocks)


def _bars(rows: Sequence[PremiumRow], names: Sequence[str], unit: str, field: str) -> Bars:
    return Bars(
        [
            Bar(f"{row.name}, {row.tokenizer}", getattr(row, field) or 0.0, group=names.index(row.tokenizer))
            for row in rows
        ],
        unit,
    )


def _table(rows: Sequence[PremiumRow], what: str) -> Table:
    priced = any(row.premium is not None for row in rows)
    head = [what, "lines", "characters", "tokens", "tokens/character", "tokens/byte"]
    body = [
        [
            row.name,
            f"{row.lines:,}",
            f"{row.characters:,}",
            f"{row.tokens:,.0f}",
            f"{row.per_character:.3f}",
            f"{row.per_octet:.3f}",
            *([f"{row.premium:.2f}" if row.premium is not None else ""] if priced else []),
        ]
        for row in rows
    ]
    return Table([*head, *(["premium"] if priced else [])], body, range(1, len(head) + 1))


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else (path,)


def _line(path: Path, text: str) -> Line:
    language = path.name.split(".")[0]
    if ".json" not in path.name:
        return Line(language, text)
    try:
        fields = json.loads(text)
        found = next((fields[key] for key in _LANGUAGE_FIELDS if key in fields), language)
        return Line(_valid(str(found)), _valid(fields["text"]))
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InvalidRequest(f'{path} has a line that is not {{"text": …}}') from None


def _valid(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON's escapes may spell."""
    return text.encode("utf-8", "replace").decode()


def _by_script(text: str) -> dict[str, tuple[int, int]]:
    """Characters and bytes of each script."""
    if text.isascii():
        script = "Latin" if any(map(str.isalpha, text)) else COMMON
        return {script: (len(text), len(text))}
    counts: dict[str, list[int]] = {}
    for char, script in zip(text, scripts_of(text), strict=True):
        one = counts.setdefault(script, [0, 0])
        one[0] += 1
        one[1] += len(char.encode())
    return {script: (characters, octets) for script, (characters, octets) in counts.items()}


def _shares(
    text: str, ids: Sequence[int], parts: Mapping[str, tuple[int, int]], tokenizer: Tokenizer
) -> dict[str, float]:
    """Tokens of each script: each token split over the bytes that it spells."""
    if len(parts) == 1:
        return dict.fromkeys(parts, float(len(ids)))
    lengths = np.array([len(tokenizer.token_bytes(token_id)) for token_id in ids])
    numbers = {script: n for n, script in enumerate(parts)}
    spelled = b"".join(map(tokenizer.token_bytes, ids))
    said = spelled.decode("utf-8", "replace") if spelled != text.encode() else text
    named = [(numbers.get(script, 0), len(char.encode())) for char, script in zip(said, scripts_of(said), strict=True)]
    octets = np.repeat([number for number, _ in named], [size for _, size in named])
    weights = np.repeat(1 / np.maximum(lengths, 1), lengths)
    # What is no character spells a longer one, U+FFFD: then the two have not as many bytes.
    least = min(len(octets), len(weights))
    sums = np.bincount(octets[:least], weights[:least], minlength=len(parts))
    sums *= len(ids) / sums.sum()
    return {script: float(sums[number]) for script, number in numbers.items()}


def _add(counts: _Counts, characters: int, octets: int, tokens: float) -> None:
    counts.lines += 1
    counts.characters += characters
    counts.octets += octets
    counts.tokens += tokens


def _baseline(languages: Mapping[tuple[str, str], _Counts], baseline: str) -> dict[str, float]:
    """Tokens of the baseline language, by tokenizer."""
    there = sorted({language for _, language in languages})
    if baseline not in there:
        raise InvalidRequest(f"there is no language {baseline!r} in the corpus; there are {', '.join(there)}")
    lines = {language: counts.lines for (_, language), counts in languages.items()}
    other = [language for language in there if lines[language] != lines[baseline]]
    if other:
        raise InvalidRequest(
            f"a premium needs translations, line by line: {baseline} has {lines[baseline]} lines, {other[0]} has "
            f"{lines[other[0]]}"
        )
    return {name: counts.tokens for (name, language), counts in languages.items() if language == baseline}


def _rows(counted: Mapping[tuple[str, str], _Counts], base: Mapping[tuple[str, str], float]) -> list[PremiumRow]:
    order = {name: n for n, name in enumerate(dict.fromkeys(name for name, _ in counted))}
    rows = [
        PremiumRow(
            *key, one.lines, one.characters, one.octets, one.tokens, one.tokens / base[key] if base.get(key) else None
        )
        for key, one in counted.items()
    ]
    return sorted(rows, key=lambda row: (order[row.tokenizer], -row.per_character, row.name))
