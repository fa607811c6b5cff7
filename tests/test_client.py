"""The client against a real gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

import tokentape
from tests.gateway.scripted import ScriptedEngine
from tests.records import bits
from tests.waiting import PATIENCE
from tokentape._session.files import read_trajectories
from tokentape._session.flatten import trajectories
from tokentape._session.jsonl import read_jsonl
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.client._calls import _with_subclasses, annotate_tokens, answered_error, give_reward
from tokentape.errors import (
    CommitRace,
    Conflict,
    GatewayUnavailable,
    InvalidRequest,
    LimitReached,
    NotFound,
    StoreUnavailable,
    TokentapeError,
    Unauthorized,
)
from tokentape.gateway._app import create_app
from tokentape.gateway._http import error_headers, error_response
from tokentape.gateway._keys import Keys, session_in_key
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore


@pytest.fixture
def client(gateway_url: str) -> Iterator[tokentape.Client]:
    with tokentape.Client(gateway_url) as client:
        yield client


def talk(base_url: str, turns: int = 2) -> None:
    """Take turns with the official client, as an agent does."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as agent:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"What is {turn} plus 4?"})
            reply = agent.chat.completions.create(model="any", messages=messages, max_tokens=12, seed=turn)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})


def test_agent_talks_and_the_trainer_gets_arrays(client: tokentape.Client, store: SqliteStore) -> None:
    session = client.session(metadata={"task": 7})
    talk(session.base_url)
    session.reward(1)
    (got,) = session.trajectories()
    stored = store.load_session(session.session_id)
    (kept,) = trajectories(Session(stored.info, stored.turns), stored.rewards)
    for name in ("token_ids", "provenance", "loss_mask", "logprobs", "completion_starts", "completion_ends"):
        mine, theirs = getattr(got, name), getattr(kept, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert (got.turns, got.reward, got.metadata) == ((0, 1), 1.0, {"task": 7})
    assert (got.verdict, got.weight_versions) == (kept.verdict, kept.weight_versions)


def test_session_with_a_known_id_is_resumed(client: tokentape.Client) -> None:
    talk(client.session("mine").base_url)
    statuses: list[int] = []
    client._http.event_hooks = {"response": [lambda response: statuses.append(response.status_code)]}
    assert len(client.session("mine").info().turns) == 2
    assert statuses == [200, 200]


def test_resuming_a_session_is_not_a_failed_request(gateway_url: str) -> None:
    wanted = {"session_id": "mine", "exist_ok": True}
    answers = [httpx2.post(f"{gateway_url}/sessions", json=wanted) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json() == answers[1].json()
    other = httpx2.post(f"{gateway_url}/sessions", json={**wanted, "metadata": {"task": 1}})
    assert other.status_code == 409


def test_session_with_metadata_is_resumed_by_its_id(client: tokentape.Client) -> None:
    client.session("mine", metadata={"task": 1})
    talk(client.session("mine").base_url)
    assert client.existing_session("mine").trajectories()[0].metadata == {"task": 1}


def test_session_of_another_key_is_a_conflict(renderer: Renderer, tmp_path: Path) -> None:
    keys = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob")}
    turns = Turns(ScriptedEngine(renderer, []), renderer, SqliteStore.open(tmp_path))
    with running(create_app(turns, model_id="tiny", keys=Keys(keys))) as url:
        with tokentape.Client(url, api_key=keys["alice"]) as alice:
            alice.session("mine")
        with tokentape.Client(url, api_key=keys["bob"]) as bob, pytest.raises(Conflict, match="mine"):
            bob.session("mine")


def test_an_admin_key_reads_the_session_of_another_key(renderer: Renderer, tmp_path: Path) -> None:
    keys = {name: f"{name}-0123456789abcdef" for name in ("alice", "root")}
    turns = Turns(ScriptedEngine(renderer, []), renderer, SqliteStore.open(tmp_path))
    with running(
        create_app(turns, model_id="tiny", keys=Keys({"alice": keys["alice"]}, {"root": keys["root"]}))
    ) as url:
        with tokentape.Client(url, api_key=keys["alice"]) as alice:
            own_key = alice.session("mine").api_key
        with tokentape.Client(url, api_key=keys["root"]) as root:
            assert root.session("mine").api_key == own_key
            assert not root.session("mine").info().turns


def test_unknown_session_is_an_error_and_is_not_created(client: tokentape.Client) -> None:
    talk(client.session("known").base_url)
    assert len(client.existing_session("known").trajectories()) == 1
    typo = client.existing_session("typo")
    for read in (typo.trajectories, typo.info, lambda: typo.reward(1.0), typo.delete):
        with pytest.raises(NotFound, match="'typo'"):
            read()

    async def read_later() -> None:
        async with tokentape.AsyncClient(client.base_url) as other:
            assert len(await other.existing_session("known").trajectories()) == 1
            with pytest.raises(NotFound, match="'typo'"):
                await other.existing_session("typo").trajectories()

    asyncio.run(read_later())
    assert [entry.session_id for entry in client.sessions()] == ["known"]


def test_metadata_for_a_known_session_is_a_conflict(client: tokentape.Client) -> None:
    client.session("mine")
    with pytest.raises(Conflict, match="mine"):
        client.session("mine", metadata={})


def test_sessions_are_listed_over_all_pages(client: tokentape.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(103):
        client.session(f"s{number}")
    assert [entry.session_id for entry in client.sessions()] == [f"s{number}" for number in range(103)]


def test_rewards_of_session_path_and_turn(client: tokentape.Client) -> None:
    session = client.session()
    talk(session.base_url)
    session.reward(-1.5, turn=1)
    (trajectory,) = session.trajectories()
    assert trajectory.reward is None
    np.testing.assert_array_equal(trajectory.turn_rewards, [np.nan, -1.5])
    session.reward(0.25)
    session.reward(0.5, leaf=1)
    assert session.trajectories()[0].reward == 0.5


def test_a_reward_for_a_session_without_turns_warns(client: tokentape.Client) -> None:
    talk(client.session("right").base_url)
    client.session("right").reward(1.0)
    with pytest.warns(UserWarning, match="'typo' got a reward but has no turns yet: is its id right") as caught:
        client.session("typo").reward(1.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert client.session("typo").info().rewards[0].value == 1.0


@pytest.mark.anyio
async def test_asynchronous_client_also_warns(gateway_url: str) -> None:
    async with tokentape.AsyncClient(gateway_url) as client:
        session = await client.session("typo")
        with pytest.warns(UserWarning, match="has no turns yet") as caught:
            await session.reward(1.0)
        assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", None])
def test_reward_that_is_not_finite_is_refused(client: tokentape.Client, value: Any) -> None:
    session = client.session()
    with pytest.raises(InvalidRequest, match=f"^reward must be a finite number, got {value!r}$"):
        session.reward(value)
    assert not session.info().rewards


def test_values_per_token_are_returned_with_the_trajectory(client: tokentape.Client) -> None:
    session = client.session()
    talk(session.base_url)
    (trajectory,) = session.trajectories()
    advantages = np.where(trajectory.loss_mask, 0.5, 0.0)
    assert session.annotate("advantages", advantages, leaf=trajectory.leaf) == [0, 1]
    start, end = trajectory.completion_starts[1], trajectory.completion_ends[1]
    assert session.annotate("values", [float(n) for n in range(end - start)], turn=1) == [1]
    (trajectory,) = session.trajectories()
    assert trajectory.columns["advantages"].tolist() == advantages.tolist()
    assert trajectory.columns["values"][start:end].tolist() == list(range(end - start))
    with pytest.raises(InvalidRequest, match="not 2-dimensional"):
        session.annotate("advantages", [[1.0]], turn=0)
    with pytest.raises(InvalidRequest, match="has 1 values"):
        session.annotate("advantages", [1.0], turn=0)


def test_trajectories_can_be_filtered_by_verdict(client: tokentape.Client) -> None:
    session = client.session()
    talk(session.base_url)
    (trajectory,) = session.trajectories()
    word = trajectory.verdict.split(":")[0]
    assert len(session.trajectories(verdict=[word])) == 1
    assert session.trajectories(verdict=["forked:sibling"]) == []


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_sessions_are_dropped_after_download_and_confirmation(
    client: tokentape.Client, tmp_path: Path, name: str
) -> None:
    for session_id in ("a", "b"):
        talk(client.session(session_id).base_url, turns=1)
    snapshot = client.take_snapshot(["a"])
    digest = snapshot.save(tmp_path / name)
    assert digest == snapshot.manifest().digest
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]
    read = read_trajectories(tmp_path / name) if name == "t.parquet" else list(read_jsonl(tmp_path / name))
    # Roles come from the whole session, so a snapshot has none.
    kept = [replace(trajectory, role="", lineage=()) for trajectory in client.session("a").trajectories()]
    assert bits(read) == bits(kept) == bits(list(snapshot.trajectories()))
    with pytest.raises(Conflict, match="not confirmed"):
        snapshot.drop()
    snapshot.confirm(digest)
    report = client.snapshot(snapshot.snapshot_id).drop()
    assert (report.dropped, report.kept) == (["a"], [])
    assert [session.session_id for session in client.sessions()] == ["b"]
    assert [snapshot.state for snapshot in client.snapshots()] == ["released"]
    client.take_snapshot(idle_seconds=0).release()


def test_damaged_download_is_not_kept(
    client: tokentape.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(client.session().base_url, turns=1)
    snapshot = client.take_snapshot()
    monkeypatch.setattr("tokentape.client._blocking.json_line", lambda value: b"something else")
    with pytest.raises(GatewayUnavailable, match="get it again"):
        snapshot.save(tmp_path / "t.parquet")
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_key_is_sent(turns: Turns) -> None:
    app = create_app(turns, model_id="tiny", keys=Keys({"mine": "key-of-mine-000000"}))
    with running(app) as url, tokentape.Client(url, api_key="key-of-mine-000000") as client:
        assert client.session("s").session_id == "s"
        with tokentape.Client(url) as unauthorized, pytest.raises(Unauthorized):
            unauthorized.session()


def test_errors_have_the_type_raised_by_the_gateway(client: tokentape.Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.session("not an id")
    assert caught.value.param == "session_id"
    session = client.session("s")
    with pytest.raises(NotFound, match="no turn 3"):
        session.reward(1, turn=3)
    session.delete()
    with pytest.raises(NotFound):
        session.info()


def test_unreachable_gateway_is_unavailable(gateway_url: str, turns: Turns) -> None:
    with (
        tokentape.Client("http://127.0.0.1:9", max_retries=0) as client,
        pytest.raises(GatewayUnavailable, match="is it running"),
    ):
        client.session()


def test_other_server_is_not_a_gateway(gateway_url: str) -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(502, text="<html>"))
    client = tokentape.Client(gateway_url, max_retries=0)
    client.close()
    client._http = httpx2.Client(base_url=gateway_url, transport=transport)
    with client, pytest.raises(GatewayUnavailable, match="502"):
        client.session()


def test_session_key_is_sufficient_for_an_agent(client: tokentape.Client) -> None:
    session = client.session()
    with OpenAI(base_url=f"{client.base_url}/v1", api_key=session.api_key, max_retries=0) as agent:
        agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert len(session.info().turns) == 1


def test_a_trainer_pauses_sampling_and_names_the_new_weights(client: tokentape.Client) -> None:
    assert client.pause() is True
    assert client.engine().paused is True
    client.resume("step-2")
    assert (client.engine().paused, client.engine().weight_version) == (False, "step-2")


def test_a_pause_may_take_longer_than_other_calls(renderer: Renderer, store: SqliteStore) -> None:
    engine = ScriptedEngine(renderer, ["a reply of several tokens<|im_end|>"], pause_after=3)
    with (
        running(create_app(Turns(engine, renderer, store), model_id="m")) as url,
        tokentape.Client(url, timeout=8.0) as client,
        ThreadPoolExecutor(1) as agent,
    ):
        under_way = agent.submit(talk, f"{url}/sessions/s/v1", 1)
        assert engine.called.wait(PATIENCE)
        try:
            assert client.pause(timeout=8.5) is False
        finally:
            engine.go_on.set()
            client.resume()
        under_way.result()


class Lossy(httpx2.BaseTransport):
    """Forward requests, and lose some: before they arrive, or the response after they arrived."""

    def __init__(self, *losses: str | None) -> None:
        self.losses = iter(losses)
        self.sent: list[str] = []
        self.inner = httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        loss = next(self.losses, None)
        self.sent.append(f"{request.method} {request.url.path}")
        if loss == "request":
            raise httpx2.ConnectError("refused")
        response = self.inner.handle_request(request)
        if loss is not None:
            response.read()
            response.close()
        if loss == "answer":
            raise httpx2.ReadError("reset")
        if loss is not None:
            return httpx2.Response(int(loss), text="a proxy's page")
        return response

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape.client._calls._FIRST_DELAY", 0.0)


def lossy(url: str, *losses: str | None) -> tuple[tokentape.Client, Lossy]:
    transport = Lossy(*losses)
    client = tokentape.Client(url)
    client.close()
    client._http = httpx2.Client(base_url=url, transport=transport)
    return client, transport


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("loss", ["request", "answer", "502", "503"])
def test_idempotent_requests_are_repeated(gateway_url: str, loss: str) -> None:
    client, transport = lossy(gateway_url, loss, None, loss, loss, None, loss, None)
    with client:
        session = client.session(metadata={"task": 7})
        session.reward(1.0)
        assert (session.info().metadata, session.info().rewards[-1].value) == ({"task": 7}, 1.0)
        assert len(list(client.sessions())) == 1
    assert transport.sent.count("POST /sessions") == 2


@pytest.mark.usefixtures("no_delay")
def test_snapshot_is_not_taken_twice(gateway_url: str) -> None:
    client, transport = lossy(gateway_url, None, "answer")
    with client:
        client.session()
        with pytest.raises(GatewayUnavailable):
            client.take_snapshot()
        assert len(client.snapshots()) == 1
    refused, transport = lossy(gateway_url, "request")
    with refused:
        refused.take_snapshot().release()
    assert transport.sent[:2] == ["POST /snapshots", "POST /snapshots"]


@pytest.mark.usefixtures("no_delay")
def test_deleting_twice_is_not_an_error(gateway_url: str) -> None:
    client, _ = lossy(gateway_url, None, "answer")
    with client:
        session = client.session()
        session.delete()
        with pytest.raises(NotFound):
            session.delete()


@pytest.mark.usefixtures("no_delay")
def test_gateway_that_stays_down_is_unavailable(gateway_url: str) -> None:
    client, transport = lossy(gateway_url, *["request"] * 20)
    with client, pytest.raises(GatewayUnavailable, match="is it running"):
        client.engine()
    assert len(transport.sent) == 6


class Answers(httpx2.BaseTransport):
    """Return prepared responses; the last one repeats."""

    def __init__(self, *answers: httpx2.Response | Exception) -> None:
        self.answers = list(answers)
        self.sent = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self.answers[min(self.sent, len(self.answers) - 1)]
        self.sent += 1
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)


def answered(*answers: httpx2.Response | Exception, **options: Any) -> tuple[tokentape.Client, Answers]:
    transport = Answers(*answers)
    client = tokentape.Client("http://gateway", **options)
    client.close()
    client._http = httpx2.Client(base_url=client.base_url, transport=transport)
    return client, transport


def refusal(error: TokentapeError, **headers: str) -> httpx2.Response:
    """Return the gateway's response for an error."""
    return httpx2.Response(
        error.status, headers=error_headers(error) | headers, content=bytes(error_response(error).body)
    )


ERRORS = sorted((kind for kind in _with_subclasses(TokentapeError) if "code" in vars(kind)), key=str)


class NoCode(InvalidRequest):
    """An error that is returned as its base class."""


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_round_trips(kind: type[TokentapeError]) -> None:
    error = kind("what was found")
    found = answered_error(refusal(error))
    assert (type(found), str(found)) == (kind, str(error))


@pytest.mark.usefixtures("no_delay")
def test_retry_header_of_the_gateway_is_respected() -> None:
    never, transport = answered(refusal(LimitReached("full", retry_after=3000), **{"x-should-retry": "false"}))
    with pytest.raises(LimitReached) as caught:
        never.engine()
    assert (transport.sent, caught.value.retry, caught.value.retry_after) == (1, False, 3000)
    # Later than the timeout of the call.
    later, transport = answered(refusal(LimitReached("full", retry_after=61)))
    with pytest.raises(LimitReached) as caught:
        later.engine()
    assert (transport.sent, caught.value.retry_after) == (1, 61)
    again, transport = answered(refusal(CommitRace("again")), httpx2.Response(200, json={"data": []}))
    assert (again.snapshots(), transport.sent) == ([], 2)


def test_retry_waits_as_long_as_the_gateway_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    client, _ = answered(refusal(LimitReached("full", retry_after=7)), httpx2.Response(200, json={"data": []}))
    assert client.snapshots() == []
    assert slept == [7]


def test_retries_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    class Hung(Answers):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            clock[0] += request.extensions["timeout"]["read"]
            return super().handle_request(request)

    for refused_first, timeout in ((False, 0.5), (True, 4.0), (False, 600.0)):
        clock[0] = 0.0
        losses = [httpx2.ConnectError("refused")] * refused_first
        client, _ = answered(*losses, httpx2.ReadTimeout("hung"), timeout=timeout)
        client._http = httpx2.Client(base_url=client.base_url, transport=Hung(*losses, httpx2.ReadTimeout("hung")))
        with pytest.raises(GatewayUnavailable):
            client.engine()
        assert clock[0] == pytest.approx(timeout, abs=0.1)


@pytest.mark.parametrize("url", ["localhost:8800", "127.0.0.1:8800", "ftp://127.0.0.1"])
def test_url_without_http_is_refused(url: str) -> None:
    for kind in (tokentape.Client, tokentape.AsyncClient):
        with pytest.raises(InvalidRequest, match="http://"):
            kind(url)


def test_openai_base_url_is_accepted_and_session_url_is_refused() -> None:
    for kind in (tokentape.Client, tokentape.AsyncClient):
        assert kind("http://127.0.0.1:8800/v1/").base_url == "http://127.0.0.1:8800"
        with pytest.raises(InvalidRequest, match="is a session's URL; expected the gateway's"):
            kind("http://127.0.0.1:8800/sessions/a/v1")


@pytest.mark.parametrize("key", ["a\nb", "\u00e4", "key\r"])
def test_key_invalid_in_headers_is_refused(key: str) -> None:
    for kind in (tokentape.Client, tokentape.AsyncClient):
        with pytest.raises(InvalidRequest, match="line break") as caught:
            kind(api_key=key)
        assert key not in str(caught.value)


@pytest.mark.parametrize("error", [httpx2.UnsupportedProtocol("gopher"), httpx2.LocalProtocolError("header")])
def test_unsendable_request_is_not_repeated(error: Exception) -> None:
    client, transport = answered(error)
    with pytest.raises(GatewayUnavailable):
        client.engine()
    assert transport.sent == 1


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("pin", [None, {"temperature": 0.5}])
def test_named_session_is_created_although_the_response_was_lost(gateway_url: str, pin: dict[str, Any] | None) -> None:
    client, transport = lossy(gateway_url, "answer")
    with client:
        assert client.session("mine", metadata={"task": 7}, pin=pin).info().metadata["task"] == 7
    assert transport.sent[:2] == ["POST /sessions"] * 2
    other, _ = lossy(gateway_url, "answer")
    with other, pytest.raises(Conflict, match="other metadata"):
        other.session("mine", metadata={"task": 8}, pin=pin)
    other, _ = lossy(gateway_url, "answer")
    with other, pytest.raises(Conflict, match="other metadata"):
        other.session("mine", metadata={"task": 7}, pin={"temperature": 0.25})


@pytest.mark.usefixtures("no_delay")
def test_refusal_by_the_gateway_is_not_a_lost_response() -> None:
    absent = refusal(NotFound("there is no session"))
    client, transport = answered(refusal(GatewayUnavailable("stopping")), absent)
    with pytest.raises(NotFound):
        tokentape.client.ClientSession(client, "s").delete()
    assert transport.sent == 2
    # A gateway without its database can't answer this.
    client, transport = answered(refusal(StoreUnavailable("lost")), absent)
    tokentape.client.ClientSession(client, "s").delete()
    assert transport.sent == 2


@pytest.mark.usefixtures("no_delay")
def test_a_snapshot_is_taken_and_dropped_after_a_refusal() -> None:
    stopping = refusal(GatewayUnavailable("stopping"))
    client, transport = answered(stopping, httpx2.Response(200, json={"dropped": ["a"], "kept": []}))
    assert client.snapshot(1).drop().dropped == ["a"]
    lost, transport = answered(httpx2.Response(503, text="a proxy's page"))
    for call in (lost.snapshot(1).drop, lost.take_snapshot):
        with pytest.raises(GatewayUnavailable):
            call()
    assert transport.sent == 2


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("loss", ["request", "answer", "503"])
def test_download_is_repeated_until_its_body_starts(gateway_url: str, tmp_path: Path, loss: str) -> None:
    client, transport = lossy(gateway_url, None, None, loss, None, loss, loss, None)
    with client:
        client.session()
        snapshot = client.take_snapshot()
        assert snapshot.save(tmp_path / "t.jsonl")
        assert list(snapshot.trajectories()) == []
    assert len(transport.sent) == 7


@pytest.mark.usefixtures("no_delay")
def test_interrupted_download_is_not_repeated(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"a line"
        raise httpx2.ReadError("reset")

    requests = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return httpx2.Response(200, headers={"x-tokentape-digest": "d"}, content=broken())

    client, _ = answered()
    client._http = httpx2.Client(base_url=client.base_url, transport=httpx2.MockTransport(answer))
    with pytest.raises(GatewayUnavailable):
        client.snapshot(1).save(tmp_path / "t.jsonl")
    assert len(requests) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_asynchronous_client_behaves_like_the_client(gateway_url: str, store: SqliteStore) -> None:
    async with tokentape.AsyncClient(gateway_url) as client:
        session = await client.session(metadata={"task": 7}, pin={"temperature": 0.5})
        assert session_in_key(await session.api_key()) == session.session_id
        await asyncio.to_thread(talk, session.base_url)
        await session.reward(1.0)
        (trajectory,) = await session.trajectories()
        assert trajectory.reward == 1.0
        assert await session.annotate("values", np.zeros(len(trajectory.token_ids)), leaf=trajectory.leaf) == [0, 1]
        state = await session.info()
        assert [turn.sampled_from and turn.sampled_from.temperature for turn in state.turns] == [0.5, 0.5]
        assert [entry.session_id async for entry in client.sessions()] == [session.session_id]
        assert await client.pause()
        assert (await client.engine()).paused
        await client.resume("step-2")
        assert (await client.engine()).weight_version == "step-2"
        with pytest.raises(Conflict):
            await client.session(session.session_id, metadata={})
        await session.delete()
        with pytest.raises(NotFound):
            await session.info()


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"a": float("nan")}, r"metadata\['a'\] is nan \(float\): expected None"),
        ({"a": {"b": [1, b"x"]}}, r"metadata\['a'\]\['b'\]\[1\] is b'x' \(bytes\)"),
        ({1: 2}, r"metadata has the key 1 \(int\): expected text, such as '1'"),
        ({"a": {2}}, r"metadata\['a'\] is \{2\} \(set\)"),
        ({"a": 10**20}, r"metadata\['a'\] is 1000.* \(int\)"),
        ({"a": np.float32("inf")}, r"metadata\['a'\] is inf \(float\)"),
        ({"a": np.arange(2)}, r"metadata\['a'\] is array\(\[0, 1\]\) \(ndarray\)"),
        ({"a": "\ud800"}, r"metadata\['a'\] is '\\ud800' \(str\)"),
        (["a"], r"metadata is \['a'\] \(list\): expected a dictionary"),
    ],
)
def test_metadata_that_json_would_change_is_refused_by_its_key(
    client: tokentape.Client, metadata: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        client.session(metadata=metadata)
    with pytest.raises(InvalidRequest, match=named):
        client.take_snapshot(metadata=metadata)


def test_numpy_scalars_are_metadata_and_settings(client: tokentape.Client) -> None:
    metadata = {"n": np.int64(3), np.str_("t"): np.str_("x"), "l": [np.float32(0.5), np.True_], "p": (1, 2)}
    session = client.session(metadata=metadata, pin={"temperature": np.float64(0.5)})
    expected = {"n": 3, "t": "x", "l": [0.5, True], "p": [1, 2]}
    sampling = {"tokentape_sampling": {"pin": {"temperature": 0.5}, "default": {}}}
    assert session.info().metadata == expected | sampling


@pytest.mark.parametrize("values", [["a"], ["1.5"], [1j], [[1], [1, 2]], [object()], np.array(["2026-01-01"], "M8[D]")])
def test_values_that_are_no_real_numbers_are_refused(client: tokentape.Client, values: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected one real number per token, found other values: "):
        client.existing_session("s").annotate("advantages", values, turn=0)


def test_an_empty_session_id_is_refused(client: tokentape.Client) -> None:
    for take_up in (client.session, client.existing_session):
        with pytest.raises(InvalidRequest, match="the session id is '': expected text"):
            take_up("")
    assert list(client.sessions()) == []


def test_a_verdict_may_be_one_name(client: tokentape.Client) -> None:
    session = client.session()
    talk(session.base_url)
    (one,) = session.trajectories()
    assert bits(session.trajectories(verdict=one.verdict)) == bits([one])
    assert session.trajectories(verdict="forked:sibling,captured") == []
    with pytest.raises(InvalidRequest, match="unknown verdict 'best'"):
        session.trajectories(verdict="best")


@pytest.mark.parametrize(
    "arguments", [{"timeout": 0}, {"timeout": None}, {"max_retries": -1}, {"api_key": ""}, {"api_key": 3}]
)
def test_an_unusable_argument_of_a_client_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(arguments)).replace("api_", "API ")):
        tokentape.Client("http://127.0.0.1:1", **arguments)


@pytest.mark.parametrize("url", [None, 3])
def test_a_url_that_is_no_text_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequest, match="begins with http"):
        tokentape.Client(url)


def test_a_session_id_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the session id is 7"):
        tokentape.Client("http://127.0.0.1:1").session(7)  # type: ignore[arg-type]


def test_a_turn_may_be_a_number_of_numpy() -> None:
    assert give_reward("s", 1.0, np.int64(2), None).body == b'{"value":1.0,"turn":2,"leaf":null}'  # type: ignore[arg-type]


def test_a_tensor_with_gradients_is_refused_as_values() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidRequest, match="detach"):
        annotate_tokens("s", "advantages", torch.ones(2, requires_grad=True), 0, None)
