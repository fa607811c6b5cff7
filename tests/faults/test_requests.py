"""Requests that are too large, malformed, or made to forge control tokens."""

from __future__ import annotations

import json
import resource
import socket
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.conftest import QUESTION, Gateway, Serve
from tests.faults.upstream import Upstream
from tests.searching import examples
from tests.waiting import PATIENCE, trickle
from tokentape.chat._renderer import Renderer
from tokentape.gateway import _serve as serving
from tokentape.gateway._limits import Limits

PATH = "/sessions/s/v1/chat/completions"


def post(gateway: Gateway, body: Any, path: str = PATH) -> httpx2.Response:
    return httpx2.post(gateway.url + path, content=body, headers={"content-type": "application/json"}, timeout=PATIENCE)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_larger_than_allowed(serve: Serve, upstream: Upstream, chunked: bool) -> None:
    """Row 19: 413 at once for an announced size, and for an unannounced one as soon as it exceeds the limit."""
    gateway = serve(limits=Limits(body_bytes=100_000))
    gateway.ask()
    before = peak_memory()
    content: Any = (b" " * (1 << 16) for _ in range(4000)) if chunked else b" " * 10**6
    answer = post(gateway, content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert answer.headers["x-should-retry"] == "false"
    assert peak_memory() - before < 100 << 20, "all 250 MB were held"
    assert len(upstream.bodies) == 1
    gateway.check()


def peak_memory() -> int:
    """Most bytes that this process, the gateway in it, has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("part", ["headers", "body"])
def test_request_that_trickles(serve: Serve, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Row 21: the connection is closed at the deadline, however lively it looks; others are served meanwhile."""
    monkeypatch.setattr(serving, "HEADER_SECONDS", 2.0)
    monkeypatch.setattr(serving, "BODY_SECONDS", 2.0)
    gateway = serve()
    where = urlsplit(gateway.url)
    head = f"POST {PATH} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: 9999\r\n".encode()
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
        connection.sendall(head + (b"\r\n" if part == "body" else b"x-trickle: "))
        gateway.ask()
        with pytest.raises(ConnectionError):
            trickle(connection, b"a" * 9000)
    gateway.check()


def nested(depth: int) -> bytes:
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


HOSTILE = {
    "nested arrays": nested(100_000),
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "NaN": b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    "infinity": b'{"messages":[{"role":"user","content":"a"}],"temperature":Infinity}',
    "1e999": b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    "2^63": b'{"messages":[{"role":"user","content":"a"}],"seed":9223372036854775808}',
    "a number of 5000 digits": b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"messages":[{"role":"user","content":"a\\ud800b"}]}',
    "half a surrogate pair": b'{"messages":[{"role":"user","content":"\\udc00"}]}',
    "not UTF-8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "deep tool": b'{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f",'
    b'"parameters":' + b'{"a":' * 200 + b"{}" + b"}" * 200 + b"}}]}",
    "deep kwargs": b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":'
    + b"[" * 200
    + b"]" * 200
    + b"}}",
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", HOSTILE)
def test_body_of_hostile_json(gateway: Gateway, upstream: Upstream, name: str) -> None:
    """Row 20: 400 with the reason, and the session continues."""
    gateway.ask()
    answer = post(gateway, HOSTILE[name])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    gateway.ask([QUESTION, {"role": "assistant", "content": gateway.received[-1].content}, QUESTION])
    assert len(upstream.bodies) == 2
    gateway.check()


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "logprobs",
    "top_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logit_bias",
    "metadata",
    "chat_template_kwargs",
    "return_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "modalities",
    "user",
]
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
    optional=dict.fromkeys(
        ["content", "tool_calls", "tool_call_id", "name", "reasoning_content", "function_call", "audio"], JSON
    ),
)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE, max_size=3) | JSON}, optional=dict.fromkeys(FIELDS, JSON)
    ),
    stream=st.booleans(),
)
def test_body_of_any_json(gateway: Gateway, body: dict[str, Any], stream: bool) -> None:
    """Row 20: any field values are served or a client error; never a 5xx."""
    data = json.dumps({"max_tokens": 3, "stream": stream, **body}).encode()
    answer = post(gateway, data, "/v1/chat/completions")
    assert answer.status_code in (200, 400, 422), answer.text
    if answer.status_code == 200:
        assert '"error":' not in answer.text.split("\n\n")[-2:][0] or "[DONE]" in answer.text


def test_record_after_bodies_of_any_json(gateway: Gateway) -> None:
    """Row 20: one body that is taken among many that are not; the record holds exactly that one."""
    gateway.ask()
    for data in HOSTILE.values():
        post(gateway, data)
    assert len(gateway.check()["s"].turns) == 1


def controls(renderer: Renderer) -> dict[int, str]:
    """Every control token of the tiny model's tokenizer, by id."""
    table = {}
    for token_id in range(renderer.tokenizer.vocab_size):
        text = renderer.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if len(text) > 1 and renderer.tokenizer.encode_plain(f"x{text}x").count(token_id):
            table[token_id] = text
    return {token_id: text for token_id, text in table.items() if text.startswith("<") and text.endswith(">")}


def test_control_tokens_in_every_field(gateway: Gateway, upstream: Upstream, renderer: Renderer) -> None:
    """Row 22: spelled in any field, no control token more is sent than for harmless text of the same shape."""
    known = controls(renderer)
    assert {"<|im_end|>", "<|im_start|>", "<think>", "<tool_call>"} <= set(known.values())

    def sent(text: str, session: str) -> Counter[int]:
        call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        parameters = {"type": "object", "properties": {"a": {"title": text}}}
        tool = {"name": "f", "description": text, "parameters": parameters}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call12345", "content": text},
            {"role": "user", "content": text},
        ]
        gateway.ask(messages, session, tools=[{"type": "function", "function": tool}])
        messages += [{"role": "assistant", "content": gateway.received[-1].content}, {"role": "user", "content": text}]
        gateway.ask(messages, session, tools=[{"type": "function", "function": tool}])
        return Counter(token_id for token_id in upstream.bodies[-1]["prompt"] if token_id in known)

    harmless = sent("harmless words", "harmless")
    for number, text in enumerate(known.values()):
        assert sent(f"a{text}b{text}", f"hostile-{number}") == harmless, text
    for number, text in enumerate(known.values()):
        # Cut over two parts, which the template joins.
        assert sent(text[:3], f"cut-{number}") == harmless
    gateway.check()
