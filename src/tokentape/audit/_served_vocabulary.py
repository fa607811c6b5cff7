"""Compare the whole vocabulary of a model folder with a server's, in a few dozen requests.

The server encodes the texts of all entries, joined to long texts of lines. If the tokenizer looks whole words up, it
does so again with a rare character after each entry, so that it has to merge. It decodes the ids that none of these
texts has, such as those of parts of characters. Merges in another order are not found if only other texts show them.
"""

from __future__ import annotations

import asyncio
import os.path
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, product
from typing import Literal, TypeAlias

from tokentape.audit._skew.battery import merged_text
from tokentape.audit._tokendiff.alignment import first_difference
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._http import HttpClient
from tokentape.engines._tokenizing import server_text, server_text_ids
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds

_ENTRIES = 12_000
"""The number of entries in one request."""

_LEADS = (b"", b"\xc3", b"\xe1", b"\xf1")
_TRAILS = (b"", *(first + b"\x80" * more for more in range(3) for first in (b"\x80", b"\xa0")))
"""Bytes that complete a part of a character."""

Outcome: TypeAlias = tuple[Literal["ok", "warn", "fail"], str]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    texts: list[list[str]]
    """The parts of each text that a server encodes."""
    ids: list[TokenIds]
    """The ids of each text."""
    sequences: list[list[list[int]]]
    """The ids that no text has, each among those of bytes that complete its characters."""


async def same_vocabulary(kind: str, http: HttpClient, model: str, tokenizer: Tokenizer) -> Outcome:
    """Compare the server's vocabulary with the tokenizer's. Return what differs, or what could not be compared.

    Raises `EngineError` or a subclass.
    """
    vocabulary = await asyncio.to_thread(_vocabulary, tokenizer)
    for parts, ours in zip(vocabulary.texts, vocabulary.ids, strict=True):
        theirs = await server_text_ids(kind, http, model, "".join(parts), controls=True)
        if theirs != ours.tolist():
            return await _encoded_otherwise(kind, http, model, tokenizer, parts, theirs or [])
    for sequences in vocabulary.sequences:
        text = await server_text(kind, http, model, [*chain.from_iterable(sequences)])
        if text is None:
            return "warn", f"not compared: the server does not decode the {len(sequences)} ids that no text has"
        if found := _decoded_otherwise(tokenizer, sequences, text):
            return "fail", found
    return "ok", ""


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    pieces: dict[int, bytes] = {}
    for token_id in range(tokenizer.vocab_size):
        try:
            pieces[token_id] = tokenizer.token_bytes(token_id)
        except InvalidRequest:  # no token has this id
            continue
    spelled = dict.fromkeys(filter(None, map(_text, pieces.values())))
    entries = [text for text in spelled if not tokenizer.control_pattern.search(text)]
    lines = [f"{text}\n" for text in entries]
    if tokenizer.looks_words_up:
        lines += [f"{merged_text(text)}\n" for text in entries]
    texts = [lines[at : at + _ENTRIES] for at in range(0, len(lines), _ENTRIES)]
    ids = [tokenizer.array(one) for one in tokenizer.encode_plain_batch(["".join(parts) for parts in texts])]
    seen = {control.id for control in tokenizer.controls}.union(*(one.tolist() for one in ids))
    single = {piece: token_id for token_id, piece in pieces.items() if len(piece) == 1}
    found = (_completed(token_id, piece, single) for token_id, piece in pieces.items() if token_id not in seen)
    sequences = [*filter(None, found)]
    return _Vocabulary(texts, ids, [sequences[at : at + _ENTRIES] for at in range(0, len(sequences), _ENTRIES)])


def _text(data: bytes) -> str:
    """Return UTF-8 as text; empty if it has an incomplete character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""


def _completed(token_id: int, piece: bytes, single: dict[bytes, int]) -> list[int]:
    """Return an id with those of bytes that complete its characters. Return nothing if its bytes are never UTF-8."""
    for lead, trail in product(_LEADS, _TRAILS):
        if _text(lead + piece + trail):
            around = ([single.get(bytes([byte]), -1) for byte in part] for part in (lead, trail))
            before, after = around
            return [] if -1 in (*before, *after) else [*before, token_id, *after]
    return []


async def _encoded_otherwise(
    kind: str, http: HttpClient, model: str, tokenizer: Tokenizer, parts: list[str], theirs: list[int]
) -> Outcome:
    """Describe the first difference in the ids of a text, by the part that it is in."""
    text = "".join(parts)
    ours = tokenizer.encode_plain(text)
    at = first_difference(ours, theirs)
    # The number of parts before the difference. Each step encodes a text.
    n = bisect_left(range(len(parts)), at, key=lambda n: len(tokenizer.encode_plain("".join(parts[: n + 1]))) - 1)
    for small in (parts[n][:-1], parts[n], "".join(parts[max(0, n - 1) : n + 2])):
        answer = await server_text_ids(kind, http, model, small, controls=True)
        if answer is not None and answer != tokenizer.encode_plain(small):
            text, ours, theirs = small, tokenizer.encode_plain(small), answer
            break
    at = first_difference(ours, theirs)
    shown = text if len(text) < 200 else tokenizer.decode(ours[max(0, at - 3) : at + 4])
    found = f"{shown!r} has the ids {around(ours, theirs)}"
    # llama.cpp splits some rare texts otherwise. Its tokenizer is not used, so only the meaning of ids counts.
    if kind == "llamacpp" and await server_text(kind, http, model, ours) == text:
        return "warn", f"{found}, which decodes both to this text"
    return "fail", found


def _decoded_otherwise(tokenizer: Tokenizer, sequences: list[list[int]], text: str) -> str:
    """Describe the first difference in the text of ids, apart from white space; empty if there is none."""
    ours = ["".join(tokenizer.decode(ids).split()) for ids in sequences]
    theirs = "".join(text.split())
    if theirs == "".join(ours):
        return ""
    at = len(os.path.commonprefix(["".join(ours), theirs]))
    ends = [*accumulate(map(len, ours))]
    n = min(bisect_right(ends, at), len(ours) - 1)
    there = theirs[ends[n] - len(ours[n]) :][: len(ours[n]) + 8]
    return f"the ids {sequences[n]} are {ours[n]!r} here and begin {there!r} at the server"


def around(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Describe the first difference of two sequences of ids."""
    at = first_difference(ours, theirs)
    return (
        f"{list(ours[at : at + 4])} here and {list(theirs[at : at + 4])} at the server from token {at} on "
        f"(tokens in all: {len(ours)} here, {len(theirs)} at the server)"
    )
