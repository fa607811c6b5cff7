"""Read what config.json and generation_config.json say of ids: where turns end, what is not sampled, embedding rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokentape.chat._tokenizer_files import read_json

CONFIG_FILES = ("config.json", "generation_config.json")
ROWS = "config.json vocab_size"
"""The key of `model_configuration` for the rows of the embedding."""
SAMPLED = ("stop_strings", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Keys of generation_config.json that change where turns end, or which ids are sampled."""


def model_configuration(folder: Path) -> dict[str, Any] | None:
    """Return ids, stop strings and embedding rows of both files, by file and key; None if the folder has neither file.

    Ids are sorted lists. Of a configuration with a part for text, that part counts where the outer one has no value.

    Raises `TokenizerUnusable` if a file is not a JSON object.
    """
    present = [name for name in CONFIG_FILES if (folder / name).is_file()]
    found: dict[str, Any] = {}
    for name in present:
        whole = read_json(folder / name)
        nested = whole.get("text_config")
        for part in (whole, nested if isinstance(nested, Mapping) else {}):
            for key, value in part.items():
                if value is not None and (key.endswith("_token_id") or (key in SAMPLED and name != CONFIG_FILES[0])):
                    found.setdefault(f"{name} {key}", _ids(value))
                elif value is not None and f"{name} {key}" == ROWS:
                    found.setdefault(ROWS, value)
    return found if present else None


def _ids(value: Any) -> list[Any]:
    listed = value if isinstance(value, list) else [value]
    return [json.loads(one) for one in sorted({json.dumps(one) for one in listed}, key=lambda one: (len(one), one))]
