"""Decode completions and encode their text again, as trainers that keep only text do, and count what changed.

Two losses of decoding do not count as drift. A completion that was cut within a character ends with *unknown* tokens,
which no encoder can return. And SentencePiece tokenizers put a space before a text, some also after special tokens: a
completion that begins with a space is encoded as a text's start, any other as if it followed a special token.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit._tokendiff.comparing import Comparison, compare
from tokentape.audit._tokendiff.kinds import ARTIFACTS
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds


@dataclass(slots=True)
class RoundTrip:
    """A completion that was decoded and encoded again."""

    ids: TokenIds
    """The sampled ids without unknown tokens."""
    again: TokenIds
    """The ids after decoding and encoding; the object `ids` itself if they are equal."""
    content: bytes
    head: int
    """Number of unknown tokens at the start, which complete a character of the context."""
    tail: int

    @property
    def drifted(self) -> bool:
        return self.again is not self.ids


class Retokenizer:
    """Decodes and encodes with one tokenizer. Ids outside of its vocabulary raise `InvalidRequest`.

    Text that spells a special token becomes that token, as in most trainers. With `apart`, it stays text, and no second
    tokenizer is loaded.
    """

    def __init__(self, tokenizer: Tokenizer, *, apart: bool = False) -> None:
        self.tokenizer = tokenizer
        self._apart = apart
        self._pieces: dict[int, bytes] = {}
        at_start, with_space = (b"".join(map(tokenizer.token_bytes, ids)) for ids in self._encoded(["x", " x"]))
        self._adds_space = at_start == b" x"
        # Some tokenizers also add a space to a text that begins with a space.
        self._adds_to_space = with_space == b"  x"
        first = tokenizer.controls[0] if tokenizer.controls else None
        self._anchor = "" if first is None else first.mark if apart else first.content

    def pieces(self, ids: TokenIds) -> list[bytes]:
        listed: list[int] = ids.tolist()
        for token_id in set(listed) - self._pieces.keys():
            self._pieces[token_id] = self.tokenizer.token_bytes(token_id)
        return [self._pieces[token_id] for token_id in listed]

    def round_trips(self, completions: Sequence[TokenIds]) -> list[RoundTrip]:
        """Decode and encode each completion. They are encoded in one batch, so pass at most about 100k tokens."""
        trips = [self._known(ids) for ids in completions]
        texts = [self._text(trip) for trip in trips]
        encoded = self._encoded([anchor + text for anchor, text in texts])
        for trip, (anchor, _), ids in zip(trips, texts, encoded, strict=True):
            again = np.array(ids[1:] if anchor else ids, np.int32)
            if not np.array_equal(trip.ids, again):
                trip.again = again
        return trips

    def compare(self, trip: RoundTrip) -> Comparison:
        return compare(trip.ids, trip.again, self.tokenizer)

    def _known(self, ids: TokenIds) -> RoundTrip:
        """Return ids without unknown tokens, not encoded again yet."""
        pieces = self.pieces(ids)
        content = b"".join(pieces)
        with suppress(UnicodeDecodeError):
            content.decode()
            return RoundTrip(ids, ids, content, 0, 0)
        head = 0
        while head < len(pieces) and pieces[head] and pieces[head][0] & 0xC0 == 0x80:
            head += 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(content)
        pending = len(decoder.getstate()[0])
        end = len(pieces)
        while pending > 0 and end > head:
            end -= 1
            pending -= len(pieces[end])
        known = ids[head:end]
        return RoundTrip(known, known, b"".join(pieces[head:end]), head, len(pieces) - end)

    def _text(self, trip: RoundTrip) -> tuple[str, str]:
        """Return a special token to put before the text, or an empty string, and the text to encode."""
        text = trip.content.decode("utf-8", "replace")
        if self._apart:
            runs = groupby(trip.ids.tolist(), self.tokenizer.control_by_id)
            text = "".join(
                b"".join(map(self.tokenizer.token_bytes, run)).decode("utf-8", "replace")
                if control is None
                else control.mark * len(list(run))
                for control, run in runs
            )
        if not self._adds_space:
            return "", text
        if not text.startswith(" "):
            return self._anchor, text
        return "", text[1:] if self._adds_to_space else text

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        if self._apart:
            return [self.tokenizer.encode_marked(text).ids for text in texts]
        return self.tokenizer.encode_plain_batch(texts)


def retokenized(tokenizer: Tokenizer, ids: TokenIds) -> TokenIds:
    """Decode ids and encode the text, as a trainer would."""
    return tokenizer.array(tokenizer.encode_plain(tokenizer.decode(ids.tolist())))


def check_vocabulary(ids: TokenIds, tokenizer: Tokenizer, where: str) -> None:
    """Raise `InvalidRequest` if the tokenizer lacks an id: then the ids come from a different model."""
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"{where}: id {int(ids.max())} is outside of the tokenizer's {tokenizer.vocab_size} ids; pass the folder "
            "of the model that the ids belong to"
        )


Channel: TypeAlias = Literal["numeric", "id drift", "text drift"]
"""The cause of different logprobs. `numeric`: the ids are equal. `id drift`: different ids for the same text."""


class Change(NamedTuple):
    """A half-open range of recorded tokens where the trainer's ids differ."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """Recorded ids matched with a trainer's ids."""

    channel: Channel
    partner: npt.NDArray[np.int64]
    """The position of each recorded token in the trainer's ids; -1 if they lack it. Shape [tokens]."""
    first: int
    """Position of the first recorded token that differs. The context before it is the same."""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """Counts of trained tokens that changed, summed over sequences."""

    sequences: int = 0
    changed_sequences: int = 0
    tokens: int = 0
    changed_tokens: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    """The number of changed stretches by class, the `kind` of an `Artifact`."""

    def added(self, mask: npt.NDArray[np.bool_], pairing: Pairing | None) -> TokenDrift:
        """Return the counts with one more sequence. `mask`: its trained tokens; `pairing`: None without drift."""
        more = replace(self, sequences=self.sequences + 1, tokens=self.tokens + int(mask.sum()))
        if pairing is None:
            return more
        changed = [int(mask[change.start : change.end].sum()) for change in pairing.changes]
        kinds = Counter(change.kind for change, many in zip(pairing.changes, changed, strict=True) if many)
        return replace(
            more,
            changed_sequences=self.changed_sequences + 1,
            changed_tokens=self.changed_tokens + sum(changed),
            classes=dict(Counter(self.classes) + kinds),
        )

    @property
    def share(self) -> float:
        return self.changed_tokens / self.tokens if self.tokens else 0.0


def pair_ids(recorded: TokenIds, trainers: TokenIds, tokenizer: Tokenizer) -> Pairing:
    """Match recorded ids with a trainer's ids. Trainer ids that only end early do not count as drift."""
    comparison = compare(recorded, trainers, tokenizer)
    differences = [difference for difference in comparison.differences if difference.kind != "cut"]
    partner = comparison.recorded_positions()
    if not differences:
        return Pairing("numeric", partner, len(recorded))
    changes = tuple(Change(d.expected_start, d.expected_end, ARTIFACTS[d.change].kind) for d in differences)
    same_bytes = all(difference.same_bytes for difference in differences)
    return Pairing("id drift" if same_bytes else "text drift", partner, changes[0].start, changes)
