"""Sections of long marked texts, encoded once for all texts that hold them.

The sessions of a group begin alike, and a session that is rendered anew holds what it held before. A text is cut only
before control tokens that take no white space along. `tokenizers` cuts it there too, before it normalizes or merges
anything, so the ids are those of the whole text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import tokenizers

from tokentape.chat._last_used import LastUsed

LONG = 2048
"""Characters from which on a text is encoded in sections, and a section is encoded by itself."""

_MOST_IDS = 1 << 22
"""Ids that are kept, with 12 bytes each: 50 MB. Of texts only digests are kept, since one id may be of many spaces."""

Section = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids of shape [ids], and the characters of each, counted in the section, of shape [ids, 2]."""


class Sections:
    """The ids of the sections that one twin encoded last. Threads may share it.

    Texts may be cut before the characters `names`.
    """

    def __init__(self, twin: tokenizers.Tokenizer, names: frozenset[str]) -> None:
        self._twin = twin
        self._names = names
        # One range is found ten times as fast as many characters.
        self._near = re.compile(f"[{min(names)}-{max(names)}]" if names else r"(?!)")
        self._kept: LastUsed[bytes, Section] = LastUsed(_MOST_IDS, lambda section: len(section[0]))

    def encode(self, text: str) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the ids of a text as the twin encodes it, and the characters of each.

        Raises `TypeError` for text that is not valid Unicode, as the twin does.
        """
        sections = list(self._cut(text))
        keys = {one: hashlib.sha256(one.encode("utf-8", "surrogatepass")).digest() for one in sections}
        found = {one: self._kept.get(key) for one, key in keys.items()}
        missing = [one for one, section in found.items() if section is None]
        made = dict(zip(missing, map(_section, self._encoded(missing)), strict=True))
        known = [found[one] or self._kept.put(keys[one], made[one]) for one in sections]
        starts = np.cumsum([0, *map(len, sections[:-1])])
        spans = np.concatenate([own + start for (_, own), start in zip(known, starts, strict=True)])
        return np.concatenate([ids for ids, _ in known]).tolist(), spans

    def _cut(self, text: str) -> Iterator[str]:
        """Yield the sections of a text: long ones by themselves, short ones together until they are long."""
        found = (match.start() for match in self._near.finditer(text, 1) if match[0] in self._names)
        start = 0
        for at, end in pairwise([0, *found, len(text)]):
            if at - start >= LONG or (end - at >= LONG and at > start):
                yield text[start:at]
                start = at
        yield text[start:]

    def _encoded(self, texts: list[str]) -> list[tokenizers.Encoding]:
        if len(texts) > 1:
            return self._twin.encode_batch(texts, add_special_tokens=False)  # on all cores
        return [self._twin.encode(text, add_special_tokens=False) for text in texts]


def _section(encoding: tokenizers.Encoding) -> Section:
    ids = encoding.ids
    spans = np.fromiter(chain.from_iterable(encoding.offsets), np.int32, 2 * len(ids)).reshape(-1, 2)
    return np.asarray(ids, np.int32), spans
