"""A causal language model of transformers as `byte_level` asks it: behind one context, which is computed once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.errors import InvalidRequest


class TransformersModel:
    """A model and a context. Use `TransformersModel.load`, or give a model that is loaded already.

    >>> model = TransformersModel.load("path/to/model", context_ids)            # doctest: +SKIP
    >>> bytes_logprob(model, b"hello", Spellings.of(tokenizer))                 # doctest: +SKIP
    """

    def __init__(self, model: Any, context_ids: Sequence[int]) -> None:
        """`model` is a `PreTrainedModel` in evaluation mode. Raises `InvalidRequest` for an empty context."""
        import torch

        if not len(context_ids):
            raise InvalidRequest("the context is empty; give at least the id that texts begin with")
        self._torch = torch
        self._model = model
        self._device = model.device
        with torch.inference_mode():
            begun = self._run([list(context_ids)], None)
        self._cache = begun.past_key_values
        self._first = self._logprobs(begun.logits[0, -1])

    @classmethod
    def load(cls, folder: str | Path, context_ids: Sequence[int], *, device: str = "cpu") -> TransformersModel:
        """Load the weights of a folder, in float32; nothing is downloaded. Raises `EngineError` if it can't."""
        from tokentape.engines.loading import load_model

        return cls(load_model(Path(folder), dtype="float32", device=device), context_ids)

    def next_logprobs(self, prefixes: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """See `TokenModel`. Prefixes of one length are computed together."""
        rows = np.empty((len(prefixes), len(self._first)))
        by_length: dict[int, list[int]] = {}
        for at, prefix in enumerate(prefixes):
            by_length.setdefault(len(prefix), []).append(at)
        for length, places in by_length.items():
            if not length:
                rows[places] = self._first
                continue
            with self._torch.inference_mode():
                cache = copy.deepcopy(self._cache)
                cache.batch_repeat_interleave(len(places))
                logits = self._run([list(prefixes[at]) for at in places], cache).logits[:, -1]
                rows[places] = self._logprobs(logits)
        return rows

    def logprobs_of(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """See `TokenModel`. One forward pass."""
        if not len(ids):
            return np.empty(0)
        with self._torch.inference_mode():
            found = [self._first[ids[0]]]
            if len(ids) > 1:
                logits = self._run([list(ids[:-1])], copy.deepcopy(self._cache)).logits[0]
                wanted = self._torch.tensor(list(ids[1:]), device=logits.device)
                logits = logits.double()
                taken = logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
                found += taken.cpu().tolist()
        return np.array(found, np.float64)

    def _run(self, rows: list[list[int]], cache: Any) -> Any:
        ids = self._torch.tensor(rows, device=self._device)
        return self._model(input_ids=ids, past_key_values=cache, use_cache=True)

    def _logprobs(self, logits: Any) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = logits.double().log_softmax(-1).cpu().numpy()
        return found
