"""The pairs of template and tokenizer for tests of chat: the small ones of `data/models`, and real ones.

A name such as `qwen3/templates/Qwen3.jinja` is looked up in `data/models`, or among the real pairs if the fixture
`source` is real; `real/qwen3/...` is always a real pair. Real ones are read from `TOKENTAPE_TOKENIZERS`, by default a
folder beside the repository. Tests exist only for available pairs: none is skipped for a missing pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chat.data import make_tokenizers
from tests.data import HAVE_REAL, REAL, TRIED
from tokentape.chat._certificate import Certificate
from tokentape.chat._certification import certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.types import Setup

SMALL = Path(__file__).parent / "data" / "models"

STAND_IN = "qwen3"
"""Tokenizer for families without a tokenizer."""

WRITTEN_HERE = {
    "llama3/templates/Llama-3-Instruct.jinja": "gemma3/templates/turns.jinja",
    "llama3/templates/Llama-3.1-3.3-Instruct.jinja": "llama3/templates/bare-json.jinja",
    "glm4_5/templates/GLM-4.5.jinja": "glm4_5/templates/key-value.jinja",
    "glm4_5/templates/GLM-4.6.jinja": "glm4_5/templates/key-value.jinja",
    "deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja": "deepseek_v3/templates/sections.jinja",
    "deepseek_v31/templates/DeepSeek-V3.1.jinja": "deepseek_v31/templates/short-sections.jinja",
    "minimax_m2/templates/MiniMax-M2.jinja": "minimax_m2/templates/invoke.jinja",
    "nemotron3/templates/Nemotron-3-Nano.jinja": "nemotron3/templates/forced-thinking.jinja",
}
"""Substitutes in `data/models` for templates that may not be copied: they write calls and turns the same way."""

REAL_SAMPLE = ("mistral_v3_spm/templates/v3_spm.jinja", "qwen3/templates/Qwen3.jinja")
"""The real pairs of `make test`; `make test-slow` uses all."""


def templates_in(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("*/templates/*.jinja"))


SMALL_TEMPLATES = templates_in(SMALL)
REAL_TEMPLATES = [f"real/{name}" for name in templates_in(REAL)] if HAVE_REAL else []


def slow_unless(parameter: Any, *often: Any) -> Any:
    """Return a parameter for slow runs only, unless it is in `often`."""
    return parameter if parameter in often else pytest.param(parameter, marks=pytest.mark.slow)


EVERY_TEMPLATE = SMALL_TEMPLATES + [
    slow_unless(name, *(f"real/{sample}" for sample in REAL_SAMPLE)) for name in REAL_TEMPLATES
]
"""Parameters: each small pair, and each available real pair."""

OFTEN_CERTIFIED = (
    "deepseek_v3/templates/sections.jinja",
    "gemma3/templates/turns.jinja",
    "glm4_5/templates/key-value.jinja",
    "gpt_oss/templates/gpt-oss.jinja",
    "mistral_v3_spm/templates/v3_spm.jinja",
    "qwen3/templates/Qwen3.jinja",
    "unigram/templates/roles.jinja",
)
"""Pairs of each kind of vocabulary and of each notation of calls and turns: a certificate takes a second."""

CERTIFIED = [slow_unless(name, *OFTEN_CERTIFIED) for name in [*SMALL_TEMPLATES, *REAL_TEMPLATES]]
"""Parameters of tests that need the certificate of a pair."""

FAMILIES = sorted(path.parent.name for path in SMALL.glob("*/tokenizer.json"))
KINDS = ("qwen3", "gpt_oss", "mistral_v3_spm", "gemma3", "unigram")
"""A family of each kind of vocabulary: see `data/make_tokenizers.py`."""

REAL_FAMILIES = [f"real/{path.parent.name}" for path in sorted(REAL.glob("*/tokenizer.json"))]
EVERY_FAMILY = FAMILIES + [slow_unless(name, "real/mistral_v3_spm") for name in REAL_FAMILIES]
"""Parameters: each small tokenizer, and each available real tokenizer."""

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

_sources = ["small"]


@pytest.fixture(scope="module", params=["small", *([pytest.param("real", marks=pytest.mark.slow)] * HAVE_REAL)])
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """Resolve names without a prefix to small pairs, then to real pairs."""
    _sources.append(request.param)
    yield request.param
    _sources.pop()


def model_path(name: str) -> Path:
    """Return the path of a template or family, of the current source or of the source in its prefix."""
    first, _, rest = name.partition("/")
    if first == "real" or _sources[-1] == "real":
        return REAL / (rest if first == "real" else name)
    return SMALL / WRITTEN_HERE.get(name, name)


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder if (folder / "tokenizer.json").exists() else folder.parent / STAND_IN)


@cache
def _renderer(path: Path) -> Renderer:
    return Renderer(_tokenizer(path.parents[1]), _template(path))


@cache
def _template(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(encoding="utf-8"))


@cache
def _certificate(path: Path) -> Certificate:
    return certify(_renderer(path))


def load_tokenizer(family: str) -> Tokenizer:
    """Return a family's tokenizer, cached."""
    return _tokenizer(model_path(family))


def load_renderer(template: str) -> Renderer:
    """Return the renderer of a template and the tokenizer of its family, cached."""
    path = model_path(template)
    TRIED.add(f"{'real' if path.is_relative_to(REAL) else 'small'} {path.parents[1].name}/{path.name}")
    return _renderer(path)


def new_renderer(template: str) -> Renderer:
    """Return a renderer that nothing else uses."""
    path = model_path(template)
    folder = path.parents[1]
    tokenizer = Tokenizer.load(folder if (folder / "tokenizer.json").exists() else folder.parent / STAND_IN)
    return Renderer(tokenizer, ChatTemplate(path.read_text(encoding="utf-8")))


def renderer_of_kind(template: str, kind: str) -> Renderer:
    """Return the renderer of a small template with its family's added tokens on a vocabulary of another kind."""
    path = model_path(template)
    family = path.parents[1].name
    TRIED.add(f"small {family}/{path.name} on {kind}")
    return Renderer(_tokenizer_of_kind(family, kind), _template(path))


@cache
def _tokenizer_of_kind(family: str, kind: str) -> Tokenizer:
    added = make_tokenizers.FAMILIES.get(family, make_tokenizers.FAMILIES[STAND_IN])
    return Tokenizer(json.dumps(make_tokenizers.compose(kind, added)).encode(), added.config)


def load_certificate(template: str) -> Certificate:
    """Return the certificate of a pair, cached."""
    load_renderer(template)
    return _certificate(model_path(template))


def setup_for(renderer: Renderer, *, tools: tuple[Any, ...] = (ADD,), date: str = "2026-11-21", **kwargs: Any) -> Setup:
    return renderer.setup(tools, kwargs, date)


def call(n: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(n: int, content: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{n}", "content": content}
