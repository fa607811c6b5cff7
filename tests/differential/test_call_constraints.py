"""Random replies under the constraints of tool calls, made by XGrammar itself: each parses as the requested calls.

XGrammar is that of a Python with vLLM or SGLang: TOKENTAPE_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.chat.conftest import EVERY_TEMPLATE, load_renderer
from tokentape.chat import _grammar as grammar
from tokentape.chat._call_constraint import CallRule, structural_tag
from tokentape.chat._parse import Reply
from tokentape.chat._tokenizer import Tokenizer

PYTHON = os.environ.get("TOKENTAPE_VLLM_PYTHON")
WALK = Path(__file__).parent / "walk_constraints.py"
REPLIES = 20

LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look-up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"$ref": "#/$defs/word", "description": "The word."},
                "most": {"type": "integer", "description": "How many."},
            },
            "required": ["word"],
            "additionalProperties": False,
            "$defs": {"word": {"type": "string"}},
        },
    },
}
TOOLS = (grammar.TOOL, LOOK_UP)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

ANY_CALL = CallRule(tuple(SCHEMAS))
ONE_CALL = CallRule(("look-up",), parallel=False)
STRICT = CallRule(strict=frozenset({"look-up"}))

pytestmark = [
    pytest.mark.differential,
    pytest.mark.skipif(PYTHON is None, reason="needs a Python with xgrammar: TOKENTAPE_VLLM_PYTHON"),
]


def walked(tokenizer: Tokenizer, tags: list[str], stop_ids: frozenset[int]) -> list[list[list[int]]]:
    """The ids of random replies under each tag.

    Only some hundred tokens take part: compiling a tag for a whole vocabulary takes minutes.
    """
    assert PYTHON is not None
    named = re.findall(r'"token": (\d+)|"rules": \[\[(\d+)', " ".join(tags))
    controls = {int(token_id) for pair in named for token_id in pair if token_id} | stop_ids
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    short = {token_id for token_id, piece in enumerate(pieces) if len(piece) == 1}
    kept = {*short, *controls, *np.random.default_rng(0).choice(len(pieces), min(len(pieces), 300)).tolist()}
    closing = {token_id for token_id in kept if pieces[token_id] and not pieces[token_id].strip(b' \n"}{][,:')}
    request = {
        "pieces": [piece.hex() if token_id in kept else "" for token_id, piece in enumerate(pieces)],
        "stop_ids": sorted(stop_ids),
        "likely": sorted(closing | controls),
        "tags": tags,
        "count": REPLIES,
    }
    run = subprocess.run([PYTHON, str(WALK)], input=json.dumps(request), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    replies: list[list[list[int]]] = json.loads(run.stdout)
    return replies


def check(rule: CallRule, reply: Reply) -> None:
    calls = reply.tool_calls
    assert not reply.problem
    assert [call.status for call in calls] == ["ok"] * len(calls)
    if rule.required:
        assert calls
        assert not reply.content.strip()
        assert {call.name for call in calls} <= set(rule.required)
        assert rule.parallel or len(calls) == 1
    for call in calls:
        if rule.required or call.name in rule.strict:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("template", EVERY_TEMPLATE)
def test_every_allowed_reply_parses_as_the_calls(template: str) -> None:
    renderer = load_renderer(template)
    setup = renderer.setup(TOOLS)
    question = renderer.format(setup).question
    prompt = renderer.render([*question[:-1], {"role": "user", "content": "?"}], setup).ids
    form, stop_ids = renderer.format_after(prompt, renderer.format(setup)), renderer.stop_ids(setup)
    rules = (ANY_CALL, ONE_CALL, STRICT)
    made = [structural_tag(rule, form, renderer.tokenizer, TOOLS, stop_ids) for rule in rules]
    tags = {rule: tag for rule, tag in zip(rules, made, strict=True) if tag is not None}
    written = form.calls.style if form.calls is not None else None
    if not tags:
        assert written not in ("json", "named") or form.channels is not None
        return
    assert {ANY_CALL, ONE_CALL} <= tags.keys()
    for (rule, tag), replies in zip(tags.items(), walked(renderer.tokenizer, [*tags.values()], stop_ids), strict=True):
        # The others got too long.
        assert len(replies) > REPLIES // 3, tag
        for ids in replies:
            parser = renderer.parser(setup, (), prompt)
            parser.feed(ids)
            check(rule, parser.finish()[1])
