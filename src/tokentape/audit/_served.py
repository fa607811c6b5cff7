"""Check that a server serves a model folder's model: compare vocabularies, score a text, and compare names.

`tokentape doctor` prints the results, and a gateway refuses servers that fail. If a server does not offer what a check
needs, the result is a warning, never ok.

The vocabulary is compared in a few dozen requests: the server encodes all entries as lines of long texts, with a rare
character after each if the tokenizer looks words up, and decodes the ids that no text encodes to, such as parts of
characters. A different merge order is not found if it affects only texts other than these.
"""

from __future__ import annotations

import asyncio
import json
import os.path
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from tokentape import errors
from tokentape._alignment import first_difference
from tokentape.audit._lock.lockfile import TEXTS
from tokentape.audit._skew.battery import merged_text
from tokentape.chat import _grammar as grammar
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import EngineInfo
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import ServedAs, process_start
from tokentape.engines._kinds import engine_class
from tokentape.engines._scoring import server_scores
from tokentape.engines._tokenizing import server_chat_ids, server_text, server_text_ids
from tokentape.types import Message, TokenIds, Tool

MARGIN = 4.0
"""How much likelier than random ids of similar rank the scored text must be, in nats per token. docs/engines.md has the
measurement, with ten tokenizers, on matching and mismatched pairs of folder and server."""

SCORED_TOKENS = 64

_MORE_IDS = 16
_SAMPLES = 4
"""The number of sequences of random ids to compare the text with. The mean of their scores is used."""

_OTHER_FOLDER = (
    "The server serves a different model than the folder's, or its tokenizer files differ from the folder's (compare "
    "their sha256), or it loads the tokenizer wrongly."
)
_OWN_FOLDER = "Pass the gateway the folder or the Hub repo id of the model that the server serves."
_OLDER_FOLDER = "The model folder belongs to a different model or to an older revision."
_UNTRAINED = (
    "The server serves a different model, or its model is untrained or trained on a narrow task only; --engine-model "
    "does not override this check."
)
_ANYWAY = "If it is the right model, pass --unverified-model; every verdict then says `model unverified`."

_SCORED: tuple[Message, ...] = (
    {"role": "user", "content": "What is the capital of France, and what can one see there?"},
    {
        "role": "assistant",
        "content": "The capital of France is Paris. It lies on both sides of a river in the north of the country, and "
        "about two million people live in the city. Many visitors go there to see the tower that was built at the end "
        "of the nineteenth century, and to look at paintings in one of the largest museums in the world.",
    },
    {"role": "user", "content": "Thank you. How long does it take to get there by train from London?"},
)
_CONVERSATIONS: Mapping[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {
    "a question": ((grammar.SYSTEM, grammar.QUESTION), ()),
    "a second question": ((grammar.SYSTEM, grammar.EARLIER, grammar.TURNS["content"], grammar.QUESTION), ()),
    "a question with a tool": ((grammar.SYSTEM, grammar.QUESTION), (grammar.TOOL,)),
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class FolderModel:
    """The names and the configuration of a model folder."""

    names: frozenset[str]
    """Its absolute path, and its Hub repo id if known."""
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, *names: str) -> FolderModel:
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        all_names = {str(folder.absolute()), str(folder.resolve()), *names}
        return cls(frozenset(all_names), config if isinstance(config, dict) else {})


async def serves_model(
    kind: str, http: HttpClient, info: EngineInfo, renderer: Renderer, folder: FolderModel, expected: str | None = None
) -> list[CheckResult]:
    """Compare a server with a model folder in all ways. If `expected` is given, the server must list that name."""
    served = await engine_class(kind).served_as(http)
    tokenizer = await same_tokenizer(kind, http, info.model, renderer)
    if tokenizer.status == "ok":
        tokenizer = await _whole_vocabulary(kind, http, info.model, renderer, served)
    findings = [tokenizer, same_name(served, folder, expected)]
    # Some servers crash on an id outside of their vocabulary, so ids are sent only if the tokenizer is the same.
    if tokenizer.status == "fail":
        runs = f"It serves {', '.join(sorted(served.names))}; the folder is {min(folder.names, key=len)}."
        return [replace(tokenizer, advice=f"{tokenizer.advice} {runs} {_OWN_FOLDER}"), findings[1]]
    findings.append(await likely_text(http, info, renderer))
    return [
        replace(finding, advice=f"{finding.advice} {_ANYWAY}") if finding.status == "fail" else finding
        for finding in findings
    ]


async def same_tokenizer(kind: str, http: HttpClient, model: str, renderer: Renderer) -> CheckResult:
    name = "tokenizer"
    controls = "\n".join(control.content for control in renderer.tokenizer.controls)
    texts = [text for text in (*TEXTS.values(), controls) if text]
    try:
        requests = (server_text_ids(kind, http, model, text, controls=text is controls) for text in texts)
        answers = await asyncio.gather(*requests)
        more = None if None in answers else await _more_text(kind, http, model, renderer.tokenizer.vocab_size)
    except errors.TokentapeError as error:
        return CheckResult(name, "warn", f"not compared: the server's tokenize endpoint failed: {error}")
    if None in answers:
        return CheckResult(name, "warn", "not compared: this server has no tokenize endpoint")
    for text, theirs in zip(texts, answers, strict=True):
        ours = renderer.tokenizer.encode_plain(text)
        if theirs is not None and theirs != ours:
            shown = "the text of all control tokens" if text is controls else repr(text)
            return CheckResult(name, "fail", f"{shown} has the ids {around(ours, theirs)}", _OTHER_FOLDER)
    if more:
        message = f"the server decodes ids from {renderer.tokenizer.vocab_size} on, which the folder does not have"
        return CheckResult(name, "fail", message, _OLDER_FOLDER)
    return CheckResult(name, "ok", f"the server's ids equal ours for {len(TEXTS)} texts and all control tokens")


_COMPARED: WeakKeyDictionary[HttpClient, tuple[str | int, ServedAs, str]] = WeakKeyDictionary()
"""By connection: the server's process, its models and our tokenizer when the vocabularies were last found equal."""


async def _whole_vocabulary(
    kind: str, http: HttpClient, model: str, renderer: Renderer, served: ServedAs
) -> CheckResult:
    """Compare the whole vocabulary with the server's, unless it was found equal and nothing has changed since."""
    name, process = "tokenizer", (await process_start(http) if kind == "vllm" else None) or http.generation
    now = process, served, renderer.tokenizer.sha256
    if _COMPARED.get(http) != now:
        try:
            status, message = await same_vocabulary(kind, http, model, renderer.tokenizer)
        except errors.TokentapeError as error:
            status, message = "warn", f"not compared: asking the server for its vocabulary failed: {error}"
        if status != "ok":
            return CheckResult(name, status, message, _OTHER_FOLDER if status == "fail" else "")
        _COMPARED[http] = now
    size = renderer.tokenizer.vocab_size
    return CheckResult(name, "ok", f"the server's ids equal ours for texts, control tokens, {size} vocabulary entries")


async def _more_text(kind: str, http: HttpClient, model: str, vocab_size: int) -> str | None:
    """Return the server's text of ids above the folder's vocabulary. Any text shows that it has more tokens."""
    if kind not in ("vllm", "sglang"):
        return None
    try:
        return await server_text(kind, http, model, range(vocab_size, vocab_size + _MORE_IDS))
    except (errors.EngineUnavailable, errors.EngineTimeout):
        raise
    except errors.EngineError:
        return None


async def likely_text(http: HttpClient, info: EngineInfo, renderer: Renderer) -> CheckResult:
    """Check that the served model gives a plain text, rendered with the folder's template, a high probability.

    The score is compared with that of random ids of similar rank that repeat in the same places. To a model with
    a different vocabulary both are noise, even if it copies well and prefers frequent ids. Raises `EngineUnavailable`
    and `EngineTimeout`.
    """
    name = "text"
    try:
        ids = renderer.render(_SCORED).ids
    except errors.TokentapeError as error:
        return CheckResult(name, "warn", f"not scored: {error}")
    if len(ids) >= info.max_context:
        return CheckResult(name, "warn", f"not scored: {len(ids)} tokens exceed the server's {info.max_context}")
    others = [other_ids(ids, renderer.tokenizer.vocab_size, seed) for seed in range(_SAMPLES)]
    try:
        # One at a time: vLLM 0.32 with adapters on a CPU crashes if one shares a batch with another call.
        starts = ((row, max(1, len(row) - SCORED_TOKENS)) for row in (ids, *others))
        scored = [await server_scores(http, info, row, start) for row, start in starts]
    except (errors.EngineContractError, errors.InvalidRequest) as error:
        return CheckResult(name, "warn", f"not scored: {error}")
    means = [float(scores.logprobs.mean()) for scores in scored if scores is not None]
    if len(means) != len(scored):
        return CheckResult(name, "warn", "not scored: this server returns no prompt logprobs")
    margin = means[0] - float(np.mean(means[1:]))
    message = f"{margin:.1f} nats per token likelier than random ids (at least {MARGIN} expected)"
    if not margin >= MARGIN:
        message = f"the server's model predicts plain text hardly better than noise: it is {message}"
        return CheckResult(name, "fail", message, _UNTRAINED)
    return CheckResult(name, "ok", message)


def other_ids(ids: TokenIds, vocab_size: int, seed: int) -> TokenIds:
    """Return ids with the last `SCORED_TOKENS` replaced by random ids of similar rank, equal ids by equal ids."""
    random = np.random.default_rng(seed)
    tail = ids[-SCORED_TOKENS:].astype(np.int64)
    own, places = np.unique(tail, return_inverse=True)
    low, high = np.maximum(own * 4 // 5 - 50, 0), np.minimum(own * 5 // 4 + 50, vocab_size)
    return np.concatenate([ids[:-SCORED_TOKENS], random.integers(low, high)[places]]).astype(np.int32)


def same_name(served: ServedAs, folder: FolderModel, expected: str | None = None) -> CheckResult:
    name, config = "name", folder.config
    says = f"the server says that it serves {', '.join(sorted(served.names)) or 'nothing'}"
    advice = "Pass the served model's folder, or confirm with --engine-model NAME that NAME is the folder's model."
    facts = (("model_type", served.model_type), ("hidden_size", served.hidden_size))
    for field, value in facts:
        if value is not None and config.get(field, value) != value:
            return CheckResult(name, "fail", f"{says}: its {field} is {value}, the folder's {config[field]}", advice)
    if expected is not None:
        if expected in served.ids:
            return CheckResult(name, "ok", f"the server serves {expected}, as expected")
        return CheckResult(name, "fail", f"{says}, not {expected}", advice)
    if {_short(label) for label in served.names} & {_short(label) for label in folder.names}:
        return CheckResult(name, "ok", says)
    message = f"{says}; the folder is {min(folder.names, key=len)}"
    if any(map(_telling, served.names)) and any(map(_telling, folder.names)):
        return CheckResult(name, "fail", message, advice)
    room = config.get("max_position_embeddings")
    if isinstance(room, int) and served.max_model_len is not None and served.max_model_len > room:
        return CheckResult(name, "fail", f"{message}; its context of {served.max_model_len} exceeds {room}", advice)
    return CheckResult(name, "warn", f"{message}: the names do not show whether these are the same", advice)


def _hub_name(name: str) -> str:
    """Return the Hub repo id in a Hub cache path, and any other name unchanged."""
    cached = re.search(r"models--([^/]+?)--([^/]+)", name)
    return f"{cached[1]}/{cached[2]}" if cached else name


def _short(name: str) -> str:
    return re.split(r"[/\\]", _hub_name(name).rstrip("/\\"))[-1].lower()


def _telling(name: str) -> bool:
    """Return True for a name that identifies a model: a Hub repo id, or a name with a parameter count."""
    return bool(
        re.fullmatch(r"[\w.-]+/[\w.-]+", _hub_name(name))
        or re.search(r"(?<![a-z\d])\d+(\.\d+)?b(?![a-z\d])", _short(name))
    )


async def same_template(kind: str, http: HttpClient, model: str, renderer: Renderer) -> CheckResult:
    """Compare the ids that the server and we render for conversations. Only a difference has advice."""
    name = "template"
    advice = (
        "The gateway renders with the folder's template, so agents that call the server directly get a different "
        "prompt. To render as the server does, use its model folder, or pass its template with --chat-template."
    )
    compared = 0
    for what, (messages, tools) in _CONVERSATIONS.items():
        try:
            ours = renderer.render(messages, tools).ids.tolist()
            theirs = await server_chat_ids(kind, http, model, messages, tools)
        except errors.TemplateRefused:
            continue
        except errors.TokentapeError as error:
            return CheckResult(name, "warn", f"not compared: the server's chat rendering failed: {error}")
        if theirs is None:
            continue
        compared += 1
        if theirs != ours:
            message = f"the server's chat template gives different ids for {what}: {around(ours, theirs)}"
            return CheckResult(name, "warn", message, advice)
    if not compared:
        return CheckResult(name, "warn", "not compared: this server renders none of the conversations")
    return CheckResult(name, "ok", f"the server renders the same ids as we do for {compared} conversations")


_ENTRIES = 12_000

_LEADS = (b"", b"\xc3", b"\xe1", b"\xf1")
_TRAILS = (b"", *(first + b"\x80" * more for more in range(3) for first in (b"\x80", b"\xa0")))
"""Bytes that complete a partial character."""

Outcome: TypeAlias = tuple[Literal["ok", "warn", "fail"], str]


async def same_vocabulary(kind: str, http: HttpClient, model: str, tokenizer: Tokenizer) -> Outcome:
    """Compare the server's vocabulary with the tokenizer's. Return what differs, or what could not be compared."""
    texts, undecoded = await asyncio.to_thread(_vocabulary, tokenizer)
    for parts, ours in texts:
        theirs = await server_text_ids(kind, http, model, "".join(parts), controls=True)
        if theirs != ours.tolist():
            return await _encoded_otherwise(kind, http, model, tokenizer, parts, theirs or [])
    for sequences in undecoded:
        text = await server_text(kind, http, model, [*chain.from_iterable(sequences)])
        if text is None:
            return "warn", f"not compared: {len(sequences)} ids that no text encodes to: the server can't decode"
        if difference := _decoded_otherwise(tokenizer, sequences, text):
            return "fail", difference
    return "ok", ""


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: Tokenizer) -> tuple[list[tuple[list[str], TokenIds]], list[list[list[int]]]]:
    """Return long texts as parts and ids, and ids that no text encodes to, with ids that complete their characters."""
    pieces: dict[int, bytes] = {}
    for token_id in range(tokenizer.vocab_size):
        try:
            pieces[token_id] = tokenizer.token_bytes(token_id)
        except errors.InvalidRequest:  # no token has this id
            continue
    spelled = dict.fromkeys(filter(None, map(_text, pieces.values())))
    entries = [text for text in spelled if not tokenizer.control_pattern.search(text)]
    lines = [f"{text}\n" for text in entries]
    if tokenizer.looks_words_up:
        lines += [f"{merged_text(text)}\n" for text in entries]
    texts = [lines[start : start + _ENTRIES] for start in range(0, len(lines), _ENTRIES)]
    ids = [tokenizer.array(encoding) for encoding in tokenizer.encode_plain_batch(["".join(parts) for parts in texts])]
    seen = {control.id for control in tokenizer.controls}.union(*(array.tolist() for array in ids))
    single = {piece: token_id for token_id, piece in pieces.items() if len(piece) == 1}
    completed = (_completed(token_id, piece, single) for token_id, piece in pieces.items() if token_id not in seen)
    sequences = [*filter(None, completed)]
    undecoded = [sequences[start : start + _ENTRIES] for start in range(0, len(sequences), _ENTRIES)]
    return list(zip(texts, ids, strict=True)), undecoded


def _text(data: bytes) -> str:
    """Return UTF-8 as text; empty if it has an incomplete character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""


def _completed(token_id: int, piece: bytes, single: dict[bytes, int]) -> list[int]:
    """Return an id with the ids of bytes that complete its characters, or [] if its bytes can't be completed."""
    for lead, trail in product(_LEADS, _TRAILS):
        if _text(lead + piece + trail):
            around = ([single.get(bytes([byte]), -1) for byte in part] for part in (lead, trail))
            before, after = around
            return [] if -1 in (*before, *after) else [*before, token_id, *after]
    return []


async def _encoded_otherwise(
    kind: str, http: HttpClient, model: str, tokenizer: Tokenizer, parts: list[str], theirs: list[int]
) -> Outcome:
    text = "".join(parts)
    ours = tokenizer.encode_plain(text)
    position = first_difference(ours, theirs)
    # The number of parts before the difference. Each step encodes a text.
    n = bisect_left(range(len(parts)), position, key=lambda n: len(tokenizer.encode_plain("".join(parts[: n + 1]))) - 1)
    for small in (parts[n][:-1], parts[n], "".join(parts[max(0, n - 1) : n + 2])):
        answer = await server_text_ids(kind, http, model, small, controls=True)
        if answer is not None and answer != tokenizer.encode_plain(small):
            text, ours, theirs = small, tokenizer.encode_plain(small), answer
            break
    position = first_difference(ours, theirs)
    shown = text if len(text) < 200 else tokenizer.decode(ours[max(0, position - 3) : position + 4])
    message = f"{shown!r} has the ids {around(ours, theirs)}"
    # llama.cpp splits some rare texts differently. Its tokenizer is not used, so only the meaning of ids counts.
    if kind == "llamacpp" and await server_text(kind, http, model, ours) == text:
        return "warn", f"{message}, which decodes both to this text"
    return "fail", message


def _decoded_otherwise(tokenizer: Tokenizer, sequences: list[list[int]], text: str) -> str:
    """Describe where the text of ids first differs, ignoring white space. Return "" if it does not differ."""
    ours = ["".join(tokenizer.decode(ids).split()) for ids in sequences]
    theirs = "".join(text.split())
    if theirs == "".join(ours):
        return ""
    offset = len(os.path.commonprefix(["".join(ours), theirs]))
    ends = [*accumulate(map(len, ours))]
    n = min(bisect_right(ends, offset), len(ours) - 1)
    there = theirs[ends[n] - len(ours[n]) :][: len(ours[n]) + 8]
    return f"the ids {sequences[n]} decode to {ours[n]!r} here and to {there!r}... at the server"


def around(ours: Sequence[int], theirs: Sequence[int]) -> str:
    start = first_difference(ours, theirs)
    return (
        f"{list(ours[start : start + 4])} here and {list(theirs[start : start + 4])} at the server from token {start} "
        f"on (tokens in all: {len(ours)} here, {len(theirs)} at the server)"
    )
