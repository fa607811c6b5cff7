from __future__ import annotations

from dataclasses import replace

import pytest

from tests.records import UNCHANGED
from tests.session.builders import assistant, make_turn, user
from tokentape._session.verdict import BRIDGE_CHECKED, FORKS, bridge_states, check_verdicts, verdict, wanted_verdict
from tokentape.errors import InvalidRequest
from tokentape.types import Event, TokenDistribution

ROOT = make_turn(0, None, [user("a")], assistant("A"))
NEXT = make_turn(1, 0, [user("b")], assistant("B"))


def test_append_only_path_is_exact() -> None:
    assert verdict([ROOT, make_turn(1, 0, [user("b")], assistant("B"))]) == "exact"


def test_the_last_fork_of_a_path_is_named() -> None:
    forked = make_turn(1, 0, [user("b")], assistant("B"), fork="branched")
    assert verdict([ROOT, forked]) == "forked: branched"
    assert verdict([ROOT, forked, make_turn(2, 1, [user("c")], assistant("C"), fork="sibling")]) == "forked: sibling"


def test_turn_with_a_synthesized_close_is_closed() -> None:
    assert verdict([ROOT, make_turn(1, 0, [user("b")], assistant("B"), closed=True)]) == "closed"


def test_fork_takes_precedence_over_close() -> None:
    assert (
        verdict([ROOT, make_turn(1, 0, [user("b")], assistant("B"), closed=True, fork="branched")])
        == "forked: branched"
    )


def test_path_with_contexts_of_the_server_is_captured_and_not_exact() -> None:
    captured = [replace(turn, engine="vllm 0.32.0 raw_logprobs generate captured") for turn in (ROOT, NEXT)]
    assert verdict(captured) == "captured"
    assert verdict([ROOT, replace(NEXT, engine="vllm 0.32.0 captured_logprobs")]) == "exact"


def test_captured_path_reports_that_the_server_drifted() -> None:
    drifted = replace(ROOT, engine="vllm 0.32.0 raw_logprobs generate captured", fork="drift")
    assert verdict([drifted, replace(NEXT, engine=drifted.engine)]) == "captured with drift"
    assert verdict([drifted, replace(NEXT, engine=drifted.engine, fork="sibling")]) == "captured with drift"


def test_forks_and_closes_of_a_captured_path_come_first() -> None:
    captured = replace(ROOT, engine="vllm 0.32.0 raw_logprobs generate captured")
    assert verdict([captured, replace(NEXT, fork="branched")]) == "forked: branched"


@pytest.mark.parametrize(
    ("verdict_text", "wanted", "matches"),
    [
        ("exact", ["exact"], True),
        ("exact", ["closed", "forked"], False),
        ("forked: sibling", ["forked"], True),
        ("forked: sibling", ["forked:sibling"], True),
        ("forked: sibling", ["forked: sibling"], True),
        ("forked: sibling", ["forked:branched", "exact"], False),
        ("closed", [], False),
        ("captured", ["captured"], True),
        ("captured with drift", ["captured", "exact"], False),
        ("captured with drift", ["captured with drift"], True),
    ],
)
def test_a_filter_takes_words_and_causes(verdict_text: str, wanted: list[str], matches: bool) -> None:
    assert wanted_verdict(verdict_text, wanted) is matches


@pytest.mark.parametrize("wanted", ["", "Exact", "exact:x", "forked:", "forked: ", "aborted"])
def test_a_filter_that_can_match_nothing_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="exact, forked, closed"):
        check_verdicts(["exact", wanted])


UNKNOWN = replace(NEXT, engine="vllm 0.33.0 raw_logprobs completions model-unverified")


def test_turn_of_an_unknown_model_has_a_reservation() -> None:
    assert verdict([ROOT, UNKNOWN]) == "exact, model unverified"
    assert verdict([ROOT, replace(UNKNOWN, fork="branched")]) == "forked: branched, model unverified"
    captured = [replace(turn, engine="vllm 0.33.0 raw_logprobs model-unverified captured") for turn in (ROOT, NEXT)]
    assert verdict(captured) == "captured, model unverified"


@pytest.mark.parametrize(
    ("found", "wanted", "matches"),
    [
        ("exact, model unverified", ["exact"], False),
        ("exact, model unverified", ["exact", "model unverified"], True),
        ("exact", ["exact", "model unverified"], True),
        ("forked: sibling, model unverified", ["exact", "model unverified"], False),
        ("forked: sibling, model unverified", ["forked:sibling", "model unverified"], True),
    ],
)
def test_filter_must_name_the_reservation_too(found: str, wanted: list[str], matches: bool) -> None:
    check_verdicts(wanted)
    assert wanted_verdict(found, wanted) is matches


SCALED = replace(UNCHANGED, temperature=0.6)


@pytest.mark.parametrize(
    ("sampled_from", "logprobs_of", "expected"),
    [
        (SCALED, SCALED, "exact"),
        (SCALED, UNCHANGED, "exact, other logprobs"),
        (replace(UNCHANGED, temperature=0.0), UNCHANGED, "exact, other logprobs"),
        (replace(SCALED, truncation=True), SCALED, "exact, other logprobs"),
        (SCALED, None, "exact, logprobs not known"),
        (None, SCALED, "exact, logprobs not known"),
        (None, None, "exact, logprobs not known"),
        (SCALED, replace(SCALED, grammar=None), "exact, logprobs not known"),
        (replace(SCALED, grammar=None), replace(SCALED, grammar=None), "exact, logprobs not known"),
        (SCALED, replace(UNCHANGED, grammar=None), "exact, other logprobs"),
    ],
)
def test_turn_with_other_logprobs_has_a_reservation(
    sampled_from: TokenDistribution | None, logprobs_of: TokenDistribution | None, expected: str
) -> None:
    turn = replace(NEXT, sampled_from=sampled_from, logprobs_of=logprobs_of)
    assert verdict([ROOT, turn]) == expected
    assert verdict([turn, ROOT]) == expected


def test_reservations_of_several_turns_are_all_listed() -> None:
    turns = [replace(UNKNOWN, sampled_from=SCALED), replace(NEXT, logprobs_of=None)]
    assert verdict(turns) == "exact, model unverified, other logprobs, logprobs not known"
    wanted = ["exact", "model unverified", "other logprobs"]
    check_verdicts(wanted)
    assert not wanted_verdict(verdict(turns), wanted)
    assert wanted_verdict(verdict(turns), [*wanted, "logprobs not known"])


def test_reservation_alone_is_not_a_verdict() -> None:
    with pytest.raises(InvalidRequest, match="matches nothing alone"):
        check_verdicts(["model unverified"])


@pytest.mark.parametrize("outcome", [["same"], {"same": ""}, None, "other", True])
def test_an_outcome_of_a_check_that_is_not_known_leaves_the_bridge_unchecked(outcome: object) -> None:
    event = Event("s", 1, BRIDGE_CHECKED, {"outcome": outcome}, 1.0)
    assert verdict([ROOT, NEXT], bridge_states([event])) == "exact, bridge unchecked"


def test_an_unknown_cause_of_a_fork_is_named() -> None:
    check_verdicts([f"forked:{cause}" for cause in FORKS])
    with pytest.raises(InvalidRequest, match="unknown cause 'bogus' of a fork in 'forked:bogus'; expected sibling, "):
        check_verdicts(["exact", "forked:bogus"])
