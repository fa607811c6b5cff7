"""The templates for replayed suites: our side and the oracle's side of each, on the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import tokenizers

from tests.data import REAL as ROOT
from tests.external import suites
from tests.external.oracle import DATE, Oracle
from tests.external.replay import Pair
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Setup

STAND_IN = "qwen3"
"""Tokenizer for families without a tokenizer."""

TEMPLATES = sorted(f"{path.parts[-3]}/{path.stem}" for path in ROOT.glob("*/templates/*.jinja"))
"""All real templates, by family and name."""

_MINIMAX = (("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"), "[e~[")
_KIMI = (
    (
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
        *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "<|im_end|>",
)
_ADDED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "minimax_m2": _MINIMAX,
    "minimax_m25_fixed": _MINIMAX,
    "kimi_k25_fixed": _KIMI,
}
"""By family: control tokens missing from the substitute vocabulary, and the end-of-turn token."""


def is_stand_in(template: str) -> bool:
    """Return whether the template's tokenizer is missing, so that only its text is compared."""
    family = template.split("/")[0]
    return not (ROOT / family / "tokenizer.json").exists() and not template.startswith("miles/qwen3_")


@cache
def load_pair(template: str, kwargs: str = "{}") -> Pair:
    """Return both sides of a template under template kwargs in JSON. `miles/NAME` is one of Miles's own."""
    family, name = template.split("/")
    file, config = _tokenizer(name if family == "miles" else family)
    tokenizer = Tokenizer(file, config)
    path = suites.FOLDER / "miles_templates" if family == "miles" else ROOT / family / "templates"
    source = (path / f"{name}.jinja").read_text(encoding="utf-8")
    renderer = Renderer(tokenizer, ChatTemplate(source))
    plain = tokenizers.Tokenizer.from_str(file.decode())
    template_kwargs: dict[str, Any] = json.loads(kwargs)
    return Pair(
        template,
        renderer,
        load_or_certify(renderer, template_kwargs),
        Oracle(source, plain, tokenizer.special_tokens, template_kwargs),
    )


@cache
def _tokenizer(family: str) -> tuple[bytes, dict[str, Any]]:
    folder = ROOT / family
    if not (folder / "tokenizer.json").exists():
        folder = ROOT / STAND_IN
    file = (folder / "tokenizer.json").read_bytes()
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_bytes())
    if family not in _ADDED:
        return file, config
    added, eos = _ADDED[family]
    spec = json.loads(file)
    following = 1 + max(token["id"] for token in spec["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    spec["added_tokens"] += [{"id": following + n, "content": c, **flags} for n, c in enumerate(added)]
    return json.dumps(spec).encode(), config | {"eos_token": eos}


def setup_for(pair: Pair, tools: tuple[Any, ...]) -> Setup:
    """Return the setup of a conversation with these tools on the oracle's day."""
    return pair.renderer.setup(tools, pair.oracle.kwargs, DATE)
