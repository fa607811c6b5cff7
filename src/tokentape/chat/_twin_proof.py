"""Check that the twin and the tokenizer encode many texts to the same ids.

The twin (see `_tokenizer.py`) is a tokenizer with renamed control tokens. The texts are all vocabulary entries, runs of
white space, concatenations and parts of entries, text in many scripts, and code.
"""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tokenizers

from tokentape.chat import _tokenizer as tokenizer_module
from tokentape.chat import _tokenizer_files as tokenizer_files
from tokentape.chat._disk_cache import cache_directory, keep
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable

_LONGEST_RUN = 64
_AT_ONCE = 20_000
"""The number of texts that are encoded together, which limits memory."""


@dataclass(frozen=True, slots=True)
class TwinDifference:
    """A text that the twin and the tokenizer encode to different ids."""

    text: str
    twin_ids: list[int]
    tokenizer_ids: list[int]


def prove_twin(tokenizer: Tokenizer) -> None:
    """Raise `TokenizerUnusable` if the tokenizer and its twin encode one of many test texts differently.

    A control token with `single_word` is refused too: whether it is a token depends on callers' text beside it.

    The check takes about 5 s of CPU for 150,000 tokens, so a file in the disk cache records that it has passed.
    """
    for control in tokenizer.controls:
        if control.single_word:
            raise TokenizerUnusable(
                f"the control token {control.content!r} has single_word, so it is text beside a letter or digit, and "
                "prompts would lack it. Set single_word to false in tokenizer.json and tokenizer_config.json"
            )
    path = cache_directory("proofs") / f"{_key(tokenizer)}.json"
    if path.exists():
        return
    try:
        difference = twin_difference(tokenizer)
    except TokenizerUnusable:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise TokenizerUnusable(f"`tokenizers` loads this tokenizer but can't encode text with it: {error}") from error
    if difference is None:
        keep(path, "{}\n")
    else:
        raise TokenizerUnusable(
            f"keeping text and control tokens apart changes this tokenizer's ids: "
            f"{difference.text!r} encodes to {difference.tokenizer_ids[:24]}, but to {difference.twin_ids[:24]} with "
            "control tokens kept apart. Please report the model; `--strict-text` may help if an added token is text."
        )


def _key(tokenizer: Tokenizer) -> str:
    """Return a digest of what a proof depends on: tokenizer file, control tokens, library version, our source code."""
    parts = [tokenizer.sha256, [control.content for control in tokenizer.controls], tokenizers.__version__]
    parts += [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (tokenizer_files, tokenizer_module)]
    parts.append(Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def twin_difference(tokenizer: Tokenizer, cuts: int = 10_000) -> TwinDifference | None:
    """Return the first text that the twin and the tokenizer encode differently; None if they agree on all texts.

    `cuts` is the number of concatenations of two or three vocabulary entries to try, each whole and cut off.
    """
    remaining = proof_texts(tokenizer, cuts)
    while texts := list(islice(remaining, _AT_ONCE)):
        expected = tokenizer.encode_plain_batch(texts)
        actual = tokenizer.encode_marked_batch([tokenizer.mark_controls(text) for text in texts])
        for text, ours, theirs in zip(texts, actual, expected, strict=True):
            if ours != theirs:
                return TwinDifference(text, ours, theirs)
    return None


def proof_texts(tokenizer: Tokenizer, cuts: int) -> Iterator[str]:
    """Yield the texts to compare, which are always the same for a tokenizer and a number of cuts."""
    entries = [token.content for token in tokenizer.added_tokens]
    entries += filter(None, (_entry(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)))
    yield from entries
    yield from _runs()
    yield from _corpus(tokenizer)
    draw = random.Random(tokenizer.sha256)
    for _ in range(cuts if entries else 0):
        joined = "".join(draw.choices(entries, k=draw.choice((2, 3))))
        start = draw.randrange(len(joined))
        yield joined[start : draw.randint(start + 1, len(joined))] if draw.random() < 0.5 else joined[start:]
        yield joined


def _entry(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a token; empty if its bytes are not valid UTF-8 or if no token has the id."""
    try:
        return tokenizer.token_bytes(token_id).decode()
    except (UnicodeDecodeError, InvalidRequest):  # a part of a character, or an id that no token has
        return ""


def _runs() -> Iterator[str]:
    """Yield runs of 1 to 64 of each white-space character, alone and within text."""
    spaces = [char for char in map(chr, range(0x3001)) if char.isspace()]
    for space in (*spaces, "\u2581"):
        for length in range(1, _LONGEST_RUN + 1):
            yield space * length
            yield f"a{space * length}b\n{space * length}return 1"


def _corpus(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield words in every script, emoji with joiners, and code, also between control tokens."""
    blocks = [*range(0, 0x3400, 0x40), *range(0x4E00, 0xA000, 0x400), *range(0xA000, 0x11000, 0x80)]
    blocks += range(0x1F000, 0x1FB00, 0x40)
    for start in blocks:
        chars = [char for char in map(chr, range(start, start + 64)) if unicodedata.category(char)[0] not in "C"]
        words = [
            " ".join("".join(chars[n : n + 5]) for n in range(0, len(chars), 5)),
            "".join(chars),
            "\u200d".join(chars),
        ]
        yield from (text for text in words if text)
        yield from (unicodedata.normalize(form, words[0]) for form in ("NFD", "NFKC") if words[0])
    code = Path(__file__).read_text(encoding="utf-8")
    yield code
    for n, line in enumerate(code.splitlines()):
        control = tokenizer.controls[n % len(tokenizer.controls)].content if tokenizer.controls else ""
        yield f"{line}\r\n"
        yield f"{control}{line}\n\n{control} {line}{control}"
        yield f"{line} {n * 7919}.{n:03d}e-{n} don't I'LL {{\"k\": [{n}, null]}}\t\t{control}"
