"""Two tokenizations of the same bytes, side by side: what one model's tokens say in terms of another's.

For distillation between models with different tokenizers. Where both sides have a token boundary at the same byte there
is a common boundary; what lies between two neighbouring ones is a *span*, the smallest stretch that both sides spell
with whole tokens. Log-probabilities are compared by their sums over spans (arXiv 2503.20083 calls them chunks).

A side is a list with an entry per token: the `bytes` it stands for, valid UTF-8 or not, or for a special token a `str`,
its name. So every tokenizer will do that can tell its tokens' bytes: `pieces` asks a `chat.Tokenizer`, tiktoken has
`decode_single_token_bytes`.

Special tokens stand for no bytes and lie in no span, for the two sides need not have the same ones. Those with equal
names at the same place are told as pairs, `eos` with `eos` for example, and are compared one to one; a nameless one is
left alone. A span in which one stands (the other side's token goes right across it) is marked as interrupted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

Piece: TypeAlias = bytes | str
"""What a token stands for: bytes, or the name of a special token, `""` if it has none."""

SpanIndex: TypeAlias = npt.NDArray[np.int32]
"""Per token the number of its span, -1 for special tokens. Shape [tokens]."""


@dataclass(frozen=True, slots=True)
class NamedPair:
    """A special token that both sides have, under one name and at one place."""

    name: str
    left: int
    """Index of the left side's token."""
    right: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The spans of two tokenizations, in order. Together they cover every byte."""

    left: SpanIndex
    right: SpanIndex
    ends: npt.NDArray[np.int64]
    """Offset behind each span's last byte, shape [spans]."""
    interrupted: npt.NDArray[np.bool_]
    """True where a special token of either side stands within a span, shape [spans]."""
    pairs: tuple[NamedPair, ...]
    """Special tokens that both sides have."""

    def left_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum of `values`, one per left token, over each span: log-probabilities of the spans, shape [spans].

        A special token's value is in no sum. Raises `InvalidRequest` for another number of values than of tokens.
        """
        return _sums(self.left, values, len(self.ends))

    def right_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """As `left_sums`, of the right side."""
        return _sums(self.right, values, len(self.ends))

    def chunk_mask(
        self,
        left_mask: npt.ArrayLike | None = None,
        right_mask: npt.ArrayLike | None = None,
        *,
        max_tokens: int | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Which spans to compare likelihoods over, bool [spans].

        Those that are not interrupted, whose tokens are all in the masks (such as a loss mask), and that have at most
        `max_tokens` tokens on either side: the longer a span, the less its two likelihoods are of the same event.
        """
        chosen = ~self.interrupted
        for index, mask in ((self.left, left_mask), (self.right, right_mask)):
            if mask is not None:
                outside = ~np.asarray(mask, np.bool_)
                chosen &= _sums(index, outside, len(chosen)) == 0
            if max_tokens is not None:
                chosen &= np.bincount(index[index >= 0], minlength=len(chosen)) <= max_tokens
        return chosen


def align(left: Sequence[Piece], right: Sequence[Piece]) -> Alignment:
    r"""Find the spans of two tokenizations of the same bytes. Linear in tokens and bytes.

    A token of no bytes that is not special goes with the bytes behind it.

    >>> found = align([b"Hel", b"lo", b" \xf0", b"\x9f\xab\xa0"], [b"Hello", b" ", b"\xf0\x9f\xab\xa0", "eos"])
    >>> found.left.tolist(), found.right.tolist(), found.ends.tolist()
    ([0, 0, 1, 1], [0, 1, 1, -1], [5, 10])

    Raises `InvalidRequest`, with the offset, if the two sides spell different bytes.
    """
    _refuse_other_bytes(left, right)
    left_side, right_side = _Side.of(left), _Side.of(right)
    total = left_side.total
    common = np.zeros(total + 1, np.bool_)
    common[right_side.ends[~right_side.special]] = True
    own = np.zeros(total + 1, np.bool_)
    own[left_side.ends[~left_side.special]] = True
    common &= own
    common[0] = False
    ends = np.flatnonzero(common)
    # Of each byte the number of its span.
    spans = np.cumsum(common[:-1]).astype(np.int32) if total else np.empty(0, np.int32)
    interrupted = np.zeros(len(ends), np.bool_)
    for side in (left_side, right_side):
        places = side.ends[side.special]
        within = places[(places > 0) & (places < total)]
        within = within[~common[within]]
        interrupted[spans[within]] = True
    return Alignment(
        left_side.index(spans), right_side.index(spans), ends, interrupted, _pairs(left, left_side, right, right_side)
    )


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], names: Mapping[int, str] | None = None, *, keep_space: bool = False
) -> list[Piece]:
    """What each id stands for. Control tokens are special, named by `names`, which maps ids to names.

    SentencePiece-style tokenizers put a space in front of a text that does not begin with one; it is taken off again.
    Their ids are the same for a text that begins with one space: say so with `keep_space`. Control tokens that are text
    to you (`<think>`, if the other side spells it) are to be replaced by their bytes.
    """
    names = names or {}
    found: list[Piece] = []
    for token_id in ids:
        special = tokenizer.control_by_id(token_id) is not None
        found.append(names.get(token_id, "") if special else tokenizer.token_bytes(token_id))
    if keep_space:
        return found
    at_start, behind_special = _adds_space(tokenizer)
    if at_start:
        _take_space(found, 0)
    if behind_special:
        for n, piece in enumerate(found):
            if isinstance(piece, str):
                _take_space(found, n + 1)
    return found


@dataclass(frozen=True, slots=True)
class _Side:
    ends: npt.NDArray[np.int64]
    """Offset behind each token's last byte."""
    special: npt.NDArray[np.bool_]
    total: int

    @classmethod
    def of(cls, side: Sequence[Piece]) -> _Side:
        special = np.fromiter((isinstance(piece, str) for piece in side), np.bool_, len(side))
        sizes = np.fromiter((0 if isinstance(piece, str) else len(piece) for piece in side), np.int64, len(side))
        ends = np.cumsum(sizes)
        return cls(ends, special, int(ends[-1]) if len(ends) else 0)

    def index(self, spans: npt.NDArray[np.int32]) -> SpanIndex:
        """Per token the span of its first byte, or of the byte behind it if it has none."""
        if not self.total:
            return np.full(len(self.ends), -1, np.int32)
        starts = np.concatenate([[0], self.ends[:-1]])
        index: SpanIndex = spans[np.minimum(starts, self.total - 1)]
        index[self.special] = -1
        return index


def _pairs(left: Sequence[Piece], left_side: _Side, right: Sequence[Piece], right_side: _Side) -> tuple[NamedPair, ...]:
    """Of several with one name at one place, the first with the first, and so on."""
    waiting: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for n in np.flatnonzero(right_side.special).tolist():
        waiting[str(right[n]), int(right_side.ends[n])].append(n)
    found = []
    for n in np.flatnonzero(left_side.special).tolist():
        name = str(left[n])
        partners = waiting.get((name, int(left_side.ends[n])))
        if name and partners:
            found.append(NamedPair(name, n, partners.popleft()))
    return tuple(found)


def _sums(index: SpanIndex, values: npt.ArrayLike, spans: int) -> npt.NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    if given.shape != index.shape:
        raise InvalidRequest(f"values of shape {given.shape} for {len(index)} tokens: expected one per token")
    within = index >= 0
    return np.bincount(index[within], given[within], spans).astype(np.float64, copy=False)


def _refuse_other_bytes(left: Sequence[Piece], right: Sequence[Piece]) -> None:
    one, other = (b"".join(piece for piece in side if isinstance(piece, bytes)) for side in (left, right))
    if one == other:
        return
    a, b = (np.frombuffer(side[: min(len(one), len(other))], np.uint8) for side in (one, other))
    differing = np.flatnonzero(a != b)
    at = int(differing[0]) if len(differing) else len(a)
    raise InvalidRequest(
        f"the two tokenizations spell different bytes from offset {at} on ({len(one)} and {len(other)} bytes): only "
        "tokenizations of the same bytes can be aligned. A normalizer (NFC) or a control token taken for text on one "
        "side changes them"
    )


def _adds_space(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether a space is put in front of text at the very start, and behind a control token."""

    def spelled(ids: Sequence[int]) -> bytes:
        return b"".join(map(tokenizer.token_bytes, ids))

    at_start = spelled(tokenizer.encode_marked("x").ids) == b" x"
    behind = spelled(tokenizer.encode_after_control("x").ids) == b" x"
    return at_start, behind


def _take_space(found: list[Piece], at: int) -> None:
    """Take off one leading space; a text with two had them all itself."""
    text = b"".join(piece for piece in found[at : at + 2] if isinstance(piece, bytes))
    first = found[at] if at < len(found) else ""
    if isinstance(first, bytes) and text.startswith(b" ") and not text.startswith(b"  "):
        found[at] = first[1:]
