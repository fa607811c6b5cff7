"""Prove that a training tokenizer encodes old text to the same ids as the serving tokenizer.

The parts that determine ids and text must be equal, and every old added token must exist with the same flags. Texts
must get the same ids: your own, texts on which tokenizers are known to differ, and texts that contain every old token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tokentape._batches import batched
from tokentape.audit._skew import battery
from tokentape.audit._skew.probing import smallest_text
from tokentape.chat._tokenizer_files import read_json, with_configured_tokens
from tokentape.errors import InvalidRequest
from tokentape.training._tokenizer import TrainingTokenizer, token_ids

PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""The parts of `tokenizer.json` that determine ids and text. Added tokens are compared separately."""

_CHARACTERS = 1 << 15  # of a file, encoded at once
_MIXED = 2000, 64  # number and length of texts of random tokens, which have unusual sequences
_AROUND = 64
_CHAT = "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call>{}</tool_call> <s>[INST] x [/INST]</s>"


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A minimal text that the two sides encode differently: remove any one character and their ids agree."""

    text: str
    old_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    source: str
    """Where the text was found: `battery`, a file's path, or `corpus`."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of `prove`."""

    texts: int
    tokens: int
    """Number of tokens in all texts, as the old tokenizer encodes them."""
    changed_texts: int
    counterexample: Counterexample | None
    """The shortest of the first few changed texts."""
    changed_parts: tuple[str, ...]
    """The `PARTS` that differ, and old added tokens that are missing or have different flags."""
    changed_spellings: tuple[int, ...]
    """Old ids that decode to a different text."""
    fingerprint: str
    """Hex SHA-256 of the old tokenizer's `PARTS`. Equal for tokenizers that differ only in added tokens."""

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not (self.changed_texts or self.changed_parts or self.changed_spellings)


def prove(old: str | Path, new: str | Path | TrainingTokenizer, corpus: Iterable[str | Path] = ()) -> Proof:
    """Compare the tokenizer in folder `old` with `new`, a folder or a training tokenizer.

    `corpus` has texts (`str`) and UTF-8 files (`Path`). Files are read in chunks, and texts are encoded on all cores.
    Control tokens in a text are encoded as such, as in `transformers`, so a text that contains a new token is found.
    Raises `InvalidRequest` for a folder without `tokenizer.json`.
    """
    was, now = _read_spec(old), _read_spec(new)
    plain = {"truncation": None, "padding": None}
    sides = [tokenizers.Tokenizer.from_str(json.dumps(spec | plain, ensure_ascii=False)) for spec in (was, now)]
    ids, changed = token_ids(was), list[tuple[str, str]]()
    texts = tokens = 0
    for some in batched(chain(_always_tried(sides[0], ids), _read(corpus)), 1000):
        before, after = (side.encode_batch_fast([t for _, t in some], add_special_tokens=False) for side in sides)
        texts += len(some)
        tokens += sum(len(encoding.ids) for encoding in before)
        changed += [entry for entry, a, b in zip(some, before, after, strict=True) if a.ids != b.ids]
    spellings = (side.decode_batch([[i] for i in ids], skip_special_tokens=False) for side in sides)
    added = {token["id"]: token for token in now.get("added_tokens", [])}
    tokens_before = was.get("added_tokens", [])
    lost = [f"added token {token['content']!r}" for token in tokens_before if added.get(token["id"]) != token]
    shrunk = (_shrunk(*entry, sides) for entry in changed[:10])
    return Proof(
        texts=texts,
        tokens=tokens,
        changed_texts=len(changed),
        counterexample=min(shrunk, key=lambda counterexample: len(counterexample.text), default=None),
        changed_parts=(*(part for part in PARTS if was.get(part) != now.get(part)), *lost),
        changed_spellings=tuple(i for i, a, b in zip(ids, *spellings, strict=True) if a != b),
        fingerprint=_digest({part: _digest(was.get(part)) for part in PARTS}),
    )


def _shrunk(source: str, text: str, sides: Sequence[tokenizers.Tokenizer]) -> Counterexample:
    def ids(text: str) -> list[tuple[int, ...]]:
        return [tuple(side.encode(text, add_special_tokens=False).ids) for side in sides]

    def differs(text: str) -> bool:
        return len(set(ids(text))) > 1

    first = len(commonprefix(ids(text)))
    offsets = sides[0].encode(text, add_special_tokens=False).offsets
    offset = offsets[first][0] if first < len(offsets) else len(text)
    # A short part of a long text probably differs too, and shrinks much faster.
    near = text[max(0, offset - _AROUND) : offset + _AROUND]
    least = smallest_text(near if differs(near) else text, differs)
    old_ids, new_ids = ids(least)
    return Counterexample(least, old_ids, new_ids, source)


def _always_tried(old: tokenizers.Tokenizer, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    drawn = np.random.default_rng(0).choice(ids, _MIXED).tolist()
    spelled = (old.decode_batch(rows, skip_special_tokens=False) for rows in ([[i] for i in ids], drawn))
    for text in chain(["", _CHAT, "a" * 300], *battery.texts().values(), *spelled):
        yield "battery", text


def _read(corpus: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    for source in corpus:
        if isinstance(source, str):
            yield "corpus", source
            continue
        with open(source, encoding="utf-8", errors="replace", newline="") as file:
            while text := file.read(_CHARACTERS):
                yield str(source), text


def _read_spec(source: str | Path | TrainingTokenizer) -> Any:
    if isinstance(source, TrainingTokenizer):
        return json.loads(source.source)
    if not (path := Path(source, "tokenizer.json")).is_file():
        raise InvalidRequest(f"no tokenizer.json in {source}: pass a folder that has one")
    return with_configured_tokens(json.loads(path.read_bytes()), read_json(path.with_name("tokenizer_config.json")))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
