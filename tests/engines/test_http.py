"""The HTTP client with a bare socket server, so that tests control every byte and every break."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import PATIENCE

from tokentape.engines import _http as http
from tokentape.engines._base import Timeouts
from tokentape.engines._http import HttpClient, SseReader
from tokentape.errors import (
    EngineContractError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    TokentapeError,
    TooLarge,
)
from tokentape.gateway._http import error_headers

SECRET = "the prompt's own words"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """Requests and connections of the socket server."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.heads: list[bytes] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Peer]:
    """Run a server that reads requests in sequence per connection and lets `script` answer each."""
    peer = Peer()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                peer.heads.append(head)
                peer.asked.set()
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if lengths:
                    await reader.readexactly(int(lengths[0].split(b":")[1]))
                await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            peer.left.set()
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield peer
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(*pieces: bytes, then: str = "close", pause: float = 0.0) -> Script:
    """Write the pieces, then close, reset or keep the connection, or stall until the client has left."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        if then == "stall":
            await reader.read()
        if then == "reset":
            await asyncio.sleep(0.02)  # let the pieces arrive; a reset discards bytes in transit
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()
        if then == "close":
            writer.close()

    return script


def reply(status: int, body: bytes = b"", *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 %d Status" % status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def call(script: Script, use: Callable[[HttpClient, Peer], Awaitable[Any]], **client: Any) -> Any:
    """Return the result of `use` with a client of a server that follows `script`."""

    async def main() -> Any:
        async with serving(script) as peer:
            http_client = HttpClient(peer.url, **client)
            try:
                return await use(http_client, peer)
            finally:
                await http_client.close()

    return asyncio.run(main())


async def post(client: HttpClient, peer: Peer) -> bytes:
    return await client.post("/sample", json.dumps({"prompt": SECRET}).encode(), {})


async def events(client: HttpClient, peer: Peer) -> list[bytes]:
    async with aclosing(client.arrivals("/sample", b"{}", {})) as arrivals:
        return [event async for several in arrivals for event in several]


@pytest.mark.parametrize(
    ("status", "error", "retry"),
    [
        (302, EngineError, False),
        (400, InvalidRequest, False),
        (401, EngineError, False),
        (404, EngineError, False),
        (408, EngineTimeout, True),
        (413, TooLarge, False),
        (422, InvalidRequest, False),
        (429, EngineUnavailable, True),
        (500, EngineError, True),
        (502, EngineUnavailable, True),
        (503, EngineUnavailable, True),
        (504, EngineTimeout, True),
    ],
)
@pytest.mark.parametrize("use", [post, events])
def test_each_status_maps_to_its_error_without_text_of_the_body(
    status: int, error: type[TokentapeError], retry: bool, use: Callable[..., Any]
) -> None:
    body = json.dumps({"error": {"message": SECRET, "type": "SomeError", "param": f"x: {SECRET}"}}).encode()
    with pytest.raises(TokentapeError) as caught:
        call(answering(reply(status, body)), use)
    assert type(caught.value) is error
    assert caught.value.retry is retry
    assert str(status) in str(caught.value)
    assert "SomeError" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_error_names_the_parameter_that_the_engine_names() -> None:
    body = b'{"error": {"type": "BadRequestError", "param": "logprobs"}}'
    with pytest.raises(InvalidRequest) as caught:
        call(answering(reply(400, body)), post)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("status", "message", "paused"),
    [
        (503, "Generation is paused. Please retry after it resumes.", True),  # vLLM 0.33
        (503, "The request queue is full.", False),
        (503, None, False),
        (429, "Generation is paused. Please retry after it resumes.", False),
    ],
)
def test_error_of_a_paused_engine_says_so(status: int, message: str | None, paused: bool) -> None:
    body = json.dumps({"error": {"message": message, "type": "ServiceUnavailableError", "code": status}}).encode()
    with pytest.raises(EngineUnavailable) as caught:
        call(answering(reply(status, body)), post)
    assert caught.value.paused is paused


def test_error_page_that_is_not_json_raises_the_error_of_its_status() -> None:
    with pytest.raises(EngineUnavailable):
        call(answering(reply(503, b"<html>\xff")), post)


@pytest.mark.parametrize("then", ["stalls", "breaks off"])
def test_missing_error_body_raises_the_error_of_its_status(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_ERROR_BODY_SECONDS", 0.05)

    async def half(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Status\r\ncontent-length: 100\r\nretry-after: 7\r\n\r\n{")
        await writer.drain()
        if then == "breaks off":
            writer.transport.abort()

    with pytest.raises(EngineUnavailable, match="answered 503") as caught:
        call(half, post, timeouts=Timeouts(total=PATIENCE))
    assert caught.value.retry_after == 7


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"12", 12),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0),
        (b"999999999", 24 * 3600),
        (b"soon", None),
        (b"-1", None),
        (b"Wed, 99 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_client_waits_as_long_as_retry_after(status: int, value: bytes, seconds: float | None) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        call(answering(reply(status, b"", b"retry-after: " + value)), post)
    assert caught.value.retry_after == seconds
    assert error_headers(caught.value).get("retry-after") == (None if seconds is None else str(seconds))


@pytest.mark.parametrize("use", [post, events])
def test_compressed_reply_is_a_contract_error(use: Callable[..., Any]) -> None:
    compressed = reply(200, gzip.compress(b"{}"), b"content-encoding: gzip")
    with pytest.raises(EngineContractError, match=r"content-encoding \(gzip\)"):
        call(answering(compressed), use)
    assert call(answering(reply(200, b"{}", b"content-encoding: Identity")), post) == b"{}"


def test_a_redirect_is_not_followed() -> None:
    async def use(client: HttpClient, peer: Peer) -> int:
        with pytest.raises(EngineError, match="redirects are not followed"):
            await post(client, peer)
        return len(peer.heads)

    assert call(answering(reply(307, b"", b"location: /elsewhere"), then="keep"), use) == 1


def test_refused_connection_is_engine_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def main() -> None:
        client = HttpClient(url)
        try:
            await client.get("/health")
        finally:
            await client.close()

    with pytest.raises(EngineUnavailable, match="is it running"):
        asyncio.run(main())


def test_a_connection_that_drops_before_the_answer_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match=r"before it answered.*does it speak http\?"):
        call(answering(), post)


def test_dropped_connection_of_a_server_that_answered_before_asks_for_another_attempt() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(scripts)(reader, writer)

    async def use(client: HttpClient, peer: Peer) -> None:
        await post(client, peer)
        await post(client, peer)

    scripts = iter([answering(reply(200, b"ok"), then="keep"), answering()])
    with pytest.raises(EngineUnavailable, match=r"before it answered.*send the request again"):
        call(script, use)


@pytest.mark.parametrize("then", ["reset", "close"])
def test_incomplete_reply_is_an_error(then: str) -> None:
    cut_off = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    with pytest.raises(EngineError, match="broke during") as caught:
        call(answering(cut_off, then=then), post)
    assert type(caught.value) is EngineError


def test_a_stream_that_is_reset_is_an_error_after_the_events_before_it() -> None:
    seen = []

    async def use(client: HttpClient, peer: Peer) -> None:
        async with aclosing(client.arrivals("/sample", b"{}", {})) as arrivals:
            async for several in arrivals:
                seen.extend(several)

    with pytest.raises(EngineError, match="broke during"):
        call(answering(STREAM, b"data: 1\n\n", then="reset"), use)
    assert seen == [b"1"]


def test_a_stream_that_ends_within_an_event_is_an_error() -> None:
    with pytest.raises(EngineError, match="ended within an event"):
        call(answering(STREAM + b"data: 1\n\ndata: 2\n"), events)


@pytest.mark.parametrize(
    ("stage", "use", "sent"),
    [
        ("first_token", events, []),
        ("first_token", events, [STREAM]),
        ("first_token", events, [STREAM, b": ping\n\n"]),
        ("between_tokens", events, [STREAM, b"data: 1\n\n"]),
        ("total", events, [STREAM, b"data: 1\n\n"]),
        ("total", post, []),
        ("total", post, [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"]),
    ],
)
def test_silence_ends_in_a_timeout_that_names_its_stage(stage: str, use: Callable[..., Any], sent: list[bytes]) -> None:
    with pytest.raises(EngineTimeout, match=f"timeout {stage}"):
        call(answering(*sent, then="stall"), use, timeouts=Timeouts(**{stage: 0.1}))


def test_slow_reader_does_not_use_up_the_timeout() -> None:
    async def use(client: HttpClient, peer: Peer) -> list[bytes]:
        seen = []
        async with aclosing(client.arrivals("/sample", b"{}", {})) as arrivals:
            async for several in arrivals:
                seen.extend(several)
                await asyncio.sleep(2.5)
        return seen

    sent = [STREAM, b"data: 1\n\n", b"data: 2\n\n"]
    assert call(answering(*sent), use, timeouts=Timeouts(between_tokens=2.0)) == [b"1", b"2"]


def test_steady_stream_does_not_time_out() -> None:
    sent = [b"data: %d\n\n" % n for n in range(8)]
    script = answering(STREAM, *sent, pause=0.4)
    assert len(call(script, events, timeouts=Timeouts(first_token=PATIENCE, between_tokens=2.0))) == len(sent)


def test_stalled_stream_times_out() -> None:
    sent = [b"data: %d\n\n" % n for n in range(4)]
    script = answering(STREAM, *sent, then="stall", pause=0.1)
    with pytest.raises(EngineTimeout, match="timeout between_tokens"):
        call(script, events, timeouts=Timeouts(first_token=PATIENCE, between_tokens=0.3))


def test_events_that_arrive_together_are_yielded_together() -> None:
    arrived = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + b"data: 1\n\ndata: 2\n\n")
        await arrived.wait()
        await answering(b"data: 3\n\n")(reader, writer)

    async def use(client: HttpClient, peer: Peer) -> list[list[bytes]]:
        together = []
        async with aclosing(client.arrivals("/sample", b"{}", {})) as arrivals:
            async for several in arrivals:
                together.append(several)
                arrived.set()
        return together

    assert call(script, use) == [[b"1", b"2"], [b"3"]]


def test_abandoning_a_stream_closes_its_connection() -> None:
    async def use(client: HttpClient, peer: Peer) -> None:
        async with aclosing(client.arrivals("/sample", b"{}", {})) as arrivals:
            assert await anext(arrivals) == [b"1"]
            assert not peer.left.is_set()
        await asyncio.wait_for(peer.left.wait(), PATIENCE)

    call(answering(STREAM, b"data: 1\n\n", then="stall"), use)


def test_cancelling_a_call_closes_its_connection() -> None:
    async def use(client: HttpClient, peer: Peer) -> None:
        task = asyncio.create_task(post(client, peer))
        await peer.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(peer.left.wait(), PATIENCE)

    call(answering(then="stall"), use)


def test_sequential_calls_share_a_connection() -> None:
    async def use(client: HttpClient, peer: Peer) -> int:
        assert [await post(client, peer) for _ in range(3)] == [b"ok"] * 3
        return peer.connections

    assert call(answering(reply(200, b"ok"), then="keep"), use) == 1


def test_too_large_reply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 10)
    with pytest.raises(EngineContractError, match="exceeds the limit of 10 bytes"):
        call(answering(reply(200, b"x" * 11)), post)


def test_closing_the_client_ends_running_calls_and_refuses_new_ones() -> None:
    async def use(client: HttpClient, peer: Peer) -> None:
        task = asyncio.create_task(events(client, peer))
        await peer.asked.wait()
        await client.close()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineUnavailable, match="closed"):
            await post(client, peer)
        await client.close()

    call(answering(STREAM, b"data: 1\n\n", then="stall"), use)


def test_the_key_is_a_bearer_token_and_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def use(client: HttpClient, peer: Peer) -> bytes:
        await client.get("/version")
        return peer.heads[0]

    head = call(answering(reply(200, b"ok")), use, api_key="sk-1")
    assert b"\r\nauthorization: Bearer sk-1\r\n" in head.replace(b"Authorization", b"authorization")
    assert b"accept-encoding: identity" in head.lower()


@pytest.mark.parametrize("key", ["", "two\nlines", "naïve"])
def test_key_invalid_in_headers_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(InvalidRequest, match="api_key") as caught:
        HttpClient("http://127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://user:pw@host",
        "http://host?x=1",
        "http://host:port",
        "http://a..b",
    ],
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="http://host:port"):
        HttpClient(url)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_v1_of_openai_clients_is_dropped_from_the_address(suffix: str) -> None:
    async def main() -> bytes:
        async with serving(answering(reply(200, b"ok"))) as peer:
            client = HttpClient(peer.url + suffix)
            await client.get("/version")
            await client.close()
            return peer.heads[0]

    assert asyncio.run(main()).startswith(b"GET /version ")


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_positive_number(value: float) -> None:
    with pytest.raises(InvalidRequest, match="first_token"):
        Timeouts(first_token=value)


def slow_events(stream: bytes) -> list[bytes]:
    """Parse the events of a whole stream in a simple way."""
    lines = stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events, data = [], []
    for line in lines[:-1]:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif line == "" and data:
            events.append("\n".join(data).encode())
            data = []
    return events


LINES = st.one_of(
    st.sampled_from(["", "", ": ping", "event: message", "id: 7", "retry: 10", ":"]),
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8).map(
        lambda text: f"data: {text}"
    ),
    st.just("data:[DONE]"),
)


@given(
    st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=20),
    st.lists(st.integers(min_value=0, max_value=200), max_size=20),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(lines: list[tuple[str, str]], cuts: list[int]) -> None:
    stream = "".join(line + end for line, end in lines).encode()
    if stream.endswith(b"\r"):
        stream += b"\n"
    ends = [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    pieces = [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    single_bytes = [stream[index : index + 1] for index in range(len(stream))]
    for cut in (pieces, single_bytes, [stream]):
        reader = SseReader()
        assert [event for piece in cut for event in reader.feed(piece)] == slow_events(stream)


def test_too_large_event_is_refused_before_it_is_complete() -> None:
    reader = SseReader(max_event_bytes=20)
    assert reader.feed(b"data: 0123456789\n\n" * 3) == [b"0123456789"] * 3
    assert reader.feed(b"data: 01\ndata: 23\n") == []
    with pytest.raises(EngineContractError, match="exceeds the limit of 20 bytes"):
        reader.feed(b"data: 45")


@pytest.mark.parametrize("line", [b"<html>", b'{"error": 1}', b"Data: 1"])
def test_line_outside_the_event_stream_format_is_refused(line: bytes) -> None:
    with pytest.raises(EngineContractError, match="not a stream of server-sent events"):
        SseReader().feed(line + b"\n")


def test_data_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(EngineContractError, match="not UTF-8"):
        SseReader().feed(b"data: \xff\n\n")


def test_router_token_is_sent_with_the_session_s_next_call() -> None:
    async def use(client: HttpClient, peer: Peer) -> list[bytes]:
        for session in ({"x-session-id": "a"}, {"x-session-id": "a"}, {"x-session-id": "b"}, {}):
            await client.post("/sample", b"{}", session)
        return peer.heads

    first, second, other, none = call(answering(reply(200, b"{}", b"x-session-token: cG9k"), then="keep"), use)
    assert b"x-session-token: cG9k" in second
    assert all(b"x-session-token" not in head for head in (first, other, none))
