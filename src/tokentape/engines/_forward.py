"""Score ids with the forward pass of a local model, in chunks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tokentape.engines._base import common_prefix
from tokentape.engines._kv import cache_name
from tokentape.engines._scoring import Scores
from tokentape.types import TokenIds


class ForwardPass:
    """Scores ids with a `transformers` causal language model in evaluation mode. It is thread-safe.

    At most `chunk` rows of logits are in memory at a time. The keys and values of the previous ids are kept, so that
    ids with a common prefix, such as branches of a session, are computed only after that prefix.
    """

    def __init__(self, model: Any, *, chunk: int = 1024) -> None:
        self.model = model
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
        own = np.empty(max(len(ids) - start, 0), np.float32)
        best = np.empty((len(own), width), np.float32)
        with self._lock, torch.inference_mode():
            done = self._keep_common(ids[: start - 1])
            tensor = torch.from_numpy(ids.astype(np.int64)).to(self.model.device)
            try:
                while done < len(ids) - 1:
                    end = min(done + self._chunk, len(ids) - 1)
                    output = self.model(tensor[None, done:end], use_cache=True, **{self._cache_name: self._cache})
                    first = max(done, start - 1)
                    if first < end:
                        logprobs = output.logits[0, first - done :].float().log_softmax(-1)
                        rows = slice(first + 1 - start, end + 1 - start)
                        own[rows] = logprobs.gather(1, tensor[first + 1 : end + 1, None])[:, 0].cpu().numpy()
                        best[rows] = logprobs.topk(width).values.cpu().numpy()
                    done = end
            except BaseException:
                self._forget()
                raise
            self._ids = ids[:-1].copy()
        return Scores(own, best)

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
