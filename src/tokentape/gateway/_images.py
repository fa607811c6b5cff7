"""Images in requests: decode data URLs and refer to the images by hash.

Wire modules create image parts with `image_part`, which keeps the data URL. `receive` replaces the URL with the hash
of the bytes and the number of tokens. The gateway never fetches a URL, because callers could choose any host.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokentape.chat._media import IMAGE, ImageProcessor, image_parts
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.types import Media, Message

MAX_IMAGES = 256
"""Limit per request, because each image is decoded."""

_KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


MIME_TYPES = (*_KINDS.values(), "image/webp")


def image_part(url: Any, where: str, *, detail: str | None = None) -> dict[str, str]:
    """Return the message part for an image in a data URL. `where` is its path in the body, for errors.

    Raises `UnsupportedParameter` for any other URL and for a `detail` that would change the image.
    """
    param = where.partition("[")[0]
    if not isinstance(url, str) or not url.startswith("data:"):
        raise UnsupportedParameter(
            f"{where} is not a data URL, and other URLs are not fetched; send data:image/png;base64,...", param
        )
    if detail not in (None, "auto", "high", "original"):
        raise UnsupportedParameter(f"{where} has an unsupported detail: images are not resized; send auto", param)
    return {"type": IMAGE, "url": url, "where": where}


def append_content(content: Any, addition: Any) -> Any:
    """Concatenate two contents, each a string or a list of parts. Two strings return a string, else a list of parts."""
    if isinstance(content, str) and isinstance(addition, str):
        return content + addition
    parts: list[dict[str, str]] = []
    for part in (*_listed(content), *_listed(addition)):
        if part["type"] == "text" and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    return parts


def receive(
    messages: Sequence[Message], images: ImageProcessor, load: Callable[[str], Media]
) -> tuple[tuple[Message, ...], dict[str, Media]]:
    """Replace the image URLs in messages with hashes. Return the messages, and the new images by hash.

    An image in a recorded message that was processed with different settings is processed again; `load` returns its
    bytes.

    Raises `InvalidRequest` for data that is not an image, and for too many images.
    """
    new_images: dict[str, Media] = {}
    if len(image_parts(messages)) > MAX_IMAGES:
        raise InvalidRequest(f"the messages contain too many images; send at most {MAX_IMAGES}", "messages")

    def received(part: Any) -> Any:
        if not image_parts([{"content": [part]}]):
            return part
        if "url" not in part and part["settings"] == images.settings.sha256:
            return part
        try:
            media = read_data_url(part["url"]) if "url" in part else load(part["sha256"])
            tokens = images.tokens(media)
        except InvalidRequest as error:
            raise InvalidRequest(f"{part.get('where', 'a recorded image')}: {error}", "messages") from error
        if "url" in part:
            new_images[media.sha256] = media
        settings = images.settings.sha256
        return {"type": IMAGE, "sha256": media.sha256, "tokens": tokens, "settings": settings}

    out = tuple(
        {**message, "content": [received(part) for part in message["content"]]} if image_parts([message]) else message
        for message in messages
    )
    return out, new_images


def read_data_url(url: str) -> Media:
    """Return the image in a data URL. Its first bytes determine its type; the type in the URL is ignored.

    Raises `InvalidRequest` if the URL does not contain a supported image.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest("the data URL has no `;base64,`; send the bytes in base64", "messages")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "the data URL has invalid base64; send the image's bytes in base64, without line breaks", "messages"
        ) from None
    webp = "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None
    mime = next((kind for start, kind in _KINDS.items() if data.startswith(start)), webp)
    if mime is None:
        raise InvalidRequest("the image has an unknown format; expected PNG, JPEG, WebP or GIF", "messages")
    return Media(hashlib.sha256(data).hexdigest(), mime, data)


def _listed(content: str | Sequence[Mapping[str, str]]) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
