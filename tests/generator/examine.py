"""Examine one case: make its template, tokenizer and conversations, and judge the product on them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.generator.compose import ENDS, Template, compose
from tests.generator.conversations import constants_of, conversations
from tests.generator.judge import Finding, Judge
from tests.generator.mutate import MUTATIONS, beside, real_template, shipped
from tests.generator.options import Case, draw
from tests.generator.oracle import Reference, Refused
from tests.generator.product import Product
from tests.generator.vocabularies import write_model

CONVERSATIONS = 20
_SIMPLE = ({"role": "user", "content": "say zqquestn"}, {"role": "assistant", "content": "say zqanswer"})


@dataclass
class Result:
    """What was found for one case."""

    seed: int
    index: int
    cause: list[str]
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """CPU time."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}


def case_of(seed: int, index: int) -> Case:
    """The case of this seed and index.

    Odd seeds make the same cases on every machine; even ones also change the real templates beside the repository.
    """
    return draw(seed, index, tuple(shipped()), () if seed % 2 else tuple(beside()), tuple(MUTATIONS))


def template_of(case: Case) -> Template:
    """The template of a case, composed or real."""
    return real_template(case) if case.base else compose(case)


def examine(
    case: Case,
    count: int = CONVERSATIONS,
    product: Callable[[Path, dict[str, bool]], Product] = Product,
    numbers: Collection[int] | None = None,
) -> Result:
    """Judge `product` on the case's first `count` conversations, or on those of these numbers."""
    started = time.process_time()
    result = Result(case.seed, case.index, case.cause)
    with TemporaryDirectory(prefix="generated-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        template = template_of(case)
        _examine(case, template, write_model(case, template, Path(folder)), numbers or range(count), product, result)
    result.seconds = round(time.process_time() - started, 3)
    return result


def examined(task: tuple[int, int, int]) -> dict[str, Any]:
    """Return the result of a seed, an index and a number of conversations; for processes of a pool."""
    seed, index, count = task
    return examine(case_of(seed, index), count).to_dict()


def _examine(
    case: Case,
    template: Template,
    folder: Path,
    numbers: Collection[int],
    product: Callable[[Path, dict[str, bool]], Product],
    result: Result,
) -> None:
    kwargs = dict(template.kwargs)
    # A mutation may take a token out of a real template, which is text then.
    reference = Reference(folder, kwargs, () if case.base else template.controls)
    try:
        text = reference.render(_SIMPLE[:1], (), generate=True) + reference.render(_SIMPLE, (), generate=False)
    except Refused:
        text = ""
    if text.count("zqquestn") < 2 or "zqanswer" not in text:
        result.counts = {"templates that do not render a question and an answer": 1}
        return
    try:
        with_kwargs = product(folder, kwargs)
    except Exception as error:
        result.findings = [Finding("not certified", -1, f"{type(error).__name__}: {error}"[:400])]
        return
    ends = frozenset((template.eos, *template.other_ends, *ENDS)) if not case.base else frozenset[str]()
    judge = Judge(reference, with_kwargs, ends, case.random)
    controls: Sequence[str] = sorted(reference.controls)
    typed = not case.base and case.options["calls"] not in ("tagged_parameters", "key_value_tags", "semicolons")
    made = conversations(
        case.random, template.source, controls, numbers, arguments_as_text=takes_text(reference), typed=typed
    )
    judge.judge(made, constants_of(template.source))
    result.findings, result.counts = judge.findings, dict(judge.counts)


def takes_text(reference: Reference) -> bool:
    """Whether the template takes the arguments of calls as JSON text only: it fails on objects or prints Python's."""
    call = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"place": "herezq"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}
    try:
        text = reference.render([_SIMPLE[0], calling], (tool,), generate=False)
    except Refused:
        return True
    return "'place': 'herezq'" in text
