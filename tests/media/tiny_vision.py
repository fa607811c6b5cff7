"""Model folders with the architectures of Qwen's models that see, tiny and not trained, and pictures for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH = 14

_PATCHES = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2}

_TEXT_MACRO = "{{- part.text -}}"
_IMAGE_MACRO = """{%- if part.type == 'image' -%}
                {%- if add_vision_id -%}
                    {%- set seen.images = seen.images + 1 -%}
                    {{- 'Picture ' ~ seen.images ~ ': ' -}}
                {%- endif -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}"""


def qwen2_vl(text: dict[str, Any], ids: dict[str, Any]) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, **_PATCHES}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


def qwen2_5_vl(text: dict[str, Any], ids: dict[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {**_VISION, **_PATCHES, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def qwen3_vl(text: dict[str, Any], ids: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**_VISION, **_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = {**text, "head_dim": 16, "rope_parameters": {**text["rope_parameters"], "mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))


ARCHITECTURES = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}


def write_model(folder: Path, tiny: Path, architecture: str = "qwen2_vl") -> None:
    """Write the folder, with the tokenizer of the tiny model in `tiny` and vision tokens added to it."""
    import torch

    spec = json.loads((tiny / "tokenizer.json").read_bytes())
    first = 1 + max(token["id"] for token in spec["added_tokens"])
    like = spec["added_tokens"][0]
    spec["added_tokens"] += [
        {**like, "id": first + n, "content": content, "special": True} for n, content in enumerate(VISION_TOKENS)
    ]
    start, end, image, video = (first + n for n in range(len(VISION_TOKENS)))
    text = {
        "vocab_size": first + len(VISION_TOKENS) + 12,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }
    ids = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(7)
    model = ARCHITECTURES[architecture](text, ids)
    with torch.no_grad():
        # As initialised, logits hardly differ and an image hardly changes any.
        for parameter in model.parameters():
            parameter.mul_(6.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_bytes((tiny / "tokenizer_config.json").read_bytes())
    (folder / "generation_config.json").write_bytes((tiny / "generation_config.json").read_bytes())
    template = (tiny / "chat_template.jinja").read_text()
    assert _TEXT_MACRO in template
    seen = "{%- set seen = namespace(images=0) -%}\n"
    (folder / "chat_template.jinja").write_text(seen + template.replace(_TEXT_MACRO, _IMAGE_MACRO))
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 64 * PATCH * PATCH},
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def picture(seed: int, width: int, height: int, kind: str = "PNG") -> bytes:
    """The bytes of a picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
