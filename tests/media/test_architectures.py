"""The embedded engine on every architecture that it takes images for, against forward passes over one row alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (the extra `images`)")

from tests.media.conftest import assert_rounding_apart
from tests.media.tiny_vision import ARCHITECTURES, picture, write_model
from tokentape.engines._base import PromptMedia, SamplingParams
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import InvalidRequest

PICTURES = [picture(1, 100, 60), picture(2, 60, 200)]


def prompt_of(processor: QwenImageProcessor, pictures: Sequence[bytes]) -> tuple[list[int], list[PromptMedia]]:
    ids, media = [5, 6], []
    for data in pictures:
        tokens = processor.lengths(processor.arrays([data])["image_grid_thw"])[0]
        media.append(PromptMedia(len(ids) + 1, tokens, data))
        start = processor.placeholder_id - 2
        ids += [start, *[processor.placeholder_id] * tokens, start + 1]
    return [*ids, *range(7, 7 + len(pictures))], media


async def sampled(
    engine: TransformersEngine, ids: list[int], media: Sequence[PromptMedia], adapter: str | None = None
) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=6, seed=len(ids), adapter=adapter)
    out: list[int] = []
    logprobs: list[float] = []
    async for delta in engine.sample(np.array(ids, np.int32), params, stream=True, request_id="r", media=media):
        out += delta.token_ids
        logprobs += delta.logprobs
    return out, logprobs


def alone(model: Any, processor: QwenImageProcessor, prompt: list[int], pictures: Any, out: list[int]) -> Any:
    """Logprobs of one row by itself, [sampled tokens, vocabulary]."""
    import torch

    ids = torch.tensor([prompt + out])
    inputs: dict[str, Any] = {}
    if pictures:
        types = torch.zeros_like(ids)
        types[0, : len(prompt)] = torch.tensor(prompt) == processor.placeholder_id
        inputs = {name: torch.from_numpy(values) for name, values in processor.arrays(pictures).items()}
        inputs["mm_token_type_ids"] = types
    with torch.inference_mode():
        return model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rows_with_and_without_images_share_a_batch(architecture: str, tmp_path: Path, model_dir: Path) -> None:
    from transformers import AutoModelForImageTextToText

    write_model(tmp_path, model_dir, architecture)
    processor = QwenImageProcessor.open(tmp_path)
    shown = [PICTURES[:1], [], PICTURES, PICTURES[1:]]
    prompts = [prompt_of(processor, pictures) for pictures in shown]
    engine = TransformersEngine.open(tmp_path, threads=1, logprobs_mode="raw_logprobs")
    assert engine.info.media == {"image"}

    async def all_at_once() -> list[tuple[list[int], list[float]]]:
        try:
            return await asyncio.gather(*(sampled(engine, ids, media) for ids, media in prompts))
        finally:
            await engine.close()

    completions = asyncio.run(all_at_once())
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    for (ids, _), pictures, (out, logprobs) in zip(prompts, shown, completions, strict=True):
        forward = partial(alone, processor=processor, prompt=ids, pictures=pictures, out=out)
        assert_rounding_apart(model, forward, out, logprobs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_next_turn_with_the_same_image_computes_only_what_is_new(
    architecture: str, tmp_path: Path, model_dir: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    write_model(tmp_path, model_dir, architecture)
    processor = QwenImageProcessor.open(tmp_path)
    engine = TransformersEngine.open(tmp_path, threads=1, logprobs_mode="raw_logprobs")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    computed: list[int] = []
    original = type(model).__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        computed.append(kwargs["input_ids"].shape[1])
        return original(self, *args, **kwargs)

    async def turns() -> None:
        ids, media = prompt_of(processor, PICTURES[:1])
        other = picture(9, 100, 60)
        first, _ = await sampled(engine, ids, media)
        for image, known in ((media[0].data, len(ids) + len(first) - 1), (other, 0)):
            computed.clear()
            context = [*ids, *first, 11, 12, 13]
            shown = [PromptMedia(media[0].start, media[0].length, image)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(model), "__call__", counted)
                out, logprobs = await sampled(engine, context, shown)
            assert computed == [len(context) - known, 1, 1, 1, 1, 1]
            forward = partial(alone, processor=processor, prompt=context, pictures=[image], out=out)
            assert_rounding_apart(model, forward, out, logprobs)
        await engine.close()

    asyncio.run(turns())


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapter_of_the_image_encoder_is_applied_only_if_chosen(
    tmp_path: Path, vision_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForImageTextToText

    activate = PeftModel.set_adapter
    # peft 0.18 has no other arguments.
    monkeypatch.setattr(PeftModel, "set_adapter", lambda self, adapter_name: activate(self, adapter_name))
    model = AutoModelForImageTextToText.from_pretrained(vision_dir).eval()
    engine = TransformersEngine.open(vision_dir, threads=1, logprobs_mode="raw_logprobs")
    processor = QwenImageProcessor.open(vision_dir)
    ids, media = prompt_of(processor, PICTURES)
    torch.manual_seed(1)
    policy = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    policy.save_pretrained(tmp_path)

    async def with_and_without() -> list[tuple[list[int], list[float]]]:
        await engine.load_adapter("policy", tmp_path, "1")
        found = [await sampled(engine, ids, media, adapter) for adapter in ("policy", None)]
        await engine.close()
        return found

    (out, logprobs), (plain, without) = asyncio.run(with_and_without())
    forward = partial(alone, processor=processor, prompt=ids, pictures=PICTURES, out=out)
    assert_rounding_apart(policy, forward, out, logprobs)
    with policy.disable_adapter(), pytest.raises(AssertionError):
        assert_rounding_apart(policy, forward, out, logprobs)
    forward = partial(alone, processor=processor, prompt=ids, pictures=PICTURES, out=plain)
    assert_rounding_apart(policy.unload(), forward, plain, without)


def test_placeholder_ids_are_neither_sampled_nor_accepted_without_an_image(
    vision_engine: TransformersEngine, processor: QwenImageProcessor
) -> None:
    ids, media = prompt_of(processor, PICTURES[:1])

    async def top(prompt: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=1, temperature=0.0, top_logprobs=4000)
        (delta,) = [
            delta
            async for delta in vision_engine.sample(np.array(prompt, np.int32), params, stream=False, request_id="r")
        ]
        return [token_id for token_id, logprob in delta.top_logprobs[0] if logprob > -np.inf]

    assert processor.placeholder_id not in asyncio.run(top([5, 6]))
    for prompt, images in ((ids, []), (ids[:-4] + ids[-3:], media), ([5, 6, 7] * 9, media)):
        with pytest.raises(InvalidRequest, match="image placeholder ids, but its images cover"):
            asyncio.run(sampled(vision_engine, prompt, images))
