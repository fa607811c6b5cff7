"""Align two tokenizations of the same bytes, for distillation between models with different tokenizers.

Where both have a token boundary at the same byte there is a common boundary. What lies between two of them is a *span*,
the smallest stretch that both spell with whole tokens. Log-probabilities are compared by their sums over spans
(arXiv 2503.20083 calls them chunks).

A tokenization is a list with an entry per token: its `bytes`, valid UTF-8 or not, or for a special token its name, a
`str`. `pieces` makes one with a `chat.Tokenizer`; tiktoken has `decode_single_token_bytes`.

Special tokens stand for no bytes and are in no span, since the two models may have others. Those with the same name at
the same byte are paired, `eos` with `eos` for example; one without a name is not. A span that a special token of the
other tokenization interrupts is marked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.chat.tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

Piece: TypeAlias = bytes | str
"""The bytes of a token, or the name of a special token, `""` if it has none."""

SpanIndex: TypeAlias = npt.NDArray[np.int32]
"""The span of each token, -1 for special tokens. Shape [tokens]."""


class NamedPair(NamedTuple):
    """A special token that both tokenizations have, with one name at one place."""

    name: str
    left: int
    """Its position in the left tokenization."""
    right: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The spans of two tokenizations, in order. Together they cover every byte."""

    left: SpanIndex
    right: SpanIndex
    ends: npt.NDArray[np.int64]
    """The end of each span in bytes, shape [spans]."""
    interrupted: npt.NDArray[np.bool_]
    """True where a special token stands within a span, shape [spans]."""
    pairs: tuple[NamedPair, ...]

    def left_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum `values`, one per left token, over each span: log-probabilities of the spans, shape [spans].

        A special token's value is in no sum. Raises `InvalidRequest` if there is not one value per token.
        """
        return _sums(self.left, values, len(self.ends))

    def right_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum `values`, one per right token, as `left_sums` does."""
        return _sums(self.right, values, len(self.ends))

    def chunk_mask(
        self,
        left_mask: npt.ArrayLike | None = None,
        right_mask: npt.ArrayLike | None = None,
        *,
        max_tokens: int | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Return the spans to compare likelihoods over, bool [spans].

        Those that are not interrupted, have all tokens in the masks (such as loss masks), and at most `max_tokens`
        tokens on each side: the longer a span, the less its two likelihoods are of the same event.
        """
        chosen = ~self.interrupted
        for index, mask in ((self.left, left_mask), (self.right, right_mask)):
            if mask is not None:
                chosen &= _sums(index, ~np.asarray(mask, np.bool_), len(chosen)) == 0
            if max_tokens is not None:
                chosen &= np.bincount(index[index >= 0], minlength=len(chosen)) <= max_tokens
        return chosen


def align(left: Sequence[Piece], right: Sequence[Piece]) -> Alignment:
    r"""Find the spans of two tokenizations of the same bytes. Linear in tokens and bytes.

    A token of no bytes that is not special goes with the bytes after it.

    >>> found = align([b"Hel", b"lo", b" \xf0", b"\x9f\xab\xa0"], [b"Hello", b" ", b"\xf0\x9f\xab\xa0", "eos"])
    >>> found.left.tolist(), found.right.tolist(), found.ends.tolist()
    ([0, 0, 1, 1], [0, 1, 1, -1], [5, 10])

    Raises `InvalidRequest`, with the offset, if the two spell different bytes.
    """
    _refuse_other_bytes(left, right)
    sides = [_offsets(left), _offsets(right)]
    total = int(sides[0][0][-1]) if left else 0
    common = np.ones(total + 1, np.bool_)
    for ends, special in sides:
        own = np.zeros(total + 1, np.bool_)
        own[ends[~special]] = True
        common &= own
    common[0] = False
    span_of_byte = np.cumsum(common[:-1]).astype(np.int32)
    interrupted = np.zeros(int(common.sum()), np.bool_)
    indexes = []
    for ends, special in sides:
        within = ends[special & (ends > 0) & (ends < total)]
        interrupted[span_of_byte[within[~common[within]]]] = True
        index = np.full(len(ends), -1, np.int32)
        if total:
            starts = np.concatenate([[0], ends[:-1]])[~special]
            index[~special] = span_of_byte[np.minimum(starts, total - 1)]
        indexes.append(index)
    pairs = _pairs(left, sides[0][0], right, sides[1][0])
    return Alignment(indexes[0], indexes[1], np.flatnonzero(common), interrupted, pairs)


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], names: Mapping[int, str] | None = None, *, keep_space: bool = False
) -> list[Piece]:
    """Return the piece of each id. Control tokens are special, named by `names`, a mapping of ids to names.

    SentencePiece tokenizers put a space before a text that has none. It is removed, unless `keep_space` says that the
    text begins with a space itself: the ids are the same. Replace control tokens that the other tokenization spells as
    text (`<think>`) by their bytes.
    """
    names = names or {}
    found: list[Piece] = [
        tokenizer.token_bytes(token_id) if tokenizer.control_by_id(token_id) is None else names.get(token_id, "")
        for token_id in ids
    ]
    if not keep_space:
        if _spelled(tokenizer, tokenizer.encode_marked("x").ids) == b" x":
            _remove_space(found, 0)
        if _spelled(tokenizer, tokenizer.encode_after_control("x").ids) == b" x":
            for n, piece in enumerate(found):
                if isinstance(piece, str):
                    _remove_space(found, n + 1)
    return found


def _offsets(side: Sequence[Piece]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the end of each token in bytes, and which tokens are special."""
    special = np.array([isinstance(piece, str) for piece in side], np.bool_)
    return np.cumsum([len(piece) * isinstance(piece, bytes) for piece in side], dtype=np.int64), special


def _pairs(
    left: Sequence[Piece], left_ends: npt.NDArray[np.int64], right: Sequence[Piece], right_ends: npt.NDArray[np.int64]
) -> tuple[NamedPair, ...]:
    """Pair the first with the first of several that have one name at one place, and so on."""
    waiting: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for n, piece in enumerate(right):
        if isinstance(piece, str):
            waiting[piece, int(right_ends[n])].append(n)
    named = [(piece, n) for n, piece in enumerate(left) if isinstance(piece, str) and piece]
    partners = ((name, n, waiting[name, int(left_ends[n])]) for name, n in named)
    return tuple(NamedPair(name, n, found.popleft()) for name, n, found in partners if found)


def _sums(index: SpanIndex, values: npt.ArrayLike, spans: int) -> npt.NDArray[np.float64]:
    given = np.asarray(values, np.float64)
    if given.shape != index.shape:
        raise InvalidRequest(f"values of shape {given.shape} for {len(index)} tokens: expected one per token")
    return np.bincount(index[index >= 0], given[index >= 0], spans).astype(np.float64, copy=False)


def _refuse_other_bytes(left: Sequence[Piece], right: Sequence[Piece]) -> None:
    one, other = (b"".join(piece for piece in side if isinstance(piece, bytes)) for side in (left, right))
    if one != other:
        least = min(len(one), len(other))
        differing = np.flatnonzero(np.frombuffer(one[:least], np.uint8) != np.frombuffer(other[:least], np.uint8))
        at = int(differing[0]) if len(differing) else least
        raise InvalidRequest(
            f"the two tokenizations spell different bytes from offset {at} on ({len(one)} and {len(other)} bytes): "
            "only tokenizations of the same bytes can be aligned. A normalizer (NFC), or a control token that is text "
            "in one of them, changes them"
        )


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def _remove_space(found: list[Piece], at: int) -> None:
    """Remove one leading space. A text with two had both itself."""
    text = b"".join(piece for piece in found[at : at + 2] if isinstance(piece, bytes))
    first = found[at] if at < len(found) else ""
    if isinstance(first, bytes) and text.startswith(b" ") and not text.startswith(b"  "):
        found[at] = first[1:]
