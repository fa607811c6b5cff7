"""The available templates, each with a tokenizer: of the tests' data, of folders beside the repository, composed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.generator.examine import case_of, template_of
from tests.generator.options import TEMPLATE, Case, only
from tests.generator.vocabularies import write_model
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Setup, Tool

BESIDE = Path(__file__).parents[4] / "shared"
REAL = Path(os.environ.get("TOKENTAPE_TOKENIZERS", BESIDE / "tokenizers"))
SMALL = Path(__file__).parents[1] / "data" / "models"
_STAND_IN = "qwen3"


@dataclass(frozen=True)
class Pair:
    """A template and a folder with a tokenizer."""

    name: str
    template: Path
    tokenizer: Path

    def load(self, tools: Sequence[Tool]) -> tuple[Renderer, Setup]:
        """Return the renderer, and a setup with `tools`, or without them if the template supports none."""
        renderer = Renderer(_tokenizer(self.tokenizer), ChatTemplate(self.template.read_text(encoding="utf-8")))
        setup = renderer.setup(tools, date="2026-11-21")
        try:
            renderer.format(setup)
        except TemplateRefused:
            setup = renderer.setup((), date="2026-11-21")
        return renderer, setup


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def pairs(roots: Sequence[Path] = (), *, composed: int = 0) -> Iterator[Pair]:
    """Yield small pairs, real pairs, templates with a substitute tokenizer, then random templates of the generator."""
    stand_in = next(
        (root / _STAND_IN for root in (REAL, SMALL) if (root / _STAND_IN / "tokenizer.json").exists()), None
    )
    for label, root in (("small", SMALL), ("real", REAL)):
        for path in sorted(root.glob("*/templates/*.jinja")):
            folder = path.parents[1]
            own = folder if (folder / "tokenizer.json").exists() else root / _STAND_IN
            yield Pair(f"{label}/{folder.name}/{path.stem}", path, own)
    for root in (BESIDE / "trial" / "templates", *roots):
        for path in sorted(root.glob("*.jinja")):
            if stand_in is not None:
                yield Pair(f"{root.name}/{path.stem}", path, stand_in)
    yield from _made(case_of(1, index) for index in range(composed))


def syntaxes(name: str = "") -> Iterator[Pair]:
    """Yield a template of the generator for each call syntax and each way to write values and to label calls.

    With `name`, such as `calls=python values=json`, only the template with these options.
    """
    causes = [[f"calls={calls}", f"values={values}"] for calls in TEMPLATE["calls"] for values in TEMPLATE["values"]]
    causes += [[f"calls={calls}", f"call_label={how}"] for calls in TEMPLATE["calls"] for how in TEMPLATE["call_label"]]
    cases = [only(case_of(1, 0), cause) for cause in causes]
    yield from _made(case for case in cases if name in ("", " ".join(case.cause)))


def _made(cases: Iterable[Case]) -> Iterator[Pair]:
    """Yield cases of the generator, each with a tokenizer trained for it."""
    with tempfile.TemporaryDirectory() as folder:
        for n, case in enumerate(cases):
            model = write_model(case, template_of(case), Path(folder) / str(n))
            name = " ".join([*case.cause] or ["plain"]) if len(case.cause) < 3 else str(case.index)
            yield Pair(f"composed/{name}", model / "chat_template.jinja", model)
