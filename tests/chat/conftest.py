"""Real tokenizers and templates, read from a folder beside the repository; never committed."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokentape.chat.renderer import Renderer
from tokentape.chat.template import ChatTemplate
from tokentape.chat.tokenizer import Tokenizer
from tokentape.session.chain import setup_digest
from tokentape.types import Setup

ROOT = Path(os.environ.get("TOKENTAPE_TOKENIZERS", Path(__file__).parents[3] / "shared" / "tokenizers"))
TEMPLATES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/templates/*.jinja"))
STAND_IN = "qwen3"
"""Families that come without a tokenizer are tried with this one."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "add numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "exact": {"type": "boolean"}},
            "required": ["a"],
        },
    },
}

needs_tokenizers = pytest.mark.skipif(
    not TEMPLATES, reason=f"no tokenizers in {ROOT.name}/: set TOKENTAPE_TOKENIZERS to a folder that has them"
)


@cache
def load_tokenizer(family: str) -> Tokenizer:
    folder = ROOT / family
    return Tokenizer.load(folder if (folder / "tokenizer.json").exists() else ROOT / STAND_IN)


@cache
def load_renderer(template: str) -> Renderer:
    source = (ROOT / template).read_text(encoding="utf-8")
    return Renderer(load_tokenizer(template.split("/")[0]), ChatTemplate(source))


def setup_for(renderer: Renderer, *, tools: tuple[Any, ...] = (ADD,), date: str = "2026-11-21", **kwargs: Any) -> Setup:
    digest = setup_digest(tools, kwargs, date, renderer.fingerprint)
    return Setup(tools, kwargs, date, renderer.fingerprint, digest)


def call(n: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(n: int, content: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{n}", "content": content}
