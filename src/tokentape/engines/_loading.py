"""Load a model folder for the embedded engine, and refuse models that it can't batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.utils import logging as hf_logging

from tokentape.engines._kv import NO_PREFIX, DecodeBatch
from tokentape.errors import EngineError, TokenizerUnusable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Maximum logprob difference that rounding with padding may cause. Models that ignore the mask differ by more."""


def load_model(folder: Path, *, dtype: str, device: str) -> Any:
    """Load a causal language model, with or without image input, in evaluation mode. Never run code from the folder.

    `device` is a torch device, or `auto` for the first CUDA GPU if there is one, else the CPU. For float32 on a GPU,
    TF32 is switched off for convolutions in the whole process.

    Raises `EngineError` if the folder has no causal language model, transformers can't load it, or the device can't be
    used.
    """
    if dtype not in _DTYPES:
        raise EngineError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    if not (folder / "config.json").is_file():
        raise EngineError(f"no config.json in {folder}; expected a folder that save_pretrained wrote")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "float32" and device.startswith("cuda"):
        # Otherwise convolutions, as in image encoders, are in TF32: logprobs were wrong by up to 0.1 on an H200.
        torch.backends.cudnn.allow_tf32 = False
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        takes_images = "vision_config" in config.sub_configs
        auto_model = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        model = auto_model.from_pretrained(
            folder, config=config, dtype=_DTYPES[dtype], local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"transformers can't load {folder}: {error}") from error
    finally:
        if shows_progress:
            hf_logging.enable_progress_bar()
    try:
        model.to(device)
        torch.zeros(1, device=device).item()  # fails on `meta`, which accepts a model but computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:  # without CUDA it is an AssertionError
        reason = str(error).partition("\n")[0]  # CUDA adds lines for its developers
        raise EngineError(f"the model can't be moved to device {device!r}: {reason}; try device 'cpu'") from error
    return model.eval()


@torch.no_grad()
def with_weights(model: Any, tensors: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> Any:
    """Return a copy of a model with new weights, named as in its state dict. Its dtype and device don't change.

    Raises `EngineError` for an unknown name, for a different shape and, unless `partial`, for a missing parameter.
    """
    changed = copy.deepcopy(model)
    places = changed.state_dict()
    missing = {name for name, _ in changed.named_parameters()}
    for name, tensor in tensors:
        place = places.get(name)
        if place is None or place.shape != tensor.shape:
            existing = "no such tensor" if place is None else f"{tuple(place.shape)}"
            raise EngineError(f"tensor {name!r} of shape {tuple(tensor.shape)} does not fit: the model has {existing}")
        place.copy_(tensor)
        missing.discard(name)
    if missing and not partial:
        names = ", ".join(sorted(missing)[:3])
        raise EngineError(f"{len(missing)} parameters have no new weights, for example {names}; pass all of them")
    return changed


def media_ids(model: Any) -> set[int]:
    """Return the placeholder ids for media. They must not be sampled: without media the model fails on them."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    config = model.config.to_dict()
    return {config[name] for name in names if isinstance(config.get(name), int)}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json`. Raises `TokenizerUnusable` if it is missing or unreadable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerUnusable(f"no tokenizer.json in {folder}; save the tokenizer in the fast format")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise TokenizerUnusable(f"{path} can't be read: {error}") from error


def known_ids(tokenizer: Tokenizer, model: Any) -> npt.NDArray[np.bool_]:
    """Return which embedding rows are tokens of the tokenizer, bool [embedding rows].

    Embeddings are often padded to a round number of rows, and untrained rows can be sampled. Some servers fail or crash
    on such ids (vllm-project/vllm#13175, sgl-project/sglang#31908).
    """
    mask = np.zeros(model.get_input_embeddings().weight.shape[0], dtype=np.bool_)
    mask[[i for i in tokenizer.get_vocab(with_added_tokens=True).values() if i < len(mask)]] = True
    return mask


def context_limit(model: Any) -> int:
    """Return the number of positions that the model supports. Raises `EngineError` if its config lacks it."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise EngineError("the model's config has no max_position_embeddings; pass max_context")
    return limit


@torch.inference_mode()
def refuse_unbatchable(model: Any, *, dtype: str, adapters: tuple[Any, list[str]] | None = None) -> None:
    """Raise `EngineError` unless rows of different lengths have the same results in a batch as on their own.

    Check the cache type that the architecture declares. Then decode two sequences in one padded batch, and compare
    their logprobs with a separate forward pass over each sequence. With `adapters`, see `DecodeBatch.adapters`, the
    first row uses an adapter, and the second row, which uses none, is compared with `model`.
    """
    name = type(model).__name__
    layers = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if layers != {"DynamicLayer"}:
        raise EngineError(
            f"{name} has cache layers {', '.join(sorted(layers))}; the embedded engine supports only decoders with "
            "full attention in every layer (DynamicLayer): serve this model with vLLM or SGLang"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    contexts = [np.arange(length, dtype=np.int64) % rows for length in (8, 4)]
    try:
        singles, batch = [DecodeBatch(model) for _ in contexts], DecodeBatch(model)
        if adapters is not None:
            singles[0].adapters, batch.adapters = (adapters[0], adapters[1][:1]), adapters
        alone = torch.cat([single.prefill([ids], [NO_PREFIX]) for single, ids in zip(singles, contexts, strict=True)])
        batch.prefill([context[:-1] for context in contexts], [NO_PREFIX] * len(contexts))
        together = batch.decode([int(context[-1]) for context in contexts])
    except Exception as error:
        raise EngineError(
            f"{name} can't be batched: {type(error).__name__}: {error}; serve this model with vLLM or SGLang"
        ) from error
    apart = float((alone.log_softmax(-1) - together.log_softmax(-1)).abs().max())
    if not apart <= _TOLERANCE[dtype]:
        raise EngineError(
            f"{name} has different logprobs in a padded batch than without padding (by {apart:.2g}, allowed "
            f"{_TOLERANCE[dtype]:g} in {dtype}): serve this model with vLLM or SGLang"
        )
