"""Argument values that stand between tags: text where the tool's schema says so, else JSON or what Python prints."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from tokentape.chat.json_text import decode, standard
from tokentape.types import Tool

_PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_LONGEST_LITERAL = 100_000
"""Characters. A longer list in Python's notation stays text: reading it takes some hundred bytes each."""


def value_json(raw: str, schema: Any, *, is_text: bool) -> str:
    """The JSON text of a tagged value.

    `schema` is the parameter's JSON schema, if there is one. `is_text`: the model's own tags say that it is text.

    >>> value_json("7", {"type": "string"}, is_text=False), value_json("7", None, is_text=False)
    ('"7"', '7')
    """
    types = _types(schema)
    core = raw.strip()
    if is_text or (types and types <= {"string", "null"} and not (core == "null" and "null" in types)):
        return json.dumps(raw, ensure_ascii=False)
    try:
        decode(core)
    except ValueError:
        return _PYTHON_WORDS.get(core) or _python_literal(core) or json.dumps(raw, ensure_ascii=False)
    return standard(core)


def property_schema(tool: Tool | None, key: str) -> Any:
    """The schema of a tool's parameter; None where the tool says nothing of it."""
    schema: Any = tool
    for step in ("function", "parameters", "properties", key):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            found |= _types(choice)
    values = schema.get("enum")
    if not found and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found = {"string"}
    return found


def _python_literal(core: str) -> str | None:
    """The JSON text of a list or dict as Python prints it; None for anything else."""
    if core[:1] not in ("[", "{", "(") or len(core) > _LONGEST_LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(core), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
