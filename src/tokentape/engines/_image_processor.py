"""Convert images to a model's inputs, and count their tokens.

This supports the image processor of Qwen2-VL, which Qwen2.5-VL and Qwen3-VL use too. transformers' Pillow
implementation is slower than its torchvision one, but needs neither torchvision nor torch, and sampling and training
can both use it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tokentape.errors import EngineError, InvalidRequest
from tokentape.types import Media

_log = logging.getLogger(__name__)

_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")

MAX_PIXELS = 50_000_000
"""Pixel limit of a received image, because a small file can decode to an image that fills the memory."""

_KEPT_COUNTS = 4096

_UNIFIED, _LEGACY = "processor_config.json", "preprocessor_config.json"


class QwenImageProcessor:
    """A Qwen-VL image processor, from a model folder (`open`) or from recorded settings (`from_settings`).

        >>> processor = QwenImageProcessor.open("path/to/model")         # doctest: +SKIP
        >>> processor.arrays([png])["image_grid_thw"]                    # doctest: +SKIP
        array([[1, 4, 8]])

    Args:
        config: the content of `preprocessor_config.json`, or of `image_processor` in `processor_config.json`. Raises
            `EngineError` for any other image processor.
        placeholder_id: the id that represents a part of an image.

    """

    def __init__(self, config: dict[str, Any], placeholder_id: int) -> None:
        kind = config.get("image_processor_type")
        if kind not in _KINDS:
            raise EngineError(f"images are processed by {kind!r} in this model; expected one of {', '.join(_KINDS)}")
        self.placeholder_id = placeholder_id
        self._config = config
        self._counts: dict[str, int] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Read the processor's configuration in a model folder, and `image_token_id` from `config.json`.

        Raises `EngineError` if the folder has no supported processor.
        """
        folder = Path(folder)
        config, model = _configuration(folder), _read(folder / "config.json")
        placeholder_id = model.get("image_token_id")
        if not isinstance(placeholder_id, int):
            raise EngineError(f"{folder / 'config.json'} has no image_token_id: the model does not accept images")
        return cls(config, placeholder_id)

    @classmethod
    def from_settings(cls, data: bytes) -> Self:
        """Return the processor with recorded `settings`. Its results are the same with the same library versions.

        Logs a warning if other versions are installed. Raises `EngineError` if `data` are not the settings of a
        processor.
        """
        try:
            settings = json.loads(data)
            processor = cls(settings["config"], settings["placeholder_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"the settings are not an image processor's ({type(error).__name__})") from None
        for name, installed in _versions().items():
            if settings.get(name) != installed:
                _log.warning(
                    "images were processed by %s %s; %s, installed here, may make other pixels",
                    name,
                    settings.get(name),
                    installed,
                )
        return processor

    @cached_property
    def settings(self) -> Media:
        """The configuration and the library versions, as canonical JSON."""
        values = {
            "config": self._config,
            "placeholder_id": self.placeholder_id,
            **_versions(),
        }
        data = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        return Media(hashlib.sha256(data).hexdigest(), "application/json", data)

    def tokens(self, image: Media) -> int:
        """Return how many placeholder ids an image takes. Raises `InvalidRequest` if it is unreadable or too large."""
        count = self._counts.get(image.sha256)
        if count is None:
            (count,) = self.lengths(self.arrays([image.data])["image_grid_thw"])
            if len(self._counts) >= _KEPT_COUNTS:
                self._counts.clear()
            self._counts[image.sha256] = count
        return count

    def arrays(self, images: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
        """Return the model's inputs for images, in order.

        They are `pixel_values`, float32 [patches of all images, values per patch], and `image_grid_thw`, int64
        [images, 3], the patch counts in time, height and width. Raises `InvalidRequest` for an unreadable or too
        large image.
        """
        opened = [_opened(image) for image in images]
        try:
            processed = self._processor(images=opened, return_tensors="np")
        except ValueError as error:  # for example, an image that is too narrow
            raise InvalidRequest(f"the image can't be processed: {error}", "messages") from None
        return {
            "pixel_values": np.asarray(processed["pixel_values"], np.float32),
            "image_grid_thw": np.asarray(processed["image_grid_thw"], np.int64),
        }

    def lengths(self, image_grid_thw: npt.NDArray[np.int64]) -> list[int]:
        """Return how many placeholder ids each image takes. `image_grid_thw` is int64 [images, 3]."""
        merged = self._processor.merge_size**2
        return [int(patches) // merged for patches in image_grid_thw.prod(-1)]

    @cached_property
    def _processor(self) -> Any:
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        except ImportError as error:
            raise EngineError("this version of transformers can't process images with Pillow; upgrade it") from error
        return Qwen2VLImageProcessorPil.from_dict(self._config)


def find_image_processor(folder: str | Path) -> QwenImageProcessor | None:
    """Return the processor of a model folder. Return None and log the reason if images can't be processed."""
    if not any((Path(folder) / name).is_file() for name in (_UNIFIED, _LEGACY)):
        return None
    if find_spec("PIL") is None:
        _log.warning("images are not accepted: Pillow is not installed; install the extra `images`")
        return None
    try:
        return QwenImageProcessor.open(folder)
    except EngineError as error:
        _log.warning("images are not accepted: %s", error)
        return None


def _opened(data: bytes) -> Any:
    """Open an image like transformers: rotated according to its EXIF data, without transparency."""
    from PIL import Image, ImageOps

    many = f"more than {MAX_PIXELS}"
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP", "GIF")) as image:
            width, height = image.size
            if width * height <= MAX_PIXELS:
                return ImageOps.exif_transpose(image).convert("RGB")
            many = f"{width} x {height}"
    except Image.DecompressionBombError:
        pass
    except Exception as error:  # decoders raise many types of errors for corrupt files
        reason = f"the image is damaged or incomplete ({type(error).__name__}); send the whole file"
        raise InvalidRequest(reason, "messages") from None
    raise InvalidRequest(f"the image has {many} pixels; expected at most {MAX_PIXELS}, so resize it", "messages")


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("pillow", "transformers")}


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the image processor's configuration. Like transformers 5, prefer the file that its processors save."""
    nested = _read(folder / _UNIFIED).get("image_processor") if (folder / _UNIFIED).is_file() else None
    return nested if isinstance(nested, dict) else _read(folder / _LEGACY)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise EngineError(f"{path} can't be read ({error.strerror}): images need this file") from None
    except ValueError:
        raise EngineError(f"{path} is not JSON") from None
    if not isinstance(content, dict):
        raise EngineError(f"{path} contains a {type(content).__name__}; expected an object")
    return content
