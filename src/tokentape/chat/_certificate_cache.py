"""Keep certificates on disk, so that each is made once per machine: JSON files named by a hash of their inputs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokentape.chat._certificate import FORMAT, Certificate
from tokentape.chat._certification import certify
from tokentape.chat._disk_cache import cache_directory, keep
from tokentape.chat._renderer import Renderer

_log = logging.getLogger("tokentape.chat")


def load_or_certify(
    renderer: Renderer, template_kwargs: Mapping[str, Any], directory: str | Path | None = None
) -> Certificate:
    """Return the certificate for these kwargs from `directory`. If it is not there, make it and write it there.

    `directory` defaults to `cache_directory("certificates")`. Raises `TemplateRefused` as `certify` does.
    """
    folder = cache_directory("certificates") if directory is None else Path(directory)
    key = _key(renderer, template_kwargs)
    path = folder / f"{key}.json"
    with suppress(OSError, ValueError):
        certificate = Certificate.from_json(path.read_text(encoding="utf-8"))
        if certificate.fingerprint == renderer.fingerprint and certificate.template_kwargs == template_kwargs:
            return certificate
    _log.info("trying out conversations with the chat template, once per model")
    certificate = certify(renderer, template_kwargs)
    keep(path, certificate.to_json())
    return certificate


def _key(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> str:
    parts = [FORMAT, certifier_digest(), renderer.fingerprint, sorted(renderer.tokenizer.eos_ids), template_kwargs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def certifier_digest() -> str:
    """Return the hex SHA-256 of the source that makes certificates.

    A change to the source thus invalidates cached certificates without a version number.
    """
    digest = hashlib.sha256()
    for source in sorted(files("tokentape.chat").iterdir(), key=lambda source: source.name):
        if source.name.endswith(".py"):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()
