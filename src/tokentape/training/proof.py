"""Proof that a training tokenizer leaves old text alone: every old text has its old ids.

Two halves. What decides a text's ids (normalizer, pre-tokenizer, model, post-processor) and an id's text (decoder) has
to be the same, compared by hash, and every old added token has to be there as it was. And over texts, the ids have to
be the same: over yours, and over a battery that is always tried, which spells every token of the old vocabulary, alone
and next to others, and the things that tokenizers are known to differ in.

A text that fails is cut down until not one more character can be taken from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tokentape.errors import InvalidRequest
from tokentape.training.tokenizer import TrainingTokenizer

PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
"""Of a `tokenizer.json`, what decides ids and text besides the added tokens."""

_BATCH = 1000
_CHARACTERS = 1 << 15
"""Files are encoded in pieces of so many characters."""
_MIXED, _MIXED_TOKENS = 2000, 64
"""Texts of so many random tokens each, so that tokens meet that no author would put together."""
_AROUND = 64

_HARD = (
    "",
    " ",
    "  two  spaces   and more    ",
    "\n\n\n \n\t\t\r\n\u00a0\u3000\u200b",
    "eBay mL pH iPhone don't DON'T we'll",
    "0 1 12 123 1234 12345678901234567890 3.14159 1,000,000",
    "x != y , don 't ... \"quoted\" 'single'",
    "e\u0301 \u00e9 \ufb01 \u1112\u1161\u11ab \ud55c \u212b",
    "Привет 你好 こんにちは नमस्ते السلام ไทย",
    "🫠👩‍👩‍👧‍👦🇩🇪 \U000e0061 \ufffd \ufeff",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": None}  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think><tool_call>{}</tool_call> <s>[INST] x [/INST]</s>",
    "a" * 300,
)


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A text that has other ids now, and no character too many."""

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
    """Which of `PARTS` differ, and old added tokens that are gone or have other flags."""
    changed_spellings: tuple[int, ...]
    """Old ids that are decoded to another text now."""
    fingerprint: str
    """Hex SHA-256 of the `PARTS` of the old tokenizer: equal for all tokenizers with this byte path."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not (self.changed_texts or self.changed_parts or self.changed_spellings)


def prove(
    old: str | Path, new: str | Path | TrainingTokenizer, corpus: Iterable[str | Path] = (), *, batch: int = _BATCH
) -> Proof:
    """Compare the tokenizer in folder `old` with `new`, a folder or a training tokenizer.

    `corpus` holds texts (`str`) and UTF-8 files (`Path`), which are read piece by piece. `batch` texts at a time are
    encoded on all cores. Text is encoded as `transformers` does, control tokens that it spells included, so that a text
    that spells a new token is found.

    >>> prove("path/to/model", training, Path("corpus").glob("*.txt")).ok     # doctest: +SKIP
    True

    Raises `InvalidRequest` for a folder without `tokenizer.json`.
    """
    old_spec, new_spec = _read_spec(old), _read_spec(new)
    tokenizer, other = _plain(old_spec), _plain(new_spec)
    changed: list[tuple[str, str]] = []
    texts = tokens = failed = 0
    for some in _batches(chain(_battery(tokenizer, old_spec), _read(corpus)), batch):
        written = [text for _, text in some]
        before, after = (one.encode_batch_fast(written, add_special_tokens=False) for one in (tokenizer, other))
        for (source, text), a, b in zip(some, before, after, strict=True):
            ids = a.ids
            tokens += len(ids)
            if ids != b.ids:
                failed += 1
                if len(changed) < 10:
                    changed.append((source, text))
        texts += len(some)
    return Proof(
        texts=texts,
        tokens=tokens,
        changed_texts=failed,
        counterexample=_shortest(changed, tokenizer, other),
        changed_parts=_changed_parts(old_spec, new_spec),
        changed_spellings=_changed_spellings(tokenizer, other, old_spec),
        fingerprint=byte_path_fingerprint(old_spec),
    )


def byte_path_fingerprint(spec: Mapping[str, Any]) -> str:
    """Hex SHA-256 of a `tokenizer.json` without its added tokens, truncation and padding."""
    parts = {part: _digest(spec.get(part)) for part in PARTS}
    return _digest(parts)


def smallest(text: str, fails: Callable[[str], bool]) -> str:
    """The text with characters taken out, as long as it still fails: none of those left can be taken out alone.

    >>> smallest("what a strange x in here", lambda text: "x" in text)
    'x'
    """
    size = len(text)
    while size:
        at, shrunk = 0, False
        while at < len(text):
            shorter = text[:at] + text[at + size :]
            if fails(shorter):
                text, shrunk = shorter, True
            else:
                at += size
        # At size 1 until nothing goes any more: taking one out may let another go.
        size = size if shrunk and size == 1 else size // 2
    return text


def _shortest(
    changed: Sequence[tuple[str, str]], old: tokenizers.Tokenizer, new: tokenizers.Tokenizer
) -> Counterexample | None:
    def ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def differs(text: str) -> bool:
        return ids(old, text) != ids(new, text)

    found = []
    for source, text in changed:
        near = _around_first_change(text, old, new)
        least = smallest(near if differs(near) else text, differs)
        found.append(Counterexample(least, tuple(ids(old, least)), tuple(ids(new, least)), source))
    return min(found, key=lambda one: len(one.text), default=None)


def _around_first_change(text: str, old: tokenizers.Tokenizer, new: tokenizers.Tokenizer) -> str:
    """A short piece of a long text that is likely to fail too."""
    before, after = (one.encode(text, add_special_tokens=False) for one in (old, new))
    same = next(
        (n for n, (a, b) in enumerate(zip(before.ids, after.ids, strict=False)) if a != b),
        min(len(before.ids), len(after.ids)),
    )
    at = before.offsets[same][0] if same < len(before.ids) else len(text)
    return text[max(0, at - _AROUND) : at + _AROUND]


def _battery(old: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for text in _HARD:
        yield "battery", text
    ids = _old_ids(spec)
    for text in old.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False):
        yield "battery", text
    drawn = np.random.default_rng(0).choice(ids, (_MIXED, _MIXED_TOKENS))
    for text in old.decode_batch(drawn.tolist(), skip_special_tokens=False):
        yield "battery", text


def _read(corpus: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    for one in corpus:
        if isinstance(one, str):
            yield "corpus", one
            continue
        with open(one, encoding="utf-8", errors="replace", newline="") as file:
            while text := file.read(_CHARACTERS):
                yield str(one), text


def _batches(texts: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    while some := list(islice(texts, size)):
        yield some


def _changed_parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    parts = [part for part in PARTS if _digest(old.get(part)) != _digest(new.get(part))]
    kept = {_digest(token) for token in new.get("added_tokens", [])}
    parts += [
        f"added token {token['content']!r}" for token in old.get("added_tokens", []) if _digest(token) not in kept
    ]
    return tuple(parts)


def _changed_spellings(
    old: tokenizers.Tokenizer, new: tokenizers.Tokenizer, spec: Mapping[str, Any]
) -> tuple[int, ...]:
    ids = _old_ids(spec)
    before, after = (
        one.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False) for one in (old, new)
    )
    return tuple(i for i, a, b in zip(ids, before, after, strict=True) if a != b)


def _old_ids(spec: Mapping[str, Any]) -> list[int]:
    vocab = spec["model"]["vocab"]
    ids = {*vocab.values()} if isinstance(vocab, Mapping) else {*range(len(vocab))}
    return sorted(ids | {token["id"] for token in spec.get("added_tokens", [])})


def _read_spec(source: str | Path | TrainingTokenizer) -> dict[str, Any]:
    if isinstance(source, TrainingTokenizer):
        content = source.source
    else:
        path = Path(source) / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequest(f"no tokenizer.json in {source}; a proof compares two of them")
        content = path.read_bytes()
    spec: dict[str, Any] = json.loads(content)
    return spec


def _plain(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}, ensure_ascii=False))


def _digest(value: Any) -> str:
    # Not sorted: the order of merges is what they mean, and that of a vocabulary costs nothing to keep.
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
