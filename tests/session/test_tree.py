from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.searching import examples
from tests.session.builders import assistant, make_turn, user
from tokentape._session.tree import Session
from tokentape.types import SessionInfo


def session(*turns: Any) -> Session:
    return Session(SessionInfo("s", 0.0), turns)


LINE = (
    make_turn(0, None, [user("a")], assistant("A"), added=[1, 2], completion=[3]),
    make_turn(1, 0, [user("b")], assistant("B"), added=[4], completion=[5, 6]),
)


def test_request_continues_the_turn_that_its_messages_extend() -> None:
    found = session(*LINE).continuation([user("a"), assistant("A"), user("b"), assistant("B"), user("c")], "setup")
    assert found.parent is LINE[1]
    assert found.new_messages == (user("c"),)
    assert found.context_ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_key_known_from_the_request_gives_the_same_tree() -> None:
    again = session()
    for turn, request in zip(LINE, ([user("a")], [user("a"), assistant("A"), user("b")]), strict=True):
        again.add(turn, again.continuation(request, "setup").key)
    other = session(*LINE)
    for repeated in (again, other):
        repeated.continuation([], "setup")
    assert (again._history, again._answered) == (other._history, other._answered)
    assert len(again._answered) == len(LINE)


def test_an_edited_last_turn_continues_the_one_before() -> None:
    found = session(*LINE).continuation([user("a"), assistant("A"), user("b"), assistant("EDITED"), user("c")], "setup")
    assert found.parent is LINE[0]
    assert found.new_messages == (user("b"), assistant("EDITED"), user("c"))
    assert found.context_ids.tolist() == [1, 2, 3]


def test_an_edited_first_message_continues_nothing() -> None:
    found = session(*LINE).continuation([user("x"), assistant("A"), user("b")], "setup")
    assert (found.parent, found.context_ids.tolist()) == (None, [])


def test_another_setup_continues_nothing() -> None:
    tree = session(*LINE)
    found = tree.continuation([user("a"), assistant("A"), user("b")], "other tools")
    assert found.parent is None
    assert tree.fork_cause(None, found.new_messages, "other tools") == "new_setup"


def test_last_of_equal_turns_is_continued() -> None:
    twins = [make_turn(n, None, [user("a")], assistant("A"), completion=[3 + n]) for n in range(2)]
    found = session(*twins).continuation([user("a"), assistant("A"), user("b")], "setup")
    assert found.parent is twins[1]


def test_aborted_turn_is_not_continued() -> None:
    aborted = make_turn(0, None, [user("a")], assistant("A"), finish_reason="abort")
    tree = session(aborted)
    assert tree.continuation([user("a"), assistant("A"), user("b")], "setup").parent is None
    assert tree.leaves() == []
    assert tree.fork_cause(None, [user("a")], "setup") is None


@pytest.mark.parametrize(
    ("parent", "messages", "setup", "cause"),
    [
        (1, [user("c")], "setup", None),
        (0, [user("b")], "setup", "sibling"),
        (0, [user("other")], "setup", "branched"),
        (None, [user("a")], "setup", "sibling"),
        (None, [user("x")], "setup", "edited_history"),
        (None, [user("a")], "tools", "new_setup"),
    ],
)
def test_the_cause_of_a_fork(parent: int | None, messages: list[Any], setup: str, cause: str | None) -> None:
    assert session(*LINE).fork_cause(parent, messages, setup) == cause


def test_first_turn_is_not_a_fork() -> None:
    assert session().fork_cause(None, [user("a")], "setup") is None


def test_turns_can_only_be_appended() -> None:
    with pytest.raises(ValueError, match="turn 1"):
        session(LINE[1])


def test_a_context_can_t_be_changed() -> None:
    context = session(*LINE).context_after(1)
    with pytest.raises(ValueError, match="read-only"):
        context[0] = 9


@given(seed=st.integers(0, 2**20), size=st.integers(1, 25))
@settings(max_examples=examples(60))
def test_continuation_equals_a_search_of_all_turns(seed: int, size: int) -> None:
    rng = random.Random(seed)
    tree = session()
    histories: list[list[Any]] = []
    contexts: list[list[int]] = []
    for seq in range(size):
        parent = rng.choice([None, *range(seq)]) if seq else None
        new, reply = [user(rng.choice("ab"))], assistant(rng.choice("AB"))
        added, completion = [rng.randrange(9)], [rng.randrange(9)]
        tree.add(make_turn(seq, parent, new, reply, added=added, completion=completion))
        before = ([], []) if parent is None else (histories[parent], contexts[parent])
        histories.append([*before[0], *new, reply])
        contexts.append([*before[1], *added, *completion])
    request = [*rng.choice([[], *histories]), user("new")]
    fitting = [n for n, history in enumerate(histories) if request[: len(history)] == history]
    expected = max(fitting, key=lambda n: (len(histories[n]), n), default=None)
    found = tree.continuation(request, "setup")
    assert (None if found.parent is None else found.parent.seq) == expected
    assert found.context_ids.tolist() == ([] if expected is None else contexts[expected])
    assert [tree.context_after(n).tolist() for n in range(size)] == contexts


def thought(text: str, reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


TWINS = (
    make_turn(0, None, [user("a")], thought("A", "one"), added=[1], completion=[2]),
    make_turn(1, None, [user("a")], thought("A", "two"), added=[1], completion=[3], fork="sibling"),
    make_turn(2, 0, [user("b")], assistant("B"), added=[4], completion=[5]),
    make_turn(3, 1, [user("b")], assistant("B"), added=[4], completion=[6], fork="branched"),
)


@pytest.mark.parametrize(("reasoning", "parent"), [("one", 0), ("two", 1), (" two\n", 1), ("", 1), ("unknown", 1)])
def test_returned_reasoning_selects_the_reply_to_continue(reasoning: str, parent: int) -> None:
    tree = session(*TWINS[:2])
    assert tree.continuation([user("a"), thought("A", reasoning), user("b")], "setup").parent is TWINS[parent]
    assert tree.sampled_replies([user("a"), thought("A", reasoning)]) == {1: TWINS[parent]}


@pytest.mark.parametrize(("reasoning", "parent"), [("one", 2), ("two", 3), ("", 3)])
def test_earlier_reasoning_distinguishes_branches(reasoning: str, parent: int) -> None:
    messages = [user("a"), thought("A", reasoning), user("b"), assistant("B"), user("c")]
    assert session(*TWINS).continuation(messages, "setup").parent is TWINS[parent]


def line(*texts: str) -> Session:
    """Return a session of one branch: turn n answers "qN" with the nth text. Each has its own reasoning."""
    turns = [
        make_turn(n, n - 1 if n else None, [user(f"q{n}")], thought(text, f"why {n}")) for n, text in enumerate(texts)
    ]
    return session(*turns)


def found_turns(tree: Session, *contents: str, parent: int | None = None) -> dict[int, int]:
    """Return the index of each reply and the turn that sampled it. Texts that begin with `q` are the user's."""
    messages = [user(text) if text.startswith("q") else assistant(text) for text in contents]
    return {n: turn.seq for n, turn in tree.sampled_replies(messages, parent).items()}


def test_a_reply_is_found_by_the_message_before_it() -> None:
    assert found_turns(line("OK", "OK"), "q?", "no", "q1", "OK", "q0", "OK") == {5: 0}
    assert found_turns(line("OK", "OK", "yes"), "qsummary", "yes", "q1", "OK", "qnew") == {3: 1}


def test_equal_text_alone_is_no_reply_of_the_model() -> None:
    assert found_turns(line("OK", "yes"), "qexample", "OK", "qreal") == {}
    assert found_turns(line("OK", "yes"), "OK", "qreal") == {}


def test_a_reply_is_found_by_the_replies_around_it() -> None:
    edited = found_turns(line("OK", "OK", "OK"), "qedited", "OK", "qcut", "OK", "q2", "OK", "qnew")
    assert edited == {1: 0, 3: 1, 5: 2}
    assert found_turns(line("OK", "yes", "OK"), "q0", "OK", "qedited", "yes", "qcut", "OK") == {1: 0, 3: 1, 5: 2}


def test_no_turn_samples_two_messages() -> None:
    tree = line("OK", "yes")
    assert found_turns(tree, "q0", "OK", "q1", "yes", "q0", "OK", "qnew", parent=1) == {1: 0, 3: 1}
    assert found_turns(tree, "q0", "OK", "qcopied", "OK", "q1", "yes") == {1: 0, 5: 1}


def test_a_message_of_the_client_within_a_branch_is_no_reply_of_the_model() -> None:
    tree = line("OK", "yes")
    assert found_turns(tree, "q0", "OK", "q1", "yes", "qcached", "OK", "qnew", parent=1) == {1: 0, 3: 1}


@given(seed=st.integers(0, 2**20), size=st.integers(1, 12))
@settings(max_examples=examples(80))
def test_edits_move_no_reply_to_a_message_of_the_client(seed: int, size: int) -> None:
    """Drop, edit and insert messages. Unchanged exchanges keep their turns, in order; inserted ones have none."""
    rng = random.Random(seed)
    tree = line(*(rng.choice(["OK", "yes"]) for _ in range(size)))
    exchanges: list[tuple[str, str, int | None]] = [
        (f"q{n}", tree.turns[n].reply["content"], n) for n in sorted(rng.sample(range(size), rng.randint(1, size)))
    ]
    for _ in range(rng.randrange(3)):
        exchanges.insert(rng.randrange(len(exchanges) + 1), (f"q{rng.random()}", rng.choice(["OK", "yes"]), None))
    actual = found_turns(tree, *(text for question, answer, _ in exchanges for text in (question, answer)))
    expected = {2 * n + 1: turn for n, (_, _, turn) in enumerate(exchanges) if turn is not None}
    # The place of a dropped exchange may be taken by an inserted one, which then looks like its edited writing.
    kept = set(expected.values())
    assert {n: turn for n, turn in actual.items() if turn in kept} == expected
    assert len(set(actual.values())) == len(actual)


def test_the_next_reply_decides_between_equal_exchanges() -> None:
    later = make_turn(2, 0, [user("b")], thought("B", "from the first"))
    messages = [user("a"), assistant("A"), user("b"), thought("B", "from the first")]
    assert session(*TWINS[:2], later).sampled_replies(messages) == {1: TWINS[0], 3: later}


def test_an_equal_exchange_of_another_branch_is_found_if_the_newest_is_taken() -> None:
    messages = [user("a"), thought("A", "two"), user("a"), assistant("A")]
    assert session(*TWINS[:2]).sampled_replies(messages, parent=1) == {1: TWINS[1], 3: TWINS[0]}


def test_a_call_is_found_by_its_id() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    turn = make_turn(0, None, [user("a")], reply)
    assert session(turn).sampled_replies([user("edited"), reply]) == {1: turn}
    renamed = {**reply, "tool_calls": [{**call, "id": "other"}]}
    assert session(turn).sampled_replies([user("edited"), renamed]) == {}


def test_replies_are_found_among_the_messages_that_began_the_branch() -> None:
    first = make_turn(0, None, [user("a")], assistant("A"))
    forked = make_turn(1, None, [user("a"), assistant("A"), user("b")], assistant("B"), setup="other")
    messages = [user("a"), assistant("A"), user("b"), assistant("B"), user("c")]
    assert session(first, forked).sampled_replies(messages, parent=1) == {1: first, 3: forked}
