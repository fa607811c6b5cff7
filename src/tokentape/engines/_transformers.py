"""The embedded engine: it runs a local Hugging Face model in this process.

Importing this module loads neither torch nor transformers. `TransformersEngine.open` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokentape.engines._base import (
    DISTRIBUTION,
    Dtype,
    EngineInfo,
    Images,
    LogprobsMode,
    SampleDelta,
    SamplingParams,
)
from tokentape.engines._checks import refuse_call
from tokentape.engines._distributions import nonnegative_seed
from tokentape.engines._image_processor import QwenImageProcessor, find_image_processor
from tokentape.engines._scoring import Scores, refuse_unscorable
from tokentape.errors import EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import FinishReason, TokenIds

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from tokentape.engines._forward import ForwardPass
    from tokentape.engines._grammar import Grammars
    from tokentape.engines._requests import Request
    from tokentape.engines._worker import Worker


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """The engine's own log of one call, to compare records with."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, one per id of `token_ids`."""
    finish_reason: FinishReason
    """`abort` if the caller disconnected or the engine was closed."""


@dataclass(eq=False)
class TransformersEngine:
    """An `Engine` that runs a model folder with Hugging Face `transformers`. Open it with `open`.

    Concurrent calls share every forward pass (continuous batching). The keys and values of finished calls are cached,
    so that the next turn of a session computes only its new tokens. A prompt with a new image is computed on its own,
    from the start. Ids that the tokenizer does not have (embedding padding) are never sampled and never accepted, but
    `raw_logprobs` are over all embedding rows, as in a trainer's forward pass.

        >>> engine = TransformersEngine.open("models/tiny")
        >>> params = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(2,))
        >>> async for delta in engine.sample(prompt_ids, params, stream=True, request_id="r1"):
        ...     print(delta.token_ids, delta.logprobs)
        >>> await engine.close()
    """

    info: EngineInfo
    """The facts about the loaded model."""
    _worker: Worker
    _tokenizer: Tokenizer
    _grammars: Grammars
    _load: Callable[[Path], Any]
    _model: Any
    _media_ids: set[int]
    _images: QwenImageProcessor | None
    _forward: ForwardPass | None = None
    _calls: dict[str, Request] = field(default_factory=dict)
    _closed: bool = False

    @classmethod
    def open(
        cls,
        model_dir: Path | str,
        *,
        dtype: Dtype = "float32",
        device: str = "auto",
        threads: int | None = None,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        max_batch: int = 32,
        max_context: int | None = None,
        prefix_cache_bytes: int = 1 << 30,
        weight_version: str = "0",
        adapters: Mapping[str, Path | str] | None = None,
        merged: Path | None = None,
        on_finish: Callable[[FinishedSample], None] | None = None,
    ) -> TransformersEngine:
        """Load a model folder (config, weights, `tokenizer.json`) and start the engine's thread. Download nothing.

        Args:
            model_dir: a folder that `save_pretrained` wrote. Code in it is never run.
            dtype: the type of weights and computation. Only float32 logprobs can be recomputed to 1e-4.
            device: a torch device, or `auto` for the first CUDA GPU if there is one, else the CPU. For
                float32 on a GPU, TF32 is switched off for convolutions in the whole process.
            threads: torch's CPU threads in the whole process; None for torch's default. 1 is best for tiny models.
            logprobs_mode: `processed_logprobs` are from the distribution sampled from, after penalties, temperature and
                truncation; `scaled_logprobs` from before truncation, `raw_logprobs` from the model's own.
            max_batch: maximum number of requests that decode together. Further requests wait.
            max_context: maximum of prompt and completion together, in tokens; None for the model's own limit.
            prefix_cache_bytes: memory for the keys and values of finished requests; 0 switches the cache off.
            weight_version: reported with every delta until `update_weights`.
            adapters: folders of LoRA adapters, by the name that calls use to select them; see `load_adapter`.
            merged: folder of a LoRA adapter to merge into the model's own weights.
            on_finish: called on the engine's thread for every call that ended. It must return quickly and not raise.

        Raises:
            TokenizerUnusable: `tokenizer.json` is missing or unreadable.
            EngineError: the model can't be loaded, has different logprobs in a batch than on its own, or is not a
                decoder with full attention in every layer; or an adapter can't be loaded.

        """
        import torch
        import transformers

        from tokentape.engines import _adapters
        from tokentape.engines import _loading as loading
        from tokentape.engines._grammar import CONSTRAINTS, Grammars
        from tokentape.engines._kv import expert_layers
        from tokentape.engines._requests import TokenSampler
        from tokentape.engines._worker import Worker

        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model_dir)
        tokenizer = loading.load_tokenizer(folder)
        load = partial(loading.load_model, dtype=dtype, device=device)
        model = load(folder)
        if merged is not None:
            model = _adapters.merged(model, merged, dtype=dtype)
        known_ids = loading.known_ids(tokenizer, model)
        media_ids = loading.media_ids(model)
        images = find_image_processor(folder) if media_ids else None
        context = max_context or loading.context_limit(model)

        def report(request: Request, finish_reason: FinishReason) -> None:
            if on_finish is not None:
                prompt_ids, ids, logprobs = request.prompt_ids.tolist(), tuple(request.ids), tuple(request.logprobs)
                on_finish(FinishedSample(request.request_id, tuple(prompt_ids), ids, logprobs, finish_reason))

        forbidden = ~known_ids
        forbidden[sorted(media_ids)] = True
        sampler = TokenSampler(
            forbidden=torch.from_numpy(forbidden).to(model.device),
            weight_version=weight_version,
            on_finish=report,
            logprobs_mode=logprobs_mode,
        )
        loading.refuse_unbatchable(model, dtype=dtype)
        loaded = _adapters.Adapters(model, dtype=dtype)
        for name, path in (adapters or {}).items():
            loaded.load(name, Path(path), weight_version)
        worker = Worker(model, sampler, loaded, max_batch=max_batch, prefix_cache_bytes=prefix_cache_bytes)
        info = EngineInfo(
            name="transformers",
            version=transformers.__version__,
            model=folder.resolve().name,
            vocab_size=int(known_ids.nonzero()[0][-1]) + 1,
            max_context=context,
            logprobs_mode=logprobs_mode,
            sampling=DISTRIBUTION
            | CONSTRAINTS
            | {"supports"}
            | ({"payloads_from"} if expert_layers(model) else set())
            | ({"adapter"} if adapters else set()),
            capabilities=() if dtype == "float32" else (dtype,),
            prompt_penalties=frozenset({"repetition_penalty"}),
            media=frozenset({"image"}) if images is not None else frozenset(),
        )
        return cls(info, worker, tokenizer, Grammars(tokenizer), load, model, media_ids, images)

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str, media: Images = ()
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `MediaEngine`.

        A completion that fills the context ends with `length`. If `close` interrupts it, it ends with `abort`.

        Raises:
            InvalidRequest: the prompt is empty, too long or has an unknown id, its placeholder ids don't match `media`,
                or a parameter is out of range.
            UnsupportedParameter: a parameter is set that is not in `EngineInfo.sampling`.
            EngineUnavailable: the engine is closed.
            EngineError: the model failed.

        """
        from tokentape.engines._kv import ExpertRows
        from tokentape.engines._requests import Request, StopStrings

        refuse_call(prompt_ids, params, self.info)
        if params.adapter is not None and params.adapter not in self._worker.adapters:
            raise InvalidRequest(
                f"unknown adapter {params.adapter!r}; loaded are {', '.join(self._worker.adapters)}", "adapter"
            )
        images = await asyncio.to_thread(self._processed, prompt_ids, media) if self._media_ids else {}
        await self.check()
        constrained = params.json_schema is not None or params.structural_tag is not None
        constraint = await asyncio.to_thread(self._grammars.constraint, params) if constrained else None
        prefix_key = np.array(prompt_ids, dtype=np.int64)
        for image in media:
            digest = int.from_bytes(hashlib.sha256(image.data).digest()[:8], "big")
            prefix_key[image.start : image.start + image.length] = -1 - (digest >> 1)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[SampleDelta | EngineError] = asyncio.Queue()

        def send(item: SampleDelta | EngineError) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, item)
            except RuntimeError:  # the caller's event loop is closed
                request.cancelled = True

        request = Request(
            request_id=request_id,
            prompt_ids=np.array(prompt_ids, dtype=np.int64),
            prefix_key=prefix_key,
            params=params,
            limit=min(params.max_tokens, self.info.max_context - len(prompt_ids)),
            stops=StopStrings(self._tokenizer, params.stop_strings) if params.stop_strings else None,
            stream=stream,
            send=send,
            random=random.Random(nonnegative_seed(params.seed)),
            images=images,
            constraint=constraint,
            experts=None if params.payloads_from is None else ExpertRows(params.payloads_from),
        )
        self._calls[request_id] = request
        self._worker.submit(request)
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._calls.pop(request_id, None)
            request.cancelled = True

    def interrupt(self, request_id: str) -> bool:
        """End a call with `abort` and all its sampled tokens. Return False if there is no call with this id."""
        request = self._calls.get(request_id)
        if request is not None:
            request.cancelled = True
        return request is not None

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]` with a forward pass and any number of alternatives; see `Scorer.score`.

        Also raises `InvalidRequest` for placeholder ids of images, and `EngineUnavailable` if the engine is closed.
        """
        from tokentape.engines._forward import ForwardPass
        from tokentape.engines._loading import known_ids

        refuse_unscorable(ids, start, self.info)
        if self._media_ids and np.isin(ids, sorted(self._media_ids)).any():
            raise InvalidRequest("ids contain image placeholders, which can't be scored; score text only", "ids")
        await self.check()
        if self._forward is None or self._forward.model is not self._model:
            excluded = ~known_ids(self._tokenizer, self._model)
            excluded[sorted(self._media_ids)] = True
            self._forward = ForwardPass(self._model, excluded=excluded)
        return await asyncio.to_thread(self._forward.score, ids, start, top)

    def _processed(self, prompt_ids: TokenIds, media: Images) -> dict[str, torch.Tensor]:
        """Return the model's inputs for the images of a prompt; see `Request.images`."""
        import torch

        placeholders = np.isin(prompt_ids, sorted(self._media_ids))
        expected = np.zeros(len(prompt_ids), dtype=np.int64)
        for image in media:
            expected[image.start : image.start + image.length] = 1
        if not np.array_equal(placeholders, expected.astype(bool)):
            raise InvalidRequest(
                f"the prompt has {int(placeholders.sum())} image placeholder ids, but its images cover "
                f"{int(expected.sum())} positions: these and no others must have a placeholder id",
                "prompt_ids",
            )
        if not media:
            return {}
        if self._images is None:
            raise InvalidRequest("this engine does not accept images, only text", "prompt_ids")
        arrays = self._images.arrays([image.data for image in media])
        lengths = self._images.lengths(arrays["image_grid_thw"])
        if lengths != [image.length for image in media]:
            raise InvalidRequest(
                f"the prompt's images need {lengths} placeholder ids in this engine, but the prompt has "
                f"{[image.length for image in media]}: is the image processor a different one?",
                "prompt_ids",
            )
        inputs = {**arrays, "mm_token_type_ids": expected}
        return {name: torch.from_numpy(values) for name, values in inputs.items()}

    async def check(self) -> None:
        """Raise `EngineUnavailable` if the engine is closed."""
        if self._closed or not self._worker.alive:
            raise EngineUnavailable("the embedded engine is closed; open a new one")

    async def update_weights(self, model_dir: Path | str, version: str) -> None:
        """Load the weights in another folder with the same architecture, and use them from the next token on.

        Running requests keep the keys and values of the old weights. Each delta has the weight version that sampled it.

        Raises `EngineError` if the folder can't be loaded or its tensors have different names or shapes, and
        `EngineUnavailable` if the engine is closed.
        """
        await self.check()
        model = await asyncio.to_thread(self._load, Path(model_dir))
        await self._swap(model, version)

    async def push_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: str, *, partial: bool = False
    ) -> None:
        """Copy these tensors, named as in the model's state dict, and sample with them; see `update_weights`.

        Of tied weights, one tensor is enough. With `partial`, all weights that are not passed keep their values.

        Raises `EngineError` for an unknown tensor, a different shape or, unless `partial`, a missing tensor, and
        `EngineUnavailable` if the engine is closed.
        """
        from tokentape.engines import _loading as loading

        await self.check()
        model = await asyncio.to_thread(loading.with_weights, self._model, tensors, partial=partial)
        await self._swap(model, version)

    async def load_adapter(self, name: str, folder: Path | str, version: str) -> None:
        """Load a LoRA adapter in peft's format, or a new version of it, for calls with `SamplingParams.adapter`.

        Running calls keep the version that they began with. The `weight_version` of their deltas is the adapter's
        version. After this, the model's own weights can't be updated.

        Raises `EngineError` if the folder has no LoRA adapter for this model, and `EngineUnavailable` if the engine is
        closed.
        """
        await self.check()
        await asyncio.wrap_future(self._worker.load_adapter(name, Path(folder), version))
        self.info = replace(self.info, sampling=self.info.sampling | {"adapter"})

    async def _swap(self, model: Any, version: str) -> None:
        await self.check()
        await asyncio.wrap_future(self._worker.swap_model(model, version))
        self._model = model

    async def close(self) -> None:
        """Abort running calls and end the thread. It can be called again."""
        self._closed = True
        if self._worker.alive:
            await asyncio.to_thread(self._worker.stop)
