"""The client against a real gateway."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

import tokentape
from tokentape.errors import Conflict, GatewayUnavailable, InvalidRequest, NotFound
from tokentape.gateway.turns import Turns
from tokentape.session.flatten import trajectories
from tokentape.session.tree import Session
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


def test_session_of_a_known_id_is_taken_up(client: tokentape.Client) -> None:
    talk(client.session("mine").base_url)
    assert len(client.session("mine").info()["turns"]) == 2


def test_metadata_for_a_known_session_is_a_conflict(client: tokentape.Client) -> None:
    client.session("mine")
    with pytest.raises(Conflict, match="mine"):
        client.session("mine", metadata={})


def test_sessions_are_listed_over_all_pages(client: tokentape.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(103):
        client.session(f"s{number}")
    assert [session["session_id"] for session in client.sessions()] == [f"s{number}" for number in range(103)]


def test_reward_of_a_turn(client: tokentape.Client) -> None:
    session = client.session()
    talk(session.base_url)
    session.reward(-1.5, turn=1)
    assert session.trajectories()[0].reward == -1.5


def test_errors_have_the_type_that_the_gateway_raised(client: tokentape.Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.session("not an id")
    assert caught.value.param == "session_id"
    session = client.session("s")
    with pytest.raises(NotFound, match="no turn 3"):
        session.reward(1, turn=3)
    session.delete()
    with pytest.raises(NotFound):
        session.info()


def test_gateway_that_is_not_there_is_unavailable(gateway_url: str, turns: Turns) -> None:
    with tokentape.Client("http://127.0.0.1:9") as client, pytest.raises(GatewayUnavailable, match="is it running"):
        client.session()


def test_other_server_is_no_gateway(gateway_url: str) -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(502, text="<html>"))
    client = tokentape.Client(gateway_url)
    client.close()
    client._http = httpx2.Client(base_url=gateway_url, transport=transport)
    with client, pytest.raises(GatewayUnavailable, match="502"):
        client.session()
