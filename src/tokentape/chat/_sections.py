"""Encode long marked texts in sections, and cache the ids of each section.

Sessions in a group begin the same way, and a session that is rendered again repeats its earlier text. Texts are cut
only before control tokens that do not absorb adjacent white space. `tokenizers` also splits texts there, before
normalizing or merging anything, so the ids equal those of the whole text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from tokentape.chat._last_used import LastUsed
from tokentape.types import TokenIds

LONG = 2048
"""Texts of at least this many characters are encoded in sections. Shorter sections are joined to this length."""

_MOST_IDS = 1 << 22
"""The maximum number of cached ids: 8 bytes each, 12 in long sections, up to 50 MB. The keys are digests because an id
may stand for a long text."""

Section = tuple[npt.NDArray[np.int32], npt.NDArray[Any]]
"""Ids with shape [ids], and the character span of each id within the section, with shape [ids, 2]."""


class Sections:
    """Encodes texts with one twin and caches their sections. It is thread-safe.

    `names` are the characters before which texts may be cut: the twin's names for control tokens.
    """

    def __init__(self, twin: tokenizers.Tokenizer, names: frozenset[str]) -> None:
        self._twin = twin
        self._names = names
        self._range = (ord(min(names)), ord(max(names))) if names else (1, 0)
        self._kept: LastUsed[bytes, Section] = LastUsed(_MOST_IDS, lambda section: len(section[0]))

    def encode(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Return the ids to which the twin encodes a text, and the character span of each id.

        Raises `TypeError`, like the twin, if the text is not valid Unicode.
        """
        sections = list(self._cut(text))
        keys = [hashlib.sha256(section.encode("utf-8", "surrogatepass")).digest() for section in sections]
        cached = {key: self._kept.get(key) for key in keys}
        missing = {key: section for key, section in zip(keys, sections, strict=True) if cached[key] is None}
        texts = [*missing.values()]
        encoded = dict(zip(missing, map(_section, self._encoded(texts), map(len, texts)), strict=True))
        entries = [cached[key] or self._kept.put(key, encoded[key]) for key in keys]
        starts = np.cumsum([0, *map(len, sections[:-1])])
        spans = np.concatenate([own for _, own in entries], dtype=np.int64)
        spans += np.repeat(starts, [len(own) for _, own in entries])[:, None]
        return np.concatenate([ids for ids, _ in entries]), spans

    def _cut(self, text: str) -> Iterator[str]:
        """Yield the sections of a text. Short sections are joined until they have `LONG` characters."""
        # Searching for one range is ten times as fast as searching for many characters, and numpy is faster than `re`.
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        near = np.flatnonzero((codes >= self._range[0]) & (codes <= self._range[1])).tolist()
        cuts = (cut for cut in near if cut and text[cut] in self._names)
        start = 0
        for cut, end in pairwise([0, *cuts, len(text)]):
            if cut - start >= LONG or (end - cut >= LONG and cut > start):
                yield text[start:cut]
                start = cut
        yield text[start:]

    def _encoded(self, texts: list[str]) -> list[tokenizers.Encoding]:
        # On all cores. `encode` would stop all other threads: 19 s for 8 MB in one word.
        return self._twin.encode_batch(texts, add_special_tokens=False)


def _section(encoding: tokenizers.Encoding, characters: int) -> Section:
    ids = encoding.ids
    kind = np.uint16 if characters < 1 << 16 else np.int32
    spans = np.fromiter(chain.from_iterable(encoding.offsets), kind, 2 * len(ids)).reshape(-1, 2)
    return np.asarray(ids, np.int32), spans
