"""Score given ids: compute the log-probability of each id given all ids before it.

Scores are log-probabilities in the model's own distribution: at temperature 1, before penalties, truncation and
grammar. vLLM reports these for prompts in every `--logprobs-mode` (modes that report logits are refused), and so does
SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape.engines._base import EngineInfo
from tokentape.engines._http import HttpClient, attempt
from tokentape.engines._replies import LOWEST, ROUNDING, decode, logits_error
from tokentape.errors import InvalidRequest
from tokentape.types import Logprobs, TokenIds

SERVER_TOP = 20
"""Maximum number of alternatives to request from servers: vLLM's default `--max-logprobs`."""

AMONG_TOKENS = 512
"""Maximum number of alternatives in `Scores.among_tokens`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the scored ids (natural log)."""

    logprobs: Logprobs
    """Shape [tokens]."""
    top: npt.NDArray[np.float32]
    """The largest log-probabilities at each position, best first. Shape [tokens, at most the requested number]."""
    among_tokens: Scores | None = None
    """The same if ids that are no tokens have no probability, as the embedded engine samples, with at most
    `AMONG_TOKENS` alternatives. None if there are no such ids, or if they are not known."""


class Scorer(Protocol):
    """An engine that scores ids: `TransformersEngine`, and the engines of vLLM and SGLang."""

    @property
    def info(self) -> EngineInfo:
        """The facts about this engine."""
        ...

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]`, each id given all ids before it. `ids` are int32 [tokens], `1 <= start < tokens`.

        Also return the `top` largest log-probabilities at each position, or as many as the engine reports. Raises
        `InvalidRequest` for unknown or too many ids, and `EngineError` without `retry` if the engine can't score.
        """
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


def refuse_unscorable(ids: TokenIds, start: int, info: EngineInfo, *, room: int = 0) -> None:
    """Raise `InvalidRequest` for ids that can't be scored from `start` on, with `room` for more tokens after them."""
    if not 1 <= start < len(ids):
        raise InvalidRequest(
            f"start is {start}; expected 1 to {len(ids) - 1}: the first id has no logprob",
            "start",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        raise InvalidRequest(
            f"ids are {ids.min()} to {ids.max()}; expected 0 to {info.vocab_size - 1}, this model's vocabulary", "ids"
        )
    if len(ids) + room > info.max_context:
        raise InvalidRequest(f"got {len(ids)} ids; this engine scores at most {info.max_context - room}", "ids")


class _Input(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _Scored(msgspec.Struct):
    """A reply on any of the paths, each of which has some of these fields."""

    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    choices: list[_Scored] = []
    meta_info: _Input | None = None


_Row: TypeAlias = tuple[Any, list[Any]]
"""The log-probability of an id, and the largest log-probabilities at its position."""


async def server_scores(http: HttpClient, info: EngineInfo, ids: TokenIds, start: int, top: int = 0) -> Scores | None:
    """Score ids on a server; see `Scorer.score`. Return None if the server does not score prompts.

    Also raises `InvalidRequest` if the server refuses the ids (SGLang does so a few ids before its context is full),
    and `EngineContractError` if it reports logits.
    """
    top = min(top, SERVER_TOP)
    rows: list[_Row] | None = None
    for path in info.scoring_paths:
        try:
            rows = await _rows_at(path, http, info.model, ids, start, top)
        except InvalidRequest:
            if path == info.scoring_paths[-1]:
                raise
        if rows is not None:
            return _scores(rows)
    return None


async def _rows_at(path: str, http: HttpClient, model: str, ids: TokenIds, start: int, top: int) -> list[_Row] | None:
    """Request the rows from a path in `EngineInfo.scoring_paths`; None if it does not return them."""
    # 0 requests only the log-probabilities of the ids themselves.
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
    body: dict[str, Any]
    if path == "/generate":
        # SGLang. The entry for the first requested position has no log-probability.
        body = {"input_ids": ids.tolist(), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        body |= {"return_logprob": True, "logprob_start_len": start - 1, "top_logprobs_num": top}
    elif path == "/v1/completions":
        body = {"model": model, "prompt": ids.tolist(), "add_special_tokens": False, **sampling}
    else:
        body = {"model": model, "token_ids": ids.tolist(), "sampling_params": sampling}

    async def ask() -> _Scored:
        return decode(await http.post(path, msgspec.json.encode(body), {}), _Scored, "an engine")

    reply = await attempt(ask())
    if reply is None:
        return None
    if path == "/generate":
        return None if reply.meta_info is None else _sglang_rows(ids, start, top, reply.meta_info)
    if path == "/v1/completions":
        reply = next(iter(reply.choices), _Scored())
    return _vllm_rows(ids, start, top, reply.prompt_logprobs)


def _scores(rows: Sequence[_Row]) -> Scores | None:
    if not all(isinstance(value, float | int) for own, best in rows for value in (own, *best)):
        return None
    width = min(len(best) for _, best in rows)
    best = np.array([row[:width] for _, row in rows], np.float64).reshape(len(rows), width)
    own = np.array([value for value, _ in rows], np.float64)
    if own.max() > ROUNDING or (width and np.exp(best).sum(1).max() > 1 + ROUNDING):
        raise logits_error()
    return Scores(_finite(own), _finite(best))


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return values as float32, with minus infinity for values up to `LOWEST`."""
    return np.where(values <= LOWEST, -np.inf, values).astype(np.float32)


def _vllm_rows(
    ids: TokenIds, start: int, top: int, reported: list[dict[str, dict[str, Any]] | None] | None
) -> list[_Row] | None:
    if reported is None or len(reported) != len(ids):
        return None
    rows = []
    for token_id, entry in zip(ids[start:].tolist(), reported[start:], strict=True):
        # An entry contains the most likely ids and the scored id.
        values = {name: value.get("logprob", LOWEST) for name, value in (entry or {}).items()}
        own = (entry or {}).get(str(token_id), {}).get("logprob")
        rows.append((own, sorted(values.values(), reverse=True)[:top]))
    return rows


def _sglang_rows(ids: TokenIds, start: int, top: int, reported: _Input) -> list[_Row] | None:
    """Return the rows from `start` on. The reported entries begin one position earlier."""
    entries, best = reported.input_token_logprobs, reported.input_top_logprobs or []
    if [entry[1] for entry in entries] != ids[start - 1 :].tolist() or (top and len(best) != len(entries)):
        return None
    rows = best[1:] if top else [[] for _ in entries[1:]]
    return [(entry[0], [value for value, *_ in row or ()]) for entry, row in zip(entries[1:], rows, strict=True)]
