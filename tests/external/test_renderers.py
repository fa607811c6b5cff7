"""The golden outputs of `renderers` and its verdicts whether a history stays a prefix, compared with ours.

Both name models, not templates: a model is compared if its template is available, by ids if its tokenizer is too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.external import ledger, suites
from tests.external.pairs import is_stand_in, load_pair
from tests.external.replay import DIFFERENT, EQUAL, SKIPPED, Outcome, Pair
from tokentape.chat import _grammar as grammar
from tokentape.errors import TemplateRefused
from tokentape.types import Setup

MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2_5/Qwen2.5-Instruct",
    "Qwen/Qwen3-8B": "qwen3/Qwen3",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3/Qwen3-VL",
    "Qwen/Qwen3.5-9B": "qwen3_5/Qwen3.5-think",
    "Qwen/Qwen3.6-35B-A3B": "qwen3_5/Qwen3.6",
    "Qwen/Qwen3.8-27B": "qwen3_5/Qwen3.8",
    "THUDM/GLM-4.5-Air": "glm4_5/GLM-4.5",
    "MiniMaxAI/MiniMax-M2.5": "minimax_m2/MiniMax-M2",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3/DeepSeek-V3-Dec2024",
    "deepseek-ai/DeepSeek-R1": "deepseek_v31/DeepSeek-R1",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3/Llama-3.2-Instruct",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron3/Nemotron-3-Nano",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "nemotron3/Nemotron-3-Super",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "nemotron3/Nemotron-3-Ultra",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": "nemotron3/Nemotron-3.5-Lightning",
    "openai/gpt-oss-20b": "gpt_oss/gpt-oss",
}
"""The template of a model. MiniMax-M2's is of the previous version."""

TEXT_ONLY = {"nemotron3"}
"""Families with a partly made-up tokenizer."""

KWARGS = {
    "enable_thinking",
    "preserve_thinking",
    "clear_thinking",
    "truncate_history_thinking",
    "low_effort",
    "medium_effort",
    "reasoning_effort",
}
"""Fields of a configuration that the templates use; the rest is specific to `renderers`."""

PARTS = ("generation_prompt", "completed_turn", "parsed_completion", "bridge")


def goldens() -> Iterator[Outcome]:
    """Yield the outcome of each part of each golden case."""
    for slug, case in _json("renderers_golden_outputs.json")["cases"].items():
        if case["model"] not in MODELS:
            for part in PARTS:
                if case["bridge"] is not None or part != "bridge":
                    yield Outcome(part, slug, SKIPPED, f"no template of {case['model']} is at hand")
            continue
        yield from _golden(slug, case, MODELS[case["model"]])


def _golden(slug: str, case: Mapping[str, Any], template: str) -> Iterator[Outcome]:
    by_ids = not is_stand_in(template) and template.split("/")[0] not in TEXT_ONLY
    constants = suites.constants("renderers_golden_corpus.py")
    question, answer, tools = constants["SYSTEM_AND_USER"], constants["ASSISTANT"], tuple(constants["TOOLS"])
    pair = _pair(template, case["config"])
    setup = _setup(pair, tools, case["config"])
    tokenizer = pair.renderer.tokenizer

    def compared(part: str, ids: list[int], golden: Mapping[str, Any]) -> Outcome:
        same = _sha256(ids) == golden["token_ids_sha256"] if by_ids else tokenizer.decode(ids) == golden["text"]
        our_text, their_text = tokenizer.decode(ids)[-120:], golden["text"][-120:]
        return (
            Outcome(part, slug, EQUAL)
            if same
            else Outcome(part, slug, DIFFERENT, f"ours {our_text!r}, theirs {their_text!r}")
        )

    yield compared("generation_prompt", pair.renderer.render(question, setup).ids.tolist(), case["generation_prompt"])
    marked = pair.renderer.render_text([*question, answer], setup, generate=False)
    yield compared("completed_turn", tokenizer.encode_marked(marked).ids, case["completed_turn"])
    yield _parsed(slug, case, pair, setup)
    if case["bridge"] is None:
        return
    config, bridge = case["bridge"]["config"], case["bridge"]
    pair = _pair(template, config)
    setup = _setup(pair, (), config)
    prompt = tokenizer.decode(pair.renderer.render(question, setup).ids.tolist())
    whole, extension = bridge["text"], bridge["extension"]
    completion = whole[: len(whole) - len(extension["text"])].removeprefix(prompt)
    if completion == whole[: len(whole) - len(extension["text"])]:
        yield Outcome("bridge", slug, DIFFERENT, f"prompts differ: ours {prompt[-60:]!r}, theirs {whole[:200]!r}")
        return
    ids = pair.oracle.ids(completion)
    parser = pair.renderer.parser(setup)
    parser.feed(ids)
    reply = {"role": "assistant", "content": parser.finish()[1].content}
    new = [{"role": "user", "content": "And 3+3?"}]
    added = pair.renderer.bridge(tokenizer.array(ids), reply, new, setup)
    yield compared("bridge", added.ids.tolist(), extension)


def _parsed(slug: str, case: Mapping[str, Any], pair: Pair, setup: Setup) -> Outcome:
    parser = pair.renderer.parser(setup)
    parser.feed(pair.oracle.ids(case["parser_input"]["text"]))
    _, reply = parser.finish()
    golden = case["parsed_completion"]
    actual = (reply.content, reply.reasoning or None, [call.name for call in reply.tool_calls])
    expected = (golden["content"], golden["reasoning_content"], [call["name"] for call in golden["tool_calls"]])
    if actual == expected:
        return Outcome("parsed_completion", slug, EQUAL)
    return Outcome("parsed_completion", slug, DIFFERENT, f"ours {actual!r}, theirs {expected!r}")


def stability() -> Iterator[Outcome]:
    """Yield, per case, whether our ids of a history stay a prefix, and our certificate's verdict on such messages.

    `prefix` compares the ids of both renderings. `certificate` compares our claim with theirs: a case that loses its
    prefix must not be certified append-only.
    """
    corpus = _json("renderers_prefix_stability.json")
    for case in corpus["cases"]:
        config = dict(case["config"])
        own = set(config) - KWARGS - {"name"}
        if case["model"] not in MODELS:
            for kind in ("prefix", "certificate"):
                yield Outcome(kind, case["id"], SKIPPED, f"no template of {case['model']} is at hand")
            continue
        if own:
            for kind in ("prefix", "certificate"):
                yield Outcome(kind, case["id"], SKIPPED, f"{sorted(own)} is no setting of the template")
            continue
        yield from _stable(case, corpus["scenarios"][case["scenario"]], MODELS[case["model"]])


def _stable(case: Mapping[str, Any], scenario: Mapping[str, Any], template: str) -> Iterator[Outcome]:
    pair = _pair(template, case["config"])
    setup = _setup(pair, tuple(scenario.get("tools", ())), case["config"])
    messages, new = scenario["messages"], scenario["append"]
    tokenizer = pair.renderer.tokenizer
    try:
        before = tokenizer.encode_marked(pair.renderer.render_text(messages, setup, generate=False)).ids
        after = tokenizer.encode_marked(pair.renderer.render_text([*messages, *new], setup, generate=False)).ids
    except TemplateRefused as error:
        yield Outcome("prefix", case["id"], SKIPPED, f"the template refuses the scenario: {error}")
        return
    stable = after[: len(before)] == before
    note = f"ours {stable}, theirs {case['stable']}: {_parting(pair, before, after)}"
    yield Outcome("prefix", case["id"], EQUAL if stable == case["stable"] else DIFFERENT, note)
    later = [message for message in new if message["role"] != "assistant"]
    if not later:
        yield Outcome("certificate", case["id"], SKIPPED, "nothing is appended that a continuation is certified for")
        return
    name = grammar.continuation_name(later, tools=bool(setup.tools), system=False)
    continuation = pair.certificate.continuation(name)
    assert continuation is not None
    claims = continuation.append_only != "no"
    verdict = f"certified append-only {continuation.append_only!r} for {name}"
    note = f"{verdict}, theirs is {case['stable']}: {continuation.reason}"
    yield Outcome("certificate", case["id"], EQUAL if claims == case["stable"] else DIFFERENT, note)


def _parting(pair: Pair, before: list[int], after: list[int]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if at is None:
        return "no token differs"
    decode = pair.renderer.tokenizer.decode
    return f"{decode(before[at : at + 6])!r} becomes {decode(after[at : at + 6])!r}"


def _pair(template: str, config: Mapping[str, Any]) -> Pair:
    kwargs = {key: value for key, value in config.items() if key in KWARGS}
    return load_pair(template, json.dumps(kwargs, sort_keys=True))


def _setup(pair: Pair, tools: tuple[Any, ...], config: Mapping[str, Any]) -> Setup:
    date = "2024-07-26" if "date_string" in config else config.get("conversation_start_date") or "2026-11-21"
    return pair.renderer.setup(tools, pair.oracle.kwargs, date)


def _sha256(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def _json(file: str) -> Any:
    return json.loads((suites.FOLDER / file).read_text(encoding="utf-8"))


MILES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("miles/qwen3_fixed", "{}"): ("tool",),
    ("miles/qwen3_fixed", '{"clear_thinking": false}'): ("tool", "user"),
    ("miles/qwen3.5_fixed", "{}"): ("tool",),
    ("miles/qwen3.5_fixed", '{"clear_thinking": false}'): ("tool", "user"),
    ("miles/qwen3_thinking_2507_and_next_fixed", "{}"): ("tool",),
    ("miles/qwen3_thinking_2507_and_next_fixed", '{"clear_thinking": false}'): ("tool", "user"),
    ("miles/kimi_k25_fixed", '{"preserve_thinking": true}'): ("tool", "user"),
    ("miles/minimax_m25_fixed", '{"clear_thinking": false}'): ("tool", "user"),
    ("glm4_5/GLM-4.7-Flash", "{}"): ("tool",),
    ("glm4_5/GLM-4.7-Flash", '{"clear_thinking": false}'): ("tool", "user", "system"),
}
"""Templates and kwargs that Miles declares append-only for messages of these roles, in its tests of its templates."""


def miles_templates() -> Iterator[Outcome]:
    """Yield whether our certificate of Miles's templates agrees with Miles."""
    for (template, kwargs), roles in MILES.items():
        pair = load_pair(template, kwargs)
        for role in roles:
            continuation = pair.certificate.continuation(role)
            assert continuation is not None
            case = f"{template} {kwargs} {role}"
            note = f"the certificate says append-only {continuation.append_only!r}: {continuation.reason}"
            yield Outcome("certificate", case, EQUAL if continuation.append_only != "no" else DIFFERENT, note)


SUITES: Mapping[str, Callable[[], Iterator[Outcome]]] = {
    "renderers goldens": goldens,
    "renderers prefix stability": stability,
    "Miles templates": miles_templates,
}


@pytest.mark.parametrize("suite", SUITES)
def test_differences_are_explained(suite: str) -> None:
    ledger.check(suite, "", list(SUITES[suite]()))
