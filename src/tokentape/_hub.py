"""Find a model folder by its path, or by its Hub repo id in this machine's cache, without network access."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokentape.errors import InvalidRequest

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_model(model: Path, *, weights: bool) -> Path:
    """Return the folder `model`, or the folder that the local cache has for a Hub repo id.

    Raises:
        InvalidRequest: neither exists. The message contains the command that downloads the model, or without `weights`
            only the files of its tokenizer and template.

    """
    if model.is_dir():
        return model
    name = str(model)
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"there is no model folder {name}{' (it is a file)' if model.exists() else ''}; pass a folder with "
            "tokenizer.json and a chat template, or a Hub repo id such as Qwen/Qwen3-8B",
            "model",
        )
    cached = _cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted((cached / "snapshots").glob("*/tokenizer.json"))
    main = cached / "refs" / "main"
    revision = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    for file in snapshots:
        if file.parent.name == revision or len(snapshots) == 1:
            return file.parent
    only = "" if weights else " --include '*.json' '*.jinja' '*.model'"
    raise InvalidRequest(
        f"{name} is neither a folder nor in the Hub's cache here; run: hf download {name}{only}", "model"
    )


def is_hub_name(model: Path) -> bool:
    """Return whether this is not an existing path but has the format of a Hub repo id."""
    return not model.exists() and _NAME.fullmatch(str(model)) is not None


def _cache() -> Path:
    """Return the folder that the Hub's own client downloads to."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or base / "huggingface") / "hub"
