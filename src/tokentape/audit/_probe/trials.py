"""Make the trials of the probe, each a request to replace one word of a sentence, and classify the completions.

The probe follows the tokenization-consistency probe of arXiv 2601.14658, which does not publish its sentences and
prompts. Ours are chosen so that every class of phantom edits can occur.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeAlias

from tokentape._alignment import first_difference
from tokentape.audit._tokendiff.kinds import boundary_artifact, text_artifact
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, NothingToMeasure
from tokentape.types import Message

WORDINGS = {
    "another word": (
        'Replace the word "{target}" in the text below with another word of your choice. Change nothing else. Answer '
        "with the whole text only.\n\n{text}"
    ),
    "similar word": (
        'In the following text, put a different word with a similar meaning in place of "{target}", and keep every '
        "other character as it is. Write out the complete text and nothing besides.\n\n{text}"
    ),
}

OutcomeKind: TypeAlias = Literal["replaced", "unchanged", "phantom", "spacing", "other"]

KINDS: dict[OutcomeKind, str] = {
    "replaced": "a different word is in its place",
    "unchanged": "the same word with the same ids",
    "phantom": "the same bytes with different ids: a phantom edit, byte-strict",
    "spacing": "the same word, different ids and whitespace: a phantom edit only if whitespace is normalized",
    "other": "the sentence did not come back: refused, cut off, the word left out, or other words changed too",
}

BUILT_IN = Path(__file__).with_name("sentences.txt")

Sentence: TypeAlias = tuple[str, str, str]
"""The text before the target word, the word, and the text after it."""

_MOST_BETWEEN = 120


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    """A digest of all other fields."""
    before: str
    target: str
    after: str
    wording: str
    repetition: int
    """The sample's number, from 0; at temperature 0 there is only one sample."""

    @property
    def text(self) -> str:
        return self.before + self.target + self.after

    @property
    def messages(self) -> tuple[Message, ...]:
        prompt = WORDINGS[self.wording].format(target=self.target, text=self.text)
        return ({"role": "user", "content": prompt},)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the model did with the target word, as found by comparing ids."""

    kind: OutcomeKind
    artifact: str | None = None
    """For a phantom edit, a key of `ARTIFACTS` in `audit._tokendiff.kinds`."""
    source: tuple[int, ...] = ()
    """The ids of all tokens of the encoded sentence that overlap the word."""
    found: tuple[int, ...] = ()
    """The ids in the word's place in the completion."""
    at: int = -1
    """Position of the first id of the completion that differs; -1 if none differs."""
    canonical: bool = True
    """True if encoding the completion's text returns the completion's ids."""


def read_texts(path: str | Path = BUILT_IN, *, seed: int = 0) -> list[Sentence]:
    """Read sentences from a file, one per line.

    A line has its target word in square brackets, or is JSON with `text` and `target`. In any other line, the target
    is drawn with `seed` from the words of at least four letters that occur once.

    Raises `InvalidRequest` if a target is not in its text, or if the file is not UTF-8, and `NothingToMeasure` if no
    line has a target.
    """
    sentences: list[Sentence] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if line.startswith("{"):
            sentences.append(_from_json(line, f"{path}, line {number}"))
        elif bracketed := re.fullmatch(r"([^\[]*)\[([^\[\]\s]+)\](.*)", line):
            sentences.append((bracketed[1], bracketed[2], bracketed[3]))
        else:
            words = [word for word in re.finditer(r"(?<=\s)[^\W\d_]{4,}\b", line) if line.count(word[0]) == 1]
            for word in random.Random(f"{seed} {line}").sample(words, min(1, len(words))):
                sentences.append((line[: word.start()], word[0], line[word.end() :]))
    if not sentences:
        raise NothingToMeasure(
            f"{path} has no sentence with a word to replace; write one sentence per line, with the word in [brackets]"
        )
    return sentences


def trials(texts: Sequence[Sentence], *, repetitions: int = 1) -> Iterator[Trial]:
    """Yield every sentence in every wording, `repetitions` times."""
    for repetition in range(repetitions):
        for wording, template in WORDINGS.items():
            for before, target, after in texts:
                parts = [before, target, after, template, repetition]
                name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
                yield Trial(name, before, target, after, wording, repetition)


def _from_json(line: str, where: str) -> Sentence:
    try:
        fields = json.loads(line)
        target = fields["target"]
        before, middle, after = fields["text"].partition(target)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InvalidRequest(f'{where}: expected an object like {{"text": "…", "target": "…"}}') from None
    if not (target and middle):
        raise InvalidRequest(f"{where}: the text does not contain the target")
    return before, target, after


def outcome(trial: Trial, completion: Sequence[int], tokenizer: Tokenizer) -> Outcome:
    """Classify a completion (without its stop token) by the tokens in the target's place."""
    source = tokenizer.encode_plain(trial.text)
    ours, theirs = ([tokenizer.token_bytes(token_id) for token_id in ids] for ids in (source, completion))
    # Tokenizers that normalize change the sentence, and some put a space before a text. So find the word in the bytes.
    sides = (tokenizer.encode_plain(side) for side in (trial.before, trial.target, trial.after))
    before, target, after = (tokenizer.decode(ids).strip().encode() for ids in sides)
    text, spelled = b"".join(ours), b"".join(theirs)
    canonical = tokenizer.encode_plain(tokenizer.decode(completion)) == list(completion)
    place, own = (_place(before, after, side) for side in (spelled, text))
    if place is None or own is None or target not in text[slice(*own)]:
        return Outcome("other", canonical=canonical)
    if not (answer := spelled[slice(*place)].strip()):
        return Outcome("other", canonical=canonical)
    start, end = place
    if answer != target:
        return Outcome("replaced", canonical=canonical)
    end = spelled.index(target, start) + len(target)
    word = text.index(target, own[0])
    stretch = len(text[:word].rstrip()), word + len(target)
    source_slice, reply_slice = _stretches((ours, stretch), (theirs, (start, end)))
    ids, reply = tuple(source[source_slice]), tuple(completion[reply_slice])
    if ids == reply:
        return Outcome("unchanged", None, ids, reply, canonical=canonical)
    position = reply_slice.start + first_difference(ids, reply)
    source_bytes, reply_bytes = b"".join(ours[source_slice]), b"".join(theirs[reply_slice])
    if source_bytes == reply_bytes:
        around = b"".join(ours[: source_slice.start]), b"".join(ours[source_slice.stop :])
        artifact = boundary_artifact(ours[source_slice], theirs[reply_slice], *around)
        return Outcome("phantom", artifact, ids, reply, position, canonical)
    if source_bytes.split() == reply_bytes.split():
        return Outcome("spacing", text_artifact(source_bytes, reply_bytes), ids, reply, position, canonical)
    return Outcome("other", None, ids, reply, canonical=canonical)


def _place(before: bytes, after: bytes, spelled: bytes) -> tuple[int, int] | None:
    """Return the last byte range in `spelled` between the words that precede and follow the target."""
    # Any whitespace may separate words.
    before, after = (rb"\s+".join(map(re.escape, side.split())) for side in (before, after))
    between = rb"(.{0,%d}?)" % _MOST_BETWEEN
    pattern = re.compile((before or rb"(?:\A|\n)") + between + (after or rb"(?=\s*(?:\Z|\n))"), re.DOTALL)
    spans = [match.span(1) for match in pattern.finditer(spelled)]
    return spans[-1] if spans else None


def _stretches(*sides: tuple[Sequence[bytes], tuple[int, int]]) -> list[slice]:
    """Return each side's tokens that cover its byte range, extended until both exceed it equally, or to the end."""
    edges = [list(accumulate(map(len, pieces), initial=0)) for pieces, _ in sides]
    ranges = [(ends, *place) for ends, (_, place) in zip(edges, sides, strict=True)]
    lefts = set.intersection(*({start - edge for edge in ends if edge <= start} for ends, start, _ in ranges))
    rights = set.intersection(*({edge - end for edge in ends if edge >= end} for ends, _, end in ranges))
    return [
        slice(
            bisect_right(ends, start - min(lefts)) - 1 if lefts else 0,
            bisect_left(ends, end + min(rights)) if rights else len(ends) - 1,
        )
        for ends, start, end in ranges
    ]
