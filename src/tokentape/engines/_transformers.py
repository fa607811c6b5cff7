"""The embedded engine: a local Hugging Face model in this process, tokens in, tokens out.

No server and no text in between: it runs the demo, the tests and small models for real. Importing this module
loads neither torch nor transformers; `TransformersEngine.open` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tokentape.engines._base import DISTRIBUTION, EngineInfo, LogprobsMode, PromptMedia, SampleDelta, SamplingParams
from tokentape.engines._checks import refuse_call
from tokentape.engines._image_processor import QwenImageProcessor, find_image_processor
from tokentape.engines._scoring import Scores, refuse_unscorable
from tokentape.errors import EngineError, EngineUnavailable, InvalidRequest
from tokentape.types import FinishReason, TokenIds

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from tokentape.engines._forward import ForwardPass
    from tokentape.engines._requests import Request
    from tokentape.engines._worker import Worker


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """What the engine sampled for one call, by its own account: a log that a record can be checked against."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, one per id of `token_ids`."""
    finish_reason: FinishReason
    """`abort` if the caller left or the engine was closed."""


class TransformersEngine:
    """An `Engine` over a model folder of Hugging Face `transformers`. Made by `open`.

    Concurrent calls share every forward pass (continuous batching), and the keys and values of finished calls are kept
    for a while, so that the next turn of a session computes only its new tokens. A prompt with a new image is computed
    from its start, by itself. Ids that the tokenizer does not know (padding of the embedding) are never sampled and
    never accepted; `raw_logprobs` are over all rows of the embedding, as in a trainer's forward pass.

        >>> engine = TransformersEngine.open("models/tiny")
        >>> params = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(2,))
        >>> async for delta in engine.sample(prompt_ids, params, stream=True, request_id="r1"):
        ...     print(delta.token_ids, delta.logprobs)
        >>> await engine.close()
    """

    def __init__(
        self,
        info: EngineInfo,
        worker: Worker,
        tokenizer: Tokenizer,
        load: Callable[[Path], Any],
        model: Any,
        media_ids: set[int],
        images: QwenImageProcessor | None,
    ) -> None:
        self._info = info
        self._media_ids = media_ids
        self._images = images
        self._worker = worker
        self._tokenizer = tokenizer
        self._load = load
        self._model = model
        self._forward: ForwardPass | None = None
        self._calls: dict[str, Request] = {}
        self._closed = False

    @classmethod
    def open(
        cls,
        model_dir: Path | str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: str = "cpu",
        threads: int | None = None,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        max_batch: int = 32,
        max_context: int | None = None,
        prefix_cache_bytes: int = 1 << 30,
        weight_version: str = "0",
        on_finish: Callable[[FinishedSample], None] | None = None,
    ) -> TransformersEngine:
        """Load a model folder (config, weights, `tokenizer.json`) and start its thread. Downloads nothing.

        Args:
            model_dir: a folder as `save_pretrained` writes it. Code in it is never run.
            dtype: of weights and computation. Only float32 logprobs can be recomputed to 1e-4.
            device: a torch device, or `auto` for the first GPU if there is one.
            threads: torch's CPU threads, of the whole process; torch's own choice if None. 1 is best for a tiny model.
            logprobs_mode: which log-probabilities are reported: those that the tokens were sampled with, after
                penalties, temperature and truncation (`processed_logprobs`); before truncation (`scaled_logprobs`); or
                the model's own (`raw_logprobs`).
            max_batch: requests that decode together; further ones wait their turn.
            max_context: prompt and completion together, in tokens; the model's own limit if None.
            prefix_cache_bytes: memory for the keys and values of finished requests; 0 turns reuse off.
            weight_version: reported with every delta until `update_weights`.
            on_finish: called for every call that ended, on the engine's thread; it must return soon and not raise.

        Raises:
            TokenizerUnusable: there is no readable `tokenizer.json`.
            EngineError: the model can't be loaded, gives other logprobs in a batch than alone, or is not a decoder
                with full attention in every layer.

        """
        import torch
        import transformers

        from tokentape.engines import _loading as loading
        from tokentape.engines._requests import Sampler
        from tokentape.engines._worker import Worker

        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model_dir)
        tokenizer = loading.load_tokenizer(folder)
        load = partial(loading.load_model, dtype=dtype, device=device)
        model = load(folder)
        known = loading.known_ids(tokenizer, model)
        media_ids = loading.media_ids(model)
        images = find_image_processor(folder) if media_ids else None
        context = max_context or loading.context_limit(model)

        def report(request: Request, finish_reason: FinishReason) -> None:
            if on_finish is not None:
                on_finish(_finished(request, finish_reason))

        samplable = known.copy()
        samplable[sorted(media_ids)] = False
        sampler = Sampler(
            samplable=torch.from_numpy(samplable).to(model.device),
            weight_version=weight_version,
            on_finish=report,
            logprobs_mode=logprobs_mode,
        )
        loading.refuse_unbatchable(model, dtype=dtype)
        worker = Worker(model, sampler, max_batch=max_batch, prefix_cache_bytes=prefix_cache_bytes)
        worker.start()
        info = EngineInfo(
            name="transformers",
            version=transformers.__version__,
            model=folder.resolve().name,
            vocab_size=int(known.nonzero()[0][-1]) + 1,
            max_context=context,
            logprobs_mode=logprobs_mode,
            sampling=DISTRIBUTION | {"supports"},
            prompt_penalties=frozenset({"repetition_penalty"}),
            media=frozenset({"image"}) if images is not None else frozenset(),
        )
        return cls(info, worker, tokenizer, load, model, media_ids, images)

    @property
    def info(self) -> EngineInfo:
        """What was loaded, and how it samples."""
        return self._info

    async def sample(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        stream: bool,
        request_id: str,
        media: Sequence[PromptMedia] = (),
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample a continuation of `prompt_ids`, int32 [tokens]; see `MediaEngine`.

        A completion that reaches the end of the context ends with `length`; one that `close` interrupts, with `abort`.

        Raises:
            InvalidRequest: the prompt is empty, too long or holds an unknown id, or its placeholder ids are not those
                of `media`; a parameter is out of range.
            UnsupportedParameter: a parameter is set that `EngineInfo.sampling` does not name.
            EngineUnavailable: the engine is closed.
            EngineError: the model failed.

        """
        from tokentape.engines._requests import Request
        from tokentape.engines._stopping import StopStrings

        refuse_call(prompt_ids, params, self._info)
        images = await asyncio.to_thread(self._processed, prompt_ids, media) if self._media_ids else {}
        await self.check()
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[SampleDelta | EngineError] = asyncio.Queue()

        def send(item: SampleDelta | EngineError) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, item)
            except RuntimeError:  # the caller's event loop is gone
                request.cancelled = True

        request = Request(
            request_id=request_id,
            prompt_ids=np.array(prompt_ids, dtype=np.int64),
            prefix_key=_prefix_key(prompt_ids, media),
            params=params,
            limit=min(params.max_tokens, self._info.max_context - len(prompt_ids)),
            stops=StopStrings(self._tokenizer, params.stop_strings) if params.stop_strings else None,
            stream=stream,
            send=send,
            random=random.Random(params.seed),
            images=images,
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
            self._worker.abandon(request)

    def interrupt(self, request_id: str) -> bool:
        """End a call with `abort` and all that was sampled of it; False if there is no call with this id."""
        request = self._calls.get(request_id)
        if request is not None:
            self._worker.abandon(request)
        return request is not None

    async def score(self, ids: TokenIds, start: int, *, top: int = 0) -> Scores:
        """Score `ids[start:]` by a forward pass, with any number of alternatives; see `Scorer`.

        Raises:
            InvalidRequest: see `Scorer.score`; ids stand for parts of images.
            EngineUnavailable: the engine is closed.

        """
        from tokentape.engines._forward import ForwardPass

        refuse_unscorable(ids, start, self._info)
        if self._media_ids and np.isin(ids, sorted(self._media_ids)).any():
            raise InvalidRequest("ids that stand for parts of images are not scored", "ids")
        await self.check()
        if self._forward is None or self._forward.model is not self._model:
            self._forward = ForwardPass(self._model)
        return await asyncio.to_thread(self._forward.score, ids, start, top)

    def _processed(self, prompt_ids: TokenIds, media: Sequence[PromptMedia]) -> dict[str, torch.Tensor]:
        """Return what the model takes of a prompt's images: `Request.images`."""
        import torch

        stands = np.isin(prompt_ids, sorted(self._media_ids))
        placed = np.zeros(len(prompt_ids), dtype=np.int64)
        for one in media:
            placed[one.start : one.start + one.length] = 1
        if not np.array_equal(stands, placed.astype(bool)):
            raise InvalidRequest(
                f"{int(stands.sum())} ids of the prompt stand for parts of images, {int(placed.sum())} do by its media",
                "prompt_ids",
            )
        if not media:
            return {}
        if self._images is None:
            raise InvalidRequest("this engine takes text only", "prompt_ids")
        arrays = self._images.arrays([one.data for one in media])
        found = self._images.lengths(arrays["image_grid_thw"])
        if found != [one.length for one in media]:
            raise InvalidRequest(f"the prompt's images have {found} tokens with this engine's settings", "prompt_ids")
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return {**tensors, "mm_token_type_ids": torch.from_numpy(placed)}

    async def check(self) -> None:
        """Return if the engine can take a request now, else raise `EngineUnavailable`."""
        if self._closed or not self._worker.alive:
            raise EngineUnavailable("the embedded engine is closed; open a new one")

    async def update_weights(self, model_dir: Path | str, version: str) -> None:
        """Use the weights of another folder of the same architecture, from the next token on.

        Running requests keep the keys and values that the old weights computed; their deltas say which version sampled
        which ids.

        Raises:
            EngineError: the folder can't be loaded, or its tensors have other names or shapes.
            EngineUnavailable: the engine is closed.

        """
        await self.check()
        model = await asyncio.to_thread(self._load, Path(model_dir))
        await self._swap(model, version)

    async def push_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: str, *, partial: bool = False
    ) -> None:
        """Sample with these tensors of this process from now on, named as in the model's state dict.

        See `update_weights`. Returns once a thread has copied them. Of two tied weights one is enough. With `partial`,
        weights that are not given keep their values.

        Raises:
            EngineError: a tensor is unknown or of another shape, or unless `partial` one is missing.
            EngineUnavailable: the engine is closed.

        """
        from tokentape.engines import _loading as loading

        await self.check()
        model = await asyncio.to_thread(loading.with_weights, self._model, tensors, partial=partial)
        await self._swap(model, version)

    async def _swap(self, model: Any, version: str) -> None:
        await self.check()
        await asyncio.wrap_future(self._worker.swap_model(model, version))
        self._model = model

    async def close(self) -> None:
        """Abort what runs and end the thread. May be called again."""
        self._closed = True
        if self._worker.alive:
            await asyncio.to_thread(self._worker.stop)


def _prefix_key(prompt_ids: TokenIds, media: Sequence[PromptMedia]) -> npt.NDArray[np.int64]:
    """Return `Request.prefix_key`."""
    key = np.array(prompt_ids, dtype=np.int64)
    for image in media:
        digest = int.from_bytes(hashlib.sha256(image.data).digest()[:8], "big")
        key[image.start : image.start + image.length] = -1 - (digest >> 1)
    return key


def _finished(request: Request, finish_reason: FinishReason) -> FinishedSample:
    return FinishedSample(
        request_id=request.request_id,
        prompt_ids=tuple(request.prompt_ids.tolist()),
        token_ids=tuple(request.ids),
        logprobs=tuple(request.logprobs),
        finish_reason=finish_reason,
    )
