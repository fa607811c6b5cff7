"""Argument values that stand between tags: text where the tool's schema says so, else JSON or what Python prints."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from tokentape.chat.json_text import decode, standard
from tokentape.types import Tool

_PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_NULLS = ("null", "None")
_LONGEST_LITERAL = 100_000
"""Characters. A longer list in Python's notation stays text: reading it takes some hundred bytes each."""


def value_json(raw: str, schema: Any, *, is_text: bool | None = None) -> str:
    """Return the JSON text of a tagged value.

    `schema` is the parameter's JSON schema, if there is one. `is_text` is what the model's own tags or quotes say; None
    where they say nothing. A null that they tell from text is one whatever the schema says.

    >>> value_json("7", {"type": "string"}), value_json("7", None)
    ('"7"', '7')
    >>> value_json("null", {"type": "string"}), value_json("null", {"type": "string"}, is_text=False)
    ('"null"', 'null')
    """
    types = _types(schema)
    core = raw.strip()
    if not is_text and core in _NULLS and (is_text is not None or "null" in types):
        return "null"
    if is_text or (types and types <= {"string", "null"}):
        return json.dumps(raw, ensure_ascii=False)
    try:
        decode(core)
    except ValueError:
        return _PYTHON_WORDS.get(core) or _python_literal(core) or json.dumps(raw, ensure_ascii=False)
    return standard(core)


def quoted_json(raw: str, schema: Any) -> str:
    """Return the JSON text of a tagged value where text stands in quotes and nothing else does.

    >>> quoted_json('"7"', None), quoted_json("a word", None), quoted_json('"a "b" c"', None)
    ('"7"', '"a word"', '"a \\\\"b\\\\" c"')
    """
    core = raw.strip()
    if not (len(core) > 1 and core[0] == core[-1] == '"'):
        return value_json(raw, schema, is_text=False)
    try:
        decode(core)
    except ValueError:
        return json.dumps(core[1:-1], ensure_ascii=False)
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
