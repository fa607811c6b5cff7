"""Read JSON as models write it: find the end of a streamed object, split it, convert values between tags.

Values keep the model's spelling because decoding and encoding them would change numbers, escapes and order.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any, NamedTuple

from tokentape.chat._delimiters import skip
from tokentape.types import Tool


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


_LENIENT = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=_refuse)
"""Accepts line breaks within strings, which models write, and returns numbers of any size as text."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_CONTROL = re.compile("[\x00-\x1f]")
_SPACE, _OPEN, _COLON, _COMMA = map(re.compile, (r"\s*", r"\s*{\s*", r"\s*:\s*", r"\s*,?\s*"))
_PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_NULLS = ("null", "None")
_CHOICES = ("anyOf", "oneOf", "allOf")
_LONGEST_LITERAL = 100_000
"""Longer lists in Python's notation are kept as text: parsing takes some hundred bytes of memory per character."""
_IN_STRING = re.compile(r'["\\]')


class ObjectEnd:
    """Finds the end of the object, list or string that begins at `start`. Reads each character once.

    `breaks` is an expression for texts that JSON can't contain outside strings. Such a text makes the object invalid.
    """

    def __init__(self, start: int, breaks: str) -> None:
        self.start = start
        self.broken_at: int | None = None
        """The position of the text that makes the object invalid."""
        self.end: int | None = None
        self._position = start
        self._depth = 0
        self._in_string = False
        self._longest_break = len(breaks)
        """An upper bound of a break's length. So many last characters are searched again: a break may be streamed."""
        self._outside = re.compile(rf'["{{}}\[\]]|(?P<break>{breaks})')

    def find(self, text: str) -> int | None:
        """Return the position after the object; None if it is invalid or incomplete in `text`, the text so far."""
        while self.end is None and self.broken_at is None:
            match = (_IN_STRING if self._in_string else self._outside).search(text, self._position)
            if match is None or (match[0] == "\\" and match.end() == len(text)):
                overlap = 0 if self._in_string else self._longest_break
                self._position = match.start() if match else max(self._position, len(text) - overlap)
                return None
            self._position = match.end()
            if self._in_string:
                self._position += match[0] == "\\"
                self._in_string = match[0] == "\\"
                if not self._in_string and self._depth == 0:
                    self.end = match.end()
            elif match[0] == '"':
                self._in_string = True
            elif match["break"] is not None:
                self.broken_at = match.start()
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    self.end = match.end()
        return self.end


def decode(text: str) -> Any:
    """Return the value of a JSON text, with numbers as text. Raises `ValueError` if it is invalid or too deep."""
    try:
        value, end = _LENIENT.raw_decode(text, skip(_SPACE, text, 0))
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    if skip(_SPACE, text, end) != len(text):
        raise ValueError("more text follows the JSON value")
    return value


def members(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, raw value) for each member of a JSON object that `decode` accepts."""
    position = skip(_OPEN, text, 0)
    while text[position] != "}":
        name, position = _LENIENT.raw_decode(text, position)
        start = skip(_COLON, text, position)
        _, end = _LENIENT.raw_decode(text, start)
        yield name, text[start:end]
        position = skip(_COMMA, text, end)


def standard(raw: str) -> str:
    """Return a JSON text that `decode` accepts as standard JSON, with control characters within strings escaped."""
    return _STRING.sub(lambda match: _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", match[0]), raw)


def value_json(raw: str, types: AbstractSet[str] | None, *, is_text: bool | None = None) -> str:
    """Return the JSON text of a tagged value.

    `types` are the parameter's types, see `Schema`. `is_text` says whether the model's tags or quotes mark the
    value as text, None that they do not show it. If it is False, `null` is a null whatever the types.

    >>> value_json("7", {"string"}), value_json("7", None)
    ('"7"', '7')
    >>> value_json("null", {"string"}), value_json("null", {"string"}, is_text=False)
    ('"null"', 'null')
    """
    core = raw.strip()
    if not is_text and core in _NULLS and (is_text is not None or "null" in (types or ())):
        return "null"
    if is_text or takes_only_text(types):
        return json.dumps(raw, ensure_ascii=False)
    try:
        decode(core)
    except ValueError:
        return _PYTHON_WORDS.get(core) or _python_literal(core) or json.dumps(raw, ensure_ascii=False)
    return standard(core)


def takes_only_text(types: AbstractSet[str] | None) -> bool:
    """Return whether a parameter of these types takes only text, or text and null."""
    return types is not None and "string" in types <= {"string", "null"}


def quoted_json(raw: str, types: AbstractSet[str] | None) -> str:
    """Return the JSON text of a tagged value, in a syntax that puts all text in quotes.

    >>> quoted_json('"7"', None), quoted_json("a word", None), quoted_json('"a "b" c"', None)
    ('"7"', '"a word"', '"a \\\\"b\\\\" c"')
    """
    core = raw.strip()
    if not (len(core) > 1 and core[0] == core[-1] == '"'):
        return value_json(raw, types, is_text=False)
    try:
        decode(core)
    except ValueError:
        return json.dumps(core[1:-1], ensure_ascii=False)
    return standard(core)


class Schema(NamedTuple):
    """A part of a tool's JSON schema for its arguments; `schema` is None if the tool has none for this part."""

    schema: Any
    root: Any

    @classmethod
    def of(cls, tool: Tool | None, key: str) -> Schema:
        """Return the schema of a parameter."""
        parameters = _at(tool, ["function", "parameters"])
        return cls(_at(parameters, ["properties", key]), parameters)

    @property
    def types(self) -> AbstractSet[str] | None:
        """The JSON types that a value may have, as far as the schema names them; None without a schema."""
        if self.schema is None:
            return None
        types: set[str] = set()
        for schema in _alternatives(self.schema, self.root, set()):
            named = schema.get("type")
            named = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if not named and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
                named = {"string"}
            types |= named
        return types

    def part(self, key: str | None) -> Schema:
        """Return the schema of a member of an object or, without a key, that of the items of a list."""
        paths = [["items"]] if key is None else [["properties", key], ["additionalProperties"]]
        schemas = list(_alternatives(self.schema, self.root, set()))
        parts = (_at(schema, path) for path in paths for schema in schemas)
        return Schema(next((part for part in parts if isinstance(part, Mapping)), None), self.root)


def _at(value: Any, path: Iterable[str]) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _alternatives(schema: Any, root: Any, seen: set[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the schema, its alternatives, and those that it references in other parts of `root` not in `seen`."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    choices = [choice for key in _CHOICES if isinstance(schema.get(key), list) for choice in schema[key]]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        choices.append(_at(root, reference.removeprefix("#/").split("/")))
    for choice in choices:
        yield from _alternatives(choice, root, seen)


def _python_literal(core: str) -> str | None:
    """Convert a list, tuple or dict in Python's notation to JSON text; return None for anything else."""
    if core[:1] not in ("[", "{", "(") or len(core) > _LONGEST_LITERAL:
        return None
    try:
        value = json.dumps(ast.literal_eval(core), allow_nan=False)
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(core).readline)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    # Python joins strings without a comma between them and skips comments; a model that writes this means neither.
    kinds = [kind for kind in kinds if kind != tokenize.NL]
    return None if tokenize.COMMENT in kinds or (tokenize.STRING,) * 2 in pairwise(kinds) else value
