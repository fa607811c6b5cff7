"""What became of a stretch of tokens that is other ids now: where a boundary moved, and in what.

Two levels. A *class* says between which characters a boundary moved. An *artifact* is finer, and is named after the
eight of "phantom edits" (arXiv 2601.14658), with what that list lacks: digits, characters cut apart, control tokens.
The paper's are told by name and example; the rules here are ours, and those for words look at English endings, capitals
and sentence starts only. So compare artifacts with each other, not with the paper's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import normalize

import numpy as np

CLASSES = {
    "control": "letters of a control token on one side, the token itself on the other",
    "bytes": "within a character",
    "whitespace": "white space goes to another token",
    "digits": "within a number",
    "word": "within a word",
    "punctuation": "between other characters",
    "spacing": "other white space, otherwise the same text",
    "text": "other text",
}
"""Of changed stretches; the last two are of text drift."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A finer class."""

    kind: str
    """One of `CLASSES`."""
    meaning: str
    phantom: int | None = None
    """Number of the phantom-edit class that it is after."""


ARTIFACTS = {
    "control": Artifact("control", "letters of a control token on one side, the token itself on the other"),
    "partial-utf8": Artifact("bytes", "a character is cut apart elsewhere, or bytes are no UTF-8"),
    "whitespace-detach": Artifact("whitespace", "white space is a token of its own on one side only", 2),
    "whitespace-run": Artifact("whitespace", "a run of white space is cut elsewhere"),
    "whitespace-shift": Artifact("whitespace", "a space belongs to the other neighbour", 1),
    "digits": Artifact("digits", "a number is cut elsewhere"),
    "acronym": Artifact("word", "capitals come apart elsewhere", 7),
    "tail": Artifact("word", "a plural or possessive ending is split off, or joined", 8),
    "morpheme": Artifact("word", "the cut is at a prefix or an ending on one side", 6),
    "proper-noun": Artifact("word", "a name is cut elsewhere", 5),
    "intra-word": Artifact("word", "another word is cut elsewhere", 4),
    "punctuation": Artifact("punctuation", "other characters are cut elsewhere"),
    "space-dropped": Artifact("spacing", "white space on one side, none on the other", 1),
    "whitespace-substitution": Artifact("spacing", "other white space in the same places", 3),
    "normal-form": Artifact("text", "another Unicode normal form of the same characters"),
    "text": Artifact("text", "other text"),
}
"""By name; of several that fit a stretch the first counts."""

_ORDER = {name: n for n, name in enumerate(ARTIFACTS)}

_AROUND = 64
"""Bytes beside a stretch that are looked at, to see whole words."""

_PREFIX = re.compile(
    "anti|auto|be|bi|co|counter|de|dis|en|ex|extra|fore|hyper|il|im|in|inter|ir|mega|micro|mid|mis|mono|multi|non|out|"
    "over|para|poly|post|pre|pro|pseudo|re|semi|sub|super|tele|trans|tri|un|under|up",
    re.IGNORECASE,
)
_ENDING = re.compile(
    "able|age|al|ally|ance|ation|ed|ely|ence|ent|er|ers|es|est|ful|fully|hood|ible|ic|ical|ies|ify|ily|ing|ings|ion|ions|"
    "ish|ism|ist|ity|ive|ize|ized|izing|less|ly|ment|ments|ness|or|ors|ous|ship|tion|ward|wise",
    re.IGNORECASE,
)
_TAIL = re.compile(r"(?:'s|’s|s'|s’|es|s)(?!\w)")


def artifact(one: Sequence[bytes], other: Sequence[bytes], before: bytes = b"", behind: bytes = b"") -> str:
    """The artifact of a stretch that two tokenizations spell alike with other tokens.

    `one` and `other` are the bytes of the tokens of either side, `before` and `behind` the text around.

    >>> artifact([b" un", b"bel", b"ievable"], [b" unbelievable"])
    'morpheme'
    >>> artifact([b"12", b"3"], [b"123"])
    'digits'
    """
    text = b"".join(one)
    ends = [set(np.cumsum([len(piece) for piece in side]).tolist()) for side in (one, other)]
    moved = sorted(ends[0] ^ ends[1])
    if not moved:
        return "intra-word"  # two ids that spell the same bytes
    whole = before[-_AROUND:] + text + behind[:_AROUND]
    start = len(before[-_AROUND:])
    found = {_at_cut(whole, start + at, one, other) for at in moved}
    return min(found, key=_ORDER.__getitem__)


def text_artifact(left: bytes, right: bytes) -> str:
    """The artifact of a stretch that the two sides spell otherwise."""
    if b"".join(left.split()) != b"".join(right.split()):
        plain = [normalize("NFKC", side.decode("utf-8", "replace")) for side in (left, right)]
        return "normal-form" if plain[0] == plain[1] else "text"
    same_words = left.split() == right.split()
    same_edges = [(side[:1].isspace(), side[-1:].isspace()) for side in (left, right)]
    return "whitespace-substitution" if same_words and same_edges[0] == same_edges[1] else "space-dropped"


def _at_cut(whole: bytes, at: int, one: Sequence[bytes], other: Sequence[bytes]) -> str:
    if whole[at] & 0xC0 == 0x80:
        return "partial-utf8"
    left, right = whole[:at].decode("utf-8", "ignore"), whole[at:].decode("utf-8", "ignore")
    before, behind = left[-1:], right[:1]
    if before.isspace() or behind.isspace():
        if before.isspace() and behind.isspace():
            return "whitespace-run"
        alone = any(piece.isspace() for side in (one, other) for piece in side)
        return "whitespace-detach" if alone else "whitespace-shift"
    if before.isdigit() and behind.isdigit():
        return "digits"
    if _TAIL.match(right) and before.isalpha():
        return "tail"
    if before.isalnum() and behind.isalnum():
        return _in_word(left, right)
    return "punctuation"


def _in_word(left: str, right: str) -> str:
    """Of a cut within a word, `left` and `right` of it."""
    head = _last_word(left)
    rest = _first_word(right)
    word = head + rest
    if len(word) <= 8 and word.isalpha() and word.isupper():
        return "acronym"
    if (_PREFIX.fullmatch(head) and len(rest) >= 3) or (_ENDING.fullmatch(rest) and len(head) >= 3):
        return "morpheme"
    sentence = left[: len(left) - len(head)].rstrip()
    # What stands at the start of a sentence, or of what is seen of the text, has a capital anyway.
    if word[:1].isupper() and word[1:].islower() and sentence and sentence[-1] not in ".!?:\"'“":
        return "proper-noun"
    return "intra-word"


def _last_word(text: str) -> str:
    at = len(text)
    while at and text[at - 1].isalnum():
        at -= 1
    return text[at:]


def _first_word(text: str) -> str:
    at = 0
    while at < len(text) and text[at].isalnum():
        at += 1
    return text[:at]
