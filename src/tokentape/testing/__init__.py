"""Assert in your tests that two sequences of token ids are equal. The failure message shows where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from tokentape.audit._tokendiff.comparing import compare
from tokentape.audit._tokendiff.rows import comparison_lines, summary
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Codes, TokenIds

__all__ = ["assert_same_tokens"]


def assert_same_tokens(
    expected: Sequence[int] | TokenIds,
    recorded: Sequence[int] | TokenIds,
    tokenizer: Tokenizer | str | Path,
    *,
    provenance: Codes | None = None,
    allow: Sequence[str] = (),
) -> None:
    """Raise `AssertionError` with a token diff unless the two sequences of ids are equal.

    `tokenizer` is a tokenizer, or a model folder with a `tokenizer.json`. Differences of the kinds in `allow` are
    ignored; the kinds are in docs/how-to/compare-ids.md. `provenance` has the `Provenance` codes of `expected`, uint8
    [tokens].

    >>> assert_same_tokens([1, 2], [1, 2], "path/to/model")          # doctest: +SKIP
    """
    __tracebackhide__ = True
    if np.array_equal(np.asarray(expected), np.asarray(recorded)):
        return
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else _loaded(str(tokenizer))
    comparison = compare(expected, recorded, loaded, provenance=provenance)
    if all(difference.kind in allow for difference in comparison.differences):
        return
    lines = "\n".join(f"  {line}" for line in comparison_lines(comparison))
    raise AssertionError(f"the ids differ: {summary(comparison)}\n{lines}")


@cache
def _loaded(folder: str) -> Tokenizer:
    return Tokenizer.load(folder)
