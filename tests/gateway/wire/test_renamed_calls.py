"""Histories of harnesses that assign their own ids to tool calls, as Agno does, or names to replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Turn

QUESTION: Any = {"role": "user", "content": "What do pears and plums cost?"}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"item": {}}}}}
]


def call(item: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"item": "{item}"}}}}\n</tool_call>'


ONE = f"{call('pears')}<|im_end|>"
TWO = f"{call('pears')}\n{call('plums')}<|im_end|>"
ANSWER = "Pears are 12.<|im_end|>"


class Agent:
    """The official client in a session, and a record of its replies."""

    def __init__(self, client: OpenAI, store: SqliteStore, engine: ScriptedEngine) -> None:
        self._client = client
        self._store = store
        self.engine = engine

    def ask(self, messages: Sequence[Any], **more: Any) -> list[dict[str, Any]]:
        reply = self._client.chat.completions.create(model="m", messages=list(messages), tools=TOOLS, **more)
        return [choice.message.model_dump(exclude_none=True) for choice in reply.choices]

    def turns(self) -> tuple[Turn, ...]:
        return self._store.load_session("s").turns


@pytest.fixture
def agent(renderer: Renderer, store: SqliteStore) -> Iterator[Agent]:
    with ExitStack() as opened:
        engine = ScriptedEngine(renderer, [])
        url = opened.enter_context(running(create_app(Turns(engine, renderer, store), model_id="script")))
        client = OpenAI(base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0)
        yield Agent(opened.enter_context(client), store, engine)


def say(agent: Agent, *replies: str) -> None:
    agent.engine.replies += replies


def renamed(reply: dict[str, Any], *names: str) -> dict[str, Any]:
    calls = [{**call, "id": name} for call, name in zip(reply["tool_calls"], names, strict=True)]
    return {**reply, "tool_calls": calls}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_renamed_calls_continue_the_same_branch(agent: Agent) -> None:
    say(agent, ONE, TWO, ANSWER, ANSWER)
    history = [QUESTION]
    (reply,) = agent.ask(history)
    history += [renamed(reply, "call_0"), result("call_0", "12")]
    (reply,) = agent.ask(history)
    # The same id again, for another call.
    history += [renamed(reply, "call_0", "call_1"), result("call_0", "12"), result("call_1", "7")]
    (reply,) = agent.ask(history)
    history += [reply, {"role": "user", "content": "Thanks"}]
    agent.ask(history)
    turns = agent.turns()
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, None), (0, None), (1, None), (2, None)]
    prompts = [prompt for prompt, _ in agent.engine.requests]
    for before, prompt, turn in zip(prompts, prompts[1:], turns, strict=False):
        assert prompt[: len(before) + len(turn.completion_ids)] == before + turn.completion_ids.tolist()
    # The record has the ids that were given, also in the results.
    call_ids = [call["id"] for call in turns[1].reply["tool_calls"]]
    assert [message["tool_call_id"] for message in turns[2].messages] == call_ids


def test_ids_begin_with_call_where_the_template_prints_none(agent: Agent) -> None:
    say(agent, TWO)
    (reply,) = agent.ask([QUESTION])
    ids = [call["id"] for call in reply["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[0-9a-f]{9}", call_id) for call_id in ids)


def test_ids_that_a_template_prints_or_refuses_are_nine_letters_and_digits(
    renderer: Renderer, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Renderer, "render_text", lambda _, messages, *__, **___: json.dumps(list(messages)))
    assert Turns(ScriptedEngine(renderer, []), renderer, store)._prompts.call_prefix == ""


@pytest.mark.parametrize("rename", [False, True])
def test_swapped_results_never_match(agent: Agent, rename: bool) -> None:
    say(agent, TWO, ANSWER, ANSWER)
    (reply,) = agent.ask([QUESTION])
    ids = ["call_0", "call_1"] if rename else [call["id"] for call in reply["tool_calls"]]
    history = [QUESTION, renamed(reply, *ids), result(ids[0], "12"), result(ids[1], "7")]
    (answer,) = agent.ask(history)
    more = {"role": "user", "content": "Thanks"}
    agent.ask([*history[:2], result(ids[1], "12"), result(ids[0], "7"), answer, more])
    assert agent.turns()[2].parent != 1


def test_id_from_the_session_is_not_treated_as_renamed(agent: Agent) -> None:
    say(agent, ONE, ONE, ANSWER, ANSWER)
    first, other = agent.ask([QUESTION], n=2)
    ids = [reply["tool_calls"][0]["id"] for reply in (first, other)]
    (answer,) = agent.ask([QUESTION, other, result(ids[1], "12")])
    # The other branch's answer after this one's call: the harness mixed them, and means this one's call.
    agent.ask([QUESTION, first, result(ids[0], "12"), answer, {"role": "user", "content": "Thanks"}])
    assert agent.turns()[3].parent == 0


def test_renamed_calls_that_fit_two_turns_fork(agent: Agent) -> None:
    say(agent, ONE, ONE, ANSWER)
    first, _ = agent.ask([QUESTION], n=2)
    agent.ask([QUESTION, renamed(first, "call_0"), result("call_0", "12")])
    assert agent.turns()[2].parent is None


def spliced(agent: Agent, turn: Turn) -> bool:
    """Return whether the last prompt holds the sampled ids of a turn."""
    (prompt, _), ids = agent.engine.requests[-1], turn.completion_ids.tolist()
    return any(prompt[at : at + len(ids)] == ids for at in range(len(prompt)))


def test_renamed_calls_keep_their_sampled_ids_after_an_edit(agent: Agent) -> None:
    agent.engine.split_next = True
    say(agent, "Pears first. " + ONE, ANSWER, "Both. " + TWO, ANSWER)
    (reply,) = agent.ask([QUESTION])
    history = [{"role": "system", "content": "Be brief."}, QUESTION, renamed(reply, "call_0"), result("call_0", "12")]
    (answer,) = agent.ask(history)
    assert agent.turns()[1].parent is None
    assert spliced(agent, agent.turns()[0])
    # An edit in the middle, so that the request continues a turn and the renamed reply comes after it.
    agent.engine.split_next = True
    more = [*history, answer, {"role": "user", "content": "And plums?"}]
    (reply,) = agent.ask(more)
    more[-1] = {"role": "user", "content": "What about plums?"}
    agent.ask([*more, renamed(reply, "a", "b"), result("a", "12"), result("b", "7")])
    assert spliced(agent, agent.turns()[2])


@pytest.mark.parametrize("alike", [True, False])
def test_renamed_calls_that_fit_two_turns_keep_the_ids_of_both_or_neither(agent: Agent, alike: bool) -> None:
    say(agent, "Pears. " + ONE, "Pears. " + ONE, ANSWER)
    if not alike:
        agent.engine.split_next = True
    reply, _ = agent.ask([QUESTION], n=2)
    agent.ask([QUESTION, renamed(reply, "call_0"), result("call_0", "12")])
    first, second, _ = agent.turns()
    assert (first.completion_ids.tolist() == second.completion_ids.tolist()) == alike
    assert [spliced(agent, turn) for turn in (first, second)] == [alike, alike]


def test_a_call_with_the_id_of_another_keeps_no_sampled_ids(agent: Agent) -> None:
    agent.engine.split_next = True
    say(agent, "Pears. " + ONE, f"{call('plums')}<|im_end|>", ANSWER)
    (reply,) = agent.ask([QUESTION])
    (other,) = agent.ask([{"role": "user", "content": "And plums?"}])
    name = other["tool_calls"][0]["id"]
    agent.ask([{"role": "user", "content": "Edited"}, renamed(reply, name), result(name, "12")])
    assert not spliced(agent, agent.turns()[0])


@pytest.mark.parametrize("prints", [True, False])
def test_named_replies_continue_the_branch_unless_the_template_prints_names(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, prints: bool
) -> None:
    say(agent, ONE, ANSWER, ANSWER)
    (reply,) = agent.ask([QUESTION])
    call_id = reply["tool_calls"][0]["id"]
    history = [QUESTION, reply, result(call_id, "12")]
    (answer,) = agent.ask(history)
    if prints:
        monkeypatch.setattr(Renderer, "render_text", lambda _, messages, *__, **___: json.dumps(list(messages)))
    # Semantic Kernel writes the agent's name into the replies of earlier questions.
    named = [{**message, "name": "Seller"} for message in (reply, answer)]
    agent.ask([QUESTION, named[0], history[2], named[1], {"role": "user", "content": "Thanks"}])
    assert agent.turns()[2].parent == (None if prints else 1)


def test_a_named_reply_keeps_its_sampled_ids_after_an_edit(agent: Agent) -> None:
    agent.engine.split_next = True
    say(agent, "Pears first. " + ONE, ANSWER)
    (reply,) = agent.ask([QUESTION])
    system = {"role": "system", "content": "Be brief."}
    agent.ask([system, QUESTION, {**reply, "name": "Seller"}, result(reply["tool_calls"][0]["id"], "12")])
    assert spliced(agent, agent.turns()[0])


def test_ids_that_the_template_prints_are_compared(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_ids(self: Renderer, messages: Sequence[Any], *_: Any, **__: Any) -> str:
        return json.dumps(list(messages))

    agent.engine.split_next = True
    say(agent, "Pears. " + ONE, ANSWER)
    (reply,) = agent.ask([QUESTION])
    monkeypatch.setattr(Renderer, "render_text", with_ids)
    agent.ask([QUESTION, renamed(reply, "call_0"), result("call_0", "12")])
    assert agent.turns()[1].fork == "edited_history"
    assert not spliced(agent, agent.turns()[0])
