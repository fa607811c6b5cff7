"""Cache certificates and proofs as small files in a folder, so that each is made once per machine.

A file that cannot be read is recreated. If the folder cannot be written, nothing is cached.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

_MOST = 512
"""The maximum number of files. Template kwargs come from clients, who must not be able to fill the disk."""

_log = logging.getLogger("tokentape.chat")


def cache_directory(kind: str) -> Path:
    """Return the folder `$TOKENTAPE_CACHE/KIND`, by default `tokentape/KIND` in the user's cache folder."""
    chosen = os.environ.get("TOKENTAPE_CACHE")
    return (Path(chosen) if chosen else _user_cache() / "tokentape") / kind


def keep(path: Path, text: str) -> None:
    """Write a cache file. If that fails, log a warning once per folder and reason."""
    try:
        _write(path, text)
    except OSError as error:
        _tell_unwritable(path.parent, error.strerror or type(error).__name__)


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    name, fallback = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    # The XDG specification says to ignore relative paths.
    folder = os.environ.get(name, "")
    return Path(folder) if os.path.isabs(folder) else Path.home() / fallback


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
    for old in sorted(path.parent.glob("*.json"), key=_modified, reverse=True)[_MOST:]:
        old.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    """Return the time at which a file was last written; 0 if another process has removed it in the meantime."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def _tell_unwritable(folder: Path, reason: str) -> None:
    _log.warning("can't write the cache %s: %s. Set TOKENTAPE_CACHE to a writable folder.", folder, reason)
