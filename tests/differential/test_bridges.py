"""Our bridges against those of `renderers` and the suffixes of TRL; which is right where they differ.

The arbiter is the template itself: transformers' rendering of the whole conversation has to end with what was appended.
Needs a Python that has `renderers` and TRL, named in TOKENTAPE_RENDERERS_PYTHON; see docs/decisions/0004.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conftest import setup_for
from tests.differential.families import FAMILIES, load, tokenizer_file, write_harmony_vocabulary
from tokentape.chat import _grammar as grammar
from tokentape.chat._certification import written_turn
from tokentape.types import Message

PYTHON = os.environ.get("TOKENTAPE_RENDERERS_PYTHON")

pytestmark = [
    pytest.mark.differential,
    pytest.mark.real,
    pytest.mark.skipif(PYTHON is None, reason="needs a Python with `renderers` and TRL: TOKENTAPE_RENDERERS_PYTHON"),
]

HISTORY: tuple[Message, ...] = (grammar.QUESTION,)
ANSWER = grammar.TURNS["content"]
ONE, TWO = grammar.TURNS["call"], grammar.TURNS["parallel calls"]
RESULT, SECOND = grammar.result(1, "a resultword\nline 2"), grammar.result(2, "another {resultword}")
NEXT: Message = {"role": "user", "content": "then a nextword?"}

CONTINUATIONS: dict[str, tuple[Message, list[Message]]] = {
    "user": (ANSWER, [NEXT]),
    "tool": (ONE, [RESULT]),
    "tools": (TWO, [RESULT, SECOND]),
    "tool, user": (ONE, [RESULT, NEXT]),
    "user, white space": (ANSWER, [grammar.NEXT]),
    "tool, white space": (ONE, [grammar.result(1, " a resultword\n")]),
}


ALL = frozenset(CONTINUATIONS)
TOOLS_LAST = frozenset({"tool", "tools", "tool, white space"})

ONE_CALL_A_TURN = {"gpt-oss", "Llama-3.1-3.3-Instruct", "Llama-3.2-Instruct"}
"""Templates that refuse parallel calls."""

DIFFERENCES: dict[tuple[str, str], tuple[frozenset[str], str]] = {
    ("renderers", "Qwen3-Thinking-2507"): (
        ALL,
        "The template's generation prompt opens `<think>`; `renderers` has one class for all of Qwen3 and does not.",
    ),
    ("renderers", "gpt-oss"): (
        ALL - {"tools"},
        "`renderers` asks openai-harmony, which writes a tool's result as it is where the template writes it as a JSON "
        "string, and opens the analysis channel in the generation prompt where the template leaves that to the model.",
    ),
    ("renderers", "DeepSeek-V3-Dec2024"): (
        frozenset({"tools", "tool, user"}),
        "The template separates results by a newline and closes them (`<｜tool▁outputs▁end｜>`) at the end only, not "
        "in front of a user message; `renderers` writes no newline and always closes them.",
    ),
    ("renderers", "DeepSeek-R1"): (
        ALL - {"user", "user, white space"},
        "As DeepSeek-V3, and `renderers` opens `<think>` behind results, which the template does behind its header "
        "only: it writes none there.",
    ),
    **{
        ("trl", name): (
            TOOLS_LAST,
            "The model stops by sampling `<|observation|>`, the next message's header. TRL appends it once more: it "
            "cuts its dummy conversation at the last end-of-sequence token, and these templates write none.",
        )
        for name in ("GLM-4.5", "GLM-4.6", "GLM-4.7-Flash")
    },
}
"""(peer, template) -> the continuations in which it differs from us, and why. In all of them the template has ours."""

DECLINED: dict[tuple[str, str], str] = {
    ("trl", "Qwen3-Apr2025"): "does not keep prefixes, and TRL knows patched templates by exact string",
    ("trl", "Qwen3-Thinking-2507"): "does not keep prefixes, and TRL knows patched templates by exact string",
    ("trl", "DeepSeek-V3-Dec2024"): "shows calls only if content is None; TRL tries an empty string",
    ("trl", "DeepSeek-R1"): "takes arguments as text; TRL's dummy call has an object",
    ("trl", "v3_spm"): "wants a call id of nine characters; TRL's dummy call has none",
}
"""(peer, template) -> why it appends nothing at all."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What we and a peer append in one case, and whether the template's full rendering ends with it."""

    ours: list[int]
    theirs: list[int] | None
    kept: bool
    """The peer left all ids before as they were."""
    note: str
    template_has_ours: bool
    template_has_theirs: bool


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("differential")


def cases(scratch: Path) -> Iterator[tuple[str, str, list[int], dict[str, Any]]]:
    """(template, continuation, what we append, the case as peers get it)."""
    for template in FAMILIES:
        renderer = load(template, scratch)
        tokenizer, setup = renderer.tokenizer, setup_for(renderer, tools=(grammar.TOOL,))
        prompt_ids = renderer.render(HISTORY, setup).ids
        history = HISTORY if FAMILIES[template].contextual else None
        for name, (turn, new) in CONTINUATIONS.items():
            if turn.get("tool_calls"):
                turn = {**turn, "content": FAMILIES[template].content_of_calls}
            if name == "tools" and Path(template).stem in ONE_CALL_A_TURN:
                continue
            written = written_turn(renderer, setup, turn)
            assert written is not None, (template, name)
            end_of_call = FAMILIES[template].end_of_call if len(turn.get("tool_calls", ())) == 1 else ""
            completion = tokenizer.encode_after_control(written[1] + tokenizer.mark_controls(end_of_call)).ids
            stops = renderer.stop_ids(setup)
            if completion[-1] not in stops:
                # The template writes no end of this turn: the model stops with the header of the next message.
                bridge = renderer.bridge(tokenizer.array(completion), turn, new, setup, history).ids.tolist()
                completion.append(next(i for i in bridge if i in stops))
            yield (
                template,
                name,
                renderer.bridge(tokenizer.array(completion), turn, new, setup, history).ids.tolist(),
                {
                    "tokenizer": str(tokenizer_file(template, scratch)),
                    "special_tokens": tokenizer.special_tokens,
                    "template": renderer.template.source,
                    "prompt_ids": prompt_ids.tolist(),
                    "completion_ids": completion,
                    "messages": [*HISTORY, turn, *new],
                    "new_messages": new,
                    "tools": [grammar.TOOL],
                },
            )


@pytest.fixture(scope="session")
def comparisons(scratch: Path) -> dict[tuple[str, str, str], Comparison]:
    """All of them, by peer, name of the template and continuation."""
    found = list(cases(scratch))
    requests: list[tuple[str, str, list[int], dict[str, Any]]] = []
    for template, name, ours, case in found:
        requests.append((template, name, ours, {**case, "peer": "template"}))
        config = {"name": FAMILIES[template].renderers, "thinking_retention": "all"}
        if config["name"] is not None:
            requests.append((template, name, ours, {**case, "peer": "renderers", "config": config}))
        if case["new_messages"][-1]["role"] == "tool":
            requests.append((template, name, ours, {**case, "peer": "trl"}))
    answers = ask([case for *_, case in requests], scratch)
    whole = {
        (template, name): answer["ids"]
        for (template, name, _, case), answer in zip(requests, answers, strict=True)
        if case["peer"] == "template"
    }
    return {
        (case["peer"], Path(template).stem, name): Comparison(
            ours,
            answer["ids"],
            answer["kept"],
            answer["note"],
            as_the_template(whole[template, name], case["completion_ids"], ours),
            as_the_template(whole[template, name], case["completion_ids"], answer["ids"]),
        )
        for (template, name, ours, case), answer in zip(requests, answers, strict=True)
        if case["peer"] != "template"
    }


def ask(cases: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    assert PYTHON is not None
    write_harmony_vocabulary(scratch)
    answers = scratch / "answers.json"
    subprocess.run(
        [PYTHON, Path(__file__).with_name("peer.py"), answers],
        input=json.dumps({"cases": cases}),
        text=True,
        check=True,
        env={**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(scratch), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(answers.read_text(encoding="utf-8"))


def as_the_template(whole: list[int], completion: list[int], ids: list[int] | None) -> bool:
    """Whether the full rendering ends with `ids`, and these do not repeat sampled text."""
    return ids is not None and whole[len(whole) - len(ids) :] == ids and ids[:1] != completion[-1:]


def test_each_peer_keeps_the_existing_ids(comparisons: dict[tuple[str, str, str], Comparison]) -> None:
    assert [case for case, compared in comparisons.items() if not compared.kept] == []


def test_bridge_is_what_the_template_writes(comparisons: dict[tuple[str, str, str], Comparison]) -> None:
    assert [case for case, compared in comparisons.items() if not compared.template_has_ours] == []


def test_every_difference_is_explained(comparisons: dict[tuple[str, str, str], Comparison]) -> None:
    explained = {(peer, template, name) for (peer, template), (names, _) in DIFFERENCES.items() for name in names}
    differing = {case for case, c in comparisons.items() if c.theirs is not None and c.theirs != c.ours}
    assert differing == explained


def test_template_contradicts_a_peer_that_differs(
    comparisons: dict[tuple[str, str, str], Comparison],
) -> None:
    assert [case for case, c in comparisons.items() if c.theirs != c.ours and c.template_has_theirs] == []


def test_missing_bridge_has_a_reason(comparisons: dict[tuple[str, str, str], Comparison]) -> None:
    silent = {(peer, template) for (peer, template, _), c in comparisons.items() if c.theirs is None}
    assert silent == set(DECLINED)
    assert all(c.note for c in comparisons.values() if c.theirs is None)


def test_enough_is_compared(comparisons: dict[tuple[str, str, str], Comparison]) -> None:
    equal = Counter(peer for (peer, _, _), c in comparisons.items() if c.theirs == c.ours)
    total = Counter(peer for peer, _, _ in comparisons)
    print(f"equal {dict(equal)} of {dict(total)}")
    assert equal["renderers"] >= 100
    assert equal["trl"] >= 50
