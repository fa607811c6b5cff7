"""Certificates on disk, so that each is made once per machine: JSON files named by everything they depend on.

The cache only saves time. What can't be read is made again, and what can't be written is not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tokentape.chat.certificate import FORMAT, Certificate
from tokentape.chat.certify import certify
from tokentape.chat.renderer import Renderer

_MOST = 512
"""Certificates kept. Template kwargs come from clients, who must not fill the disk."""

_log = logging.getLogger("tokentape.chat")


def load_or_certify(
    renderer: Renderer, template_kwargs: Mapping[str, Any], directory: str | Path | None = None
) -> Certificate:
    """The certificate for these kwargs: read from `directory`, else made and written there.

    `directory` is `default_directory()` if not given. Raises `TemplateRefused` as `certify` does.
    """
    folder = default_directory() if directory is None else Path(directory)
    key = _key(renderer, template_kwargs)
    path = folder / f"{key}.json"
    with suppress(OSError, ValueError):
        found = Certificate.from_json(path.read_text(encoding="utf-8"))
        if found.fingerprint == renderer.fingerprint and found.template_kwargs == template_kwargs:
            return found
    made = certify(renderer, template_kwargs)
    try:
        _write(path, made.to_json())
    except OSError as error:
        _tell_unwritable(folder, error.strerror or type(error).__name__)
    return made


def default_directory() -> Path:
    """`$TOKENTAPE_CACHE/certificates`, else `tokentape/certificates` in the user's cache directory of this system."""
    chosen = os.environ.get("TOKENTAPE_CACHE")
    return (Path(chosen) if chosen else _user_cache() / "tokentape") / "certificates"


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    name, fallback = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    # The XDG specification has relative paths ignored.
    found = os.environ.get(name, "")
    return Path(found) if os.path.isabs(found) else Path.home() / fallback


def _key(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> str:
    parts = [FORMAT, _algorithm(), renderer.fingerprint, sorted(renderer.tokenizer.eos_ids), template_kwargs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _algorithm() -> str:
    """Hex SHA-256 of the source that makes certificates: whoever changes it need not remember a version number."""
    digest = hashlib.sha256()
    for source in sorted(files("tokentape.chat").iterdir(), key=lambda one: one.name):
        if source.name.endswith(".py"):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as part:
        try:
            part.write(text)
            part.close()
            os.replace(part.name, path)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise
    kept = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in kept[_MOST:]:
        old.unlink(missing_ok=True)


@cache
def _tell_unwritable(folder: Path, reason: str) -> None:
    _log.warning("certificates are not kept: %s: %s. Name another place with TOKENTAPE_CACHE.", folder, reason)
