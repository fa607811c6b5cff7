"""Score ids that are there already: the log-probability of each one given those before it, by any engine that can.

What an engine says here is of the model's own distribution: at temperature 1, before penalties, truncation and grammar.
vLLM's prompt log-probabilities are, whatever its `--logprobs-mode` (except the modes that report logits, which are
refused), and so are SGLang's input log-probabilities. No engine offers another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tokentape.engines.base import EngineInfo
from tokentape.engines.http import HttpClient
from tokentape.engines.replies import LOWEST, ROUNDING, decode, logits_error
from tokentape.errors import EngineError, EngineTimeout, EngineUnavailable, InvalidRequest
from tokentape.types import Logprobs, TokenIds

SERVER_TOP = 20
"""The most alternatives that servers are asked for: vLLM's own limit, unless `--max-logprobs` says otherwise."""

_Shape = TypeVar("_Shape", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of ids, natural log."""

    logprobs: Logprobs
    """Shape [tokens]."""
    top: npt.NDArray[np.float32]
    """The largest log-probabilities of each position, best first, shape [tokens, at most as many as asked for]."""


class Scorer(Protocol):
    """An engine that tells how likely its model finds ids: `TransformersEngine`, and those of vLLM and SGLang."""

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        ...

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]`, each id given all before it; int32 [tokens] and `1 <= start < tokens`.

        With `top` the largest log-probabilities of each position too, or as many as the engine tells.

        Raises `InvalidRequest` for ids that the model does not have or more than it takes, and `EngineError`, without
        `retry` where the engine can't score.
        """
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...


def refuse_unscorable(ids: TokenIds, start: int, info: EngineInfo, *, room: int = 0) -> None:
    """Raise `InvalidRequest` for ids that can't be scored from `start` on, with `room` for more in the context."""
    if not 1 <= start < len(ids):
        raise InvalidRequest(f"start is {start}; expected 1 to {len(ids) - 1}: the first id has no context", "start")
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        raise InvalidRequest(f"ids from {ids.min()} to {ids.max()}: this model has 0 to {info.vocab_size - 1}", "ids")
    if len(ids) + room > info.max_context:
        raise InvalidRequest(f"{len(ids)} tokens: this engine scores at most {info.max_context - room}", "ids")


class _Prompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class _Choices(_Prompt):
    choices: list[_Prompt] = []


class _Input(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Input


async def server_scores(http: HttpClient, info: EngineInfo, ids: TokenIds, start: int, top: int = 0) -> Scores | None:
    """What `Scorer.score` returns, from a server; None if it does not tell how likely a prompt is.

    Raises `InvalidRequest` if the server refuses the ids, as SGLang does the last few that its context has room for,
    `EngineUnavailable`, `EngineTimeout`, and `EngineContractError` for a server that reports logits.
    """
    top = min(top, SERVER_TOP)
    found: list[tuple[Any, list[Any]]] | None = None
    if info.name in ("vllm", "openai:vllm"):
        # 0 asks for the ids' own.
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        body = {"model": info.model, "prompt": ids.tolist(), "add_special_tokens": False}
        try:
            completion = await _asked(http, "/v1/completions", body | sampling, _Choices)
        except InvalidRequest:
            if info.name != "vllm":
                raise
            completion = None
        choices = completion.choices if completion is not None else []
        found = _of_rows(ids, start, top, choices[0] if choices else None)
        if info.name == "vllm" and found is None:
            body = {"model": info.model, "token_ids": ids.tolist(), "sampling_params": sampling}
            found = _of_rows(ids, start, top, await _asked(http, "/inference/v1/generate", body, _Prompt))
    elif info.name == "sglang":
        # The entry of the first position that is asked for has no log-probability.
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": ids.tolist(), "sampling_params": sampling, "return_logprob": True}
        body |= {"logprob_start_len": start - 1, "top_logprobs_num": top}
        told = await _asked(http, "/generate", body, _Generated)
        found = None if told is None else _of_entries(ids, start, top, told.meta_info)
    return None if found is None else _scores(found)


def _scores(found: Sequence[tuple[Any, list[Any]]]) -> Scores | None:
    if not all(isinstance(value, float | int) for own, best in found for value in (own, *best)):
        return None
    width = min(len(best) for _, best in found)
    best = np.array([row[:width] for _, row in found], np.float64).reshape(len(found), width)
    own = np.array([value for value, _ in found], np.float64)
    if own.max() > ROUNDING or (width and np.exp(best).sum(1).max() > 1 + ROUNDING):
        raise logits_error()
    return Scores(_finite(own), _finite(best))


def _finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Values as float32; what stands for minus infinity is that."""
    return np.where(values <= LOWEST, -np.inf, values).astype(np.float32)


def _of_rows(ids: TokenIds, start: int, top: int, prompt: _Prompt | None) -> list[tuple[Any, list[Any]]] | None:
    """Per id its log-probability and the `top` best, in vLLM's rows, which hold the id's own besides."""
    rows = prompt.prompt_logprobs if prompt is not None else None
    if rows is None or len(rows) != len(ids):
        return None
    found = []
    for one, row in zip(ids[start:].tolist(), rows[start:], strict=True):
        told = row or {}
        best = sorted((given.get("logprob", LOWEST) for given in told.values()), reverse=True)
        found.append((told.get(str(one), {}).get("logprob"), best[:top]))
    return found


def _of_entries(ids: TokenIds, start: int, top: int, told: _Input) -> list[tuple[Any, list[Any]]] | None:
    """The same in SGLang's entries, which begin one position earlier."""
    entries, best = told.input_token_logprobs, told.input_top_logprobs or []
    if [entry[1] for entry in entries] != ids[start - 1 :].tolist() or (top and len(best) != len(entries)):
        return None
    rows = best[1:] if top else [[] for _ in entries[1:]]
    return [(entry[0], [one[0] for one in row or ()]) for entry, row in zip(entries[1:], rows, strict=True)]


async def _asked(http: HttpClient, path: str, body: Mapping[str, Any], shape: type[_Shape]) -> _Shape | None:
    """The answer; None if the server has no such route or answers in another form. Raises as `server_scores`."""
    try:
        return decode(await http.post(path, msgspec.json.encode(body), {}), shape, "an engine")
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:
        return None
