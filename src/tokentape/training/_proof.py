"""Prove that a training tokenizer changes no old text: every old text has its old ids.

The proof has two halves. What decides a text's ids and an id's text (normalizer, pre-tokenizer, model, post-processor,
decoder) must be the same by hash, and every old added token must be there with its flags. And texts must have the same
ids: yours, and texts that are always tried, which spell every token of the old vocabulary, alone and next to others,
and what tokenizers are known to differ in. A text that fails is shrunk until no character can be removed from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tokentape.audit._skew import battery
from tokentape.audit._skew.probing import smallest_text
from tokentape.errors import InvalidRequest
from tokentape.training._tokenizer import TrainingTokenizer, token_ids

PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""The parts of `tokenizer.json` that decide ids and text. Added tokens are compared on their own."""

_BATCH = 1000
_CHARACTERS = 1 << 15
"""Files are encoded in pieces of this many characters."""
_MIXED, _MIXED_TOKENS = 2000, 64
"""The number and length of texts of random tokens, where tokens meet that no author would put together."""
_AROUND = 64
_CHAT = "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call>{}</tool_call> <s>[INST] x [/INST]</s>"


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A text with other ids, from which no character can be removed."""

    text: str
    old_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    source: str
    """Where the text was found: `battery`, a file's path, or `corpus`."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared, and what differs."""

    texts: int
    tokens: int
    """Of all texts, by the old tokenizer."""
    changed_texts: int
    counterexample: Counterexample | None
    """The shortest of the first few changed texts."""
    changed_parts: tuple[str, ...]
    """`PARTS` that differ, and old added tokens that are gone or have other flags."""
    changed_spellings: tuple[int, ...]
    """Old ids that decode to another text."""
    fingerprint: str
    """Hex SHA-256 of the `PARTS` of the old tokenizer: equal for two that differ in added tokens only."""

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not (self.changed_texts or self.changed_parts or self.changed_spellings)


def prove(
    old: str | Path, new: str | Path | TrainingTokenizer, corpus: Iterable[str | Path] = (), *, batch: int = _BATCH
) -> Proof:
    """Compare the tokenizer in folder `old` with `new`, a folder or a training tokenizer.

    `corpus` has texts (`str`) and UTF-8 files (`Path`), which are read piece by piece. `batch` texts at a time are
    encoded on all cores. Text is encoded as `transformers` does, with the control tokens that it spells, so that a text
    that spells a new token is found.

    >>> prove("path/to/model", training, Path("corpus").glob("*.txt")).ok     # doctest: +SKIP
    True

    Raises `InvalidRequest` for a folder without `tokenizer.json`.
    """
    old_spec, new_spec = _read_spec(old), _read_spec(new)
    one, other = _plain(old_spec), _plain(new_spec)
    changed: list[tuple[str, str]] = []
    texts = tokens = 0
    rest = chain(_always_tried(one, old_spec), _read(corpus))
    while some := list(islice(rest, batch)):
        before, after = (
            each.encode_batch_fast([t for _, t in some], add_special_tokens=False) for each in (one, other)
        )
        texts += len(some)
        tokens += sum(len(encoding.ids) for encoding in before)
        changed += [found for found, a, b in zip(some, before, after, strict=True) if a.ids != b.ids]
    counterexamples = [_shrunk(source, text, one, other) for source, text in changed[:10]]
    ids = token_ids(old_spec)
    spellings = (each.decode_batch([[i] for i in ids], skip_special_tokens=False) for each in (one, other))
    return Proof(
        texts=texts,
        tokens=tokens,
        changed_texts=len(changed),
        counterexample=min(counterexamples, key=lambda found: len(found.text), default=None),
        changed_parts=_changed_parts(old_spec, new_spec),
        changed_spellings=tuple(i for i, a, b in zip(ids, *spellings, strict=True) if a != b),
        fingerprint=_digest({part: _digest(old_spec.get(part)) for part in PARTS}),
    )


def _shrunk(source: str, text: str, *sides: tokenizers.Tokenizer) -> Counterexample:
    def ids(text: str) -> list[tuple[int, ...]]:
        return [tuple(side.encode(text, add_special_tokens=False).ids) for side in sides]

    def differs(text: str) -> bool:
        old, new = ids(text)
        return old != new

    before, after = (side.encode(text, add_special_tokens=False) for side in sides)
    first = len(commonprefix([before.ids, after.ids]))
    at = before.offsets[first][0] if first < len(before.ids) else len(text)
    # A short piece of a long text probably fails too, and is shrunk much faster.
    near = text[max(0, at - _AROUND) : at + _AROUND]
    least = smallest_text(near if differs(near) else text, differs)
    old_ids, new_ids = ids(least)
    return Counterexample(least, old_ids, new_ids, source)


def _always_tried(old: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    ids = token_ids(spec)
    drawn = np.random.default_rng(0).choice(ids, (_MIXED, _MIXED_TOKENS)).tolist()
    spelled = (old.decode_batch(rows, skip_special_tokens=False) for rows in ([[i] for i in ids], drawn))
    for text in chain(["", _CHAT, "a" * 300], *battery.texts().values(), *spelled):
        yield "battery", text


def _read(corpus: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    for one in corpus:
        if isinstance(one, str):
            yield "corpus", one
            continue
        with open(one, encoding="utf-8", errors="replace", newline="") as file:
            while text := file.read(_CHARACTERS):
                yield str(one), text


def _changed_parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    parts = [part for part in PARTS if _digest(old.get(part)) != _digest(new.get(part))]
    kept = {_digest(token) for token in new.get("added_tokens", [])}
    lost = [token["content"] for token in old.get("added_tokens", []) if _digest(token) not in kept]
    return (*parts, *(f"added token {content!r}" for content in lost))


def _read_spec(source: str | Path | TrainingTokenizer) -> dict[str, Any]:
    if isinstance(source, TrainingTokenizer):
        content = source.source
    elif (path := Path(source) / "tokenizer.json").is_file():
        content = path.read_bytes()
    else:
        raise InvalidRequest(f"no tokenizer.json in {source}; a proof compares two of them")
    spec: dict[str, Any] = json.loads(content)
    return spec


def _plain(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}, ensure_ascii=False))


def _digest(value: Any) -> str:
    # Keys are not sorted: the order of merges has a meaning, and that of a vocabulary costs nothing to keep.
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
