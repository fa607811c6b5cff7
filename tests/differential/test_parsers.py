"""Our parser against vLLM's, those of `renderers`, and transformers' `parse_response` with TRL's response templates.

Asked over well-formed, sloppy, truncated and hostile completions of every family that a peer reads. What differs has to
be listed in `parser_differences.py`, with the reason and who is right; see docs/decisions/0005. Needs Pythons that have
the peers: TOKENTAPE_RENDERERS_PYTHON (`renderers` and TRL) and TOKENTAPE_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conftest import setup_for
from tests.differential.completions import Completion, completions
from tests.differential.families import FAMILIES, Family, load, tokenizer_file, write_harmony_vocabulary
from tests.differential.parser_differences import DIFFERENCES, NOT_READ_BY_TRL
from tests.differential.test_bridges import ONE_CALL_A_TURN
from tokentape.chat import _grammar as grammar

PYTHONS = {
    "renderers": os.environ.get("TOKENTAPE_RENDERERS_PYTHON"),
    "trl": os.environ.get("TOKENTAPE_RENDERERS_PYTHON"),
    "vllm": os.environ.get("TOKENTAPE_VLLM_PYTHON"),
}
_NAMED_BY = {
    "renderers": "TOKENTAPE_RENDERERS_PYTHON",
    "trl": "TOKENTAPE_RENDERERS_PYTHON",
    "vllm": "TOKENTAPE_VLLM_PYTHON",
}

pytestmark = [pytest.mark.differential, pytest.mark.real]

Parsed = tuple[str, str, list[tuple[str, str]]]
"""Content and reasoning without white space at their ends, and the calls whose arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One completion, read by us and by a peer."""

    template: str
    completion: Completion
    ours: Parsed
    theirs: Parsed | None
    """None where the peer failed."""
    note: str


@pytest.fixture(scope="module", params=sorted(PYTHONS))
def peer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if PYTHONS[name] is None:
        pytest.skip(f"needs a Python with {name}: {_NAMED_BY[name]}")
    return name


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parsers")


@pytest.fixture(scope="module")
def comparisons(peer: str, scratch: Path) -> list[Comparison]:
    """All completions that a peer parses."""
    requests = [case for template, family in FAMILIES.items() for case in cases(peer, template, family, scratch)]
    answers = ask(peer, [case for *_, case in requests], scratch)
    return [
        Comparison(
            Path(template).stem,
            completion,
            ours,
            None if answer["content"] is None else parsed(answer["content"], answer["reasoning"], answer["calls"]),
            answer["note"],
        )
        for (template, completion, ours, _), answer in zip(requests, answers, strict=True)
    ]


def cases(
    peer: str, template: str, family: Family, scratch: Path
) -> Iterator[tuple[str, Completion, Parsed, dict[str, Any]]]:
    """(template, completion, what we read, the case as the peer gets it) where the peer has a parser."""
    configs: dict[str, dict[str, Any] | None] = {
        "renderers": family.renderers and {"name": family.renderers, "thinking_retention": "all"},
        "trl": None if Path(template).stem in NOT_READ_BY_TRL else {},
        "vllm": {"tools": family.vllm[0], "reasoning": family.vllm[1], "kwargs": dict(family.kwargs)},
    }
    if configs[peer] is None:
        return
    renderer = load(template, scratch)
    setup = setup_for(renderer, tools=(grammar.TOOL,))
    prompt_ids = renderer.render((grammar.QUESTION,), setup).ids.tolist()
    form, header = renderer.format(setup), []
    if peer == "renderers" and form.channels is not None:
        # It reads on from its own generation prompt only, which opens a channel, or else from a header.
        header = renderer.tokenizer.encode_marked(form.generation_prompt).ids
    for completion in completions(
        renderer,
        setup,
        content_of_calls=family.content_of_calls,
        end_of_call=family.end_of_call,
        single_call=Path(template).stem in ONE_CALL_A_TURN,
    ):
        parser = renderer.derived_parser(setup)
        parser.feed(completion.ids)
        _, reply = parser.finish()
        calls = [[call.name, call.arguments] for call in reply.calls_for_client if call.status != "bad_arguments"]
        yield (
            template,
            completion,
            parsed(reply.content, reply.reasoning, calls),
            {
                "peer": peer,
                "config": configs[peer],
                "tokenizer": str(tokenizer_file(template, scratch)),
                "special_tokens": renderer.tokenizer.special_tokens,
                "template": renderer.template.source,
                "prompt_ids": prompt_ids,
                "completion_ids": [*header, *completion.ids],
                "ended": completion.ended,
                "tools": [grammar.TOOL],
            },
        )


def parsed(content: str, reasoning: str, calls: Iterable[list[str]]) -> Parsed:
    """What counts when two parsers are compared."""
    objects = [(name, decoded) for name, arguments in calls if (decoded := _as_object(arguments)) is not None]
    return content.strip(), reasoning.strip(), objects


def _as_object(arguments: str) -> str | None:
    """Arguments in one spelling; None if they are not a JSON object for an OpenAI client."""
    try:
        value = json.loads(arguments, parse_constant=_no_json)
    except ValueError:
        return None
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else None


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def ask(peer: str, cases: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    python = PYTHONS[peer]
    assert python is not None
    write_harmony_vocabulary(scratch)
    answers = scratch / f"{peer}.json"
    subprocess.run(
        [python, Path(__file__).with_name("parser_peer.py"), answers],
        input=json.dumps({"cases": cases}),
        text=True,
        check=True,
        env={**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(scratch), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(answers.read_text(encoding="utf-8"))


def test_a_peer_reads_every_completion(comparisons: list[Comparison]) -> None:
    assert [(c.template, c.completion.name, c.note) for c in comparisons if c.theirs is None] == []


def test_every_difference_is_explained(peer: str, comparisons: list[Comparison]) -> None:
    differing: dict[str, set[str]] = defaultdict(set)
    for c in comparisons:
        if c.theirs != c.ours:
            differing[c.completion.name].add(c.template)
    explained = {
        name: set().union(*(found.templates for found in differences))
        for name, differences in DIFFERENCES[peer].items()
    }
    unexplained = {name: left for name, found in differing.items() if (left := found - explained.get(name, set()))}
    gone = {name: left for name, found in explained.items() if (left := found - differing[name])}
    assert (unexplained, gone) == ({}, {})


def test_no_difference_is_explained_twice(peer: str) -> None:
    for differences in DIFFERENCES[peer].values():
        templates = [template for found in differences for template in found.templates]
        assert len(templates) == len(set(templates))


def test_enough_is_compared(peer: str, comparisons: list[Comparison]) -> None:
    total, equal = (
        Counter(c.template for c in comparisons),
        Counter(c.template for c in comparisons if c.theirs == c.ours),
    )
    kinds, same = (
        Counter(c.completion.kind for c in comparisons),
        Counter(c.completion.kind for c in comparisons if c.theirs == c.ours),
    )
    print(f"\n{peer}: {equal.total()} of {total.total()} alike;", *(f"{k} {same[k]}/{n};" for k, n in kinds.items()))
    for template, counts in total.items():
        print(f"  {template}: {equal[template]} of {counts}")
    assert len(total) >= {"renderers": 20, "trl": 15, "vllm": 29}[peer]
    assert equal.total() > total.total() // 2
