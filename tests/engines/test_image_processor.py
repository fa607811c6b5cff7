"""Images to arrays: recorded settings give the same arrays, and hostile files do not break it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow (the extra `images`)")

from PIL import Image
from tests.media.tiny_vision import PATCH, picture

from tokentape.engines._image_processor import QwenImageProcessor, find_image_processor
from tokentape.errors import EngineError, InvalidRequest
from tokentape.types import Media

CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 64 * PATCH**2},
    "patch_size": PATCH,
}


@pytest.fixture(scope="module")
def processor() -> QwenImageProcessor:
    return QwenImageProcessor(CONFIG, 90)


def as_media(data: bytes) -> Media:
    return Media(hashlib.sha256(data).hexdigest(), "image/png", data)


def test_recorded_settings_rebuild_the_same_processor(processor: QwenImageProcessor) -> None:
    again = QwenImageProcessor.from_settings(processor.settings.data)
    assert again.settings == processor.settings
    assert again.placeholder_id == 90
    image = picture(1, 100, 60)
    for name, values in processor.arrays([image]).items():
        np.testing.assert_array_equal(again.arrays([image])[name], values)


def test_other_library_versions_are_logged(processor: QwenImageProcessor, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**json.loads(processor.settings.data), "pillow": "9.0.0"}
    QwenImageProcessor.from_settings(json.dumps(settings).encode())
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "images were processed by pillow 9.0.0"
    ]


def test_tokens_are_a_quarter_of_the_patches(processor: QwenImageProcessor) -> None:
    image = picture(1, 100, 60)
    assert processor.tokens(as_media(image)) * 4 == len(processor.arrays([image])["pixel_values"])


def test_exif_rotation_is_applied(processor: QwenImageProcessor) -> None:
    upright = Image.open(io.BytesIO(picture(1, 140, 56)))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    file = io.BytesIO()
    upright.rotate(90, expand=True).save(file, "PNG", exif=exif)
    seen, expected = processor.arrays([file.getvalue()]), processor.arrays([picture(1, 140, 56)])
    np.testing.assert_array_equal(seen["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("side", "says"), [(9000, "has 9000 x 9000 pixels"), (60_000, "has more than 50000000 pixels")]
)
def test_decompression_bomb_is_refused_before_decoding(processor: QwenImageProcessor, side: int, says: str) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(InvalidRequest, match=f"{says}; expected at most 50000000"):
        processor.tokens(as_media(bomb))


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: data[:40] + b"\0" * 60 + data[100:]])
def test_a_damaged_file_is_refused(processor: QwenImageProcessor, damage: object) -> None:
    assert callable(damage)
    with pytest.raises(InvalidRequest, match="damaged or incomplete"):
        processor.tokens(as_media(damage(picture(1, 100, 60))))


def test_settings_are_those_that_transformers_loads(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    saved = {"image_processor": {**CONFIG, "patch_size": 16}, "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 1}))
    (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    for older in (None, CONFIG):
        if older:
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
        found = find_image_processor(tmp_path)
        assert found is not None
        image = Image.open(io.BytesIO(picture(1, 100, 60)))
        expected = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[image], return_tensors="np")
        np.testing.assert_array_equal(found.arrays([picture(1, 100, 60)])["pixel_values"], expected["pixel_values"])


def test_unknown_processors_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match="CLIPImageProcessor"):
        QwenImageProcessor({"image_processor_type": "CLIPImageProcessor"}, 1)
    assert find_image_processor(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 1}))
    with caplog.at_level(logging.WARNING):
        assert find_image_processor(tmp_path) is None
    assert "CLIPImageProcessor" in caplog.text


def test_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(EngineError, match="contains a list; expected an object"):
        QwenImageProcessor.open(tmp_path)
