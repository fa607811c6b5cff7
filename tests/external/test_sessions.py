"""Session cases of ART and of rllm's gateway, compared with our tree of turns and our gateway.

Both suites test their own objects. The parts of a case about token ids and branches are repeated here with the same
ids; those about their classes and wire formats are not compared. The names of all cases are read from their files, so
that a new case is noticed.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import tokentape.demo
from tests.external import ledger, suites
from tests.external.pairs import load_pair, setup_for
from tests.external.replay import DIFFERENT, EQUAL, SKIPPED, Outcome, as_sent
from tests.gateway.scripted import ScriptedEngine, run_turn
from tests.records import make_chain, make_turn
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest, NotFound, TokentapeError
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._limits import Limits
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import FinishReason, SessionInfo, TokenIds

INFO = SessionInfo("s", 0.0)
MODEL = Path(tokentape.demo.__file__).parent / "model"


Answer = tuple[list[int], list[float], FinishReason]
"""Ids, log-probabilities and finish reason of an engine's answer."""


class IdsEngine(ScriptedEngine):
    """Answers each call with the next ids, log-probabilities and finish reason."""

    def __init__(self, renderer: Renderer, answers: Sequence[Answer]) -> None:
        super().__init__(renderer, [])
        self.answers = list(answers)
        self.failures: list[str] = []
        """Errors that callers received in place of a reply."""

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        """Sample the next answer."""
        self.requests.append((prompt_ids.tolist(), params))
        ids, logprobs, reason = self.answers.pop(0)
        yield SampleDelta(tuple(ids), tuple(logprobs), reason, ids[-1] if reason == "stop" else None)


def taken(calls: Sequence[tuple[list[int], Answer, *tuple[Answer, ...]]]) -> tuple[Session, IdsEngine]:
    """Return the session and the engine after calls with prompts of these ids, each with its engine's answers."""
    renderer = Renderer.load(MODEL)
    engine = IdsEngine(renderer, [answer for _, *answers in calls for answer in answers])
    with TemporaryDirectory() as folder:
        store = SqliteStore.open(Path(folder) / "record.db")
        # As often as rllm's gateway resumes.
        turns = Turns(engine, renderer, store, limits=Limits(resumes=3))

        async def take() -> None:
            for prompt, *_ in calls:
                request = TurnRequest(
                    "s",
                    (),
                    (),
                    {},
                    SamplingParams(max_tokens=0),
                    prompt_ids=np.array(prompt, np.int32),
                    ignore_eos=True,
                )
                try:
                    async for _ in run_turn(turns, request):
                        pass
                except TokentapeError as error:
                    engine.failures.append(str(error))

        asyncio.run(take())
        try:
            kept = store.load_session("s").turns
        except NotFound:
            kept = ()
        store.close()
    return Session(INFO, kept), engine


# ART


def art() -> Iterator[Outcome]:
    """Yield the outcome of each named golden case of ART."""
    goldens = json.loads((suites.FOLDER / "art_tokenize_golden_cases.json").read_bytes())
    tree = ast.parse((suites.FOLDER / "art_test_tokenize_golden.py").read_text(encoding="utf-8"))
    constants = suites.constants("art_test_tokenize_golden.py")
    [cases] = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "CASES"]
    assert isinstance(cases, ast.Dict)
    for key, made in zip(cases.keys, cases.values, strict=True):
        assert isinstance(key, ast.Constant)
        values = goldens[key.value]["values"]
        match key.value.split("/")[0], made:
            case "fake", ast.Call(func=ast.Name(id="_exchanges")):
                yield _exchanges(key.value, made, values)
            case "qwen3", ast.Call(args=[ast.Name(id=name)]) as call:
                tools = constants["_TOOLS"] if any(keyword.arg == "tools" for keyword in call.keywords) else []
                yield _qwen3(key.value, constants[name], tuple(tools), values)
            case _:
                yield Outcome("history", key.value, SKIPPED, "its template is Python code of ART's tests")


def _exchanges(case: str, made: ast.Call, values: Mapping[str, Any]) -> Outcome:
    """Compare tokens, mask and log-probabilities of calls with prompts in ids."""
    if "_inexact" in ast.unparse(made):
        return Outcome("exchange", case, SKIPPED, "it has no token ids: a text alone never enters our record")
    if "_nan" in ast.unparse(made):
        # The file builds it by code: one call, 1 -> 2 3 9, the second log-probability not a number.
        calls = [([1], [2, 3, 9], "stop")]
    else:
        calls = []
        for node in made.args:
            assert isinstance(node, ast.Call)
            inner, reason = (
                (node.args[0], "length") if ast.unparse(node.func) == "_with_finish_reason" else (node, "stop")
            )
            assert isinstance(inner, ast.Call)
            prompt, completion, *_ = (ast.literal_eval(arg) for arg in inner.args)
            calls.append((prompt, completion, reason))
    logprobs = {i: -i / 10 for i in range(10)} | ({3: math.nan} if "_nan" in ast.unparse(made) else {})
    session, engine = taken([(p, (c, [logprobs[i] for i in c], r)) for p, c, r in calls])  # type: ignore[misc]
    if engine.failures:
        return Outcome("exchange", case, DIFFERENT, f"answered with an error: {engine.failures[0]}")
    [trajectory, *more] = trajectories(session)
    if more:
        return Outcome("exchange", case, DIFFERENT, f"{1 + len(more)} branches where theirs is one")
    sampled = [bool(flag & 2) for flag in values["flags"]]
    expected_logprobs = [float.fromhex(p) if p != "nan" else math.nan for p in values["logprobs"]]
    if trajectory.token_ids.tolist() != values["tokens"]:
        return Outcome("exchange", case, DIFFERENT, f"ours {trajectory.token_ids.tolist()}, theirs {values['tokens']}")
    if trajectory.loss_mask.tolist() != sampled:
        return Outcome("exchange", case, DIFFERENT, f"ours trains {trajectory.loss_mask.tolist()}, theirs {sampled}")
    same = np.allclose(
        trajectory.logprobs[trajectory.loss_mask], np.array(expected_logprobs)[sampled], rtol=1e-6, equal_nan=True
    )
    return Outcome(
        "exchange", case, EQUAL if same else DIFFERENT, "" if same else f"logprobs {trajectory.logprobs.tolist()}"
    )


def _qwen3(case: str, messages: list[Any], tools: tuple[Any, ...], values: Mapping[str, Any]) -> Outcome:
    """Compare the ids of a history on the template that keeps reasoning, which is TRL's: ART's is not available."""
    pair = load_pair("qwen3/fixed-trl-qwen3_training")
    setup = setup_for(pair, tools)
    sent = [as_sent(message) for message in messages]
    ours = pair.renderer.tokenizer.encode_marked(pair.renderer.render_text(sent, setup, generate=False)).ids
    if ours == values["tokens"]:
        return Outcome("history", case, EQUAL)
    decode = pair.renderer.tokenizer.decode
    at = next(n for n, (a, b) in enumerate(zip(ours, [*values["tokens"], None], strict=False)) if a != b)
    our_text, their_text = decode(ours[at : at + 8]), decode(values["tokens"][at : at + 8])
    return Outcome("history", case, DIFFERENT, f"token {at}: ours {our_text!r}, theirs {their_text!r}")


# rllm's gateway


def names(file: str) -> dict[str, int]:
    """Return the test functions of a file and the number of cases of each."""
    counts = {}
    for node in ast.parse((suites.FOLDER / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            sizes = [
                len(mark.args[1].elts)
                for mark in node.decorator_list
                if isinstance(mark, ast.Call) and len(mark.args) == 2 and isinstance(mark.args[1], ast.List | ast.Tuple)
            ]
            counts[node.name.removeprefix("test_")] = math.prod(sizes)
    return counts


def abort_resume() -> Iterator[Outcome]:
    """Yield the outcomes of rllm's cases of calls that its engine aborts."""
    file = "rllm_test_abort_resume.py"
    for name, times in names(file).items():
        if name == "send_with_retry_retries_transient_http_errors":
            for n in range(times):
                yield Outcome("call", f"{name}[{n}]", SKIPPED, "it is about the retries of their HTTP client")
        elif name == "non_streaming_abort_resumes_from_partial_token_ids":
            yield _aborted(name, file, ("first", "resumed"))
        elif name == "repeated_aborts_stop_after_three_resumes":
            yield _aborted(name, file, ("aborted_chat", *("aborted_completion",) * 3))
        else:
            yield Outcome("call", name, DIFFERENT, "a case that is not mapped")


def _aborted(name: str, file: str, answers: Sequence[str]) -> Outcome:
    """Play the answers of their worker to our gateway; compare the record and the number of engine calls."""
    tree = ast.parse((suites.FOLDER / file).read_text(encoding="utf-8"))
    [test] = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == f"test_{name}"]
    answer_by_name = {
        ast.unparse(n.targets[0]): ast.literal_eval(n.value)
        for n in test.body
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)
    }
    expected = next(
        ast.literal_eval(n.test.comparators[0])
        for n in test.body
        if isinstance(n, ast.Assert) and isinstance(n.test, ast.Compare) and "token_ids" in ast.unparse(n.test.left)
    )
    prompt = answer_by_name[answers[0]]["prompt_token_ids"]
    calls = []
    for answer in answers:
        [choice] = answer_by_name[answer]["choices"]
        ids = choice["token_ids"]
        calls.append((ids, [-0.1] * len(ids), choice["finish_reason"]))
    session, engine = taken([(prompt, *calls)])
    finished = [turn.completion_ids.tolist() for turn in session.turns if turn.finish_reason != "abort"]
    kept = [turn.completion_ids.tolist() for turn in session.turns]
    if finished == [expected] and len(engine.requests) == len(answers):
        return Outcome("call", name, EQUAL)
    ours = f"asked {len(engine.requests)} times, answered {finished}, recorded {kept}"
    note = f"{ours}; theirs asks {len(answers)} times: {expected}"
    return Outcome("call", name, DIFFERENT, note)


def trace_graph() -> Iterator[Outcome]:
    """Yield the outcomes of rllm's cases of its graph of turns."""
    for name, times in names("rllm_test_trace_graph.py").items():
        check = GRAPH.get(name)
        for n in range(times):
            case = name if times == 1 else f"{name}[{n}]"
            if isinstance(check, str):
                yield Outcome("graph", case, SKIPPED, check)
            elif check is None:
                yield Outcome("graph", case, DIFFERENT, "a case that is not mapped")
            else:
                problem = check(n)
                yield Outcome("graph", case, DIFFERENT if problem else EQUAL, problem)


def _parents(calls: Sequence[tuple[list[int], list[int]]]) -> list[int | None]:
    session, _ = taken([(prompt, (ids, [-0.1] * len(ids), "stop")) for prompt, ids in calls])
    return [turn.parent for turn in session.turns]


def _root_and_child(_: int) -> str:
    parents = _parents([([1, 2], [900]), ([1, 2, 900, 3], [902])])
    return "" if parents == [None, 0] else f"parents are {parents}"


def _non_prefix(facet: int) -> str:
    """Different messages (0) or different ids (1) begin a root."""
    if facet == 1:
        parents = _parents([([1, 2], [900]), ([99, 2, 900, 3], [901])])
        return "" if parents == [None, None] else f"parents are {parents}"
    turn = make_turn("s", 0)
    asked = [{"role": "user", "content": "different"}, turn.reply, {"role": "user", "content": "next"}]
    continuation = Session(INFO, [turn]).continuation(asked, turn.setup)
    return "" if continuation.parent is None else f"the parent is {continuation.parent.seq}"


def _key_order(_: int) -> str:
    turn = make_turn("s", 0, messages=({"role": "user", "content": {"a": 1, "b": 2}},))
    asked = [{"content": {"b": 2, "a": 1}, "role": "user"}, turn.reply, {"role": "user", "content": "next"}]
    continuation = Session(INFO, [turn]).continuation(asked, turn.setup)
    return "" if continuation.parent is None else "the same message with its keys in another order continues the turn"


def _rejects(_: int) -> str:
    """No turn is added twice, or with a missing or later parent."""
    root = make_turn("s", 0)
    for wrong in (root, replace(make_turn("s", 1), parent=7), replace(make_turn("s", 1), parent=1)):
        session = Session(INFO, [root])
        try:
            session.add(wrong)
        except (ValueError, IndexError):
            if len(session.turns) == 1:
                continue
        return f"turn {wrong.seq} with parent {wrong.parent} was added"
    return ""


def _not_partial(_: int) -> str:
    """A reply that is not JSON is neither sealed nor added."""
    session = Session(INFO)
    try:
        session.add(make_turn("s", 0, reply={"role": "assistant", "content": b"not-json"}))
    except InvalidRequest:
        return "" if session.turns == [] and session.leaves() == [] else "the turn was added in part"
    return "a reply that is no JSON was taken"


def _round_trip(_: int) -> str:
    calls: list[tuple[list[int], list[int]]] = []
    prompt = [0, 1]
    for n in range(8):
        prompt = [*prompt, 10 + n]
        calls.append((prompt, [900 + n]))
        prompt = [*prompt, 900 + n]
    session, engine = taken([(p, (ids, [-0.1], "stop")) for p, ids in calls])
    contexts = [session.context_before(n).tolist() for n in range(8)]
    return "" if contexts == [p for p, _ in calls] == [p for p, _ in engine.requests] else f"contexts are {contexts}"


def _interleaved(_: int) -> str:
    calls: list[tuple[list[int], list[int]]] = []
    prompts = {100: [100, 101], 200: [200, 201]}
    for n in range(5):
        for base in prompts:
            prompts[base] = [*prompts[base], base + 10 + n]
            calls.append((prompts[base], [900 + n]))
            prompts[base] = [*prompts[base], 900 + n]
    parents = _parents(calls)
    expected_parents = [None, None, *range(8)]
    return "" if parents == expected_parents else f"parents are {parents}"


def _deep(_: int) -> str:
    turns = make_chain("s", 1500, tokens=1)
    length = len(Session(INFO, turns).context_before(1499))
    return "" if length == 2999 else f"the last prompt has {length} tokens"


def _retry(_: int) -> str:
    """The same call answered again: theirs replaces the turn."""
    session, _engine = taken(
        [([1], ([900], [-0.1], "stop")), ([1, 900, 2], ([901], [-0.1], "stop")), ([1, 900, 2], ([999], [-0.1], "stop"))]
    )
    if len(session.turns) == 2:
        return ""
    return f"{len(session.turns)} turns are kept, parents {[turn.parent for turn in session.turns]}"


_THEIRS = "it is about the fields of their wire format"
GRAPH: Mapping[str, str | Callable[[int], str]] = {
    "graph_contract_fields_are_required": _THEIRS,
    "graph_accepts_only_version_one": _THEIRS,
    "delta_core_fields_are_required": _THEIRS,
    "raw_capture_cannot_be_delta_stored": _THEIRS,
    "append_rejects_cross_session_and_cross_lineage_edges": "a parent is a number within a session here: no such edge "
    "can be written",
    "slice_is_ordered_and_self_contained": "a part of a session is not cut out here",
    "failed_leaf_replacement_is_atomic": "no turn is replaced here",
    "root_and_child_deltas_resolve_exactly": _root_and_child,
    "message_identity_preserves_key_order_for_byte_parity": _key_order,
    "non_prefix_input_becomes_a_root": _non_prefix,
    "append_rejects_duplicate_and_missing_or_forward_parent": _rejects,
    "invalid_message_does_not_partially_append": _not_partial,
    "graph_wire_roundtrip_preserves_every_record": _round_trip,
    "interleaved_lineages_chain_independently": _interleaved,
    "deep_chain_resolves_iteratively": _deep,
    "retry_replaces_a_leaf_in_place": _retry,
}
"""By case: the comparison, or the reason that there is none."""

SUITES: Mapping[str, Callable[[], Iterator[Outcome]]] = {
    "ART tokenize goldens": art,
    "rllm abort and resume": abort_resume,
    "rllm trace graph": trace_graph,
}


@pytest.mark.parametrize("suite", SUITES)
def test_differences_are_explained(suite: str) -> None:
    ledger.check(suite, "", list(SUITES[suite]()))
