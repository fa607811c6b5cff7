"""Edges between branches: against labeled traffic, and rule by rule where the traffic has no case."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.session import lineage_traffic
from tests.session.builders import assistant, make_turn, user
from tests.session.lineage_traffic import KINDS, Scores, Traffic, scored, system
from tokentape._session.flatten import trajectories
from tokentape._session.lineage import RULES, lineage, parent_sessions, roles
from tokentape._session.similarity import Runs, shingles
from tokentape._session.tree import Session
from tokentape.types import LineageEdge, SessionInfo

SEEDS = 20


@cache
def scores(seeds: int) -> Scores:
    return scored(range(seeds))


@pytest.mark.parametrize("seeds", [SEEDS // 4, pytest.param(SEEDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_found_and_right(kind: str, seeds: int) -> None:
    found = scores(seeds)
    assert found.true[kind] >= 2 * seeds
    assert found.precision(kind) >= 0.9, found.misses
    assert found.recall(kind) >= 0.9, found.misses


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [rule.__name__ for rule in RULES])
def test_every_rule_is_needed(left_out: str) -> None:
    """Without one of the rules some edges are missed or wrong, so the labeled set can tell."""
    rules = tuple(rule for rule in RULES if rule.__name__ != left_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokentape._session.lineage.RULES", rules)
        worse = scored(range(4))
    assert worse.misses.total() > scores(4).misses.total()


def test_deeply_nested_arguments_name_no_task() -> None:
    arguments = '{"a":' * 1200 + '"Count the files."' + "}" * 1200
    call = {"id": "c", "type": "function", "function": {"name": "task", "arguments": arguments}}
    session = Session(SessionInfo("s", 0.0))
    session.add(make_turn(0, None, [user("go")], {"role": "assistant", "content": None, "tool_calls": [call]}))
    session.add(make_turn(1, None, [system("other"), user("Count the files.")], assistant("3"), fork="new_setup"))
    assert lineage(session) == []


def test_a_header_names_a_parent_in_another_session() -> None:
    parent = Session(SessionInfo("ses_parent", 0.0))
    call = {"id": "c", "type": "function", "function": {"name": "task", "arguments": '{"prompt": "Count the files."}'}}
    spawn = make_turn(0, None, [user("go")], {"role": "assistant", "content": None, "tool_calls": [call]})
    parent.add(replace(spawn, session_id="ses_parent"))
    child = Session(SessionInfo("ses_child", 0.0))
    turn = make_turn(0, None, [system("other"), user("Count the files.")], assistant("3"))
    child.add(replace(turn, sampling={"client": {"parent": "ses_parent"}}))

    assert parent_sessions(child) == {"ses_parent"}
    (edge,) = lineage(child, [parent])
    assert (edge.kind, edge.parent_session, edge.parent, edge.confidence) == ("subagent", "ses_parent", 0, 1.0)
    (unknown,) = lineage(child)
    assert unknown.parent is None


def test_edited_or_compacted_branch_keeps_its_role() -> None:
    t = Traffic(Random(0))
    lineage_traffic.claude_task(t)
    lineage_traffic.claude_compact(t)
    lineage_traffic.opencode_title(t)
    edges = lineage(t.session)
    found = roles(t.session, edges)
    expected = {"subagent": "subagent", "compaction": "main", "side_call": "side_call"}
    assert {edge.kind: found[edge.turn] for edge in edges} == expected
    assert found[0] == "main"


def test_edges_change_no_mask() -> None:
    t = Traffic(Random(1))
    lineage_traffic.opencode_compact(t)
    without, plain = trajectories(t.session, edges=()), trajectories(t.session)
    wrong = [LineageEdge("side_call", turn.seq, "s", None, "wrong", 1.0) for turn in t.session.turns]
    for edges in (lineage(t.session), wrong):
        for with_edges, other in zip(trajectories(t.session, edges=edges), plain, strict=True):
            np.testing.assert_array_equal(with_edges.loss_mask, other.loss_mask)
    assert [trajectory.role for trajectory in without] == ["main"] * len(without)
    assert [trajectory.role for trajectory in plain] == [""] * len(plain)


def operations(t: Traffic) -> int:
    """Return how many bytecodes of the lineage modules run to find the edges of a session."""
    count = 0

    def traced(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        count += what == "opcode"
        if what == "call":
            frame.f_trace_opcodes = ours = "tokentape/_session/" in frame.f_code.co_filename
            frame.f_trace_lines = False
            return traced if ours else None
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        lineage(t.session)
    finally:
        sys.settrace(before)
    return count


def roots(t: Traffic, number: int) -> None:
    prompt = system(t.text(2))
    for _ in range(number):
        t.call([prompt, user(t.text(3))])


def forks(t: Traffic, number: int) -> None:
    _, history = t.begun(0)
    for _ in range(number):
        t.call([*history, user(t.text())])


def side_calls_beside_a_long_branch(t: Traffic, number: int) -> None:
    _, history = t.begun(0)
    for _ in range(number):
        t.call([*history, user(t.text())])
        _, history = t.call([*history, user(t.text())])


def subagents(t: Traffic, number: int) -> None:
    _, history = t.begun(0)
    for _ in range(number):
        task = t.text(2)
        _, history = t.call([*history, user(t.text())], reply=t.tool_call("Task", prompt=task))
        _, inner = t.call([system(t.text(2)), user(task)], "subtools")
        _, history = t.call(t.result(history, t.text() + str(inner[-1]["content"])))


def titles_of_single_message(t: Traffic, number: int) -> None:
    prompts, question = [system(t.text(2)), system(t.text(2))], user(t.text())
    for at in range(number):
        t.call([prompts[at % 2], question])


def speakers(t: Traffic, number: int) -> None:
    conversation = [user(t.text())]
    for _ in range(number):
        _, history = t.call([system(t.text(2)), *conversation])
        conversation = [conversation[0], user(str(history[-1]["content"]))]


SHAPES = roots, forks, side_calls_beside_a_long_branch, subagents, titles_of_single_message, speakers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_linearly_with_branches(
    shape: Callable[[Traffic, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape._session.lineage_branches.WINDOW", 4)
    monkeypatch.setattr("tokentape._session.lineage.WINDOW", 4)
    counts = []
    for number in (20, 20, 80):  # Python 3.13 counts only a part of the first run
        t = Traffic(Random(0))
        shape(t, number)
        counts.append(operations(t))
    assert counts[2] < 4.6 * counts[1]


def test_each_text_is_split_into_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Counter[str]()

    def counted(text: str) -> Runs:
        cut.update([text])
        return shingles(text)

    monkeypatch.setattr("tokentape._session.lineage_branches.shingles", counted)
    t = Traffic(Random(0))
    roots(t, 20)
    lineage(t.session)
    assert len(cut) > 20
    assert cut.most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("question", "kinds"), [("How high is the Eiffel Tower?", []), ("Search the tower.", ["subagent"])]
)
def test_restarted_run_is_not_a_subagent_of_the_previous_run(question: str, kinds: list[str]) -> None:
    """The first run gives a tool the second run's question, which is its own in the first case."""
    arguments = '{"query": "How high is the Eiffel Tower?"}'
    search = {"id": "c", "type": "function", "function": {"name": "search", "arguments": arguments}}
    session = Session(SessionInfo("s", 0.0))
    calling = {"role": "assistant", "content": None, "tool_calls": [search]}
    session.add(make_turn(0, None, [user(question)], calling))
    session.add(make_turn(1, None, [user("How high is the Eiffel Tower?")], assistant("330 m")))
    assert [edge.kind for edge in lineage(session)] == kinds


def test_message_replaced_after_an_edited_history_comes_from_the_replaced_turn() -> None:
    first, empty = [user("Count the apples."), assistant("There are 31.")], assistant("")
    session = Session(SessionInfo("s", 0.0))
    session.add(make_turn(0, None, first[:1], first[1]))
    session.add(make_turn(1, None, [*first[:1], empty, first[1], user("And the pears?")], assistant("Seven of them.")))
    session.add(make_turn(2, None, [*first[:1], empty, first[1], user("And the plums?")], assistant("None at all.")))
    assert [(edge.kind, edge.turn, edge.parent) for edge in lineage(session)] == [("edit", 1, 0), ("edit", 2, 1)]


def test_turns_of_a_template_that_rewrites_history_are_not_side_calls() -> None:
    """Each turn is a root whose history ends with the reply of the turn before, which is not a branch beside it."""
    session, history = Session(SessionInfo("s", 0.0)), [system("You are a careful agent.")]
    for seq, (question, answer) in enumerate([("Count the apples.", "31"), ("And pears?", "7"), ("And plums?", "0")]):
        history.append(user(question))
        reply = assistant(f"In the second basket from the left there are {answer}.")
        session.add(make_turn(seq, None, list(history), reply, fork="template_rewrites" if seq else None))
        history.append(reply)
    edges = lineage(session)
    assert [(edge.kind, edge.turn, edge.parent) for edge in edges] == [("edit", 1, 0), ("edit", 2, 1)]
    assert set(roles(session, edges).values()) == {"main"}


def test_side_call_over_an_edited_history_comes_from_the_newest_turn_in_it() -> None:
    first, empty = [user("Count the apples."), assistant("There are 31.")], assistant("")
    session, edited = Session(SessionInfo("s", 0.0)), [*first[:1], empty, first[1]]
    session.add(make_turn(0, None, first[:1], first[1]))
    session.add(make_turn(1, None, [*edited, user("And the pears?")], assistant("Seven of them.")))
    session.add(make_turn(2, None, [*edited, user("Name this conversation.")], assistant("Fruit")))
    session.add(make_turn(3, 1, [user("And the plums?")], assistant("None at all.")))
    assert [(edge.kind, edge.turn, edge.parent) for edge in lineage(session)] == [("edit", 1, 0), ("side_call", 2, 0)]
