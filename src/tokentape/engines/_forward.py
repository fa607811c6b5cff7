"""Score ids with the forward pass of a local model, in chunks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from tokentape.engines._base import common_prefix
from tokentape.engines._kv import cache_name
from tokentape.engines._scoring import AMONG_TOKENS, Scores
from tokentape.types import TokenIds


class ForwardPass:
    """Scores ids with a `transformers` causal language model in evaluation mode. It is thread-safe.

    At most `chunk` rows of logits are in memory at a time. The keys and values of the previous ids are kept, so that
    ids with a common prefix, such as branches of a session, are computed only after that prefix. `excluded`, bool
    [rows of the output layer], are the ids without probability in `Scores.among_tokens`.
    """

    def __init__(self, model: Any, *, chunk: int = 1024, excluded: npt.NDArray[np.bool_] | None = None) -> None:
        self.model = model
        self._excluded = None
        if excluded is not None and excluded.any():
            self._excluded = torch.from_numpy(excluded).to(model.device)
        self._chunk, self._cache_name = chunk, cache_name(model)
        self._lock = threading.Lock()
        self._ids: TokenIds = np.empty(0, np.int32)
        """The ids that the cached keys and values belong to."""
        self._cache = DynamicCache(config=model.config)
        # Caches of other layer types, such as sliding windows, can't be cropped.
        self._cuts = {type(layer).__name__ for layer in self._cache.layers} == {"DynamicLayer"}

    def score(self, ids: TokenIds, start: int, top: int = 0) -> Scores:
        """Score `ids[start:]`, int32 [tokens], `1 <= start <= tokens`, with up to `top` alternatives; see `Scorer`."""
        width = min(top, self.model.get_output_embeddings().weight.shape[0])
        masks = [None] if self._excluded is None or not width else [None, self._excluded]
        many = max(len(ids) - start, 0)
        widths = (width, min(width, AMONG_TOKENS))[: len(masks)]
        arrays = [(np.empty(many, np.float32), np.empty((many, best), np.float32)) for best in widths]
        with self._lock, torch.inference_mode():
            done = self._keep_common(ids[: start - 1])
            tensor = torch.from_numpy(ids.astype(np.int64)).to(self.model.device)
            try:
                while done < len(ids) - 1:
                    end = min(done + self._chunk, len(ids) - 1)
                    output = self.model(tensor[None, done:end], use_cache=True, **{self._cache_name: self._cache})
                    first = max(done, start - 1)
                    if first < end:
                        logits = output.logits[0, first - done :].float()
                        rows = slice(first + 1 - start, end + 1 - start)
                        for mask, (own, best) in zip(masks, arrays, strict=True):
                            among = logits if mask is None else logits.masked_fill(mask, -torch.inf)
                            logprobs = among.log_softmax(-1)
                            own[rows] = logprobs.gather(1, tensor[first + 1 : end + 1, None])[:, 0].cpu().numpy()
                            best[rows] = logprobs.topk(best.shape[1]).values.cpu().numpy()
                    done = end
            except BaseException:
                self._forget()
                raise
            self._ids = ids[:-1].copy()
        among_tokens = Scores(*arrays[1]) if len(arrays) > 1 else None
        return Scores(*arrays[0], among_tokens)

    def _keep_common(self, ids: TokenIds) -> int:
        """Crop the cache to its common prefix with `ids`, and return that prefix's length."""
        common = common_prefix(self._ids, ids)
        if common < len(self._ids):
            if not self._cuts or not common:
                self._forget()
                return 0
            # A negative argument is the number of tokens to drop; transformers 5.23 accepts nothing else.
            self._cache.crop(common - len(self._ids))
        return common

    def _forget(self) -> None:
        self._ids = np.empty(0, np.int32)
        self._cache = DynamicCache(config=self.model.config)
