"""Constrain completions of the embedded engine to a JSON Schema or a structural tag, with llguidance.

llguidance refuses schema keywords that it can't enforce. Grammars are in its dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tokentape.engines._base import SamplingParams
from tokentape.errors import InvalidRequest

CONSTRAINTS = frozenset({"json_schema", "structural_tag"}) if find_spec("llguidance") else frozenset[str]()
"""The constraints that the embedded engine can follow: none without llguidance."""

_JSON = {"whitespace_pattern": r" ?|\n[ \t]{0,40}"}
"""The white space allowed between two JSON tokens. Without a limit, weak models may write white space forever."""

_END = "<|end of constraint|>"


class Constraint:
    """The grammar that one completion must follow, and the matcher's state after the tokens so far."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int], size: int) -> None:
        self._matcher = matcher
        self._stop_ids = [stop_id for stop_id in stop_ids if stop_id < size]
        self._size = size

    def allowed(self, rows: int) -> npt.NDArray[np.bool_]:
        """Return which ids may come next, bool [rows]. Stop ids are allowed if the tokens so far match the grammar."""
        allowed = np.zeros(rows, np.bool_)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=self._size, bitorder="little")
        bits[self._stop_ids] = self._matcher.is_accepting()
        allowed[: self._size] = bits[:rows]
        if self._matcher.is_error():
            allowed[:] = False
        return allowed

    @property
    def problem(self) -> str:
        """Why llguidance allows no id; empty if it has not failed."""
        return (
            f"llguidance can't follow the constraint: {self._matcher.get_error()}" if self._matcher.is_error() else ""
        )

    def push(self, token_id: int) -> None:
        """Add a sampled id that is not a stop id."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Creates constraints for one tokenizer, which is prepared for the first constraint. It is thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prepared: Any = None
        self._lock = threading.Lock()

    def constraint(self, params: SamplingParams) -> Constraint:
        """Return the constraint for a call with a `json_schema` or a `structural_tag`.

        Raises `InvalidRequest` if it can't be enforced, for example because of a schema keyword.
        """
        from llguidance import LLMatcher

        name = "json_schema" if params.json_schema is not None else "structural_tag"
        if not params.stop_token_ids:
            raise InvalidRequest(f"{name} needs stop_token_ids, which end the completion", name)
        spec = json.loads(params.json_schema or params.structural_tag or "")
        form = spec["format"] if params.json_schema is None else {"type": "json_schema", "json_schema": spec}
        with self._lock:
            if self._prepared is None:
                self._prepared = _prepare(self._tokenizer)
        matcher = LLMatcher(self._prepared, LLMatcher.grammar_from_lark(lark(form)), log_level=0)
        if matcher.is_error():
            # The message begins with a position in the grammar, and ends with the grammar.
            reason = re.sub(r"^at \d+\(\d+\): |\n +1 \| (?s:.*)", "", matcher.get_error())[:500]
            what = "this JSON Schema" if name == "json_schema" else "the tools' JSON Schemas"
            raise InvalidRequest(f"the engine can't follow {what}; change it: {reason}", name)
        return Constraint(matcher, params.stop_token_ids, self._prepared.eos_token)


def _prepare(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer for llguidance, in which added tokens, except for white space, don't match their text.

    Otherwise `<tool_call>` inside a JSON string could be sampled as the control token.
    """
    from llguidance import LLTokenizer

    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = bool(token["content"].replace("\u2581", " ").strip())
    # `_END` is an additional token, in place of which `Constraint` allows the call's stop ids.
    described["added_tokens"].append(
        {"id": max(tokenizer.get_vocab().values()) + 1, "content": _END, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    )
    text = json.dumps(described)
    return LLTokenizer(text, eos_token=Tokenizer.from_str(text).token_to_id(_END))


def lark(form: Mapping[str, Any]) -> str:
    """Return the Lark grammar for the `format` of a structural tag that `chat._call_constraint` wrote.

    Raises `InvalidRequest` for other formats.
    """
    terminals: list[str] = []

    def ids(token_ids: Sequence[int], *, but: bool = False) -> str:
        return f"<[{'^' * but}{','.join(map(str, token_ids))}]>" if token_ids else "<[*]>"

    def sequence(elements: Sequence[Mapping[str, Any]]) -> str:
        rules: list[str] = []
        for index, element in enumerate(elements):
            if element["type"] == "const_string" and index and elements[index - 1]["type"] == "any_text":
                # Text and the string that ends it form one terminal, because the lexer does not look ahead.
                terminals[-1] += f" {_quoted(element['value'])}"
            else:
                rules.append(rule(element))
        return " ".join(rules)

    def rule(element: Mapping[str, Any]) -> str:
        match element["type"]:
            case "sequence":
                return f"({sequence(element['elements'])})"
            case "or":
                return f"({' | '.join(map(rule, element['elements']))})"
            case "star":
                return f"({rule(element['content'])})*"
            case "optional":
                return f"({rule(element['content'])})?"
            case "token":
                return ids([element["token"]])
            case "const_string":
                return _quoted(element["value"])
            case "regex":
                return f"/{element['pattern']}/"
            case "json_schema":
                return f"%json {json.dumps(dict(element['json_schema']) | {'x-guidance': _JSON})}"
            case "any_tokens":
                return f"{ids(element['exclude_tokens'], but=True)}*"
            case "any_text":
                excluded = " | ".join(map(_quoted, element["excludes"]))
                terminals.append(f"TEXT_{len(terminals)}: (/(?s:.*)/ & ~(/(?s:.*)/ ({excluded}) /(?s:.*)/))")
                return f"TEXT_{len(terminals) - 1}"
            case "token_dispatch":
                begins = [token for token, _ in element["rules"]]
                calls = [f"{ids([token])} {rule(content)}" for token, content in element["rules"]]
                return f"({' | '.join([ids([*element['exclude_tokens'], *begins], but=True), *calls])})*"
        raise InvalidRequest(f"unknown format {element['type']!r}; pass a tag that Tokentape wrote", "structural_tag")

    start = rule(form)
    # With forcing, text that the grammar fixes could be sampled in only one tokenization.
    return "\n".join(['%llguidance {"no_forcing": true}', f"start: {start}", *terminals])


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
