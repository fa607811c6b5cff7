"""Faults of the engine behind the gateway."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.conftest import QUESTION, Gateway, Serve, goes_on, say, wait_for_turns
from tests.faults.upstream import Plan, Upstream
from tests.searching import examples
from tests.waiting import PATIENCE
from tokentape.engines._base import Timeouts
from tokentape.engines._http import MAX_EVENT_BYTES

STREAM = pytest.mark.parametrize("stream", [False, True])


def streamed_text(gateway: Gateway, messages: list[Any]) -> str:
    """The bytes of a stream, as text."""
    body = {"messages": messages, "stream": True, "return_token_ids": True}
    answer = httpx2.post(f"{gateway.url}/sessions/s/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200
    return answer.text


@STREAM
def test_engine_that_refuses_connections(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    """Row 7. Answered 503, not 502: a later retry can help."""
    history = [QUESTION, gateway.ask()]
    upstream.listening(False)
    error = gateway.refused([*history, QUESTION], stream=stream)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (503, "engine_unavailable")
    assert error.response.headers["x-should-retry"] == "true"
    assert httpx2.get(f"{gateway.url}/readyz").status_code == 503
    upstream.listening(True)
    assert httpx2.get(f"{gateway.url}/readyz").status_code == 200
    assert goes_on(gateway, history).seq == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("then", ["reset", "close", "end"])
@pytest.mark.parametrize("events", [0, 3])
def test_stream_that_breaks_off(gateway: Gateway, upstream: Upstream, then: Any, events: int) -> None:
    """Rows 8 and 9: reset by the engine, closed by it, or ended as HTTP wants it but without a finish_reason."""
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(events=events, then=then)]
    if not events:
        error = gateway.refused([*history, QUESTION], stream=True)
        assert isinstance(error, openai.APIStatusError)
        assert error.status_code in (502, 503)
        goes_on(gateway, history)
        return
    text = streamed_text(gateway, [*history, QUESTION])
    last = text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith('data: {"error":')
    assert "[DONE]" not in text
    assert 'finish_reason":"' not in text
    _, orphan = wait_for_turns(gateway, 2)
    assert (orphan.finish_reason, orphan.abort_cause, len(orphan.completion_ids)) == ("abort", "engine_error", 3)
    assert goes_on(gateway, history).seq == 2


def test_client_sees_the_error_of_a_stream_that_breaks_off(gateway: Gateway, upstream: Upstream) -> None:
    """Row 8, as the official client sees it: an exception, after the tokens that had come."""
    upstream.plans = [Plan(events=3, then="reset")]
    chunks = []
    with pytest.raises(openai.APIError, match="connection broke"):
        chunks.extend(say(gateway.client(), [QUESTION], stream=True))
    wait_for_turns(gateway, 1)


@pytest.mark.parametrize("then", ["reset", "close", "end"])
def test_whole_reply_that_breaks_off(gateway: Gateway, upstream: Upstream, then: Any) -> None:
    """Rows 8 and 9 for a call without a stream: half a JSON text. Nothing of it is recorded."""
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(events=5, then=then)]
    error = gateway.refused([*history, QUESTION])
    assert isinstance(error, openai.APIStatusError)
    assert error.status_code == 502
    assert goes_on(gateway, history).seq == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "events", "stream"),
    [("first_token", 0, True), ("between_tokens", 3, True), ("total", 0, False), ("total", 3, True)],
)
def test_engine_that_falls_silent(serve: Serve, upstream: Upstream, stage: str, events: int, stream: bool) -> None:
    """Row 10: each timeout ends its stage with 504, or with an error event once a stream has begun."""
    limits = {"connect": 5.0, "first_token": 9.0, "between_tokens": 9.0, "total": 9.0, stage: 0.4}
    gateway = serve(timeouts=Timeouts(**limits))
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(events=events, then="stall")]
    if events:
        assert '"code":"engine_timeout"' in streamed_text(gateway, [*history, QUESTION])
        orphan = wait_for_turns(gateway, 2)[-1]
        assert (orphan.finish_reason, orphan.abort_cause) == ("abort", "engine_timeout")
    else:
        error = gateway.refused([*history, QUESTION], stream=stream)
        assert isinstance(error, openai.APIStatusError)
        assert (error.status_code, error.code) == (504, "engine_timeout")
        gateway.check()
    assert upstream.left.acquire(timeout=PATIENCE), "the engine was left sampling"
    goes_on(gateway, history)


def first(events: list[Any]) -> dict[str, Any]:
    return events[0]["choices"][0]


def rename(events: list[Any], token_id: int) -> None:
    first(events)["token_ids"][0] = token_id
    first(events)["logprobs"]["tokens"][0] = f"token_id:{token_id}"


WRONG: dict[str, Callable[[list[Any]], Any]] = {
    "ids missing": lambda events: first(events).update(token_ids=None),
    "logprobs missing": lambda events: first(events).update(logprobs=None),
    "one logprob too few": lambda events: first(events)["logprobs"]["token_logprobs"].pop(),
    "logprob NaN": lambda events: first(events)["logprobs"]["token_logprobs"].__setitem__(0, float("nan")),
    "logprob above 0": lambda events: first(events)["logprobs"]["token_logprobs"].__setitem__(0, 2.0),
    "id of no token": lambda events: rename(events, 10**6),
    "another prompt": lambda events: first(events)["prompt_token_ids"].__setitem__(0, 1),
    "counts differ": lambda events: events[-1]["usage"].update(completion_tokens=1),
    "no finish known": lambda events: [
        choice.update(finish_reason="because") for event in events for choice in event["choices"]
    ],
}


@pytest.mark.sampled(9)
@STREAM
@pytest.mark.parametrize("name", WRONG)
def test_reply_that_breaks_the_contract(gateway: Gateway, upstream: Upstream, name: str, stream: bool) -> None:
    """Row 11: 502, or an error event after the first tokens. It does not even become an aborted turn."""
    history = [QUESTION, gateway.ask()]
    upstream.plans = [Plan(tamper=WRONG[name])]
    error = gateway.refused([*history, QUESTION], stream=stream)
    assert error.code == "engine_contract"
    if isinstance(error, openai.APIStatusError):
        assert error.status_code == 502
        assert error.response.headers["x-should-retry"] == "false"
    assert goes_on(gateway, history).seq == 1


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.binary(max_size=200),
        st.builds(lambda line: b"data: " + line + b"\n\n", st.binary(max_size=80)),
        st.sampled_from(
            [
                b"data: {}\n\n",
                b"data: [DONE]\n\n",
                b"data: {\n\ndata: }\n\n",
                b"\xff\xfe",
                b'data: {"choices":1e999}\n\n',
            ]
        ),
    ),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    stream=st.booleans(),
)
def test_reply_of_any_bytes(gateway: Gateway, upstream: Upstream, text: bytes, cuts: list[int], stream: bool) -> None:
    """Row 12: for any bytes, split in any way, the answer is a typed 5xx and nothing is recorded."""
    ends = sorted({cut for cut in cuts if cut < len(text)} | {len(text)})
    upstream.plans = [Plan(pieces=[text[a:b] for a, b in zip([0, *ends], ends, strict=False)])]
    error = gateway.refused(stream=stream)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) in ((502, "engine_contract"), (502, "engine_error"))
    assert gateway.check() == {}


def test_event_larger_than_memory_should_hold(gateway: Gateway, upstream: Upstream) -> None:
    """Row 12: an event is given up at its limit, long before the engine has sent all of it."""
    piece = b"1" * (1 << 20)
    upstream.plans = [Plan(pieces=[b"data: ", *[piece] * (3 * MAX_EVENT_BYTES // len(piece))])]
    error = gateway.refused(stream=True)
    assert re.search(r"event that exceeds the limit of \d+ bytes", str(error))
    assert upstream.left.acquire(timeout=PATIENCE), "the engine sent all of it"
    assert gateway.check() == {}


CONTENT = b'{"id":"a","choices":[{"index":0,"finish_reason":%b,"token_ids":%b}]}'
UNREADABLE = {
    "invalid UTF-8 in a string that is read": CONTENT % (b'"\xff"', b"[1]"),
    "100,000 nested arrays": CONTENT % (b'"stop"', b"[" * 100_000 + b"]" * 100_000),
    "nested arrays in the prompt": b'{"choices":[{"prompt_token_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
}


@STREAM
@pytest.mark.parametrize("name", UNREADABLE)
def test_reply_that_cannot_be_read(gateway: Gateway, upstream: Upstream, name: str, stream: bool) -> None:
    """Row 12: bytes that make a JSON reader raise an unusual error."""
    body = UNREADABLE[name]
    upstream.plans = [Plan(pieces=[b"data: " + body + b"\n\n" if stream else body])]
    error = gateway.refused(stream=stream)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (502, "engine_contract")
    assert gateway.check() == {}


@STREAM
def test_token_id_of_6000_digits(gateway: Gateway, upstream: Upstream, stream: bool) -> None:
    """Row 12: int() refuses a text that long with its own error."""

    def lengthen(events: list[Any]) -> None:
        first(events)["token_ids"] = None
        first(events)["logprobs"]["tokens"][0] = "token_id:" + "1" * 6000

    upstream.plans = [Plan(tamper=lengthen)]
    error = gateway.refused(stream=stream)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (502, "engine_contract")


def test_error_with_a_name_that_is_not_utf8(gateway: Gateway, upstream: Upstream) -> None:
    """Row 12: the engine's own error, with a name that can't be repeated."""
    upstream.plans = [Plan(status=500, pieces=[b'{"error":{"type":"\xff\xfe"}}'])]
    error = gateway.refused()
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (502, "engine_error")


@pytest.mark.parametrize("stage", ["first_token", "total"])
def test_engine_that_sends_comments_without_end(serve: Serve, upstream: Upstream, stage: str) -> None:
    """Row 10: bytes without tokens do not extend a deadline."""
    gateway = serve(timeouts=Timeouts(**{"connect": 5.0, "first_token": 9.0, "total": 9.0, stage: 0.4}))
    upstream.plans = [Plan(pieces=[b": still there\n\n" * 1000] * 10**6)]
    error = gateway.refused(stream=True)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (504, "engine_timeout")
    assert f"timeout {stage}" in str(error)
    assert upstream.left.acquire(timeout=PATIENCE), "the engine was left sending"
