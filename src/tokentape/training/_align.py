"""Align two tokenizations of the same bytes, for distillation between models with different tokenizers.

A byte offset at which both tokenizations have a token boundary is a common boundary. The bytes between two neighboring
common boundaries are a *span*: the smallest text that both tokenizations spell with whole tokens (a chunk in arXiv
2503.20083). Compare log-probabilities by their sums over spans.

A tokenization is a list with one entry per token: for a text token its `bytes`, which may be invalid UTF-8, and for a
special token its name, a `str`. Special tokens are in no span; those with the same name and byte offset are paired.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

Piece: TypeAlias = bytes | str
"""The bytes of a token, or the name of a special token; `""` if it has no name."""

Mask: TypeAlias = npt.ArrayLike | None

SpanIndex: TypeAlias = npt.NDArray[np.int32]
"""The index of each token's span, -1 for special tokens. Shape [tokens]."""


class NamedPair(NamedTuple):
    """A special token that both tokenizations have at the same byte offset, and its token index in each."""

    name: str
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The spans of two tokenizations, in order. Together, the spans cover all bytes."""

    left: SpanIndex
    right: SpanIndex
    ends: npt.NDArray[np.int64]
    """The byte offset at which each span ends, shape [spans]."""
    interrupted: npt.NDArray[np.bool_]
    """True for spans that contain a special token, shape [spans]."""
    pairs: tuple[NamedPair, ...]

    def left_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum `values`, one per left token, over each span, shape [spans]. Another length raises `InvalidRequest`."""
        return _sums(self.left, values, len(self.ends))

    def right_sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Sum `values`, one per right token, over each span, shape [spans]. Another length raises `InvalidRequest`."""
        return _sums(self.right, values, len(self.ends))

    def chunk_mask(
        self, left_mask: Mask = None, right_mask: Mask = None, *, max_tokens: int | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the spans over which to compare likelihoods, bool [spans].

        A span is compared if it contains no special token, if the masks (for example loss masks) are true for all its
        tokens, and if it has at most `max_tokens` tokens on each side: likelihoods of long spans are less comparable.
        """
        chosen = ~self.interrupted
        for index, mask in ((self.left, left_mask), (self.right, right_mask)):
            if mask is not None:
                chosen &= _sums(index, ~np.asarray(mask, np.bool_), len(chosen)) == 0
            if max_tokens is not None:
                chosen &= _sums(index, np.ones(len(index)), len(chosen)) <= max_tokens
        return chosen


def align(left: Sequence[Piece], right: Sequence[Piece]) -> Alignment:
    r"""Find the spans of two tokenizations of the same bytes. A token of zero bytes is in the span that follows it.

    Raises `InvalidRequest` with the first differing byte offset if the bytes differ.

    >>> alignment = align([b"Hel", b"lo", b" \xf0", b"\x9f\xab\xa0"], [b"Hello", b" ", b"\xf0\x9f\xab\xa0", "eos"])
    >>> alignment.left.tolist(), alignment.right.tolist(), alignment.ends.tolist()
    ([0, 0, 1, 1], [0, 1, 1, -1], [5, 10])
    """
    total = _same_bytes(left, right)
    special = [np.array([isinstance(piece, str) for piece in side], np.bool_) for side in (left, right)]
    sizes = [np.array([len(piece) * isinstance(piece, bytes) for piece in side], np.int64) for side in (left, right)]
    ends = [np.cumsum(side) for side in sizes]
    common = np.intersect1d(ends[0][~special[0]], ends[1][~special[1]])
    common = common[common > 0]
    interrupted, indexes = np.zeros(len(common), np.bool_), []
    for size, end, is_special in zip(sizes, ends, special, strict=True):
        interrupted[np.searchsorted(common, end[is_special & (end > 0) & ~np.isin(end, common)], "right")] = True
        spans = np.searchsorted(common, np.minimum(end - size, total - 1), "right")
        indexes.append(np.where(is_special | (total == 0), -1, spans).astype(np.int32))
    # Several special tokens with the same name at the same byte offset are paired in order.
    waiting: dict[tuple[Piece, int], deque[int]] = defaultdict(deque)
    for n in np.flatnonzero(special[1]).tolist():
        waiting[right[n], int(ends[1][n])].append(n)
    places = [(left[n], n, waiting[left[n], int(ends[0][n])]) for n in np.flatnonzero(special[0]).tolist()]
    pairs = tuple(NamedPair(str(name), n, queue.popleft()) for name, n, queue in places if name and queue)
    return Alignment(indexes[0], indexes[1], common, interrupted, pairs)


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], names: Mapping[int, str] | None = None, *, keep_space: bool = False
) -> list[Piece]:
    """Return the entry of each id for `align`. Control tokens become special tokens; `names` has their names by id.

    SentencePiece tokenizers add a space before a text that does not begin with one. This space is removed; pass
    `keep_space=True` if your text itself begins with a space. If a control token of this tokenizer (`<think>`) is
    ordinary text in the other one, replace its entry by its bytes.
    """
    token_pieces: list[Piece] = [
        tokenizer.token_bytes(i) if tokenizer.control_by_id(i) is None else (names or {}).get(i, "") for i in ids
    ]
    first, later = (
        not keep_space and b"".join(map(tokenizer.token_bytes, encode("x").ids)) == b" x"
        for encode in (tokenizer.encode_marked, tokenizer.encode_after_control)
    )
    for n, piece in enumerate(token_pieces):
        added = later and isinstance(token_pieces[n - 1], str) if n else first
        if added and isinstance(piece, bytes):
            text = b"".join(part for part in token_pieces[n : n + 2] if isinstance(part, bytes))
            if text.startswith(b" ") and not text.startswith(b"  "):  # with two spaces, both are part of the text
                token_pieces[n] = piece[1:]
    return token_pieces


def _sums(index: SpanIndex, values: npt.ArrayLike, spans: int) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.shape != index.shape:
        raise InvalidRequest(f"values of shape {array.shape} for {len(index)} tokens: expected one value per token")
    return np.bincount(index[index >= 0], array[index >= 0], spans).astype(np.float64, copy=False)


def _same_bytes(left: Sequence[Piece], right: Sequence[Piece]) -> int:
    left_bytes, right_bytes = (b"".join(piece for piece in side if isinstance(piece, bytes)) for side in (left, right))
    if left_bytes == right_bytes:
        return len(left_bytes)
    offset = len(commonprefix([left_bytes, right_bytes]))
    raise InvalidRequest(
        f"the two tokenizations have different bytes from byte {offset} on ({len(left_bytes)} and {len(right_bytes)} "
        "bytes in total): only tokenizations of the same bytes can be aligned. Bytes can differ because a tokenizer "
        "normalizes text (NFC), or because a control token of one tokenizer is text in the other"
    )
