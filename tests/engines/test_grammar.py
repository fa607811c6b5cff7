"""Completions of the embedded engine under a schema or a structural tag, with llguidance.

The oracle does not share its masks. It lists every text of a small language: an id may follow if a text begins with the
prefix and the id's bytes. jsonschema and the parser of calls check all other replies.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("torch")
pytest.importorskip("llguidance", reason="needs llguidance, of the extra grammar")

from embedded import Sampled, collect
from real import MODEL, load_forward
from tests.chat.conftest import EVERY_TEMPLATE, load_renderer
from tests.differential.test_call_constraints import ANY_CALL, ONE_CALL, STRICT, TOOLS, check
from tests.searching import examples

from tokentape.chat._call_constraint import structural_tag
from tokentape.chat._renderer import Renderer
from tokentape.engines import _grammar
from tokentape.engines._base import LogprobsMode, SamplingParams
from tokentape.engines._distributions import logprobs_of
from tokentape.engines._grammar import Constraint, Grammars, lark
from tokentape.engines._transformers import TransformersEngine
from tokentape.errors import EngineError, InvalidRequest, UnsupportedParameter

WORDS = ["red", "re", "reddish brown", "dark blue", "dark", 'a\\b "c"', "17", "1", "-1.5e3", ""]
"""Some texts are prefixes of others."""
WORD = {"enum": WORDS}
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "dark blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 300}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
PROMPTS = (
    *(pytest.param(text, marks=pytest.mark.slow) for text in ("hi", "What do apples cost?")),
    "Greet Maria. Use <tool_call>.",
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(MODEL)


@pytest.fixture(scope="module")
def forward() -> Any:
    return load_forward()


def opened(mode: LogprobsMode = "processed_logprobs") -> TransformersEngine:
    return TransformersEngine.open(MODEL, threads=1, logprobs_mode=mode)


class Case:
    """A prompt, and replies of an engine to it."""

    def __init__(self, renderer: Renderer, text: str = "hi", **fields: Any) -> None:
        setup = renderer.setup(())
        self.prompt = renderer.render([{"role": "user", "content": text}], setup).ids
        self.stop_ids = tuple(sorted(renderer.stop_ids(setup)))
        self.params = SamplingParams(max_tokens=120, stop_token_ids=self.stop_ids, **fields)
        self.pieces = [renderer.tokenizer.token_bytes(token_id) for token_id in range(renderer.tokenizer.vocab_size)]
        self.controls = {control.id for control in renderer.tokenizer.controls}

    async def replies(self, engine: TransformersEngine, count: int, first: int = 0) -> list[Sampled]:
        seeds = range(first, first + count)
        calls = [
            collect(engine, self.prompt, replace(self.params, seed=seed), request_id=str(seed), stream=False)
            for seed in seeds
        ]
        return list(await asyncio.gather(*calls))

    def sampled(self, count: int, mode: LogprobsMode = "processed_logprobs") -> list[Sampled]:
        async def run() -> list[Sampled]:
            engine = opened(mode)
            try:
                return await self.replies(engine, count)
            finally:
                await engine.close()

        return asyncio.run(run())

    def text(self, reply: Sampled) -> str:
        """Return the text of a reply that ended by itself, without its stop id."""
        assert reply.last.finish_reason == "stop"
        assert reply.ids[-1] in self.stop_ids
        return b"".join(self.pieces[token_id] for token_id in reply.ids[:-1]).decode()


def next_ids(case: Case, texts: Sequence[bytes], before: bytes) -> list[int]:
    """Return every id after which a text is still possible; stop ids after a whole text."""
    rests = [text[len(before) :] for text in texts if text.startswith(before)]
    allowed = [
        token_id
        for token_id, piece in enumerate(case.pieces)
        if piece and token_id not in case.controls and any(rest.startswith(piece) for rest in rests)
    ]
    return [*allowed, *(case.stop_ids if b"" in rests else ())]


def assert_masked(
    case: Case, forward: Any, reply: Sampled, texts: Sequence[bytes], masks: dict[bytes, list[int]], scale: float = 1.0
) -> None:
    """Check that each id is allowed, and that its logprob is of a forward pass over the allowed ids."""
    own = forward(np.concatenate([case.prompt, np.array(reply.ids, np.int32)]))[len(case.prompt) - 1 : -1]
    before = b""
    for row, token_id, logprob in zip(own, reply.ids, reply.logprobs, strict=True):
        if before not in masks:
            masks[before] = next_ids(case, texts, before)
        assert token_id in masks[before]
        allowed = row[masks[before]] / scale
        expected = row[token_id] / scale - allowed.max() - math.log(np.exp(allowed - allowed.max()).sum())
        assert abs(logprob - expected) <= 1e-5, (before, token_id, logprob, expected)
        before += case.pieces[token_id]


def spelled(words: Sequence[str]) -> list[bytes]:
    return [json.dumps(word).encode() for word in words]


@pytest.mark.parametrize("count", [12, pytest.param(350, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", PROMPTS)
def test_draws_follow_the_grammar_with_logprobs_of_a_masked_forward_pass(
    renderer: Renderer, forward: Any, text: str, count: int
) -> None:
    case = Case(renderer, text, json_schema=json.dumps(WORD))
    masks: dict[bytes, list[int]] = {}
    replies = case.sampled(count)
    for reply in replies:
        assert json.loads(case.text(reply)) in WORDS
        assert_masked(case, forward, reply, spelled(WORDS), masks)
    assert len({case.text(reply) for reply in replies}) > 2


@pytest.mark.parametrize("mode", ["raw_logprobs", "scaled_logprobs", "processed_logprobs"])
def test_every_mode_normalizes_logprobs_over_the_allowed_ids(
    renderer: Renderer, forward: Any, mode: LogprobsMode
) -> None:
    case = Case(renderer, temperature=0.7, json_schema=json.dumps(WORD))
    for reply in case.sampled(4, mode):
        assert_masked(case, forward, reply, spelled(WORDS), {}, 1.0 if mode == "raw_logprobs" else 0.7)
    declared = logprobs_of(f"transformers 5 {mode}", case.params)
    assert declared is not None
    assert declared.grammar


def test_mask_of_the_previous_position_is_detected(
    renderer: Renderer, forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = Constraint.allowed
    masks: dict[int, Any] = {}

    def late(self: Constraint, rows: int) -> Any:
        now = allowed(self, rows)
        before, masks[id(self)] = masks.get(id(self), now), now
        return before

    monkeypatch.setattr(Constraint, "allowed", late)
    monkeypatch.setattr(Constraint, "push", lambda self, token_id: self._matcher.try_consume_tokens([token_id]))
    case = Case(renderer, json_schema=json.dumps(WORD))
    (reply,) = case.sampled(1)
    with pytest.raises(AssertionError):
        assert_masked(case, forward, reply, spelled(WORDS), {})


@pytest.mark.parametrize("count", [12, pytest.param(350, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", PROMPTS)
def test_finished_replies_follow_their_schema(renderer: Renderer, text: str, count: int) -> None:
    case = Case(renderer, text, json_schema=json.dumps(OBJECT))
    replies = case.sampled(count)
    ended = [reply for reply in replies if reply.last.finish_reason == "stop"]
    cut = [reply for reply in replies if reply.last.finish_reason == "length"]
    print(f"{len(ended)} of {count} ended, {len(cut)} were cut off")
    assert len(ended) > count // 2
    assert len(ended) + len(cut) == count
    assert {len(reply.ids) for reply in cut} <= {case.params.max_tokens}
    for reply in ended:
        jsonschema.validate(json.loads(case.text(reply)), OBJECT)


def test_control_tokens_do_not_count_as_their_text(renderer: Renderer) -> None:
    case = Case(renderer, temperature=8.0, json_schema=json.dumps({"type": "string"}))
    replies = case.sampled(examples(20))
    assert not case.controls & {token_id for reply in replies for token_id in reply.ids[:-1]}
    assert max(len(reply.ids) for reply in replies) > 20


def test_constraints_of_other_rows_do_not_change_a_reply(renderer: Renderer) -> None:
    held = Case(renderer, json_schema=json.dumps(WORD))
    free = Case(renderer)

    async def run() -> list[list[Sampled]]:
        engine = opened()
        alone = await free.replies(engine, 4)
        beside, _ = await asyncio.gather(free.replies(engine, 4, 0), held.replies(engine, 4, 100))
        await engine.close()
        return [alone, beside]

    alone, beside = asyncio.run(run())
    assert [reply.ids for reply in alone] == [reply.ids for reply in beside]


def test_truncation_supports_lie_within_the_grammar(renderer: Renderer, forward: Any) -> None:
    case = Case(renderer, json_schema=json.dumps(WORD), top_k=2)
    for reply in case.sampled(10):
        before = b""
        for token_id in reply.ids:
            assert token_id in next_ids(case, spelled(WORDS), before)
            before += case.pieces[token_id]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "strin"},
        {"$ref": "#/nowhere"},
    ],
)
def test_unsupported_schema_is_refused(renderer: Renderer, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="can't follow this JSON Schema") as refused:
        Case(renderer, json_schema=json.dumps(schema)).sampled(1)
    # llguidance's message also contains the whole grammar.
    assert "x-guidance" not in str(refused.value)


def test_a_constraint_needs_a_stop_id(renderer: Renderer) -> None:
    case = Case(renderer, json_schema=json.dumps(WORD))
    case.params = replace(case.params, stop_token_ids=())
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        case.sampled(1)


def test_constraint_that_allows_no_id_fails_only_its_call(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constraint, "problem", "llguidance gave up")
    monkeypatch.setattr(Constraint, "allowed", lambda self, rows: np.zeros(rows, np.bool_))
    free, held = Case(renderer), Case(renderer, json_schema=json.dumps(WORD))

    async def run() -> list[Sampled]:
        engine = opened()
        asked = asyncio.gather(held.replies(engine, 1), free.replies(engine, 1, 9), return_exceptions=True)
        failed, fine = await asked
        assert isinstance(failed, EngineError)
        assert "llguidance gave up; nothing was sampled" in str(failed)
        await engine.close()
        assert not isinstance(fine, BaseException)
        return fine

    assert asyncio.run(run())[0].ids


def test_without_llguidance_the_engine_follows_no_constraint(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grammar, "CONSTRAINTS", frozenset())
    with pytest.raises(UnsupportedParameter, match="json_schema"):
        Case(renderer, json_schema=json.dumps(WORD)).sampled(1)


def test_unsupported_structural_tag_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="qwen_xml"):
        lark({"type": "qwen_xml"})


def walks(renderer: Renderer, tag: str, stop_ids: Sequence[int], count: int) -> Iterator[list[int]]:
    """Draw random replies from the ids that a tag allows. Prefer ends: random text would hardly ever end."""
    pieces = [renderer.tokenizer.token_bytes(token_id) for token_id in range(renderer.tokenizer.vocab_size)]
    # Some vocabularies have hundreds of control tokens that nothing uses.
    controls = {*stop_ids, *(int(token_id) for token_id in re.findall(r'"token": (\d+)', tag))}
    ends = np.array(
        [token_id in controls or (p and not p.strip(b' \n"}{][,:')) for token_id, p in enumerate(pieces)], np.bool_
    )
    grammars, random = Grammars(Tokenizer.from_str(json.dumps(renderer.tokenizer._spec))), np.random.default_rng(0)
    params = SamplingParams(max_tokens=1, structural_tag=tag, stop_token_ids=tuple(stop_ids))
    for _ in range(count):
        constraint, ids = grammars.constraint(params), list[int]()
        while len(ids) < 400:
            allowed = constraint.allowed(len(pieces))
            closing = allowed & ends
            ids.append(
                int(random.choice(np.flatnonzero(closing if closing.any() and random.random() < 0.6 else allowed)))
            )
            if ids[-1] in stop_ids:
                yield ids
                break
            constraint.push(ids[-1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", EVERY_TEMPLATE)
def test_replies_allowed_by_a_tag_parse_as_the_calls(template: str) -> None:
    renderer = load_renderer(template)
    setup = renderer.setup(TOOLS)
    question = renderer.format(setup).question
    prompt = renderer.render([*question[:-1], {"role": "user", "content": "?"}], setup).ids
    form, stop_ids = renderer.format_after(prompt, renderer.format(setup)), sorted(renderer.stop_ids(setup))
    for rule in (ANY_CALL, ONE_CALL, STRICT):
        tag = structural_tag(rule, form, renderer.tokenizer, TOOLS, stop_ids)
        if tag is None:
            continue
        replies = list(islice(walks(renderer, tag, stop_ids, 80), 15))
        assert len(replies) > 5, tag
        for ids in replies:
            parser = renderer.parser(setup, (), prompt)
            parser.feed(ids)
            check(rule, parser.finish()[1])
