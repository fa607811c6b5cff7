"""JSON schemas of vLLM's messages: of the fields listed here, and the server's where available.

`TOKENTAPE_SHARED` names the folder with `engines/schemas`, by default `../shared` beside the repository.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OBJECTS: dict[str, dict[str, str]] = json.loads((HERE / "vllm_fields.json").read_text(encoding="utf-8"))["objects"]
SCHEMAS = Path(os.environ.get("TOKENTAPE_SHARED") or HERE.parents[2] / "shared") / "engines" / "schemas"

each_schema = pytest.mark.parametrize("schemas", ["fields", *(["full"] if SCHEMAS.is_dir() else [])])
"""Runs a test with the schema listed here and, if available, with the server's."""


def schema(name: str, schemas: str = "fields") -> dict[str, Any]:
    """Return the schema of a message: `properties`, and `StreamOptions` below `$defs`."""
    if schemas == "full":
        full: dict[str, Any] = json.loads((SCHEMAS / f"vllm_0.33.0_{name}.json").read_bytes())
        return full
    return {**_object(name), "$defs": {other: _object(other) for other in OBJECTS}}


def _object(name: str) -> dict[str, Any]:
    fields = OBJECTS[name]
    return {
        "type": "object",
        "properties": {field.rstrip("!"): _type(written) for field, written in fields.items()},
        "required": [field.rstrip("!") for field in fields if field.endswith("!")],
    }


def _type(written: str) -> dict[str, Any]:
    """Return the schema of a type in the notation of vllm_fields.json. No list there contains alternatives of lists."""
    if written == "any":
        return {}
    parts = re.findall(r"\[(?:[^\[\]]|\[[^\]]*\])*\]|[^|]+", written)
    if len(parts) > 1:
        return {"anyOf": [_type(part) for part in parts]}
    if written.startswith("["):
        return {"type": "array", "items": _type(written[1:-1])}
    return {"$ref": f"#/$defs/{written}"} if written[0].isupper() else {"type": written}
