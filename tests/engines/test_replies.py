"""Tokens, ends and counts in replies of the engines over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.engines._replies import OWN_CALLS, EngineReply, ReceivedTokens, alternatives, decode, joined
from tokentape.errors import EngineContractError, EngineUnavailable

PARAMS = SamplingParams(max_tokens=4, stop_token_ids=(7,), stop_strings=("end",))


def completion(params: SamplingParams = PARAMS, *, own_stops: bool = False) -> ReceivedTokens:
    return ReceivedTokens(params, 10, own_stops=own_stops)


def test_tokens_are_passed_on_unchanged_and_counted() -> None:
    tokens = completion()
    assert tokens.delta([1, 2], [-0.5, 0.0005]) == SampleDelta((1, 2), (-0.5, 0.0005))
    tokens.delta([3], [-1.0])
    tokens.check_counts(5, 5, 3)


@pytest.mark.parametrize(
    ("ids", "logprobs", "says"),
    [
        ([1], [], "0 log-probabilities for 1"),
        ([10], [-1.0], "id 10; the vocabulary has ids 0 to 9"),
        ([-1], [-1.0], "id -1"),
        ([1] * 5, [-1.0] * 5, "5 tokens; expected at most 4"),
        ([1], [None], "no usable"),
        ([1], [float("nan")], "no usable"),
        ([1], [-3.4e38], "no usable"),
        ([1], [0.5], "logits"),
        ([1, 2, 3], [-1.0, None, -2.0], "no usable"),
        ([1, 2, 3], [-1.0, float("nan"), -2.0], "no usable"),
        ([1, 2, 3], [float("nan"), -1.0, -2.0], "no usable"),
        ([1, 2, 3], [-1.0, float("inf"), float("-inf")], "no usable"),
        ([1, 2, 3], [1.7e308, 1.7e308, -1.0], "logits"),
    ],
)
def test_invalid_tokens_are_refused(ids: list[int], logprobs: list[float | None], says: str) -> None:
    with pytest.raises(EngineContractError, match=says):
        completion().delta(ids, logprobs)


@pytest.mark.parametrize("events", [[[1, 7, 2]], [[1, 7], [2]], [[7], [7]], [[7, 1, 1, 7]]])
def test_completion_that_continues_after_a_requested_stop_id_is_refused(events: list[list[int]]) -> None:
    tokens, *before = completion(own_stops=True), *events[:-1]
    for ids in before:
        tokens.delta(ids, [-1.0] * len(ids))
    with pytest.raises(EngineContractError, match="continued after id 7, which is a stop id"):
        tokens.delta(events[-1], [-1.0] * len(events[-1]))


def test_length_at_a_requested_stop_id_is_refused_before_max_tokens() -> None:
    tokens = completion(own_stops=True)
    tokens.delta([1, 2, 7], [-1.0] * 3)
    with pytest.raises(EngineContractError, match="length at token 3 of at most 4, which is stop id 7"):
        tokens.stop("length", None)
    tokens = completion()
    tokens.delta([1, 2, 3, 7], [-1.0] * 4)
    assert tokens.stop("length", None) is None
    tokens = completion()
    tokens.delta([1, 2, 3], [-1.0] * 3)
    assert tokens.stop("length", None) is None


def test_an_end_without_tokens_may_follow_a_stop_id() -> None:
    tokens = completion()
    tokens.delta([1, 7], [-1.0, -1.0])
    assert tokens.delta([], []) == SampleDelta((), ())
    assert tokens.stop("stop", 7) == 7


def test_requested_alternatives_are_required_for_each_token() -> None:
    with pytest.raises(EngineContractError, match="0 lists of alternatives for 1"):
        completion(replace(PARAMS, top_logprobs=1)).delta([1], [-1.0])
    assert completion().delta([1], [-1.0], [[(1, -1.0)]]).top_logprobs == ()


def test_alternatives_are_sorted_without_impossible_ids() -> None:
    assert alternatives([(1, -2.0), (2, -0.5), (3, -3.4e38), (4, None)], 5, 10) == ((2, -0.5), (1, -2.0))
    assert alternatives([(1, -2.0), (2, -0.5)], 1, 10) == ((2, -0.5),)
    with pytest.raises(EngineContractError, match="empty"):
        alternatives([(3, -3.4e38)], 1, 10)
    with pytest.raises(EngineContractError, match="logits"):
        alternatives([(3, 4.5)], 1, 10)


def test_alternatives_in_padding_rows_of_the_embedding_are_left_out() -> None:
    top = [[(11, -0.1), (1, -2.5), (2, -4.0)]]
    delta = completion(replace(PARAMS, top_logprobs=2)).delta([1], [-2.5], top)
    assert delta.top_logprobs == (((1, -2.5), (2, -4.0)),)


def test_alternatives_with_more_than_all_probability_are_refused() -> None:
    with pytest.raises(EngineContractError, match=r"sum to 1\.90; expected at most 1"):
        alternatives([(1, -0.05), (2, -0.05)], 2, 10)
    # Rounded to bfloat16, and one id twice.
    assert len(alternatives([(token_id, -2.984375) for token_id in range(20)], 20, 20)) == 20
    assert len(alternatives([(1, -0.05), (1, -0.05)], 2, 10)) == 2


@pytest.mark.parametrize(("matched", "own_stops"), [(7, False), ("end", False), (7, True)])
def test_requested_stop_is_named(matched: int | str, own_stops: bool) -> None:
    tokens = completion(own_stops=own_stops)
    tokens.delta([1, 7], [-1.0, -1.0])
    assert tokens.stop("stop", matched) == matched


@pytest.mark.parametrize("matched", [8, 1, "en", None])
def test_unrequested_or_early_stop_is_refused(matched: int | str | None) -> None:
    tokens = completion()
    tokens.delta([1, 8], [-1.0, -1.0])
    with pytest.raises(EngineContractError, match="stopped"):
        tokens.stop("stop", matched)


def test_model_stop_counts_only_if_it_can_not_be_disabled() -> None:
    tokens = completion(own_stops=True)
    tokens.delta([1, 8], [-1.0, -1.0])
    assert tokens.stop("stop", 8) == 8
    with pytest.raises(EngineContractError):
        tokens.stop("stop", 1)


def test_reply_without_tokens_can_only_be_an_abort() -> None:
    assert completion().stop("abort", None) is None
    for reason in ("stop", "length"):
        with pytest.raises(EngineContractError, match="no token with a logprob"):
            completion(own_stops=True).stop(reason, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "sampled"), [(4, 1), (5, 2)])
def test_counts_that_differ_are_refused(prompt: int, sampled: int) -> None:
    tokens = completion()
    tokens.delta([1], [-1.0])
    with pytest.raises(EngineContractError, match="5 were sent and 1 came back"):
        tokens.check_counts(prompt, 5, sampled)


def test_deltas_are_joined_in_order_with_the_finish_of_the_last() -> None:
    first = SampleDelta((1, 2), (-1.0, -2.0), top_logprobs=(((1, -1.0),), ((2, -2.0),)))
    last = SampleDelta((3,), (-3.0,), "stop", 3, (((3, -3.0),),), "v2")
    tops = (((1, -1.0),), ((2, -2.0),), ((3, -3.0),))
    assert joined([first, last]) == SampleDelta((1, 2, 3), (-1.0, -2.0, -3.0), "stop", 3, tops, "v2")
    assert joined([first]) == first


def test_malformed_reply_is_refused_without_its_text() -> None:
    class Shape(msgspec.Struct):
        ids: list[int]

    with pytest.raises(EngineContractError, match="SGLang") as caught:
        decode(b'{"ids": ["secret prompt"]}', Shape, "SGLang")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "refused"),
    [("cmpl-call-1-OWN22", True), ("cmpl-call-1-OWN11-0", False), ("a-proxy-s-own-id", False), ("", False)],
)
def test_reply_with_the_id_of_another_call_is_refused(named: str, refused: bool) -> None:
    class Empty(EngineReply):
        def _read(self, data: bytes) -> SampleDelta | None:
            return None

    reply = Empty(PARAMS, 10, path="/", prompt=b"[5]", prompt_tokens=1, call=f"call-1-{OWN_CALLS}11")
    event = b'{"id":"%s"}' % named.replace("OWN", OWN_CALLS).encode()
    with pytest.raises(EngineContractError, match="the id of another call") if refused else nullcontext():
        reply.feed(event)


EVENTS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from([None, "v1", "v2"])), max_size=12)


@given(events=EVENTS, cuts=st.sets(st.integers(0, 12)), fails_at=st.none() | st.integers(0, 12))
def test_event_chunking_does_not_change_the_tokens_before_an_error(
    events: list[tuple[list[int], str | None]], cuts: set[int], fails_at: int | None
) -> None:
    class Scripted(EngineReply):
        def _read(self, data: bytes) -> SampleDelta | None:
            at = int(data)
            if at == fails_at:
                raise EngineUnavailable("injected")
            ids, version = events[at]
            top = tuple(((token_id, -0.5),) for token_id in ids)
            return SampleDelta(tuple(ids), tuple(-0.1 * i for i in ids), top_logprobs=top, weight_version=version)

    def read_tokens(arrivals: Sequence[Sequence[bytes]]) -> tuple[list[tuple[object, ...]], bool]:
        """Return all reported data of each token, and whether an error followed."""
        tokens: list[tuple[object, ...]] = []
        reply = Scripted(PARAMS, 10, path="/", prompt=b"[5]", prompt_tokens=1)
        try:
            for arrival in arrivals:
                deltas = list[SampleDelta]()
                for delta in reply.feed_all(arrival):
                    deltas.append(delta)
                    rows = zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True)
                    tokens += [(*row, delta.weight_version) for row in rows]
                assert all(delta.weight_version != other.weight_version for delta, other in pairwise(deltas))
        except EngineUnavailable:
            return tokens, True
        return tokens, False

    sent = [b"%d" % at for at in range(len(events))]
    ends = sorted({min(cut, len(sent)) for cut in cuts} | {0, len(sent)})
    together = [sent[start:end] for start, end in pairwise(ends)]
    assert read_tokens(together) == read_tokens([[event] for event in sent])
